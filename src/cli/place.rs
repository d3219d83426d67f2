//! Which mount a path is on, and talking to its daemon (layer 9). No state.
//!
//! Invariant: a mount is found in the kernel's table first; the path itself is looked at only
//! where the table cannot tell, or after the daemon has answered. A dead mount is never waited for.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use crate::cli::failure::{Failure, Outcome};
use crate::cli::meaning::absolute;
use crate::control::client::Client;
use crate::control::proto::{Name, Refusal};
use crate::fuse::mountinfo::{self, MountEntry};

/// How long a new mount may take to open its control socket.
const PATIENCE: Duration = Duration::from_secs(1);

/// A mount of ours, and the path on it.
#[derive(Debug)]
pub struct Place {
    /// The mount.
    pub entry: MountEntry,
    /// The path as typed, from the root.
    path: PathBuf,
}

impl Place {
    /// The mount that holds `path`.
    pub fn find(path: &Path) -> Outcome<Place> {
        let table = mountinfo::read().map_err(|error| Failure::of(&error, path))?;
        let typed = absolute(path)?;
        let walks_up = typed.components().any(|part| part == Component::ParentDir);
        if !walks_up
            && let Some(entry) = mountinfo::holding(&table, &typed).filter(|entry| entry.is_ours())
        {
            return Ok(Place { entry: entry.clone(), path: typed });
        }
        let missing = |error: std::io::Error| {
            Failure::new(error.kind(), path.display(), "name a mountpoint or a path below one")
        };
        let real = typed.canonicalize().map_err(missing)?;
        match mountinfo::holding(&table, &real).filter(|entry| entry.is_ours()) {
            Some(entry) => Ok(Place { entry: entry.clone(), path: real }),
            None => {
                let hint = "bcachefs-fuse list shows the mounts";
                Err(Failure::new("not on a mount of bcachefs-fuse", path.display(), hint))
            }
        }
    }

    /// The mount's root.
    pub fn mountpoint(&self) -> &Path {
        &self.entry.mountpoint
    }

    /// Connects to the daemon.
    pub fn connect(&self) -> Outcome<Client> {
        Client::connect(self.entry.device(), owner(&self.entry), PATIENCE)
            .map_err(|refusal| self.failure(refusal))
    }

    /// What the daemon calls this path; None for the root of the mount.
    pub fn below(&self) -> Outcome<Option<Name>> {
        let mountpoint = self.mountpoint();
        if self.path == mountpoint {
            return Ok(None);
        }
        // Symbolic links and permissions are the kernel's to judge, as this user.
        let real = self.path.canonicalize().map_err(|error| {
            Failure::new(error.kind(), self.path.display(), "name a file of the mount")
        })?;
        match real.strip_prefix(mountpoint) {
            Ok(below) if below.as_os_str().is_empty() => Ok(None),
            Ok(below) => Ok(Some(Name::from(below))),
            Err(_) => {
                let hint = format!("it leads to {}, outside of the mount", real.display());
                Err(Failure::new("not on the mount", self.path.display(), hint))
            }
        }
    }

    /// A refusal with the mountpoint in front of the place where it is about a socket.
    pub fn failure(&self, refusal: Refusal) -> Failure {
        if !refusal.place.ends_with(".sock") {
            return refusal.into();
        }
        let place = format!("{} ({})", self.mountpoint().display(), refusal.place);
        Failure::new(refusal.what, place, refusal.hint)
    }
}

/// Who mounted it, by uid: fusermount3 and mount(2) tell the kernel.
pub fn owner(entry: &MountEntry) -> u32 {
    let uid = entry.super_options.split(',').find_map(|word| word.strip_prefix("user_id="));
    uid.and_then(|uid| uid.parse().ok()).unwrap_or(0)
}
