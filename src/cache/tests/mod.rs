//! What the cache promises, against a disk in memory. C1-C6 as properties over random traces
//! stand in fuse-tests/tests/cache_model.rs.
#![cfg(test)]

mod flights;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use super::*;
use crate::config::StoreConfig;
use crate::error::{Error, Kind};

const BLOCK: usize = 512;

struct Disk {
    bytes: Mutex<Vec<u8>>,
    reads: AtomicU64,
    /// Byte offsets from..to answer EIO.
    bad: Mutex<(u64, u64)>,
    panics: AtomicBool,
}

impl Disk {
    fn new(len: usize) -> Disk {
        let bytes = (0..len).map(|i| (i / BLOCK * 7 + i) as u8 | 1).collect();
        Disk {
            bytes: Mutex::new(bytes),
            reads: AtomicU64::new(0),
            bad: Mutex::new((0, 0)),
            panics: AtomicBool::new(false),
        }
    }

    fn slice(&self, offset: usize, len: usize) -> Vec<u8> {
        self.bytes.lock()[offset..offset + len].to_vec()
    }

    fn write(&self, offset: usize, data: &[u8]) {
        self.bytes.lock()[offset..offset + data.len()].copy_from_slice(data);
    }
}

impl Fetch for Disk {
    fn fetch(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.reads.fetch_add(1, Relaxed);
        assert!(offset.is_multiple_of(BLOCK as u64) && buf.len().is_multiple_of(BLOCK));
        assert!(!self.panics.load(Relaxed), "the source panics");
        let bad = *self.bad.lock();
        if offset < bad.1 && bad.0 < offset + buf.len() as u64 {
            return Err(Error::new(Kind::Io, "read", "bad sector"));
        }
        let bytes = self.bytes.lock();
        let len = buf.len().min(bytes.len().saturating_sub(offset as usize));
        buf[..len].copy_from_slice(&bytes[offset as usize..][..len]);
        Ok(len)
    }
}

struct Rig {
    cache: Cache,
    dev: Arc<CacheDevice>,
    disk: Disk,
    tunables: Tunables,
}

const SIZE: usize = 256 * BLOCK + 100;

fn rig(blocks: u64) -> Rig {
    let cache = Cache::with_shards(blocks * BLOCK as u64, BLOCK as u32, false, 1);
    let dev = cache.register(DeviceId(7));
    let config = StoreConfig { readahead: 0, bypass: 64 << 10, ..StoreConfig::default() };
    Rig { cache, dev, disk: Disk::new(SIZE), tunables: Tunables::new(&config) }
}

impl Rig {
    fn plan(&self, offset: usize, len: usize) -> Plan {
        self.cache.plan(&self.dev, offset as u64, len as u64, SIZE as u64, &self.tunables)
    }

    fn read(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let plan = self.plan(offset, len);
        let mut out = vec![0xEE; len];
        let at = offset as u64;
        if !self.cache.try_read(&self.dev, &plan, at, &mut out, 0) {
            self.cache.read(&self.dev, &plan, at, &mut out, 0, &self.disk)?;
        }
        Ok(out)
    }

    fn good(&self, offset: usize, len: usize) {
        assert!(self.read(offset, len).unwrap() == self.disk.slice(offset, len), "{offset}+{len}");
    }

    fn reads(&self) -> u64 {
        self.disk.reads.load(Relaxed)
    }

    fn counters(&self) -> Counters {
        self.dev.stats.counters()
    }
}

#[test]
fn reads_of_any_alignment_are_right_and_hit_later() {
    let rig = rig(300);
    for (offset, len) in [(0, 512), (100, 50), (700, 2000), (512 * 30 + 1, 512 * 40), (1, 1)] {
        rig.good(offset, len);
        let before = rig.reads();
        rig.good(offset, len);
        assert_eq!(rig.reads(), before);
    }
    let counters = rig.counters();
    // Blocks asked: 1 + 1 + 5 + 41 + 1, twice.
    assert_eq!(counters.hits + counters.misses, 2 * (1 + 1 + 5 + 41 + 1));
    assert_eq!(counters.misses, 1 + 5 + 41);
    assert_eq!(counters.backing_blocks, counters.misses);
    assert_eq!(rig.dev.resident_blocks(), 47);
    assert_eq!(rig.cache.snapshot(), (300, 47));
}

