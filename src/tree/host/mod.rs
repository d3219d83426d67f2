//! A real directory as a tree.
//!
//! Every call is relative to a descriptor, never to an absolute path: the root's is opened before
//! the mount, so SOURCE may be the mountpoint itself. Names are single components (the kernel
//! splits paths), looked up with O_PATH | O_NOFOLLOW. As root new inodes are created, then given to
//! the caller; as a user they belong to the mounter. Submounts below the source are shown.
//!
//! Locks: the node table's (see `node`), `mounts` and `filesystems`, all leaves, never held across
//! I/O.

mod dir;
mod names;
pub mod node;
mod record;
mod resolve;
mod xattr;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use self::node::{Capability, Found, Node, Table};
use self::record::FilesystemId;
use super::{
    Attr, Caller, DirStream, Entry, FsStat, Identity, NewNode, NodeId, Opened, PREFERRED_IO, ROOT,
    Renamed, SetTime, Timestamp, Tree,
};
use crate::config::DirectIo;
use crate::device::FileDevice;
use crate::error::{Error, Kind, OpContext, Result};
use crate::journal::DeviceIdentity;
use crate::store::recovery::Resolver;
use crate::sys::flags::{S_IFDIR, S_IFMT, S_IFREG};
use crate::sys::handle::FileHandle;
use crate::sys::path_fd;

/// The name in the root that belongs to us: never shown, never created by others.
pub const STATE_NAME: &str = ".bcachefs-fuse";

const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// How deep a chain of recorded parents may be when a node is reopened by path.
const MAX_DEPTH: usize = 4096;

/// A directory of the host.
pub struct HostTree {
    table: Arc<Table>,
    direct_io: DirectIo,
    is_root_user: bool,
    read_only: bool,
    /// A real descriptor per filesystem, for open_by_handle_at.
    mounts: RwLock<HashMap<u64, Arc<OwnedFd>>>,
    /// What the filesystems are called, by device number.
    filesystems: RwLock<HashMap<u64, FilesystemId>>,
    /// Others than root need not try.
    opens_by_handle: bool,
}

/// Attributes of a stat result under a node's number.
fn attr_of(stat: &Stat, id: NodeId) -> Attr {
    let time = |sec, nsec| Timestamp { sec, nsec: nsec as u32 };
    Attr {
        ino: id,
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        mode: stat.st_mode,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: encode_rdev(stat.st_rdev),
        blksize: match stat.st_mode & S_IFMT {
            S_IFREG => (stat.st_blksize as u32).max(PREFERRED_IO),
            _ => stat.st_blksize as u32,
        },
    }
}

