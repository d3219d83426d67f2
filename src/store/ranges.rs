//! Ranges of one device that are being changed: overlapping changes wait for each other, so that
//! device and cache see them in one order. Readers take none.

use parking_lot::{Condvar, Mutex};

use crate::units::Extent;

/// The ranges being changed now. A handful at most: a list is the right map.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    busy: Mutex<Vec<Extent>>,
    freed: Condvar,
}

/// Gives the range back when dropped, panics included.
pub(super) struct RangeGuard<'a> {
    ranges: &'a Ranges,
    extent: Extent,
}

impl Ranges {
    /// Waits until no other change overlaps.
    pub(super) fn lock(&self, offset: u64, len: u64) -> RangeGuard<'_> {
        let extent = Extent { offset, len };
        let mut busy = self.busy.lock();
        while busy.iter().any(|other| other.overlaps(&extent)) {
            self.freed.wait(&mut busy);
        }
        busy.push(extent);
        RangeGuard { ranges: self, extent }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut busy = self.ranges.busy.lock();
        if let Some(at) = busy.iter().position(|other| *other == self.extent) {
            busy.swap_remove(at);
        }
        self.ranges.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn overlapping_changes_never_run_at_once() {
        let ranges = Ranges::default();
        let inside = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for worker in 0..4u64 {
                let (ranges, inside) = (&ranges, &inside);
                scope.spawn(move || {
                    for i in 0..500 {
                        let _guard = ranges.lock(100 + (worker + i) % 3, 10);
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        inside.fetch_sub(1, SeqCst);
                    }
                });
            }
        });
        let _one = ranges.lock(0, 10);
        let _apart = ranges.lock(10, 10);
    }
}
