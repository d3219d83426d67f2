//! An upper layer over read-only lowers, as a tree: every change is a row of `meta.redb` or a block
//! of `data/INO`, and no lower is ever touched.
//!
//! ```text
//! UPPER/meta.redb          inodes, names, xattrs, block maps
//! UPPER/names.log          what of it is not durable yet
//! UPPER/data/INO           sparse, each block at its own offset
//! UPPER/.bcachefs-fuse/    the journal
//! ```
//!
//! A name: its row counts (an inode, or a whiteout), else the lowers of its directory do. An inode:
//! its row counts, else the lower's attributes do. So copying up is writing a row, and what renames
//! is a name row: no name is reserved, nothing fails with EXDEV, no data is copied.
//!
//! Locks: `changes` (one change of rows at a time: from the view it is made on to its commit), then
//! `files`, `gone` and the node table's, which are leaves. Readers take none: they see the last
//! commit.

mod acl;
mod attrs;
mod batches;
pub mod diff;
mod dir;
mod edit;
mod file;
mod layers;
pub mod meta;
mod names;
mod node;
pub mod revert;
pub mod upper;
mod view;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use rustix::io::Errno;

use self::layers::Layers;
use self::meta::{Meta, NameRow};
use self::node::{Found, Node, Table};
use self::view::View;
use super::{
    Attr, Caller, DirStream, Entry, FsStat, Identity, NewNode, NodeId, Opened, ROOT, Renamed,
    SetTime, Tree,
};
use crate::config::DirectIo;
use crate::device::overlay::OverlayDevice;
use crate::error::{Error, Kind, OpContext, Result};
use crate::journal::DeviceIdentity;
use crate::store::recovery::Resolver;
use crate::sys::flags::{S_IFDIR, S_IFMT, S_IFREG};

pub use self::upper::Upper;

/// st_dev of what lies in an overlay, for the store: it never meets files of another tree.
const DEVICE: u64 = u64::MAX;

/// Names are durable after so long.
const TICK: Duration = Duration::from_secs(1);

/// How long a chain of directories may be.
const MAX_DEPTH: usize = 4096;

/// Longer names do not exist.
const NAME_MAX: usize = 255;

/// What tree and files share: the rows, and the turn to change them.
struct Rows {
    meta: Meta,
    changes: Mutex<()>,
}

