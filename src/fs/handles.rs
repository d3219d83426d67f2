//! Open files and directories by number.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Mutex, RwLock};

use crate::store::Device;
use crate::tree::{DirStream, NodeId};
use crate::units::Identity;

/// An open regular file.
#[derive(Clone)]
pub(super) struct FileHandle {
    pub(super) node: NodeId,
    pub(super) identity: Identity,
    pub(super) device: Arc<Device>,
}

/// An open directory.
pub(super) struct DirHandle {
    pub(super) node: NodeId,
    pub(super) stream: Mutex<Box<dyn DirStream>>,
}

/// The tables. Numbers are never reused; zero is never given out.
#[derive(Default)]
pub(super) struct Handles {
    files: RwLock<HashMap<u64, FileHandle>>,
    dirs: RwLock<HashMap<u64, Arc<DirHandle>>>,
    last: AtomicU64,
}

impl Handles {
    fn next(&self) -> u64 {
        self.last.fetch_add(1, Relaxed) + 1
    }

    pub(super) fn add_file(&self, handle: FileHandle) -> u64 {
        let fh = self.next();
        self.files.write().insert(fh, handle);
        fh
    }

    /// The device of a handle, if it is the node's.
    pub(super) fn device(&self, fh: u64, node: NodeId) -> Option<Arc<Device>> {
        let files = self.files.read();
        files.get(&fh).filter(|handle| handle.node == node).map(|handle| handle.device.clone())
    }

    /// The node of some open file.
    pub(super) fn any_file(&self) -> Option<NodeId> {
        self.files.read().values().next().map(|handle| handle.node)
    }

    pub(super) fn take_file(&self, fh: u64) -> Option<FileHandle> {
        self.files.write().remove(&fh)
    }

    pub(super) fn add_dir(&self, handle: DirHandle) -> u64 {
        let fh = self.next();
        self.dirs.write().insert(fh, Arc::new(handle));
        fh
    }

    pub(super) fn dir(&self, fh: u64, node: NodeId) -> Option<Arc<DirHandle>> {
        self.dirs.read().get(&fh).filter(|handle| handle.node == node).cloned()
    }

    pub(super) fn take_dir(&self, fh: u64) {
        let handle = self.dirs.write().remove(&fh);
        drop(handle);
    }
}
