//! Files of which something is in the journal only (STORE 5): their size and times come from the
//! store, what would strip or need their bytes flushes them first, their last unlink leaves a note.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::Fs;
use super::names::Unsynced;
use crate::clock;
use crate::error::{Kind, Result};
use crate::stats::FlushProgress;
use crate::store::Device;
use crate::sys::flags::{S_IFMT, S_IFREG};
use crate::tree::{Attr, NodeId, ROOT, SetTime, Timestamp};

/// An attribute that a write strips: also a home write.
const CAPABILITY: &str = "security.capability";

/// Units of st_blocks.
const BLOCK: u64 = 512;

impl Fs {
    /// A node's device if it is dirty. Cheap while nothing is.
    pub(super) fn dirty_device(&self, node: NodeId) -> Option<Arc<Device>> {
        if !self.store.is_dirty() {
            return None;
        }
        let identity = self.tree.identity(node).ok()?;
        self.store.live(&identity).filter(|device| device.is_dirty())
    }

    /// Attributes as applications see them.
    pub(super) fn overlay(&self, node: NodeId, attr: &mut Attr) {
        if attr.mode & S_IFMT != S_IFREG {
            return;
        }
        let Some(overlay) = self.dirty_device(node).and_then(|device| device.overlay()) else {
            return;
        };
        attr.size = overlay.size;
        attr.mtime = overlay.mtime;
        attr.ctime = overlay.ctime;
        // Dirty bytes may be of holes, or of blocks that are there: never 0 with data (tar -S would
        // archive zeros), never more than the file has.
        let most = overlay.size.div_ceil(BLOCK).max(attr.blocks);
        attr.blocks = (attr.blocks + overlay.unallocated.div_ceil(BLOCK)).min(most);
    }

    /// What of a set time the source is to be told; a dirty file's mtime is the store's.
    pub(super) fn set_mtime_of_dirty(&self, node: NodeId, mtime: SetTime) -> Result<SetTime> {
        let time: Timestamp = match mtime {
            SetTime::Omit => return Ok(mtime),
            SetTime::Now => clock::wall(),
            SetTime::At(time) => time,
        };
        match self.dirty_device(node) {
            Some(device) if device.set_mtime(time)? => Ok(SetTime::Omit),
            _ => Ok(mtime),
        }
    }

    /// A home write strips what these set: the file is flushed before.
    pub(super) fn flush_before(&self, node: NodeId) -> Result<()> {
        match self.dirty_device(node) {
            Some(device) => device.flush(),
            None => Ok(()),
        }
    }

    /// The same for an extended attribute.
    pub(super) fn flush_before_xattr(&self, node: NodeId, name: &OsStr) -> Result<()> {
        if name == CAPABILITY { self.flush_before(node) } else { Ok(()) }
    }

    /// Attributes of a node changed at the source, by us.
    pub(super) fn note_attributes(&self, node: NodeId) {
        if self.store.has_journal()
            && let Ok(identity) = self.tree.identity(node)
            && let Some(device) = self.store.live(&identity)
        {
            device.note_attributes();
        }
    }

    /// A file that is about to lose a name: the note for replay, if it is its last one.
    pub(super) fn note_unlink(&self, parent: NodeId, name: &OsStr) {
        if !self.store.is_dirty() {
            return;
        }
        let Ok(entry) = self.tree.lookup(parent, name) else { return };
        // A clean or closed one counts: its records may still be in the journal.
        if entry.attr.nlink == 1
            && entry.attr.mode & S_IFMT == S_IFREG
            && let Ok(identity) = self.tree.identity(entry.id)
            && self.store.knows(&identity)
            && let Err(error) = self.store.note_unlink(&identity, &self.tree.path(entry.id))
        {
            log::warn!("journal: no note of an unlink: {error}");
        }
        self.tree.forget(entry.id, 1);
    }

    /// Before a rename: a dirty file that takes another's name is durable first, as ext4 sees to
    /// for its own; the other one gets its note.
    pub(super) fn before_rename(&self, from: (NodeId, &OsStr), to: (NodeId, &OsStr)) -> Result<()> {
        if !self.store.is_dirty() {
            return Ok(());
        }
        let Ok(target) = self.tree.lookup(to.0, to.1) else { return Ok(()) };
        self.tree.forget(target.id, 1);
        let moved = self.tree.lookup(from.0, from.1)?;
        let durable = match self.dirty_device(moved.id) {
            Some(device) => device.make_durable(),
            None => Ok(()),
        };
        self.tree.forget(moved.id, 1);
        durable?;
        if target.id != moved.id {
            self.note_unlink(to.0, to.1);
        }
        Ok(())
    }

    /// Syncs the directories of a file's new names.
    pub(super) fn sync_names_of(&self, node: NodeId) -> Result<()> {
        if !self.store.has_journal() {
            return Ok(());
        }
        let unsynced = self.names.take(node);
        let result = match &unsynced {
            Unsynced::All => self.tree.sync_names(),
            Unsynced::Directories(directories) => directories
                .iter()
                .map(|directory| self.tree.sync_dir(*directory, false))
                // A directory that is gone has no names to lose.
                .try_for_each(|synced| match synced {
                    Err(error) if matches!(error.kind, Kind::Stale | Kind::NotFound) => Ok(()),
                    other => other,
                }),
        };
        if result.is_err() {
            self.names.give_back(node, &unsynced);
        }
        result
    }

    /// Waits until a file, or everything, is home; see `BlockStore::flush`.
    pub fn flush(
        &self,
        below: Option<&Path>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        let Some(below) = below else { return self.store.flush(None, tell) };
        if below.as_os_str().is_empty() {
            return self.store.flush(None, tell);
        }
        let identity = self.identity_of(below)?;
        self.store.flush(Some(&identity), tell)
    }

    /// Whether what is dirty at the end is left in the journal.
    pub fn leave_rest(&self, leave: bool) {
        self.leave_rest.store(leave, SeqCst);
    }

    /// Whether it is to be left.
    pub fn leaves_rest(&self) -> bool {
        self.leave_rest.load(SeqCst)
    }

    /// The inode of a path below the root.
    pub(super) fn identity_of(&self, below: &Path) -> Result<crate::units::Identity> {
        let mut node = ROOT;
        let mut counted = Vec::new();
        let mut result = Ok(());
        for name in below.iter() {
            match self.tree.lookup(node, name) {
                Ok(entry) => {
                    counted.push(entry.id);
                    node = entry.id;
                }
                Err(error) => {
                    result = Err(error.at_path(below));
                    break;
                }
            }
        }
        let identity = self.tree.identity(node);
        counted.into_iter().for_each(|id| self.tree.forget(id, 1));
        result?;
        identity
    }
}
