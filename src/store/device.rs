//! One device of the store: its bytes, its tag in the cache, and its size.
//!
//! Reads: clamp at the size, plan (admission), the cache, then the device. Writes: take the range,
//! write the device, note the size, then bring the cache up to date; a failed write leaves unknown
//! bytes, so the cache forgets the range. The size is ours while a handle is open: `version` counts
//! our own changes, so that an attribute read that raced with one never sets an old size back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;

use super::Shared;
use super::ranges::Ranges;
use crate::cache::{CacheDevice, Fetch, Plan, Verdict};
use crate::config::CacheMode;
use crate::device::{BlockDevice, Range};
use crate::error::Result;
use crate::units::Extent;

/// The size and how often we changed it.
#[derive(Debug)]
struct Size {
    bytes: u64,
    version: u64,
}

/// An open device.
pub struct Device {
    shared: Arc<Shared>,
    cached: Arc<CacheDevice>,
    file: Arc<dyn BlockDevice>,
    size: Mutex<Size>,
    ranges: Ranges,
    /// Something on it changed since its last full sync.
    unsynced: AtomicBool,
    /// We changed it: its stamp must be taken anew.
    touched: AtomicBool,
}

/// A read request that has been admitted (or not) and clamped.
pub struct ReadPlan {
    offset: u64,
    len: usize,
    admission: Admission,
}

enum Admission {
    /// Through the cache, under this verdict.
    Cached(Plan),
    /// The cache is off.
    Off,
}

impl ReadPlan {
    /// Bytes the read will return.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it lies behind the end of the device.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What to read ahead, if the request belongs to a stream.
    pub fn readahead(&self) -> Option<Extent> {
        match &self.admission {
            Admission::Cached(plan) => plan.readahead,
            Admission::Off => None,
        }
    }
}

/// The device as the cache fetches from it.
struct Source<'a>(&'a dyn BlockDevice);

impl Fetch for Source<'_> {
    fn fetch(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.0.read_at(buf, offset)
    }
}

impl Device {
    pub(super) fn new(
        shared: Arc<Shared>,
        cached: Arc<CacheDevice>,
        file: Arc<dyn BlockDevice>,
        size: u64,
    ) -> Device {
        Device {
            shared,
            cached,
            file,
            size: Mutex::new(Size { bytes: size, version: 0 }),
            ranges: Ranges::default(),
            // What an earlier handle wrote may not be durable.
            unsynced: AtomicBool::new(true),
            touched: AtomicBool::new(false),
        }
    }

    pub(super) fn cached(&self) -> &Arc<CacheDevice> {
        &self.cached
    }

    pub(super) fn is_touched(&self) -> bool {
        self.touched.load(Relaxed)
    }

    /// Whether we changed it since the last time; asked before its stamp is taken.
    pub(super) fn take_touched(&self) -> bool {
        self.touched.swap(false, Relaxed)
    }

    /// The device's tag.
    pub fn unit(&self) -> u32 {
        self.cached.id.0
    }

    /// Opens what reading or writing needs.
    pub fn prepare(&self, write: bool) -> Result<()> {
        self.file.prepare(write)
    }

    /// The size in bytes, as we know it.
    pub fn size(&self) -> u64 {
        self.size.lock().bytes
    }

    /// A mark for `observe`: taken before the attributes are read.
    pub fn size_version(&self) -> u64 {
        self.size.lock().version
    }

    /// The attributes say this size. If we did not change it since `version`, somebody else did:
    /// the blocks around the end are not what they were.
    pub fn observe(&self, bytes: u64, version: u64) {
        let mut size = self.size.lock();
        if size.version != version || size.bytes == bytes {
            return;
        }
        let old = std::mem::replace(&mut size.bytes, bytes);
        drop(size);
        let from = old.min(bytes);
        let block = u64::from(self.shared.block_size);
        let start = from - from % block;
        self.shared.cache.invalidate(&self.cached, Extent { offset: start, len: u64::MAX - start });
    }

    /// Somebody else changed the bytes while a handle is open.
    pub(super) fn changed_behind(&self, bytes: u64) {
        self.size.lock().bytes = bytes;
        self.shared.cache.invalidate(&self.cached, Extent { offset: 0, len: u64::MAX });
    }

    /// Admits a read request. Call once per request, then `try_cached`, then `read`.
    pub fn plan_read(&self, offset: u64, len: usize) -> ReadPlan {
        let size = self.size();
        let len = size.saturating_sub(offset).min(len as u64);
        let shared = &self.shared;
        if len > 0 && shared.trace.is_on() {
            let block = u64::from(shared.block_size);
            let first = offset / block;
            shared.trace.record(self.unit(), first, (offset + len).div_ceil(block) - first);
        }
        let admission = if shared.tunables.cache_mode() == CacheMode::None {
            Admission::Off
        } else {
            let plan = shared.cache.plan(&self.cached, offset, len, size, &shared.tunables);
            Admission::Cached(plan)
        };
        ReadPlan { offset, len: len as usize, admission }
    }

