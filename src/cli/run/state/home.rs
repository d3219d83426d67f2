//! Where a journal lives (layer 9): a state directory, or a partition.
//!
//! States: opened -> locked, until it is dropped. The lock is a flock on the directory's (the
//! partition's) own descriptor. Invariant: nothing in it is trusted that another user could have
//! put there.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, Stat, openat, renameat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::file::{self, Content, JournalFile};
use super::{Answer, mark, suits};
use crate::cli::run::registry::PathText;
use crate::cli::run::source::{Source, flock_holder};
use crate::clock;
use crate::control::proto::Refusal;
use crate::device::BlockDevice;
use crate::error::{Error, Kind, OpContext, Result};
use crate::fuse::mount::words_of;
use crate::tree::host::STATE_NAME;
use crate::units::format_size;

/// A daemon that was killed lets go of its locks one after the other.
const DYING: Duration = Duration::from_millis(500);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// The file of a state directory that says whose journal it holds; for people, not for safety.
const NOTE: &str = "source";

/// What a caller is going to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read, write, and make what is missing.
    Make,
    /// Read and write what is there.
    Write,
    /// Read what is there.
    Read,
}

/// A state directory or a partition, open.
#[derive(Debug)]
pub struct Home {
    /// Its canonical path.
    pub path: PathBuf,
    /// A directory, or a partition opened for ourselves.
    fd: OwnedFd,
    partition: bool,
    access: Access,
}

#[derive(Serialize, Deserialize)]
struct Note {
    schema: u32,
    source: PathText,
}

impl Home {
    /// `--state PATH`.
    pub fn typed(path: &Path, access: Access) -> Answer<Home> {
        if access == Access::Make && !path.exists() {
            match rustix::fs::mkdir(path, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(missing(path, errno)),
            }
        }
        let meta = path
            .metadata()
            .map_err(|error| missing(path, Errno::from_io_error(&error).unwrap_or(Errno::NOENT)))?;
        let shown = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if meta.file_type().is_block_device() {
            // As typed: /dev/disk/by-id names outlive a boot, what they lead to does not.
            return Home::partition(path.to_owned(), access);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| missing(path, e))?;
        if suits::in_memory(&fd) {
            let hint = "its journal would be gone after a power cut: give a directory on a disk";
            return Err(Refusal::new("state on tmpfs", shown.display().to_string(), hint));
        }
        Home { path: shown, fd, partition: false, access }.checked()
    }

    /// `SOURCE/.bcachefs-fuse`, through SOURCE's descriptor; None if it is missing and not to be
    /// made.
    pub fn of_source(source: &Source, access: Access) -> Answer<Option<Home>> {
        let path = source.path.join(STATE_NAME);
        if access == Access::Make && suits::in_memory(&source.lock) {
            let hint = "give --state DIRECTORY on a disk";
            let what = "no writeback with the state on tmpfs";
            return Err(Refusal::new(what, path.display().to_string(), hint));
        }
        let opened = match access {
            Access::Make => mark::make_directory(&source.lock),
            _ => mark::directory(&source.lock),
        };
        match opened {
            Ok(fd) => Home { path, fd, partition: false, access }.checked().map(Some),
            Err(error) if error.kind == Kind::NotFound => Ok(None),
            Err(error) => Err(cannot("use the state directory", &path, &error)),
        }
    }

    fn partition(path: PathBuf, access: Access) -> Answer<Home> {
        let file = file::open_partition(&path, access != Access::Read).map_err(|error| {
            if error.kind == Kind::Busy {
                let hint = "it is mounted, or another mount's journal: give another";
                return Refusal::new("state is in use", path.display().to_string(), hint);
            }
            cannot("open the partition", &path, &error)
        })?;
        Ok(Home { path, fd: file.into_fd(), partition: true, access })
    }

    fn stat(&self) -> std::result::Result<Stat, Errno> {
        rustix::fs::fstat(&self.fd)
    }

    fn checked(self) -> Answer<Home> {
        let stat = self.stat().map_err(|errno| missing(&self.path, errno))?;
        let me = rustix::process::geteuid().as_raw();
        let place = || self.path.display().to_string();
        if stat.st_uid != me {
            let hint = format!("it belongs to uid {}: mount as that user", stat.st_uid);
            return Err(Refusal::new("a state directory of another user", place(), hint));
        }
        if stat.st_mode & 0o022 != 0 {
            let hint = format!("others may write to it: chmod 700 {}", place());
            return Err(Refusal::new("not a state directory", place(), hint));
        }
        Ok(self)
    }

