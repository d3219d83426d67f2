//! Reads that no thread waits for: a request that misses whole goes to the ring with its answer, and
//! the ring's thread finishes it in the cache and answers.
//!
//! States of a request: not taken (the caller does it the usual way) | in flight -> answered |
//! later (the ring was full: a job that does it on any thread). No lock is held in between; the
//! flight in the cache makes other readers of the blocks wait for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Device;
use super::device::{Admission, ReadPlan};
use crate::cache::Miss;
use crate::error::Result;
use crate::sys::AlignedBuf;
use crate::sys::aligned::DIRECT_ALIGN;
use crate::sys::ring::{Refused, Ring};

/// What takes the bytes of a read, or its error.
pub type Answer = Box<dyn FnOnce(Result<&[u8]>) + Send>;

/// What became of a request.
pub enum Submitted {
    /// It will be answered.
    InFlight,
    /// Run this, where waiting is allowed.
    Later(Box<dyn FnOnce() + Send>),
    /// It is not for the ring; nothing happened.
    NotTaken(Answer),
}

impl Device {
    /// Sends a planned read to the ring, if the device has a raw target and the cache holds none
    /// of it.
    pub fn read_detached(
        self: &Arc<Device>,
        plan: &ReadPlan,
        ring: &Ring,
        answer: Answer,
    ) -> Submitted {
        let Admission::Cached(admission) = &plan.admission else {
            return Submitted::NotTaken(answer);
        };
        let align = DIRECT_ALIGN.max(self.shared.block_size as usize);
        let whole = plan.len.next_multiple_of(align);
        let aligned = plan.offset.is_multiple_of(align as u64)
            && (whole == plan.len || plan.offset + plan.len as u64 == self.size());
        let target = if aligned { self.file.raw() } else { None };
        let Some(target) = target else { return Submitted::NotTaken(answer) };
        let expire_ms = self.shared.tunables.expire_ms();
        let cache = &self.shared.cache;
        let miss = Miss::begin(cache, &self.cached, admission, plan.offset, plan.len, expire_ms);
        let Some(miss) = miss else { return Submitted::NotTaken(answer) };
        let detached = Detached {
            device: self.clone(),
            fetch_len: miss.fetch_len(),
            miss,
            answer,
            offset: plan.offset,
            len: plan.len,
        };
        let buf = AlignedBuf::lend(whole);
        let done = Box::new(move |result, buf| detached.done(result, buf));
        match ring.read(target.file, buf, plan.offset, done) {
            Ok(()) => Submitted::InFlight,
            Err(refused) => Submitted::Later(Box::new(move || {
                let Refused { buf, done } = *refused;
                // Nothing was read: `done` reads what is missing itself.
                done(Ok(0), buf);
            })),
        }
    }
}

/// A read on its way.
struct Detached {
    device: Arc<Device>,
    miss: Miss,
    answer: Answer,
    offset: u64,
    len: usize,
    fetch_len: usize,
}

impl Detached {
    fn done(self, result: io::Result<usize>, mut buf: AlignedBuf) {
        let Detached { device, miss, answer, offset, len, fetch_len } = self;
        let bytes = buf.get_mut(..fetch_len).unwrap_or_default();
        // A refusal of O_DIRECT at the first read, an interruption, a short read before the end:
        // the device reads the rest in its own way.
        let done = result.unwrap_or(0);
        let result = if done < len {
            let rest = bytes.get_mut(done..).unwrap_or_default();
            device.file.read_at(rest, offset + done as u64).map(|got| done + got)
        } else {
            Ok(done)
        };
        let finished = miss.finish(result, bytes);
        if finished.is_err() {
            device.cached.stats.errors.fetch_add(1, Relaxed);
        }
        answer(finished.map(|()| bytes.get(..len).unwrap_or_default()));
    }
}
