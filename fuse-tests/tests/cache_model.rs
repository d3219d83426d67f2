//! The cache's invariants C1-C6 as properties, over random traces and without a mount.
//!
//! `CACHE_MODEL_SEED=n` repeats a run, `CACHE_MODEL_TRACES=n` changes how many traces C1 tries.

#[path = "cache_model/allocator.rs"]
mod allocator;
#[path = "cache_model/trace.rs"]
mod trace;

use std::collections::{HashMap, VecDeque};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bcachefs_fuse::cache::{Cache, CacheDevice, Plan, Verdict};
use bcachefs_fuse::config::{StoreConfig, Tunables};
use bcachefs_fuse::error::Result;
use bcachefs_fuse::units::{DeviceId, Extent};

use allocator::HELD;
use trace::{
    DEVICE_BYTES, Fault, Random, Real, Simple, Trace, Violation, check, seed, variable, zeros,
};

#[test]
fn c1_bigger_never_misses_more() {
    let seed = seed("c1");
    let traces = variable("CACHE_MODEL_TRACES").unwrap_or(10_000);
    let next = AtomicU64::new(0);
    let found: [AtomicU64; 3] = Default::default();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= traces {
                        return;
                    }
                    let trace = Trace::random(seed.wrapping_add(number));
                    if let Some(Violation { size, step }) =
                        check(&trace, |size| Real::new(&trace, size))
                    {
                        let seed = seed.wrapping_add(number);
                        panic!("trace {seed}: {size} blocks do worse, step {step}: {trace:#?}");
                    }
                    for (fault, count) in
                        [Fault::None, Fault::Fifo, Fault::Relative].into_iter().zip(&found)
                    {
                        let bypass = trace.bypass / trace.block_size;
                        let make = |size| Simple {
                            fault,
                            size,
                            bypass,
                            order: VecDeque::new(),
                            cost: [0; 2],
                        };
                        count.fetch_add(u64::from(check(&trace, make).is_some()), Relaxed);
                    }
                }
            });
        }
    });
    let [lru, fifo, relative] = found.map(AtomicU64::into_inner);
    println!("c1: {traces} traces: ours 0, lru {lru}, fifo {fifo}, relative bypass {relative}");
    assert_eq!(lru, 0, "the checker finds what is not there");
    assert!(fifo > 0 && relative > 0, "the checker is blind");
}

#[test]
fn c2_conservation() {
    let seed = seed("c2");
    let trace = Trace { shards: 16, ..Trace::random(seed) };
    let real = Real::new(&trace, 64);
    let (admitted, requested) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (real, admitted, requested) = (&real, &admitted, &requested);
            scope.spawn(move || {
                let mut random = Random::new(seed + thread);
                for _ in 0..3000 {
                    let dev = &real.devices[random.below(3) as usize];
                    let bs = real.block_size;
                    let offset = random.below(100 * bs);
                    let len = 1 + random.below(6 * bs);
                    let blocks = (offset + len).div_ceil(bs) - offset / bs;
                    let plan = real.cache.plan(dev, offset, len, DEVICE_BYTES, &real.tunables);
                    let mut out = vec![0; len as usize];
                    if !real.cache.try_read(dev, &plan, offset, &mut out, 0) {
                        real.cache.read(dev, &plan, offset, &mut out, 0, &zeros).unwrap();
                    }
                    requested.fetch_add(blocks, Relaxed);
                    let insert = plan.verdict == Verdict::Insert;
                    admitted.fetch_add(if insert { blocks } else { 0 }, Relaxed);
                    if random.below(10) == 0 {
                        real.cache.invalidate(dev, Extent { offset, len });
                    }
                }
            });
        }
    });
    let mut total = bcachefs_fuse::stats::Counters::default();
    for dev in &real.devices {
        let counters = dev.stats.counters();
        assert!(counters.backing_blocks <= counters.misses + counters.bypassed);
        total.add(&counters);
    }
    assert_eq!(total.ops, 12_000);
    assert_eq!(total.hits + total.misses, admitted.into_inner());
    assert_eq!(total.hits + total.misses + total.bypassed, requested.into_inner());
    assert_eq!(total.bypassed, total.bypassed_large + total.bypassed_stream);
    let resident: u64 = real.devices.iter().map(|dev| dev.resident_blocks()).sum();
    assert_eq!(
        (real.cache.snapshot().1, real.cache.blocks(None).len() as u64),
        (resident, resident)
    );
}

