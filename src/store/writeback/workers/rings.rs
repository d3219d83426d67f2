//! Threads that feed a ring each from one queue.
//!
//! States of a thread: taking jobs -> asleep in its ring (with or without writes in flight) ->
//! taking ...; with its ring full it waits for completions and takes nothing; once the queue is
//! closed it ends when nothing is in flight. If its ring breaks (the kernel refuses to be
//! entered), it hands all its jobs to the plain threads from then on.
//!
//! Invariant: while the queue has a job and a thread has room, that thread is awake or is being
//! woken. A thread says that it sleeps and then looks into the queue once more; a submitter queues
//! and then looks for a sleeper. One of the two sees the other.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst, fence};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use parking_lot::Mutex;
use rustix::io::Errno;

use super::super::controller::{RESERVE, SLOTS};
use super::job::{Filled, Job};
use super::pool::{Pool, QUEUE, STACK_BYTES, join};
use super::{after_stop, write_now};
use crate::device::RawTarget;
use crate::error::{Error, OpContext, Result};
use crate::sys::uring::{Completion, Ring, RingWrite, Waker};

/// Two, so that one may read the journal while the other reaps.
const THREADS: usize = 2;

/// Writes in flight of each: both together take all slots of the controller.
const DEPTH: u32 = ((SLOTS + RESERVE) / THREADS) as u32;

/// Times that a write which got nowhere goes to the ring again before it goes to a plain thread.
const RETRIES: u8 = 3;

/// Looks at a broken ring, and the time between two, before its writes count as failed.
const LAST_LOOKS: u32 = 500;
const LOOK_PAUSE: Duration = Duration::from_millis(10);

struct Queued {
    job: Job,
    raw: RawTarget,
}

struct Sleeper {
    asleep: AtomicBool,
    waker: Waker,
}

fn wake_one(sleepers: &[Sleeper]) {
    fence(SeqCst);
    if let Some(sleeper) = sleepers.iter().find(|sleeper| sleeper.asleep.swap(false, SeqCst)) {
        sleeper.waker.wake();
    }
}

fn wake_all(sleepers: &[Sleeper]) {
    sleepers.iter().for_each(|sleeper| sleeper.waker.wake());
}

struct State {
    /// None once stopped.
    queue: Option<Sender<Queued>>,
    threads: Vec<JoinHandle<()>>,
}

/// The threads with rings.
pub(super) struct Rings {
    state: Mutex<State>,
    sleepers: Arc<[Sleeper]>,
}

impl Rings {
    /// Starts them; None where io_uring is refused. What they cannot write goes to `plain`.
    pub(super) fn start(plain: &Arc<Pool>) -> Result<Option<Rings>> {
        let mut rings = Vec::new();
        for _ in 0..THREADS {
            match Ring::new(DEPTH) {
                Ok(ring) => rings.push(ring),
                Err(error) => {
                    log::debug!("io_uring: {error}; {} of {THREADS} rings", rings.len());
                    break;
                }
            }
        }
        if rings.is_empty() {
            return Ok(None);
        }
        let sleeper = |ring: &Ring| Sleeper { asleep: false.into(), waker: ring.waker() };
        let sleepers: Arc<[Sleeper]> = rings.iter().map(sleeper).collect();
        let (sender, queue) = bounded(QUEUE);
        let state = Mutex::new(State { queue: Some(sender), threads: Vec::new() });
        let started = Rings { state, sleepers: sleepers.clone() };
        for (number, ring) in rings.into_iter().enumerate() {
            let (queue, sleepers, plain) = (queue.clone(), sleepers.clone(), plain.clone());
            let worker = Worker::new(ring, queue, sleepers, number, plain);
            let thread = thread::Builder::new()
                .name(format!("write-ring-{number}"))
                .stack_size(STACK_BYTES)
                .spawn(move || worker.run());
            match thread.op("start a thread") {
                Ok(thread) => started.state.lock().threads.push(thread),
                Err(error) => {
                    started.stop();
                    return Err(error);
                }
            }
        }
        Ok(Some(started))
    }

    /// Takes a job whose device has `raw`.
    pub(super) fn submit(&self, job: Job, raw: RawTarget) {
        let queue = self.state.lock().queue.clone();
        let queued = Queued { job, raw };
        let refused = match queue {
            Some(queue) => queue.send(queued).err().map(|error| error.into_inner()),
            None => Some(queued),
        };
        // The sender is gone by now: if it was the last, whoever is woken sees the queue closed.
        wake_one(&self.sleepers);
        if let Some(Queued { job, .. }) = refused {
            job.fail(after_stop());
        }
    }

    /// Finishes what is queued and ends the threads.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.queue = None;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        wake_all(&self.sleepers);
        join(threads);
    }
}

/// A job of which the ring has a part.
struct Flight {
    filled: Filled,
    raw: RawTarget,
    /// What the ring has, within the buffer.
    run: Range<usize>,
    /// Where it goes behind the descriptor.
    at: u64,
    /// Times in a row that it got nowhere.
    retries: u8,
}

