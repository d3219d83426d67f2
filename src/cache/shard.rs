//! One shard: a true LRU over one slab of block bytes. Everything here runs under its lock.
//!
//! `order` maps a key to its slot, most recently used first; slot i owns `slab[i * block..]` and
//! `meta[i]`. `meta.len() - free.len() == order.len() <= capacity`. `flights` holds the blocks
//! being fetched; a block may be resident and in flight at once only when it has expired.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;

use super::device::Gone;
use super::flight::Flight;
use crate::stats::BlockInfo;
use crate::sys::huge;
use crate::units::{BlockNo, DeviceId};

/// A block's name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    block: BlockNo,
    device: DeviceId,
}

impl Key {
    pub(super) fn new(device: DeviceId, block: u64) -> Key {
        Key { block: BlockNo(block), device }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.block.0);
        state.write_u64(u64::from(self.device.0));
    }
}

/// Both halves of a 128-bit product: every input bit reaches high and low result bits.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2545_f491_4f6c_dd1d) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Builds the hasher of keys; seeded, so that nobody can choose colliding block numbers.
#[derive(Clone)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    fn new() -> KeyHash {
        KeyHash(RandomState::new().hash_one(0) | 1)
    }
}

impl BuildHasher for KeyHash {
    type Hasher = KeyHasher;
    fn build_hasher(&self) -> KeyHasher {
        KeyHasher { seed: self.0, state: self.0 >> 1 }
    }
}

/// Zeroed bytes that become resident where they are used.
fn slab(len: usize) -> Vec<u8> {
    let mut slab = vec![0; len];
    huge::advise(&mut slab);
    slab
}

/// Two multiplications a key.
pub(super) struct KeyHasher {
    seed: u64,
    state: u64,
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.state = mix(self.state ^ value, self.seed);
    }
    fn finish(&self) -> u64 {
        self.state
    }
}

/// What is known of a slot besides its bytes.
#[derive(Clone, Copy)]
struct Meta {
    /// Milliseconds of the clock, wrapping (49 days).
    stamp: u32,
    /// Hits; the top bit: read ahead and not used yet.
    count: u32,
}

const AHEAD: u32 = 1 << 31;

impl Meta {
    fn fresh(self, now: u32, expire_ms: u64) -> bool {
        expire_ms == 0 || u64::from(now.wrapping_sub(self.stamp)) < expire_ms
    }
}

/// One shard of the cache.
pub(super) struct Shard {
    order: LruCache<Key, u32, KeyHash>,
    slab: Vec<u8>,
    meta: Vec<Meta>,
    free: Vec<u32>,
    capacity: usize,
    block_size: usize,
    /// Blocks being fetched.
    pub(super) flights: HashMap<Key, Arc<Flight>, KeyHash>,
    /// Grows whenever bytes of some block changed; guards `fill`'s second insert of a hit.
    pub(super) version: u64,
}

