//! What the last commit left of `meta.redb`, to be read.

use redb::{ReadOnlyTable, ReadableTable};

use super::meta::{INODES, Inode, MAPS, Meta, NAMES, NameRow, WHITEOUT, XATTRS};
use super::meta::{decode, failed, key, state_of};
use crate::device::overlay::MapExtent;
use crate::error::Result;
use crate::tree::NodeId;

/// See the module.
pub struct View {
    inodes: ReadOnlyTable<u64, &'static [u8]>,
    names: ReadOnlyTable<(u64, &'static [u8]), u64>,
    xattrs: ReadOnlyTable<(u64, &'static [u8]), &'static [u8]>,
    maps: ReadOnlyTable<(u64, u64), (u64, u8)>,
}

impl Meta {
    /// What the last commit left.
    pub fn view(&self) -> Result<View> {
        let txn = self.with(|db| db.begin_read().map_err(failed))?;
        Ok(View {
            inodes: txn.open_table(INODES).map_err(failed)?,
            names: txn.open_table(NAMES).map_err(failed)?,
            xattrs: txn.open_table(XATTRS).map_err(failed)?,
            maps: txn.open_table(MAPS).map_err(failed)?,
        })
    }
}

impl View {
    /// An inode's row.
    pub fn inode(&self, ino: NodeId) -> Result<Option<Inode>> {
        let row = self.inodes.get(ino).map_err(failed)?;
        row.map(|row| decode(row.value())).transpose()
    }

    /// Every inode that has a row.
    pub fn inodes(&self) -> Result<Vec<(NodeId, Inode)>> {
        let rows = self.inodes.iter().map_err(failed)?;
        rows.map(|row| {
            let (ino, inode) = row.map_err(failed)?;
            Ok((ino.value(), decode(inode.value())?))
        })
        .collect()
    }

    /// What is said of a name.
    pub fn name(&self, dir: NodeId, name: &[u8]) -> Result<Option<NameRow>> {
        let row = self.names.get((dir, name)).map_err(failed)?;
        Ok(row.map(|row| name_row(row.value())))
    }

    /// Every name that has a row: its directory, the name, what it stands for.
    pub fn all_names(&self) -> Result<Vec<(NodeId, Vec<u8>, NameRow)>> {
        let rows = self.names.iter().map_err(failed)?;
        rows.map(|row| {
            let (key, ino) = row.map_err(failed)?;
            let (dir, name) = key.value();
            Ok((dir, name.to_vec(), name_row(ino.value())))
        })
        .collect()
    }

    /// What is said of the names of a directory, in the order of their bytes.
    pub fn names(&self, dir: NodeId) -> Result<Vec<(Vec<u8>, NameRow)>> {
        let (first, end) = (key(dir), key(dir + 1));
        let rows = self.names.range(first..end).map_err(failed)?;
        rows.map(|row| {
            let (key, ino) = row.map_err(failed)?;
            Ok((key.value().1.to_vec(), name_row(ino.value())))
        })
        .collect()
    }

    /// An extended attribute of its own.
    pub fn xattr(&self, ino: NodeId, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let row = self.xattrs.get((ino, name)).map_err(failed)?;
        Ok(row.map(|row| row.value().to_vec()))
    }

    /// All of them.
    pub fn xattrs(&self, ino: NodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let (first, end) = (key(ino), key(ino + 1));
        let rows = self.xattrs.range(first..end).map_err(failed)?;
        rows.map(|row| {
            let (key, value) = row.map_err(failed)?;
            Ok((key.value().1.to_vec(), value.value().to_vec()))
        })
        .collect()
    }

    /// The block map of a file.
    pub fn map(&self, ino: NodeId) -> Result<Vec<MapExtent>> {
        let rows = self.maps.range((ino, 0)..(ino + 1, 0)).map_err(failed)?;
        rows.map(|row| {
            let (key, run) = row.map_err(failed)?;
            let (blocks, code) = run.value();
            Ok(MapExtent { first: key.value().1, blocks, state: state_of(code)? })
        })
        .collect()
    }
}

fn name_row(ino: u64) -> NameRow {
    if ino == WHITEOUT { NameRow::Whiteout } else { NameRow::Inode(ino) }
}
