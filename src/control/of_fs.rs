//! A mounted `Fs` as the control socket sees it.

use std::path::Path;

use super::Mounted;
use super::proto::{Name, PathChange};
use crate::config::{CacheMode, Tunables};
use crate::error::Result;
use crate::fs::Fs;
use crate::stats::{BlockInfo, FlushProgress, Snapshot};
use crate::tree::overlay::diff::Difference;

impl Mounted for Fs {
    fn snapshot(&self, unit: Option<u32>) -> Snapshot {
        self.store().snapshot(unit)
    }

    fn resolve(&self, below: &Path) -> Result<Option<u32>> {
        self.unit_of(below)
    }

    fn blocks(&self, unit: Option<u32>) -> Vec<BlockInfo> {
        self.store().blocks(unit)
    }

    fn tunables(&self) -> &Tunables {
        self.store().tunables()
    }

    fn set_cache_mode(&self, mode: CacheMode) {
        self.store().set_cache_mode(mode);
    }

    fn start_trace(&self, file: &Path) -> Result<()> {
        self.store().start_trace(file)
    }

    fn stop_trace(&self) {
        self.store().stop_trace();
    }

    fn open_files(&self) -> usize {
        self.store().open_count()
    }

    fn flush(
        &self,
        below: Option<&Path>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        Fs::flush(self, below, tell)
    }

    fn leave_rest(&self, leave: bool) {
        Fs::leave_rest(self, leave);
    }

    fn diff(&self) -> Result<Vec<PathChange>> {
        Ok(Fs::diff(self)?.into_iter().map(PathChange::from).collect())
    }

    fn revert(&self, force: bool) -> Result<()> {
        Fs::revert(self, force)
    }
}

impl From<Difference> for PathChange {
    fn from(found: Difference) -> PathChange {
        PathChange {
            change: found.kind.letter().to_string(),
            path: Name::from(found.path.as_path()),
            from: found.from.as_deref().map(Name::from),
            directory: found.is_dir,
            bytes: found.bytes,
            extents: found.extents,
        }
    }
}
