//! The data path: reads, writes, sizes, ranges, syncs of regular files.

use std::sync::Arc;

use super::Fs;
use crate::device::Range;
use crate::error::{Error, Kind, Result};
use crate::store::{Device, ReadPlan};
use crate::sys::AlignedBuf;
use crate::sys::flags::{
    FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE, SEEK_DATA, SEEK_HOLE,
};
use crate::tree::NodeId;

/// copy_file_range goes through the store in steps of this many bytes.
const COPY_STEP: usize = 1 << 20;

/// Where a read wants its bytes from.
#[derive(Clone, Copy, Debug)]
pub struct ReadPlace {
    /// The file.
    pub node: NodeId,
    /// Its handle, a hint.
    pub fh: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes at most.
    pub len: usize,
}

/// A read that the cache alone could not answer: it must go to the device, here or on another
/// thread.
pub struct Read {
    device: Arc<Device>,
    plan: ReadPlan,
}

impl Read {
    /// Bytes it will return.
    pub fn len(&self) -> usize {
        self.plan.len()
    }

    /// Whether it returns nothing.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// Reads; `out` is `len()` bytes.
    pub fn run(&self, out: &mut [u8]) -> Result<()> {
        self.device.read(&self.plan, out)
    }
}

impl Fs {
    /// Runs `work` on a file's device: the handle's, else one opened for this request alone.
    pub(super) fn with_device<T>(
        &self,
        node: NodeId,
        fh: Option<u64>,
        write: bool,
        work: impl FnOnce(&Arc<Device>) -> Result<T>,
    ) -> Result<T> {
        if let Some(device) = fh.and_then(|fh| self.handles.device(fh, node)) {
            return work(&device);
        }
        let (handle, _) = self.handle(node, self.tree.open(node, write)?, write, false)?;
        let result = work(&handle.device);
        self.close_file(&handle);
        result
    }

    /// Reads what the cache holds. Ok(n): answered, n bytes of `out`. Err(read): it must go to the
    /// device; read-ahead of its stream has been queued.
    pub fn read(
        &self,
        place: ReadPlace,
        out: &mut [u8],
    ) -> Result<std::result::Result<usize, Read>> {
        self.with_device(place.node, Some(place.fh), false, |device| {
            let plan = device.plan_read(place.offset, place.len.min(out.len()));
            let len = plan.len();
            let ahead = plan.readahead();
            let answered = plan.is_empty()
                || out.get_mut(..len).is_some_and(|out| device.try_cached(&plan, out));
            if let Some(extent) = ahead {
                let device = device.clone();
                self.pool.offer(move || device.prefetch(extent));
            }
            Ok(if answered { Ok(len) } else { Err(Read { device: device.clone(), plan }) })
        })
    }

    /// Writes all of `data`.
    pub fn write(&self, node: NodeId, fh: u64, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Error::new(Kind::Invalid, "write", "past the largest file"));
        }
        self.with_device(node, Some(fh), true, |device| device.write(offset, data))
    }

    /// Whether a write of so many bytes would wait for room in the journal now.
    pub fn write_would_wait(&self, len: usize) -> bool {
        self.store.would_wait(len as u64)
    }

    /// Makes a file durable, with a journal its new names too.
    pub fn sync(&self, node: NodeId, fh: u64, data_only: bool) -> Result<()> {
        self.sync_names_of(node)?;
        self.tree.sync_attr(node)?;
        self.with_device(node, Some(fh), false, |device| device.sync(data_only))
    }

    /// fallocate(2), as far as the kernel passes it.
    pub fn fallocate(&self, node: NodeId, fh: u64, offset: u64, len: u64, mode: i32) -> Result<()> {
        const PUNCH: i32 = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        const ZERO_KEEP: i32 = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;
        let what = match mode {
            0 => Range::AllocateGrow,
            FALLOC_FL_KEEP_SIZE => Range::Allocate,
            PUNCH => Range::Punch,
            ZERO_KEEP => Range::ZeroKeep,
            FALLOC_FL_ZERO_RANGE => Range::ZeroGrow,
            _ => return Err(Error::new(Kind::NotSupported, "fallocate", format!("{mode:#x}"))),
        };
        self.with_device(node, Some(fh), true, |device| device.change_range(what, offset, len))
    }

    /// lseek(2) to data or hole.
    pub fn seek(&self, node: NodeId, fh: u64, offset: u64, whence: i32) -> Result<u64> {
        let hole = match whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return Err(Error::new(Kind::Invalid, "lseek", format!("whence {whence}"))),
        };
        self.with_device(node, Some(fh), false, |device| device.seek(offset, hole))
    }

    /// copy_file_range(2): the bytes copied, fewer at the end of the input.
    pub fn copy_range(
        &self,
        from: (NodeId, u64, u64),
        to: (NodeId, u64, u64),
        len: u64,
    ) -> Result<u64> {
        let mut buf = AlignedBuf::lend(COPY_STEP.min(len as usize));
        let mut done = 0;
        while done < len {
            let want = (len - done).min(buf.len() as u64) as usize;
            let got = self.read_now(from, done, buf.get_mut(..want).unwrap_or_default());
            let got = match got {
                Err(error) if done == 0 => return Err(error),
                Err(_) | Ok(0) => break,
                Ok(got) => got,
            };
            let data = buf.get(..got).unwrap_or_default();
            match self.write(to.0, to.1, to.2 + done, data) {
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
                Ok(()) => done += got as u64,
            }
        }
        Ok(done)
    }

    fn read_now(&self, from: (NodeId, u64, u64), skip: u64, out: &mut [u8]) -> Result<usize> {
        let (node, fh, offset) = from;
        let place = ReadPlace { node, fh, offset: offset + skip, len: out.len() };
        match self.read(place, out)? {
            Ok(got) => Ok(got),
            Err(read) => {
                let len = read.len();
                read.run(out.get_mut(..len).unwrap_or_default())?;
                Ok(len)
            }
        }
    }
}
