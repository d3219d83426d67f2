//! The block cache (layer 3): clean blocks of every device in one pool, tagged with the device
//! they came from (the unit tag of FreeBSD's loader cache, patch of 2011).
//!
//! A block is absent, in flight (one reader fetches it, others may wait for it) or resident. A
//! resident block equals the device's bytes, zero-padded past the device's end. Invariants:
//! - C1: a bigger cache never misses more. Each shard is a true LRU, shards never depend on the
//!   capacity, admission and read-ahead depend on the request stream only, and the blocks of one
//!   request are touched in ascending order whether they hit or miss (`fill`).
//! - C2: hits + misses == blocks of admitted reads; + bypassed == blocks requested.
//! - C5: readers of an absent block wait for the one that fetches it (`flight`).
//! - C6: the slab is `capacity_blocks` blocks; a block's index costs about 100 bytes.
//! - J7: bytes that changed are never replaced by bytes fetched before the change: `update` and
//!   `invalidate` detach flights, and a fetch inserts only what is still attached.
//!
//! Locks, in order: `last_unit` (test flag only), one shard, and never two shards. The stream
//! table of a device, the device table and a flight's own lock are taken alone. No lock is held
//! during a fetch. A caller that writes must call `update` in the order of its device writes.

mod admission;
mod device;
mod fill;
mod flight;
mod shard;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use parking_lot::Mutex;

pub use admission::{Plan, Verdict};
pub use device::CacheDevice;

use crate::clock;
use crate::config::Tunables;
use crate::error::Result;
use crate::stats::{BlockInfo, Counters};
use crate::sys::AlignedBuf;
use crate::units::{DeviceId, Extent};
use device::{Devices, Gone};
use fill::Purpose;
use shard::{Key, Shard};

/// Shards of a cache. Fixed: a number that grew with the capacity would break C1.
pub const SHARDS: usize = 16;

/// Neighbours of 2^5 blocks share a shard, so that most requests take one lock.
const GROUP_SHIFT: u32 = 5;

/// Above this many blocks `invalidate` looks at what is resident instead of at every number.
const SCAN_BLOCKS: u64 = 1024;

/// Reads of the device a block comes from.
pub trait Fetch: Sync {
    /// Reads at a block-aligned byte offset; the bytes read, fewer than asked only at the end.
    fn fetch(&self, offset: u64, buf: &mut [u8]) -> Result<usize>;
}

impl<F: Fn(u64, &mut [u8]) -> Result<usize> + Sync> Fetch for F {
    fn fetch(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self(offset, buf)
    }
}

/// Blocks first..end of one request, and how they lie over its bytes.
#[derive(Clone, Copy)]
struct Span {
    offset: u64,
    len: usize,
    first: u64,
    end: u64,
    shift: u32,
}

/// The part of one block a request covers: `at..at + len` in the block, `out..` in the request.
#[derive(Clone, Copy)]
struct Piece {
    at: usize,
    out: usize,
    len: usize,
}

impl Span {
    fn new(offset: u64, len: usize, shift: u32) -> Span {
        let end = offset.saturating_add(len as u64);
        let last = if len == 0 { offset >> shift } else { ((end - 1) >> shift) + 1 };
        Span { offset, len, first: offset >> shift, end: last, shift }
    }

    fn blocks(&self) -> u64 {
        self.end - self.first
    }

    fn piece(&self, block: u64) -> Piece {
        let start = block << self.shift;
        let from = start.max(self.offset);
        let to = (start + (1 << self.shift)).min(self.offset + self.len as u64);
        Piece {
            at: (from - start) as usize,
            out: (from - self.offset) as usize,
            len: (to - from) as usize,
        }
    }

    /// Runs of blocks that share a shard, in ascending order.
    fn groups(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        groups(self.first, self.end)
    }
}

fn groups(first: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
    let mut next = first;
    std::iter::from_fn(move || {
        (next < end).then(|| {
            let from = next;
            next = (((from >> GROUP_SHIFT) + 1) << GROUP_SHIFT).min(end);
            (from, next)
        })
    })
}

