//! UPPER (layer 9): the directory that keeps an overlay's changes.
//!
//! It is opened like a source (its journal and owner mark lie in it, its lock keeps other mounts
//! out), checked against SOURCE and MOUNTPOINT, and made into an upper if it is empty.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Mode;
use rustix::io::Errno;

use super::source::Source;
use crate::cli::failure::{Failure, Outcome};
use crate::config::{Config, DirectIo};
use crate::error::{Error, Kind};
use crate::fs::overlay_tree;
use crate::fuse::mount::words_of;
use crate::tree::overlay::meta;
use crate::tree::overlay::upper::{Lower, Upper, lowers_of};
use crate::tree::{OverlayTree, Tree};

/// Descriptors that a command keeps.
const MAX_OPEN: usize = 256;

/// What an overlay is made of, beside SOURCE.
#[derive(Debug)]
pub struct Layers {
    /// The upper.
    pub upper: Source,
    /// Further lowers, below SOURCE.
    pub lowers: Vec<Source>,
}

/// Opens the upper, made if it is missing, and the lowers below SOURCE.
pub fn open(
    typed: &Path,
    source: &Source,
    lowers: &[PathBuf],
    mountpoint: &Path,
) -> Outcome<Layers> {
    let cannot = |errno| {
        let hint = "give a directory of your own with --upper";
        Failure::new(words_of(errno), typed.display(), hint)
    };
    // Before anything is made, and again where a link leads elsewhere.
    let parent = typed.parent().unwrap_or(Path::new("/")).canonicalize();
    let parent =
        parent.map_err(|error| cannot(Errno::from_io_error(&error).unwrap_or(Errno::NOENT)))?;
    let lowers = lowers.iter().map(|path| lower(path)).collect::<Outcome<Vec<_>>>()?;
    let apart = |path: &Path| must_be_apart(path, source, &lowers, mountpoint);
    apart(&parent.join(typed.file_name().unwrap_or_default()))?;
    match rustix::fs::mkdir(typed, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(cannot(errno)),
    }
    let upper = Source::open(typed)?;
    apart(&upper.path)?;
    Ok(Layers { upper, lowers })
}

fn must_be_apart(
    upper: &Path,
    source: &Source,
    lowers: &[Source],
    mountpoint: &Path,
) -> Outcome<()> {
    let others = [("SOURCE", source.path.as_path()), ("MOUNTPOINT", mountpoint)].into_iter();
    for (what, other) in others.chain(lowers.iter().map(|lower| ("a lower", &*lower.path))) {
        if let Some(how) = overlap(upper, other) {
            let (what, hint) = (format!("UPPER {how} {what}"), "give a directory elsewhere");
            return Err(Failure::new(what, upper.display(), hint));
        }
    }
    Ok(())
}

/// A lower is only read, by any number of overlays.
fn lower(path: &Path) -> Outcome<Source> {
    let lower = Source::open(path)?;
    refuse_as_source(&lower)?;
    if lower.try_lock(true)? {
        return Ok(lower);
    }
    let hint = "it is mounted for writing: unmount it there first";
    Err(Failure::new("a lower is in use", lower.path.display(), hint))
}

/// What an upper keeps is not a directory of images.
pub fn refuse_as_source(source: &Source) -> Outcome<()> {
    if !is_upper(&source.path) {
        return Ok(());
    }
    let place = source.path.display();
    let hint = format!("mount it over its lower: mount --upper {place} LOWER MOUNTPOINT");
    Err(Failure::new("SOURCE is the upper of an overlay", place, hint))
}

fn overlap(upper: &Path, other: &Path) -> Option<&'static str> {
    match () {
        () if upper == other => Some("is"),
        () if upper.starts_with(other) => Some("lies inside"),
        () if other.starts_with(upper) => Some("lies around"),
        () => None,
    }
}

/// Takes the upper for this mount.
pub fn lock(upper: &Source, read_only: bool) -> Outcome<()> {
    if upper.try_lock(read_only)? {
        return Ok(());
    }
    let holder = match upper.lock_holder() {
        Some(pid) => format!("process {pid} holds it"),
        None => "another process holds it".to_owned(),
    };
    let hint = format!("{holder}; unmount it there first");
    Err(Failure::new("UPPER is in use", upper.path.display(), hint))
}

/// The tree of an overlay mount, and the locks of its layers.
pub fn tree(
    source: Source,
    layers: Layers,
    config: &Config,
) -> Outcome<(Arc<dyn Tree>, Vec<OwnedFd>)> {
    let Layers { upper, lowers } = layers;
    let first = source.path.clone();
    let (mut roots, mut locks) = (Vec::new(), Vec::new());
    for Source { root, path, lock, .. } in std::iter::once(source).chain(lowers) {
        roots.push(Lower { root, path });
        locks.push(lock);
    }
    let tree =
        overlay_tree(&upper.path, roots, config).map_err(|error| refuse(&error, &upper, &first))?;
    locks.push(upper.lock);
    Ok((tree, locks))
}

/// The tree of an upper that no mount uses, over the lowers it was made over.
pub fn alone(upper: &Source, read_only: bool) -> Outcome<Arc<OverlayTree>> {
    let refused = |error: &Error| refuse(error, upper, Path::new("its lowers"));
    let open = |path: PathBuf| -> Outcome<Lower> {
        let lower = Source::open(&path)?;
        Ok(Lower { root: lower.root, path })
    };
    let paths = lowers_of(&upper.path).map_err(|error| refused(&error))?;
    let lowers = paths.into_iter().map(open).collect::<Outcome<Vec<_>>>()?;
    let direct_io = DirectIo::Auto;
    let opened = Upper::open(&upper.path, lowers, direct_io, MAX_OPEN);
    let tree = opened.and_then(|opened| OverlayTree::new(opened, direct_io, read_only));
    tree.map(Arc::new).map_err(|error| refused(&error))
}

/// Whether a directory is an upper.
pub fn is_upper(directory: &Path) -> bool {
    directory.join(meta::NAME).exists()
}

fn refuse(error: &Error, upper: &Source, source: &Path) -> Failure {
    let place = upper.path.display();
    match error.kind {
        Kind::Exists => {
            Failure::new(format!("not an upper: {}", error.place), place, "give an empty directory")
        }
        Kind::NotSupported => {
            let hint = format!("it does not fit {}: give what it was made over", source.display());
            Failure::new(format!("an upper {}", error.place), place, hint)
        }
        Kind::Busy => Failure::new("UPPER is in use", place, "unmount it there first"),
        Kind::Corrupt => {
            let hint = "restore it from a backup, or give another directory";
            Failure::new(format!("a damaged upper ({})", error.place), place, hint)
        }
        _ => Failure::of(error, &upper.path),
    }
}
