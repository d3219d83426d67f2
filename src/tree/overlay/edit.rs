//! A change of rows: what it reads, what it will write, and the commit.
//!
//! States: begun (the turn to change rows is taken, the view is of then) -> committed or dropped.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use parking_lot::MutexGuard;

use super::OverlayTree;
use super::meta::{Change, Inode};
use super::node::Node;
use super::view::View;
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::sys::flags::{S_IFDIR, S_IFLNK, S_IFMT};
use crate::tree::{NodeId, Timestamp, Tree};

/// See the module.
pub(super) struct Edit<'a> {
    tree: &'a OverlayTree,
    _turn: MutexGuard<'a, ()>,
    pub(super) view: View,
    /// The moment of all of it.
    pub(super) now: Timestamp,
    inodes: BTreeMap<NodeId, Box<Inode>>,
    changes: Vec<Change>,
}

impl OverlayTree {
    /// Begins a change. `op` is what the application called.
    pub(super) fn edit(&self, op: &'static str) -> Result<Edit<'_>> {
        self.writable(op)?;
        let turn = self.rows.changes.lock();
        let view = self.rows.meta.view()?;
        let (inodes, changes) = (BTreeMap::new(), Vec::new());
        Ok(Edit { tree: self, _turn: turn, view, now: clock::wall(), inodes, changes })
    }

    /// The row that a node without one would get: its lower's attributes.
    pub(super) fn row_from_lower(&self, view: &View, node: &Node) -> Result<Inode> {
        let first = *node
            .lowers
            .first()
            .ok_or_else(|| Error::new(Kind::Stale, "find", format!("inode {}", node.ino)))?;
        let attr = self.layers.attr(first)?;
        let mut origins = Vec::new();
        for lower in &node.lowers {
            origins.push(self.layers.origin(*lower)?);
        }
        let is_dir = attr.mode & S_IFMT == S_IFDIR;
        let target = match attr.mode & S_IFMT {
            S_IFLNK => self.layers.host(first.0)?.readlink(first.1)?,
            _ => Vec::new(),
        };
        let nlink = if is_dir { self.links_of(view, node)? } else { attr.nlink };
        Ok(Inode {
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            nlink,
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
            size: attr.size,
            lower_end: attr.size,
            target,
            origins,
            own_xattrs: false,
        })
    }
}

impl Edit<'_> {
    /// The row of an inode, to be changed; a lower's becomes one.
    pub(super) fn row(&mut self, node: &Node) -> Result<&mut Inode> {
        match self.inodes.entry(node.ino) {
            Entry::Occupied(row) => Ok(row.into_mut()),
            Entry::Vacant(place) => {
                let row = match self.view.inode(node.ino)? {
                    Some(row) => row,
                    None => self.tree.row_from_lower(&self.view, node)?,
                };
                Ok(place.insert(Box::new(row)))
            }
        }
    }

    /// The names of a directory change: so do its times.
    pub(super) fn touch(&mut self, dir: &Node) -> Result<&mut Inode> {
        let now = self.now;
        let row = self.row(dir)?;
        (row.mtime, row.ctime) = (now, now);
        Ok(row)
    }

    /// A new inode under a new number.
    pub(super) fn born(&mut self, row: Inode) -> NodeId {
        let mut next = self.tree.next.lock();
        let ino = *next;
        *next += 1;
        self.changes.push(Change::Next(*next));
        self.inodes.insert(ino, Box::new(row));
        ino
    }

    /// A name stands for an inode from now on.
    pub(super) fn name(&mut self, dir: &Node, name: &OsStr, ino: NodeId) {
        self.changes.push(Change::Name(dir.ino, name.as_bytes().to_vec(), ino));
    }

    /// A name stands for nothing from now on.
    pub(super) fn no_name(&mut self, dir: &Node, name: &OsStr) -> Result<()> {
        let key = name.as_bytes().to_vec();
        let below = self.tree.layers.child(&dir.lowers, name)?;
        self.changes.push(match below {
            Some(found) => {
                self.tree.layers.forget(&found.lowers);
                Change::Whiteout(dir.ino, key)
            }
            None => Change::NoName(dir.ino, key),
        });
        Ok(())
    }

    /// One more row.
    pub(super) fn push(&mut self, change: Change) {
        self.changes.push(change);
    }

    /// Makes it so: it survives kill -9.
    pub(super) fn commit(mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.inodes);
        let mut batch: Vec<Change> =
            rows.into_iter().map(|(ino, row)| Change::Inode(ino, row)).collect();
        batch.append(&mut self.changes);
        let gone = std::mem::take(&mut *self.tree.gone.lock());
        batch.extend(gone.iter().map(|ino| Change::Purge(*ino)));
        let applied = self.tree.rows.meta.note(&batch);
        if applied.is_err() {
            self.tree.gone.lock().extend(gone);
        }
        applied
    }
}
