//! What a POSIX filesystem means over a tree and a store (layer 7): handles, attributes, the data
//! path. No FUSE type appears here; the adapter above decodes, calls, and replies.
//!
//! A handle number is a hint: every request can be served from the node's number alone, by opening
//! the file for the length of the request. Locks: the handle table's (leaf, table access only) and
//! one per open directory (held while entries are read: a directory stream has one position).

mod attrs;
mod data;
mod dirs;
mod dirty;
mod handles;
mod names;
mod overlay;
pub mod pool;

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub use self::attrs::Changes;
pub use self::data::{Read, ReadPlace};
use self::handles::{FileHandle, Handles};
use self::names::Names;
pub use self::overlay::KernelCache;
use self::pool::Pool;
use crate::config::Config;
use crate::error::{Kind, Result};
use crate::journal::{DeviceIdentity, Recovered};
use crate::store::mark::OwnerMark;
use crate::store::recovery::{Located, Opening, Report, Resolver};
use crate::store::{BlockStore, Stamp};
use crate::sys::flags::{O_EXCL, S_IFMT, S_IFREG};
use crate::tree::overlay::Upper;
use crate::tree::overlay::upper::Lower;
use crate::tree::{
    Attr, Caller, Entry, FsStat, HostTree, NewNode, NodeId, Opened, OverlayTree, Tree,
};

/// Descriptors the node table may keep at most, whatever RLIMIT_NOFILE allows.
const MAX_NODE_FDS: u64 = 1 << 19;

/// Worker threads: with the request threads inside, about 32 device reads are in flight.
const WORKERS: usize = 20;

/// Threads of writers that wait.
const WAITERS: usize = 8;

/// A mounted filesystem, without the mount.
pub struct Fs {
    tree: Arc<dyn Tree>,
    store: BlockStore,
    handles: Handles,
    pool: Pool,
    /// Writers that wait for room in the journal.
    waiters: Pool,
    names: Names,
    leave_rest: AtomicBool,
    kernel: OnceLock<Box<dyn KernelCache>>,
    attr_timeout: Duration,
}

/// A journal that was read, for a filesystem to go on with.
pub struct JournalParts {
    /// The journal.
    pub recovered: Recovered,
    /// The owner mark of the source.
    pub mark: Arc<dyn OwnerMark>,
    /// Nothing may be written.
    pub read_only: bool,
}

/// A file the kernel opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenReply {
    /// Its handle number.
    pub fh: u64,
    /// Whether the kernel's cached pages are still right.
    pub keep_cache: bool,
}

/// The stamp that attributes make.
fn stamp_of(attr: &Attr) -> Stamp {
    Stamp { size: attr.size, mtime: attr.mtime, ctime: attr.ctime }
}

/// Raises RLIMIT_NOFILE as far as it goes; the descriptors the node table may keep.
fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(MAX_NODE_FDS * 2);
    let raised = Rlimit { current: Some(hard), maximum: limit.maximum };
    let now = if setrlimit(Resource::Nofile, raised).is_ok() {
        hard
    } else {
        limit.current.unwrap_or(1024)
    };
    (now / 2).min(MAX_NODE_FDS)
}

/// A directory of the host. `root` is an O_PATH descriptor of it, opened before anything is mounted
/// over it.
pub fn host_tree(root: OwnedFd, config: &Config) -> Result<Arc<dyn Tree>> {
    let max_open = raise_descriptor_limit() as usize;
    let (direct_io, read_only) = (config.store.direct_io, config.mount.read_only);
    Ok(Arc::new(HostTree::new(root, direct_io, read_only, max_open)?))
}

/// An upper directory over lowers, the first one first.
pub fn overlay_tree(upper: &Path, lowers: Vec<Lower>, config: &Config) -> Result<Arc<dyn Tree>> {
    let max_open = raise_descriptor_limit() as usize / lowers.len().max(1);
    let direct_io = config.store.direct_io;
    let upper = Upper::open(upper, lowers, direct_io, max_open)?;
    Ok(Arc::new(OverlayTree::new(upper, direct_io, config.mount.read_only)?))
}

/// Of a tree whose files cannot be found again.
struct NoResolver;

impl Resolver for NoResolver {
    fn find(&self, _record: &DeviceIdentity) -> Result<Option<Located>> {
        Ok(None)
    }
}

impl Fs {
    /// A filesystem over a tree. Starts no thread.
    pub fn without_journal(tree: Arc<dyn Tree>, config: &Config) -> Arc<Fs> {
        Fs::over(tree, BlockStore::new(&config.store), config)
    }

