//! The block store (layer 4): devices, one cache shared by all of them, and what is known of files
//! that are closed. Usable without FUSE, over any `BlockDevice`.
//!
//! Lock order, outermost first; none is held across device I/O except a write's own range:
//!   1. `Device.ranges` (a range of one device that is being changed; readers never take it)
//!   2. `Registry` (who is open, what stamps closed files had)
//!   3. `Device.size`
//!   4. the cache's own (see `cache`)

pub mod device;
mod dirty;
pub mod mark;
mod ranges;
mod registry;
pub mod trace;
#[allow(dead_code)]
pub(crate) mod writeback;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use parking_lot::Mutex;

pub use self::device::{Device, ReadPlan};
use self::registry::Registry;
use self::trace::TraceRecorder;
use crate::cache::Cache;
use crate::config::{CacheMode, StoreConfig, Tunables};
use crate::device::BlockDevice;
use crate::error::Result;
use crate::stats::{BlockInfo, Counters, DeviceSnapshot, Snapshot};
pub use crate::units::Stamp;
use crate::units::{DeviceId, Identity};

/// What every device of a store shares.
pub(crate) struct Shared {
    pub(crate) cache: Cache,
    pub(crate) tunables: Tunables,
    pub(crate) trace: TraceRecorder,
    pub(crate) block_size: u32,
}

/// All devices of a mount and their cache.
pub struct BlockStore {
    shared: Arc<Shared>,
    registry: Mutex<Registry>,
    next_id: AtomicU32,
}

/// What an open found.
pub struct OpenedDevice {
    /// The device, shared by all handles of the file.
    pub device: Arc<Device>,
    /// Whether nobody else changed the file since the kernel last cached its pages.
    pub unchanged: bool,
}

impl BlockStore {
    /// An empty store.
    pub fn new(config: &StoreConfig) -> BlockStore {
        let cache = Cache::new(config.cache_bytes, config.block_size, config.unit_flush);
        let shared = Shared {
            cache,
            tunables: Tunables::new(config),
            trace: TraceRecorder::default(),
            block_size: config.block_size,
        };
        BlockStore {
            shared: Arc::new(shared),
            registry: Mutex::new(Registry::new()),
            next_id: AtomicU32::new(0),
        }
    }

    /// Opens a file for data: one more handle of it. `fresh` is used if the file has none yet. A
    /// file that changed behind the mount since our last touch gets a new tag (its old blocks age
    /// out); while a handle is open it keeps the tag and loses its blocks.
    pub fn open(
        &self,
        identity: Identity,
        stamp: Stamp,
        fresh: Arc<dyn BlockDevice>,
        path: &dyn Fn() -> PathBuf,
    ) -> OpenedDevice {
        let mut registry = self.registry.lock();
        if let Some(device) = registry.open_again(&identity) {
            let changed = registry.changed_while_open(&identity, stamp);
            drop(registry);
            if changed {
                device.changed_behind(stamp.size);
            }
            return OpenedDevice { device, unchanged: !changed };
        }
        let known = registry.take_unchanged(&identity, stamp, &self.shared.cache);
        let unchanged = known.is_some();
        let cached = known.unwrap_or_else(|| {
            self.shared.cache.register(DeviceId(self.next_id.fetch_add(1, Relaxed)))
        });
        let device = Arc::new(Device::new(self.shared.clone(), cached, fresh, stamp.size));
        registry.insert(identity, device.clone(), stamp, path());
        OpenedDevice { device, unchanged }
    }

    /// Closes one handle. `stamp_now` is asked only where our own writes made the old stamp stale.
    pub fn close(&self, identity: &Identity, stamp_now: &dyn Fn() -> Option<Stamp>) {
        let touched = self.live(identity).is_some_and(|device| device.take_touched());
        let stamp = if touched { stamp_now() } else { None };
        let closed = self.registry.lock().close(identity, stamp, &self.shared.cache);
        // The descriptors are closed without the lock.
        drop(closed);
    }

    /// The device of a file that has an open handle.
    pub fn live(&self, identity: &Identity) -> Option<Arc<Device>> {
        self.registry.lock().live(identity)
    }

    /// Whether anything is remembered of a file: only then its stamp needs care.
    pub fn knows(&self, identity: &Identity) -> bool {
        self.registry.lock().knows(identity)
    }

    /// We have changed attributes of a file ourselves: the stamp moves on, unless its bytes
    /// changed too, which was not us. `set_mtime`: the mtime is ours as well.
    pub fn touched(&self, identity: &Identity, now: Stamp, set_mtime: bool) {
        self.registry.lock().touched(identity, now, set_mtime);
    }

    /// The file's last name and handle are gone: its tag will never be used again.
    pub fn forget(&self, identity: &Identity) {
        self.registry.lock().forget(identity, &self.shared.cache);
    }

    /// A file goes by another name now (for statistics).
    pub fn renamed(&self, identity: &Identity, path: PathBuf) {
        self.registry.lock().set_path(identity, path);
    }

    /// The live options.
    pub fn tunables(&self) -> &Tunables {
        &self.shared.tunables
    }

    /// Switches what writes do; leaving the cache empties it.
    pub fn set_cache_mode(&self, mode: CacheMode) {
        self.shared.tunables.set_cache_mode(mode);
        if mode == CacheMode::None {
            self.shared.cache.clear();
        }
    }

    /// Bytes of one block.
    pub fn block_size(&self) -> u32 {
        self.shared.block_size
    }

    /// Files with an open handle.
    pub fn open_count(&self) -> usize {
        self.registry.lock().open_count()
    }

    /// The tag of a file, if it has one.
    pub fn unit_of(&self, identity: &Identity) -> Option<u32> {
        self.registry.lock().unit_of(identity)
    }

    /// The counters of all devices, or of one.
    pub fn snapshot(&self, unit: Option<u32>) -> Snapshot {
        let mut devices = self.registry.lock().snapshots();
        devices.retain(|device| {
            unit.map_or(device.counters != Counters::default(), |unit| unit == device.unit)
        });
        let mut total =
            if unit.is_some() { Counters::default() } else { self.shared.cache.retired() };
        devices.iter().for_each(|device| total.add(&device.counters));
        devices.sort_by_key(|device| (std::cmp::Reverse(busy(device)), device.unit));
        let (capacity_blocks, resident_blocks) = self.shared.cache.snapshot();
        let block_size = self.shared.block_size;
        Snapshot { block_size, capacity_blocks, resident_blocks, total, devices, writeback: None }
    }

    /// The resident blocks of all devices, or of one.
    pub fn blocks(&self, unit: Option<u32>) -> Vec<BlockInfo> {
        self.shared.cache.blocks(unit.map(DeviceId))
    }

    /// Starts recording read requests, one line each.
    pub fn start_trace(&self, file: &Path) -> Result<()> {
        self.shared.trace.start(file)
    }

    /// Stops recording; what was recorded is in the file.
    pub fn stop_trace(&self) {
        self.shared.trace.stop();
    }
}

fn busy(device: &DeviceSnapshot) -> u64 {
    device.counters.ops + device.counters.writes
}

#[cfg(test)]
mod tests;
