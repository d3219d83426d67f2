//! The block map in memory: what every block is now, and what of that is not saved.
//!
//! Invariants: `lower_end <= size`. No row is `Zero` where nothing lies below `lower_end`. The
//! saved map and `runs` differ at most in the rows that begin at a block of `touched`: so a save
//! costs what changed. A block of `freed` is not `Upper`.

use std::collections::BTreeSet;

use super::runs::{Run, Runs};
use super::{BlockState, MapChange, MapExtent, SavedMap};
use crate::units::Timestamp;

/// The map of one file; see `OverlayDevice` for its lock.
pub(super) struct Map {
    pub(super) runs: Runs,
    pub(super) size: u64,
    pub(super) lower_end: u64,
    pub(super) block: u64,
    /// First blocks of rows that are not as they were saved.
    touched: BTreeSet<u64>,
    /// Size or `lower_end` are not as they were saved.
    resized: bool,
    pub(super) mtime: Option<Timestamp>,
    /// Blocks of the data file written since its last sync began.
    written: Runs,
    /// Blocks that are `Upper` no more: holes as soon as the map that says so is saved.
    freed: Runs,
    /// The data file may have more than zeros behind the size, in the block that the size is in.
    pub(super) tail_unknown: bool,
    /// How often all was given back to the lower.
    pub(super) reverts: u64,
}

/// What one save is about.
pub(super) struct Batch {
    pub(super) change: MapChange,
    pub(super) written: Runs,
    pub(super) freed: Runs,
    resized: bool,
}

impl Batch {
    /// Whether there is anything to save.
    pub(super) fn changes(&self) -> bool {
        let change = &self.change;
        let rows = !change.put.is_empty() || !change.remove.is_empty();
        rows || self.resized || change.mtime.is_some()
    }
}

impl Map {
    /// The map as it was saved; None if no such map can be.
    pub(super) fn load(saved: &SavedMap, block: u64) -> Option<Map> {
        let mut runs = Runs::default();
        let last = i64::MAX as u64 / block + 1;
        for row in &saved.extents {
            let end = row.first.checked_add(row.blocks).filter(|end| *end <= last)?;
            let run = Run { first: row.first, end, state: row.state };
            runs.push(run).then_some(())?;
        }
        let fits = saved.lower_end <= saved.size && saved.size <= i64::MAX as u64;
        let mut map = Map {
            runs,
            size: saved.size,
            lower_end: saved.lower_end,
            block,
            touched: BTreeSet::new(),
            resized: false,
            mtime: None,
            written: Runs::default(),
            freed: Runs::default(),
            tail_unknown: false,
            reverts: 0,
        };
        // A write that grew the file in its last block may have been there before the crash.
        map.tail_unknown = map.cuts_upper();
        fits.then_some(map)
    }

    pub(super) fn saved_form(&self) -> SavedMap {
        let extents = self.runs.iter().map(extent_of).collect();
        SavedMap { size: self.size, lower_end: self.lower_end, extents }
    }

    /// Whether the size lies within an `Upper` block.
    fn cuts_upper(&self) -> bool {
        !self.size.is_multiple_of(self.block)
            && self.runs.at(self.size / self.block).state == BlockState::Upper
    }

    fn set(&mut self, first: u64, end: u64, state: BlockState) {
        let (touched, freed) = (&mut self.touched, &mut self.freed);
        let replaced = |old: Run| {
            if old.state == BlockState::Upper {
                freed.add(old.first, old.end);
            }
        };
        let touch = |row| {
            touched.insert(row);
        };
        self.runs.set(first, end, state, touch, replaced);
        if state == BlockState::Upper {
            self.freed.subtract(first, end);
        }
    }

    /// The data file was written here, wholly or in part.
    pub(super) fn note_written(&mut self, first: u64, end: u64) {
        self.written.add(first, end);
    }

    /// The data file has all of these blocks.
    pub(super) fn set_upper(&mut self, first: u64, end: u64) {
        self.set(first, end, BlockState::Upper);
    }

