//! The mounts that are alive (layer 9): one small JSON file for each, beside its control socket.
//!
//! States of an entry: claimed (written and flocked before the mount) -> mounted (with its device
//! number) -> gone (removed at the end; after kill -9 the flock is free and the next reader removes
//! it). Locks: `lock` in the directory while somebody checks and claims; an entry's own flock for
//! its daemon's lifetime. Invariant: a file is never read half written (written aside, locked,
//! renamed).

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::cli::failure::{Failure, Outcome};
use crate::control::socket;
use crate::error::Kind;
use crate::fuse::mountinfo;

/// A path in JSON: text where it is UTF-8, else its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PathText {
    /// UTF-8.
    Text(String),
    /// Anything else.
    Bytes(Vec<u8>),
}

impl From<&Path> for PathText {
    fn from(path: &Path) -> PathText {
        match path.to_str() {
            Some(text) => PathText::Text(text.to_owned()),
            None => PathText::Bytes(path.as_os_str().as_bytes().to_vec()),
        }
    }
}

impl From<&PathText> for PathBuf {
    fn from(text: &PathText) -> PathBuf {
        match text {
            PathText::Text(text) => PathBuf::from(text),
            PathText::Bytes(bytes) => PathBuf::from(std::ffi::OsString::from_vec(bytes.clone())),
        }
    }
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The form of this file: 1.
    pub schema: u32,
    /// The daemon.
    pub pid: u32,
    /// Who mounted it.
    pub uid: u32,
    /// The canonical SOURCE.
    pub source: PathText,
    /// st_dev of SOURCE as it was before the mount.
    pub source_device: u64,
    /// st_ino of SOURCE as it was before the mount.
    pub source_inode: u64,
    /// Where SOURCE lies inside its filesystem, as (major, minor), path: the same under every
    /// bind mount.
    pub origin: Option<((u32, u32), PathText)>,
    /// The canonical MOUNTPOINT.
    pub mountpoint: PathText,
    /// Device number of the mounted filesystem; none before it is mounted.
    pub device: Option<(u32, u32)>,
    /// Mounted with `ro`.
    pub read_only: bool,
}

impl Entry {
    /// SOURCE.
    pub fn source(&self) -> PathBuf {
        PathBuf::from(&self.source)
    }

    /// MOUNTPOINT.
    pub fn mountpoint(&self) -> PathBuf {
        PathBuf::from(&self.mountpoint)
    }

    /// Whether the kernel still shows it somewhere; true while nobody knows.
    pub fn is_mounted(&self) -> bool {
        match (self.device, mountinfo::read()) {
            (Some(device), Ok(table)) => {
                mountinfo::find_ours(&table, &self.mountpoint(), device).is_some()
            }
            _ => true,
        }
    }
}

/// The directory of this daemon's socket and entry, made if it is missing; one that somebody else
/// could write to is refused.
fn prepare_directory(allow_other: bool) -> Outcome<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    socket::server_dir(user, allow_other).map_err(|error| {
        let hint = "the control socket goes there; remove it, or set XDG_RUNTIME_DIR";
        let what = match (error.kind, &error.source) {
            (Kind::NotPermitted, None) => "not a directory that only this user may write".into(),
            (_, Some(source)) => bare(source),
            (kind, None) => format!("{kind:?}"),
        };
        Failure::new(what, &error.place, hint)
    })
}

fn bare(error: &std::io::Error) -> String {
    error.to_string().split(" (os error").next().unwrap_or_default().to_owned()
}

/// Every live mount this user can see; removes the files of dead ones of his own.
pub fn live() -> Vec<Entry> {
    let user = rustix::process::geteuid().as_raw();
    socket::all_dirs(user).iter().flat_map(|directory| live_in(directory)).collect()
}

fn live_in(directory: &Path) -> Vec<Entry> {
    let Ok(files) = std::fs::read_dir(directory) else { return Vec::new() };
    files
        .flatten()
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| read(&path))
        .collect()
}

