//! The device's own size: what it is, and what a power cut may make of it.
//!
//! States of a change of size: expected (about to be made) -> made -> synced, or lost: a sync that
//! failed may have lost it, and then it is made once more before anything relies on it (J11). No
//! lock: part of the dirty map. Invariant: whatever a power cut leaves, the size lies in `range`
//! (J12; the journal's Device records say it).

/// See the module. Sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct HomeSize {
    now: u64,
    /// Least and greatest since the last good sync began.
    range: (u64, u64),
    /// The same since the running sync began.
    syncing: (u64, u64),
    lost: bool,
}

impl Default for HomeSize {
    fn default() -> HomeSize {
        HomeSize::new(0)
    }
}

impl HomeSize {
    /// What was done to it before, nobody knows: a power cut may leave any size.
    pub(super) fn new(now: u64) -> HomeSize {
        HomeSize { now, range: (0, u64::MAX), syncing: (0, u64::MAX), lost: false }
    }

    /// A power cut leaves it one of these.
    pub(super) fn within(&mut self, least: u64, most: u64) {
        self.range = (least.min(self.now), most.max(self.now));
        self.syncing = self.range;
    }

    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn range(&self) -> (u64, u64) {
        self.range
    }

    /// It is about to become this.
    pub(super) fn foresee(&mut self, bytes: u64) {
        for (least, most) in [&mut self.range, &mut self.syncing] {
            (*least, *most) = ((*least).min(bytes), (*most).max(bytes));
        }
    }

    /// It is this now.
    pub(super) fn set(&mut self, bytes: u64) {
        self.foresee(bytes);
        self.now = bytes;
    }

    /// It was set by us, before any sync that failed or (not `surely`) perhaps not.
    pub(super) fn rely(&mut self, surely: bool) {
        self.lost = !surely;
    }

    /// Nothing may rely on it before it is set again.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// A sync begins; `quiet`: no change is in flight. What an earlier one lost, it does not bring
    /// back.
    pub(super) fn begin_sync(&mut self, quiet: bool) {
        self.syncing = if quiet && !self.lost { (self.now, self.now) } else { self.range };
    }

    pub(super) fn end_sync(&mut self, ok: bool) {
        if ok {
            self.range = self.syncing;
        } else {
            self.lost |= self.range.0 != self.range.1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j12_a_size_that_a_failed_sync_may_have_lost_is_explained_until_it_was_set_again() {
        let mut home = HomeSize::new(100);
        home.begin_sync(true);
        home.end_sync(true);
        home.set(50);
        home.begin_sync(true);
        home.end_sync(false);
        // One that covers something else.
        home.begin_sync(true);
        home.end_sync(true);
        assert_eq!((home.range(), home.is_lost()), ((50, 100), true));
        home.set(50);
        home.rely(true);
        home.begin_sync(true);
        home.end_sync(true);
        assert_eq!(home.range(), (50, 50));
    }
}
