//! The command line (layer 9): arguments -> `Config` -> run.
//!
//! `args` is what was typed, `options` the one table of mount options, `words` the words behind
//! `-o`, `meaning` turns them into a `Config`; `run` mounts; one module for each other command;
//! `helper` is this program as mount(8) calls it. No state, no locks. Invariant: a command prints
//! its result, or exactly one line that says what, where, and what to do.

pub mod args;
pub mod doctor;
pub mod failure;
pub mod flush;
pub mod help;
pub mod helper;
pub mod journal;
pub mod list;
pub mod man;
pub mod meaning;
pub mod memory;
pub mod options;
pub mod output;
pub mod overlay;
pub mod place;
pub mod run;
pub mod set;
pub mod stat;
pub mod trace;
pub mod umount;
pub mod words;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use self::args::{Action, Cli, MountArgs};
use self::failure::{Failure, Outcome};
use self::helper::Helper;
use self::meaning::Machine;

/// What mount(8) wants to hear from a helper that failed.
const HELPER_FAILED: u8 = 32;

/// The whole program.
pub fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let program = args.next().unwrap_or_default();
    if let Some(helper) = Helper::of(&program) {
        return match helper.run(args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => report(&failure, HELPER_FAILED),
        };
    }
    let typed = args::normalize(std::iter::once(OsString::from("bcachefs-fuse")).chain(args));
    let cli = match Cli::try_parse_from(typed) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match act(cli.action) {
        Ok(code) => code,
        Err(failure) => report(&failure, if failure.usage { 2 } else { 1 }),
    }
}

fn act(action: Action) -> Outcome<ExitCode> {
    let done = match action {
        Action::Mount(args) => mount(&args),
        Action::Flush(args) => flush::run(&args),
        Action::Umount(args) => umount::run(&args),
        Action::Stat(args) => stat::run(&args),
        Action::Set(args) => set::run(&args),
        Action::Diff(args) => overlay::diff(&args),
        Action::Revert(args) => overlay::revert(&args),
        Action::List(args) => list::run(&args),
        Action::Trace(args) => trace::run(&args),
        Action::Check(args) => return Ok(journal::check(&args)),
        Action::Journal(action) => journal::run(&action),
        Action::Doctor(args) => return Ok(doctor::doctor(args.source.as_deref(), args.json)),
        Action::Completions { shell } => output::print(&man::completions(shell)).map(drop),
        Action::Man => man::page().and_then(|page| output::print(&page).map(drop)),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn mount(args: &MountArgs) -> Outcome<()> {
    let words = args.options.words()?;
    if words.remount {
        return helper::remount(&args.source, &args.mountpoint, &words, false);
    }
    let machine = Machine::this();
    let (foreground, single) = (args.foreground, args.single_thread);
    let config =
        meaning::config(&args.source, &args.mountpoint, &words, foreground, single, machine)?;
    run::mount(config)
}

fn report(failure: &Failure, code: u8) -> ExitCode {
    eprintln!("{failure}");
    ExitCode::from(code)
}

/// clap's answer: help and version as they are, an error as one line.
fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let text = match error.kind() {
        // clap names the subcommand in it.
        ErrorKind::DisplayVersion => concat!("bcachefs-fuse ", env!("CARGO_PKG_VERSION"), "\n"),
        _ => &text,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match output::print(text) {
            Ok(_) => ExitCode::SUCCESS,
            Err(failure) => report(&failure, 1),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            eprint!("{text}");
            ExitCode::from(2)
        }
        _ => report(&usage_line(text), 2),
    }
}

/// "error: WHAT\n\n  tip: HINT\n\nUsage: ..." as one line.
fn usage_line(text: &str) -> Failure {
    let joined = |words: &str| words.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut paragraphs = text.split("\n\n");
    let what = paragraphs.next().unwrap_or_default().trim_start_matches("error: ").to_string();
    let tip = text.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    let command = text.lines().find_map(|line| line.strip_prefix("Usage: "));
    let command: Vec<&str> = command
        .unwrap_or("bcachefs-fuse")
        .split_whitespace()
        .take_while(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        .collect();
    let hint = match tip {
        Some(tip) => tip.to_string(),
        None => format!("see {} --help", command.join(" ")),
    };
    Failure::usage("command line", joined(&what), joined(&hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(command: &str) -> String {
        let args = command.split(' ').map(OsString::from);
        let error = Cli::try_parse_from(args::normalize(args)).unwrap_err();
        usage_line(&error.render().to_string()).to_string()
    }

    #[test]
    fn a_wrong_command_line_is_answered_in_one_line() {
        assert_eq!(
            line("bcachefs-fuse mount a"),
            "bcachefs-fuse: command line: the following required arguments were not provided: \
             <MOUNTPOINT>: see bcachefs-fuse mount --help"
        );
        assert_eq!(
            line("bcachefs-fuse mount a b --chache 1M"),
            "bcachefs-fuse: command line: unexpected argument '--chache' found: a similar \
             argument exists: '--cache'"
        );
        for command in ["bcachefs-fuse stta", "bcachefs-fuse stat --json --blocks a"] {
            assert!(!line(command).contains('\n'));
        }
    }
}
