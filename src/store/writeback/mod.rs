//! Writeback (STORE 4): dirty extents go home in the background, unordered.
//!
//! ```text
//! writers --reserve--> journal          controller: a pure function of a snapshot
//!    |                                        ^ events      | actions
//!    v                                        |             v
//! dirty maps <---- complete ---- workers <--- drive: one thread that steps and executes
//! ```
//!
//! `drive` steps the controller, `home` does its passes and syncs, `forward` keeps the journal's
//! tail moving, `commit` makes appends durable that nobody syncs, `flush` waits for devices.
//! Threads: drive, commit, the workers; none before `start`, so that a store can be driven by hand.
//!
//! Locks of this struct, all leaves below a device's dirty lock, none held across I/O or waiting:
//! `devices`, `writers`, `events`, `space`; `control` is held through a step and taken with no
//! other lock held. `bell` and `progress` only wake. Invariant: a device is listed if its map is
//! not clean, and from just before its first record is appended; listing is done under its dirty
//! lock.

mod close;
mod commit;
pub(crate) mod controller;
mod drive;
mod flush;
mod forward;
mod health;
mod home;
mod rate;
mod room;
mod stat;
#[cfg(test)]
mod tests;
pub(crate) mod view;
pub(crate) mod workers;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use self::controller::Controller;
use self::view::{Admission, Event};
use self::workers::{Task, Workers};
use super::device::Device;
use super::dirty::PIECE_BYTES;
use super::mark::OwnerMark;
use crate::clock;
use crate::config::{StoreConfig, Tunables, WritebackOrder};
use crate::device::BlockDevice;
use crate::error::Result;
use crate::journal::{self, Change, Journal, Purpose, Reservation};
use crate::units::DeviceId;

/// Free space that a source must keep beyond what was promised.
const SPACE_KEPT: u64 = 64 << 20;

/// How long an answer about free space may be used.
const SPACE_MS: u64 = 1000;

/// The least memory for dirty maps.
const INDEX_MIN: u64 = 16 << 20;

/// Rules that tests switch off to prove that the tests would notice. All false in production.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mutants {
    /// The journal's own.
    pub journal: journal::Mutants,
    /// An extent is clean once it is written, synced or not (J4).
    pub skip_epoch_sync: bool,
    /// Home writes do not wait for the journal (J13).
    pub skip_wal: bool,
    /// Ranges changed outside the journal are not revoked (J14).
    pub skip_revoke: bool,
}

/// Who does what home writes need.
enum Executor {
    /// Threads; none before `start`.
    Threads(Mutex<Option<Arc<Workers>>>),
    /// A test, one task after the other.
    ByHand(Mutex<VecDeque<Task>>),
}

/// What the steps of the controller need to remember.
struct Control {
    controller: Controller,
    /// Devices of which a sync was asked for and its end not yet told.
    syncing: HashSet<DeviceId>,
    /// Heads of the baseline's groups: home writes until all are awaited.
    group: usize,
    /// When whole filesystems were last synced, and since when that is wanted again.
    grouped_ms: u64,
    group_wanted_ms: Option<u64>,
    /// Since when devices that were synced each alone are counted, and their number.
    singles: (u64, usize),
    /// A try to free the tail is under way.
    freeing: bool,
    /// Devices whose tail is being copied forward.
    copying: HashSet<DeviceId>,
}

#[derive(Default)]
struct Counts {
    absorbed: AtomicU64,
    home_bytes: AtomicU64,
    home_writes: AtomicU64,
    epochs: AtomicU64,
    errors: AtomicU64,
    copied: AtomicU64,
    waited: AtomicU64,
    pub(super) replayed: AtomicU64,
}

/// A flag and whom it wakes.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for a ring, at most so long.
    fn wait(&self, most: Duration) {
        let mut rung = self.rung.lock();
        if !*rung {
            self.changed.wait_for(&mut rung, most);
        }
        *rung = false;
    }
}

