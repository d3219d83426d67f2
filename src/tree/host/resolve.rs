//! Finding the files of a journal's records again (J12), before anybody has looked anything up.
//!
//! In this order: the recorded path; as root the file handle, which also finds what was renamed,
//! moved out of the source (it is still the inode whose bytes these are) or unlinked while open;
//! else a walk through the source for the inode number. Nothing is followed: no symlink, no "..";
//! a filesystem mounted below is entered by the walk only if it is the recorded one. Whatever is
//! found counts only if it is a regular file of the recorded identity: filesystem, and handle or
//! (without one) inode number and birth time; a birth time that both know must be the same.
//!
//! A directory that may not be read is passed over: what is in it is found by its path or its
//! handle, or not at all. Other errors are told, because "not there" lets data go.
//! No states, no locks held across I/O.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

use super::record::{NAMELESS, birth_of};
use super::{HostTree, PATH_FLAGS, STATE_NAME, attr_of, identity_of, stat_fd};
use crate::device::FileDevice;
use crate::error::{Error, OpContext, Result};
use crate::journal::DeviceIdentity;
use crate::store::recovery::{Located, Resolver};
use crate::sys::flags::{S_IFDIR, S_IFMT, S_IFREG};
use crate::sys::handle::FileHandle;
use crate::sys::path_fd;
use crate::tree::{ROOT, Timestamp};
use crate::units::Stamp;

/// Bytes asked of getdents64(2) at a time.
const BATCH_BYTES: usize = 32 << 10;

/// What a search by handle says.
enum ByHandle {
    Found(OwnedFd),
    /// Its filesystem was asked and has it not.
    Gone,
    /// Nobody could be asked.
    Unknown,
}

/// Nothing is there, or nothing that may be seen.
fn is_absent(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::NOENT
            | Errno::NOTDIR
            | Errno::STALE
            | Errno::ACCESS
            | Errno::PERM
            | Errno::LOOP
            | Errno::NAMETOOLONG
    )
}

/// The entries of a directory that a search wants: subdirectories, and names of the inode number.
fn entries_of(dir: &OwnedFd, inode: u64, into: &mut Vec<(OsString, bool)>) -> Result<()> {
    let fd = match path_fd::reopen(dir, OFlags::RDONLY | OFlags::DIRECTORY) {
        Err(errno) if is_absent(errno) => return Ok(()),
        other => other.op("opendir")?,
    };
    let mut buffer = vec![MaybeUninit::uninit(); BATCH_BYTES];
    let mut entries = RawDir::new(&fd, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.op("readdir")?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let kind = entry.file_type();
        let may_be_dir = matches!(kind, FileType::Directory | FileType::Unknown);
        let is_wanted =
            entry.ino() == inode && matches!(kind, FileType::RegularFile | FileType::Unknown);
        if may_be_dir || is_wanted {
            into.push((OsStr::from_bytes(name).to_os_string(), is_wanted));
        }
    }
    Ok(())
}

fn open_in(dir: impl AsFd, name: &OsStr) -> Result<Option<OwnedFd>> {
    match rustix::fs::openat(dir, name, PATH_FLAGS, Mode::empty()) {
        Err(errno) if is_absent(errno) => Ok(None),
        other => other.op("open").map(Some),
    }
}

impl HostTree {
    /// Opens what a path below the root is, one name at a time, so that nothing leads out. The
    /// filesystems on the way become known.
    pub(super) fn open_below(&self, path: &Path) -> Result<Option<OwnedFd>> {
        let mut at: Option<OwnedFd> = None;
        let root = self.fd_of(ROOT)?;
        for (depth, component) in path.components().enumerate() {
            let Component::Normal(name) = component else { return Ok(None) };
            if depth == 0 && name == STATE_NAME {
                return Ok(None);
            }
            let opened = match &at {
                Some(dir) => open_in(dir, name)?,
                None => open_in(&*root, name)?,
            };
            let Some(fd) = opened else { return Ok(None) };
            self.note_mount(&stat_fd(&fd)?, &fd);
            at = Some(fd);
        }
        Ok(at)
    }

    /// Whether a descriptor is of the recorded file.
    fn is_recorded(&self, record: &DeviceIdentity, fd: &OwnedFd) -> Result<bool> {
        let stat = stat_fd(fd)?;
        if stat.st_mode & S_IFMT != S_IFREG
            || self.filesystem(stat.st_dev, fd)? != Some(record.filesystem)
        {
            return Ok(false);
        }
        let unknown = Timestamp::default();
        let birth = birth_of(fd)?;
        if birth != record.birth && birth != unknown && record.birth != unknown {
            return Ok(false);
        }
        Ok(match FileHandle::of(fd) {
            Ok(handle) if !record.handle.is_empty() => {
                handle.kind() == record.handle_type && *handle.bytes() == *record.handle
            }
            _ => stat.st_ino == record.inode && birth != unknown && record.birth != unknown,
        })
    }

    /// The filesystems below the source that are known and have this name, the root's first.
    fn mounts_of(&self, filesystem: [u8; 16]) -> Result<Vec<Arc<OwnedFd>>> {
        let root_dev = self.node(ROOT)?.identity.dev;
        let mut mounts: Vec<(u64, Arc<OwnedFd>)> =
            self.mounts.read().iter().map(|(dev, fd)| (*dev, fd.clone())).collect();
        mounts.sort_by_key(|(dev, _)| (*dev != root_dev, *dev));
        let mut found = Vec::new();
        for (dev, fd) in mounts {
            if self.filesystem(dev, &*fd)? == Some(filesystem) {
                found.push(fd);
            }
        }
        Ok(found)
    }

