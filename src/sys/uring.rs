//! A small safe io_uring: positioned writes of owned buffers, and a way to wake who waits in it.
//!
//! States of a write: queued (in the submission ring) -> with the kernel -> completed -> reaped.
//! Invariant: from `submit` to `reap` the ring owns the buffer and the descriptor, because the
//! kernel reads the one through the other at any time in between. Dropping the ring waits for what
//! is in flight; where even that fails, the memory is leaked, never freed. No locks: one thread
//! uses a ring, only its `Waker`s are shared.
//!
//! The waker is an eventfd that the ring polls. A poll, because the kernel then holds no memory of
//! ours; an eventfd, because it stays readable when it is written before anybody waits, so that no
//! wake is lost and nobody needs a timeout.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::AlignedBuf;

/// The user data of the waker's poll; slots of writes count from 0.
const WAKE: u64 = u64::MAX;

/// How long to wait before the kernel, short of memory, is asked again.
const SHORT_OF_MEMORY: Duration = Duration::from_millis(1);

/// A write for the ring.
#[derive(Debug)]
pub struct RingWrite {
    /// Where to.
    pub fd: Arc<OwnedFd>,
    /// The bytes, and perhaps more around them.
    pub buffer: AlignedBuf,
    /// The part of the buffer that is written.
    pub span: Range<usize>,
    /// The place of `span`'s first byte behind the descriptor.
    pub offset: u64,
    /// Given back with the completion.
    pub token: u64,
}

/// What became of a write.
#[derive(Debug)]
pub struct Completion {
    /// As submitted.
    pub token: u64,
    /// As submitted.
    pub buffer: AlignedBuf,
    /// Bytes written; may be fewer than asked for.
    pub result: io::Result<usize>,
}

struct Flight {
    token: u64,
    buffer: AlignedBuf,
    /// Only kept open.
    _fd: Arc<OwnedFd>,
}

/// Wakes the thread that waits in a ring, now or the next time it waits.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Ends the current or the next `Ring::wait`.
    pub fn wake(&self) {
        // EAGAIN means that the counter is full, hence readable: awake already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// A ring for positioned writes.
pub struct Ring {
    io: IoUring,
    wake: Arc<OwnedFd>,
    /// Whether the kernel polls `wake`.
    armed: bool,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} of {} in flight)", self.in_flight(), self.flights.len())
    }
}

