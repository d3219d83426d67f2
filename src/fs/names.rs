//! Which names fsync has to make durable with a file (STORE 1): after create, link and rename the
//! name's directory is synced at the file's next fsync.
//!
//! States of a node: nothing new -> named in some directories -> synced. Lock: a leaf. Bounded:
//! past the bound all names are synced with the next fsync of any file.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::tree::NodeId;

/// Nodes that are remembered.
const NODES_MAX: usize = 16_384;

#[derive(Default)]
struct State {
    directories: HashMap<NodeId, Vec<NodeId>>,
    /// More than can be remembered.
    many: bool,
}

/// What must be synced with a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unsynced {
    /// These directories.
    Directories(Vec<NodeId>),
    /// Every name of the source.
    All,
}

/// See the module.
#[derive(Default)]
pub(super) struct Names(Mutex<State>);

impl Names {
    /// The node got a name in a directory.
    pub(super) fn note(&self, node: NodeId, directory: NodeId) {
        let mut state = self.0.lock();
        if state.directories.len() >= NODES_MAX {
            state.directories.clear();
            state.many = true;
        }
        let directories = state.directories.entry(node).or_default();
        if !directories.contains(&directory) {
            directories.push(directory);
        }
    }

    /// The kernel forgot the node: nobody can fsync it any more.
    pub(super) fn forget(&self, node: NodeId) {
        self.0.lock().directories.remove(&node);
    }

    /// What a file's fsync has to sync; it counts as synced from now on.
    pub(super) fn take(&self, node: NodeId) -> Unsynced {
        let mut state = self.0.lock();
        if std::mem::take(&mut state.many) {
            state.directories.clear();
            return Unsynced::All;
        }
        Unsynced::Directories(state.directories.remove(&node).unwrap_or_default())
    }

    /// The sync failed: the next one tries again.
    pub(super) fn give_back(&self, node: NodeId, unsynced: &Unsynced) {
        match unsynced {
            Unsynced::All => self.0.lock().many = true,
            Unsynced::Directories(directories) => {
                directories.iter().for_each(|directory| self.note(node, *directory));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_synced_once_and_too_many_all_at_once() {
        let names = Names::default();
        names.note(5, 1);
        names.note(5, 1);
        names.note(5, 2);
        assert_eq!(names.take(5), Unsynced::Directories(vec![1, 2]));
        assert_eq!(names.take(5), Unsynced::Directories(vec![]));
        (0..=NODES_MAX as u64).for_each(|node| names.note(node, 1));
        let all = names.take(7);
        assert_eq!(all, Unsynced::All);
        names.give_back(7, &all);
        assert_eq!(names.take(8), Unsynced::All);
        assert_eq!(names.take(NODES_MAX as u64), Unsynced::Directories(vec![]));
    }
}
