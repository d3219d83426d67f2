//! One device of the store: its bytes, its tag in the cache, and its size.
//!
//! Reads: clamp at the size, plan (admission), the dirty map (`merge`), the cache, then the device.
//! Writes go to the journal (`journaled`) or, here, to the device: take the range, write the
//! device, note the size, then bring the cache up to date; a failed write leaves unknown bytes, so
//! the cache forgets the range. The size is ours while a handle is open: `version` counts our own
//! changes, so that an attribute read that raced with one never sets an old size back.

use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::guard::Dirty;
use super::journaled::Journaled;
use super::ranges::Ranges;
use crate::cache::{CacheDevice, Fetch, Plan, Verdict};
use crate::config::CacheMode;
use crate::device::{BlockDevice, Range};
use crate::error::Result;
use crate::units::{Extent, Identity};

/// The size and how often we changed it.
#[derive(Debug)]
struct Size {
    bytes: u64,
    version: u64,
}

/// An open device, or a closed one that is dirty.
pub struct Device {
    /// Itself, for the list of dirty devices.
    pub(super) me: Weak<Device>,
    pub(super) shared: Arc<Shared>,
    pub(super) cached: Arc<CacheDevice>,
    pub(super) file: Arc<dyn BlockDevice>,
    pub(super) identity: Identity,
    size: Mutex<Size>,
    ranges: Ranges,
    /// Something on it changed outside the journal since its last full sync.
    pub(super) unsynced: AtomicBool,
    /// A sync of its file is being made for somebody: others wait, and look again.
    pub(super) file_sync: (Mutex<bool>, Condvar),
    /// Writeback's sync failed, and the error may be of changes outside the journal: the kernel
    /// tells it once, so the next fsync must (J11).
    pub(super) lost: AtomicBool,
    /// We changed it: its stamp must be taken anew.
    touched: AtomicBool,
    /// What of it is in the journal.
    pub(super) dirty: Dirty,
    /// Whether the dirty map has a piece; changed under `dirty`, read without.
    pub(super) has_pieces: AtomicBool,
    /// Whether the dirty map is not clean; changed under `dirty`, read without.
    pub(super) is_dirty: AtomicBool,
    /// What the controller thinks of further writes: see `Admission`.
    pub(super) admission: AtomicU8,
    /// Whether its file was told that it is dirty; changed under `telling`.
    pub(super) told: AtomicBool,
    pub(super) telling: Mutex<()>,
    /// Requests that wait for it to be clean.
    pub(super) flushing: AtomicU32,
    /// When the frontend last used it, in ms of our clock plus one; 0: never.
    pub(super) frontend_ms: AtomicU64,
}

/// A read request that has been admitted (or not) and clamped.
pub struct ReadPlan {
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) admission: Admission,
}

