//! Operations on a tree that can be done to two trees alike, and their results compared.
//!
//! [`Op`] says what; [`Hands`] does it below one root; [`choose`] picks the next one. Parents are
//! opened with RESOLVE_BENEATH, so that a symbolic link inside the tree is followed and none leads
//! out of it, and device nodes are never opened.

pub mod choose;
mod data;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Timespec,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::treestate::{self, Octal};

/// Files that are held open at once.
pub const HELD: usize = 3;

/// One operation; paths are relative to the root.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    Create { path: PathBuf, mode: Octal, exclusive: bool },
    Write { path: PathBuf, offset: u64, len: usize, seed: u64 },
    Append { path: PathBuf, len: usize, seed: u64 },
    OpenTruncate { path: PathBuf },
    Truncate { path: PathBuf, len: u64 },
    Allocate { path: PathBuf, mode: u32, offset: u64, len: u64 },
    Copy { path: PathBuf, offset: u64, to: PathBuf, to_offset: u64, len: usize },
    Map { path: PathBuf, offset: u64, len: usize, seed: u64 },
    Read { path: PathBuf, offset: u64, len: usize },
    Sync { path: PathBuf },
    List { path: PathBuf },
    Rename { path: PathBuf, to: PathBuf, flags: u32 },
    Link { path: PathBuf, to: PathBuf },
    Unlink { path: PathBuf },
    Rmdir { path: PathBuf },
    RemoveTree { path: PathBuf },
    Mkdir { path: PathBuf, mode: Octal },
    Symlink { path: PathBuf, target: OsString },
    Mknod { path: PathBuf, kind: Octal, mode: Octal, device: u64 },
    Chmod { path: PathBuf, mode: Octal },
    Chown { path: PathBuf, uid: Option<u32>, gid: Option<u32> },
    Times { path: PathBuf, access: Option<(i64, i64)>, modification: Option<(i64, i64)> },
    SetXattr { path: PathBuf, name: String, value: OsString, flags: u32 },
    RemoveXattr { path: PathBuf, name: String },
    Hold { path: PathBuf, slot: usize },
    HeldWrite { slot: usize, offset: u64, len: usize, seed: u64 },
    HeldTruncate { slot: usize, len: u64 },
    HeldMode { slot: usize, mode: Octal },
    Release { slot: usize },
}

impl Op {
    /// The paths it touches.
    pub fn paths(&self) -> Vec<&Path> {
        use Op::*;
        match self {
            Rename { path, to, .. } | Link { path, to } | Copy { path, to, .. } => vec![path, to],
            HeldWrite { .. } | HeldTruncate { .. } | HeldMode { .. } | Release { .. } => vec![],
            Create { path, .. } | Write { path, .. } | Append { path, .. } => vec![path],
            OpenTruncate { path } | Truncate { path, .. } | Allocate { path, .. } => vec![path],
            Map { path, .. } | Read { path, .. } | Sync { path } | List { path } => vec![path],
            Unlink { path } | Rmdir { path } | RemoveTree { path } => vec![path],
            Mkdir { path, .. } | Symlink { path, .. } | Mknod { path, .. } => vec![path],
            Chmod { path, .. } | Chown { path, .. } | Times { path, .. } => vec![path],
            SetXattr { path, .. } | RemoveXattr { path, .. } | Hold { path, .. } => vec![path],
        }
    }
}

/// What an operation answered, with values that must be equal on both trees.
pub type Answer = Result<Vec<u8>, Errno>;

/// An answer that is short enough to print.
#[derive(Clone, Copy, Debug)]
pub struct Short<'a>(pub &'a Answer);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(bytes) if bytes.is_empty() => f.write_str("ok"),
            Ok(bytes) if bytes.len() <= 300 => write!(f, "ok {:?}", OsStr::from_bytes(bytes)),
            Ok(bytes) => {
                write!(f, "ok, {} bytes, hash {:x}", bytes.len(), treestate::hash(bytes))
            }
            Err(error) => write!(f, "{error}"),
        }
    }
}

