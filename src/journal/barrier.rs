//! Barriers: group commit. A barrier covers the sequence read before it starts.
//!
//! States: idle -> one leader syncs -> idle (durable moved on) or failed, for good. Those who come
//! while a leader syncs wait; whom its sync did not cover lead or wait for the next one. Lock:
//! `state`, never held across the sync. Invariants: durable moves on only after a successful sync
//! that started after the records were written; a failed sync, or a panic in it, latches the
//! journal and every waiter gets EIO (J11): never retried as if nothing had happened.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use parking_lot::{Condvar, Mutex};

use super::Journal;
use crate::error::{Error, Kind, Result};

#[derive(Debug, Default)]
struct State {
    leading: bool,
}

/// The barrier's state: idle or led by one. Lock: `state`, a leaf, not held across the sync.
/// Invariant: `durable` never runs ahead of a successful sync.
#[derive(Debug)]
pub(super) struct Group {
    state: Mutex<State>,
    ended: Condvar,
    durable: AtomicU64,
    /// Syncs, and calls that had to wait or lead: what `stat` shows.
    syncs: AtomicU64,
    calls: AtomicU64,
}

impl Group {
    pub(super) fn new(durable: u64) -> Group {
        Group {
            state: Mutex::default(),
            ended: Condvar::new(),
            durable: AtomicU64::new(durable),
            syncs: AtomicU64::new(0),
            calls: AtomicU64::new(0),
        }
    }

    pub(super) fn durable_seq(&self) -> u64 {
        self.durable.load(SeqCst)
    }
}

/// The leader's duty: whatever happens, others go on.
struct Leader<'a> {
    journal: &'a Journal,
    /// Set after a successful sync.
    covered: Option<u64>,
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let group = &self.journal.group;
        match self.covered {
            Some(seq) => {
                group.durable.fetch_max(seq, SeqCst);
            }
            // An error has left its own reason already.
            None => self.journal.fail("a barrier was interrupted"),
        }
        group.state.lock().leading = false;
        group.ended.notify_all();
    }
}

impl Journal {
    /// Makes everything appended so far durable. EIO once a sync failed.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_to(self.appended_seq())
    }

    /// Makes everything up to a sequence durable: no I/O if it is.
    pub fn barrier_to(&self, seq: u64) -> Result<()> {
        if self.durable_seq() >= seq {
            return Ok(());
        }
        self.group.calls.fetch_add(1, SeqCst);
        self.settle_to(seq)
    }

    /// The same for our own purposes: it does not count as one that waited.
    pub fn settle(&self) -> Result<()> {
        self.settle_to(self.appended_seq())
    }

    /// The same up to a sequence.
    pub fn settle_to(&self, seq: u64) -> Result<()> {
        let group = &self.group;
        loop {
            let mut state = group.state.lock();
            if self.durable_seq() >= seq {
                return Ok(());
            }
            self.health.check()?;
            if seq > self.appended_seq() {
                return Err(Error::new(Kind::Invalid, "journal barrier", "ahead of the log"));
            }
            if state.leading {
                group.ended.wait(&mut state);
                continue;
            }
            state.leading = true;
            drop(state);
            self.lead()?;
        }
    }

    /// One sync, as leader: two syncs at once would share an error, and one would not see it.
    pub(super) fn sync(&self) -> Result<()> {
        let mut state = self.group.state.lock();
        while state.leading {
            self.group.ended.wait(&mut state);
        }
        self.health.check()?;
        state.leading = true;
        drop(state);
        self.lead()
    }

    fn lead(&self) -> Result<()> {
        let mut leader = Leader { journal: self, covered: None };
        // Read before the sync: these records are in the page cache. A journal is one device, so
        // one sync takes every segment written since the last one.
        let covered = self.appended_seq();
        self.group.syncs.fetch_add(1, SeqCst);
        if let Err(error) = self.device.sync(true) {
            // EIO to every waiter, whatever the device said: it is the same failure to all (J11).
            self.fail(&format!("barrier: {error}"));
            return self.health.check();
        }
        leader.covered = Some(covered);
        Ok(())
    }

    /// Syncs made, and barriers asked for that were not already covered.
    pub fn barrier_counts(&self) -> (u64, u64) {
        (self.group.syncs.load(SeqCst), self.group.calls.load(SeqCst))
    }
}
