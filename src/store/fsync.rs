//! A device's fsync (STORE 1): a barrier of the journal, and a sync of the file where something of
//! it changed outside. And what the file is told of being dirty.
//!
//! States of the file's sync: none -> one caller's turn -> none; others wait, then look again. No
//! lock is held while it runs. Invariant (J11): no success for changes of which a sync failed, to
//! whomever the kernel told it.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::device::Device;
use crate::error::{Error, Kind, Result};

/// Whether the writes of a device are each followed by an fsync: then a write starts the journal's
/// write-out itself, so that the fsync finds it under way (STORE 1).
#[derive(Default)]
pub(super) struct Habit {
    /// Changes since the last fsync.
    changes: u32,
    /// Times in a row that an fsync followed one change.
    pairs: u32,
}

/// So many pairs of a write and an fsync make a habit.
const HABIT: u32 = 2;

impl Habit {
    /// The device changed; true if an fsync is expected next.
    pub(super) fn wrote(&mut self) -> bool {
        self.changes = self.changes.saturating_add(1);
        if self.changes > 1 {
            self.pairs = 0;
        }
        self.pairs >= HABIT
    }

    pub(super) fn synced(&mut self) {
        if self.changes == 1 {
            self.pairs = self.pairs.saturating_add(1);
        }
        self.changes = 0;
    }
}

/// One caller's turn to sync the file.
struct SyncTurn<'a>(&'a Device);

impl Drop for SyncTurn<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.unsynced.store(true, SeqCst);
        }
        *self.0.file_sync.0.lock() = false;
        self.0.file_sync.1.notify_all();
    }
}

impl Device {
    /// Makes everything durable; free if nothing changed since the last time. With a journal this
    /// is its barrier, and a sync of the file only if something of it changed outside (STORE 1).
    pub fn sync(&self, data_only: bool) -> Result<()> {
        let Some(writeback) = self.shared.writeback() else { return self.sync_file(data_only) };
        if let Err(error) = self.sync_outside() {
            // The error may be of home writes, and the kernel tells it only once (J11).
            let mut dirty = self.dirty.lock();
            dirty.map.spoil();
            self.publish(writeback, &dirty);
            drop(dirty);
            writeback.ring();
            return Err(error);
        }
        self.note_named(writeback)?;
        self.barrier(writeback)
    }

    /// Syncs the file if anything of it changed outside the journal.
    fn sync_outside(&self) -> Result<()> {
        let _turn = self.sync_turn();
        if self.lost.swap(false, SeqCst) {
            return Err(Error::new(Kind::Io, "fsync", "an earlier sync of the file failed"));
        }
        if self.unsynced.load(SeqCst) { self.sync_now(false) } else { Ok(()) }
    }

    fn sync_file(&self, data_only: bool) -> Result<()> {
        let _turn = self.sync_turn();
        if data_only && !self.unsynced.load(SeqCst) {
            return Ok(());
        }
        self.sync_now(data_only)
    }

    /// Waits until nobody syncs the file: a sync that runs may fail, and its caller alone would
    /// hear of it while `unsynced` says that all is well.
    fn sync_turn(&self) -> SyncTurn<'_> {
        let (running, ended) = &self.file_sync;
        let mut running = running.lock();
        while *running {
            ended.wait(&mut running);
        }
        *running = true;
        SyncTurn(self)
    }

    fn sync_now(&self, data_only: bool) -> Result<()> {
        self.cached.stats.syncs.fetch_add(1, Relaxed);
        // Cleared first: a write that comes in meanwhile sets it again. A failure sets it back,
        // though the bytes may be lost: the caller is told, never a false success.
        self.unsynced.store(false, SeqCst);
        let result = self.file.sync(data_only);
        if result.is_err() {
            self.unsynced.store(true, SeqCst);
            self.cached.stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// Tells the file whether it is dirty, if that is news. Outside the dirty lock; whoever
    /// changed `is_dirty` calls this afterwards, so the last word is the right one.
    pub(super) fn tell_file(&self) {
        if self.told.load(SeqCst) == self.is_dirty.load(SeqCst) {
            return;
        }
        let _telling = self.telling.lock();
        loop {
            let is_dirty = self.is_dirty.load(SeqCst);
            if self.told.load(SeqCst) == is_dirty {
                return;
            }
            self.file.mark_dirty(is_dirty);
            self.told.store(is_dirty, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_fsync_is_expected_after_pairs_only() {
        let mut habit = Habit::default();
        for _ in 0..HABIT {
            assert!(!habit.wrote());
            habit.synced();
        }
        habit.synced();
        assert!(habit.wrote());
        assert!(!habit.wrote(), "two writes in a row end it");
        habit.synced();
        assert!(!habit.wrote());
    }
}
