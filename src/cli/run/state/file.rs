//! The journal's file or partition (layer 9): opened or made, always buffered.
//!
//! No state beyond the descriptor. Invariants: a file called `journal` is a whole journal (it is
//! made aside and renamed); a partition is only taken over if it is a journal or empty; nothing is
//! written out early but what the journal itself asks for.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, IFlags, Mode, OFlags, SeekFrom, fallocate, fsync, openat,
    renameat, seek, unlinkat,
};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::device::{BlockDevice, Range};
use crate::error::{Error, Kind, OpContext, Result};
use crate::journal::format::SLOT_BYTES;
use crate::journal::{Journal, Superblock, Uuid};
use crate::sys::write_out;

/// The journal's name in a state directory.
pub const NAME: &str = "journal";
/// The same while it is made.
const ASIDE: &str = "journal.new";

/// What of a partition must be zero before it is taken over: every filesystem has its first
/// superblock there.
const EMPTY_BYTES: usize = 1 << 20;

/// f_type of btrfs.
const BTRFS: u64 = 0x9123_683e;

/// A journal's bytes. One descriptor; every call is positioned, so it needs no lock.
#[derive(Debug)]
pub struct JournalFile {
    file: File,
    writable: bool,
}

impl JournalFile {
    /// Over an open descriptor.
    pub fn new(fd: OwnedFd, writable: bool) -> JournalFile {
        JournalFile { file: File::from(fd), writable }
    }

    /// The descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }
}

impl BlockDevice for JournalFile {
    fn prepare(&self, write: bool) -> Result<()> {
        if write && !self.writable {
            return Err(Error::new(Kind::ReadOnly, "open journal", ""));
        }
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::os("read", error)),
            }
        }
        Ok(done)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(data, offset).op("write")
    }

    fn size(&self) -> Result<u64> {
        // fstat(2) tells nothing of a partition.
        seek(&self.file, SeekFrom::End(0)).op("lseek")
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.file, bytes).op("truncate")
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        let flags = match what {
            Range::Allocate => FallocateFlags::KEEP_SIZE,
            Range::AllocateGrow => FallocateFlags::empty(),
            Range::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Range::ZeroKeep => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            Range::ZeroGrow => FallocateFlags::ZERO_RANGE,
        };
        fallocate(&self.file, flags, offset, len).op("fallocate")
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        if data_only {
            self.file.sync_data().op("fdatasync")
        } else {
            self.file.sync_all().op("fsync")
        }
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        let to = if hole { SeekFrom::Hole(offset) } else { SeekFrom::Data(offset) };
        seek(&self.file, to).op("lseek")
    }

    fn start_write_out(&self) {
        // Zero bytes: up to the end. A hint.
        let _ = write_out::start(&self.file, 0, 0);
    }
}

/// A new journal's name.
pub fn random_uuid() -> Result<Uuid> {
    let mut uuid = [0; 16];
    match getrandom(&mut uuid[..], GetRandomFlags::empty()).op("getrandom")? {
        16 => Ok(uuid),
        _ => Err(Error::new(Kind::Io, "getrandom", "too few bytes")),
    }
}

/// "0f3a...": 32 hexadecimal digits.
pub fn hex(uuid: &Uuid) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes a journal of this many bytes in a state directory, in place of one that is there.
pub fn create(directory: impl AsFd, bytes: u64) -> Result<()> {
    let directory = directory.as_fd();
    let made = fill(directory, bytes).and_then(|()| {
        renameat(directory, ASIDE, directory, NAME).op("rename")?;
        fsync(directory).op("fsync")
    });
    if made.is_err() {
        let _ = unlinkat(directory, ASIDE, AtFlags::empty());
    }
    made
}

