//! `diff` and `revert` (layer 9): what an overlay mount changed, and dropping it.

use std::fmt::Write;
use std::io::{BufRead, IsTerminal};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::cli::args::{DiffArgs, RevertArgs};
use crate::cli::failure::{Failure, Outcome, one_line};
use crate::cli::output::{print, print_json};
use crate::cli::place::Place;
use crate::cli::run::source::Source;
use crate::cli::run::state::home::Access;
use crate::cli::run::{state, upper};
use crate::control::proto::{Ask, PathChange, Reply, SCHEMA};
use crate::tree::OverlayTree;
use crate::units::format_size;

#[derive(Serialize)]
struct Listing<'a> {
    schema: u32,
    differences: &'a [PathChange],
}

/// Runs `diff`.
pub fn diff(args: &DiffArgs) -> Outcome<()> {
    let found = match alone(&args.path, Access::Read)? {
        Some(upper) => upper
            .tree
            .diff()
            .map_err(|error| Failure::of(&error, &args.path))?
            .into_iter()
            .map(PathChange::from)
            .collect(),
        None => differences(&Place::find(&args.path)?)?,
    };
    if args.json {
        let listing = Listing { schema: SCHEMA, differences: &found };
        return print_json(&listing).map(drop);
    }
    let mut text = String::new();
    found.iter().for_each(|change| line(&mut text, change, args.blocks));
    print(&text).map(drop)
}

/// An upper that no mount uses, and its lock.
struct Alone {
    tree: Arc<OverlayTree>,
    _lock: OwnedFd,
}

/// The upper at a path; None if it is none.
fn alone(path: &Path, access: Access) -> Outcome<Option<Alone>> {
    if !upper::is_upper(path) {
        return Ok(None);
    }
    let source = Source::open(path)?;
    let read_only = access == Access::Read;
    upper::lock(&source, read_only)?;
    if state::owner_of(&source)?.is_some() {
        let place = source.path.display();
        let hint = format!("first: bcachefs-fuse journal replay {place}");
        return Err(Failure::new("there is data in its journal", place, hint));
    }
    let tree = upper::alone(&source, read_only)?;
    Ok(Some(Alone { tree, _lock: source.lock }))
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
    let _ = write!(text, "{} {}{slash}", change.change, one_line(&change.path.to_string()));
    if let Some(from) = &change.from {
        let _ = write!(text, " (was {}{slash})", one_line(&from.to_string()));
    }
    if change.bytes > 0 {
        let _ = write!(text, "  {}", format_size(change.bytes));
    }
    text.push('\n');
    for (offset, length) in change.extents.iter().filter(|_| blocks) {
        let _ = writeln!(text, "    {offset}+{length}");
    }
}

/// Runs `revert`.
pub fn revert(args: &RevertArgs) -> Outcome<()> {
    if let Some(upper) = alone(&args.path, Access::Write)? {
        let fails = |error| Failure::of(&error, &args.path);
        let found = upper.tree.diff().map_err(fails)?;
        let found: Vec<PathChange> = found.into_iter().map(PathChange::from).collect();
        agree(args, &found, &args.path)?;
        upper.tree.revert().map_err(fails)?;
        return told(&found, &args.path);
    }
    let place = Place::find(&args.path)?;
    let found = differences(&place)?;
    agree(args, &found, place.mountpoint())?;
    let mut client = place.connect()?;
    client.ask(Ask::Revert { force: args.force }).map_err(|refusal| place.failure(refusal))?;
    told(&found, place.mountpoint())
}

fn told(found: &[PathChange], place: &Path) -> Outcome<()> {
    let bytes = format_size(found.iter().map(|change| change.bytes).sum());
    let (place, paths) = (place.display(), found.len());
    print(&format!("{place}: {paths} paths reverted, {bytes} dropped\n")).map(drop)
}

/// Asks, where nobody said yes.
fn agree(args: &RevertArgs, found: &[PathChange], place: &Path) -> Outcome<()> {
    let mountpoint = place.display();
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
    Ok(())
}