/// One pool of clean blocks for all devices.
pub struct Cache {
    shards: Box<[Mutex<Shard>]>,
    devices: Devices,
    shift: u32,
    capacity: u64,
    /// Some: test only, the device of the last request; another device empties the cache.
    last_unit: Option<Mutex<DeviceId>>,
}

impl Cache {
    /// A cache of `capacity_bytes` / `block_size` (a power of two) blocks. `unit_flush` is the
    /// test-only flag that behaves as the loader did before the unit tag.
    pub fn new(capacity_bytes: u64, block_size: u32, unit_flush: bool) -> Cache {
        Cache::with_shards(capacity_bytes, block_size, unit_flush, SHARDS)
    }

    /// The same with another number of shards: for replaying caches of a few dozen blocks, which
    /// 16 shards would cut too fine. Two caches compare (C1) only with the same number.
    pub fn with_shards(capacity: u64, block_size: u32, unit_flush: bool, shards: usize) -> Cache {
        let shards = shards.max(1) as u64;
        let blocks = capacity / u64::from(block_size.max(1));
        Cache {
            shards: (0..shards)
                .map(|i| Mutex::new(Shard::new((blocks + i) / shards, block_size)))
                .collect(),
            devices: Devices::default(),
            shift: block_size.trailing_zeros(),
            capacity: blocks,
            last_unit: unit_flush.then(|| Mutex::new(DeviceId(u32::MAX))),
        }
    }

    /// Makes a tag known. A tag is never used for two devices.
    pub fn register(&self, id: DeviceId) -> Arc<CacheDevice> {
        self.devices.register(id)
    }

    /// Admission and stream position of one read request; call once per request, before it is
    /// read. Counts the request. `size_bytes` of the device clips the read-ahead.
    pub fn plan(
        &self,
        dev: &CacheDevice,
        offset: u64,
        len: u64,
        size_bytes: u64,
        tunables: &Tunables,
    ) -> Plan {
        if let Some(last) = &self.last_unit {
            let mut last = last.lock();
            if *last != dev.id {
                *last = dev.id;
                self.drop_all(false);
            }
        }
        let plan = dev.streams.lock().plan(offset, len, size_bytes, 1 << self.shift, tunables);
        dev.stats.ops.fetch_add(1, Relaxed);
        dev.stats.read_bytes.fetch_add(len, Relaxed);
        if plan.verdict != Verdict::Insert {
            dev.stats.bypasses.fetch_add(1, Relaxed);
        }
        plan
    }

    /// Admission of a write by the same rule, in streams of its own; counts nothing.
    pub fn plan_write(
        &self,
        dev: &CacheDevice,
        offset: u64,
        len: u64,
        tunables: &Tunables,
    ) -> Verdict {
        dev.write_streams.lock().admit(offset, len, tunables)
    }

    /// The fast path, all or nothing: if every block is resident and not older than `expire_ms`
    /// (0: never too old), copies them, counts and promotes them; else false, nothing counted.
    pub fn try_read(
        &self,
        dev: &CacheDevice,
        plan: &Plan,
        offset: u64,
        out: &mut [u8],
        expire_ms: u64,
    ) -> bool {
        let span = Span::new(offset, out.len(), self.shift);
        let now = if expire_ms == 0 { 0 } else { clock::now_ms() as u32 };
        let single = (span.first ^ span.end.wrapping_sub(1)) >> GROUP_SHIFT == 0;
        if !single {
            for (first, end) in span.groups() {
                let shard = self.shard(dev.id, first).lock();
                if !shard.holds(dev.id, first, end, now, expire_ms) {
                    return false;
                }
            }
        }
        let mut used = 0;
        for (first, end) in span.groups() {
            let mut shard = self.shard(dev.id, first).lock();
            if end - first > 1 && !shard.holds(dev.id, first, end, now, expire_ms) {
                return false;
            }
            for block in first..end {
                let piece = span.piece(block);
                let target = &mut out[piece.out..piece.out + piece.len];
                match shard.hit(Key::new(dev.id, block), piece.at, target, now, expire_ms) {
                    Some(ahead) => used += u64::from(ahead),
                    None => return false,
                }
            }
        }
        dev.count_used(used);
        self.count_found(dev, plan.verdict, span.blocks());
        true
    }

