//! Reading an overlay directory: the lowers' names without those that rows speak of, then the rows.
//!
//! A stream shows the names of its opening, or of its last rewind; a position is a count of
//! entries.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::meta::NameRow;
use super::node::Node;
use super::view::View;
use super::{OverlayTree, S_IFDIR};
use crate::error::Result;
use crate::sys::flags::S_IFMT;
use crate::tree::{DirEntry, DirStream, NodeId};

/// An open directory.
pub(super) struct OverlayDir {
    entries: Vec<DirEntry>,
    at: usize,
}

impl OverlayDir {
    pub(super) fn new(names: Vec<DirEntry>, ino: NodeId, parent: NodeId) -> OverlayDir {
        let dot = |name: &str, ino| DirEntry { name: name.into(), ino, kind: S_IFDIR, cookie: 0 };
        let mut entries = vec![dot(".", ino), dot("..", parent)];
        entries.extend(names);
        for (at, entry) in entries.iter_mut().enumerate() {
            entry.cookie = at as u64 + 1;
        }
        OverlayDir { entries, at: 0 }
    }
}

impl DirStream for OverlayDir {
    fn peek(&mut self, cookie: u64) -> Result<Option<&DirEntry>> {
        self.at = usize::try_from(cookie).unwrap_or(usize::MAX);
        Ok(self.entries.get(self.at))
    }

    fn advance(&mut self) {
        self.at = self.at.saturating_add(1);
    }
}

impl OverlayTree {
    /// The names of a directory, without the dots.
    pub(super) fn names_of(&self, view: &View, dir: &Node) -> Result<Vec<DirEntry>> {
        let rows = view.names(dir.ino)?;
        let spoken = |name: &[u8]| rows.binary_search_by(|(row, _)| row.as_slice().cmp(name));
        let mut names = self.layers.names(&dir.lowers)?;
        if !rows.is_empty() {
            names.retain(|entry| spoken(entry.name.as_bytes()).is_err());
        }
        for (name, row) in &rows {
            let NameRow::Inode(ino) = *row else { continue };
            let kind = match self.table.get(ino) {
                Some(node) => node.kind,
                None => view.inode(ino)?.map_or(0, |inode| inode.mode & S_IFMT),
            };
            let name = OsString::from_vec(name.clone());
            names.push(DirEntry { name, ino, kind, cookie: 0 });
        }
        Ok(names)
    }

    /// The links of a directory that has no row: 2 + subdirectories.
    pub(super) fn links_of(&self, view: &View, dir: &Node) -> Result<u32> {
        if let [lower] = dir.lowers.as_slice()
            && view.names(dir.ino)?.is_empty()
        {
            return Ok(self.layers.attr(*lower)?.nlink);
        }
        let mut links = 2;
        for entry in self.names_of(view, dir)? {
            links += u32::from(entry.kind == S_IFDIR);
        }
        Ok(links)
    }
}
