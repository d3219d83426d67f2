//! `diff` and `revert` (layer 9): what an overlay mount changed, and dropping it.

use std::fmt::Write;
use std::io::{BufRead, IsTerminal};

use serde::Serialize;

use crate::cli::args::{DiffArgs, RevertArgs};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::print;
use crate::cli::place::Place;
use crate::control::proto::{Ask, Name, PathChange, Reply, SCHEMA};
use crate::units::format_size;

#[derive(Serialize)]
struct Listing<'a> {
    schema: u32,
    differences: &'a [PathChange],
}

/// Runs `diff`.
pub fn diff(args: &DiffArgs) -> Outcome<()> {
    let place = Place::find(&args.path)?;
    let found = differences(&place)?;
    if args.json {
        let listing = Listing { schema: SCHEMA, differences: &found };
        let text = serde_json::to_string(&listing)
            .map_err(|error| Failure::new(error, args.path.display(), "report it"))?;
        return print(&format!("{text}\n")).map(drop);
    }
    let mut text = String::new();
    found.iter().for_each(|change| line(&mut text, change, args.blocks));
    print(&text).map(drop)
}

fn differences(place: &Place) -> Outcome<Vec<PathChange>> {
    let mut client = place.connect()?;
    match client.ask(Ask::Diff) {
        Ok(Reply::Diff { differences }) => Ok(differences),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

fn line(text: &mut String, change: &PathChange, blocks: bool) {
    let slash = if change.directory { "/" } else { "" };
    let _ = write!(text, "{} {}{slash}", change.change, shown(&change.path));
    if let Some(from) = &change.from {
        let _ = write!(text, " (was {}{slash})", shown(from));
    }
    if change.bytes > 0 {
        let _ = write!(text, "  {}", format_size(change.bytes));
    }
    text.push('\n');
    for (offset, length) in change.extents.iter().filter(|_| blocks) {
        let _ = writeln!(text, "    {offset}+{length}");
    }
}

/// One line, whatever bytes are in it.
fn shown(name: &Name) -> String {
    name.to_string()
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

/// Runs `revert`.
pub fn revert(args: &RevertArgs) -> Outcome<()> {
    let place = Place::find(&args.path)?;
    let found = differences(&place)?;
    let mountpoint = place.mountpoint().display();
    let bytes = found.iter().map(|change| change.bytes).sum();
    if !args.yes && !found.is_empty() {
        let what = format!("{} paths, {}", found.len(), format_size(bytes));
        if !std::io::stdin().is_terminal() {
            let hint = "give --yes; bcachefs-fuse diff shows them";
            return Err(Failure::new(format!("would drop {what}"), mountpoint, hint));
        }
        eprint!("{mountpoint}: drop {what}? [y/N] ");
        let mut answer = String::new();
        let read = std::io::stdin().lock().read_line(&mut answer);
        if read.is_err() || !matches!(answer.trim(), "y" | "Y" | "yes") {
            return Err(Failure::new("nothing was dropped", mountpoint, "answer y to drop it"));
        }
    }
    let mut client = place.connect()?;
    client.ask(Ask::Revert { force: args.force }).map_err(|refusal| place.failure(refusal))?;
    let paths = found.len();
    print(&format!("{mountpoint}: {paths} paths reverted, {} dropped\n", format_size(bytes)))
        .map(drop)
}