pub(super) enum Admission {
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
pub(super) struct Source<'a>(pub(super) &'a dyn BlockDevice);

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
        identity: Identity,
        size: u64,
    ) -> Arc<Device> {
        Arc::new_cyclic(|me| Device {
            me: me.clone(),
            dirty: Dirty::new(shared.clone(), Journaled::new(size)),
            shared,
            cached,
            file,
            identity,
            size: Mutex::new(Size { bytes: size, version: 0 }),
            ranges: Ranges::default(),
            // What an earlier handle wrote may not be durable.
            unsynced: AtomicBool::new(true),
            file_sync: Default::default(),
            lost: AtomicBool::new(false),
            touched: AtomicBool::new(false),
            has_pieces: AtomicBool::new(false),
            is_dirty: AtomicBool::new(false),
            admission: AtomicU8::new(0),
            told: AtomicBool::new(false),
            telling: Mutex::new(()),
            flushing: AtomicU32::new(0),
            frontend_ms: AtomicU64::new(0),
        })
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
        if self.is_dirty.load(SeqCst) {
            // The source has not heard of it yet.
            return;
        }
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

    /// All of its bytes are others, by something that was not a write.
    pub fn reverted(&self) {
        if let Ok(bytes) = self.file.size() {
            self.changed_behind(bytes);
        }
    }

    /// Admits a read request. Call once per request, then `try_cached`, then `read`.
    pub fn plan_read(&self, offset: u64, len: usize) -> ReadPlan {
        self.used();
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

    /// Answers from journal and cache alone, or not at all. `out` is `plan.len()` bytes.
    pub fn try_cached(&self, plan: &ReadPlan, out: &mut [u8]) -> bool {
        if self.has_pieces.load(SeqCst)
            && let Some(answered) = self.try_dirty(plan, out)
        {
            return answered;
        }
        match &plan.admission {
            Admission::Cached(admission) => {
                let expire_ms = self.shared.tunables.expire_ms();
                self.shared.cache.try_read(&self.cached, admission, plan.offset, out, expire_ms)
            }
            Admission::Off => false,
        }
    }

    /// Answers from journal, cache and device. Errors: what the device said, for just those
    /// blocks.
    pub fn read(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<()> {
        let known = if self.has_pieces.load(SeqCst) { self.known(plan) } else { Vec::new() };
        let result = if known.is_empty() {
            self.read_clean(plan, out)
        } else {
            self.read_merged(plan, known, out)
        };
        if result.is_err() {
            self.cached.stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// Answers from cache and device.
    pub(super) fn read_clean(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<()> {
        match &plan.admission {
            Admission::Cached(admission) => {
                let expire_ms = self.shared.tunables.expire_ms();
                let (cache, source) = (&self.shared.cache, Source(&*self.file));
                cache.read(&self.cached, admission, plan.offset, out, expire_ms, &source)
            }
            Admission::Off => self.read_uncached(plan, out),
        }
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

    /// The frontend uses it: writeback gives way.
    pub(super) fn used(&self) {
        self.frontend_ms.store(crate::clock::now_ms() + 1, Relaxed);
    }

    pub(super) fn note_change(&self) {
        self.unsynced.store(true, SeqCst);
        self.touched.store(true, Relaxed);
    }

    /// We changed it, or will when it goes home: its stamp is taken anew.
    pub(super) fn note_touch(&self) {
        self.touched.store(true, Relaxed);
    }

    /// Something of it changed outside the journal (a name, attributes): the next fsync syncs the
    /// file too.
    pub fn note_unsynced(&self) {
        self.unsynced.store(true, SeqCst);
    }

    /// Writes `data` at `offset`, to the journal or to the device, and brings the cache up to date.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let stats = &self.cached.stats;
        stats.writes.fetch_add(1, Relaxed);
        stats.written_bytes.fetch_add(data.len() as u64, Relaxed);
        let result = match self.shared.writeback() {
            Some(writeback) => self.write_with(writeback, offset, data),
            None => self.write_through(offset, data),
        };
        if result.is_err() {
            stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// Writes to the device.
    pub(super) fn write_through(&self, offset: u64, data: &[u8]) -> Result<()> {
        let len = data.len() as u64;
        let _range = self.ranges.lock(offset, len);
        self.note_change();
        let written = self.file.write_at(data, offset);
        // Again: a sync may have begun before the change and cleared the note.
        self.note_change();
        if let Err(error) = written {
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
        // Last: where it fails the change is made all the same, and size and cache know it.
        self.file.settle()
    }

    pub(super) fn grow(&self, end: u64) -> u64 {
        let mut size = self.size.lock();
        size.version += 1;
        size.bytes = size.bytes.max(end);
        size.bytes
    }

    /// The size is this now, by our own doing.
    pub(super) fn note_size(&self, bytes: u64) {
        let mut size = self.size.lock();
        size.version += 1;
        size.bytes = bytes;
    }

    /// Truncates or extends the device.
    pub fn set_size(&self, bytes: u64) -> Result<()> {
        match self.shared.writeback() {
            Some(writeback) => self.set_size_with(writeback, bytes),
            None => self.set_size_through(bytes),
        }
    }

    pub(super) fn set_size_through(&self, bytes: u64) -> Result<()> {
        let _range = self.ranges.lock(0, u64::MAX);
        self.note_change();
        let result = self.file.set_size(bytes);
        self.note_change();
        result?;
        self.note_size(bytes);
        self.shared.cache.set_size(&self.cached, bytes);
        self.file.settle()
    }

    /// Allocates, punches or zeroes a range.
    pub fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        match self.shared.writeback() {
            Some(writeback) => self.change_range_with(writeback, what, offset, len),
            None => self.change_range_through(what, offset, len),
        }
    }

    pub(super) fn change_range_through(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        let _range = self.ranges.lock(offset, len);
        self.note_change();
        let result = self.file.change_range(what, offset, len);
        self.note_change();
        if !matches!(what, Range::Allocate | Range::AllocateGrow) {
            self.shared.cache.invalidate(&self.cached, Extent { offset, len });
        }
        result?;
        if matches!(what, Range::AllocateGrow | Range::ZeroGrow) {
            self.grow(offset + len);
        }
        self.file.settle()
    }

    /// The next data or hole.
    pub fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        if self.is_dirty.load(SeqCst) {
            return self.seek_merged(offset, hole);
        }
        self.file.seek(offset, hole)
    }
}
