//! Attributes and extended attributes.

use std::ffi::OsStr;

use super::{Fs, stamp_of};
use crate::error::Result;
use crate::sys::flags::{S_IFMT, S_IFREG};
use crate::tree::{Attr, Entry, NodeId, SetTime};

/// What a setattr request changes.
#[derive(Clone, Copy, Debug)]
pub struct Changes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Last access.
    pub atime: SetTime,
    /// Last change of bytes.
    pub mtime: SetTime,
}

impl Fs {
    /// Attributes now. An open file's size is brought up to date if somebody else changed it.
    pub fn attr(&self, node: NodeId) -> Result<Attr> {
        let live = self.tree.identity(node).ok().and_then(|identity| self.store.live(&identity));
        let version = live.as_ref().map(|device| device.size_version());
        let attr = self.tree.attr(node)?;
        if let (Some(device), Some(version)) = (live, version) {
            device.observe(attr.size, version);
        }
        Ok(attr)
    }

    /// A lookup has told attributes; an open file whose size they change is asked again, because
    /// they may be older than our own last write.
    pub(super) fn observe(&self, entry: &Entry) {
        if entry.attr.mode & S_IFMT == S_IFREG
            && let Ok(identity) = self.tree.identity(entry.id)
            && self.store.live(&identity).is_some_and(|device| device.size() != entry.attr.size)
        {
            let _ = self.attr(entry.id);
        }
    }

    /// Changes attributes. Owner first, then mode: the kernel's clearing of set-user-ID comes as a
    /// mode in the same request.
    pub fn set_attr(&self, node: NodeId, fh: Option<u64>, changes: &Changes) -> Result<Attr> {
        if changes.uid.is_some() || changes.gid.is_some() {
            self.tree.set_owner(node, changes.uid, changes.gid)?;
        }
        if let Some(mode) = changes.mode {
            self.tree.set_mode(node, mode)?;
        }
        if let Some(size) = changes.size {
            self.with_device(node, fh, true, |device| device.set_size(size))?;
        }
        let sets_time = changes.atime != SetTime::Omit || changes.mtime != SetTime::Omit;
        if sets_time {
            self.tree.set_times(node, changes.atime, changes.mtime)?;
        }
        let attr = self.attr(node)?;
        if let Ok(identity) = self.tree.identity(node) {
            let set_mtime = changes.mtime != SetTime::Omit;
            self.store.touched(&identity, stamp_of(&attr), set_mtime);
        }
        Ok(attr)
    }

    /// getxattr(2); an empty buffer asks for the length.
    pub fn getxattr(&self, node: NodeId, name: &OsStr, value: &mut [u8]) -> Result<usize> {
        self.tree.getxattr(node, name, value)
    }

    /// listxattr(2); an empty buffer asks for the length.
    pub fn listxattr(&self, node: NodeId, list: &mut [u8]) -> Result<usize> {
        self.tree.listxattr(node, list)
    }

    /// setxattr(2).
    pub fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: u32) -> Result<()> {
        self.tree.setxattr(node, name, value, flags)?;
        self.restamp(node, false);
        Ok(())
    }

    /// removexattr(2).
    pub fn removexattr(&self, node: NodeId, name: &OsStr) -> Result<()> {
        self.tree.removexattr(node, name)?;
        self.restamp(node, false);
        Ok(())
    }
}