impl Ring {
    /// A ring for `depth` writes at a time. EPERM or ENOSYS where io_uring is refused, and ENOSYS
    /// where it is too old to write (before Linux 5.6).
    pub fn new(depth: u32) -> io::Result<Ring> {
        // One entry more, for the waker's poll.
        let io = IoUring::new(depth.max(1) + 1)?;
        let mut probe = Probe::new();
        let probed = io.submitter().register_probe(&mut probe);
        let needed = [opcode::Write::CODE, opcode::PollAdd::CODE];
        if probed.is_err() || !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(Errno::NOSYS.into());
        }
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let depth = depth.max(1) as usize;
        let flights = std::iter::repeat_with(|| None).take(depth).collect();
        Ok(Ring { io, wake, armed: false, flights, free: (0..depth).collect() })
    }

    /// What wakes the thread that waits here.
    pub fn waker(&self) -> Waker {
        Waker(self.wake.clone())
    }

    /// Writes that may be submitted now.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Writes submitted and not reaped.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Takes a write; `flush` or `wait` hands it to the kernel. Given back if there is no room or
    /// if `span` is empty or not within the buffer.
    pub fn submit(&mut self, write: RingWrite) -> Result<(), RingWrite> {
        let len = write.buffer.get(write.span.clone()).map_or(0, <[u8]>::len);
        let Some(len) = u32::try_from(len).ok().filter(|len| *len > 0) else {
            return Err(write);
        };
        let Some(slot) = self.free.pop() else { return Err(write) };
        let start = write.buffer.as_ptr().wrapping_add(write.span.start);
        let entry = opcode::Write::new(types::Fd(write.fd.as_raw_fd()), start, len)
            .offset(write.offset)
            .build()
            .user_data(slot as u64);
        // SAFETY: `start` and `len` lie within the buffer, whose memory does not move with it; on
        // success both it and the descriptor stay in `flights` until the completion is reaped.
        if !unsafe { self.push(&entry) } {
            self.free.push(slot);
            return Err(write);
        }
        if let Some(place) = self.flights.get_mut(slot) {
            let RingWrite { fd, buffer, token, .. } = write;
            *place = Some(Flight { token, buffer, _fd: fd });
        }
        Ok(())
    }

    /// Queues an entry. False if the ring is full and the kernel takes nothing of it.
    ///
    /// # Safety
    /// What the entry points at must stay valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        if unsafe { self.io.submission().push(entry) }.is_ok() {
            return true;
        }
        // SAFETY: as above; the first push took nothing.
        self.io.submit().is_ok() && unsafe { self.io.submission().push(entry) }.is_ok()
    }

    /// Hands what is queued to the kernel without waiting.
    pub fn flush(&mut self) -> io::Result<()> {
        Ring::entered(self.io.submit())
    }

    /// Hands what is queued to the kernel and waits until there is something to reap or a wake.
    /// May return early. An error is the ring's own and final, not a write's.
    pub fn wait(&mut self) -> io::Result<()> {
        if !self.armed {
            let events = rustix::event::PollFlags::IN.bits();
            let entry = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), events.into())
                .build()
                .user_data(WAKE);
            // SAFETY: a poll points at no memory, and the kernel holds the eventfd itself.
            self.armed = unsafe { self.push(&entry) };
        }
        // Without its waker nobody may sleep.
        let want = usize::from(self.armed);
        Ring::entered(self.io.submit_and_wait(want))
    }

    fn entered(result: io::Result<usize>) -> io::Result<()> {
        match result.map_err(|error| (Errno::from_io_error(&error), error)) {
            Ok(_) | Err((Some(Errno::INTR), _)) => Ok(()),
            Err((Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM), _)) => {
                // Nothing is lost: entries the kernel did not take stay queued.
                std::thread::sleep(SHORT_OF_MEMORY);
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    /// The next completed write, if there is one.
    pub fn reap(&mut self) -> Option<Completion> {
        loop {
            let entry = self.io.completion().next()?;
            if entry.user_data() == WAKE {
                // Cleared before the caller looks for work: a later wake makes it readable again.
                let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
                self.armed = false;
                continue;
            }
            let slot = entry.user_data() as usize;
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let result = match entry.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                written => Ok(written as usize),
            };
            return Some(Completion { token: flight.token, buffer: flight.buffer, result });
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            while self.reap().is_some() {}
            if self.in_flight() > 0 && self.wait().is_err() {
                // The kernel may still read these buffers: they are not ours to free.
                std::mem::forget(std::mem::take(&mut self.flights));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    fn write(fd: &Arc<OwnedFd>, bytes: &[u8], offset: u64, token: u64) -> RingWrite {
        let mut buffer = AlignedBuf::new(bytes.len());
        buffer.copy_from_slice(bytes);
        RingWrite { fd: fd.clone(), buffer, span: 0..bytes.len(), offset, token }
    }

    /// A full pipe: a ring's write into it does not end before somebody reads.
    fn full_pipe() -> (io::PipeReader, Arc<OwnedFd>) {
        let (reader, writer) = io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
        rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&writer, &[1; 4096]).is_ok() {}
        rustix::fs::fcntl_setfl(&writer, flags).unwrap();
        (reader, Arc::new(writer))
    }

    #[test]
    fn writes_complete_with_their_tokens_and_buffers() {
        let Ok(mut ring) = Ring::new(4) else { return };
        let mut file = tempfile::tempfile().unwrap();
        let fd = Arc::new(OwnedFd::from(file.try_clone().unwrap()));
        for token in 0..4 {
            ring.submit(write(&fd, &[token as u8 + 1; 100], token * 100, token)).unwrap();
        }
        let fifth = ring.submit(write(&fd, b"x", 0, 9)).unwrap_err();
        assert_eq!((fifth.token, &fifth.buffer[..], ring.room()), (9, &b"x"[..], 0));
        let mut seen = Vec::new();
        while ring.in_flight() > 0 {
            ring.wait().unwrap();
            while let Some(done) = ring.reap() {
                assert_eq!((done.result.unwrap(), done.buffer.len()), (100, 100));
                assert_eq!(done.buffer[0], done.token as u8 + 1);
                seen.push(done.token);
            }
        }
        seen.sort();
        assert_eq!(seen, [0, 1, 2, 3]);
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        let expected: Vec<u8> = (0..400).map(|i| (i / 100 + 1) as u8).collect();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn errors_and_bad_spans_come_back() {
        let Ok(mut ring) = Ring::new(1) else { return };
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let full = Arc::new(OwnedFd::from(full));
        let mut bad = write(&full, b"abc", 0, 1);
        bad.span = 1..4;
        let bad = ring.submit(bad).unwrap_err();
        ring.submit(RingWrite { span: 1..3, ..bad }).unwrap();
        let done = loop {
            ring.wait().unwrap();
            if let Some(done) = ring.reap() {
                break done;
            }
        };
        assert_eq!(done.result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn a_wake_ends_the_wait_whether_it_comes_before_or_during() {
        let Ok(mut ring) = Ring::new(1) else { return };
        let waker = ring.waker();
        for _ in 0..3 {
            waker.wake();
            ring.wait().unwrap();
            assert!(ring.reap().is_none());
        }
        let other = std::thread::spawn(move || waker.wake());
        ring.wait().unwrap();
        other.join().unwrap();
    }

    #[test]
    fn dropping_waits_for_what_is_in_flight() {
        let Ok(mut ring) = Ring::new(2) else { return };
        let (mut reader, writer) = full_pipe();
        ring.submit(write(&writer, b"the end", 0, 1)).unwrap();
        ring.flush().unwrap();
        drop(writer);
        let dropping = std::thread::spawn(move || drop(ring));
        // Whatever was dropped too early would be missing here: end of file comes only after the
        // ring has let go of the descriptor.
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        dropping.join().unwrap();
        assert!(bytes.ends_with(b"\x01the end"), "{} bytes", bytes.len());
    }
}