/// Makes names durable a second after they were made, though nobody asks; ends when dropped.
struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(rows: &Arc<Rows>) -> Result<Ticker> {
        let (stop, stopped) = bounded::<()>(0);
        let rows = rows.clone();
        let tick = move || {
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = rows.meta.checkpoint() {
                    log::warn!("names are not durable: {error}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("bcfs-names".into()).spawn(tick);
        Ok(Ticker { stop: Some(stop), thread: Some(thread.op("start a thread")?) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its panic is its own: the log has everything.
            let _ = thread.join();
        }
    }
}

/// See the module.
pub struct OverlayTree {
    rows: Arc<Rows>,
    layers: Layers,
    table: Table,
    data: Arc<OwnedFd>,
    block_bytes: u32,
    uuid: [u8; 16],
    direct_io: DirectIo,
    read_only: bool,
    next: Mutex<NodeId>,
    /// Without a name and a user: their rows go with the next commit.
    gone: Mutex<Vec<NodeId>>,
    files: Mutex<HashMap<NodeId, Weak<OverlayDevice>>>,
    ticker: Mutex<Option<Ticker>>,
}

impl OverlayTree {
    /// A tree over an open upper.
    pub fn new(upper: Upper, direct_io: DirectIo, read_only: bool) -> Result<OverlayTree> {
        let Upper { meta, head, data, hosts } = upper;
        let next = meta.next()?;
        let tree = OverlayTree {
            rows: Arc::new(Rows { meta, changes: Mutex::default() }),
            layers: Layers::new(hosts),
            table: Table::default(),
            data: Arc::new(data),
            block_bytes: head.block_bytes,
            uuid: head.uuid,
            direct_io,
            read_only,
            next: Mutex::new(next),
            gone: Mutex::default(),
            files: Mutex::default(),
            ticker: Mutex::default(),
        };
        let root = Found { ino: ROOT, kind: S_IFDIR, lowers: tree.layers.roots() };
        tree.table.enter(root, ROOT, OsStr::new(""));
        Ok(tree)
    }

    fn node(&self, ino: NodeId) -> Result<Arc<Node>> {
        self.table.get(ino).ok_or_else(|| Error::new(Kind::Stale, "find", format!("inode {ino}")))
    }

    fn view(&self) -> Result<View> {
        self.rows.meta.view()
    }

    fn writable(&self, op: &'static str) -> Result<()> {
        if self.read_only { Err(Error::new(Kind::ReadOnly, op, "")) } else { Ok(()) }
    }

    /// What a name stands for. Its lowers are counted.
    fn child(&self, view: &View, dir: &Node, name: &OsStr) -> Result<Option<Found>> {
        if name.len() > NAME_MAX {
            return Err(Error::os("lookup", Errno::NAMETOOLONG));
        }
        let ino = match view.name(dir.ino, name.as_bytes())? {
            Some(NameRow::Whiteout) => return Ok(None),
            Some(NameRow::Inode(ino)) => ino,
            None => return self.layers.child(&dir.lowers, name),
        };
        self.found(view, ino).map(Some)
    }

    /// An inode by its row. Its lowers are counted.
    fn found(&self, view: &View, ino: NodeId) -> Result<Found> {
        if let Some(node) = self.table.get(ino) {
            // Known already: `enter` takes the node, and its lowers are not needed again.
            return Ok(Found { ino, kind: node.kind, lowers: Vec::new() });
        }
        let missing = || Error::new(Kind::Corrupt, "lookup", format!("no row of inode {ino}"));
        let inode = view.inode(ino)?.ok_or_else(missing)?;
        let mut lowers = Vec::new();
        for origin in &inode.origins {
            match self.layers.find(origin) {
                Ok(lower) => lowers.push(lower),
                Err(error) => {
                    self.layers.forget(&lowers);
                    return Err(error);
                }
            }
        }
        Ok(Found { ino, kind: inode.mode & S_IFMT, lowers })
    }

    /// Looks a name up and counts it.
    fn enter(&self, view: &View, dir: &Node, name: &OsStr) -> Result<Option<Arc<Node>>> {
        let Some(found) = self.child(view, dir, name)? else { return Ok(None) };
        let (node, surplus) = self.table.enter(found, dir.ino, name);
        self.layers.forget(&surplus);
        Ok(Some(node))
    }

    /// The same for the length of a call.
    fn held(&self, view: &View, dir: &Node, name: &OsStr) -> Result<Option<Held<'_>>> {
        let node = self.enter(view, dir, name)?;
        Ok(node.map(|node| Held { tree: self, node }))
    }

    fn entry(&self, view: &View, node: &Node) -> Result<Entry> {
        Ok(Entry { id: node.ino, generation: 0, attr: self.attr_of(view, node)? })
    }

    fn drop_counts(&self, ino: NodeId, count: u64) {
        if ino == ROOT {
            return;
        }
        let Some(node) = self.table.forget(ino, count) else { return };
        self.layers.forget(&node.lowers);
        if node.is_orphan() && !self.read_only {
            self.let_go(ino);
        }
    }
}

impl Drop for OverlayTree {
    fn drop(&mut self) {
        drop(self.ticker.lock().take());
        let gone = std::mem::take(&mut *self.gone.lock());
        if !gone.is_empty() {
            self.purge(&gone);
        }
        if let Err(error) = self.rows.meta.checkpoint() {
            log::warn!("{error}");
        }
    }
}

/// A node that is counted as long as this lives.
struct Held<'a> {
    tree: &'a OverlayTree,
    node: Arc<Node>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.tree.drop_counts(self.node.ino, 1);
    }
}

impl Tree for OverlayTree {
    fn lookup(&self, parent: NodeId, name: &OsStr) -> Result<Entry> {
        let (dir, view) = (self.node(parent)?, self.view()?);
        let node = self.enter(&view, &dir, name)?;
        let node = node.ok_or_else(|| Error::os("lookup", Errno::NOENT))?;
        let entry = self.entry(&view, &node);
        if entry.is_err() {
            self.drop_counts(node.ino, 1);
        }
        entry
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.drop_counts(node, count);
    }

    fn attr(&self, node: NodeId) -> Result<Attr> {
        self.attr_of(&self.view()?, &*self.node(node)?)
    }

