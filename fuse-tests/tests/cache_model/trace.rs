//! Random traces, the cache replaying them, two models that break C1, and the checker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use bcachefs_fuse::cache::{Cache, CacheDevice, Verdict};
use bcachefs_fuse::config::{StoreConfig, Tunables};
use bcachefs_fuse::error::Result;
use bcachefs_fuse::units::{DeviceId, Extent};

/// xorshift64: a trace is its seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

pub fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seed of this run, printed: a failure can be repeated.
pub fn seed(test: &str) -> u64 {
    let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64 >> 10);
    let seed = variable("CACHE_MODEL_SEED").unwrap_or_else(now);
    println!("{test}: CACHE_MODEL_SEED={seed}");
    seed
}

#[derive(Clone, Copy, Debug)]
pub enum Op {
    Read {
        dev: usize,
        block: u64,
        blocks: u64,
    },
    /// Bytes 1..len - 1 of these blocks if `partial`.
    Write {
        dev: usize,
        block: u64,
        blocks: u64,
        partial: bool,
    },
    Invalidate {
        dev: usize,
        block: u64,
        blocks: u64,
    },
}

#[derive(Debug)]
pub struct Trace {
    pub ops: Vec<Op>,
    pub block_size: u64,
    pub bypass: u64,
    pub cutoff: u64,
    pub readahead: u64,
    pub shards: usize,
    pub largest: u64,
}

pub const DEVICES: usize = 3;

impl Trace {
    /// Small universes and small caches: that is where anomalies live. A quarter of the traces
    /// has blocks so large that streams are read ahead.
    pub fn random(seed: u64) -> Trace {
        let mut random = Random::new(seed);
        let ahead = random.below(4) == 0;
        let block_size = if ahead { 16 << 10 } else { 512 };
        let devices = 1 + random.below(DEVICES as u64);
        let universe = 3 + random.below(14);
        let mut cursor = [0; DEVICES];
        let ops = (0..16 + random.below(24))
            .map(|_| {
                let dev = random.below(devices) as usize;
                let (block, blocks) = (random.below(universe), 1 + random.below(3));
                match random.below(20) {
                    0 => Op::Read { dev, block, blocks: 4 + random.below(4) },
                    1 => Op::Invalidate { dev, block, blocks },
                    2 | 3 => Op::Write { dev, block, blocks, partial: random.below(3) == 0 },
                    4..12 if ahead => {
                        // A stream, and once in a while a new one.
                        if random.below(12) == 0 {
                            cursor[dev] = random.below(4 * universe);
                        }
                        let block = cursor[dev];
                        cursor[dev] += blocks;
                        Op::Read { dev, block, blocks }
                    }
                    _ => Op::Read { dev, block, blocks: 1 + random.below(2) },
                }
            })
            .collect();
        Trace {
            ops,
            block_size,
            bypass: (3 + random.below(2)) * block_size,
            cutoff: (6 + random.below(20)) * block_size,
            readahead: if ahead { 64 << 10 } else { 0 },
            shards: if random.below(4) == 0 { 16 } else { 1 },
            largest: if devices == 1 { 8 } else { 10 },
        }
    }

    pub fn tunables(&self) -> Tunables {
        Tunables::new(&StoreConfig {
            bypass: self.bypass,
            sequential_cutoff: self.cutoff,
            readahead: self.readahead,
            ..StoreConfig::default()
        })
    }
}

/// A cache of some size, as the checker of C1 sees it.
pub trait Model {
    fn step(&mut self, op: Op);
    /// Misses, then blocks read from the device: neither may grow with the size.
    fn cost(&self) -> [u64; 2];
    /// The resident blocks in order, if they must include a smaller cache's.
    fn resident(&self) -> Option<Vec<(u32, u64)>>;
}

pub struct Violation {
    pub size: u64,
    pub step: usize,
}

/// C1: at every step of the trace no cache costs more than the next smaller one, and holds what
/// that one holds.
pub fn check<M: Model>(trace: &Trace, make: impl Fn(u64) -> M) -> Option<Violation> {
    let step_of = 1 + trace.shards as u64 / 4;
    let sizes: Vec<u64> = (0..trace.largest).map(|i| 1 + i * step_of).collect();
    let mut models: Vec<M> = sizes.iter().map(|&size| make(size)).collect();
    for (step, &op) in trace.ops.iter().enumerate() {
        for model in &mut models {
            model.step(op);
        }
        for (i, pair) in models.windows(2).enumerate() {
            let (small, large) = (pair[0].cost(), pair[1].cost());
            let mut broken = large[0] > small[0] || large[1] > small[1];
            if step % 16 == 15 || step + 1 == trace.ops.len() {
                let sets = pair[0].resident().zip(pair[1].resident());
                broken |= sets.is_some_and(|(small, large)| !is_subset(&small, &large));
            }
            if broken {
                return Some(Violation { size: sizes[i + 1], step });
            }
        }
    }
    None
}

