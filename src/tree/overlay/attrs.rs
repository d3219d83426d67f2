//! Attributes of an overlay's inodes: rows, else the lower's.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, XattrFlags, statat};
use rustix::io::Errno;

use super::acl::{self, Acl};
use super::edit::Edit;
use super::meta::{Change, Inode};
use super::node::Node;
use super::view::View;
use super::{OverlayTree, file};
use crate::device::BlockDevice;
use crate::error::{Error, Kind, Result};
use crate::sys::flags::{S_IFDIR, S_IFMT, S_IFREG, S_ISGID, S_ISUID};
use crate::tree::{Attr, NodeId, PREFERRED_IO, SetTime, Tree};

/// Units of st_blocks.
const SECTOR: u64 = 512;

/// Group execute.
const S_IXGRP: u32 = 0o010;

/// Longest value of an extended attribute (XATTR_SIZE_MAX).
const VALUE_MAX: usize = 64 << 10;

impl OverlayTree {
    pub(super) fn attr_of(&self, view: &View, node: &Node) -> Result<Attr> {
        let Some(row) = view.inode(node.ino)? else {
            let lower = *node
                .lowers
                .first()
                .ok_or_else(|| Error::new(Kind::Stale, "find", format!("inode {}", node.ino)))?;
            let mut attr = self.layers.attr(lower)?;
            attr.ino = node.ino;
            if node.kind == S_IFDIR && node.lowers.len() > 1 {
                attr.nlink = self.links_of(view, node)?;
            }
            return Ok(attr);
        };
        let size = match self.live(node.ino) {
            Some(device) => device.size()?,
            None => row.size,
        };
        Ok(Attr {
            ino: node.ino,
            size,
            blocks: self.blocks_of(node, &row, size),
            atime: row.atime,
            mtime: row.mtime,
            ctime: row.ctime,
            mode: row.mode,
            nlink: row.nlink,
            uid: row.uid,
            gid: row.gid,
            rdev: row.rdev,
            blksize: if node.kind == S_IFREG { PREFERRED_IO } else { self.block_bytes },
        })
    }

    /// What the lower has of it and what is here, at most all of it.
    fn blocks_of(&self, node: &Node, row: &Inode, size: u64) -> u64 {
        if row.mode & S_IFMT != S_IFREG {
            return 0;
        }
        let name = file::data_name(node.ino);
        let here = statat(&*self.data, name, AtFlags::SYMLINK_NOFOLLOW);
        let here = here.map_or(0, |stat| stat.st_blocks as u64);
        let lower = node.lowers.first().filter(|_| row.lower_end > 0);
        let below = lower.and_then(|lower| self.layers.attr(*lower).ok());
        let below = below.map_or(0, |attr| attr.blocks.min(row.lower_end.div_ceil(SECTOR)));
        (here + below).min(size.next_multiple_of(u64::from(self.block_bytes)) / SECTOR)
    }

    /// A lower's inode gets its row.
    pub(super) fn copy_up(&self, node: &Node) -> Result<()> {
        if self.view()?.inode(node.ino)?.is_some() {
            return Ok(());
        }
        let mut edit = self.edit("copy up")?;
        edit.row(node)?;
        edit.commit()
    }

    pub(super) fn change_mode(&self, node: &Node, mode: u32) -> Result<()> {
        let mut edit = self.edit("chmod")?;
        let now = edit.now;
        if let Some(acl) = self.acl(&edit.view, node, acl::ACCESS)? {
            self.own_attributes(&mut edit, node)?;
            let value = acl.with_mode(mode).bytes();
            edit.push(Change::Xattr(node.ino, acl::ACCESS.into(), value));
        }
        let row = edit.row(node)?;
        row.mode = (row.mode & S_IFMT) | (mode & 0o7777);
        row.ctime = now;
        edit.commit()
    }

    pub(super) fn change_owner(
        &self,
        node: &Node,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        let mut edit = self.edit("chown")?;
        let now = edit.now;
        let row = edit.row(node)?;
        row.uid = uid.unwrap_or(row.uid);
        row.gid = gid.unwrap_or(row.gid);
        // As the kernel does for its own filesystems: a program must not become another user's.
        if row.mode & S_IFMT == S_IFREG {
            row.mode &= !S_ISUID;
            if row.mode & S_IXGRP != 0 {
                row.mode &= !S_ISGID;
            }
        }
        row.ctime = now;
        edit.commit()
    }

    pub(super) fn change_times(&self, node: &Node, atime: SetTime, mtime: SetTime) -> Result<()> {
        let mut edit = self.edit("utimensat")?;
        let now = edit.now;
        let row = edit.row(node)?;
        for (time, slot) in [(atime, &mut row.atime), (mtime, &mut row.mtime)] {
            match time {
                SetTime::Omit => {}
                SetTime::Now => *slot = now,
                SetTime::At(at) => *slot = at,
            }
        }
        row.ctime = now;
        edit.commit()
    }

    pub(super) fn target(&self, node: &Node) -> Result<Vec<u8>> {
        if let Some(row) = self.view()?.inode(node.ino)? {
            return Ok(row.target);
        }
        let missing = || Error::new(Kind::Stale, "readlink", "");
        let (layer, id) = *node.lowers.first().ok_or_else(missing)?;
        self.layers.host(layer)?.readlink(id)
    }

