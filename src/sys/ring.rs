//! Reads of the host's files that no thread waits for: one io_uring and the thread that reaps it.
//!
//! A read is free -> in flight (the kernel owns its buffer; the table keeps buffer and descriptor
//! alive) -> completed (both handed to its `Done`, on the reaping thread). Locks: `table`, then
//! `submit`; neither is held while a `Done` runs. Where the kernel refuses io_uring (old, or
//! forbidden), `Ring::new` fails and callers read on threads.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;

use super::AlignedBuf;

/// Reads in flight at most; a further one is refused and done by its caller.
const IN_FLIGHT: usize = 128;

/// The user data of the request that wakes the reaping thread to end it.
const WAKE: u64 = u64::MAX;

/// What happens when a read has ended: the bytes read or the errno, and the buffer.
pub type Done = Box<dyn FnOnce(io::Result<usize>, AlignedBuf) + Send>;

struct InFlight {
    buf: AlignedBuf,
    done: Done,
    /// Open until the kernel is through.
    _file: Arc<OwnedFd>,
}

/// Bytes in flight at most.
const BYTES_IN_FLIGHT: usize = 32 << 20;

#[derive(Default)]
struct Table {
    bytes: usize,
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
}

/// See the module.
pub struct Ring {
    ring: IoUring,
    table: Mutex<Table>,
    /// Guards the submission queue.
    submit: Mutex<()>,
    ending: AtomicBool,
}

/// A read that was not taken: the caller does it.
pub struct Refused {
    /// Its buffer.
    pub buf: AlignedBuf,
    /// What to do with it.
    pub done: Done,
}

impl Ring {
    /// A ring; nobody reaps it yet. ENOSYS or EPERM where io_uring is refused.
    pub fn new() -> io::Result<Ring> {
        // Room for every read and the wake-up, so that a push never meets a full queue.
        let ring = IoUring::builder().dontfork().build((2 * IN_FLIGHT) as u32)?;
        let slots = (0..IN_FLIGHT).map(|_| None).collect();
        let table = Table { bytes: 0, slots, free: (0..IN_FLIGHT).rev().collect() };
        let table = Mutex::new(table);
        Ok(Ring { ring, table, submit: Mutex::new(()), ending: AtomicBool::new(false) })
    }

    /// Starts a read of `buf.len()` bytes at `offset`.
    pub fn read(
        &self,
        file: Arc<OwnedFd>,
        mut buf: AlignedBuf,
        offset: u64,
        done: Done,
    ) -> Result<(), Box<Refused>> {
        if self.ending.load(SeqCst) {
            return Err(Box::new(Refused { buf, done }));
        }
        let (address, len) = (buf.as_mut_ptr(), buf.len() as u32);
        let fd = types::Fd(file.as_raw_fd());
        let mut table = self.table.lock();
        let room = table.bytes + buf.len() <= BYTES_IN_FLIGHT;
        let Some(slot) = room.then(|| table.free.pop()).flatten() else {
            return Err(Box::new(Refused { buf, done }));
        };
        table.bytes += buf.len();
        let entry = opcode::Read::new(fd, address, len).offset(offset).build();
        if let Some(place) = table.slots.get_mut(slot) {
            *place = Some(InFlight { buf, done, _file: file });
        }
        drop(table);
        if self.push(&entry.user_data(slot as u64)) {
            return Ok(());
        }
        match self.take(slot) {
            Some(read) => Err(Box::new(Refused { buf: read.buf, done: read.done })),
            None => Ok(()),
        }
    }

    /// Queues an entry and tells the kernel. False: it was not queued.
    fn push(&self, entry: &io_uring::squeue::Entry) -> bool {
        let guard = self.submit.lock();
        // SAFETY: the submission queue is used only here, under `submit`. The entry's buffer and
        // descriptor live in the table until its completion is reaped.
        let queued = unsafe { self.ring.submission_shared().push(entry) }.is_ok();
        drop(guard);
        if queued {
            // EINTR, EAGAIN, EBUSY: the entry stays queued; the reaping thread submits it too.
            let _ = self.ring.submit();
        }
        queued
    }

    fn take(&self, slot: usize) -> Option<InFlight> {
        let mut table = self.table.lock();
        let read = table.slots.get_mut(slot)?.take()?;
        table.free.push(slot);
        table.bytes = table.bytes.saturating_sub(read.buf.len());
        Some(read)
    }

    /// Reaps completions until `stop`, and then until nothing is in flight. One thread runs this.
    pub fn reap(&self) {
        while !(self.ending.load(SeqCst) && self.is_idle()) {
            // EINTR and EBUSY only mean: look again.
            let _ = self.ring.submit_and_wait(1);
            // SAFETY: the completion queue is used only by this one thread.
            let ended: Vec<(u64, i32)> = unsafe { self.ring.completion_shared() }
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            for (slot, result) in ended {
                if slot == WAKE {
                    continue;
                }
                if let Some(read) = self.take(slot as usize) {
                    let result = match result {
                        error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                        bytes => Ok(bytes as usize),
                    };
                    let done = AssertUnwindSafe(|| (read.done)(result, read.buf));
                    if std::panic::catch_unwind(done).is_err() {
                        log::error!("a read's end failed in a way that must not happen");
                    }
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.table.lock().free.len() == IN_FLIGHT
    }

    /// Refuses further reads and lets the reaping thread end when the last one has.
    pub fn stop(&self) {
        self.ending.store(true, SeqCst);
        self.push(&opcode::Nop::new().build().user_data(WAKE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn reads_come_back_with_their_buffers() {
        let Ok(ring) = Ring::new() else { return };
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let file: Arc<OwnedFd> = Arc::new(file.into());
        let (sender, receiver) = crossbeam_channel::unbounded();
        std::thread::scope(|scope| {
            scope.spawn(|| ring.reap());
            let mut sent = 0;
            for i in 0..500u64 {
                let (offset, sender) = (i * 1999, sender.clone());
                let done: Done = Box::new(move |result, buf| {
                    sender.send((offset, result.unwrap(), buf)).unwrap();
                });
                match ring.read(file.clone(), AlignedBuf::lend(4096), offset, done) {
                    Ok(()) => sent += 1,
                    Err(refused) => drop(refused.buf),
                }
            }
            assert!(sent >= IN_FLIGHT);
            for (offset, got, buf) in receiver.iter().take(sent) {
                let want = &bytes[offset as usize..bytes.len().min(offset as usize + 4096)];
                assert_eq!(&buf[..got], want);
            }
            ring.stop();
        });
        assert!(ring.read(file, AlignedBuf::lend(1), 0, Box::new(|_, _| ())).is_err());
    }

    #[test]
    fn an_error_of_the_kernel_is_an_error() {
        let Ok(ring) = Ring::new() else { return };
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let wrong: Arc<OwnedFd> = Arc::new(_writer);
        drop(reader);
        let (sender, receiver) = crossbeam_channel::unbounded();
        std::thread::scope(|scope| {
            scope.spawn(|| ring.reap());
            let done: Done = Box::new(move |result, _| sender.send(result).unwrap());
            assert!(ring.read(wrong, AlignedBuf::lend(16), 0, done).is_ok());
            assert!(receiver.recv().unwrap().is_err());
            ring.stop();
        });
    }
}