#[test]
fn the_partial_tail_is_one_block_padded_with_zeros() {
    let rig = rig(300);
    rig.good(SIZE - 100, 100);
    rig.good(SIZE - 700, 700);
    // The caller clamps; what lies past the end is zeros all the same.
    let out = rig.read(SIZE - 100, 400).unwrap();
    assert!(out[..100] == rig.disk.slice(SIZE - 100, 100) && out[100..].iter().all(|&b| b == 0));
    assert_eq!(rig.counters().backing_blocks, 3);
}

#[test]
fn the_least_recently_used_block_goes_and_is_counted_where_it_belongs() {
    let rig = rig(4);
    let other = rig.cache.register(DeviceId(8));
    for block in 0..4 {
        rig.good(block * BLOCK, BLOCK);
    }
    rig.good(0, BLOCK);
    let plan = rig.cache.plan(&other, 0, 512, 512, &rig.tunables);
    let mut out = [0; 512];
    rig.cache.read(&other, &plan, 0, &mut out, 0, &rig.disk).unwrap();
    assert_eq!((rig.counters().evictions, other.stats.counters().evictions), (1, 0));
    assert_eq!((rig.dev.resident_blocks(), other.resident_blocks()), (3, 1));
    let blocks = rig.cache.blocks(None);
    let names: Vec<_> = blocks.iter().map(|info| (info.unit, info.block)).collect();
    assert_eq!(names, [(7, 0), (7, 2), (7, 3), (8, 0)]);
    assert_eq!((blocks[0].count, blocks[1].count), (1, 0));
    assert_eq!(rig.cache.blocks(Some(DeviceId(8))).len(), 1);
}

#[test]
fn a_hit_pushed_out_by_its_own_request_is_there_afterwards() {
    let rig = rig(4);
    rig.good(3 * BLOCK, BLOCK);
    rig.good(4 * BLOCK, 3 * BLOCK);
    // 0..3 push out 3 and 4..6 before they are touched: as if read one by one.
    rig.good(100, 4 * BLOCK - 200);
    let resident: Vec<_> = rig.cache.blocks(None).iter().map(|info| info.block).collect();
    assert_eq!(resident, [0, 1, 2, 3]);
    let before = rig.reads();
    rig.good(0, 4 * BLOCK);
    assert_eq!(rig.reads(), before);
}

#[test]
fn an_error_fails_its_own_run_and_is_not_cached() {
    let rig = rig(300);
    *rig.disk.bad.lock() = (10 * 512, 11 * 512);
    rig.good(9 * 512, 512);
    assert_eq!(rig.read(8 * 512, 5 * 512).unwrap_err().errno(), libc::EIO);
    rig.good(8 * 512, 2 * 512);
    rig.good(11 * 512, 512);
    assert_eq!(rig.cache.snapshot().1, 3);
    *rig.disk.bad.lock() = (0, 0);
    rig.good(8 * 512, 5 * 512);
}

#[test]
fn writes_update_and_insert_by_the_callers_rule() {
    let rig = rig(300);
    let write = |offset: usize, data: &[u8], insert| {
        rig.disk.write(offset, data);
        rig.cache.update(&rig.dev, offset as u64, data, insert, SIZE as u64);
    };
    rig.good(0, 4 * BLOCK);
    write(100, &[9; 1000], true);
    rig.good(0, 4 * BLOCK);
    assert_eq!((rig.reads(), rig.cache.snapshot().1), (1, 4));
    // Absent: only whole blocks enter, and only if asked; the tail counts as whole.
    write(10 * BLOCK + 1, &[8; 2 * BLOCK], false);
    write(20 * BLOCK + 1, &[8; 2 * BLOCK], true);
    write(256 * BLOCK, &[8; 100], true);
    let resident: Vec<_> = rig.cache.blocks(None).iter().map(|info| info.block).collect();
    assert_eq!(resident, [0, 1, 2, 3, 21, 256]);
    rig.good(20 * BLOCK, 4 * BLOCK);
    rig.good(255 * BLOCK, BLOCK + 100);
}

