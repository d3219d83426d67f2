//! The inodes that somebody knows: the kernel, or a call that is under way.
//!
//! States of a node: counted -> forgotten. It holds one reference to each lower node it is made of.
//! Locks: the table's and each node's place, leaves, never held across I/O.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;

use crate::tree::NodeId;

/// Which inode of which lower.
pub(super) type LowerRef = (usize, NodeId);

/// An inode somebody knows.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) ino: NodeId,
    /// Type bits.
    pub(super) kind: u32,
    /// What it is made of, first one first.
    pub(super) lowers: Vec<LowerRef>,
    place: Mutex<(NodeId, OsString)>,
    /// No name is left: its rows go with the last count.
    orphan: AtomicBool,
}

impl Node {
    /// Its directory, and its name there.
    pub(super) fn place(&self) -> (NodeId, OsString) {
        self.place.lock().clone()
    }

    pub(super) fn set_place(&self, parent: NodeId, name: &OsStr) {
        *self.place.lock() = (parent, name.to_os_string());
    }

    pub(super) fn set_orphan(&self) {
        self.orphan.store(true, SeqCst);
    }

    pub(super) fn is_orphan(&self) -> bool {
        self.orphan.load(SeqCst)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table(Mutex<HashMap<NodeId, (Arc<Node>, u64)>>);

/// What a lookup found.
pub(super) struct Found {
    pub(super) ino: NodeId,
    pub(super) kind: u32,
    pub(super) lowers: Vec<LowerRef>,
}

impl Table {
    pub(super) fn get(&self, ino: NodeId) -> Option<Arc<Node>> {
        self.0.lock().get(&ino).map(|(node, _)| node.clone())
    }

    /// Counts a node. What of `found` was not needed, because it was known, is to be forgotten.
    pub(super) fn enter(
        &self,
        found: Found,
        parent: NodeId,
        name: &OsStr,
    ) -> (Arc<Node>, Vec<LowerRef>) {
        let mut table = self.0.lock();
        if let Some((node, count)) = table.get_mut(&found.ino) {
            *count += 1;
            node.set_place(parent, name);
            return (node.clone(), found.lowers);
        }
        let place = Mutex::new((parent, name.to_os_string()));
        let Found { ino, kind, lowers } = found;
        let node = Arc::new(Node { ino, kind, lowers, place, orphan: AtomicBool::new(false) });
        table.insert(ino, (node.clone(), 1));
        (node, Vec::new())
    }

    /// Drops counts; the node, if these were its last.
    pub(super) fn forget(&self, ino: NodeId, count: u64) -> Option<Arc<Node>> {
        let mut table = self.0.lock();
        let (_, known) = table.get_mut(&ino)?;
        *known = known.saturating_sub(count);
        if *known > 0 {
            return None;
        }
        table.remove(&ino).map(|(node, _)| node)
    }

    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }
}
