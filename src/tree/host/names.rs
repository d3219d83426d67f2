//! Changes of names in a host tree.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;

use super::node::Node;
use super::{HostTree, PATH_FLAGS, decode_rdev, identity_of, stat_fd};
use crate::error::{Error, OpContext, Result};
use crate::sys::flags::{S_IFMT, S_IFREG, S_ISGID, S_ISUID};
use crate::sys::umask::set_thread_umask;
use crate::sys::{handle::FileHandle, path_fd};
use crate::tree::{Caller, Entry, NewNode, NodeId, Opened, Renamed};

impl HostTree {
    pub(super) fn make_node(
        &self,
        parent: &Node,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry> {
        let dir = self.fd(parent)?;
        set_thread_umask(caller.umask);
        let bits = Mode::from_raw_mode(mode & 0o7777);
        match what {
            NewNode::Dir => rustix::fs::mkdirat(&*dir, name, bits).op("mkdir")?,
            NewNode::Symlink(target) => {
                rustix::fs::symlinkat(target, &*dir, name).op("symlink")?;
            }
            NewNode::Special { rdev } => {
                let kind = FileType::from_raw_mode(mode & S_IFMT);
                let dev = decode_rdev(rdev);
                rustix::fs::mknodat(&*dir, name, kind, bits, dev).op("mknod")?;
            }
        }
        let fd = rustix::fs::openat(&*dir, name, PATH_FLAGS, Mode::empty()).op("lookup")?;
        self.give_to(&dir, &fd, mode, caller)?;
        self.enter_fd(parent, name, fd)
    }

    pub(super) fn create_file(
        &self,
        parent: &Node,
        name: &OsStr,
        mode: u32,
        exclusive: bool,
        caller: Caller,
    ) -> Result<(Entry, Opened)> {
        let dir = self.fd(parent)?;
        set_thread_umask(caller.umask);
        let bits = Mode::from_raw_mode(mode & 0o7777);
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&*dir, name, flags, bits) {
            Ok(file) => {
                self.give_to(&dir, &file, mode, caller)?;
                Some(file)
            }
            // Somebody made it behind the mount since the kernel's lookup: take it as it is.
            Err(Errno::EXIST) if !exclusive => None,
            Err(error) => return Err(Error::os("create", error)),
        };
        let entry = self.enter(parent, name)?;
        let node = self.node(entry.id)?;
        let device = self.device(&self.fd(&node)?);
        if let Some(file) = file {
            device.adopt_writable(file);
        }
        let opened = Opened { device, identity: node.identity, attr: entry.attr };
        Ok((entry, opened))
    }

    /// A new inode belongs to whoever asked for it; its group is the directory's if the source
    /// filesystem says so (set-group-ID directory, grpid). Root only; a user creates as himself.
    fn give_to(&self, dir: &OwnedFd, fd: &OwnedFd, mode: u32, caller: Caller) -> Result<()> {
        if !self.is_root_user || (caller.uid == 0 && caller.gid == 0) {
            return Ok(());
        }
        let stat = stat_fd(fd)?;
        let inherited = stat.st_gid != rustix::process::getegid().as_raw()
            || stat_fd(dir)?.st_mode & S_ISGID != 0;
        let gid = if inherited { None } else { Some(Gid::from_raw(caller.gid)) };
        let uid = Some(Uid::from_raw(caller.uid));
        rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH).op("chown")?;
        if stat.st_mode & S_IFMT == S_IFREG && mode & (S_ISUID | S_ISGID) != 0 {
            // chown has cleared what the application asked for.
            path_fd::chmod(fd, stat.st_mode & 0o7777).op("chmod")?;
        }
        Ok(())
    }

    /// What a name stands for right now, if the kernel knows the inode.
    fn known_at(&self, parent: &Node, name: &OsStr) -> Option<Arc<Node>> {
        let fd = self.fd(parent).ok()?;
        let fd = rustix::fs::openat(&*fd, name, PATH_FLAGS, Mode::empty()).ok()?;
        self.table.find(&identity_of(&stat_fd(&fd).ok()?, FileHandle::of(&fd).ok().as_ref()))
    }

    pub(super) fn remove(
        &self,
        parent: NodeId,
        name: &OsStr,
        flags: AtFlags,
    ) -> Result<Option<NodeId>> {
        let parent = self.node(parent)?;
        let gone = self.known_at(&parent, name);
        let op = if flags.is_empty() { "unlink" } else { "rmdir" };
        rustix::fs::unlinkat(&*self.fd(&parent)?, name, flags).op(op)?;
        Ok(gone.map(|node| node.id))
    }

    pub(super) fn rename_node(
        &self,
        from: (NodeId, &OsStr),
        to: (NodeId, &OsStr),
        flags: u32,
    ) -> Result<Renamed> {
        let (old_dir, new_dir) = (self.node(from.0)?, self.node(to.0)?);
        let moved = self.known_at(&old_dir, from.1);
        let other = self.known_at(&new_dir, to.1);
        let flags = RenameFlags::from_bits_retain(flags);
        let (old_fd, new_fd) = (self.fd(&old_dir)?, self.fd(&new_dir)?);
        if flags.is_empty() {
            rustix::fs::renameat(&*old_fd, from.1, &*new_fd, to.1).op("rename")?;
        } else {
            rustix::fs::renameat_with(&*old_fd, from.1, &*new_fd, to.1, flags).op("rename")?;
        }
        if let Some(node) = &moved {
            node.set_place(to.0, to.1);
        }
        if let Some(node) = other.as_ref().filter(|_| flags.contains(RenameFlags::EXCHANGE)) {
            node.set_place(from.0, from.1);
        }
        Ok(Renamed { moved: moved.map(|node| node.id), other: other.map(|node| node.id) })
    }

    pub(super) fn link_node(&self, node: &Node, parent: &Node, name: &OsStr) -> Result<Entry> {
        let (fd, dir) = (self.fd(node)?, self.fd(parent)?);
        path_fd::link(&*fd, &*dir, name).op("link")?;
        self.enter(parent, name)
    }
}
