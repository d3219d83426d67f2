//! temp
use bcachefs_fuse::cli::{args, meaning, run};
use clap::Parser;
fn main() -> std::process::ExitCode {
    let cli = args::Cli::parse_from(args::normalize(std::env::args_os()));
    let r = match cli.action {
        args::Action::Mount(m) => m
            .options
            .words()
            .and_then(|w| {
                meaning::config(
                    &m.source,
                    &m.mountpoint,
                    &w,
                    m.foreground,
                    m.single_thread,
                    meaning::Machine::this(),
                )
            })
            .and_then(run::mount),
        args::Action::Doctor(d) => {
            return bcachefs_fuse::cli::doctor::doctor(
                d.source.as_deref(),
                std::env::var("J").is_ok(),
            );
        }
        _ => Ok(()),
    };
    match r {
        Ok(()) => 0.into(),
        Err(f) => {
            eprintln!("{f}");
            if f.usage { 2.into() } else { 1.into() }
        }
    }
}
