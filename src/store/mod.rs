//! The block store (layer 4): devices, one cache shared by all of them, a journal with writeback if
//! it has one, and what is known of files that are closed. Usable without FUSE, over any
//! `BlockDevice`.
//!
//! Lock order, outermost first; none is held across device I/O except a write's own range, and the
//! dirty lock across the journal's buffered append:
//!   1. `Device.ranges` (a range of one device that is being changed directly; readers never take
//!      it), a turn to sync its file, `Device.telling` (each alone)
//!   2. `Writeback.control` (one step of the controller)
//!   3. `Device.dirty` (the dirty map)
//!   4. the journal's own (see `journal`), `Writeback.devices`, `.writers`, `.events`
//!   5. `Registry` (who is open, what stamps closed files had); never with a dirty lock held
//!   6. `Device.size`
//!   7. the cache's own (see `cache`)

mod checkpoint;
pub mod device;
mod direct;
mod dirty;
mod fsync;
mod guard;
mod journaled;
mod life;
pub mod mark;
mod merge;
mod ranges;
pub mod recovery;
mod registry;
pub mod trace;
pub(crate) mod writeback;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

pub use self::device::{Device, ReadPlan};
pub use self::life::Overlay;
use self::registry::{Closed, Registry};
use self::trace::TraceRecorder;
use self::writeback::Writeback;
pub use self::writeback::{Mutants, NamesSync};
use crate::cache::Cache;
use crate::config::{CacheMode, StoreConfig, Tunables};
use crate::device::BlockDevice;
use crate::error::{Error, Kind, Result};
use crate::stats::{BlockInfo, Counters, DeviceSnapshot, FlushProgress, Snapshot};
pub use crate::units::Stamp;
use crate::units::{DeviceId, Identity};

/// What every device of a store shares.
pub(crate) struct Shared {
    pub(crate) cache: Cache,
    pub(crate) tunables: Arc<Tunables>,
    pub(crate) trace: TraceRecorder,
    pub(crate) block_size: u32,
    registry: Mutex<Registry>,
    writeback: OnceLock<Arc<Writeback>>,
}

impl Shared {
    pub(crate) fn writeback(&self) -> Option<&Arc<Writeback>> {
        self.writeback.get()
    }
}

/// All devices of a mount, their cache and their journal.
pub struct BlockStore {
    shared: Arc<Shared>,
    next_id: AtomicU32,
}

/// Ends its threads and lets go of its devices, which know it, too. What is dirty stays in the
/// journal, as after a crash; `stop` is the orderly end.
impl Drop for BlockStore {
    fn drop(&mut self) {
        if let Some(writeback) = self.shared.writeback() {
            writeback.stop();
            writeback.let_go();
        }
        let registry = std::mem::replace(&mut *self.shared.registry.lock(), Registry::new());
        // The descriptors are closed without the lock.
        drop(registry);
    }
}

/// What an open found.
pub struct OpenedDevice {
    /// The device, shared by all handles of the file.
    pub device: Arc<Device>,
    /// Whether nobody else changed the file since the kernel last cached its pages.
    pub unchanged: bool,
}

impl BlockStore {
    /// An empty store without a journal.
    pub fn new(config: &StoreConfig) -> BlockStore {
        let cache = Cache::new(config.cache_bytes, config.block_size, config.unit_flush);
        let shared = Shared {
            cache,
            tunables: Arc::new(Tunables::new(config)),
            trace: TraceRecorder::default(),
            block_size: config.block_size,
            registry: Mutex::new(Registry::new()),
            writeback: OnceLock::new(),
        };
        BlockStore { shared: Arc::new(shared), next_id: AtomicU32::new(0) }
    }

    /// Opens a file for data: one more handle of it. `fresh` is used if the file has none yet. A
    /// dirty one is as it was left. A file that changed behind the mount since our last touch gets
    /// a new tag (its old blocks age out, its old records are void); while a handle is open it
    /// keeps the tag and loses its blocks.
    pub fn open(
        &self,
        identity: Identity,
        stamp: Stamp,
        fresh: Arc<dyn BlockDevice>,
        path: &dyn Fn() -> PathBuf,
    ) -> OpenedDevice {
        let mut registry = self.shared.registry.lock();
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
        let cached = known.unwrap_or_else(|| self.shared.cache.register(self.new_id()));
        let device = Device::new(self.shared.clone(), cached, fresh, identity, stamp.size);
        registry.insert(identity, device.clone(), stamp, path());
        self.void_retired(registry);
        OpenedDevice { device, unchanged }
    }

