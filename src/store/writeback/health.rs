//! How one device takes its home I/O: backoff after failures, hangs, DEGRADED (W4).
//!
//! States: well -> failing (100 ms, doubling to 60 s, between tries) -> degraded (16 failures in a
//! row, 4 of syncs, writes that fail for 3 s, or an I/O that hangs while others are kept from the
//! journal's tail) -> well on the first success. Writes and syncs are counted apart: a device whose
//! page cache takes every write and whose every sync fails is not well. Failures of I/Os issued
//! before the backoff began count, but do not lengthen it.

/// The first wait after a failure.
const BACKOFF_FIRST_MS: u64 = 100;

/// The longest wait after a failure.
const BACKOFF_MOST_MS: u64 = 60_000;

/// Failures in a row from which on a device is degraded.
const DEGRADED_FAILURES: u32 = 16;

/// Writes that fail for so long degrade their device, too: one that is tried with one extent at a
/// time would take minutes to fail 16 times.
const DEGRADED_MS: u64 = 3000;

/// A failed sync counts as so many failed writes, so that a device whose page cache takes every
/// write is degraded within seconds, not minutes.
const SYNC_WEIGHT: u32 = 4;

/// An I/O in flight for longer than this hangs.
pub const HANG_MS: u64 = 5000;

/// A sync may be long because there is much to write: so long before its device is degraded.
const SYNC_HANG_MS: u64 = 30_000;

/// An I/O in flight for longer than this may hang: others should not depend on it.
const STALL_MS: u64 = 1000;

/// One device's health. Plain data of the controller.
#[derive(Debug, Default)]
pub struct Health {
    write_failures: u32,
    sync_failures: u32,
    /// Since when no write succeeded, and whether that is too long.
    write_failing_ms: Option<u64>,
    failed_long: bool,
    /// Waits so far since it was well.
    rounds: u32,
    /// Not tried before.
    retry_ms: u64,
    /// Degraded by a hang.
    hung: bool,
    write_ms: Option<u64>,
    sync_ms: Option<u64>,
    errors: u64,
}

impl Health {
    /// A home write ended.
    pub fn wrote(&mut self, now_ms: u64, ok: bool) {
        self.write_failures = if ok { 0 } else { self.write_failures.saturating_add(1) };
        if ok {
            (self.write_failing_ms, self.failed_long) = (None, false);
        } else {
            let since = *self.write_failing_ms.get_or_insert(now_ms);
            self.failed_long |= now_ms.saturating_sub(since) >= DEGRADED_MS;
        }
        self.ended(now_ms, ok);
    }

    /// A sync ended.
    pub fn synced(&mut self, now_ms: u64, ok: bool) {
        // Syncs are few: each stands for all that was written since the last one.
        self.sync_failures = if ok { 0 } else { self.sync_failures.saturating_add(SYNC_WEIGHT) };
        self.ended(now_ms, ok);
    }

    fn ended(&mut self, now_ms: u64, ok: bool) {
        if ok {
            self.hung = false;
            if !self.is_failing() {
                self.rounds = 0;
                self.retry_ms = 0;
            }
            return;
        }
        self.errors += 1;
        if !self.in_backoff(now_ms) {
            let wait = BACKOFF_FIRST_MS << self.rounds.min(16);
            self.retry_ms = now_ms + wait.min(BACKOFF_MOST_MS);
            self.rounds = self.rounds.saturating_add(1);
        }
    }

    /// What is in flight: the start of the oldest write, and whether a sync is.
    pub fn observe(&mut self, now_ms: u64, oldest_write_ms: Option<u64>, syncing: bool) {
        self.write_ms = oldest_write_ms;
        self.sync_ms = if syncing { self.sync_ms.or(Some(now_ms)) } else { None };
    }

    /// Others need the journal's tail, which this device holds: degraded if an I/O hangs.
    pub fn in_the_way(&mut self, now_ms: u64) {
        let write = older(self.write_ms, now_ms, HANG_MS);
        self.hung |= write || older(self.sync_ms, now_ms, SYNC_HANG_MS);
    }

    /// Whether it is left alone for now.
    pub fn in_backoff(&self, now_ms: u64) -> bool {
        now_ms < self.retry_ms
    }

    /// Whether its last I/O failed.
    pub fn is_failing(&self) -> bool {
        self.write_failures > 0 || self.sync_failures > 0
    }

    /// Whether its next write is a try, to be made with few extents.
    pub fn is_on_trial(&self) -> bool {
        self.write_failures > 0
    }

    /// Whether an I/O of it hangs.
    pub fn hangs(&self, now_ms: u64) -> bool {
        older(self.write_ms, now_ms, HANG_MS) || older(self.sync_ms, now_ms, HANG_MS)
    }

    /// Whether it may soon turn out to hang.
    pub fn stalls(&self, now_ms: u64) -> bool {
        older(self.write_ms, now_ms, STALL_MS) || older(self.sync_ms, now_ms, STALL_MS)
    }

    /// DEGRADED.
    pub fn is_degraded(&self) -> bool {
        let failures = self.write_failures.max(self.sync_failures);
        self.hung || self.failed_long || failures >= DEGRADED_FAILURES
    }

    /// Whether it cannot be counted on to go home: failing, hanging or degraded.
    pub fn is_stuck(&self, now_ms: u64) -> bool {
        self.is_failing() || self.is_degraded() || self.hangs(now_ms)
    }

    /// Failed writes and syncs, ever.
    pub fn errors(&self) -> u64 {
        self.errors
    }
}

fn older(since_ms: Option<u64>, now_ms: u64, limit_ms: u64) -> bool {
    since_ms.is_some_and(|since| now_ms.saturating_sub(since) > limit_ms)
}
