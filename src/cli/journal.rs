//! `check` and `journal` (layer 9): a journal that no mount uses.
//!
//! States: opened and locked as a mount would lock it -> read -> printed, or changed. Invariants:
//! nothing is written but by `replay` and `abandon`, and nothing is ever deleted.

mod abandon;
mod aside;
mod replay;
mod summary;
mod target;

use std::process::ExitCode;

use self::summary::{Condition, Summary};
use self::target::Target;
use crate::cli::args::{CheckArgs, DumpArgs, JournalAction};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::{print, print_json};
use crate::cli::run::state::home::Access;

/// Exit code of `check`: there is data in the journal.
const DIRTY: u8 = 1;
/// Exit code of `check`: the journal cannot be used as it is.
const CORRUPT: u8 = 4;
/// Exit code of `check`: it could not look, as with fsck(8).
const FAILED: u8 = 8;

/// Runs `journal`.
pub fn run(action: &JournalAction) -> Outcome<()> {
    match action {
        JournalAction::Dump(args) => dump(args),
        JournalAction::Replay(args) => replay::run(args),
        JournalAction::Abandon(args) => abandon::run(args),
    }
}

/// Runs `check`.
pub fn check(args: &CheckArgs) -> ExitCode {
    match look(args) {
        Ok(Condition::Clean) => ExitCode::SUCCESS,
        Ok(Condition::Dirty) => ExitCode::from(DIRTY),
        Ok(Condition::Corrupt) => ExitCode::from(CORRUPT),
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(FAILED)
        }
    }
}

fn look(args: &CheckArgs) -> Outcome<Condition> {
    let target = Target::open(&args.dir, Access::Read)?;
    let summary = Summary::of(&target, &mut |_| Ok(()))?;
    if args.json {
        print_json(&summary)?;
    } else {
        print(&summary.text())?;
    }
    Ok(summary.state)
}

/// Prints what a journal holds; records one a line.
fn dump(args: &DumpArgs) -> Outcome<()> {
    let target = Target::open(&args.dir, Access::Read)?;
    if target.recovered().is_none() {
        let refusal = target.refusal().cloned();
        return Err(refusal.map_or_else(|| nothing(&target), Failure::from));
    }
    if !args.records {
        let summary = Summary::of(&target, &mut |_| Ok(()))?;
        let text = summary.text();
        return if args.json { print_json(&summary) } else { print(&text) }.map(drop);
    }
    let mut going = true;
    let mut first = true;
    let json = args.json;
    if json {
        going = print("{\"records\":[")?;
    }
    let summary = Summary::of(&target, &mut |record| {
        if going {
            let line = record.line(json)?;
            let separator = if json && !first { "," } else { "" };
            going = print(&format!("{separator}{line}\n"))?;
            first = false;
        }
        Ok(())
    })?;
    if !going {
        return Ok(());
    }
    if !json {
        return print(&summary.text()).map(drop);
    }
    // One object: the records, then what a dump without them says.
    let text = serde_json::to_string(&summary)
        .map_err(|error| Failure::new("write", "standard output", error))?;
    print(&format!("],{}\n", text.trim_start_matches('{'))).map(drop)
}

/// There is no journal at all.
fn nothing(target: &Target) -> Failure {
    let hint = "name a SOURCE, its state directory or its partition";
    Failure::new("no journal", target.place.display(), hint)
}

#[cfg(test)]
mod tests;
