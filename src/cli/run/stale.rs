//! Mounts whose daemon died (layer 9): found by ENOTCONN, detached if they are ours, so that
//! mounting again after kill -9 needs no umount by hand.

use std::path::{Path, PathBuf};

use crate::cli::failure::{Failure, Outcome};
use crate::fuse::mount::{self, How, Outcome as Unmounted};
use crate::fuse::mountinfo;

/// The most mounts stacked on one directory that are looked at.
const MOST: usize = 16;

/// Detaches every dead mount of ours on `path` itself. An error for one that is not ours, or that
/// another user made.
pub fn clear(path: &Path) -> Outcome<()> {
    for _ in 0..MOST {
        if !mount::is_dead(path) {
            return Ok(());
        }
        let path = resolve(path);
        let table = mountinfo::read().unwrap_or_default();
        let Some(entry) = mountinfo::holding(&table, &path) else { return Ok(()) };
        let place = entry.mountpoint.display();
        if !entry.is_ours() || entry.mountpoint != path {
            let hint = format!("take it away: fusermount3 -uz {place} (as root: umount -l)");
            let what = format!("a dead mount (its {} daemon is gone)", entry.fstype);
            return Err(Failure::new(what, place, hint));
        }
        match mount::unmount(&path, How::Detach) {
            Unmounted::Gone => log::warn!("{place}: detached the mount of a dead daemon"),
            Unmounted::Busy => std::thread::sleep(std::time::Duration::from_millis(50)),
            Unmounted::Failed(words) => {
                let hint = format!("{words}; as root: umount -l {place}");
                return Err(Failure::new("a dead mount that cannot be detached", place, hint));
            }
        }
    }
    Ok(())
}

/// The canonical path, although its last component cannot be looked at.
fn resolve(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (absolute.parent().and_then(|parent| parent.canonicalize().ok()), absolute.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => absolute,
    }
}
