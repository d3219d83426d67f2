//! The lock of a device's dirty map, which notices a panic under it: then nobody knows whether map
//! and journal still agree, so the journal fails for good and is left for replay (STORE 6).
//!
//! States: free -> held -> free, or held by a panicking thread -> the journal has failed.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;

use parking_lot::{Mutex, MutexGuard};

use super::Shared;
use super::journaled::Journaled;

/// See the module.
pub(super) struct Dirty {
    shared: Arc<Shared>,
    inner: Mutex<Journaled>,
}

/// The lock, held.
pub(super) struct DirtyGuard<'a> {
    inner: MutexGuard<'a, Journaled>,
    shared: &'a Shared,
    /// Whether the thread was unwinding already: then it is not our panic.
    unwinding: bool,
}

impl Dirty {
    pub(super) fn new(shared: Arc<Shared>, journaled: Journaled) -> Dirty {
        Dirty { shared, inner: Mutex::new(journaled) }
    }

    pub(super) fn lock(&self) -> DirtyGuard<'_> {
        let unwinding = thread::panicking();
        DirtyGuard { inner: self.inner.lock(), shared: &self.shared, unwinding }
    }
}

impl Deref for DirtyGuard<'_> {
    type Target = Journaled;

    fn deref(&self) -> &Journaled {
        &self.inner
    }
}

impl DerefMut for DirtyGuard<'_> {
    fn deref_mut(&mut self) -> &mut Journaled {
        &mut self.inner
    }
}

impl Drop for DirtyGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking()
            && !self.unwinding
            && let Some(writeback) = self.shared.writeback()
        {
            writeback.journal.give_up("a panic while a dirty map was being changed");
        }
    }
}
