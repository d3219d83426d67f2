//! What a journal knows the files of a host tree by (J12), and the filesystems they are of.
//!
//! A filesystem is known by its uuid, else by its f_fsid, unless that is but the device number,
//! which another boot gives to another disk: then it has none (zeros), and handle and birth time
//! must do. Whatever cannot be asked for twice with the same answer is recorded by nothing, which
//! means that its files are never journaled: FUSE sources, whose handles die with their daemon, and
//! filesystems that make their inode numbers up anew at each mount.
//!
//! No states. Lock: `HostTree::filesystems`, a leaf, never held across I/O.

use std::collections::hash_map::Entry;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use rustix::fs::{AtFlags, OFlags, StatxFlags, fstatfs, fstatvfs, statx};

use super::node::Node;
use super::{HostTree, encode_rdev};
use crate::error::{OpContext, Result};
use crate::journal::DeviceIdentity;
use crate::journal::format::PATH_MAX;
use crate::sys::flags::S_IFREG;
use crate::sys::{fs_uuid, path_fd};
use crate::tree::{NodeId, ROOT, Timestamp, Tree};

/// f_type of filesystems whose files no handle and no number names for ever: FUSE, FAT, exFAT, 9p.
const FLEETING: [u32; 4] = [0x6573_5546, 0x4d44, 0x2011_bab0, 0x0102_1997];

/// A filesystem's name; None where its files cannot be recorded.
pub(super) type FilesystemId = Option<[u8; 16]>;

/// What a filesystem is called of which nothing durable is known.
pub(super) const NAMELESS: [u8; 16] = [0; 16];

/// The birth time of an inode; zero where its filesystem knows none.
pub(super) fn birth_of(fd: impl AsFd) -> Result<Timestamp> {
    let stat = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).op("statx")?;
    if stat.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return Ok(Timestamp::default());
    }
    Ok(Timestamp { sec: stat.stx_btime.tv_sec, nsec: stat.stx_btime.tv_nsec })
}

/// The name of the filesystem of any descriptor; `real` is one that is not O_PATH, if there is one.
fn ask(fd: impl AsFd, real: Option<&impl AsFd>, dev: u64) -> Result<FilesystemId> {
    if FLEETING.contains(&(fstatfs(&fd).op("statfs")?.f_type as u32)) {
        return Ok(None);
    }
    if let Some(uuid) = real.and_then(|real| fs_uuid::of(real).ok())
        && uuid != NAMELESS
    {
        return Ok(Some(uuid));
    }
    let mut id = NAMELESS;
    let fsid = fstatvfs(&fd).op("statfs")?.f_fsid;
    if fsid != u64::from(encode_rdev(dev)) {
        id[..8].copy_from_slice(&fsid.to_le_bytes());
    }
    Ok(Some(id))
}

impl HostTree {
    /// The name of the filesystem `dev`, of which `fd` is some inode; asked for once.
    pub(super) fn filesystem(&self, dev: u64, fd: impl AsFd) -> Result<FilesystemId> {
        if let Some(known) = self.filesystems.read().get(&dev) {
            return Ok(*known);
        }
        let mount = self.mounts.read().get(&dev).cloned();
        let id = match mount {
            Some(mount) => ask(&*mount, Some(&*mount), dev)?,
            // A mount of a single file, or a directory that may not be read.
            None => ask(&fd, path_fd::reopen(&fd, OFlags::RDONLY).ok().as_ref(), dev)?,
        };
        self.filesystems.write().insert(dev, id);
        Ok(id)
    }

    fn birth(&self, node: &Node) -> Result<Timestamp> {
        if let Some(birth) = node.birth() {
            return Ok(birth);
        }
        let birth = birth_of(&*self.fd(node)?)?;
        node.set_birth(birth);
        Ok(birth)
    }

    pub(super) fn record_of(&self, id: NodeId) -> Result<Option<DeviceIdentity>> {
        let node = self.node(id)?;
        if node.kind != S_IFREG {
            return Ok(None);
        }
        let known = self.filesystems.read().get(&node.identity.dev).copied();
        let filesystem = match known {
            Some(known) => known,
            None => self.filesystem(node.identity.dev, &*self.fd(&node)?)?,
        };
        let Some(filesystem) = filesystem else { return Ok(None) };
        let birth = self.birth(&node)?;
        let (handle_type, handle) = match node.handle() {
            Some(handle) => (handle.kind(), handle.bytes().to_vec()),
            None if birth == Timestamp::default() => return Ok(None),
            None => (0, Vec::new()),
        };
        // A path that no record holds helps nobody: the file is found without.
        let path = self.path(id).as_os_str().as_bytes().to_vec();
        let path = if path.len() > PATH_MAX { Vec::new() } else { path };
        let inode = node.identity.ino;
        let named = true;
        Ok(Some(DeviceIdentity { named, filesystem, inode, birth, handle_type, handle, path }))
    }

    /// Makes the names of every known filesystem durable. The root's must be among them.
    pub(super) fn sync_filesystems(&self) -> Result<()> {
        let root_dev = self.node(ROOT)?.identity.dev;
        let mut mounts = self.mounts.read().clone();
        if let Entry::Vacant(root) = mounts.entry(root_dev) {
            let fd = path_fd::reopen(&*self.fd_of(ROOT)?, OFlags::RDONLY | OFlags::DIRECTORY);
            root.insert(Arc::new(fd.op("syncfs")?));
        }
        mounts.values().try_for_each(|mount| rustix::fs::syncfs(&**mount).op("syncfs"))
    }
}