#[test]
fn invalidate_drops_blocks_near_and_far() {
    let rig = rig(300);
    rig.good(0, 40 * BLOCK);
    rig.cache.invalidate(&rig.dev, Extent { offset: 511, len: 2 });
    assert_eq!((rig.cache.snapshot().1, rig.counters().invalidations), (38, 2));
    rig.cache.invalidate(&rig.dev, Extent { offset: 39 * 512, len: u64::MAX });
    assert_eq!(rig.cache.snapshot().1, 37);
    rig.cache.invalidate(&rig.dev, Extent { offset: 0, len: 0 });
    assert_eq!((rig.cache.snapshot().1, rig.dev.resident_blocks()), (37, 37));
}

#[test]
fn a_large_range_is_dropped_by_looking_at_what_is_there() {
    let rig = rig(8000);
    let zeros = vec![0; 4 * BLOCK];
    for block in [0u64, 10, 5000] {
        rig.cache.update(&rig.dev, block * 512, &zeros, true, u64::MAX);
    }
    rig.cache.invalidate(&rig.dev, Extent { offset: 2 * 512, len: 4999 * 512 });
    let left: Vec<_> = rig.cache.blocks(None).iter().map(|info| info.block).collect();
    assert_eq!(left, [0, 1, 5001, 5002, 5003]);
    assert_eq!((rig.dev.resident_blocks(), rig.counters().invalidations), (5, 7));
}

#[test]
fn set_size_drops_what_is_behind_and_zeroes_the_tail() {
    let rig = rig(300);
    rig.good(0, 8 * BLOCK);
    let keep = 2 * BLOCK + 30;
    let size = rig.disk.bytes.lock().len();
    rig.disk.bytes.lock().truncate(keep);
    rig.cache.set_size(&rig.dev, keep as u64);
    assert_eq!(rig.cache.snapshot().1, 3);
    rig.disk.bytes.lock().resize(size, 0);
    rig.cache.set_size(&rig.dev, size as u64);
    rig.good(0, 8 * BLOCK);
    assert_eq!(rig.counters().backing_blocks, 8 + 5);
}

#[test]
fn an_expired_block_is_read_again() {
    let rig = rig(300);
    rig.good(0, 2 * BLOCK);
    rig.disk.write(0, &[5; 2 * BLOCK]);
    let plan = rig.plan(0, BLOCK);
    let mut out = [0; BLOCK];
    assert!(rig.cache.try_read(&rig.dev, &plan, 0, &mut out, 3_600_000));
    std::thread::sleep(Duration::from_millis(30));
    assert!(!rig.cache.try_read(&rig.dev, &plan, 0, &mut out, 20));
    rig.cache.read(&rig.dev, &plan, 0, &mut out, 20, &rig.disk).unwrap();
    assert!(out == [5; BLOCK]);
    // Fresh again, still one block, and its neighbour is as old as before.
    assert!(rig.cache.try_read(&rig.dev, &plan, 0, &mut out, 3_600_000) && out == [5; BLOCK]);
    assert_eq!((rig.cache.snapshot().1, rig.counters().evictions), (2, 0));
}

#[test]
fn requests_past_the_limits_are_served_and_not_inserted() {
    let rig = rig(300);
    rig.tunables.set_bypass(4 * 512);
    rig.good(2 * BLOCK, BLOCK);
    rig.good(6 * BLOCK, BLOCK);
    rig.good(100, 8 * BLOCK);
    let counters = rig.counters();
    assert_eq!((counters.ops, counters.bypasses, rig.cache.snapshot().1), (3, 1, 2));
    assert_eq!((counters.bypassed, counters.bypassed_large, counters.bypass_hits), (9, 9, 2));
    assert_eq!((counters.hits, counters.misses), (0, 2));
    // The gaps were small: one read of all nine blocks.
    assert_eq!((rig.reads(), counters.backing_blocks), (3, 2 + 9));
    // A bad block that is in the cache does not fail the read.
    *rig.disk.bad.lock() = (2 * 512, 3 * 512);
    rig.good(100, 8 * BLOCK);
    *rig.disk.bad.lock() = (3 * 512, 4 * 512);
    assert!(rig.read(100, 8 * BLOCK).is_err());
}