impl Shard {
    pub(super) fn new(capacity: u64, block_size: u32) -> Shard {
        let capacity = usize::try_from(capacity.min(u64::from(u32::MAX))).unwrap_or(0);
        let hash = KeyHash::new();
        Shard {
            // With its capacity known the list reuses the evicted node: no malloc when full.
            order: LruCache::with_hasher(
                NonZeroUsize::new(capacity).unwrap_or(NonZeroUsize::MIN),
                hash.clone(),
            ),
            // Zeroed memory of this size comes from the kernel page by page, when touched.
            slab: slab(capacity * block_size as usize),
            meta: Vec::with_capacity(capacity),
            free: Vec::new(),
            capacity,
            block_size: block_size as usize,
            flights: HashMap::with_hasher(hash),
            version: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    fn bytes(&self, slot: u32) -> &[u8] {
        &self.slab[slot as usize * self.block_size..][..self.block_size]
    }

    fn bytes_mut(&mut self, slot: u32) -> &mut [u8] {
        &mut self.slab[slot as usize * self.block_size..][..self.block_size]
    }

    /// Whether blocks first..end are all resident and fresh.
    pub(super) fn holds(
        &self,
        id: DeviceId,
        first: u64,
        end: u64,
        now: u32,
        expire_ms: u64,
    ) -> bool {
        (first..end).all(|block| self.peek(Key::new(id, block), now, expire_ms).is_some())
    }

    /// The bytes and the stamp of a resident, fresh block; its place in the order stays.
    pub(super) fn peek(&self, key: Key, now: u32, expire_ms: u64) -> Option<(&[u8], u32)> {
        let slot = *self.order.peek(&key)?;
        let meta = self.meta[slot as usize];
        meta.fresh(now, expire_ms).then(|| (self.bytes(slot), meta.stamp))
    }

    /// Copies from `at` of a resident, fresh block and promotes it. Some(true): first use of a
    /// block that was read ahead.
    pub(super) fn hit(
        &mut self,
        key: Key,
        at: usize,
        out: &mut [u8],
        now: u32,
        expire_ms: u64,
    ) -> Option<bool> {
        let slot = *self.order.get(&key)?;
        let meta = &mut self.meta[slot as usize];
        if !meta.fresh(now, expire_ms) {
            return None;
        }
        let ahead = used(meta);
        out.copy_from_slice(&self.bytes(slot)[at..at + out.len()]);
        Some(ahead)
    }

    /// Promotes a resident block and counts its use; as `hit`, without the copy.
    pub(super) fn touch(&mut self, key: Key) -> Option<bool> {
        let slot = *self.order.get(&key)?;
        Some(used(&mut self.meta[slot as usize]))
    }

    /// Promotes a resident block; not a use.
    pub(super) fn promote(&mut self, key: Key) -> bool {
        self.order.promote(&key)
    }

    /// Puts a block in front, its bytes padded with zeros; evicts the last one when full.
    /// True if the block is new here.
    pub(super) fn insert(
        &mut self,
        key: Key,
        bytes: &[u8],
        stamp: u32,
        ahead: bool,
        gone: &mut Gone,
    ) -> bool {
        if self.capacity == 0 {
            return false;
        }
        let (slot, new) = self.slot_for(key, gone);
        let count = if ahead { AHEAD } else { 0 };
        self.meta[slot as usize] = Meta { stamp, count };
        let target = self.bytes_mut(slot);
        target[..bytes.len()].copy_from_slice(bytes);
        target[bytes.len()..].fill(0);
        new
    }

    fn slot_for(&mut self, key: Key, gone: &mut Gone) -> (u32, bool) {
        if let Some(&slot) = self.order.get(&key) {
            if self.meta[slot as usize].count & AHEAD != 0 {
                gone.add_wasted(key.device);
            }
            return (slot, false);
        }
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else if self.meta.len() < self.capacity {
            self.meta.push(Meta { stamp: 0, count: 0 });
            (self.meta.len() - 1) as u32
        } else if let Some((old, &slot)) = self.order.peek_lru() {
            gone.add(old.device, true, self.meta[slot as usize].count & AHEAD != 0);
            slot
        } else {
            0
        };
        // At capacity this pushes out exactly the block whose slot was taken.
        self.order.push(key, slot);
        (slot, true)
    }

    /// Overwrites part of a resident block and promotes it. `stamp` if all of it was.
    pub(super) fn overwrite(
        &mut self,
        key: Key,
        at: usize,
        bytes: &[u8],
        stamp: Option<u32>,
        gone: &mut Gone,
    ) {
        let Some(&slot) = self.order.get(&key) else { return };
        if let Some(stamp) = stamp {
            if self.meta[slot as usize].count & AHEAD != 0 {
                gone.add_wasted(key.device);
            }
            self.meta[slot as usize] = Meta { stamp, count: 0 };
        }
        self.bytes_mut(slot)[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Zeroes a resident block from byte `at`.
    pub(super) fn zero_from(&mut self, key: Key, at: usize) {
        if let Some(&slot) = self.order.peek(&key) {
            self.bytes_mut(slot)[at..].fill(0);
        }
    }

    /// Drops a block; whether it was here.
    pub(super) fn remove(&mut self, key: Key, gone: &mut Gone) -> bool {
        let Some(slot) = self.order.pop(&key) else { return false };
        gone.add(key.device, false, self.meta[slot as usize].count & AHEAD != 0);
        self.free.push(slot);
        true
    }

    /// Drops blocks first..end of a device and detaches their flights; how many were here.
    pub(super) fn remove_range(
        &mut self,
        id: DeviceId,
        first: u64,
        end: u64,
        gone: &mut Gone,
    ) -> u64 {
        let within = |key: &Key| key.device == id && (first..end).contains(&key.block.0);
        self.version += 1;
        self.flights.retain(|key, _| !within(key));
        let keys: Vec<Key> = self.order.iter().map(|(key, _)| *key).filter(within).collect();
        for &key in &keys {
            self.remove(key, gone);
        }
        keys.len() as u64
    }

    /// Drops everything; `release` gives the memory back to the system.
    pub(super) fn clear(&mut self, release: bool, gone: &mut Gone) {
        self.version += 1;
        self.flights.clear();
        while let Some((key, slot)) = self.order.pop_lru() {
            gone.add(key.device, false, self.meta[slot as usize].count & AHEAD != 0);
        }
        self.meta.clear();
        self.free = Vec::new();
        if release {
            let len = std::mem::take(&mut self.slab).len();
            self.slab = slab(len);
        }
    }

    /// Adds the resident blocks to `list`.
    pub(super) fn list(&self, id: Option<DeviceId>, now: u32, list: &mut Vec<BlockInfo>) {
        for (key, &slot) in &self.order {
            if id.is_none_or(|id| id == key.device) {
                let meta = self.meta[slot as usize];
                list.push(BlockInfo {
                    unit: key.device.0,
                    block: key.block.0,
                    age_ms: u64::from(now.wrapping_sub(meta.stamp)),
                    count: meta.count & !AHEAD,
                });
            }
        }
    }
}

/// Counts a use; whether it is the first of a block that was read ahead.
fn used(meta: &mut Meta) -> bool {
    let ahead = meta.count & AHEAD != 0;
    meta.count = (meta.count & !AHEAD).saturating_add(1).min(AHEAD - 1);
    ahead
}
