//! `journal abandon`: gives up what is only in the journal. The records are moved aside.

use std::io::{BufRead, IsTerminal};

use super::summary::Summary;
use super::target::Target;
use super::{aside, nothing};
use crate::cli::args::AbandonArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::print;
use crate::cli::run::state::home::{Access, Home};
use crate::cli::run::state::{self, Verdict};
use crate::units::format_size;

/// Runs it.
pub fn run(args: &AbandonArgs) -> Outcome<()> {
    let target = Target::open(&args.dir, Access::Write)?;
    let marked = target.owner.is_some();
    let empty = target.recovered().is_some_and(|r| r.is_empty() && r.corruption().is_none());
    if target.verdict.is_none() || (empty && !marked) {
        return Err(nothing_to_give_up(&target));
    }
    if !args.yes && !std::io::stdin().is_terminal() {
        let hint = "bcachefs-fuse check shows what is lost; then say --yes";
        return Err(Failure::new("not confirmed", target.place.display(), hint));
    }
    let summary = Summary::of(&target, &mut |_| Ok(()))?;
    print(&lost(&target, &summary))?;
    if !args.yes {
        ask(&target)?;
    }
    // A mark of another journal is not this one's to remove.
    let ours = target.owner_fits() || target.recovered().is_none();
    if let Some(source) = target.source.as_ref().filter(|_| marked && ours) {
        state::remove_mark(source)?;
    }
    match target.home() {
        Some(home) => print(&move_aside(home)?).map(drop),
        None => print("the owner mark was removed; there was no journal to move\n").map(drop),
    }
}

fn nothing_to_give_up(target: &Target) -> Failure {
    if target.verdict.is_none() {
        return nothing(target);
    }
    Failure::new("nothing to give up", target.place.display(), "the journal is empty")
}

fn lost(target: &Target, summary: &Summary) -> String {
    if let Some(Verdict::Absent(_) | Verdict::Unreadable(..)) = &target.verdict {
        return "what is lost cannot be told: the journal is not here or cannot be read\n".into();
    }
    let bytes = format_size(summary.bytes());
    let mut text = format!("lost: {bytes} of these images, less what is home already\n");
    text.push_str(&summary.device_table());
    text
}

fn ask(target: &Target) -> Outcome<()> {
    print("Give it up? Type yes: ")?;
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    if read.is_ok() && answer.trim() == "yes" {
        return Ok(());
    }
    Err(Failure::new("nothing was changed", target.place.display(), "type yes, or say --yes"))
}

fn move_aside(home: &Home) -> Outcome<String> {
    if home.is_partition() {
        return Ok(format!(
            "the records stay on {0}; before it is used again: dd if=/dev/zero of={0} bs=1M \
             count=1\n",
            home.path.display()
        ));
    }
    Ok(format!("moved to {}\n", aside::rename(home)?.display()))
}
