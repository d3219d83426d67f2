//! Changes of names in an overlay: rows only, each call one commit.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, RenameFlags, unlinkat};
use rustix::io::Errno;

use super::edit::Edit;
use super::meta::{Change, Inode};
use super::node::{Found, Node};
use super::{NAME_MAX, OverlayTree, acl, file};
use crate::error::{Error, Result};
use crate::sys::flags::{S_IFCHR, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, S_ISGID};
use crate::tree::{Caller, Entry, NewNode, NodeId, Renamed};

/// Links of an inode: what a row holds, and more than any filesystem allows.
const LINKS_MAX: u32 = 1 << 30;

/// Inodes whose rows may wait for the next commit.
const GONE_MAX: usize = 1024;

/// A directory and a name in it.
type Place<'a> = (&'a Node, &'a OsStr);

impl Edit<'_> {
    /// A new inode of this mode (before the mask).
    fn fresh(&mut self, dir: &Node, mode: u32, caller: Caller) -> Result<Inode> {
        let (now, parent) = (self.now, self.row(dir)?);
        let inherits = parent.mode & S_ISGID != 0;
        let gid = if inherits { parent.gid } else { caller.gid };
        let is_dir = mode & S_IFMT == S_IFDIR;
        let is_link = mode & S_IFMT == S_IFLNK;
        let mut bits = if is_link { mode } else { mode & !(caller.umask & 0o777) };
        if is_dir && inherits {
            bits |= S_ISGID;
        }
        Ok(Inode {
            mode: bits,
            uid: caller.uid,
            gid,
            rdev: 0,
            nlink: if is_dir { 2 } else { 1 },
            atime: now,
            mtime: now,
            ctime: now,
            size: 0,
            lower_end: 0,
            target: Vec::new(),
            origins: Vec::new(),
            own_xattrs: true,
        })
    }

    /// A name of an inode goes; true if it was the last one.
    fn unlinked(&mut self, node: &Node) -> Result<bool> {
        let now = self.now;
        let row = self.row(node)?;
        row.ctime = now;
        row.nlink = if node.kind == S_IFDIR { 0 } else { row.nlink.saturating_sub(1) };
        let gone = row.nlink == 0;
        if gone {
            self.push(Change::Orphan(node.ino));
        }
        Ok(gone)
    }
}

impl OverlayTree {
    /// Commits a new inode under a name, and counts it.
    fn settle(
        &self,
        mut edit: Edit<'_>,
        dir: &Node,
        name: &OsStr,
        mut row: Inode,
        asked: u32,
    ) -> Result<Entry> {
        let kind = row.mode & S_IFMT;
        let default = self.acl(&edit.view, dir, acl::DEFAULT)?.filter(|_| kind != S_IFLNK);
        let own = default.clone().map(|acl| acl.inherited(asked));
        if let Some(own) = &own {
            // Instead of the mask.
            row.mode = (row.mode & !0o777) | own.mode();
        }
        let parent = edit.touch(dir)?;
        if kind == S_IFDIR {
            parent.nlink += 1;
        }
        let ino = edit.born(row);
        edit.name(dir, name, ino);
        if let Some(own) = own.filter(|own| !own.is_a_mode()) {
            edit.push(Change::Xattr(ino, acl::ACCESS.into(), own.bytes()));
        }
        if let Some(default) = default.filter(|_| kind == S_IFDIR) {
            edit.push(Change::Xattr(ino, acl::DEFAULT.into(), default.bytes()));
        }
        edit.commit()?;
        let found = Found { ino, kind, lowers: Vec::new() };
        let (node, _) = self.table.enter(found, dir.ino, name);
        self.entry(&self.view()?, &node)
    }

    fn must_be_free(
        &self,
        edit: &Edit<'_>,
        dir: &Node,
        name: &OsStr,
        op: &'static str,
    ) -> Result<()> {
        if name.len() > NAME_MAX {
            return Err(Error::os(op, Errno::NAMETOOLONG));
        }
        if dir.is_orphan() {
            return Err(Error::os(op, Errno::NOENT));
        }
        match self.held(&edit.view, dir, name)? {
            Some(_) => Err(Error::os(op, Errno::EXIST)),
            None => Ok(()),
        }
    }

