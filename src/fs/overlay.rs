//! What an overlay mount can do beside being a filesystem: tell what it changed, and drop it.

use std::ffi::OsStr;

use super::Fs;
use crate::error::{Error, Kind, Result};
use crate::tree::overlay::diff::Difference;
use crate::tree::overlay::revert::Reverted;
use crate::tree::{NodeId, OverlayTree};

/// What the kernel remembers of the mount. Called with no lock held, and never by a thread that
/// answers requests: the kernel may wait for those.
pub trait KernelCache: Send + Sync {
    /// Attributes and pages of an inode are others now.
    fn changed(&self, node: NodeId);
    /// A name stands for something else now.
    fn renamed(&self, parent: NodeId, name: &OsStr);
}

impl Fs {
    /// Who tells the kernel. Once, before the first request.
    pub fn set_kernel_cache(&self, kernel: Box<dyn KernelCache>) {
        // A second one would be of the same mount.
        let _ = self.kernel.set(kernel);
    }

    fn upper(&self) -> Result<&OverlayTree> {
        let none = || Error::new(Kind::NotSupported, "overlay", "no upper: mount with --upper");
        self.tree.overlay().ok_or_else(none)
    }

    /// What differs from the lowers, by path, after everything dirty has gone to the upper.
    pub fn diff(&self) -> Result<Vec<Difference>> {
        let upper = self.upper()?;
        self.flush_to_upper()?;
        upper.diff()
    }

    /// Everything is as in the lowers again. Busy: a file is open, and not `force`.
    pub fn revert(&self, force: bool) -> Result<()> {
        let upper = self.upper()?;
        if let Some(path) = self.handles.any_file().map(|node| self.tree.path(node))
            && !force
        {
            return Err(Error::new(Kind::Busy, "revert", path.display().to_string()));
        }
        self.flush_to_upper()?;
        let Reverted { inodes, names } = upper.revert()?;
        for (ino, identity) in &inodes {
            match self.store.live(identity) {
                Some(device) => device.reverted(),
                None => self.store.forget(identity),
            }
            if let Some(kernel) = self.kernel.get() {
                kernel.changed(*ino);
            }
        }
        if let Some(kernel) = self.kernel.get() {
            names.iter().for_each(|(parent, name)| kernel.renamed(*parent, name));
        }
        Ok(())
    }

    fn flush_to_upper(&self) -> Result<()> {
        if self.store.has_journal() {
            self.flush(None, &mut |_| true)?;
        }
        Ok(())
    }
}