    /// Reads `out` at `offset`: resident blocks are copied, the others fetched from `source` as
    /// maximal runs. Admitted requests wait for each other's runs (C5) and insert; the rest are
    /// never inserted and do not wait. What lies past the device's end becomes zeros.
    /// The error of a run is that of every request that wanted it; nothing of it is cached.
    pub fn read(
        &self,
        dev: &CacheDevice,
        plan: &Plan,
        offset: u64,
        out: &mut [u8],
        expire_ms: u64,
        source: &dyn Fetch,
    ) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        match plan.verdict {
            Verdict::Insert => self.fill(dev, offset, out, expire_ms, source, Purpose::Demand),
            verdict => self.read_around(dev, verdict, offset, out, expire_ms, source),
        }
    }

    /// Blocks of a request that were found in the journal: they count as found here.
    pub fn count_dirty(&self, dev: &CacheDevice, plan: &Plan, blocks: u64) {
        self.count_found(dev, plan.verdict, blocks);
    }

    /// The next write begins a new stream.
    pub fn reset_write_streams(&self, dev: &CacheDevice) {
        *dev.write_streams.lock() = Default::default();
    }

    /// Read-ahead, on a worker thread: fetches what is absent of `extent`. Errors are dropped:
    /// whoever needs those bytes meets them again.
    pub fn prefetch(&self, dev: &CacheDevice, extent: Extent, source: &dyn Fetch) {
        let Ok(len) = usize::try_from(extent.len) else { return };
        let span = Span::new(extent.offset, len, self.shift);
        if len == 0 || self.promote_resident(dev, span) {
            return;
        }
        let offset = span.first << self.shift;
        let mut scratch = AlignedBuf::lend((span.blocks() << self.shift) as usize);
        // The worker has nobody to tell.
        let _ = self.fill(dev, offset, &mut scratch, 0, source, Purpose::Ahead);
    }

    /// Bytes changed on the device: detaches flights of their blocks (J7) and updates present
    /// blocks. With `insert`, a block that is covered whole (up to `size_after`, the device's
    /// size now) is inserted; partial ones of absent blocks never are.
    pub fn update(
        &self,
        dev: &CacheDevice,
        offset: u64,
        data: &[u8],
        insert: bool,
        size_after: u64,
    ) {
        if data.is_empty() {
            return;
        }
        let span = Span::new(offset, data.len(), self.shift);
        let end = offset + data.len() as u64;
        let now = clock::now_ms() as u32;
        if insert {
            dev.top.fetch_max(span.end, SeqCst);
        }
        let mut gone = Gone::default();
        for (first, last) in span.groups() {
            let mut shard = self.shard(dev.id, first).lock();
            shard.version += 1;
            for block in first..last {
                let key = Key::new(dev.id, block);
                shard.flights.remove(&key);
                let start = block << self.shift;
                let whole =
                    offset <= start && (end >= start + (1 << self.shift) || end >= size_after);
                let piece = span.piece(block);
                let bytes = &data[piece.out..piece.out + piece.len];
                if whole && insert {
                    dev.count_inserted(shard.insert(key, bytes, now, false, &mut gone));
                } else {
                    shard.overwrite(key, piece.at, bytes, whole.then_some(now), &mut gone);
                }
            }
        }
        self.devices.settle(dev, gone);
    }

    /// Drops every block that shares a byte with `extent`, and detaches their flights.
    pub fn invalidate(&self, dev: &CacheDevice, extent: Extent) {
        if extent.len > 0 {
            let end = ((extent.end() - 1) >> self.shift) + 1;
            self.drop_blocks(dev, extent.offset >> self.shift, end);
        }
    }

    /// The device was cut or grown to `size` bytes: drops what lies behind and zeroes the cached
    /// tail of the last, partial block.
    pub fn set_size(&self, dev: &CacheDevice, size: u64) {
        let whole = size >> self.shift;
        let tail = (size - (whole << self.shift)) as usize;
        if tail > 0 && whole < dev.top.load(SeqCst) {
            let mut shard = self.shard(dev.id, whole).lock();
            shard.version += 1;
            let key = Key::new(dev.id, whole);
            shard.flights.remove(&key);
            shard.zero_from(key, tail);
        }
        self.drop_blocks(dev, whole + u64::from(tail > 0), u64::MAX);
    }

    /// This tag will not be used again: its blocks age out, its counters go to `retired`.
    pub fn retire(&self, dev: &CacheDevice) {
        self.devices.retire(dev);
    }

    /// Drops every block of every device and gives their memory back.
    pub fn clear(&self) {
        self.drop_all(true);
    }

    /// (blocks the cache can hold, blocks it holds).
    pub fn snapshot(&self) -> (u64, u64) {
        (self.capacity, self.shards.iter().map(|shard| shard.lock().len() as u64).sum())
    }

    /// Resident blocks, of one device or of all, by device and number.
    pub fn blocks(&self, id: Option<DeviceId>) -> Vec<BlockInfo> {
        let now = clock::now_ms() as u32;
        let mut list = Vec::new();
        for shard in &self.shards {
            shard.lock().list(id, now, &mut list);
        }
        list.sort_unstable_by_key(|info| (info.unit, info.block));
        list
    }

    /// What the retired devices counted.
    pub fn retired(&self) -> Counters {
        self.devices.retired()
    }

    fn shard(&self, id: DeviceId, block: u64) -> &Mutex<Shard> {
        let hash =
            shard::mix((block >> GROUP_SHIFT) ^ (u64::from(id.0) << 40), 0x9e37_79b9_7f4a_7c15);
        &self.shards[((hash >> 32) as usize * self.shards.len()) >> 32]
    }

    fn count_found(&self, dev: &CacheDevice, verdict: Verdict, blocks: u64) {
        if verdict == Verdict::Insert {
            dev.stats.hits.fetch_add(blocks, Relaxed);
        } else {
            dev.stats.bypass_hits.fetch_add(blocks, Relaxed);
            self.count_bypassed(dev, verdict, blocks);
        }
    }

    fn count_bypassed(&self, dev: &CacheDevice, verdict: Verdict, blocks: u64) {
        dev.stats.bypassed.fetch_add(blocks, Relaxed);
        match verdict {
            Verdict::Large => dev.stats.bypassed_large.fetch_add(blocks, Relaxed),
            _ => dev.stats.bypassed_stream.fetch_add(blocks, Relaxed),
        };
    }

    /// If all of `span` is resident: promotes it (a touch, C1) and says so.
    fn promote_resident(&self, dev: &CacheDevice, span: Span) -> bool {
        let held = |(first, end)| self.shard(dev.id, first).lock().holds(dev.id, first, end, 0, 0);
        if !span.groups().all(held) {
            return false;
        }
        for (first, end) in span.groups() {
            let mut shard = self.shard(dev.id, first).lock();
            for block in first..end {
                shard.promote(Key::new(dev.id, block));
            }
        }
        true
    }

    fn drop_blocks(&self, dev: &CacheDevice, first: u64, end: u64) {
        // Nothing at or past `top` was ever inserted or in flight; who raises it later reads the
        // device later, so gets the new bytes.
        let end = end.min(dev.top.load(SeqCst));
        if first >= end {
            return;
        }
        let mut gone = Gone::default();
        let mut dropped = 0;
        if end - first <= SCAN_BLOCKS {
            for (from, to) in groups(first, end) {
                let mut shard = self.shard(dev.id, from).lock();
                shard.version += 1;
                for block in from..to {
                    let key = Key::new(dev.id, block);
                    shard.flights.remove(&key);
                    dropped += u64::from(shard.remove(key, &mut gone));
                }
            }
        } else {
            for shard in &self.shards {
                dropped += shard.lock().remove_range(dev.id, first, end, &mut gone);
            }
        }
        dev.stats.invalidations.fetch_add(dropped, Relaxed);
        self.devices.settle(dev, gone);
    }

    fn drop_all(&self, release: bool) {
        let mut gone = Gone::default();
        for shard in &self.shards {
            shard.lock().clear(release, &mut gone);
        }
        self.devices.settle_all(gone);
    }
}
