//! One write on its way home: filled once, written in parts, told once.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::{BlockDevice, RawTarget};
use crate::error::{Error, Kind, Result};
use crate::sys::AlignedBuf;

/// Fills a job's bytes.
type Fill = Box<dyn FnOnce(&mut [u8]) -> Result<()> + Send>;

/// Is told a job's outcome.
type Tell = Box<dyn FnOnce(Result<()>, &[u8]) + Send>;

/// A write of one device.
pub(crate) struct Job {
    /// Where to.
    pub(crate) device: Arc<dyn BlockDevice>,
    /// The first byte there.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: usize,
    /// Fills the buffer (reads the journal), on a worker.
    pub(crate) fill: Fill,
    /// Is told the outcome, on a worker, with the bytes that were to be written (none if `fill`
    /// failed). A panic in here is logged and nothing else.
    pub(crate) done: Tell,
}

/// What workers do.
pub(crate) enum Task {
    /// A write.
    Write(Job),
    /// Something that may take long: a sync, a truncate.
    Call(Box<dyn FnOnce() + Send>),
}

impl Job {
    /// Whether any of it is aligned for a direct write.
    pub(super) fn has_middle(&self, raw: &RawTarget) -> bool {
        !middle(self.offset + raw.offset, self.len, raw.align).is_empty()
    }

    /// Tells of a failure before anything was fetched.
    pub(super) fn fail(self, error: Error) {
        Done(Some(self.done)).tell(Err(error), &[]);
    }
}

/// The part of `len` bytes at `place` that is aligned at both ends, counted from `place`.
fn middle(place: u64, len: usize, align: u64) -> Range<usize> {
    let end = place.saturating_add(len as u64);
    let (first, last) = (place.next_multiple_of(align.max(1)), end - end % align.max(1));
    if first >= last {
        return 0..0;
    }
    (first - place) as usize..(last - place) as usize
}

/// Says "failed" where it is dropped untold, so that no job is ever lost.
struct Done(Option<Tell>);

impl Done {
    fn tell(mut self, result: Result<()>, bytes: &[u8]) {
        self.tell_once(result, bytes);
    }

    fn tell_once(&mut self, result: Result<()>, bytes: &[u8]) {
        if let Some(tell) = self.0.take() {
            fenced("done", || tell(result, bytes)).unwrap_or_else(|error| log::error!("{error}"));
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tell_once(Err(Error::new(Kind::Internal, "write home", "abandoned")), &[]);
    }
}

/// Runs what came from outside; its panic is an error.
pub(super) fn fenced<T>(what: &str, run: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|_| Error::new(Kind::Internal, "write home", format!("panic in {what}")))
}

/// A job with its bytes. They lie so that what is aligned on the device is aligned in memory.
pub(super) struct Filled {
    device: Arc<dyn BlockDevice>,
    offset: u64,
    buffer: AlignedBuf,
    /// The job's bytes within the buffer.
    bytes: Range<usize>,
    /// What is left to write of the buffer: any number of runs, in any order.
    left: Vec<Range<usize>>,
    done: Done,
}

impl Filled {
    /// Fetches the bytes for a device whose byte 0 lies at `base` of what is aligned to `align`.
    /// None if that failed; then all is told.
    pub(super) fn fill(job: Job, base: u64, align: u64) -> Option<Filled> {
        let Job { device, offset, len, fill, done } = job;
        let done = Done(Some(done));
        let lead = ((base + offset) % align.max(1)) as usize;
        let bytes = lead..lead + len;
        let mut buffer = AlignedBuf::lend(bytes.end);
        let room = buffer.get_mut(bytes.clone()).unwrap_or_default();
        match fenced("fill", || fill(room)).and_then(|result| result) {
            Ok(()) => {
                let left = vec![bytes.clone()];
                Some(Filled { device, offset, buffer, bytes, left, done })
            }
            Err(error) => {
                done.tell(Err(error), &[]);
                None
            }
        }
    }

    /// Takes the aligned middle out of what is left: where it lies in the buffer and behind the
    /// descriptor. None if there is none.
    pub(super) fn take_middle(&mut self, raw: &RawTarget) -> Option<(Range<usize>, u64)> {
        let place = raw.offset + self.offset;
        let middle = middle(place, self.bytes.len(), raw.align);
        if middle.is_empty() {
            return None;
        }
        let at = place + middle.start as u64;
        let middle = self.bytes.start + middle.start..self.bytes.start + middle.end;
        self.left = vec![self.bytes.start..middle.start, middle.end..self.bytes.end];
        self.left.retain(|run| !run.is_empty());
        Some((middle, at))
    }

    /// Takes the buffer out for the ring; `put_buffer` must follow.
    pub(super) fn take_buffer(&mut self) -> AlignedBuf {
        std::mem::replace(&mut self.buffer, AlignedBuf::new(0))
    }

    pub(super) fn put_buffer(&mut self, buffer: AlignedBuf) {
        self.buffer = buffer;
    }

    /// Puts a run of the buffer back to what is left.
    pub(super) fn put_back(&mut self, run: Range<usize>) {
        self.left.push(run);
    }

    /// Whether all is written.
    pub(super) fn is_written(&self) -> bool {
        self.left.is_empty()
    }

    /// Writes what is left through the device and tells the outcome.
    pub(super) fn write_rest(mut self) {
        let result = std::mem::take(&mut self.left).into_iter().try_for_each(|run| {
            let offset = self.offset + (run.start - self.bytes.start) as u64;
            let bytes = self.buffer.get(run).unwrap_or_default();
            fenced("write", || self.device.write_home(bytes, offset)).and_then(|result| result)
        });
        self.tell(result);
    }

    /// Tells the outcome.
    pub(super) fn tell(self, result: Result<()>) {
        let Filled { buffer, bytes, done, .. } = self;
        done.tell(result, buffer.get(bytes).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_what_is_aligned_at_both_ends() {
        for (place, len, expected) in [
            (0, 8192, 0..8192),
            (1, 8191, 4095..8191),
            (4095, 4097, 1..4097),
            (4095, 4098, 1..4097),
            (4097, 4095, 0..0),
            (4097, 8191, 4095..8191),
            (4097, 8190, 0..0),
            (4096, 4095, 0..0),
            (0, 0, 0..0),
            (8192, 4096, 0..4096),
        ] {
            let found = middle(place, len, 4096);
            assert!(found == expected || found.is_empty() && expected.is_empty(), "{place} {len}");
        }
    }
}
