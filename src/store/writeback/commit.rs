//! The commit thread: bounds what a power cut takes from those who never sync, keeps the heartbeat
//! and prepares the journal's file.
//!
//! The heartbeat is a Checkpoint record with the time of day, durable at least every second while
//! any device is dirty (J12): recovery tells a file that was changed after the daemon died by a
//! ctime that no heartbeat can explain. Home writes stop while it is late.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::Writeback;
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, Entry, Purpose, Zeroed};
use crate::store::checkpoint::Checkpoint;
use crate::units::DeviceId;

/// Between heartbeats while something is dirty.
const BEAT_MS: u64 = 400;

/// The shortest and the longest sleep.
const SHORT: Duration = Duration::from_millis(5);
const LONG: Duration = Duration::from_millis(100);

impl Writeback {
    /// The thread's life.
    pub(super) fn commit(&self) {
        let mut written = false;
        let mut pending_since = None;
        while !self.stopping.load(SeqCst) {
            let delay = Duration::from_millis(self.tunables.journal_delay_ms());
            std::thread::sleep(delay.clamp(SHORT, LONG));
            if self.journal.failure().is_some() {
                continue;
            }
            let now = clock::now_ms();
            if self.journal.appended_seq() <= self.journal.durable_seq() {
                pending_since = None;
            } else if now.saturating_sub(*pending_since.get_or_insert(now)) as u128
                >= delay.saturating_sub(LONG).as_millis()
            {
                // A failure is the journal's for good, and told wherever it matters.
                let _ = self.journal.settle();
                pending_since = None;
            }
            if !self.listed().is_empty() {
                self.beat(now);
            } else if !written {
                written = !matches!(self.journal.zero_one(), Ok(Zeroed::One | Zeroed::Busy));
            }
        }
    }

    /// Tests: a heartbeat now.
    #[cfg(test)]
    pub(in crate::store) fn beat_by_hand(&self) {
        self.heartbeat_ms.store(0, SeqCst);
        self.beat(clock::now_ms());
    }

    /// Makes a heartbeat if the last one is old enough.
    fn beat(&self, now: u64) {
        let last = self.heartbeat_ms.load(SeqCst);
        if last > 0 && now.saturating_sub(last) < BEAT_MS {
            return;
        }
        let now = now.max(1);
        match self.append_checkpoint(&Checkpoint::heartbeat(clock::wall())) {
            // The time from before: what was durable then is what counts.
            Ok(true) => {
                self.heartbeat_ms.store(now, SeqCst);
                self.ring();
            }
            // No room for it, so no home write either: but the tail moves without.
            Ok(false) => self.heartbeat_ms.store(now, SeqCst),
            Err(error) => log::error!("journal: no heartbeat: {error}"),
        }
    }

    /// Appends a note of ours and makes it durable; false if there is no room.
    pub(in crate::store) fn append_checkpoint(&self, checkpoint: &Checkpoint) -> Result<bool> {
        let bytes = checkpoint.encode();
        let change = Change::Checkpoint(&bytes);
        let room = self.journal.try_reserve(Purpose::Internal, self.journal.charge(&[change]));
        let Some(mut room) = room else { return Ok(false) };
        let (device, mtime) = (DeviceId(0), clock::wall());
        let entry = Entry { device, offset: 0, change, size_after: 0, mtime };
        let appended = self.journal.append(&mut room, &[entry])?;
        self.journal.settle_to(appended.seq)?;
        Ok(true)
    }
}
