//! Telling the kernel what it must not believe any longer (layer 8).

use std::ffi::OsStr;

use fuser::{INodeNo, Notifier};

use crate::fs::KernelCache;
use crate::tree::NodeId;

/// The kernel's side of a session.
#[derive(Debug)]
pub struct Kernel(Notifier);

impl Kernel {
    /// Over a session's notifier.
    pub fn new(notifier: Notifier) -> Kernel {
        Kernel(notifier)
    }
}

impl KernelCache for Kernel {
    fn changed(&self, node: NodeId) {
        // ENOENT: it remembers nothing of it.
        let _ = self.0.inval_inode(INodeNo(node), 0, 0);
    }

    fn renamed(&self, parent: NodeId, name: &OsStr) {
        let _ = self.0.inval_entry(INodeNo(parent), name);
    }
}
