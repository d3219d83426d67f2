//! Writing home: the aligned middle around the host's page cache, ragged ends through it.
//!
//! States of a file: unknown (nothing written home yet) -> direct | buffered, both final, except
//! that a direct file that refuses a write becomes buffered. `unknown` ends in the first
//! `write_home`, not in `raw`: an open may hang on a network filesystem, and whoever asks for the
//! target must not. Lock: `state`, held to copy it in or out; a leaf.
//!
//! The alignment is at least a page. With less, a ragged end and a direct write could meet in one
//! page, and the page's write-out would put back the old bytes under the direct write.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, OFlags, StatxFlags, statx};
use rustix::io::Errno;

use super::super::RawTarget;
use super::{FileDevice, Which, write_all};
use crate::error::Result;
use crate::sys::AlignedBuf;
use crate::sys::aligned::DIRECT_ALIGN;

/// Most bytes copied to aligned memory at a time.
const COPY_STEP: usize = 1 << 20;

#[derive(Clone, Default)]
enum State {
    #[default]
    Unknown,
    Direct(Target),
    Buffered,
}

#[derive(Clone)]
struct Target {
    fd: Arc<OwnedFd>,
    align: u64,
}

/// How a file is written home.
#[derive(Default)]
pub(super) struct Home {
    state: Mutex<State>,
    /// Whether there is something in the page cache whose write-out was not started.
    buffered: AtomicBool,
}

impl Home {
    pub(super) fn raw(&self) -> Option<RawTarget> {
        match &*self.state.lock() {
            State::Direct(Target { fd, align }) => {
                Some(RawTarget { fd: fd.clone(), offset: 0, align: *align })
            }
            State::Unknown | State::Buffered => None,
        }
    }

    /// Takes a descriptor for one that takes direct writes of any `align`.
    #[cfg(test)]
    pub(super) fn claim(&self, fd: Arc<OwnedFd>, align: u64) {
        *self.state.lock() = State::Direct(Target { fd, align });
    }

    /// Whether anything was written through the page cache since the last call.
    pub(super) fn take_buffered(&self) -> bool {
        self.buffered.swap(false, AcqRel)
    }
}

impl FileDevice {
    /// `write_home`: direct as far as the file and the alignment of the range allow.
    pub(super) fn write_around_cache(&self, data: &[u8], offset: u64) -> Result<()> {
        // Before any write: `sync` must have been open then, to hear of its failure.
        let buffered = self.fd(Which::Write)?;
        let Some(target) = self.home_target()? else {
            return self.write_buffered(&buffered, data, offset);
        };
        let (head, middle) = data.split_at(head_len(offset, data.len(), target.align));
        let (middle, tail) = middle.split_at(middle.len() - middle.len() % target.align as usize);
        let start = offset + head.len() as u64;
        match write_direct(&target.fd, middle, start) {
            // Some filesystems take O_DIRECT at open and refuse it at the first write.
            Err(error) if error.errno() == Errno::INVAL.raw_os_error() => {
                self.direct_refused()?;
                *self.home.state.lock() = State::Buffered;
                self.write_buffered(&buffered, middle, start)?;
            }
            other => other?,
        }
        self.write_buffered(&buffered, head, offset)?;
        self.write_buffered(&buffered, tail, start + middle.len() as u64)
    }

    fn write_buffered(&self, fd: &OwnedFd, data: &[u8], offset: u64) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // Also where it fails: a part may have arrived.
        self.home.buffered.store(true, Release);
        write_all(fd, data, offset)
    }

    /// The descriptor for direct writes; None where all is buffered.
    fn home_target(&self) -> Result<Option<Target>> {
        if !self.is_direct() {
            return Ok(None);
        }
        match &*self.home.state.lock() {
            State::Unknown => {}
            State::Direct(target) => return Ok(Some(target.clone())),
            State::Buffered => return Ok(None),
        }
        // Opened without the lock: of two that race here one descriptor is closed again.
        let next = match self.open_target() {
            Ok(Some(target)) => State::Direct(target),
            Ok(None) => State::Buffered,
            Err(Errno::INVAL) => {
                self.direct_refused()?;
                State::Buffered
            }
            // The rights were taken away since `prepare`; its descriptor still writes.
            Err(Errno::ACCESS | Errno::PERM) => State::Buffered,
            // Out of descriptors and the like: buffered now, direct perhaps next time.
            Err(_) => State::Unknown,
        };
        let mut state = self.home.state.lock();
        if matches!(*state, State::Unknown) {
            *state = next;
        }
        Ok(match &*state {
            State::Direct(target) => Some(target.clone()),
            State::Unknown | State::Buffered => None,
        })
    }

    fn open_target(&self) -> rustix::io::Result<Option<Target>> {
        let fd = match (self.opener)(OFlags::RDWR | OFlags::DIRECT) {
            Err(Errno::ACCESS) => (self.opener)(OFlags::WRONLY | OFlags::DIRECT)?,
            other => other?,
        };
        Ok(alignment(&fd).map(|align| Target { fd: Arc::new(fd), align }))
    }
}

/// What a direct write's place, length and memory must be multiples of; None where the file takes
/// no direct writes, or none from memory aligned as ours is.
fn alignment(fd: &OwnedFd) -> Option<u64> {
    let page = rustix::param::page_size().max(DIRECT_ALIGN) as u64;
    let Ok(stat) = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Some(page);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(page);
    }
    let (memory, place) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    let fits = place > 0 && memory > 0 && DIRECT_ALIGN.is_multiple_of(memory as usize);
    fits.then(|| u64::from(place).next_multiple_of(page))
}

/// Bytes before the first aligned place of a range, at most all of them.
fn head_len(offset: u64, len: usize, align: u64) -> usize {
    let head = offset.next_multiple_of(align) - offset;
    usize::try_from(head).unwrap_or(usize::MAX).min(len)
}

/// Writes an aligned range, from aligned memory: the caller's if it is, else copies.
pub(super) fn write_direct(fd: &OwnedFd, data: &[u8], offset: u64) -> Result<()> {
    if (data.as_ptr() as usize).is_multiple_of(DIRECT_ALIGN) {
        return write_all(fd, data, offset);
    }
    let mut done = 0;
    for part in data.chunks(COPY_STEP) {
        let mut aligned = AlignedBuf::lend(part.len());
        aligned.copy_from_slice(part);
        write_all(fd, &aligned, offset + done)?;
        done += part.len() as u64;
    }
    Ok(())
}
