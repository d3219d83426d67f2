//! Work that waits for a device, and the threads for it.
//!
//! A request thread of FUSE runs such work itself while fewer than `threads - 4` are doing so;
//! a further one parks it here, with its reply, so that hits and writes always find a thread.
//! Parked bytes are capped; past the cap the request thread does the work after all. Read-ahead is
//! offered: dropped when the queue is full. States: created -> started -> stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use crate::error::{OpContext, Result};
use crate::sys::AlignedBuf;

/// Jobs that may wait.
const QUEUE: usize = 256;

/// Bytes of requests that may be parked.
const PARKED_MAX: usize = 64 << 20;

/// Request threads that never wait for a device.
const SPARE: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// See the module.
pub struct Pool {
    name: &'static str,
    size: usize,
    inside: AtomicUsize,
    inside_max: usize,
    parked_bytes: Arc<AtomicUsize>,
    jobs: Mutex<Option<Sender<Job>>>,
    receiver: Receiver<Job>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// One request thread inside device work; leaves on drop.
struct Inside<'a>(&'a AtomicUsize);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Pool {
    /// A pool of `size` workers for that many request threads; no worker runs yet.
    pub fn new(name: &'static str, size: usize, request_threads: usize) -> Pool {
        let (sender, receiver) = bounded(QUEUE);
        Pool {
            name,
            size,
            inside: AtomicUsize::new(0),
            inside_max: request_threads.saturating_sub(SPARE).max(1),
            parked_bytes: Default::default(),
            jobs: Mutex::new(Some(sender)),
            receiver,
            workers: Mutex::default(),
        }
    }

    /// Starts the workers.
    pub fn start(&self) -> Result<()> {
        let mut workers = self.workers.lock();
        for i in workers.len()..self.size {
            let receiver = self.receiver.clone();
            let worker = std::thread::Builder::new()
                .name(format!("{}-{i}", self.name))
                .spawn(move || receiver.iter().for_each(run_fenced))
                .op("start a worker thread")?;
            workers.push(worker);
        }
        Ok(())
    }

    /// Lets the workers finish what is queued, then ends them.
    pub fn stop(&self) {
        self.jobs.lock().take();
        for worker in self.workers.lock().drain(..) {
            // A worker cannot panic: its jobs are fenced.
            let _ = worker.join();
        }
    }

    fn enter(&self) -> Option<Inside<'_>> {
        let inside = Inside(&self.inside);
        if self.inside.fetch_add(1, SeqCst) < self.inside_max { Some(inside) } else { None }
    }

    /// Runs `job`, here or on a worker.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.run_with(&mut [], 0, move |_| job());
    }

    /// Runs `job` with a buffer of `len` bytes: here with the caller's, or on a worker with one of
    /// its own.
    pub fn run_with(
        &self,
        buffer: &mut [u8],
        len: usize,
        job: impl FnOnce(&mut [u8]) + Send + 'static,
    ) {
        if let Some(_inside) = self.enter() {
            return job(buffer.get_mut(..len).unwrap_or_default());
        }
        if let Err(job) = self.park(len, job) {
            job(buffer.get_mut(..len).unwrap_or_default());
        }
    }

    /// Runs a job that waits for somebody else, holding so many bytes: on a worker, or here if
    /// there is no room for it.
    pub fn defer(&self, bytes: usize, job: impl FnOnce() + Send + 'static) {
        let Some(room) = Parked::take(&self.parked_bytes, bytes) else { return job() };
        let Some(sender) = self.jobs.lock().clone().filter(|sender| !sender.is_full()) else {
            return job();
        };
        let boxed: Job = Box::new(move || {
            let _room = room;
            job();
        });
        if let Err(lost) = sender.send(boxed) {
            (lost.0)();
        }
    }

    /// Hands a job to a worker; it comes back if there is no room.
    fn park<J: FnOnce(&mut [u8]) + Send + 'static>(
        &self,
        len: usize,
        job: J,
    ) -> std::result::Result<(), J> {
        let Some(room) = Parked::take(&self.parked_bytes, len) else { return Err(job) };
        let Some(sender) = self.jobs.lock().clone().filter(|sender| !sender.is_full()) else {
            return Err(job);
        };
        // A full queue between the question and this waits for a worker, which is what a request
        // thread without room does anyway.
        let boxed: Job = Box::new(move || {
            let _room = room;
            job(&mut AlignedBuf::lend(len));
        });
        if let Err(lost) = sender.send(boxed) {
            (lost.0)();
        }
        Ok(())
    }

    /// Runs `job` on a worker some time, or not at all if there is no room.
    pub fn offer(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(sender) = self.jobs.lock().clone() {
            // Read-ahead that finds no room is not missed.
            let _ = sender.try_send(Box::new(job));
        }
    }
}

/// Bytes of a parked request; given back on drop, panics included.
struct Parked {
    bytes: usize,
    of: Arc<AtomicUsize>,
}

impl Parked {
    fn take(of: &Arc<AtomicUsize>, bytes: usize) -> Option<Parked> {
        let room = Parked { bytes, of: of.clone() };
        (of.fetch_add(bytes, SeqCst) + bytes <= PARKED_MAX).then_some(room)
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, SeqCst);
    }
}

fn run_fenced(job: Job) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err() {
        log::error!("a worker's job failed in a way that must not happen; its request gets EIO");
    }
}