    /// What the journal has of tags without a file is void.
    fn void_retired(&self, mut registry: MutexGuard<'_, Registry>) {
        let retired = registry.take_retired();
        drop(registry);
        let Some(writeback) = self.shared.writeback() else { return };
        for tag in retired {
            if let Err(error) = writeback.void(tag) {
                log::warn!("journal: unit {}: {error}", tag.0);
            }
            if !writeback.journal.would_replay(tag) {
                writeback.journal.forget_device(tag);
            }
        }
    }

    /// A file's last name is about to go: see `Device::note_unlink`; for closed files, too.
    pub fn note_unlink(&self, identity: &Identity, path: &Path) -> Result<()> {
        if let Some(device) = self.live(identity) {
            return device.note_unlink(path);
        }
        let known = self.shared.registry.lock().known(identity);
        match (known, self.shared.writeback()) {
            // It is clean: nothing is lost with its records, whatever becomes of the name.
            (Some(tag), Some(writeback)) => writeback.void(tag),
            _ => Ok(()),
        }
    }

    fn new_id(&self) -> DeviceId {
        DeviceId(self.next_id.fetch_add(1, Relaxed))
    }

    /// Closes one handle. `stamp_now` is asked only where our own writes made the old stamp stale.
    /// A dirty device stays until it is clean; one without a name is dropped, dirty or not.
    pub fn close(&self, identity: &Identity, stamp_now: &dyn Fn() -> Option<Stamp>) {
        let live = self.live(identity);
        let is_dirty = live.as_ref().is_some_and(|device| device.is_dirty.load(SeqCst));
        let touched = !is_dirty && live.is_some_and(|device| device.take_touched());
        let stamp = if touched { stamp_now() } else { None };
        let mut registry = self.shared.registry.lock();
        let closed = registry.close(identity, stamp, &self.shared.cache);
        self.void_retired(registry);
        // The descriptors are closed without the lock.
        match closed {
            Closed::Dropped(device) => self.drop_file(&device),
            Closed::Known(device) => drop(device),
            Closed::Open => {}
        }
    }

    /// The device of a file that has an open handle.
    pub fn live(&self, identity: &Identity) -> Option<Arc<Device>> {
        self.shared.registry.lock().live(identity)
    }

    /// Whether anything is remembered of a file: only then its stamp needs care.
    pub fn knows(&self, identity: &Identity) -> bool {
        self.shared.registry.lock().knows(identity)
    }

    /// We have changed attributes of a file ourselves: the stamp moves on, unless its bytes
    /// changed too, which was not us. `set_mtime`: the mtime is ours as well.
    pub fn touched(&self, identity: &Identity, now: Stamp, set_mtime: bool) {
        self.shared.registry.lock().touched(identity, now, set_mtime);
    }

    /// The file's last name is gone: its tag goes with the last handle, and what is dirty of it
    /// goes nowhere.
    pub fn forget(&self, identity: &Identity) {
        if let Some(device) = self.shared.registry.lock().forget(identity, &self.shared.cache) {
            self.drop_file(&device);
        }
    }

    /// No name and no handle is left.
    fn drop_file(&self, device: &Device) {
        device.drop_dirty();
        if let Some(writeback) = self.shared.writeback() {
            writeback.journal.forget_device(device.cached.id);
        }
    }

    /// A file goes by another name now (for statistics).
    pub fn renamed(&self, identity: &Identity, path: PathBuf) {
        if let Some(device) = self.live(identity) {
            device.record_path(&path);
        }
        self.shared.registry.lock().set_path(identity, path);
    }

    /// The live options.
    pub fn tunables(&self) -> &Tunables {
        &self.shared.tunables
    }

    /// Switches what writes do; leaving the cache empties it. With a journal a device follows at
    /// its next clean point: leaving writeback makes all go there.
    pub fn set_cache_mode(&self, mode: CacheMode) {
        self.shared.tunables.set_cache_mode(mode);
        if mode == CacheMode::None {
            self.shared.cache.clear();
        }
        if let Some(writeback) = self.shared.writeback() {
            writeback.ring();
        }
    }