/// What makes names of the source durable.
pub type NamesSync = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// See the module.
pub(crate) struct Writeback {
    me: Weak<Writeback>,
    pub(super) journal: Journal,
    pub(super) mutants: Mutants,
    tunables: Arc<Tunables>,
    order: WritebackOrder,
    no_uring: bool,
    unit: u64,
    mark: Option<Arc<dyn OwnerMark>>,
    /// The mark says dirty. Locked while it is being made to.
    marked: Mutex<bool>,
    is_marked: AtomicBool,
    executor: Executor,
    devices: Mutex<HashMap<DeviceId, Arc<Device>>>,
    /// Devices whose writers wait, and how many of them.
    writers: Mutex<HashMap<DeviceId, (Arc<Device>, usize)>>,
    /// It was opened for reading only.
    read_only: bool,
    control: Mutex<Control>,
    events: Mutex<Vec<Event>>,
    bell: Bell,
    /// Something became clean, or room was made in the index.
    progress: (Mutex<()>, Condvar),
    pieces: AtomicUsize,
    pieces_max: usize,
    devices_max: AtomicUsize,
    /// Writers that wait for room in the index.
    index_waiters: AtomicUsize,
    in_flight: AtomicUsize,
    flushing_all: AtomicUsize,
    stopping: AtomicBool,
    /// Epochs of whole filesystems that are being synced.
    groups_syncing: AtomicUsize,
    /// A barrier for home writes is under way.
    making_durable: AtomicBool,
    /// Device number of a filesystem -> when it was asked, its free bytes.
    space: Mutex<HashMap<u64, (u64, Option<u64>)>>,
    /// Dirty data was dropped with its last name: the source must be durable without it before
    /// the records go.
    names: OnceLock<NamesSync>,
    names_changed: AtomicBool,
    /// When the last durable heartbeat was made, in ms of our clock; 0: none yet. See `commit`.
    heartbeat_ms: AtomicU64,
    counts: Counts,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Writeback {
    /// Over a running journal. No thread runs before `start`.
    pub(super) fn new(
        journal: Journal,
        config: &StoreConfig,
        tunables: Arc<Tunables>,
        mark: Option<Arc<dyn OwnerMark>>,
        mutants: Mutants,
        by_hand: bool,
    ) -> Arc<Writeback> {
        let read_only = journal.failure().is_some();
        let index = (config.cache_bytes / 8).max(INDEX_MIN);
        let executor = if by_hand {
            Executor::ByHand(Mutex::default())
        } else {
            Executor::Threads(Mutex::default())
        };
        Arc::new_cyclic(|me| Writeback {
            me: me.clone(),
            journal,
            mutants,
            tunables,
            order: config.writeback.order,
            no_uring: config.writeback.no_uring,
            unit: u64::from(config.block_size).max(4096),
            mark,
            marked: Mutex::new(false),
            is_marked: AtomicBool::new(false),
            executor,
            devices: Mutex::default(),
            writers: Mutex::default(),
            read_only,
            control: Mutex::new(Control {
                controller: Controller::new(),
                syncing: HashSet::new(),
                group: 0,
                grouped_ms: 0,
                group_wanted_ms: None,
                singles: (0, 0),
                freeing: false,
                copying: HashSet::new(),
            }),
            events: Mutex::default(),
            bell: Bell::default(),
            progress: Default::default(),
            pieces: AtomicUsize::new(0),
            pieces_max: (index / PIECE_BYTES) as usize,
            devices_max: AtomicUsize::new(usize::MAX),
            index_waiters: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            flushing_all: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            groups_syncing: AtomicUsize::new(0),
            making_durable: AtomicBool::new(false),
            space: Mutex::default(),
            names: OnceLock::new(),
            names_changed: AtomicBool::new(false),
            heartbeat_ms: AtomicU64::new(0),
            counts: Counts::default(),
            threads: Mutex::default(),
        })
    }

    /// What home writes in flight must not share, in bytes (J6).
    pub(super) fn unit(&self) -> u64 {
        self.unit
    }

    /// Whether anything may still be journaled.
    pub(super) fn takes_writes(&self) -> bool {
        !self.stopping.load(SeqCst) && self.journal.failure().is_none()
    }

    /// Room for what helps to empty the journal.
    pub(super) fn reserve_internal(&self, changes: &[Change<'_>]) -> Result<Reservation> {
        self.check_writable()?;
        self.mark_dirty()?;
        self.journal.reserve(Purpose::Internal, self.journal.charge(changes))
    }

    /// The owner mark is durable before the first append of this mount.
    fn mark_dirty(&self) -> Result<()> {
        if self.is_marked.load(SeqCst) {
            return Ok(());
        }
        let mut marked = self.marked.lock();
        if !*marked {
            if let Some(mark) = &self.mark {
                mark.dirty()?;
            }
            *marked = true;
            self.is_marked.store(true, SeqCst);
        }
        Ok(())
    }

    /// Whether the source has room for what was promised and `more` (STORE 4).
    pub(super) fn has_space(&self, file: &dyn BlockDevice, dev: u64, more: u64) -> bool {
        let now = clock::now_ms();
        let known = self.space.lock().get(&dev).copied();
        let free = match known {
            Some((asked, free)) if now.saturating_sub(asked) < SPACE_MS => free,
            _ => {
                let free = file.free_bytes().unwrap_or(None);
                self.space.lock().insert(dev, (now, free));
                free
            }
        };
        // Dirty bytes may all be of holes: whoever is near the limit is looked at more closely.
        let Some(free) = free else { return true };
        let kept = SPACE_KEPT + more;
        // The journal bounds what is dirty: most sources have more room than that.
        free >= self.journal.usage().used_bytes.saturating_add(kept)
            || free >= self.dirty_bytes().saturating_add(kept)
    }

    fn dirty_bytes(&self) -> u64 {
        let devices: Vec<Arc<Device>> = self.devices.lock().values().cloned().collect();
        if devices.len() > 64 {
            // An upper bound is enough, and cheaper.
            return self.journal.usage().used_bytes;
        }
        devices.iter().map(|device| device.dirty.lock().map.load().live_bytes).sum()
    }

    /// A write made older dirty bytes needless.
    pub(super) fn absorbed(&self, bytes: u64) {
        self.counts.absorbed.fetch_add(bytes, Relaxed);
    }

    /// A map has grown or shrunk.
    pub(super) fn pieces_changed(&self, before: usize, after: usize) {
        if after >= before {
            self.pieces.fetch_add(after - before, SeqCst);
        } else {
            self.pieces.fetch_sub(before - after, SeqCst);
        }
    }

    /// A device became dirty or clean. Called under its dirty lock.
    pub(super) fn list(&self, device: &Device, is_dirty: bool) {
        let id = device.cached.id;
        if is_dirty {
            if let Some(device) = device.me.upgrade() {
                self.devices.lock().insert(id, device);
            }
        } else {
            let gone = self.devices.lock().remove(&id);
            device.admission.store(Admission::Yes as u8, SeqCst);
            self.tell(Event::Gone { device: id });
            // Never the last reference: the caller has one.
            drop(gone);
        }
    }

    pub(super) fn has_dirty(&self) -> bool {
        !self.devices.lock().is_empty()
    }

    pub(super) fn listed(&self) -> Vec<Arc<Device>> {
        self.devices.lock().values().cloned().collect()
    }

    fn device(&self, id: DeviceId) -> Option<Arc<Device>> {
        self.devices.lock().get(&id).cloned()
    }

    fn tell(&self, event: Event) {
        self.events.lock().push(event);
        self.bell.ring();
    }

    /// There may be something to do.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    fn made_progress(&self) {
        drop(self.progress.0.lock());
        self.progress.1.notify_all();
    }

    /// Until something in flight may have ended.
    pub(super) fn wait_a_little(&self) {
        if self.is_by_hand() {
            return self.go_on();
        }
        let mut guard = self.progress.0.lock();
        self.progress.1.wait_for(&mut guard, Duration::from_millis(2));
    }

    fn submit(&self, task: Task) {
        match &self.executor {
            Executor::ByHand(queue) => queue.lock().push_back(task),
            Executor::Threads(workers) => {
                let workers = workers.lock().clone();
                match workers {
                    Some(workers) => workers.submit(task),
                    // Not started: nothing has asked for home writes yet.
                    None => drop(task),
                }
            }
        }
    }

    /// Tests: a step with everything flushing, or one task; both if there is no task.
    pub(super) fn run_by_hand(&self, step: bool, which: u64) {
        let ran = self.run_task(which);
        if step || !ran {
            self.flushing_all.store(1, SeqCst);
            self.step();
        }
    }

    /// One of the tasks that wait, where there are no threads; whether there was one.
    fn run_task(&self, which: u64) -> bool {
        let Executor::ByHand(queue) = &self.executor else { return false };
        let task = {
            let mut queue = queue.lock();
            let len = queue.len() as u64;
            if len == 0 { None } else { queue.remove((which % len) as usize) }
        };
        match task {
            Some(Task::Call(call)) => call(),
            Some(Task::Write(job)) => workers::write_now(job),
            None => return false,
        }
        true
    }

    /// Without threads: a step as it is, and a task.
    fn go_on(&self) {
        self.step();
        self.run_task(0);
    }

    /// The hook that makes names of the source durable.
    pub(super) fn set_names_sync(&self, sync: NamesSync) {
        if self.names.set(sync).is_err() {
            log::warn!("journal: the hook for names is set already");
        }
    }

    /// Dirty data of a file was dropped with its last name.
    pub(super) fn dropped_with_name(&self) {
        self.names_changed.store(true, SeqCst);
    }
}
