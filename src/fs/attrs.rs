//! Attributes and extended attributes.

use std::ffi::OsStr;

use super::{Fs, stamp_of};
use crate::error::Result;
use crate::sys::flags::{S_IFMT, S_IFREG};
use crate::tree::{Attr, Entry, NodeId, SetTime};

/// Set-user-ID and set-group-ID.
const SET_IDS: u32 = 0o6000;

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
        let mut attr = self.tree.attr(node)?;
        if let (Some(device), Some(version)) = (live, version) {
            device.observe(attr.size, version);
        }
        self.overlay(node, &mut attr);
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
            if mode & SET_IDS != 0 {
                self.flush_before(node)?;
            }
            self.tree.set_mode(node, mode)?;
        }
        if let Some(size) = changes.size {
            self.with_device(node, fh, true, |device| device.set_size(size))?;
        }
        let sets_time = changes.atime != SetTime::Omit || changes.mtime != SetTime::Omit;
        if sets_time {
            let mtime = self.set_mtime_of_dirty(node, changes.mtime)?;
            if mtime != SetTime::Omit || changes.atime != SetTime::Omit {
                self.tree.set_times(node, changes.atime, mtime)?;
            }
        }
        if changes.size.is_none() || changes.mode.is_some() || changes.uid.is_some() {
            self.note_attributes(node);
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
        self.flush_before_xattr(node, name)?;
        self.tree.setxattr(node, name, value, flags)?;
        self.note_attributes(node);
        self.restamp(node, false);
        Ok(())
    }

    /// removexattr(2).
    pub fn removexattr(&self, node: NodeId, name: &OsStr) -> Result<()> {
        self.tree.removexattr(node, name)?;
        self.note_attributes(node);
        self.restamp(node, false);
        Ok(())
    }
}