    /// The same with a journal, and what it held. Its data is dirty again once this returns.
    pub fn with_journal(
        tree: Arc<dyn Tree>,
        config: &Config,
        journal: JournalParts,
    ) -> Result<(Arc<Fs>, Report)> {
        let descriptors = raise_descriptor_limit();
        let resolver = tree.resolver().unwrap_or(&NoResolver);
        // Each holds up to four; they may have a quarter of the limit (STORE 6), which is twice
        // what the node table may keep.
        let dirty_max = (2 * descriptors / 4 / 4) as usize;
        let opening = Opening {
            mark: Some(journal.mark),
            read_only: journal.read_only,
            claims_max: dirty_max,
            ..Opening::new(resolver)
        };
        let (store, report) = BlockStore::with_journal(&config.store, journal.recovered, &opening)?;
        store.set_dirty_max(dirty_max);
        let names = tree.clone();
        store.set_names_sync(Box::new(move || names.sync_names()));
        Ok((Fs::over(tree, store, config), report))
    }

    /// A filesystem over any tree and store.
    pub fn over(tree: Arc<dyn Tree>, store: BlockStore, config: &Config) -> Arc<Fs> {
        Arc::new(Fs {
            tree,
            store,
            handles: Handles::default(),
            pool: Pool::new("bcfs-io", WORKERS, config.mount.threads),
            waiters: Pool::new("bcfs-wait", WAITERS, 0),
            names: Names::default(),
            leave_rest: AtomicBool::new(false),
            kernel: OnceLock::new(),
            attr_timeout: config.mount.attr_timeout,
        })
    }

    /// Starts the worker threads; after daemonizing.
    pub fn start(&self) -> Result<()> {
        self.tree.start()?;
        self.pool.start()?;
        if self.store.has_journal() {
            self.waiters.start()?;
        }
        self.store.start()
    }

    /// Ends the worker threads; after the session. What is dirty stays in the journal.
    pub fn stop(&self) -> Result<()> {
        self.waiters.stop();
        self.pool.stop();
        self.store.stop_trace();
        self.store.stop()
    }

    /// The block store.
    pub fn store(&self) -> &BlockStore {
        &self.store
    }

    /// The namespace.
    pub fn tree(&self) -> &dyn Tree {
        &*self.tree
    }

    /// The worker threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The threads of writers that have to wait.
    pub fn waiters(&self) -> &Pool {
        &self.waiters
    }

    /// How long the kernel may believe names and attributes.
    pub fn attr_timeout(&self) -> Duration {
        self.attr_timeout
    }

    /// The entry of a name.
    pub fn lookup(&self, parent: NodeId, name: &OsStr) -> Result<Entry> {
        let mut entry = self.tree.lookup(parent, name)?;
        self.observe(&entry);
        self.overlay(entry.id, &mut entry.attr);
        Ok(entry)
    }

    /// The kernel drops references.
    pub fn forget(&self, node: NodeId, count: u64) {
        self.tree.forget(node, count);
        if self.store.has_journal() && self.tree.identity(node).is_err() {
            self.names.forget(node);
        }
    }

    /// Makes a directory, a device node, a fifo, a socket, an empty file or a symlink.
    pub fn make(
        &self,
        parent: NodeId,
        name: &OsStr,
        what: NewNode<'_>,
        mode: u32,
        caller: Caller,
    ) -> Result<Entry> {
        if matches!(what, NewNode::Special { .. }) && mode & S_IFMT == S_IFREG {
            // A regular file by mknod(2) goes the way of every regular file.
            let (entry, open) = self.create(parent, name, mode, O_EXCL, caller)?;
            self.release(open.fh);
            return Ok(entry);
        }
        self.tree.make(parent, name, what, mode, caller)
    }

    /// Removes a name of anything but a directory.
    pub fn unlink(&self, parent: NodeId, name: &OsStr) -> Result<()> {
        self.note_unlink(parent, name);
        if let Some(node) = self.tree.unlink(parent, name)? {
            self.lost_a_name(node);
        }
        Ok(())
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, parent: NodeId, name: &OsStr) -> Result<()> {
        self.tree.rmdir(parent, name)
    }

    /// Renames or exchanges.
    pub fn rename(&self, from: (NodeId, &OsStr), to: (NodeId, &OsStr), flags: u32) -> Result<()> {
        self.before_rename(from, to)?;
        let renamed = self.tree.rename(from, to, flags)?;
        if let Some(node) = renamed.other {
            self.lost_a_name(node);
        }
        if let Some(node) = renamed.moved {
            self.restamp(node, false);
            self.named(node, to.0);
            if let Ok(identity) = self.tree.identity(node) {
                self.store.renamed(&identity, self.tree.path(node));
            }
        }
        Ok(())
    }

    /// A further name.
    pub fn link(&self, node: NodeId, parent: NodeId, name: &OsStr) -> Result<Entry> {
        let mut entry = self.tree.link(node, parent, name)?;
        self.restamp(node, false);
        self.named(node, parent);
        self.overlay(entry.id, &mut entry.attr);
        Ok(entry)
    }

