//! `journal replay`: writes home what is in the journal, without a mount.

use std::path::PathBuf;
use std::sync::Arc;

use super::summary::Summary;
use super::target::Target;
use super::{aside, nothing};
use crate::cli::args::ReplayArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::flush::way_out;
use crate::cli::output::print;
use crate::cli::run::source::Source;
use crate::cli::run::state::home::Access;
use crate::cli::run::state::{self, State};
use crate::cli::run::upper;
use crate::config::{DirectIo, StoreConfig};
use crate::error::{Error, Kind, OpContext, Result};
use crate::store::BlockStore;
use crate::store::recovery::{Fate, Opening};
use crate::tree::{HostTree, Tree};
use crate::units::format_size;

/// Descriptors the tree may keep.
const MAX_OPEN: usize = 256;

/// Nothing is read through it.
const CACHE_BYTES: u64 = 4 << 20;

/// What a replay did.
struct Replayed {
    bytes: u64,
    devices: u64,
    /// Files that were not written, and why; their records stay in the journal.
    left: Vec<(String, String)>,
    /// Those of them that nobody will write as they are.
    refused: Vec<String>,
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
    // What is given up is kept: of a corrupt journal, what lies behind the bad record.
    if !args.skip.is_empty() || found.recovered.corruption().is_some() {
        let copy = aside::copy(&found.home, &source)?;
        print(&format!("the journal as it was: {}\n", copy.display()))?;
    }
    let state = state::state(found, &source, true)?;
    let replayed = replay(*state, tree_of(&source)?, &args.skip)
        .map_err(|error| Failure::of(&error, &place))?;
    let (bytes, devices) = (format_size(replayed.bytes), replayed.devices);
    print(&format!("{bytes} written home to {devices} images\n"))?;
    if replayed.left.is_empty() {
        return Ok(());
    }
    let left: Vec<String> =
        replayed.left.iter().map(|(path, why)| format!("{path} ({why})")).collect();
    let again = "its data stays in the journal; mount it, and it is tried again".to_owned();
    let hint = way_out(&replayed.refused, &place.display().to_string()).unwrap_or(again);
    Err(Failure::new(format!("not written home: {}", left.join(", ")), place.display(), hint))
}

/// Where the files are that a journal speaks of.
fn tree_of(source: &Source) -> Outcome<Arc<dyn Tree>> {
    if upper::is_upper(&source.path) {
        return Ok(upper::alone(source, false)?);
    }
    let root = source.root.try_clone().op("dup");
    let tree = root.and_then(|root| HostTree::new(root, DirectIo::Auto, false, MAX_OPEN));
    Ok(Arc::new(tree.map_err(|error| Failure::of(&error, &source.path))?))
}

fn replay(state: State, tree: Arc<dyn Tree>, skip: &[PathBuf]) -> Result<Replayed> {
    let State { recovered, mark, lock: _held, .. } = state;
    let none = || Error::new(Kind::NotSupported, "replay", "files here cannot be found again");
    let resolver = tree.resolver().ok_or_else(none)?;
    let opening =
        Opening { mark: Some(mark), past_corruption: true, skip, ..Opening::new(resolver) };
    let config = StoreConfig { cache_bytes: CACHE_BYTES, ..StoreConfig::default() };
    let (store, report) = BlockStore::with_journal(&config, recovered, &opening)?;
    store.start()?;
    let end = store.flush(None, &mut |_| true)?;
    store.stop()?;
    let refused = report.devices.iter().filter_map(|device| {
        let left = matches!(device.fate, Fate::Missing | Fate::Replaced | Fate::Changed(_));
        left.then(|| (device.path.display().to_string(), device.fate.to_string()))
    });
    let mut left: Vec<(String, String)> = refused.collect();
    let refused = left.iter().map(|(path, _)| path.clone()).collect();
    let known = |path: &String| left.iter().any(|(other, _)| other == path);
    let stuck: Vec<_> = end.stuck.into_iter().filter(|(path, _)| !known(path)).collect();
    left.extend(stuck);
    let resumed = report.devices.iter().filter(|device| device.fate == Fate::Resumed);
    Ok(Replayed { bytes: end.done_bytes, devices: resumed.count() as u64, left, refused })
}