/// One request through everything but read-ahead; whether all of it hit.
fn request(cache: &Cache, dev: &CacheDevice, at: (u64, u64), tunables: &Tunables) -> (Plan, bool) {
    let plan = cache.plan(dev, at.0, at.1, DEVICE_BYTES, tunables);
    let mut out = vec![0; at.1 as usize];
    let hit = cache.try_read(dev, &plan, at.0, &mut out, 0);
    if !hit {
        cache.read(dev, &plan, at.0, &mut out, 0, &zeros).unwrap();
    }
    (plan, hit)
}

/// The share of hot reads that hit while a scan of five times the cache runs beside them.
fn hot_hits(cutoff: u64, hot_per_scan: u64, seed: u64) -> f64 {
    const BLOCK: u64 = 512;
    const CACHE: u64 = 32 << 20;
    let config = StoreConfig { sequential_cutoff: cutoff, ..StoreConfig::default() };
    let tunables = Tunables::new(&config);
    let cache = Cache::new(CACHE, BLOCK as u32, false);
    let dev = cache.register(DeviceId(1));
    let (hot, unit, scan) = (CACHE / 2, 8 * BLOCK, 128 << 10);
    // The hot set was read here and there, not as a stream; the scan is on the same device.
    for i in 0..hot / unit {
        request(&cache, &dev, ((i * 769) % (hot / unit) * unit, unit), &tunables);
    }
    let mut random = Random::new(seed);
    let (mut hits, mut reads) = (0, 0);
    for i in 0..5 * CACHE / scan {
        let (plan, _) = request(&cache, &dev, (DEVICE_BYTES / 2 + i * scan, scan), &tunables);
        if let Some(extent) = plan.readahead {
            cache.prefetch(&dev, extent, &zeros);
        }
        for _ in 0..hot_per_scan {
            let at = random.below(hot / unit) * unit;
            hits += u64::from(request(&cache, &dev, (at, unit), &tunables).1);
            reads += 1;
        }
    }
    hits as f64 / reads as f64
}

#[test]
fn c3_scan_proof() {
    let seed = seed("c3");
    for hot_per_scan in [1, 10, 50] {
        let hits = hot_hits(8 << 20, hot_per_scan, seed);
        println!("c3: {hot_per_scan} hot reads a scan request: {:.2} % hits", hits * 100.0);
        assert!(hits >= 0.99, "{hot_per_scan}: {hits}");
    }
    // The test can fail: without a cutoff the scan sweeps the cache.
    let swept = hot_hits(0, 1, seed);
    println!("c3: without a cutoff: {:.2} % hits", swept * 100.0);
    assert!(swept < 0.9);
}

/// Hits of one list of (unit, block) reads of single blocks.
fn hits_of(reads: &[(u32, u64)], size: u64, shards: usize, unit_flush: bool) -> u64 {
    let cache = Cache::with_shards(size * 512, 512, unit_flush, shards);
    let tunables = Tunables::new(&StoreConfig::default());
    let mut devices = HashMap::new();
    for &(unit, block) in reads {
        let dev = devices.entry(unit).or_insert_with(|| cache.register(DeviceId(unit)));
        request(&cache, dev, (block * 512, 512), &tunables);
    }
    devices.values().map(|dev| dev.stats.hits.load(Relaxed)).sum()
}

