//! Whether the journal can still be trusted.
//!
//! States: good -> failed, for good. Lock: `why`, a leaf. Invariant: J11, a failed sync or write is
//! never followed by a success. A journal opened for reading only is one that failed from the
//! start.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use parking_lot::Mutex;

use super::reserve::Space;
use crate::error::{Error, Kind, Result};

/// The latch: good -> failed. Lock: `why`, a leaf.
#[derive(Debug, Default)]
pub struct Health {
    failed: AtomicBool,
    why: Mutex<Option<Box<str>>>,
}

impl Health {
    /// Whether it failed.
    pub fn is_failed(&self) -> bool {
        self.failed.load(SeqCst)
    }

    /// Latches. The first reason stays.
    pub fn fail(&self, why: &str) {
        self.why.lock().get_or_insert_with(|| why.into());
        self.failed.store(true, SeqCst);
    }

    /// EIO once failed.
    pub fn check(&self) -> Result<()> {
        if !self.is_failed() {
            return Ok(());
        }
        Err(Error::new(Kind::Io, "journal", self.why().unwrap_or_default()))
    }

    /// Why it failed.
    pub fn why(&self) -> Option<String> {
        self.why.lock().as_deref().map(str::to_owned)
    }
}

/// Latches the journal unless `done` is called: what an error or a panic under a journal lock
/// leaves behind. Waiters for room are woken.
pub struct FailUnlessDone<'a> {
    armed: bool,
    health: &'a Health,
    space: &'a Space,
}

impl<'a> FailUnlessDone<'a> {
    /// Armed.
    pub fn new(health: &'a Health, space: &'a Space) -> FailUnlessDone<'a> {
        FailUnlessDone { armed: true, health, space }
    }

    /// All went well.
    pub fn done(mut self) {
        self.armed = false;
    }
}

impl Drop for FailUnlessDone<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.health.fail("interrupted while it was being written");
            self.space.wake();
        }
    }
}