/// The entry if its daemon lives. What another user says counts only while the kernel confirms it.
fn read(path: &Path) -> Option<Entry> {
    let file = open_entry(path)?;
    let owner = file.metadata().ok()?.uid();
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        // Nobody holds it, so its daemon is dead. Only the owner can have made a new one by now,
        // and a new one has another inode.
        let same = path.symlink_metadata().is_ok_and(|now| Some(now.ino()) == inode(&file));
        if same && owner == rustix::process::geteuid().as_raw() {
            let _ = std::fs::remove_file(path);
        }
        return None;
    }
    let entry: Entry =
        serde_json::from_reader(&file).ok().filter(|entry: &Entry| entry.uid == owner)?;
    let trusted = owner == 0 || owner == rustix::process::geteuid().as_raw();
    (trusted || (entry.device.is_some() && entry.is_mounted())).then_some(entry)
}

fn open_entry(path: &Path) -> Option<File> {
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
    OpenOptions::new().read(true).custom_flags(flags as i32).open(path).ok()
}

fn inode(file: &File) -> Option<u64> {
    file.metadata().ok().map(|meta| meta.ino())
}

/// Keeps others from checking and claiming at the same time.
#[derive(Debug)]
pub struct Turn {
    directory: PathBuf,
    _lock: File,
}

impl Turn {
    /// Waits for its turn.
    pub fn take(allow_other: bool) -> Outcome<Turn> {
        let directory = prepare_directory(allow_other)?;
        let path = directory.join("lock");
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(flags)
            .open(&path)
            .and_then(|lock| {
                rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
                Ok(Turn { directory, _lock: lock })
            })
            .map_err(|error| failed(&path, &error))
    }

    /// Enters a mount that is about to be made.
    pub fn claim(&self, entry: Entry) -> Outcome<Claim> {
        let path = self.directory.join(format!("{}.json", entry.pid));
        let file = write(&path, &entry).map_err(|error| failed(&path, &error))?;
        Ok(Claim { path, entry, _file: file })
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    let hint = "the list of live mounts goes there; make room, or set XDG_RUNTIME_DIR";
    Failure::new(bare(error), path.display(), hint)
}

/// Our own entry; removed when dropped.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    entry: Entry,
    _file: File,
}

impl Claim {
    /// Adds the device number once it is known.
    pub fn mounted(&mut self, device: Option<(u32, u32)>) -> Outcome<()> {
        self.entry.device = device;
        self._file = write(&self.path, &self.entry).map_err(|error| failed(&self.path, &error))?;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Writes aside, locks, renames: the old file's lock is let go only when the new one is in place.
fn write(path: &Path, entry: &Entry) -> std::io::Result<File> {
    let aside = path.with_extension("new");
    let _ = std::fs::remove_file(&aside);
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o644).open(&aside)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    serde_json::to_writer(&file, entry)?;
    file.write_all(b"\n")?;
    std::fs::rename(&aside, path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry {
            schema: 1,
            pid: 7,
            uid: rustix::process::geteuid().as_raw(),
            source: Path::new("/srv/a").into(),
            source_device: 1,
            source_inode: 2,
            origin: Some(((8, 1), Path::new("/a").into())),
            mountpoint: PathText::from(Path::new(std::ffi::OsStr::from_bytes(b"/mnt/\xff"))),
            device: None,
            read_only: false,
        }
    }

    #[test]
    fn an_entry_lives_as_long_as_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("7.json");
        let file = write(&path, &entry()).unwrap();
        assert_eq!(live_in(directory.path()), [entry()]);
        let second = write(&path, &Entry { device: Some((0, 9)), ..entry() }).unwrap();
        drop(file);
        assert_eq!(live_in(directory.path())[0].device, Some((0, 9)));
        drop(second);
        assert!(live_in(directory.path()).is_empty());
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_entry_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("1.sock"), "").unwrap();
        std::fs::create_dir(directory.path().join("2.json")).unwrap();
        assert!(live_in(directory.path()).is_empty());
    }
}