    /// Whether writes can be journaled.
    pub fn has_journal(&self) -> bool {
        self.shared.writeback().is_some()
    }

    /// At most so many files may be dirty at once, each with its descriptors: past that, the next
    /// one waits.
    pub fn set_dirty_max(&self, most: usize) {
        if let Some(writeback) = self.shared.writeback() {
            writeback.set_devices_max(most);
        }
    }

    /// Whether anything is dirty.
    pub fn is_dirty(&self) -> bool {
        self.shared.writeback().is_some_and(|writeback| writeback.has_dirty())
    }

    /// Starts writeback, if there is a journal; after daemonizing.
    pub fn start(&self) -> Result<()> {
        self.shared.writeback().map_or(Ok(()), |writeback| writeback.start())
    }

    /// Ends writeback: what is dirty stays in the journal, with what the devices were like. The
    /// owner mark goes if nothing is.
    pub fn stop(&self) -> Result<()> {
        self.shared.writeback().map_or(Ok(()), |writeback| writeback.close())
    }

    /// Waits until everything written so far (of one device, or all) is home and synced. `tell`
    /// hears of the progress, and ends the waiting by false. What cannot be written is not waited
    /// for but named. NotSupported without a journal.
    pub fn flush(
        &self,
        only: Option<&Identity>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        let none = || Error::new(Kind::NotSupported, "flush", "no journal: all is home");
        let writeback = self.shared.writeback().ok_or_else(none)?;
        match only {
            Some(identity) => {
                let device: Vec<Arc<Device>> = self.live(identity).into_iter().collect();
                writeback.flush(Some(device), tell)
            }
            None => writeback.flush(None, tell),
        }
    }

    /// Tests: a step of the controller with everything flushing, or one of the tasks that wait.
    #[cfg(test)]
    pub(crate) fn run_by_hand(&self, step: bool, which: u64) {
        if let Some(writeback) = self.shared.writeback() {
            writeback.run_by_hand(step, which);
        }
    }

    /// Whether a write of so many bytes would wait for room in the journal now.
    pub fn would_wait(&self, bytes: u64) -> bool {
        self.shared.writeback().is_some_and(|writeback| writeback.would_wait(bytes))
    }

    /// Tests: a heartbeat now.
    #[cfg(test)]
    pub(crate) fn beat_by_hand(&self) {
        if let Some(writeback) = self.shared.writeback() {
            writeback.beat_by_hand();
        }
    }

    /// What makes names of the source durable: called before records of dropped files go.
    pub fn set_names_sync(&self, sync: NamesSync) {
        if let Some(writeback) = self.shared.writeback() {
            writeback.set_names_sync(sync);
        }
    }

    /// Bytes of one block.
    pub fn block_size(&self) -> u32 {
        self.shared.block_size
    }

    /// Files with an open handle.
    pub fn open_count(&self) -> usize {
        self.shared.registry.lock().open_count()
    }

    /// The tag of a file, if it has one.
    pub fn unit_of(&self, identity: &Identity) -> Option<u32> {
        self.shared.registry.lock().unit_of(identity)
    }

    /// The counters of all devices, or of one.
    pub fn snapshot(&self, unit: Option<u32>) -> Snapshot {
        let mut devices = self.shared.registry.lock().snapshots();
        if let Some(writeback) = self.shared.writeback() {
            devices.iter_mut().for_each(|device| writeback.describe(device));
        }
        // What is dirty is of interest whether it was used or not.
        let is_used = |device: &DeviceSnapshot| {
            let is_dirty = device.writeback.as_ref().is_some_and(|device| !device.consistent);
            is_dirty || device.counters != Counters::default()
        };
        devices.retain(|device| unit.map_or(is_used(device), |unit| unit == device.unit));
        let mut total =
            if unit.is_some() { Counters::default() } else { self.shared.cache.retired() };
        devices.iter().for_each(|device| total.add(&device.counters));
        devices.sort_by_key(|device| (std::cmp::Reverse(busy(device)), device.unit));
        let (capacity_blocks, resident_blocks) = self.shared.cache.snapshot();
        let block_size = self.shared.block_size;
        let writeback = self.shared.writeback().map(|writeback| writeback.stat());
        Snapshot { block_size, capacity_blocks, resident_blocks, total, devices, writeback }
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
mod crash;
#[cfg(test)]
mod named;
#[cfg(test)]
mod tests;