/// Of two ordered lists.
pub fn is_subset(small: &[(u32, u64)], large: &[(u32, u64)]) -> bool {
    let mut large = large.iter();
    small.iter().all(|key| large.any(|other| other == key))
}

/// The cache itself, replayed by one thread: read-ahead runs right after its request.
pub struct Real {
    pub cache: Cache,
    pub devices: Vec<Arc<CacheDevice>>,
    pub tunables: Tunables,
    pub block_size: u64,
}

pub fn zeros(_: u64, buf: &mut [u8]) -> Result<usize> {
    Ok(buf.len())
}

pub const DEVICE_BYTES: u64 = 1 << 30;

impl Real {
    pub fn new(trace: &Trace, size: u64) -> Real {
        let bytes = size * trace.block_size;
        let cache = Cache::with_shards(bytes, trace.block_size as u32, false, trace.shards);
        let devices = (0..DEVICES as u32).map(|id| cache.register(DeviceId(id))).collect();
        Real { cache, devices, tunables: trace.tunables(), block_size: trace.block_size }
    }
}

impl Model for Real {
    fn step(&mut self, op: Op) {
        let bs = self.block_size;
        match op {
            Op::Read { dev, block, blocks } => {
                let dev = &self.devices[dev];
                let (offset, len) = (block * bs, blocks * bs);
                let plan = self.cache.plan(dev, offset, len, DEVICE_BYTES, &self.tunables);
                let mut out = vec![0; len as usize];
                if !self.cache.try_read(dev, &plan, offset, &mut out, 0) {
                    self.cache.read(dev, &plan, offset, &mut out, 0, &zeros).unwrap();
                }
                if let Some(extent) = plan.readahead {
                    self.cache.prefetch(dev, extent, &zeros);
                }
            }
            Op::Write { dev, block, blocks, partial } => {
                let dev = &self.devices[dev];
                let cut = u64::from(partial);
                let (offset, len) = (block * bs + cut, blocks * bs - 2 * cut);
                let verdict = self.cache.plan_write(dev, offset, len, &self.tunables);
                let insert = verdict == Verdict::Insert;
                let data = vec![0; len as usize];
                self.cache.update(dev, offset, &data, insert, DEVICE_BYTES);
            }
            Op::Invalidate { dev, block, blocks } => {
                let extent = Extent { offset: block * bs, len: blocks * bs };
                self.cache.invalidate(&self.devices[dev], extent);
            }
        }
    }

    fn cost(&self) -> [u64; 2] {
        let sum = |value: fn(&CacheDevice) -> &AtomicU64| {
            self.devices.iter().map(|dev| value(dev).load(Relaxed)).sum()
        };
        [sum(|dev| &dev.stats.misses), sum(|dev| &dev.stats.backing_blocks)]
    }

    fn resident(&self) -> Option<Vec<(u32, u64)>> {
        Some(self.cache.blocks(None).iter().map(|info| (info.unit, info.block)).collect())
    }
}

/// How the two models that break C1 differ from a true LRU with fixed limits.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// None: the checker must stay silent.
    None,
    /// Hits do not promote.
    Fifo,
    /// A request of more than half the cache is bypassed.
    Relative,
}

pub struct Simple {
    pub fault: Fault,
    pub size: u64,
    pub bypass: u64,
    /// Front: the next to go.
    pub order: VecDeque<(usize, u64)>,
    pub cost: [u64; 2],
}

impl Model for Simple {
    fn step(&mut self, op: Op) {
        match op {
            Op::Read { dev, block, blocks } => {
                let most = if self.fault == Fault::Relative { self.size / 2 } else { self.bypass };
                for block in block..block + blocks {
                    let at = self.order.iter().position(|&key| key == (dev, block));
                    if at.is_none() {
                        // Blocks really read. That the loader did not count what it bypassed
                        // would make it look worse still.
                        self.cost[1] += 1;
                    }
                    match at {
                        Some(_) if self.fault == Fault::Fifo => continue,
                        Some(at) => drop(self.order.remove(at)),
                        None if blocks > most => continue,
                        None if self.order.len() as u64 == self.size => {
                            self.order.pop_front();
                        }
                        None => (),
                    }
                    self.order.push_back((dev, block));
                }
            }
            Op::Write { .. } => (),
            Op::Invalidate { dev, block, blocks } => {
                self.order.retain(|key| key.0 != dev || !(block..block + blocks).contains(&key.1));
            }
        }
    }

    fn cost(&self) -> [u64; 2] {
        self.cost
    }

    fn resident(&self) -> Option<Vec<(u32, u64)>> {
        None
    }
}