    /// The target of a symlink.
    pub fn readlink(&self, node: NodeId) -> Result<Vec<u8>> {
        self.tree.readlink(node)
    }

    /// The filesystem of a node.
    pub fn statfs(&self, node: NodeId) -> Result<FsStat> {
        self.tree.statfs(node)
    }

    /// A node got a name in a directory: its next fsync makes that durable.
    fn named(&self, node: NodeId, directory: NodeId) {
        if self.store.has_journal() {
            self.names.note(node, directory);
            self.note_attributes(node);
        }
    }

    /// A name of the node is gone (or its inode was exchanged): with the last one goes its tag.
    fn lost_a_name(&self, node: NodeId) {
        let Ok(identity) = self.tree.identity(node) else { return };
        if !self.store.knows(&identity) {
            return;
        }
        match self.tree.attr(node) {
            Ok(attr) if attr.nlink > 0 => self.store.touched(&identity, stamp_of(&attr), false),
            Err(error) if error.kind != Kind::Stale => {}
            _ => self.store.forget(&identity),
        }
    }

    /// We changed a node's attributes: its stamp moves on.
    fn restamp(&self, node: NodeId, set_mtime: bool) {
        let Ok(identity) = self.tree.identity(node) else { return };
        if self.store.knows(&identity)
            && let Ok(attr) = self.tree.attr(node)
        {
            self.store.touched(&identity, stamp_of(&attr), set_mtime);
        }
    }

    /// Makes and opens a regular file.
    pub fn create(
        &self,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        flags: i32,
        caller: Caller,
    ) -> Result<(Entry, OpenReply)> {
        let exclusive = flags & O_EXCL != 0;
        let (entry, opened) = self.tree.create(parent, name, mode, exclusive, caller)?;
        let mut entry = entry;
        let is_new = opened.attr.size == 0 && opened.attr.nlink == 1;
        match self.open_file(entry.id, opened, wants_write(flags), is_new) {
            Ok(open) => {
                self.named(entry.id, parent);
                self.overlay(entry.id, &mut entry.attr);
                Ok((entry, open))
            }
            Err(error) => {
                self.tree.forget(entry.id, 1);
                Err(error)
            }
        }
    }

    /// Opens a regular file. `flags` as the application gave them.
    pub fn open(&self, node: NodeId, flags: i32) -> Result<OpenReply> {
        let write = wants_write(flags);
        let opened = self.tree.open(node, write)?;
        self.open_file(node, opened, write, false)
    }

    fn open_file(
        &self,
        node: NodeId,
        opened: Opened,
        write: bool,
        is_new: bool,
    ) -> Result<OpenReply> {
        let (handle, keep_cache) = self.handle(node, opened, write, is_new)?;
        Ok(OpenReply { fh: self.handles.add_file(handle), keep_cache })
    }

    /// One more handle of a file in the store, not yet in the table. `is_new`: no name of it can be
    /// durable yet.
    fn handle(
        &self,
        node: NodeId,
        opened: Opened,
        write: bool,
        is_new: bool,
    ) -> Result<(FileHandle, bool)> {
        let Opened { device, identity, attr } = opened;
        let path = || self.tree.path(node);
        let opened = self.store.open(identity, stamp_of(&attr), device, &path);
        let handle = FileHandle { node, identity, device: opened.device };
        if let Err(error) = handle.device.prepare(write) {
            self.close_file(&handle);
            return Err(error.at_path(&self.tree.path(node)));
        }
        if write && self.store.has_journal() && !handle.device.has_record() {
            let record = self.tree.record(node)?;
            if let Some(record) = record {
                if !is_new {
                    // The journal will say that it has a durable name (J10).
                    self.tree.sync_attr(node)?;
                }
                handle.device.journal_as(DeviceIdentity { named: !is_new, ..record });
            }
        }
        Ok((handle, opened.unchanged))
    }

    fn close_file(&self, handle: &FileHandle) {
        let stamp = || self.tree.attr(handle.node).ok().map(|attr| stamp_of(&attr));
        self.store.close(&handle.identity, &stamp);
    }

    /// The kernel's last use of a handle.
    pub fn release(&self, fh: u64) {
        if let Some(handle) = self.handles.take_file(fh) {
            self.close_file(&handle);
        }
    }

    /// The tag of what a path below the root names, if it is a file that has one.
    pub fn unit_of(&self, below: &Path) -> Result<Option<u32>> {
        Ok(self.store.unit_of(&self.identity_of(below)?))
    }
}

fn wants_write(flags: i32) -> bool {
    use crate::sys::flags::{O_ACCMODE, O_RDONLY};
    flags & O_ACCMODE != O_RDONLY
}

#[cfg(test)]
mod tests;
