//! Devices as the cache knows them: a tag, its counters, its streams. The table maps a tag to its
//! device, so that an eviction is counted where the block came from; what belongs to a retired
//! tag is counted in the retired totals. The table's lock is taken alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::{Mutex, RwLock};

use super::admission::Streams;
use crate::stats::{Counters, DeviceStats};
use crate::units::DeviceId;

/// One device in the cache.
pub struct CacheDevice {
    /// Its tag.
    pub id: DeviceId,
    /// Its counters. The cache counts reads; `writes`, `syncs` and `errors` are the store's.
    pub stats: DeviceStats,
    /// Blocks in the cache; raised under the shard's lock, lowered after it.
    pub(super) resident: AtomicU64,
    /// One past the highest block ever inserted or in flight.
    pub(super) top: AtomicU64,
    pub(super) streams: Mutex<Streams>,
    /// Streams of writes, under the same rule.
    pub(super) write_streams: Mutex<Streams>,
    /// Some after `retire`: what was folded into the retired totals so far.
    folded: Mutex<Option<Counters>>,
    totals: Arc<DeviceStats>,
}

impl CacheDevice {
    /// Blocks of this device in the cache.
    pub fn resident_blocks(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// Nobody has it open: its streams are over.
    pub fn rest(&self) {
        *self.streams.lock() = Streams::default();
        *self.write_streams.lock() = Streams::default();
    }

    pub(super) fn count_inserted(&self, new: bool) {
        if new {
            self.resident.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn count_used(&self, blocks: u64) {
        if blocks > 0 {
            self.stats.readahead_used.fetch_add(blocks, Relaxed);
        }
    }

    fn fold(&self, folded: &mut Option<Counters>, first: bool) {
        let before = match *folded {
            None if !first => return,
            before => before.unwrap_or_default(),
        };
        let now = self.stats.counters();
        self.totals.absorb(&now.since(&before));
        *folded = Some(now);
    }
}

impl Drop for CacheDevice {
    /// A request may have counted after `retire`.
    fn drop(&mut self) {
        let mut folded = self.folded.lock().take();
        self.fold(&mut folded, false);
    }
}

/// Blocks that left the cache, to be counted where they belong once no lock is held.
#[derive(Default)]
pub(super) struct Gone(Vec<Left>);

struct Left {
    id: DeviceId,
    blocks: u64,
    evicted: u64,
    wasted: u64,
}

impl Gone {
    /// A block left: to make room (`evicted`), read ahead and never used (`wasted`).
    pub(super) fn add(&mut self, id: DeviceId, evicted: bool, wasted: bool) {
        let (evicted, wasted) = (u64::from(evicted), u64::from(wasted));
        match self.0.last_mut() {
            Some(last) if last.id == id => {
                last.blocks += 1;
                last.evicted += evicted;
                last.wasted += wasted;
            }
            _ => self.0.push(Left { id, blocks: 1, evicted, wasted }),
        }
    }

    /// A resident block that was read ahead was overwritten before use.
    pub(super) fn add_wasted(&mut self, id: DeviceId) {
        self.0.push(Left { id, blocks: 0, evicted: 0, wasted: 1 });
    }
}

/// The table of tags, and the totals of those that retired.
#[derive(Default)]
pub(super) struct Devices {
    table: RwLock<HashMap<DeviceId, Arc<CacheDevice>>>,
    totals: Arc<DeviceStats>,
}

impl Devices {
    pub(super) fn register(&self, id: DeviceId) -> Arc<CacheDevice> {
        let device = Arc::new(CacheDevice {
            id,
            stats: DeviceStats::default(),
            resident: AtomicU64::new(0),
            top: AtomicU64::new(0),
            streams: Mutex::new(Streams::default()),
            write_streams: Mutex::new(Streams::default()),
            folded: Mutex::new(None),
            totals: Arc::clone(&self.totals),
        });
        self.table.write().insert(id, Arc::clone(&device));
        device
    }

    pub(super) fn retire(&self, dev: &CacheDevice) {
        let entry = self.table.write().remove(&dev.id);
        dev.fold(&mut dev.folded.lock(), true);
        // Outside the table's lock: this may be the last reference.
        drop(entry);
    }

    pub(super) fn retired(&self) -> Counters {
        self.totals.counters()
    }

    /// Counts what left; most of it belongs to `dev`, which needs no look at the table.
    pub(super) fn settle(&self, dev: &CacheDevice, gone: Gone) {
        let (own, others): (Vec<Left>, Vec<Left>) =
            gone.0.into_iter().partition(|left| left.id == dev.id);
        for left in own {
            count(&dev.stats, &dev.resident, &left);
        }
        self.settle_all(Gone(others));
    }

    pub(super) fn settle_all(&self, gone: Gone) {
        if gone.0.is_empty() {
            return;
        }
        let table = self.table.read();
        for left in gone.0 {
            match table.get(&left.id) {
                Some(dev) => count(&dev.stats, &dev.resident, &left),
                None => count(&self.totals, &AtomicU64::new(left.blocks), &left),
            }
        }
    }
}

fn count(stats: &DeviceStats, resident: &AtomicU64, left: &Left) {
    resident.fetch_sub(left.blocks, Relaxed);
    if left.evicted > 0 {
        stats.evictions.fetch_add(left.evicted, Relaxed);
    }
    if left.wasted > 0 {
        stats.readahead_wasted.fetch_add(left.wasted, Relaxed);
    }
}