    /// Whether it is a partition.
    pub fn is_partition(&self) -> bool {
        self.partition
    }

    /// Whether it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.access == Access::Read
    }

    /// st_dev of the filesystem the journal lies on; None for a partition.
    pub fn filesystem(&self) -> Option<u64> {
        if self.partition { None } else { self.stat().ok().map(|stat| stat.st_dev) }
    }

    /// The directory's descriptor (the partition's).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The descriptor that carries the lock.
    pub fn into_lock(self) -> OwnedFd {
        self.fd
    }

    /// What a user calls the journal.
    pub fn journal_path(&self) -> PathBuf {
        if self.partition { self.path.clone() } else { self.path.join(file::NAME) }
    }

    /// Whether `source`'s own state directory is this one.
    pub fn is_of(&self, source: &Source) -> bool {
        let own = mark::directory(&source.lock).and_then(|own| rustix::fs::fstat(own).op("stat"));
        match (own, self.stat()) {
            (Ok(own), Ok(this)) => (own.st_dev, own.st_ino) == (this.st_dev, this.st_ino),
            _ => false,
        }
    }

    /// Takes the lock that keeps two mounts from one journal; shared for reading.
    pub fn lock(&self) -> Answer<()> {
        let operation = match self.access {
            Access::Read => FlockOperation::NonBlockingLockShared,
            _ => FlockOperation::NonBlockingLockExclusive,
        };
        let start = clock::now();
        loop {
            match rustix::fs::flock(&self.fd, operation) {
                Ok(()) => return Ok(()),
                Err(Errno::WOULDBLOCK) if clock::now().saturating_sub(start) < DYING => {
                    std::thread::sleep(PAUSE);
                }
                Err(Errno::WOULDBLOCK) => return Err(self.held()),
                Err(errno) => {
                    let error = Error::os("flock", errno);
                    return Err(cannot("lock the state", &self.path, &error));
                }
            }
        }
    }

    fn held(&self) -> Refusal {
        let holder = self.stat().ok().and_then(|stat| flock_holder(stat.st_dev, stat.st_ino));
        let holder = match holder {
            Some(pid) => {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!("process {pid} holds it ({})", name.trim())
            }
            None => "another process holds it".to_owned(),
        };
        let hint = format!("{holder}; unmount it there first");
        Refusal::new("state is in use", self.path.display().to_string(), hint)
    }

    /// The journal; None if there is none (an empty partition).
    pub fn journal(&self) -> Answer<Option<JournalFile>> {
        let writable = self.access != Access::Read;
        let failed = |error: Error| match (error.kind, &error.source) {
            (Kind::NotPermitted, None) => {
                let hint = "others may write to it, or it is no file: move it away";
                let place = self.journal_path().display().to_string();
                Refusal::new("not a journal of this user", place, hint)
            }
            _ => cannot("open the journal", &self.journal_path(), &error),
        };
        if !self.partition {
            return file::open(&self.fd, writable).map_err(failed);
        }
        let fd = self.fd.try_clone().op("dup").map_err(failed)?;
        let device = JournalFile::new(fd, writable);
        match file::content(&device).map_err(failed)? {
            Content::Journal => Ok(Some(device)),
            Content::Empty => Ok(None),
            Content::Foreign => {
                let place = self.path.display();
                let hint = format!(
                    "zero its start if nobody needs it: dd if=/dev/zero of={place} bs=1M count=1"
                );
                Err(Refusal::new("neither a journal nor empty", place.to_string(), hint))
            }
        }
    }

    /// Makes a new journal in place of any other. A partition is used as a whole.
    pub fn make_journal(&self, bytes: u64) -> Answer<()> {
        let made = if self.partition {
            let fd = self.fd.try_clone().op("dup");
            fd.and_then(|fd| {
                let device = JournalFile::new(fd, true);
                let uuid = file::random_uuid()?;
                crate::journal::Journal::format(&device, device.size()?, uuid)
            })
        } else {
            file::create(&self.fd, bytes)
        };
        made.map_err(|error| {
            if error.kind == Kind::NoSpace {
                let what = format!("no space for a journal of {}", format_size(bytes));
                let hint = "give --state elsewhere, or a smaller --journal-size (8M is the least)";
                return Refusal::new(what, self.path.display().to_string(), hint);
            }
            cannot("make a journal", &self.path, &error)
        })
    }

    /// Notes whose journal it is. What the note says is for messages: a failure is passed over.
    pub fn note_source(&self, source: &Path) {
        if self.partition || self.note().as_deref() == Some(source) {
            return;
        }
        let written = (|| -> Result<()> {
            let aside = "source.new";
            let flags = OFlags::WRONLY
                | OFlags::CREATE
                | OFlags::TRUNC
                | OFlags::NOFOLLOW
                | OFlags::CLOEXEC;
            let fd = openat(&self.fd, aside, flags, Mode::RUSR | Mode::WUSR).op("create")?;
            let note = Note { schema: 1, source: source.into() };
            let text = serde_json::to_vec(&note).map_err(|error| Error::os("write", error))?;
            File::from(fd).write_all(&text).op("write")?;
            renameat(&self.fd, aside, &self.fd, NOTE).op("rename")
        })();
        if let Err(error) = written {
            log::debug!("{}: {error}", self.path.display());
        }
    }

    /// Whose journal it is, as noted.
    pub fn note(&self) -> Option<PathBuf> {
        if self.partition {
            return None;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = openat(&self.fd, NOTE, flags, Mode::empty()).ok()?;
        let note: Note = serde_json::from_reader(File::from(fd)).ok()?;
        Some(PathBuf::from(&note.source))
    }
}

