//! SOURCE (layer 9): what it may be, and the descriptors opened before the mount covers it.
//!
//! No state after `open`; the flock lives as long as `Source::lock`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::stale;
use crate::cli::failure::{Failure, Outcome};
use crate::fuse::mount::words_of;

/// The magic of a bcachefs superblock (c68573f6-66ce-90a9-d96a-60cf803df7ef).
const BCACHEFS_MAGIC: [u8; 16] = [
    0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef,
];
/// The magic of a bcache superblock, which early bcachefs used as well.
const BCACHE_MAGIC: [u8; 16] = [
    0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81,
];
/// Where the magic stands: in the superblock at sector 8, and in the layout at sector 7.
const MAGIC_OFFSETS: [u64; 2] = [8 * 512 + 24, 7 * 512];

/// An open source directory.
#[derive(Debug)]
pub struct Source {
    /// Its canonical path.
    pub path: PathBuf,
    /// O_PATH|O_DIRECTORY, for the tree: opened before the mount can cover the path.
    pub root: OwnedFd,
    /// Readable, for flock.
    pub lock: OwnedFd,
    /// Its device number.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// Its st_mode.
    pub mode: u32,
}

impl Source {
    /// Opens the source, or says in one line why it cannot be one. A dead mount of ours on it is
    /// detached first.
    pub fn open(typed: &Path) -> Outcome<Source> {
        stale::clear(typed)?;
        let path = typed.canonicalize().map_err(|error| refuse(typed, &error))?;
        check_kind(&path)?;
        let open = |flags: OFlags| {
            rustix::fs::open(&path, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| refuse(&path, &errno.into()))
        };
        let lock = open(OFlags::RDONLY)?;
        let root = open(OFlags::PATH)?;
        let stat = rustix::fs::fstat(&root).map_err(|errno| refuse(&path, &errno.into()))?;
        let (device, inode, mode) = (stat.st_dev, stat.st_ino, stat.st_mode);
        Ok(Source { path, root, lock, device, inode, mode })
    }

    /// Takes the lock that keeps two mounts apart, whoever the users are and wherever the state
    /// is; shared for `ro`. False if somebody holds it. A source that cannot be locked (some
    /// network filesystems) counts as locked.
    pub fn try_lock(&self, read_only: bool) -> Outcome<bool> {
        let operation = if read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        match rustix::fs::flock(&self.lock, operation) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(Errno::BADF | Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                log::debug!("{}: cannot be locked", self.path.display());
                Ok(true)
            }
            Err(errno) => Err(refuse(&self.path, &errno.into())),
        }
    }

    /// The process that holds the lock.
    pub fn lock_holder(&self) -> Option<u32> {
        // Twice: while other locks come and go, reading /proc/locks may skip one that stays.
        let holder = || flock_holder(self.device, self.inode);
        holder().or_else(holder)
    }
}

/// The process that holds a flock on this inode, from /proc/locks, which shows those of every user.
pub fn flock_holder(device: u64, inode: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let wanted = format!("{major:02x}:{minor:02x}:{inode}");
    let text = std::fs::read_to_string("/proc/locks").ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().filter(|&word| word != "->").skip(1);
        let kind = words.next()?;
        let pid = words.nth(2)?.parse().ok()?;
        (kind == "FLOCK" && words.next()? == wanted).then_some(pid)
    })
}

fn refuse(path: &Path, error: &std::io::Error) -> Failure {
    let place = path.display();
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => Failure::new("no such directory", place, "check the name of SOURCE"),
        Some(Errno::ACCESS | Errno::PERM) => Failure::new(
            "cannot read SOURCE (permission denied)",
            place,
            "mount as a user who may read it, or as root",
        ),
        Some(errno) => {
            Failure::new(words_of(errno), place, "check SOURCE; bcachefs-fuse doctor helps")
        }
        None => Failure::new(error, place, "check SOURCE; bcachefs-fuse doctor helps"),
    }
}

/// Everything that is not a directory gets its own answer.
fn check_kind(path: &Path) -> Outcome<()> {
    let kind = path.metadata().map_err(|error| refuse(path, &error))?.file_type();
    if kind.is_dir() {
        return Ok(());
    }
    let place = path.display();
    if (kind.is_file() || kind.is_block_device()) && has_bcachefs_magic(path) {
        let hint = format!(
            "bcachefs-fuse does not read that filesystem; use bcachefs-tools: mount -t bcachefs \
             {place} MOUNTPOINT"
        );
        return Err(Failure::new("a bcachefs superblock", place, hint));
    }
    if kind.is_file() {
        let hint = format!(
            "inspection comes in a later version; mount its directory: {}",
            path.parent().unwrap_or(Path::new("/")).display()
        );
        return Err(Failure::new("a file, not a directory", place, hint));
    }
    if kind.is_block_device() {
        let hint = "give a directory of image files; copy the device into one: dd";
        return Err(Failure::new("a block device, not a directory", place, hint));
    }
    Err(Failure::new("not a directory", place, "give a directory of image files"))
}

fn has_bcachefs_magic(path: &Path) -> bool {
    let Ok(mut file) = File::open(path) else { return false };
    MAGIC_OFFSETS.iter().any(|&offset| {
        let mut magic = [0u8; 16];
        file.seek(SeekFrom::Start(offset)).is_ok()
            && file.read_exact(&mut magic).is_ok()
            && (magic == BCACHEFS_MAGIC || magic == BCACHE_MAGIC)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_exclusive_and_its_holder_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let first = Source::open(directory.path()).unwrap();
        let second = Source::open(directory.path()).unwrap();
        assert!(first.try_lock(true).unwrap() && second.try_lock(true).unwrap());
        assert!(!second.try_lock(false).unwrap());
        drop(first);
        assert!(second.try_lock(false).unwrap());
        let third = Source::open(directory.path()).unwrap();
        assert!(!third.try_lock(true).unwrap());
        assert_eq!(third.lock_holder(), Some(std::process::id()));
    }

    #[test]
    fn a_superblock_is_recognised() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("image");
        let mut bytes = vec![0; 8192];
        std::fs::write(&file, &bytes).unwrap();
        assert!(Source::open(&file).unwrap_err().line.starts_with("a file, not a directory"));
        bytes[4120..4136].copy_from_slice(&BCACHEFS_MAGIC);
        std::fs::write(&file, &bytes).unwrap();
        assert!(Source::open(&file).unwrap_err().line.starts_with("a bcachefs superblock"));
    }
}
