//! The threads that write home. They know no dirty map and no epoch: a job is bytes to fetch, a
//! place to put them, and somebody to tell.
//!
//! Three groups of threads: 2 that feed a ring each (what a device with a raw target has aligned),
//! up to 64 that call `write_home` (all else, also what a ring refused), up to 8 for calls, so that
//! a sync that takes seconds holds up no write. The latter two start threads when there is work.
//!
//! States of a job: queued -> filled -> with the ring, then perhaps with `write_home` -> done.
//! Invariants: `done` of every job is called exactly once, whatever fails, panics or stops; no
//! lock is held while fill, done, a call or a device runs. Locks: `Workers.rings` and `Pool.state`,
//! leaves, held to clone a sender out or to start or take threads.
//!
//! Callers keep a few more than 64 tasks in flight at most, so the bounded queues are never full;
//! a full one makes `submit` wait.

mod job;
mod pool;
mod rings;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use self::job::Filled;
pub(crate) use self::job::{Job, Task};
use self::pool::Pool;
use self::rings::Rings;
use crate::error::{Error, Kind, Result};

/// Writes that block a thread each, at most.
const PLAIN_THREADS: usize = 64;

/// Syncs, truncates and the like at one time.
const CALL_THREADS: usize = 8;

/// The threads that write home.
pub(crate) struct Workers {
    rings: Option<Rings>,
    plain: Arc<Pool>,
    calls: Pool,
    stopped: AtomicBool,
}

impl Workers {
    /// Starts them; without rings if told so or where io_uring is refused.
    pub(crate) fn start(no_uring: bool) -> Result<Workers> {
        let plain = Arc::new(Pool::new("write-home", PLAIN_THREADS));
        let rings = if no_uring { None } else { Rings::start(&plain)? };
        let calls = Pool::new("home-call", CALL_THREADS);
        Ok(Workers { rings, plain, calls, stopped: AtomicBool::new(false) })
    }

    /// Takes a task; it runs on another thread. After `stop` a write fails and a call runs, both
    /// before this returns.
    pub(crate) fn submit(&self, task: Task) {
        match task {
            Task::Call(call) => self.calls.run(call),
            Task::Write(job) if self.stopped.load(SeqCst) => job.fail(after_stop()),
            Task::Write(job) => match (&self.rings, job.device.raw()) {
                (Some(rings), Some(raw)) if job.has_middle(&raw) => rings.submit(job, raw),
                _ => self.plain.run(Box::new(move || write_now(job))),
            },
        }
    }

    /// Whether rings take the aligned writes.
    pub(crate) fn uses_uring(&self) -> bool {
        self.rings.is_some()
    }

    /// Finishes what is queued and ends the threads. Waits for a device that hangs.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, SeqCst);
        // In this order: the rings hand what they cannot write to the plain threads.
        if let Some(rings) = &self.rings {
            rings.stop();
        }
        self.plain.stop();
        self.calls.stop();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

fn after_stop() -> Error {
    Error::new(Kind::Busy, "write home", "after the stop")
}

/// Writes a job here and now.
pub(crate) fn write_now(job: Job) {
    // The file system's alignment is not known here; a page is right nearly always, and a device
    // copies where it is not.
    if let Some(filled) = Filled::fill(job, 0, crate::sys::aligned::DIRECT_ALIGN as u64) {
        filled.write_rest();
    }
}
