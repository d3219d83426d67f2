//! `journal replay`: writes home what is in the journal, without a mount.

use std::path::PathBuf;

use super::nothing;
use super::summary::Summary;
use super::target::Target;
use crate::cli::args::ReplayArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::print;
use crate::cli::run::state::home::Access;
use crate::cli::run::state::{self, Found};
use crate::error::{Error, Kind, Result};
use crate::units::format_size;

/// What a replay did.
struct Replayed {
    bytes: u64,
    devices: u64,
    /// Files that were not written, and why; their records stay in the journal.
    left: Vec<(String, String)>,
}

/// Runs it.
pub fn run(args: &ReplayArgs) -> Outcome<()> {
    let target = Target::open(&args.dir, Access::Write)?;
    let fits = target.owner_fits();
    if target.recovered().is_none() {
        let refusal = target.refusal().cloned();
        return Err(refusal.map_or_else(|| nothing(&target), Failure::from));
    }
    if let Some(refusal) = target.refusal() {
        return Err(refusal.clone().into());
    }
    let summary = Summary::of(&target, &mut |_| Ok(()))?;
    let Target { place, source, owner, verdict } = target;
    let Some(source) = source else {
        let hint = "name its SOURCE instead";
        return Err(Failure::new("nobody knows whose journal it is", place.display(), hint));
    };
    if summary.devices.is_empty() && (fits || owner.is_none()) {
        state::remove_mark(&source)?;
        return print("nothing to write home\n").map(drop);
    }
    if !fits {
        let hint = format!("if it is of no use: bcachefs-fuse journal abandon {}", place.display());
        return Err(Failure::new("SOURCE does not name this journal", source.path.display(), hint));
    }
    for skip in &args.skip {
        let known = summary.devices.iter().any(|device| PathBuf::from(&device.path) == *skip);
        if !known {
            let hint = "give a path below SOURCE, as bcachefs-fuse check shows it";
            return Err(Failure::new("not in the journal", skip.display(), hint));
        }
    }
    let Some(verdict) = verdict else { return Ok(()) };
    let found = verdict.usable()?;
    let replayed = replay(found, &args.skip).map_err(|error| Failure::of(&error, &place))?;
    let (bytes, devices) = (format_size(replayed.bytes), replayed.devices);
    print(&format!("{bytes} written home to {devices} images\n"))?;
    if replayed.left.is_empty() {
        return Ok(());
    }
    let left: Vec<String> =
        replayed.left.iter().map(|(path, why)| format!("{path} ({why})")).collect();
    let hint = "mount it, or give these up: bcachefs-fuse journal replay --skip FILE";
    Err(Failure::new(format!("not written home: {}", left.join(", ")), place.display(), hint))
}

/// lead: recovery::replay_offline
fn replay(_found: Found, _skip: &[PathBuf]) -> Result<Replayed> {
    Err(Error::new(Kind::NotSupported, "replay", ""))
}
