//! The namespace (layer 6): names, inodes and attributes behind one trait. Data never passes here:
//! a tree hands out a `BlockDevice` for a regular file and the store does the rest.

pub mod host;
pub mod overlay;

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::sync::Arc;

pub use host::HostTree;
pub use overlay::OverlayTree;

use crate::device::BlockDevice;
use crate::error::{OpContext, Result};
use crate::journal::DeviceIdentity;
use crate::store::recovery::Resolver;
pub use crate::units::{Identity, Timestamp};

/// The number of a live inode, as the kernel knows it; `ROOT` is the root's.
pub type NodeId = u64;

/// The root directory.
pub const ROOT: NodeId = 1;

/// The I/O size told to applications for regular files: every request is a round trip through the
/// kernel (two for a write, which asks for security.capability first), so cp(1) and its like fare
/// better with a few large ones. Not above the default `bypass`: it is still worth caching.
const PREFERRED_IO: u32 = 256 << 10;

/// What stat(2) tells. `mode` holds the type bits too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number; equals the node's number.
    pub ino: NodeId,
    /// Size in bytes.
    pub size: u64,
    /// Allocated blocks of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of bytes.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
    /// Type and permission bits.
    pub mode: u32,
    /// Names of the inode.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Preferred I/O size in bytes.
    pub blksize: u32,
}

/// An inode the kernel has been told about: counted once by `lookup` and its like.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its number.
    pub id: NodeId,
    /// Tells two inodes apart that had the number one after the other.
    pub generation: u64,
    /// Its attributes.
    pub attr: Attr,
}

/// Who asks, for what is created.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Mask to apply where no default ACL does.
    pub umask: u32,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// Leave it.
    Omit,
    /// The moment of the call, by the source's clock.
    Now,
    /// This one.
    At(Timestamp),
}

/// What a new name stands for.
#[derive(Clone, Copy, Debug)]
pub enum NewNode<'a> {
    /// mkdir(2).
    Dir,
    /// mknod(2): mode's type bits and the device number.
    Special {
        /// Device number, of block and character devices.
        rdev: u32,
    },
    /// symlink(2) to this target.
    Symlink(&'a OsStr),
}

/// One name of a directory; `cookie` continues after it.
#[derive(Clone, Debug)]
pub struct DirEntry {
    /// The name.
    pub name: std::ffi::OsString,
    /// Its inode number, as stat shows it.
    pub ino: NodeId,
    /// Type bits (S_IFMT), zero if unknown.
    pub kind: u32,
    /// The position behind this entry.
    pub cookie: u64,
}

/// An open directory. Positions are the source's own cookies, so that seekdir(3) works.
pub trait DirStream: Send {
    /// The entry at the position, without moving on. None at the end.
    fn peek(&mut self, cookie: u64) -> Result<Option<&DirEntry>>;

    /// Moves past the entry that `peek` showed.
    fn advance(&mut self);
}

/// statvfs(3).
#[derive(Clone, Copy, Debug)]
pub struct FsStat {
    /// Fragment size in bytes, the unit of the block counts.
    pub frsize: u32,
    /// Preferred I/O size in bytes.
    pub bsize: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks.
    pub bfree: u64,
    /// Free blocks for ordinary users.
    pub bavail: u64,
    /// Inodes in all.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
}

impl FsStat {
    /// The filesystem that an open file is on.
    fn of(fd: impl AsFd) -> Result<FsStat> {
        let stat = rustix::fs::fstatvfs(fd).op("statfs")?;
        Ok(FsStat {
            frsize: stat.f_frsize as u32,
            bsize: stat.f_bsize as u32,
            blocks: stat.f_blocks,
            bfree: stat.f_bfree,
            bavail: stat.f_bavail,
            files: stat.f_files,
            ffree: stat.f_ffree,
        })
    }
}

/// A regular file opened for data.
#[derive(Clone)]
pub struct Opened {
    /// The file's bytes.
    pub device: Arc<dyn BlockDevice>,
    /// Which inode they belong to.
    pub identity: Identity,
    /// The attributes at the open.
    pub attr: Attr,
}

/// A namespace. Thread-safe; no call holds a lock across a system call that waits for a device,
/// except where the source's own semantics need it.
pub trait Tree: Send + Sync {
    /// The entry of `name` in `parent`; counts one kernel reference.
    fn lookup(&self, parent: NodeId, name: &OsStr) -> Result<Entry>;