    /// Answers from the cache alone, or not at all. `out` is `plan.len()` bytes.
    pub fn try_cached(&self, plan: &ReadPlan, out: &mut [u8]) -> bool {
        match &plan.admission {
            Admission::Cached(admission) => {
                let expire_ms = self.shared.tunables.expire_ms();
                self.shared.cache.try_read(&self.cached, admission, plan.offset, out, expire_ms)
            }
            Admission::Off => false,
        }
    }

    /// Answers from cache and device. Errors: what the device said, for just those blocks.
    pub fn read(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<()> {
        let source = Source(&*self.file);
        let result = match &plan.admission {
            Admission::Cached(admission) => {
                let expire_ms = self.shared.tunables.expire_ms();
                let cache = &self.shared.cache;
                cache.read(&self.cached, admission, plan.offset, out, expire_ms, &source)
            }
            Admission::Off => self.read_uncached(plan, out),
        };
        if result.is_err() {
            self.cached.stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    fn read_uncached(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<()> {
        let block = u64::from(self.shared.block_size);
        let blocks = (plan.offset + plan.len as u64).div_ceil(block) - plan.offset / block;
        let stats = &self.cached.stats;
        stats.ops.fetch_add(1, Relaxed);
        stats.bypasses.fetch_add(1, Relaxed);
        stats.bypassed.fetch_add(blocks, Relaxed);
        stats.backing_blocks.fetch_add(blocks, Relaxed);
        stats.backing_reads.fetch_add(1, Relaxed);
        stats.read_bytes.fetch_add(plan.len as u64, Relaxed);
        let got = self.file.read_at(out, plan.offset)?;
        if let Some(rest) = out.get_mut(got..) {
            rest.fill(0);
        }
        Ok(())
    }

    /// Reads ahead of a stream (worker threads only).
    pub fn prefetch(&self, extent: Extent) {
        self.shared.cache.prefetch(&self.cached, extent, &Source(&*self.file));
    }

    fn note_change(&self) {
        self.unsynced.store(true, Relaxed);
        self.touched.store(true, Relaxed);
    }

    /// Writes `data` at `offset` to the device and brings the cache up to date.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let len = data.len() as u64;
        let stats = &self.cached.stats;
        stats.writes.fetch_add(1, Relaxed);
        stats.written_bytes.fetch_add(len, Relaxed);
        let _range = self.ranges.lock(offset, len);
        self.note_change();
        if let Err(error) = self.file.write_at(data, offset) {
            stats.errors.fetch_add(1, Relaxed);
            self.shared.cache.invalidate(&self.cached, Extent { offset, len });
            return Err(error);
        }
        let size = self.grow(offset + len);
        match self.shared.tunables.cache_mode() {
            CacheMode::Writeback | CacheMode::Writethrough => {
                let verdict =
                    self.shared.cache.plan_write(&self.cached, offset, len, &self.shared.tunables);
                let insert = matches!(verdict, Verdict::Insert);
                self.shared.cache.update(&self.cached, offset, data, insert, size);
            }
            CacheMode::Writearound | CacheMode::None => {
                self.shared.cache.invalidate(&self.cached, Extent { offset, len });
            }
        }
        Ok(())
    }

    fn grow(&self, end: u64) -> u64 {
        let mut size = self.size.lock();
        size.version += 1;
        size.bytes = size.bytes.max(end);
        size.bytes
    }

    /// Truncates or extends the device.
    pub fn set_size(&self, bytes: u64) -> Result<()> {
        let _range = self.ranges.lock(0, u64::MAX);
        self.note_change();
        self.file.set_size(bytes)?;
        let mut size = self.size.lock();
        size.version += 1;
        size.bytes = bytes;
        drop(size);
        self.shared.cache.set_size(&self.cached, bytes);
        Ok(())
    }

    /// Allocates, punches or zeroes a range.
    pub fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        let _range = self.ranges.lock(offset, len);
        self.note_change();
        let result = self.file.change_range(what, offset, len);
        if !matches!(what, Range::Allocate | Range::AllocateGrow) {
            self.shared.cache.invalidate(&self.cached, Extent { offset, len });
        }
        result?;
        if matches!(what, Range::AllocateGrow | Range::ZeroGrow) {
            self.grow(offset + len);
        }
        Ok(())
    }

    /// Makes everything durable; free if nothing changed since the last time.
    pub fn sync(&self, data_only: bool) -> Result<()> {
        if data_only && !self.unsynced.load(Relaxed) {
            return Ok(());
        }
        self.cached.stats.syncs.fetch_add(1, Relaxed);
        // Cleared first: a write that comes in meanwhile sets it again. A failure sets it back,
        // though the bytes may be lost: the caller is told, never a false success.
        self.unsynced.store(false, Relaxed);
        let result = self.file.sync(data_only);
        if result.is_err() {
            self.unsynced.store(true, Relaxed);
            self.cached.stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// The next data or hole.
    pub fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.file.seek(offset, hole)
    }
}