    fn identity(&self, node: NodeId) -> Result<Identity> {
        Ok(identity(self.node(node)?.ino))
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
        self.change_mode(&*self.node(node)?, mode)
    }

    fn set_owner(&self, node: NodeId, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.change_owner(&*self.node(node)?, uid, gid)
    }

    fn set_times(&self, node: NodeId, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.change_times(&*self.node(node)?, atime, mtime)
    }

    fn readlink(&self, node: NodeId) -> Result<Vec<u8>> {
        self.target(&*self.node(node)?)
    }

    fn make(
        &self,
        parent: NodeId,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry> {
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
        let entry = self.create_file(&*self.node(parent)?, name, mode, exclusive, caller)?;
        match self.open(entry.id, true) {
            Ok(opened) => Ok((entry, opened)),
            Err(error) => {
                self.drop_counts(entry.id, 1);
                Err(error)
            }
        }
    }

    fn open(&self, node: NodeId, write: bool) -> Result<Opened> {
        if write {
            self.writable("open")?;
        }
        let node = self.node(node)?;
        if node.kind != S_IFREG {
            return Err(Error::new(Kind::Invalid, "open", format!("inode {}", node.ino)));
        }
        if write {
            self.copy_up(&node)?;
        }
        let device = self.device(&node)?;
        let attr = self.attr_of(&self.view()?, &node)?;
        Ok(Opened { device, identity: identity(node.ino), attr })
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> Result<Option<NodeId>> {
        self.remove(&*self.node(parent)?, name, false).map(Some)
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> Result<()> {
        self.remove(&*self.node(parent)?, name, true).map(drop)
    }

    fn rename(&self, from: (NodeId, &OsStr), to: (NodeId, &OsStr), flags: u32) -> Result<Renamed> {
        let (old, new) = (self.node(from.0)?, self.node(to.0)?);
        self.rename_node((&old, from.1), (&new, to.1), flags)
    }

    fn link(&self, node: NodeId, parent: NodeId, name: &OsStr) -> Result<Entry> {
        self.link_node(&*self.node(node)?, &*self.node(parent)?, name)
    }

    fn open_dir(&self, node: NodeId) -> Result<Box<dyn DirStream>> {
        let (node, parent) = (self.node(node)?, self.node(node)?.place().0);
        Ok(Box::new(dir::OverlayDir::new(self.names_of(&self.view()?, &node)?, node.ino, parent)))
    }

    fn sync_dir(&self, _node: NodeId, _data_only: bool) -> Result<()> {
        self.rows.meta.checkpoint()
    }

    fn sync_attr(&self, _node: NodeId) -> Result<()> {
        self.rows.meta.checkpoint()
    }

    fn sync_names(&self) -> Result<()> {
        self.rows.meta.checkpoint()
    }

    fn statfs(&self, _node: NodeId) -> Result<FsStat> {
        FsStat::of(&*self.data)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr, value: &mut [u8]) -> Result<usize> {
        self.get_attribute(&*self.node(node)?, name, value)
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: u32) -> Result<()> {
        self.set_attribute(&*self.node(node)?, name, value, flags)
    }

    fn listxattr(&self, node: NodeId, list: &mut [u8]) -> Result<usize> {
        self.list_attributes(&*self.node(node)?, list)
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> Result<()> {
        self.remove_attribute(&*self.node(node)?, name)
    }

    fn record(&self, node: NodeId) -> Result<Option<DeviceIdentity>> {
        let inode = self.node(node)?.ino;
        let path = self.path(node).as_os_str().as_bytes().to_vec();
        let (named, filesystem) = (true, self.uuid);
        Ok(Some(DeviceIdentity { named, filesystem, inode, path, ..DeviceIdentity::default() }))
    }

    fn resolver(&self) -> Option<&dyn Resolver> {
        Some(self)
    }

    fn overlay(&self) -> Option<&OverlayTree> {
        Some(self)
    }

    fn start(&self) -> Result<()> {
        self.sweep()?;
        *self.ticker.lock() = Some(Ticker::start(&self.rows)?);
        Ok(())
    }

    fn load(&self) -> (usize, usize) {
        (self.table.len(), self.layers.open())
    }
}

fn identity(ino: NodeId) -> Identity {
    Identity { dev: DEVICE, ino, generation: 0 }
}

#[cfg(test)]
mod tests;
