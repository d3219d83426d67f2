//! What writeback tells about itself. No state of its own; it looks at one lock after the other.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{Executor, Writeback};
use crate::clock;
use crate::stats::{DeviceSnapshot, DeviceWriteback, WritebackStat};
use crate::units::DeviceId;

impl Writeback {
    /// What `stat` shows.
    pub(in crate::store) fn stat(&self) -> WritebackStat {
        let usage = self.journal.usage();
        let (barriers, barrier_waiters) = self.journal.barrier_counts();
        let now = clock::now_ms();
        let mut stat = WritebackStat {
            journal_bytes: usage.capacity_bytes,
            journal_used: usage.used_bytes,
            rate: self.control.lock().controller.rate(),
            in_flight: self.in_flight.load(Relaxed) as u64,
            absorbed_bytes: self.counts.absorbed.load(Relaxed),
            home_bytes: self.counts.home_bytes.load(Relaxed),
            home_writes: self.counts.home_writes.load(Relaxed),
            epochs: self.counts.epochs.load(Relaxed),
            barriers,
            barrier_waiters,
            waiting: self.waiting() as u64,
            waited: self.counts.waited.load(Relaxed),
            errors: self.counts.errors.load(Relaxed),
            copied_bytes: self.counts.copied.load(Relaxed),
            replayed: self.counts.replayed.load(Relaxed),
            uring: self.uses_uring(),
            failed: self.journal.failure(),
            ..WritebackStat::default()
        };
        for device in self.listed() {
            let load = device.dirty.lock().map.load();
            stat.dirty_devices += 1;
            stat.dirty_bytes += load.live_bytes;
            if load.waiting > 0 {
                stat.oldest_ms = stat.oldest_ms.max(now.saturating_sub(load.waiting_since_ms));
            }
        }
        stat
    }

    pub(super) fn waiting(&self) -> usize {
        self.journal.waiting() + self.index_waiters.load(Relaxed)
    }

    pub(super) fn uses_uring(&self) -> bool {
        match &self.executor {
            Executor::Threads(workers) => {
                workers.lock().as_ref().is_some_and(|workers| workers.uses_uring())
            }
            Executor::ByHand(_) => false,
        }
    }

    /// Recovery read so many records.
    pub(in crate::store) fn found_records(&self, records: u64) {
        self.counts.replayed.store(records, Relaxed);
    }

    /// Writeback's part of a device's statistics.
    pub(in crate::store) fn describe(&self, snapshot: &mut DeviceSnapshot) {
        let id = DeviceId(snapshot.unit);
        let Some(device) = self.device(id) else {
            let (state, mode) = ("clean".to_owned(), "idle".to_owned());
            let clean = DeviceWriteback { state, mode, consistent: true, ..Default::default() };
            snapshot.writeback = Some(clean);
            return;
        };
        let load = device.dirty.lock().map.load();
        let control = self.control.lock();
        let (mode, why) = control.controller.mode(id);
        let why = device.file.refused().map_or(why.to_owned(), str::to_owned);
        let state = if self.journal.failure().is_some() || device.file.refused().is_some() {
            "failed"
        } else if control.controller.is_degraded(id) {
            "degraded"
        } else if device.flushing.load(SeqCst) > 0 || self.flushing_all.load(SeqCst) > 0 {
            "flushing"
        } else {
            "dirty"
        };
        let oldest_ms = clock::now_ms().saturating_sub(load.waiting_since_ms);
        snapshot.writeback = Some(DeviceWriteback {
            state: state.to_owned(),
            mode: mode.name().to_owned(),
            why,
            dirty_bytes: load.live_bytes,
            dirty_extents: load.live,
            oldest_ms: if load.waiting > 0 { oldest_ms } else { 0 },
            in_flight: load.flying as u64,
            errors: control.controller.errors(id),
            consistent: false,
        });
    }
}