#[test]
fn c4_tag() {
    let mut random = Random::new(seed("c4"));
    const UNITS: u64 = 8;
    // Round robin over the units, a few blocks of each much hotter than the rest.
    let split: Vec<(u32, u64)> = (0..20_000)
        .map(|i| {
            let range = 8 << random.below(8);
            ((i % UNITS) as u32, random.below(range))
        })
        .collect();
    let union: Vec<(u32, u64)> =
        split.iter().map(|&(unit, block)| (0, u64::from(unit) * 4096 + block)).collect();
    for size in [64, 512, 4096] {
        let (ours, one) = (hits_of(&split, size, 1, false), hits_of(&union, size, 1, false));
        assert_eq!(ours, one, "{size} blocks");
        let (ours, one) = (hits_of(&split, size, 16, false), hits_of(&union, size, 16, false));
        println!("c4: {size} blocks: {ours} hits, as one device {one}");
        // Other names, other shards: equal but for luck.
        assert!(ours.abs_diff(one) < split.len() as u64 / 20, "{size}: {ours} {one}");
    }
    assert_eq!(hits_of(&split, 4096, 16, true), 0, "without the tag");
}

#[test]
fn c5_single_flight() {
    const THREADS: usize = 12;
    const BLOCKS: u64 = 40;
    let cache = Cache::new(1 << 20, 4096, false);
    let dev = cache.register(DeviceId(3));
    let tunables = Tunables::new(&StoreConfig { readahead: 0, ..StoreConfig::default() });
    let fetched: Vec<AtomicU64> = (0..BLOCKS * 8).map(|_| AtomicU64::new(0)).collect();
    let source = |offset: u64, buf: &mut [u8]| -> Result<usize> {
        std::thread::sleep(Duration::from_millis(2));
        for (i, block) in buf.chunks_mut(4096).enumerate() {
            let number = offset / 4096 + i as u64;
            fetched[number as usize].fetch_add(1, Relaxed);
            block.fill(number as u8);
        }
        Ok(buf.len())
    };
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, dev, tunables, source, barrier) =
                (&cache, &dev, &tunables, &source, &barrier);
            scope.spawn(move || {
                for block in (0..BLOCKS).map(|i| i * 8) {
                    barrier.wait();
                    // Some want one block, some its neighbours too.
                    let len = 4096 * (1 + thread as u64 % 3);
                    let plan = cache.plan(dev, block * 4096, len, DEVICE_BYTES, tunables);
                    let mut out = vec![0; len as usize];
                    let at = block * 4096;
                    if !cache.try_read(dev, &plan, at, &mut out, 0) {
                        cache.read(dev, &plan, at, &mut out, 0, source).unwrap();
                    }
                    for (i, bytes) in out.chunks(4096).enumerate() {
                        assert!(bytes.iter().all(|&byte| byte == (block + i as u64) as u8));
                    }
                }
            });
        }
    });
    let counts: Vec<u64> = fetched.iter().map(|count| count.load(Relaxed)).collect();
    assert!(counts.iter().all(|&count| count <= 1), "{counts:?}");
    assert_eq!(counts.iter().sum::<u64>(), BLOCKS * 3);
    assert_eq!(dev.stats.backing_blocks.load(Relaxed), BLOCKS * 3);
}

#[test]
fn c6_memory_cap() {
    let mut random = Random::new(seed("c6"));
    let tunables = Tunables::new(&StoreConfig::default());
    // Hash tables are at their worst just below and above 7/8 of a power of two.
    for per_shard in [1024, 900, 1790, 1794] {
        let bytes = per_shard * 16 * 4096;
        HELD.set((0, 0));
        let cache = Cache::new(bytes, 4096, false);
        let dev = cache.register(DeviceId(1));
        let block = vec![1; 4096];
        for i in 0..per_shard * 16 * 4 {
            let at = random.below(DEVICE_BYTES / 4096) * 4096;
            cache.update(&dev, at, &block, true, DEVICE_BYTES);
            if i % 50 == 0 {
                request(&cache, &dev, (at, 4096 * 3), &tunables);
                cache.invalidate(&dev, Extent { offset: at, len: 8192 });
            }
        }
        let (_, most) = HELD.get();
        let (capacity, resident) = cache.snapshot();
        assert_eq!(capacity, per_shard * 16);
        assert!(resident > capacity - 100 && resident <= capacity, "{resident} of {capacity}");
        let over = (most as f64 - bytes as f64) / bytes as f64 * 100.0;
        let each = (most as u64).saturating_sub(bytes) / capacity;
        println!("c6: {capacity} blocks: {over:.2} % on top, {each} bytes a block");
        assert!(over <= 3.0);
    }
}
