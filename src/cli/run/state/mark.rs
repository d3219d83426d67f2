//! The owner mark (layer 9): `SOURCE/.bcachefs-fuse/owner` says that the files of SOURCE are not
//! current without a certain journal (STORE 6).
//!
//! States: absent (clean) -> written -> absent. Lock: `written`, held while the file is changed.
//! Invariants: what `read` finds was written whole (aside, synced, renamed, directory synced); it
//! is durable when `write` returns; its generation is never ahead of the journal's superblock.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags, fsync, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::cli::run::registry::PathText;
use crate::error::{Error, Kind, OpContext, Result};
use crate::store::mark::OwnerMark;
use crate::tree::host::STATE_NAME;

/// The mark's name in `SOURCE/.bcachefs-fuse`.
const NAME: &str = "owner";
/// The same while it is written.
const ASIDE: &str = "owner.new";
/// No mark is longer: two paths of 4096 bytes as numbers.
const MOST_BYTES: u64 = 64 << 10;

/// What the mark says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The form of this file: 1.
    pub schema: u32,
    /// The journal's uuid, 32 hexadecimal digits.
    pub journal: String,
    /// The generation of the mount that wrote it: the journal must be as young or younger.
    pub generation: u64,
    /// The state directory or partition at that time.
    pub state: PathText,
}

impl Owner {
    /// The state directory or partition at that time.
    pub fn state(&self) -> PathBuf {
        PathBuf::from(&self.state)
    }
}

/// Opens `SOURCE/.bcachefs-fuse` through SOURCE's descriptor; NotFound if there is none.
pub fn directory(source: impl AsFd) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(source, STATE_NAME, flags, Mode::empty()).op("open")
}

/// The same, made if it is missing. `source` must be a real descriptor.
pub fn make_directory(source: impl AsFd) -> Result<OwnedFd> {
    match mkdirat(&source, STATE_NAME, Mode::RWXU) {
        // The name must outlive a power cut, or the mark inside it does not.
        Ok(()) => fsync(&source).op("fsync")?,
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(Error::os("create", errno)),
    }
    directory(source)
}

/// Removes the directory again if there is nothing in it.
pub fn remove_directory(source: impl AsFd) {
    let _ = unlinkat(source, STATE_NAME, AtFlags::REMOVEDIR);
}

/// The mark in a source; None if there is none, Corrupt if it makes no sense.
pub fn read(source: impl AsFd) -> Result<Option<Owner>> {
    match directory(source) {
        Ok(directory) => read_in(directory),
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_in(directory: impl AsFd) -> Result<Option<Owner>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(directory, NAME, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        other => File::from(other.op("open")?),
    };
    let mut text = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut text).op("read")?;
    let bad = || Error::new(Kind::Corrupt, "owner mark", "");
    let owner: Owner = serde_json::from_slice(&text).map_err(|_| bad())?;
    if owner.schema == 1 { Ok(Some(owner)) } else { Err(bad()) }
}

/// Writes the mark, durable on return.
pub fn write(directory: impl AsFd, owner: &Owner) -> Result<()> {
    let directory = directory.as_fd();
    match unlinkat(directory, ASIDE, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(Error::os("remove", errno)),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let mut file = File::from(openat(directory, ASIDE, flags, mode).op("create")?);
    let mut text = serde_json::to_vec(owner).map_err(|error| Error::os("write", error))?;
    text.push(b'\n');
    file.write_all(&text).op("write")?;
    file.sync_all().op("fsync")?;
    renameat(directory, ASIDE, directory, NAME).op("rename")?;
    fsync(directory).op("fsync")
}

/// Removes the mark, durable on return; whether there was one.
pub fn remove(directory: impl AsFd) -> Result<bool> {
    let directory = directory.as_fd();
    match unlinkat(directory, NAME, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(false),
        other => {
            other.op("remove")?;
            fsync(directory).op("fsync").map(|()| true)
        }
    }
}

/// The mark of one mount.
#[derive(Debug)]
pub struct SourceMark {
    /// `SOURCE/.bcachefs-fuse`; None where nothing may be written.
    directory: Option<OwnedFd>,
    owner: Owner,
    /// Whether the file is there, and this mount's.
    written: Mutex<Written>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    /// An earlier mount's, or nobody knows: after an error.
    Unknown,
    Ours,
    Absent,
}

impl SourceMark {
    /// `generation` is the one this mount starts. `directory`: None in a read-only mount.
    pub fn new(directory: Option<OwnedFd>, journal: String, generation: u64, state: &Path) -> Self {
        let owner = Owner { schema: 1, journal, generation, state: state.into() };
        SourceMark { directory, owner, written: Mutex::new(Written::Unknown) }
    }

    fn directory(&self) -> Result<&OwnedFd> {
        let read_only = || Error::new(Kind::ReadOnly, "owner mark", "");
        self.directory.as_ref().ok_or_else(read_only)
    }
}

impl OwnerMark for SourceMark {
    fn dirty(&self) -> Result<()> {
        let mut written = self.written.lock();
        if *written != Written::Ours {
            *written = Written::Unknown;
            write(self.directory()?, &self.owner).map_err(|error| error.at("owner mark"))?;
            *written = Written::Ours;
        }
        Ok(())
    }

    fn clean(&self) -> Result<()> {
        let mut written = self.written.lock();
        if *written != Written::Absent {
            *written = Written::Unknown;
            remove(self.directory()?).map_err(|error| error.at("owner mark"))?;
            *written = Written::Absent;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_comes_and_goes() {
        let scratch = tempfile::tempdir().unwrap();
        let source = File::open(scratch.path()).unwrap();
        assert_eq!(read(&source).unwrap(), None);
        let directory = make_directory(&source).unwrap();
        assert_eq!(read(&source).unwrap(), None);
        let mark = SourceMark::new(Some(directory), "ab".repeat(16), 7, Path::new("/s"));
        mark.dirty().unwrap();
        mark.dirty().unwrap();
        let owner = read(&source).unwrap().unwrap();
        assert_eq!((owner.generation, owner.state()), (7, PathBuf::from("/s")));
        mark.clean().unwrap();
        mark.clean().unwrap();
        assert_eq!(read(&source).unwrap(), None);
        mark.dirty().unwrap();
        assert!(read(&source).unwrap().is_some());
        let read_only = SourceMark::new(None, String::new(), 8, Path::new("/s"));
        assert_eq!(read_only.dirty().unwrap_err().kind, Kind::ReadOnly);
    }

    #[test]
    fn a_mark_without_sense_is_corrupt() {
        let scratch = tempfile::tempdir().unwrap();
        let source = File::open(scratch.path()).unwrap();
        drop(make_directory(&source).unwrap());
        let path = scratch.path().join(STATE_NAME).join(NAME);
        for text in ["", "{}", r#"{"schema":2,"journal":"","generation":1,"state":"/"}"#] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read(&source).unwrap_err().kind, Kind::Corrupt, "{text}");
        }
    }
}