    /// The kernel drops `count` references.
    fn forget(&self, node: NodeId, count: u64);

    /// Attributes now.
    fn attr(&self, node: NodeId) -> Result<Attr>;

    /// Which inode of the source it is.
    fn identity(&self, node: NodeId) -> Result<Identity>;

    /// Where the node was last seen, relative to the root, for people.
    fn path(&self, node: NodeId) -> std::path::PathBuf;

    /// Sets permission bits.
    fn set_mode(&self, node: NodeId, mode: u32) -> Result<()>;

    /// Sets owner and group, where given.
    fn set_owner(&self, node: NodeId, uid: Option<u32>, gid: Option<u32>) -> Result<()>;

    /// Sets times.
    fn set_times(&self, node: NodeId, atime: SetTime, mtime: SetTime) -> Result<()>;

    /// The target of a symlink.
    fn readlink(&self, node: NodeId) -> Result<Vec<u8>>;

    /// Makes anything but a regular file that is opened at once.
    fn make(
        &self,
        parent: NodeId,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry>;

    /// Makes (or, without `exclusive`, takes) a regular file and opens it for data.
    fn create(
        &self,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        exclusive: bool,
        caller: Caller,
    ) -> Result<(Entry, Opened)>;

    /// Opens a regular file for data.
    fn open(&self, node: NodeId, write: bool) -> Result<Opened>;

    /// Removes a name of anything but a directory. The node it stood for, if it is known.
    fn unlink(&self, parent: NodeId, name: &OsStr) -> Result<Option<NodeId>>;

    /// Removes an empty directory.
    fn rmdir(&self, parent: NodeId, name: &OsStr) -> Result<()>;

    /// Renames; `flags` as in renameat2(2).
    fn rename(&self, from: (NodeId, &OsStr), to: (NodeId, &OsStr), flags: u32) -> Result<Renamed>;

    /// A further name.
    fn link(&self, node: NodeId, parent: NodeId, name: &OsStr) -> Result<Entry>;

    /// Opens a directory for reading.
    fn open_dir(&self, node: NodeId) -> Result<Box<dyn DirStream>>;

    /// Makes a directory's names durable.
    fn sync_dir(&self, node: NodeId, data_only: bool) -> Result<()>;

    /// Makes a node's attributes durable, where the sync of its file does not.
    fn sync_attr(&self, _node: NodeId) -> Result<()> {
        Ok(())
    }

    /// The filesystem of a node.
    fn statfs(&self, node: NodeId) -> Result<FsStat>;

    /// getxattr(2): the length, or ERANGE. An empty buffer asks for the length.
    fn getxattr(&self, node: NodeId, name: &OsStr, value: &mut [u8]) -> Result<usize>;

    /// setxattr(2).
    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: u32) -> Result<()>;

    /// listxattr(2): the length, or ERANGE. An empty buffer asks for the length.
    fn listxattr(&self, node: NodeId, list: &mut [u8]) -> Result<usize>;

    /// removexattr(2).
    fn removexattr(&self, node: NodeId, name: &OsStr) -> Result<()>;

    /// What a journal can know a regular file by for ever (J12); None where the source has no such
    /// thing: its writes are never journaled. `path` is where it is now.
    fn record(&self, _node: NodeId) -> Result<Option<DeviceIdentity>> {
        Ok(None)
    }

    /// Finds files by what a journal knows them by.
    fn resolver(&self) -> Option<&dyn Resolver> {
        None
    }

    /// Makes every name of the source durable (one call for each of its filesystems that was
    /// touched).
    fn sync_names(&self) -> Result<()> {
        Ok(())
    }

    /// The upper layer, where there is one.
    fn overlay(&self) -> Option<&OverlayTree> {
        None
    }

    /// The journal was read, and requests will follow: what a crash left may go.
    fn start(&self) -> Result<()> {
        Ok(())
    }

    /// Inodes known and descriptors held, for statistics.
    fn load(&self) -> (usize, usize);
}

/// What a rename touched, for whoever keeps stamps of files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Renamed {
    /// The node that moved.
    pub moved: Option<NodeId>,
    /// The node it replaced, or was exchanged with.
    pub other: Option<NodeId>,
}