/// The kernel's 32-bit form of a device number, as FUSE carries it (new_encode_dev).
fn encode_rdev(dev: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The opposite of `encode_rdev`.
fn decode_rdev(rdev: u32) -> u64 {
    let major = (rdev >> 8) & 0xfff;
    let minor = (rdev & 0xff) | ((rdev >> 12) & 0xfff00);
    rustix::fs::makedev(major, minor)
}

fn stat_fd(fd: impl AsFd) -> Result<Stat> {
    rustix::fs::statat(fd, "", AtFlags::EMPTY_PATH).op("stat")
}

impl HostTree {
    /// A tree over an O_PATH descriptor of a directory. `max_open` descriptors are kept at most.
    pub fn new(
        root: OwnedFd,
        direct_io: DirectIo,
        read_only: bool,
        max_open: usize,
    ) -> Result<HostTree> {
        if !path_fd::proc_is_mounted() {
            return Err(Error::new(Kind::NotFound, "open", "/proc/self/fd: /proc is needed"));
        }
        let stat = stat_fd(&root)?;
        let handle = FileHandle::of(&root).ok();
        let mut mounts = HashMap::new();
        if let Ok(real) = path_fd::reopen(&root, OFlags::RDONLY | OFlags::DIRECTORY) {
            mounts.insert(stat.st_dev, Arc::new(real));
        }
        let found = found_of(stat, root, handle, (ROOT, OsString::new()));
        let is_root_user = rustix::process::geteuid().is_root();
        Ok(HostTree {
            table: Arc::new(Table::new(found, max_open)),
            direct_io,
            is_root_user,
            read_only,
            mounts: RwLock::new(mounts),
            filesystems: RwLock::default(),
            opens_by_handle: is_root_user,
        })
    }

    fn node(&self, id: NodeId) -> Result<Arc<Node>> {
        self.table.get(id).ok_or_else(|| Error::new(Kind::Stale, "find", format!("inode {id}")))
    }

    /// The node's O_PATH descriptor, reopened if it was closed.
    fn fd(&self, node: &Node) -> Result<Arc<OwnedFd>> {
        if let Some(fd) = node.fd() {
            return Ok(fd);
        }
        Ok(self.table.set_fd(node, self.reopen(node, 0)?))
    }

    fn fd_of(&self, id: NodeId) -> Result<Arc<OwnedFd>> {
        self.fd(&*self.node(id)?)
    }

    fn reopen(&self, node: &Node, depth: usize) -> Result<OwnedFd> {
        let stale = || Error::new(Kind::Stale, "reopen", format!("inode {}", node.id));
        let mount = self.mounts.read().get(&node.identity.dev).cloned();
        if let (Some(handle), Some(mount)) = (node.handle(), mount)
            && let Ok(fd) = handle.open(&*mount, OFlags::PATH | OFlags::NOFOLLOW)
        {
            return Ok(fd);
        }
        if depth > MAX_DEPTH {
            return Err(stale());
        }
        let (parent, name) = node.place();
        let parent = self.node(parent)?;
        let parent_fd = match parent.fd() {
            Some(fd) => fd,
            None => Arc::new(self.reopen(&parent, depth + 1)?),
        };
        let fd = rustix::fs::openat(&*parent_fd, &name, PATH_FLAGS, Mode::empty())
            .map_err(|_| stale())?;
        let identity = identity_of(&stat_fd(&fd)?, FileHandle::of(&fd).ok().as_ref());
        if identity == node.identity { Ok(fd) } else { Err(stale()) }
    }

    /// Looks `name` up and counts it.
    fn enter(&self, parent: &Node, name: &OsStr) -> Result<Entry> {
        let fd =
            rustix::fs::openat(&*self.fd(parent)?, name, PATH_FLAGS, Mode::empty()).op("lookup")?;
        self.enter_fd(parent, name, fd)
    }

    fn enter_fd(&self, parent: &Node, name: &OsStr, fd: OwnedFd) -> Result<Entry> {
        let stat = stat_fd(&fd)?;
        let handle = FileHandle::of(&fd).ok();
        if stat.st_dev != parent.identity.dev {
            self.note_mount(&stat, &fd);
        }
        let found = found_of(stat, fd, handle, (parent.id, name.to_os_string()));
        let node = self.table.intern(found);
        let attr = self.counted(&node, attr_of(&stat, node.id));
        Ok(Entry { id: node.id, generation: node.identity.generation, attr })
    }

    /// A lookup has crossed into another filesystem: keep a real descriptor of it.
    fn note_mount(&self, stat: &Stat, fd: &OwnedFd) {
        if stat.st_mode & S_IFMT != S_IFDIR || self.mounts.read().contains_key(&stat.st_dev) {
            return;
        }
        if let Ok(real) = path_fd::reopen(fd, OFlags::RDONLY | OFlags::DIRECTORY) {
            self.mounts.write().entry(stat.st_dev).or_insert_with(|| Arc::new(real));
        }
    }

    /// A directory has 2 + subdirectories names; where the source does not count them (btrfs says
    /// 1), we do, and remember it while the directory's mtime is the same and not of this second.
    fn counted(&self, node: &Node, mut attr: Attr) -> Attr {
        if node.kind != S_IFDIR || attr.nlink >= 2 || attr.nlink == 0 {
            return attr;
        }
        if let Some(count) = node.subdirs(attr.mtime) {
            attr.nlink = count + 2;
            return attr;
        }
        let real = self
            .fd(node)
            .and_then(|fd| path_fd::reopen(&*fd, OFlags::RDONLY | OFlags::DIRECTORY).op("opendir"));
        if let Ok(count) = real.and_then(|fd| dir::count_subdirs(&fd)) {
            attr.nlink = count + 2;
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            if now.tv_sec > attr.mtime.sec + 1 {
                node.set_subdirs(attr.mtime, count);
            }
        }
        attr
    }

    /// The data of the inode behind an O_PATH descriptor, which it keeps open.
    fn device(&self, fd: &Arc<OwnedFd>) -> Arc<FileDevice> {
        let (path, read_only) = (fd.clone(), self.read_only);
        let opener = move |flags: OFlags| {
            if read_only {
                // A read-only mount writes nothing to the source, access times neither. EPERM: not
                // our file, and the source's own rules decide.
                match path_fd::reopen(&*path, flags | OFlags::NOATIME) {
                    Err(Errno::PERM) => {}
                    other => return other,
                }
            }
            path_fd::reopen(&*path, flags)
        };
        Arc::new(FileDevice::new(Box::new(opener), self.direct_io))
    }

    fn is_hidden(parent: NodeId, name: &OsStr) -> bool {
        parent == ROOT && name == STATE_NAME
    }

    fn writable(&self, op: &'static str) -> Result<()> {
        if self.read_only { Err(Error::new(Kind::ReadOnly, op, "")) } else { Ok(()) }
    }

    /// Refuses to make or remove our own name in the root.
    fn may_change(&self, parent: NodeId, name: &OsStr, op: &'static str) -> Result<()> {
        self.writable(op)?;
        if HostTree::is_hidden(parent, name) {
            return Err(Error::new(Kind::NotPermitted, op, STATE_NAME));
        }
        Ok(())
    }
}

/// Which inode it is; the handle tells one from another that had its number before.
fn identity_of(stat: &Stat, handle: Option<&FileHandle>) -> Identity {
    let generation = handle.map_or(0, FileHandle::generation);
    Identity { dev: stat.st_dev, ino: stat.st_ino, generation }
}

fn found_of(
    stat: Stat,
    fd: OwnedFd,
    handle: Option<FileHandle>,
    place: (NodeId, OsString),
) -> Found {
    let identity = identity_of(&stat, handle.as_ref());
    Found { identity, kind: stat.st_mode & S_IFMT, handle, fd, place }
}

impl Tree for HostTree {
    fn lookup(&self, parent: NodeId, name: &OsStr) -> Result<Entry> {
        if HostTree::is_hidden(parent, name) {
            return Err(Error::os("lookup", Errno::NOENT));
        }
        self.enter(&*self.node(parent)?, name)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.table.forget(node, count);
    }

    fn attr(&self, node: NodeId) -> Result<Attr> {
        let node = self.node(node)?;
        let attr = attr_of(&stat_fd(&*self.fd(&node)?)?, node.id);
        Ok(self.counted(&node, attr))
    }

    fn identity(&self, node: NodeId) -> Result<Identity> {
        Ok(self.node(node)?.identity)
    }

    fn path(&self, node: NodeId) -> PathBuf {
        let mut names = Vec::new();
        let mut id = node;
        while id != ROOT && names.len() < MAX_DEPTH {
            let Some(node) = self.table.get(id) else { break };
            let (parent, name) = node.place();
            names.push(name);
            id = parent;
        }
        names.iter().rev().collect()
    }

    fn set_mode(&self, node: NodeId, mode: u32) -> Result<()> {
        self.writable("chmod")?;
        path_fd::chmod(&*self.fd_of(node)?, mode & 0o7777).op("chmod")
    }

    fn set_owner(&self, node: NodeId, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.writable("chown")?;
        let uid = uid.map(rustix::fs::Uid::from_raw);
        let gid = gid.map(rustix::fs::Gid::from_raw);
        rustix::fs::chownat(&*self.fd_of(node)?, "", uid, gid, AtFlags::EMPTY_PATH).op("chown")
    }

    fn set_times(&self, node: NodeId, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.writable("utimensat")?;
        let spec = |time| match time {
            SetTime::Omit => rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
            SetTime::Now => rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
            SetTime::At(at) => rustix::fs::Timespec { tv_sec: at.sec, tv_nsec: at.nsec.into() },
        };
        let times =
            rustix::fs::Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        rustix::fs::utimensat(&*self.fd_of(node)?, "", &times, AtFlags::EMPTY_PATH).op("utimensat")
    }

    fn readlink(&self, node: NodeId) -> Result<Vec<u8>> {
        let target = rustix::fs::readlinkat(&*self.fd_of(node)?, "", Vec::new()).op("readlink")?;
        Ok(target.into_bytes())
    }

    fn make(
        &self,
        parent: NodeId,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry> {
        self.may_change(parent, name, "create")?;
        self.make_node(&*self.node(parent)?, name, what, mode, caller)
    }

    fn create(
        &self,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        exclusive: bool,
        caller: Caller,
    ) -> Result<(Entry, Opened)> {
        self.may_change(parent, name, "create")?;
        self.create_file(&*self.node(parent)?, name, mode, exclusive, caller)
    }

    fn open(&self, node: NodeId, write: bool) -> Result<Opened> {
        if write {
            self.writable("open")?;
        }
        let node = self.node(node)?;
        if node.kind != S_IFREG {
            return Err(Error::new(Kind::Invalid, "open", format!("inode {}", node.id)));
        }
        node.set_capability(Capability::Unknown);
        let fd = self.fd(&node)?;
        let attr = attr_of(&stat_fd(&*fd)?, node.id);
        Ok(Opened { device: self.device(&fd), identity: node.identity, attr })
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> Result<Option<NodeId>> {
        self.may_change(parent, name, "unlink")?;
        self.remove(parent, name, AtFlags::empty())
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> Result<()> {
        self.may_change(parent, name, "rmdir")?;
        self.remove(parent, name, AtFlags::REMOVEDIR).map(|_| ())
    }

    fn rename(&self, from: (NodeId, &OsStr), to: (NodeId, &OsStr), flags: u32) -> Result<Renamed> {
        self.may_change(from.0, from.1, "rename")?;
        self.may_change(to.0, to.1, "rename")?;
        self.rename_node(from, to, flags)
    }

    fn link(&self, node: NodeId, parent: NodeId, name: &OsStr) -> Result<Entry> {
        self.may_change(parent, name, "link")?;
        self.link_node(&*self.node(node)?, &*self.node(parent)?, name)
    }

    fn open_dir(&self, node: NodeId) -> Result<Box<dyn DirStream>> {
        let node = self.node(node)?;
        let fd =
            path_fd::reopen(&*self.fd(&node)?, OFlags::RDONLY | OFlags::DIRECTORY).op("opendir")?;
        Ok(Box::new(dir::HostDir::new(fd, &node, self.table.clone())))
    }

    fn sync_dir(&self, node: NodeId, data_only: bool) -> Result<()> {
        let fd = path_fd::reopen(&*self.fd_of(node)?, OFlags::RDONLY | OFlags::DIRECTORY)
            .op("fsyncdir")?;
        if data_only {
            rustix::fs::fdatasync(&fd).op("fsyncdir")
        } else {
            rustix::fs::fsync(&fd).op("fsyncdir")
        }
    }

    fn statfs(&self, node: NodeId) -> Result<FsStat> {
        FsStat::of(&*self.fd_of(node)?)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr, value: &mut [u8]) -> Result<usize> {
        self.get_attribute(&*self.node(node)?, name, value)
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: u32) -> Result<()> {
        self.writable("setxattr")?;
        self.set_attribute(&*self.node(node)?, name, value, flags)
    }

    fn listxattr(&self, node: NodeId, list: &mut [u8]) -> Result<usize> {
        path_fd::listxattr(&*self.fd_of(node)?, list).op("listxattr")
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> Result<()> {
        self.writable("removexattr")?;
        self.remove_attribute(&*self.node(node)?, name)
    }

    fn record(&self, node: NodeId) -> Result<Option<DeviceIdentity>> {
        self.record_of(node)
    }

    fn resolver(&self) -> Option<&dyn Resolver> {
        Some(self)
    }

    fn sync_names(&self) -> Result<()> {
        self.sync_filesystems()
    }

    fn load(&self) -> (usize, usize) {
        self.table.load()
    }
}

#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod tests;