    /// The lower whose attributes count; none once they are rows.
    fn lower_of(&self, view: &View, node: &Node) -> Result<Option<(usize, NodeId)>> {
        match view.inode(node.ino)? {
            Some(row) if row.own_xattrs => Ok(None),
            _ => Ok(node.lowers.first().copied()),
        }
    }

    pub(super) fn get_attribute(
        &self,
        node: &Node,
        name: &OsStr,
        value: &mut [u8],
    ) -> Result<usize> {
        let view = self.view()?;
        if let Some((layer, id)) = self.lower_of(&view, node)? {
            return self.layers.host(layer)?.getxattr(id, name, value);
        }
        let found = view.xattr(node.ino, name.as_bytes())?;
        let found = found.ok_or_else(|| Error::os("getxattr", Errno::NODATA))?;
        fill(value, &found, "getxattr")
    }

    pub(super) fn list_attributes(&self, node: &Node, list: &mut [u8]) -> Result<usize> {
        let view = self.view()?;
        if let Some((layer, id)) = self.lower_of(&view, node)? {
            return self.layers.host(layer)?.listxattr(id, list);
        }
        let mut names = Vec::new();
        for (name, _) in view.xattrs(node.ino)? {
            names.extend_from_slice(&name);
            names.push(0);
        }
        fill(list, &names, "listxattr")
    }

    pub(super) fn set_attribute(
        &self,
        node: &Node,
        name: &OsStr,
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        if value.len() > VALUE_MAX {
            return Err(Error::os("setxattr", Errno::TOOBIG));
        }
        let mut edit = self.edit("setxattr")?;
        let there = self.own_attributes(&mut edit, node)?;
        let exists = there.iter().any(|known| known == name.as_bytes());
        let flags = XattrFlags::from_bits_retain(flags);
        if exists && flags.contains(XattrFlags::CREATE) {
            return Err(Error::os("setxattr", Errno::EXIST));
        }
        if !exists && flags.contains(XattrFlags::REPLACE) {
            return Err(Error::os("setxattr", Errno::NODATA));
        }
        edit.row(node)?.ctime = edit.now;
        if name == acl::ACCESS {
            let acl = Acl::parse(value)?;
            let row = edit.row(node)?;
            row.mode = (row.mode & !0o777) | acl.mode();
            if acl.is_a_mode() {
                edit.push(Change::NoXattr(node.ino, name.as_bytes().to_vec()));
                return edit.commit();
            }
        } else if name == acl::DEFAULT {
            Acl::parse(value)?;
        }
        edit.push(Change::Xattr(node.ino, name.as_bytes().to_vec(), value.to_vec()));
        edit.commit()
    }

    /// An inode's ACL of this name.
    pub(super) fn acl(&self, view: &View, node: &Node, name: &str) -> Result<Option<Acl>> {
        let found = match self.lower_of(view, node)? {
            None => view.xattr(node.ino, name.as_bytes())?,
            Some((layer, id)) => {
                let mut value = vec![0; VALUE_MAX];
                match self.layers.host(layer)?.getxattr(id, OsStr::new(name), &mut value) {
                    Ok(len) => {
                        value.truncate(len);
                        Some(value)
                    }
                    Err(error) if matches!(error.kind, Kind::NoAttr | Kind::NotSupported) => None,
                    Err(error) => return Err(error),
                }
            }
        };
        found.map(|value| Acl::parse(&value)).transpose()
    }

    pub(super) fn remove_attribute(&self, node: &Node, name: &OsStr) -> Result<()> {
        let mut edit = self.edit("removexattr")?;
        let there = self.own_attributes(&mut edit, node)?;
        if !there.iter().any(|known| known == name.as_bytes()) {
            // An inode always has an ACL: its mode.
            if name == acl::ACCESS || name == acl::DEFAULT {
                return Ok(());
            }
            return Err(Error::os("removexattr", Errno::NODATA));
        }
        edit.row(node)?.ctime = edit.now;
        edit.push(Change::NoXattr(node.ino, name.as_bytes().to_vec()));
        edit.commit()
    }

    /// The lower's attributes become rows; the names of all there are.
    pub(super) fn own_attributes(&self, edit: &mut Edit<'_>, node: &Node) -> Result<Vec<Vec<u8>>> {
        let Some((layer, id)) = self.lower_of(&edit.view, node)? else {
            let rows = edit.view.xattrs(node.ino)?;
            return Ok(rows.into_iter().map(|(name, _)| name).collect());
        };
        let host = self.layers.host(layer)?;
        let mut list = vec![0; host.listxattr(id, &mut [])?];
        let len = host.listxattr(id, &mut list)?;
        list.truncate(len);
        let mut names = Vec::new();
        for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name_os = OsStr::from_bytes(name);
            let mut value = vec![0; host.getxattr(id, name_os, &mut [])?];
            let len = host.getxattr(id, name_os, &mut value)?;
            value.truncate(len);
            edit.push(Change::Xattr(node.ino, name.to_vec(), value));
            names.push(name.to_vec());
        }
        edit.row(node)?.own_xattrs = true;
        Ok(names)
    }
}

/// As the system calls do: an empty buffer asks for the length.
fn fill(out: &mut [u8], value: &[u8], op: &'static str) -> Result<usize> {
    if !out.is_empty() {
        let place = out.get_mut(..value.len()).ok_or_else(|| Error::os(op, Errno::RANGE))?;
        place.copy_from_slice(value);
    }
    Ok(value.len())
}