    pub(super) fn make_node(
        &self,
        dir: &Node,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry> {
        let mut edit = self.edit("create")?;
        self.must_be_free(&edit, dir, name, "create")?;
        let mode = match what {
            NewNode::Dir => S_IFDIR | (mode & 0o7777),
            NewNode::Symlink(_) => S_IFLNK | 0o777,
            NewNode::Special { .. } => mode,
        };
        let mut row = edit.fresh(dir, mode, caller)?;
        match what {
            NewNode::Dir => row.size = 0,
            NewNode::Symlink(target) => {
                row.target = target.as_bytes().to_vec();
                row.size = row.target.len() as u64;
            }
            NewNode::Special { rdev } => row.rdev = rdev,
        }
        self.settle(edit, dir, name, row, mode)
    }

    /// Makes a regular file, or takes the one that is there.
    pub(super) fn create_file(
        &self,
        dir: &Node,
        name: &OsStr,
        mode: u32,
        exclusive: bool,
        caller: Caller,
    ) -> Result<Entry> {
        let mut edit = self.edit("create")?;
        if !exclusive && let Some(node) = self.enter(&edit.view, dir, name)? {
            return self.entry(&edit.view, &node);
        }
        self.must_be_free(&edit, dir, name, "create")?;
        let row = edit.fresh(dir, S_IFREG | (mode & 0o7777), caller)?;
        self.settle(edit, dir, name, row, mode)
    }

    /// Removes a name; the inode it stood for.
    pub(super) fn remove(&self, dir: &Node, name: &OsStr, is_dir: bool) -> Result<NodeId> {
        let op = if is_dir { "rmdir" } else { "unlink" };
        let mut edit = self.edit(op)?;
        let held = self.held(&edit.view, dir, name)?;
        let held = held.ok_or_else(|| Error::os(op, Errno::NOENT))?;
        let node = &held.node;
        match (is_dir, node.kind == S_IFDIR) {
            (true, false) => return Err(Error::os(op, Errno::NOTDIR)),
            (false, true) => return Err(Error::os(op, Errno::ISDIR)),
            (true, true) if !self.names_of(&edit.view, node)?.is_empty() => {
                return Err(Error::os(op, Errno::NOTEMPTY));
            }
            _ => {}
        }
        edit.no_name(dir, name)?;
        let gone = edit.unlinked(node)?;
        let parent = edit.touch(dir)?;
        if is_dir {
            parent.nlink = parent.nlink.saturating_sub(1);
        }
        edit.commit()?;
        if gone {
            node.set_orphan();
        }
        Ok(node.ino)
    }

    pub(super) fn link_node(&self, node: &Node, dir: &Node, name: &OsStr) -> Result<Entry> {
        let mut edit = self.edit("link")?;
        self.must_be_free(&edit, dir, name, "link")?;
        let now = edit.now;
        let row = edit.row(node)?;
        if row.nlink == 0 {
            return Err(Error::os("link", Errno::NOENT));
        }
        if row.nlink >= LINKS_MAX {
            return Err(Error::os("link", Errno::MLINK));
        }
        row.nlink += 1;
        row.ctime = now;
        edit.name(dir, name, node.ino);
        edit.touch(dir)?;
        edit.commit()?;
        let found = Found { ino: node.ino, kind: node.kind, lowers: Vec::new() };
        let (node, _) = self.table.enter(found, dir.ino, name);
        self.entry(&self.view()?, &node)
    }

    pub(super) fn rename_node(
        &self,
        from: Place<'_>,
        to: Place<'_>,
        flags: u32,
    ) -> Result<Renamed> {
        let flags = RenameFlags::from_bits_retain(flags);
        let edit = self.edit("rename")?;
        if to.1.len() > NAME_MAX {
            return Err(Error::os("rename", Errno::NAMETOOLONG));
        }
        let moved = self.held(&edit.view, from.0, from.1)?;
        let moved = moved.ok_or_else(|| Error::os("rename", Errno::NOENT))?;
        let other = self.held(&edit.view, to.0, to.1)?;
        let other = other.as_ref().map(|other| &*other.node);
        if flags.contains(RenameFlags::EXCHANGE) {
            let other = other.ok_or_else(|| Error::os("rename", Errno::NOENT))?;
            return self.exchange(edit, (from, &moved.node), (to, other));
        }
        match other {
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => {
                return Err(Error::os("rename", Errno::EXIST));
            }
            // Two names of one inode: nothing is done.
            Some(other) if other.ino == moved.node.ino => return Ok(Renamed::default()),
            Some(other) => self.may_replace(&edit, &moved.node, other)?,
            None => {}
        }
        let whiteout = flags.contains(RenameFlags::WHITEOUT);
        self.replace(edit, (from, &moved.node), (to, other), whiteout)
    }

    fn may_replace(&self, edit: &Edit<'_>, moved: &Node, other: &Node) -> Result<()> {
        match (moved.kind == S_IFDIR, other.kind == S_IFDIR) {
            (true, false) => Err(Error::os("rename", Errno::NOTDIR)),
            (false, true) => Err(Error::os("rename", Errno::ISDIR)),
            (true, true) if !self.names_of(&edit.view, other)?.is_empty() => {
                Err(Error::os("rename", Errno::NOTEMPTY))
            }
            _ => Ok(()),
        }
    }

    fn replace(
        &self,
        mut edit: Edit<'_>,
        (from, moved): (Place<'_>, &Node),
        (to, other): (Place<'_>, Option<&Node>),
        whiteout: bool,
    ) -> Result<Renamed> {
        let is_dir = moved.kind == S_IFDIR;
        let now = edit.now;
        edit.row(moved)?.ctime = now;
        let parent = edit.touch(from.0)?;
        if is_dir {
            parent.nlink = parent.nlink.saturating_sub(1);
        }
        let parent = edit.touch(to.0)?;
        // A directory that is replaced leaves its place to this one.
        if is_dir && other.is_none() {
            parent.nlink += 1;
        }
        let gone = match other {
            Some(other) => edit.unlinked(other)?,
            None => false,
        };
        if whiteout {
            let (uid, gid) = (0, 0);
            let row = edit.fresh(from.0, S_IFCHR, Caller { uid, gid, umask: 0 })?;
            let ino = edit.born(row);
            edit.name(from.0, from.1, ino);
        } else {
            edit.no_name(from.0, from.1)?;
        }
        edit.name(to.0, to.1, moved.ino);
        edit.commit()?;
        moved.set_place(to.0.ino, to.1);
        if let Some(other) = other.filter(|_| gone) {
            other.set_orphan();
        }
        Ok(Renamed { moved: Some(moved.ino), other: other.map(|other| other.ino) })
    }

    fn exchange(
        &self,
        mut edit: Edit<'_>,
        (from, moved): (Place<'_>, &Node),
        (to, other): (Place<'_>, &Node),
    ) -> Result<Renamed> {
        let now = edit.now;
        edit.row(moved)?.ctime = now;
        edit.row(other)?.ctime = now;
        let (one, two) = (moved.kind == S_IFDIR, other.kind == S_IFDIR);
        let parent = edit.touch(from.0)?;
        parent.nlink = parent.nlink + u32::from(two) - u32::from(one);
        let parent = edit.touch(to.0)?;
        parent.nlink = parent.nlink + u32::from(one) - u32::from(two);
        edit.name(from.0, from.1, other.ino);
        edit.name(to.0, to.1, moved.ino);
        edit.commit()?;
        moved.set_place(to.0.ino, to.1);
        other.set_place(from.0.ino, from.1);
        Ok(Renamed { moved: Some(moved.ino), other: Some(other.ino) })
    }

    /// Nobody knows it any more, and it has no name: its blocks go now, its rows soon. After a
    /// crash the next mount removes them.
    pub(super) fn let_go(&self, ino: NodeId) {
        self.remove_data(ino);
        let many = {
            let mut gone = self.gone.lock();
            gone.push(ino);
            if gone.len() < GONE_MAX { Vec::new() } else { std::mem::take(&mut *gone) }
        };
        if !many.is_empty() {
            self.purge(&many);
        }
    }

    /// The blocks of an inode that nobody uses.
    pub(super) fn remove_data(&self, ino: NodeId) {
        self.files.lock().remove(&ino);
        let _ = unlinkat(&*self.data, file::data_name(ino), AtFlags::empty());
    }

    /// The rows of inodes whose blocks are gone.
    pub(super) fn purge(&self, inodes: &[NodeId]) {
        let batch: Vec<Change> = inodes.iter().map(|ino| Change::Purge(*ino)).collect();
        let _turn = self.rows.changes.lock();
        // Left for the next mount otherwise.
        if let Err(error) = self.rows.meta.note(&batch) {
            log::warn!("removing what has no name: {error}");
        }
    }

    /// Removes what a crash left without a name. Once, after the journal was read.
    pub(super) fn sweep(&self) -> Result<()> {
        let orphans = self.rows.meta.orphans()?;
        let (known, gone): (Vec<_>, Vec<_>) =
            orphans.into_iter().partition(|ino| self.table.get(*ino).is_some());
        known.iter().filter_map(|ino| self.table.get(*ino)).for_each(|node| node.set_orphan());
        if !gone.is_empty() && !self.read_only {
            gone.iter().for_each(|ino| self.remove_data(*ino));
            self.purge(&gone);
        }
        Ok(())
    }
}