    /// The blocks read as zeros from now on.
    pub(super) fn set_zero(&mut self, first: u64, end: u64) {
        let lower = self.lower_end.div_ceil(self.block).clamp(first, end);
        self.set(first, lower, BlockState::Zero);
        self.set(lower, end, BlockState::Lower);
    }

    pub(super) fn grow(&mut self, size: u64) {
        if size > self.size {
            self.size = size;
            self.resized = true;
        }
    }

    /// Truncates: what lies behind reads as zeros if it ever comes back.
    pub(super) fn shrink(&mut self, size: u64) {
        if size >= self.size {
            return;
        }
        self.size = size;
        self.lower_end = self.lower_end.min(size);
        self.resized = true;
        self.set(size.div_ceil(self.block), u64::MAX, BlockState::Lower);
        self.tail_unknown = self.cuts_upper();
    }

    /// Whether a larger size would show bytes of the data file that are not the file's.
    pub(super) fn must_clean_tail(&mut self) -> bool {
        self.tail_unknown = self.tail_unknown && self.cuts_upper();
        self.tail_unknown
    }

    /// Whether rows or sizes are not saved.
    pub(super) fn is_pending(&self) -> bool {
        !self.touched.is_empty() || self.resized
    }

    pub(super) fn has_written(&self) -> bool {
        !self.written.is_empty()
    }

    /// Takes what is not saved, as it is at this moment.
    pub(super) fn take_batch(&mut self) -> Batch {
        let (mut put, mut remove) = (Vec::new(), Vec::new());
        for first in std::mem::take(&mut self.touched) {
            match self.runs.starting_at(first) {
                Some(run) => put.push(extent_of(run)),
                None => remove.push(first),
            }
        }
        let mtime = self.mtime.take();
        Batch {
            change: MapChange { size: self.size, lower_end: self.lower_end, put, remove, mtime },
            written: std::mem::take(&mut self.written),
            freed: std::mem::take(&mut self.freed),
            resized: std::mem::take(&mut self.resized),
        }
    }

    /// The save failed: all of it is to be saved again, as it is by then.
    pub(super) fn put_back(&mut self, batch: Batch) {
        self.touched.extend(batch.change.put.iter().map(|row| row.first));
        self.touched.extend(batch.change.remove);
        self.resized |= batch.resized;
        self.mtime = self.mtime.or(batch.change.mtime);
        for run in batch.freed.iter() {
            self.free_again(run.first, run.end);
        }
    }

    /// What could not be punched is punched later, unless it is in use again.
    pub(super) fn free_again(&mut self, first: u64, end: u64) {
        for run in self.not_upper(first, end) {
            self.freed.add(run.first, run.end);
        }
    }

    /// The parts of `first..end` that are not `Upper`.
    pub(super) fn not_upper(&self, first: u64, end: u64) -> Vec<Run> {
        let parts = self.runs.within(first, end);
        parts.filter(|run| run.state != BlockState::Upper).collect()
    }

    /// Nobody knows what is saved: all rows are, next time.
    pub(super) fn touch_all(&mut self) {
        self.touched.extend(self.runs.iter().map(|run| run.first));
        self.resized = true;
    }

    /// What makes the saved map that of an untouched lower.
    pub(super) fn change_to_revert(&self, lower_end: u64) -> MapChange {
        let mut remove = self.touched.clone();
        remove.extend(self.runs.iter().map(|run| run.first));
        let remove = remove.into_iter().collect();
        MapChange { size: lower_end, lower_end, put: Vec::new(), remove, mtime: None }
    }

    /// The saved map is that of an untouched lower: so is this one.
    pub(super) fn reverted(&mut self, lower_end: u64) {
        let saved = SavedMap { size: lower_end, lower_end, extents: Vec::new() };
        let reverts = self.reverts + 1;
        if let Some(map) = Map::load(&saved, self.block) {
            *self = Map { reverts, ..map };
        }
    }
}

fn extent_of(run: Run) -> MapExtent {
    MapExtent { first: run.first, blocks: run.end - run.first, state: run.state }
}
