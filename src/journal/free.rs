//! Freeing the tail: barrier (so that every superseding record is durable), no pins, the caller
//! says its devices are synced (J4 is the store's), superblock with the new tail written and
//! synced, only then the slot may be reused.
//!
//! States: idle -> one caller frees -> idle. `freeing` is a flag, not a lock: the others are told
//! to come back, nobody waits. Locks: `log` and `superblock`, each for a moment, none across I/O.
//! Invariant: only the tail is freed; a slot is reused only after a durable superblock says so.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::format::COMPAT_WRITTEN;
use super::{Journal, write_superblock};
use crate::error::Result;

/// The oldest segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Its first sequence.
    pub first_seq: u64,
    /// Its last sequence: everything up to here must be clean before it is freed.
    pub last_seq: u64,
    /// It still takes records; freeing it closes it.
    pub is_head: bool,
}

/// What became of a try to free the tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// The segment's slot is free.
    Yes,
    /// The tail does not end at that sequence (any more): look again.
    Moved,
    /// Somebody reads it.
    Pinned,
    /// Somebody else is freeing, or the head is promised to writers: later.
    Busy,
}

struct Flag<'a>(&'a AtomicBool);

impl Drop for Flag<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

impl Journal {
    /// The oldest segment that has records.
    pub fn tail(&self) -> Option<Tail> {
        let log = self.log.lock();
        let is_head = log.ring.tail_is_head();
        log.ring.tail().map(|segment| Tail {
            first_seq: segment.first_seq,
            last_seq: segment.last_seq,
            is_head,
        })
    }

    /// Frees the tail segment that ends with `last_seq`. The caller promises that no record up to
    /// there is live: superseded by newer records, or home and synced (J4).
    pub fn free_tail(&self, last_seq: u64) -> Result<Freed> {
        self.health.check()?;
        if self.freeing.swap(true, SeqCst) {
            return Ok(Freed::Busy);
        }
        let _flag = Flag(&self.freeing);
        let (slot, all_written) = {
            let mut log = self.log.lock();
            let Some(tail) = log.ring.tail().filter(|tail| tail.last_seq == last_seq) else {
                return Ok(Freed::Moved);
            };
            let slot = tail.slot;
            if self.pins.is_pinned(slot) {
                return Ok(Freed::Pinned);
            }
            // Room promised in the head's rest must be there in other segments.
            if log.ring.tail_is_head() && !self.space.shrink(log.ring.available_if_sealed()) {
                return Ok(Freed::Busy);
            }
            if log.ring.tail_is_head() {
                log.ring.seal();
            }
            (slot, log.ring.all_written())
        };
        if !self.mutants.skip_free_barrier {
            self.settle()?;
        }
        if self.pins.is_pinned(slot) {
            return Ok(Freed::Pinned);
        }
        self.move_tail(slot, last_seq, all_written)?;
        let mut log = self.log.lock();
        log.ring.free_tail();
        self.space.set_available(log.ring.available());
        Ok(Freed::Yes)
    }

    fn move_tail(&self, slot: u32, last_seq: u64, all_written: bool) -> Result<()> {
        let mut superblock = *self.superblock.lock();
        superblock.serial += 1;
        superblock.compat |= if all_written { COMPAT_WRITTEN } else { 0 };
        superblock.tail_seq = last_seq + 1;
        superblock.tail_slot = self.geometry.next(slot);
        superblock.durable_seq = self.durable_seq();
        if let Err(error) = write_superblock(&*self.device, &superblock) {
            self.fail(&format!("superblock: {error}"));
            return Err(error);
        }
        if !self.mutants.skip_superblock_sync {
            self.sync()?;
        }
        *self.superblock.lock() = superblock;
        Ok(())
    }
}
