//! The manual page bcachefs-fuse(1) and the shell completions (layer 9), from the same tables as
//! `--help`.

use std::fmt::Write;

use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;

use crate::cli::args::Cli;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::help;
use crate::cli::options::{OPTIONS, OptionKind};

/// The completion script of a shell.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "bcachefs-fuse", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The manual page, in roff.
pub fn page() -> Outcome<String> {
    let mut command = Cli::command();
    command.build();
    let page = clap_mangen::Man::new(command.clone()).title("BCACHEFS-FUSE").section("1");
    let mut roff = Vec::new();
    let rendered = page
        .render_title(&mut roff)
        .and_then(|()| page.render_name_section(&mut roff))
        .and_then(|()| page.render_description_section(&mut roff));
    rendered.map_err(|error| Failure::new("write", "manual page", error))?;
    let mut text = String::from_utf8_lossy(&roff).into_owned();
    text.push_str(".SH COMMANDS\n");
    for subcommand in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        section(&mut text, subcommand, subcommand.get_name());
        for inner in subcommand.get_subcommands() {
            section(&mut text, inner, &format!("{} {}", subcommand.get_name(), inner.get_name()));
        }
    }
    options(&mut text);
    for (title, body) in SECTIONS {
        let _ = writeln!(text, ".SH {title}\n{}", body.trim_end());
    }
    Ok(text)
}

fn section(text: &mut String, command: &Command, name: &str) {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let _ = writeln!(text, ".SS {}", escape(name));
    let _ = writeln!(text, ".B {}\n.PP", escape(usage));
    if let Some(about) = command.get_about() {
        let _ = writeln!(text, "{}.", escape(&about.to_string()));
    }
    let own = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        !arg.is_hide_set() && id != "help" && id != "version" && !in_table(id)
    };
    for arg in command.get_arguments().filter(own) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let short = match (arg.get_short(), arg.get_long()) {
            (Some(short), Some(_)) => format!("-{short}, "),
            _ => String::new(),
        };
        let name = escape(&format!("{short}{arg}"));
        let _ = writeln!(text, ".TP\n.B {name}\n{}.", escape(&help));
    }
    if let Some(long) = command.get_after_long_help() {
        let _ = writeln!(text, ".PP\n.nf\n{}\n.fi", escape(&long.to_string()));
    }
}

fn in_table(id: &str) -> bool {
    OPTIONS.iter().any(|option| option.name == id)
}

fn options(text: &mut String) {
    text.push_str(".SH MOUNT OPTIONS\n");
    text.push_str(
        "Each is typed as \\fB\\-\\-name\\fR or as \\fB\\-o name\\fR[=value], with \\- or _.\n\
         Those marked live can be changed by \\fBset\\fR while mounted.\n",
    );
    for option in OPTIONS.iter().filter(|option| !option.hidden) {
        let short = option.short.map(|short| format!("-{short}, ")).unwrap_or_default();
        let long = option.long();
        let value = match option.kind {
            OptionKind::Flag => "[=yes|no]".to_string(),
            kind => format!("={}", kind.placeholder()),
        };
        let live = if option.live { " Live." } else { "" };
        let _ = writeln!(text, ".TP\n.B {}", escape(&format!("{short}--{long}{value}")));
        let default = format!("{}. Default: {}.{live}", option.help, option.default);
        let _ = writeln!(text, "{}", escape(&default));
    }
    let _ = writeln!(text, ".PP\n{}", escape(help::STANDARD_WORDS));
}

/// Text for roff: no accidental requests, escapes or hyphens.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for (index, line) in text.lines().enumerate() {
        if index > 0 {
            escaped.push('\n');
        }
        if line.starts_with('.') || line.starts_with('\'') {
            escaped.push_str("\\&");
        }
        escaped.push_str(&line.replace('\\', "\\e").replace('-', "\\-"));
    }
    escaped
}

const SECTIONS: &[(&str, &str)] = &[
    ("FILES", help::MAN_FILES),
    ("EXIT STATUS", help::MAN_EXIT),
    ("ENVIRONMENT", help::MAN_ENVIRONMENT),
    ("EXAMPLES", help::MAN_EXAMPLES),
    ("SEE ALSO", help::MAN_SEE_ALSO),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_every_command_and_option() {
        let page = page().unwrap();
        for command in [
            "mount",
            "flush",
            "umount",
            "stat",
            "set",
            "list",
            "trace",
            "check",
            "journal dump",
            "journal replay",
            "journal abandon",
            "doctor",
            "completions",
        ] {
            assert!(page.contains(&format!("\n.SS {command}\n")), "{command}");
        }
        for option in OPTIONS {
            let name = escape(&option.long());
            assert_eq!(page.contains(&format!("\\-\\-{name}")), !option.hidden, "{name}");
        }
        for (title, _) in SECTIONS {
            assert!(page.contains(&format!("\n.SH {title}\n")), "{title}");
        }
        assert!(!page.contains("\n.SS man\n"));
        assert!(page.is_ascii());
    }

    #[test]
    fn completions_know_the_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            assert!(script.contains("sequential-cutoff") && script.contains("prometheus"));
        }
    }

    #[test]
    fn text_cannot_become_a_request() {
        assert_eq!(escape(".TH\na-b\\c"), "\\&.TH\na\\-b\\ec");
    }
}
