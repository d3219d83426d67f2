//! Dropping an upper's changes: the rows go in one commit, then the blocks.
//!
//! No state. A file that is in use goes on: a lower's is its lower's again, one that was born here
//! has no name any more.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::meta::Change;
use super::{OverlayTree, identity};
use crate::error::Result;
use crate::tree::NodeId;
use crate::units::Identity;

/// What a revert touched, for whoever remembers it.
#[derive(Debug, Default)]
pub struct Reverted {
    /// Inodes that differed.
    pub inodes: Vec<(NodeId, Identity)>,
    /// Names that did.
    pub names: Vec<(NodeId, OsString)>,
}

impl OverlayTree {
    /// Everything is as in the lowers again.
    pub fn revert(&self) -> Result<Reverted> {
        self.writable("revert")?;
        let turn = self.rows.changes.lock();
        let view = self.rows.meta.view()?;
        let names = view.all_names()?;
        let (mut batch, mut inodes, mut born) = (Vec::new(), Vec::new(), Vec::new());
        for (ino, mut row) in view.inodes()? {
            inodes.push((ino, identity(ino)));
            let used = self.table.get(ino);
            match used.filter(|_| ino != super::ROOT) {
                Some(node) if node.lowers.is_empty() => {
                    // Kept until nobody uses it.
                    if row.nlink > 0 {
                        row.nlink = 0;
                        batch.push(Change::Inode(ino, Box::new(row)));
                        batch.push(Change::Orphan(ino));
                    }
                    born.push(node);
                }
                Some(node) => {
                    batch.push(Change::Purge(ino));
                    if self.live(ino).is_some() {
                        // Its device writes on into this row.
                        let row = self.row_from_lower(&view, &node)?;
                        batch.push(Change::Inode(ino, Box::new(row)));
                    }
                }
                None => batch.push(Change::Purge(ino)),
            }
        }
        for (dir, name, _) in &names {
            batch.push(Change::NoName(*dir, name.clone()));
        }
        self.rows.meta.apply(&batch)?;
        drop(turn);
        born.iter().for_each(|node| node.set_orphan());
        self.drop_blocks(&inodes)?;
        let names = names.into_iter().map(|(dir, name, _)| (dir, OsString::from_vec(name)));
        Ok(Reverted { inodes, names: names.collect() })
    }

    fn drop_blocks(&self, inodes: &[(NodeId, Identity)]) -> Result<()> {
        for (ino, _) in inodes {
            let used = self.table.get(*ino);
            match self.live(*ino) {
                Some(device) if used.is_some_and(|node| !node.lowers.is_empty()) => {
                    device.revert()?;
                }
                Some(_) => {}
                None => self.remove_data(*ino),
            }
        }
        Ok(())
    }
}