fn fill(directory: impl AsFd, bytes: u64) -> Result<()> {
    match unlinkat(&directory, ASIDE, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(Error::os("remove", errno)),
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = openat(&directory, ASIDE, flags, Mode::RUSR | Mode::WUSR).op("create")?;
    let filesystem = rustix::fs::fstatfs(&fd).op("statfs")?;
    if filesystem.f_type as u64 & 0xffff_ffff == BTRFS
        && let Ok(now) = rustix::fs::ioctl_getflags(&fd)
    {
        // Only an empty file takes it. Without it every overwrite allocates: slower, not wrong.
        let _ = rustix::fs::ioctl_setflags(&fd, now | IFlags::NOCOW);
    }
    // Asked first: an allocation that fails has filled the filesystem for a moment.
    if filesystem.f_bavail.saturating_mul(filesystem.f_bsize as u64) < bytes {
        return Err(Error::new(Kind::NoSpace, "allocate", ""));
    }
    Journal::format(&JournalFile::new(fd, true), bytes, random_uuid()?)
}

/// Opens the journal of a state directory; None if there is none.
pub fn open(directory: impl AsFd, writable: bool) -> Result<Option<JournalFile>> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = match openat(directory, NAME, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.op("open")?,
    };
    let stat = rustix::fs::fstat(&fd).op("stat")?;
    // What somebody else could have made is never replayed: it says what to write where.
    let mine = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !mine {
        return Err(Error::new(Kind::NotPermitted, "open", ""));
    }
    Ok(Some(JournalFile::new(fd, writable)))
}

/// Opens a partition for oneself. EBUSY while it is mounted or used by another daemon.
pub fn open_partition(path: &Path, writable: bool) -> Result<JournalFile> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).op("open")?;
    Ok(JournalFile::new(fd, writable))
}

/// What a partition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A journal, perhaps a damaged one.
    Journal,
    /// Zeros where anything else would begin.
    Empty,
    /// Something else's.
    Foreign,
}

/// Looks what a partition holds.
pub fn content(device: &dyn BlockDevice) -> Result<Content> {
    let mut start = vec![0; EMPTY_BYTES];
    let read = device.read_at(&mut start, 0)?;
    start.truncate(read);
    let second = start.get(SLOT_BYTES as usize..).unwrap_or_default();
    if Superblock::decode(&start).is_some() || Superblock::decode(second).is_some() {
        return Ok(Content::Journal);
    }
    let empty = start.iter().all(|&byte| byte == 0);
    Ok(if empty { Content::Empty } else { Content::Foreign })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use super::*;
    use crate::journal::{Mutants, Recovered};

    #[test]
    fn a_journal_is_made_whole_and_opened() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = File::open(scratch.path()).unwrap();
        assert!(open(&directory, true).unwrap().is_none());
        std::fs::write(scratch.path().join(ASIDE), "left by a kill").unwrap();
        create(&directory, 8 << 20).unwrap();
        let file = open(&directory, true).unwrap().unwrap();
        assert_eq!(file.size().unwrap(), 8 << 20);
        assert_eq!(content(&file).unwrap(), Content::Journal);
        let recovered = Recovered::open(Arc::new(file), Mutants::default()).unwrap();
        assert!(recovered.is_empty());
        let first = recovered.superblock().uuid;
        create(&directory, 16 << 20).unwrap();
        let file = open(&directory, false).unwrap().unwrap();
        assert_eq!(file.prepare(true).unwrap_err().kind, Kind::ReadOnly);
        let recovered = Recovered::open(Arc::new(file), Mutants::default()).unwrap();
        assert_ne!(recovered.superblock().uuid, first);
        assert!(!scratch.path().join(ASIDE).exists());
    }

    #[test]
    fn what_others_can_write_is_no_journal() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = File::open(scratch.path()).unwrap();
        create(&directory, 8 << 20).unwrap();
        let path = scratch.path().join(NAME);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        assert_eq!(open(&directory, true).unwrap_err().kind, Kind::NotPermitted);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(open(&directory, false).is_err());
    }

    #[test]
    fn the_content_of_a_partition_is_told() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("disk");
        std::fs::write(&path, vec![0; 2 << 20]).unwrap();
        let look = || content(&open_partition(&path, false).unwrap()).unwrap();
        assert_eq!(look(), Content::Empty);
        let mut bytes = vec![0; 2 << 20];
        bytes[1080] = 0x53;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(look(), Content::Foreign);
    }
}