const NOTHING: Answer = Ok(Vec::new());

/// A root, and the files held open below it.
#[derive(Debug)]
pub struct Hands {
    root: OwnedFd,
    held: [Option<File>; HELD],
}

/// The directory a path lies in (never through a link that leads out) and the last name.
fn parent<'a>(root: BorrowedFd<'_>, path: &'a Path) -> Result<(OwnedFd, &'a OsStr), Errno> {
    let name = path.file_name().unwrap_or(OsStr::new("."));
    let above = path.parent().unwrap_or(Path::new(""));
    let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
    Ok((beneath(root, above, OFlags::PATH | OFlags::DIRECTORY, 0)?, name))
}

fn beneath(root: BorrowedFd<'_>, path: &Path, flags: OFlags, mode: u32) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let mode = Mode::from_raw_mode(mode);
    // The kernel gives up on ".." when anything on the machine is renamed meanwhile.
    let mut tries = 0;
    loop {
        let flags = flags | OFlags::CLOEXEC;
        match rustix::fs::openat2(root, path, flags, mode, ResolveFlags::BENEATH) {
            Err(Errno::AGAIN) if tries < 100 => tries += 1,
            other => return other,
        }
    }
}

/// The descriptor's own name in /proc, optionally with a name below it.
fn proc_path(fd: BorrowedFd<'_>, below: Option<&OsStr>) -> PathBuf {
    let path = Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string());
    below.map_or(path.clone(), |below| path.join(below))
}

impl Hands {
    /// Hands on the tree at `root`.
    pub fn new(root: &Path) -> std::io::Result<Hands> {
        Ok(Hands { root: File::open(root)?.into(), held: Default::default() })
    }

    /// Opens for reading or writing: links inside the tree are followed, devices are not opened.
    fn open(&self, path: &Path, flags: OFlags, mode: u32) -> Result<File, Errno> {
        if let Ok(node) = beneath(self.root.as_fd(), path, OFlags::PATH, 0) {
            let stat = rustix::fs::statat(&node, "", AtFlags::EMPTY_PATH)?;
            let kind = FileType::from_raw_mode(stat.st_mode);
            if matches!(kind, FileType::BlockDevice | FileType::CharacterDevice) {
                return Err(Errno::NXIO);
            }
        }
        let flags = flags | OFlags::NONBLOCK;
        Ok(File::from(beneath(self.root.as_fd(), path, flags, mode)?))
    }