/// Whether a directory has such a note: it holds a journal, or held one.
pub fn has_note(path: &Path) -> bool {
    let file = File::open(path.join(NOTE));
    file.is_ok_and(|file| serde_json::from_reader::<_, Note>(file).is_ok_and(|n| n.schema == 1))
}

fn missing(path: &Path, errno: Errno) -> Refusal {
    let place = path.display().to_string();
    match errno {
        Errno::NOENT => {
            let hint = format!("make it: mkdir -p {place}");
            Refusal::new("no such state directory", place, hint)
        }
        Errno::NOTDIR => {
            let hint = "give a directory or a partition";
            Refusal::new("state is not a directory", place, hint)
        }
        errno => {
            let hint = "give a directory of your own with --state";
            Refusal::new(format!("cannot use the state ({})", words_of(errno)), place, hint)
        }
    }
}

/// "cannot WHAT (Permission denied): PLACE: ...".
pub fn cannot(what: &str, path: &Path, error: &Error) -> Refusal {
    let why = match &error.source {
        Some(source) => source.to_string().split(" (os error").next().unwrap_or_default().into(),
        None if error.place.is_empty() => format!("{:?}", error.kind),
        None => error.place.to_string(),
    };
    let hint = match error.kind {
        Kind::Denied | Kind::NotPermitted => "mount as its owner, or give --state elsewhere",
        _ => "check it, or give --state elsewhere",
    };
    Refusal::new(format!("cannot {what} ({why})"), path.display().to_string(), hint)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn what(result: Answer<Home>) -> String {
        result.unwrap_err().what
    }

    #[test]
    fn a_state_directory_is_made_private_and_kept_by_one() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("state");
        assert_eq!(what(Home::typed(&path, Access::Write)), "no such state directory");
        let deep = path.join("a/b");
        assert_eq!(what(Home::typed(&deep, Access::Make)), "no such state directory");
        let home = Home::typed(&path, Access::Make).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        home.lock().unwrap();
        assert!(home.journal().unwrap().is_none());
        home.make_journal(8 << 20).unwrap();
        assert_eq!(home.journal().unwrap().unwrap().size().unwrap(), 8 << 20);
        let second = Home::typed(&path, Access::Read).unwrap();
        let refusal = second.lock().unwrap_err();
        assert_eq!(refusal.what, "state is in use");
        assert!(refusal.hint.starts_with(&format!("process {} holds it", std::process::id())));
        drop(home);
        second.lock().unwrap();
        Home::typed(&path, Access::Read).unwrap().lock().unwrap();
    }

    #[test]
    fn what_others_may_write_and_memory_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().to_path_buf();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(what(Home::typed(&path, Access::Make)), "not a state directory");
        let file = path.join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(what(Home::typed(&file, Access::Make)), "state is not a directory");
        if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
            assert_eq!(what(Home::typed(memory.path(), Access::Make)), "state on tmpfs");
        }
    }

    #[test]
    fn the_note_names_the_source() {
        let scratch = tempfile::tempdir().unwrap();
        let home = Home::typed(&scratch.path().join("s"), Access::Make).unwrap();
        assert_eq!(home.note(), None);
        for source in ["/srv/a", "/srv/b"] {
            home.note_source(Path::new(source));
            assert_eq!(home.note().as_deref(), Some(Path::new(source)));
        }
    }
}