    fn by_handle(&self, record: &DeviceIdentity) -> Result<ByHandle> {
        let Some(handle) = FileHandle::from_parts(record.handle_type, &record.handle) else {
            return Ok(ByHandle::Unknown);
        };
        if !self.opens_by_handle {
            return Ok(ByHandle::Unknown);
        }
        // Without a name of its filesystem nobody knows whether the right one was asked.
        let is_nameless = record.filesystem == NAMELESS;
        let gone = || if is_nameless { ByHandle::Unknown } else { ByHandle::Gone };
        let mut answer = ByHandle::Unknown;
        for mount in self.mounts_of(record.filesystem)? {
            match handle.open(&*mount, OFlags::PATH | OFlags::NOFOLLOW) {
                Ok(fd) if self.is_recorded(record, &fd)? => return Ok(ByHandle::Found(fd)),
                Ok(_) => answer = gone(),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::STALE | Errno::NOENT) => answer = gone(),
                    // A container's root, or a filesystem that has handles no more.
                    Some(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::INVAL) => {}
                    _ => return Err(Error::os("open by handle", error)),
                },
            }
        }
        Ok(answer)
    }

    /// Looks through the source for the recorded inode number.
    fn walk(&self, record: &DeviceIdentity) -> Result<Option<(OwnedFd, PathBuf)>> {
        let mut waiting = vec![PathBuf::new()];
        let mut names = Vec::new();
        while let Some(below) = waiting.pop() {
            let dir = match below.as_os_str().is_empty() {
                true => self.fd_of(ROOT)?,
                false => match self.open_below(&below)? {
                    Some(dir) => Arc::new(dir),
                    None => continue,
                },
            };
            let dev = stat_fd(&*dir)?.st_dev;
            entries_of(&dir, record.inode, &mut names)?;
            for (name, is_wanted) in names.drain(..) {
                if below.as_os_str().is_empty() && name == STATE_NAME {
                    continue;
                }
                let Some(fd) = open_in(&*dir, &name)? else { continue };
                let stat = stat_fd(&fd)?;
                if stat.st_mode & S_IFMT == S_IFDIR {
                    if self.may_enter(record, dev, &stat, &fd)? {
                        waiting.push(below.join(&name));
                    }
                } else if is_wanted && self.is_recorded(record, &fd)? {
                    return Ok(Some((fd, below.join(&name))));
                }
            }
        }
        Ok(None)
    }

    fn may_enter(
        &self,
        record: &DeviceIdentity,
        dev: u64,
        stat: &Stat,
        fd: &OwnedFd,
    ) -> Result<bool> {
        if stat.st_dev == dev {
            return Ok(true);
        }
        self.note_mount(stat, fd);
        Ok(self.filesystem(stat.st_dev, fd)? == Some(record.filesystem))
    }

    /// Where a descriptor's file is below the root, if the kernel can tell: what it says is tried.
    fn path_below(&self, fd: &OwnedFd) -> Option<PathBuf> {
        let link = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
        let root = link(self.fd_of(ROOT).ok()?.as_raw_fd())?;
        let below = link(fd.as_raw_fd())?.strip_prefix(root).ok()?.to_path_buf();
        let (there, here) = (self.open_below(&below).ok()??, stat_fd(fd).ok()?);
        let there = stat_fd(&there).ok()?;
        ((there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)).then_some(below)
    }

    /// A device that keeps nothing open until it is used: a journal may have records of more files
    /// than there are descriptors.
    fn device_by_handle(&self, stat: &Stat, handle: FileHandle) -> Option<Arc<FileDevice>> {
        if self.read_only || !self.opens_by_handle || stat.st_nlink == 0 {
            return None;
        }
        let mount = self.mounts.read().get(&stat.st_dev).cloned()?;
        handle.open(&*mount, OFlags::PATH | OFlags::NOFOLLOW).ok()?;
        let opener = move |flags: OFlags| {
            let opened = handle.open(&*mount, flags);
            opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        Some(Arc::new(FileDevice::new(Box::new(opener), self.direct_io)))
    }

    fn locate(&self, fd: OwnedFd, path: PathBuf) -> Result<Located> {
        let stat = stat_fd(&fd)?;
        let handle = FileHandle::of(&fd).ok();
        let attr = attr_of(&stat, stat.st_ino);
        let identity = identity_of(&stat, handle.as_ref());
        let device = match handle.and_then(|handle| self.device_by_handle(&stat, handle)) {
            Some(device) => device,
            None => self.device(&Arc::new(fd)),
        };
        Ok(Located {
            identity,
            device,
            path,
            stamp: Stamp { size: attr.size, mtime: attr.mtime, ctime: attr.ctime },
            nlink: attr.nlink,
        })
    }
}

impl Resolver for HostTree {
    fn find(&self, record: &DeviceIdentity) -> Result<Option<Located>> {
        let path = PathBuf::from(OsStr::from_bytes(&record.path));
        if let Some(fd) = self.open_below(&path)?
            && self.is_recorded(record, &fd)?
        {
            return self.locate(fd, path).map(Some);
        }
        match self.by_handle(record)? {
            ByHandle::Found(fd) => {
                let path = self.path_below(&fd).unwrap_or(path);
                return self.locate(fd, path).map(Some);
            }
            ByHandle::Gone => return Ok(None),
            ByHandle::Unknown => {}
        }
        match self.walk(record)? {
            Some((fd, path)) => self.locate(fd, path).map(Some),
            None => Ok(None),
        }
    }
}
