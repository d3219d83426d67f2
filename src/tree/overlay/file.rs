//! Regular files of an overlay: the device of one, the rows of its map, and finding it again.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, openat};

use super::meta::{Change, Inode};
use super::node::Node;
use super::{OverlayTree, Rows, identity};
use crate::device::overlay::{MapChange, MapStore, OverlayDevice, SavedMap};
use crate::device::{BlockDevice, FileDevice};
use crate::error::{Error, Kind, Result};
use crate::journal::DeviceIdentity;
use crate::store::recovery::{Located, Resolver};
use crate::tree::{NodeId, ROOT, Timestamp, Tree};
use crate::units::Stamp;

/// The name of an inode's file in `data/`.
pub(super) fn data_name(ino: NodeId) -> String {
    format!("{ino:x}")
}

/// The rows of one file.
struct FileRows {
    rows: Arc<Rows>,
    ino: NodeId,
}

impl FileRows {
    fn inode(&self) -> Result<Option<Inode>> {
        self.rows.meta.view()?.inode(self.ino)
    }
}

impl MapStore for FileRows {
    fn load(&self) -> Result<Option<SavedMap>> {
        let view = self.rows.meta.view()?;
        let Some(row) = view.inode(self.ino)? else { return Ok(None) };
        let extents = view.map(self.ino)?;
        Ok(Some(SavedMap { size: row.size, lower_end: row.lower_end, extents }))
    }

    fn save(&self, change: &MapChange) -> Result<()> {
        let _turn = self.rows.changes.lock();
        // Nothing of it is wanted any more where there is no row.
        let Some(mut row) = self.inode()? else { return Ok(()) };
        row.size = change.size;
        row.lower_end = change.lower_end;
        if let Some(mtime) = change.mtime {
            row.mtime = mtime;
            row.ctime = row.ctime.max(crate::clock::wall());
        }
        let mut batch = vec![Change::Inode(self.ino, Box::new(row))];
        batch.extend(change.remove.iter().map(|first| Change::NoMap(self.ino, *first)));
        batch.extend(change.put.iter().map(|run| Change::Map(self.ino, *run)));
        self.rows.meta.apply(&batch)
    }

    fn times(&self) -> Result<(Timestamp, Timestamp)> {
        let row = self.inode()?;
        Ok(row.map_or_else(Default::default, |row| (row.mtime, row.ctime)))
    }
}

impl OverlayTree {
    /// The device of a file that is in use.
    pub(super) fn live(&self, ino: NodeId) -> Option<Arc<OverlayDevice>> {
        self.files.lock().get(&ino)?.upgrade()
    }

    /// The one device of a file.
    pub(super) fn device(&self, node: &Node) -> Result<Arc<OverlayDevice>> {
        if let Some(device) = self.live(node.ino) {
            return Ok(device);
        }
        let lower = match node.lowers.first() {
            Some(&(layer, id)) => Some(self.layers.host(layer)?.open(id, false)?.device),
            None => None,
        };
        let rows = FileRows { rows: self.rows.clone(), ino: node.ino };
        let data = Arc::new(self.data_file(node.ino));
        let device = OverlayDevice::new(lower, data, Box::new(rows), self.block_bytes)?;
        let device = Arc::new(device);
        let mut files = self.files.lock();
        if let Some(known) = files.get(&node.ino).and_then(|known| known.upgrade()) {
            return Ok(known);
        }
        if files.len() >= 64 && files.len().is_power_of_two() {
            files.retain(|_, device| device.strong_count() > 0);
        }
        files.insert(node.ino, Arc::downgrade(&device));
        Ok(device)
    }

    /// Gives the lower's file of this number at a path its row; false if there is none.
    fn copy_up_at(&self, path: &Path, ino: NodeId) -> Result<bool> {
        let mut held = Vec::new();
        for name in path {
            let dir = held.last().map_or(ROOT, |node: &Arc<Node>| node.ino);
            let node = self.enter(&self.view()?, &*self.node(dir)?, name)?;
            match node {
                Some(node) => held.push(node),
                None => break,
            }
        }
        let found = held.len() == path.iter().count() && held.last().is_some_and(|n| n.ino == ino);
        let copied = match held.last() {
            Some(node) if found => self.copy_up(node),
            _ => Ok(()),
        };
        held.iter().for_each(|node| self.drop_counts(node.ino, 1));
        copied.map(|()| found)
    }

    fn data_file(&self, ino: NodeId) -> FileDevice {
        let (data, name): (Arc<OwnedFd>, _) = (self.data.clone(), data_name(ino));
        let opener = move |flags: OFlags| {
            let flags = flags | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat(&*data, &name, flags, Mode::RUSR | Mode::WUSR)
        };
        FileDevice::new(Box::new(opener), self.direct_io)
    }
}

impl Resolver for OverlayTree {
    fn find(&self, record: &DeviceIdentity) -> Result<Option<Located>> {
        if record.filesystem != self.uuid {
            return Ok(None);
        }
        let path = PathBuf::from(std::ffi::OsString::from_vec(record.path.clone()));
        let mut view = self.view()?;
        if view.inode(record.inode)?.is_none() {
            // A lower's file may lose its row to a power cut, and its data not.
            if !self.copy_up_at(&path, record.inode)? {
                return Ok(None);
            }
            view = self.view()?;
        }
        let Some(row) = view.inode(record.inode)? else { return Ok(None) };
        let found = self.found(&view, record.inode)?;
        if found.kind != crate::sys::flags::S_IFREG {
            return Err(Error::new(Kind::Corrupt, "find", path.display().to_string()));
        }
        // Counted for good: a file that is dirty when the mount begins.
        let (node, surplus) = self.table.enter(found, ROOT, path.as_os_str());
        self.layers.forget(&surplus);
        let device = self.device(&node)?;
        // Nobody else changes an upper: what its rows say cannot be news.
        let stamp = Stamp {
            size: device.size()?,
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
        };
        let identity = identity(node.ino);
        Ok(Some(Located { identity, path, stamp, nlink: row.nlink, device }))
    }
}