    fn at<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a OsStr), Errno> {
        parent(self.root.as_fd(), path)
    }

    /// Does it.
    pub fn perform(&mut self, op: &Op) -> Answer {
        match op {
            Op::Hold { .. }
            | Op::HeldWrite { .. }
            | Op::HeldTruncate { .. }
            | Op::HeldMode { .. }
            | Op::Release { .. } => self.hold(op),
            Op::Create { .. }
            | Op::Write { .. }
            | Op::Append { .. }
            | Op::OpenTruncate { .. }
            | Op::Truncate { .. }
            | Op::Allocate { .. }
            | Op::Copy { .. }
            | Op::Map { .. }
            | Op::Read { .. }
            | Op::Sync { .. } => self.bytes(op),
            Op::Chmod { .. }
            | Op::Chown { .. }
            | Op::Times { .. }
            | Op::SetXattr { .. }
            | Op::RemoveXattr { .. } => self.attributes(op),
            _ => self.names(op),
        }
    }

    fn names(&self, op: &Op) -> Answer {
        match op {
            Op::List { path } => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                let open = beneath(self.root.as_fd(), path, flags, 0)?;
                let names = treestate::names(open.as_fd())?;
                let line = |(name, kind)| format!("{name:?} {kind:?}\n").into_bytes();
                return Ok(names.into_iter().flat_map(line).collect());
            }
            Op::Rename { path, to, flags } => {
                let ((from, name), (into, new)) = (self.at(path)?, self.at(to)?);
                let flags = RenameFlags::from_bits_retain(*flags);
                rustix::fs::renameat_with(from, name, into, new, flags)?;
            }
            Op::Link { path, to } => {
                let ((from, name), (into, new)) = (self.at(path)?, self.at(to)?);
                rustix::fs::linkat(from, name, into, new, AtFlags::empty())?;
            }
            Op::Unlink { path } => {
                let (at, name) = self.at(path)?;
                rustix::fs::unlinkat(at, name, AtFlags::empty())?;
            }
            Op::Rmdir { path } => {
                let (at, name) = self.at(path)?;
                rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR)?;
            }
            Op::RemoveTree { path } => {
                let (at, name) = self.at(path)?;
                remove_tree(at.as_fd(), name)?;
            }
            Op::Mkdir { path, mode } => {
                let (at, name) = self.at(path)?;
                rustix::fs::mkdirat(at, name, Mode::from_raw_mode(mode.0))?;
            }
            Op::Symlink { path, target } => {
                let (at, name) = self.at(path)?;
                rustix::fs::symlinkat(target, at, name)?;
            }
            Op::Mknod { path, kind, mode, device } => {
                let (at, name) = self.at(path)?;
                let kind = FileType::from_raw_mode(kind.0);
                rustix::fs::mknodat(at, name, kind, Mode::from_raw_mode(mode.0), *device)?;
            }
            _ => unreachable!("{op:?} is no operation on names"),
        }
        NOTHING
    }

    fn attributes(&self, op: &Op) -> Answer {
        let [path] = op.paths()[..] else { unreachable!("{op:?} has one path") };
        let (at, name) = self.at(path)?;
        match op {
            Op::Chmod { mode, .. } => {
                // By a descriptor: a link must not be followed out of the tree.
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let node = rustix::fs::openat(at, name, flags, Mode::empty())?;
                let stat = rustix::fs::statat(&node, "", AtFlags::EMPTY_PATH)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                    return Err(Errno::LOOP);
                }
                rustix::fs::chmod(proc_path(node.as_fd(), None), Mode::from_raw_mode(mode.0))?;
            }
            Op::Chown { uid, gid, .. } => {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                rustix::fs::chownat(at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Op::Times { access, modification, .. } => {
                let time = |time: &Option<(i64, i64)>| {
                    let (tv_sec, tv_nsec) = time.unwrap_or((0, rustix::fs::UTIME_NOW));
                    Timespec { tv_sec, tv_nsec }
                };
                let (last_access, last_modification) = (time(access), time(modification));
                let times = Timestamps { last_access, last_modification };
                rustix::fs::utimensat(at, name, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Op::SetXattr { name: attribute, value, flags, .. } => {
                let flags = XattrFlags::from_bits_retain(*flags);
                let path = proc_path(at.as_fd(), Some(name));
                rustix::fs::lsetxattr(path, attribute.as_str(), value.as_bytes(), flags)?;
            }
            Op::RemoveXattr { name: attribute, .. } => {
                let path = proc_path(at.as_fd(), Some(name));
                rustix::fs::lremovexattr(path, attribute.as_str())?;
            }
            _ => unreachable!("{op:?} is no operation on attributes"),
        }
        NOTHING
    }
}

fn remove_tree(at: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    let inner = treestate::directory(at, name)?;
    for (below, kind) in treestate::names(inner.as_fd())? {
        if kind == FileType::Directory {
            remove_tree(inner.as_fd(), &below)?;
        } else {
            rustix::fs::unlinkat(&inner, &below, AtFlags::empty())?;
        }
    }
    rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR)
}

/// The bits of fallocate's mode as an [`Op`] carries them.
pub fn allocate_mode(flags: FallocateFlags) -> u32 {
    flags.bits()
}