struct Worker {
    ring: Ring,
    queue: Receiver<Queued>,
    /// Whether the queue may still bring anything.
    open: bool,
    sleepers: Arc<[Sleeper]>,
    number: usize,
    plain: Arc<Pool>,
    flights: HashMap<u64, Flight>,
    next_token: u64,
}

impl Worker {
    fn new(
        ring: Ring,
        queue: Receiver<Queued>,
        sleepers: Arc<[Sleeper]>,
        number: usize,
        plain: Arc<Pool>,
    ) -> Worker {
        let (open, flights, next_token) = (true, HashMap::new(), 0);
        Worker { ring, queue, open, sleepers, number, plain, flights, next_token }
    }

    fn run(mut self) {
        while self.open || !self.flights.is_empty() {
            let progress = match self.take() {
                Some(queued) => self.begin(queued),
                None => self.sleep(),
            };
            self.reap();
            if let Err(error) = progress {
                return self.go_on_without_ring(&error);
            }
        }
    }

    /// The next job, if there is one and the ring has room.
    fn take(&mut self) -> Option<Queued> {
        if !self.open || self.ring.room() == 0 {
            return None;
        }
        match self.queue.try_recv() {
            Ok(queued) => Some(queued),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.open = false;
                // The last sender may have been dropped when another was asleep already.
                wake_all(&self.sleepers);
                None
            }
        }
    }

    /// Waits for completions and, with room for it, for jobs.
    fn sleep(&mut self) -> io::Result<()> {
        let takes = self.open && self.ring.room() > 0;
        if takes {
            self.says_asleep(true);
            fence(SeqCst);
            let late = self.take();
            if late.is_some() || !self.open {
                self.says_asleep(false);
                return late.map_or(Ok(()), |queued| self.begin(queued));
            }
        } else if !self.queue.is_empty() {
            wake_one(&self.sleepers);
        }
        let waited = self.ring.wait();
        self.says_asleep(false);
        waited
    }

    fn says_asleep(&self, asleep: bool) {
        if let Some(me) = self.sleepers.get(self.number) {
            me.asleep.store(asleep, SeqCst);
        }
    }

    /// Fetches a job's bytes and hands its aligned part to the kernel at once: the next fetch may
    /// take its time.
    fn begin(&mut self, Queued { job, raw }: Queued) -> io::Result<()> {
        let Some(mut filled) = Filled::fill(job, raw.offset, raw.align) else { return Ok(()) };
        match filled.take_middle(&raw) {
            Some((run, at)) => self.write(Flight { filled, raw, run, at, retries: 0 }),
            None => self.write_now(filled),
        }
        self.ring.flush()
    }

    fn write(&mut self, mut flight: Flight) {
        let token = self.next_token;
        self.next_token += 1;
        let write = RingWrite {
            fd: flight.raw.fd.clone(),
            buffer: flight.filled.take_buffer(),
            span: flight.run.clone(),
            offset: flight.at,
            token,
        };
        match self.ring.submit(write) {
            Ok(()) => {
                self.flights.insert(token, flight);
            }
            Err(write) => {
                flight.filled.put_buffer(write.buffer);
                self.leave(flight);
            }
        }
    }

    /// Leaves to a plain thread what the ring could not write, and the ragged ends.
    fn leave(&self, mut flight: Flight) {
        flight.filled.put_back(flight.run);
        self.write_now(flight.filled);
    }

    fn write_now(&self, filled: Filled) {
        self.plain.run(Box::new(move || filled.write_rest()));
    }

    fn reap(&mut self) {
        while let Some(completion) = self.ring.reap() {
            self.complete(completion);
        }
    }

    fn complete(&mut self, Completion { token, buffer, result }: Completion) {
        let Some(mut flight) = self.flights.remove(&token) else { return };
        flight.filled.put_buffer(buffer);
        let result = result.map_err(|error| (Errno::from_io_error(&error), error));
        match result {
            Ok(written) if written >= flight.run.len() => {
                if flight.filled.is_written() {
                    flight.filled.tell(Ok(()));
                } else {
                    self.write_now(flight.filled);
                }
            }
            // Short: it goes on at the last aligned place.
            Ok(written) if written as u64 >= flight.raw.align => {
                let whole = written - written % flight.raw.align as usize;
                flight.run.start += whole;
                flight.at += whole as u64;
                flight.retries = 0;
                self.write(flight);
            }
            Err((Some(Errno::INTR | Errno::AGAIN), _)) if flight.retries < RETRIES => {
                flight.retries += 1;
                self.write(flight);
            }
            // The device knows another way (buffered), or says better why not.
            Ok(_)
            | Err((
                Some(
                    Errno::INTR | Errno::AGAIN | Errno::INVAL | Errno::OPNOTSUPP | Errno::CANCELED,
                ),
                _,
            )) => self.leave(flight),
            Err((_, error)) => flight.filled.tell(Err(Error::os("write", error))),
        }
    }

    /// The end of a ring that cannot be entered any more.
    fn go_on_without_ring(mut self, error: &io::Error) {
        log::error!("io_uring: {error}; writing home without it");
        // The kernel finishes what it has taken all the same.
        for _ in 0..LAST_LOOKS {
            self.reap();
            if self.flights.is_empty() {
                break;
            }
            thread::sleep(LOOK_PAUSE);
        }
        // Their buffers stay with the ring: the kernel may still have them.
        for (_, flight) in self.flights.drain() {
            flight.filled.tell(Err(Error::os("write", Errno::IO)));
        }
        while let Ok(Queued { job, .. }) = self.queue.recv() {
            self.plain.run(Box::new(move || write_now(job)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::BlockDevice;
    use crate::device::fault::{Call, FaultDevice, FaultLog};
    use crate::device::memory::Image;
    use std::sync::mpsc;

    /// A worker that is no thread, what feeds it, and what its jobs end with. The descriptor is a
    /// scratch file's, the device another place: writes of the ring and of the device differ.
    struct Bench {
        worker: Worker,
        queue: Sender<Queued>,
        raw: RawTarget,
        device: Arc<FaultDevice>,
        tell: mpsc::Sender<bool>,
        told: mpsc::Receiver<bool>,
    }

    impl Bench {
        fn new() -> Option<Bench> {
            let ring = Ring::new(4).ok()?;
            let (queue, receiver) = bounded(8);
            let plain = Arc::new(Pool::new("test", 1));
            let worker = Worker::new(ring, receiver, Arc::new([]), 0, plain);
            let fd = Arc::new(tempfile::tempfile().unwrap().into());
            let raw = RawTarget { fd, offset: 0, align: 4096 };
            let device = FaultLog::new().add("d", Image::zeros(8192));
            let (tell, told) = mpsc::channel();
            Some(Bench { worker, queue, raw, device, tell, told })
        }

        fn queued(&self) -> Queued {
            let tell = self.tell.clone();
            let job = Job {
                device: self.device.clone() as Arc<dyn BlockDevice>,
                offset: 0,
                len: 8192,
                fill: Box::new(|buffer| {
                    buffer.fill(1);
                    Ok(())
                }),
                done: Box::new(move |result, _| tell.send(result.is_ok()).unwrap()),
            };
            Queued { job, raw: self.raw.clone() }
        }

        /// Writes a job, with `answer` in place of what the kernel says each time; the writes.
        fn writes_answered(&mut self, answer: impl Fn(usize) -> io::Result<usize>) -> usize {
            let queued = self.queued();
            self.worker.begin(queued).unwrap();
            let mut writes = 0;
            while !self.worker.flights.is_empty() {
                self.worker.ring.wait().unwrap();
                while let Some(real) = self.worker.ring.reap() {
                    let result = answer(writes);
                    writes += 1;
                    self.worker.complete(Completion { result, ..real });
                }
            }
            writes
        }
    }

    #[test]
    fn what_gets_nowhere_is_tried_again_and_then_left_to_the_device() {
        let Some(mut bench) = Bench::new() else { return };
        let again = |_| Err(Errno::AGAIN.into());
        assert_eq!(bench.writes_answered(again), 1 + usize::from(RETRIES));
        assert!(bench.told.recv().unwrap());
        assert_eq!(bench.device.image().to_vec(), vec![1; 8192]);
        // Interrupted once, then written: the device is not asked.
        let once = |write| if write == 0 { Err(Errno::INTR.into()) } else { Ok(8192) };
        assert_eq!(bench.writes_answered(once), 2);
        assert!(bench.told.recv().unwrap());
        assert_eq!(bench.device.calls(Call::Write), 1);
    }

    #[test]
    fn a_short_write_goes_on_where_it_is_aligned() {
        let Some(mut bench) = Bench::new() else { return };
        assert_eq!(bench.writes_answered(|write| Ok([5000, 4096][write])), 2);
        assert!(bench.told.recv().unwrap());
        assert_eq!(bench.device.calls(Call::Write), 0);
        for short in [0, 100] {
            assert_eq!(bench.writes_answered(|_| Ok(short)), 1);
            assert!(bench.told.recv().unwrap());
        }
        assert_eq!(bench.device.calls(Call::Write), 2);
        assert_eq!(bench.writes_answered(|_| Err(Errno::IO.into())), 1);
        assert!(!bench.told.recv().unwrap());
        assert_eq!(bench.device.calls(Call::Write), 2);
    }

    #[test]
    fn without_its_ring_a_worker_loses_nothing() {
        let Some(mut bench) = Bench::new() else { return };
        let (flying, queued) = (bench.queued(), [bench.queued(), bench.queued()]);
        bench.worker.begin(flying).unwrap();
        queued.into_iter().for_each(|queued| bench.queue.send(queued).unwrap());
        let Bench { worker, queue, device, told, .. } = bench;
        drop(queue);
        let plain = worker.plain.clone();
        worker.go_on_without_ring(&Errno::BADF.into());
        plain.stop();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [true, true, true]);
        assert_eq!(device.calls(Call::Write), 2);
    }
}