#[test]
fn read_ahead_is_counted_used_or_wasted() {
    let rig = rig(8);
    rig.cache.prefetch(&rig.dev, Extent { offset: 0, len: 4 * 512 }, &rig.disk);
    rig.cache.prefetch(&rig.dev, Extent { offset: 0, len: 4 * 512 }, &rig.disk);
    assert_eq!((rig.reads(), rig.counters().readahead_blocks), (1, 4));
    rig.good(0, 2 * BLOCK);
    rig.good(0, 2 * BLOCK);
    rig.good(20 * BLOCK, 8 * BLOCK);
    let counters = rig.counters();
    assert_eq!((counters.readahead_used, counters.readahead_wasted), (2, 2));
    assert_eq!((counters.evictions, counters.hits, counters.misses), (4, 4, 8));
    // A failure is dropped; the tail of the device may be short.
    *rig.disk.bad.lock() = (40 * 512, 41 * 512);
    rig.cache.prefetch(&rig.dev, Extent { offset: 38 * 512, len: 4 * 512 }, &rig.disk);
    assert_eq!(rig.counters().readahead_blocks, 4);
    let tail = Extent { offset: 255 * 512, len: 512 + 100 };
    rig.cache.prefetch(&rig.dev, tail, &rig.disk);
    assert_eq!(rig.counters().readahead_blocks, 6);
    rig.good(255 * BLOCK, BLOCK + 100);
}

#[test]
fn a_retired_device_leaves_its_counters_and_its_blocks_age_out() {
    let rig = rig(4);
    rig.good(0, 4 * BLOCK);
    rig.cache.retire(&rig.dev);
    assert_eq!(rig.cache.retired().misses, 4);
    // Counted by a request that was still under way.
    rig.dev.stats.errors.fetch_add(1, Relaxed);
    let next = rig.cache.register(DeviceId(9));
    let plan = rig.cache.plan(&next, 0, 2048, 2048, &rig.tunables);
    let mut out = vec![0; 2048];
    rig.cache.read(&next, &plan, 0, &mut out, 0, &rig.disk).unwrap();
    assert_eq!((rig.cache.retired().evictions, next.stats.counters().evictions), (4, 0));
    let Rig { cache, dev, .. } = rig;
    drop(dev);
    assert_eq!((cache.retired().errors, cache.retired().misses), (1, 4));
}

#[test]
fn unit_flush_empties_the_cache_when_the_device_changes() {
    let cache = Cache::new(64 * 512, 512, true);
    let (a, b) = (cache.register(DeviceId(0)), cache.register(DeviceId(1)));
    let disk = Disk::new(SIZE);
    let tunables = Tunables::new(&StoreConfig::default());
    let mut hits = [0, 0, 0, 0, 0];
    for (i, dev) in [&a, &a, &b, &a, &a].into_iter().enumerate() {
        let plan = cache.plan(dev, 0, 512, 512, &tunables);
        let mut out = [0; 512];
        hits[i] = u64::from(cache.try_read(dev, &plan, 0, &mut out, 0));
        cache.read(dev, &plan, 0, &mut out, 0, &disk).unwrap();
    }
    assert_eq!(hits, [0, 1, 0, 0, 1]);
}

#[test]
fn clear_leaves_an_empty_cache_that_works() {
    let rig = rig(8);
    rig.good(0, 8 * BLOCK);
    rig.cache.clear();
    assert_eq!((rig.cache.snapshot(), rig.dev.resident_blocks()), ((8, 0), 0));
    rig.good(0, 8 * BLOCK);
    rig.good(8 * BLOCK, 8 * BLOCK);
    assert_eq!((rig.dev.resident_blocks(), rig.counters().evictions), (8, 8));
}

#[test]
fn a_cache_of_no_blocks_serves_reads() {
    let rig = rig(0);
    rig.good(5, 4 * BLOCK);
    rig.good(5, 4 * BLOCK);
    assert_eq!((rig.cache.snapshot(), rig.counters().misses), ((0, 0), 10));
}
