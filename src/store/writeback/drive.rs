//! The drive thread: takes a snapshot, steps the controller, executes its actions.
//!
//! A step is made every 100 ms and when the bell rings; rings that come close together share one.
//! `control` is held through the whole step, so steps do not overlap; nothing in it waits for a
//! device.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use super::home::EACH_MAX;
use super::view::{Action, DeviceView, Event, Mode, Settings, World};
use super::workers::Workers;
use super::{Control, Executor, Writeback};
use crate::clock;
use crate::error::{OpContext, Result};
use crate::store::device::Device;

/// Between two steps without a ring.
const TICK: Duration = Duration::from_millis(100);

/// Between two syncs of whole filesystems: each takes what has come home since the last.
const GROUPS_APART_MS: u64 = 100;

/// A sync of whole filesystems waits at most so long for the devices that are still being written:
/// one for all where files are small and many, instead of one for each handful that came home.
const GROUP_WAIT_MS: u64 = 500;

/// Rings within this time share a step; longer for each device that a step looks at, up to a most:
/// with a thousand of them, steps at every ring would take a processor for themselves.
const GATHER: Duration = Duration::from_micros(200);
const GATHER_EACH: Duration = Duration::from_micros(4);
const GATHER_MOST: Duration = Duration::from_millis(20);

impl Writeback {
    /// Starts the threads.
    pub(in crate::store) fn start(self: &Arc<Writeback>) -> Result<()> {
        if let Executor::Threads(workers) = &self.executor {
            *workers.lock() = Some(Arc::new(Workers::start(self.no_uring)?));
        }
        let mut threads = self.threads.lock();
        for (name, run) in
            [("bcfs-drive", Writeback::drive as fn(&Writeback)), ("bcfs-commit", Writeback::commit)]
        {
            let writeback = self.clone();
            let thread = std::thread::Builder::new().name(name.into());
            let life = move || {
                let run = std::panic::AssertUnwindSafe(|| run(&writeback));
                if std::panic::catch_unwind(run).is_err() {
                    // Nothing goes home any more, or nothing becomes durable.
                    writeback.journal.give_up("a panic of a writeback thread");
                    writeback.made_progress();
                }
            };
            threads.push(thread.spawn(life).op("start a writeback thread")?);
        }
        Ok(())
    }

    /// Ends the threads; what is dirty stays in the journal.
    pub(in crate::store) fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.bell.ring();
        // Taken out first: nothing is waited for with a lock held.
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // Their panics are theirs: the journal has everything.
            let _ = thread.join();
        }
        let workers = match &self.executor {
            Executor::Threads(workers) => workers.lock().take(),
            Executor::ByHand(_) => None,
        };
        if let Some(workers) = workers {
            workers.stop();
        }
    }

    /// Forgets every device, once the threads have ended.
    pub(in crate::store) fn let_go(&self) {
        if let Executor::ByHand(tasks) = &self.executor {
            tasks.lock().clear();
        }
        let devices = std::mem::take(&mut *self.devices.lock());
        let writers = std::mem::take(&mut *self.writers.lock());
        drop((devices, writers));
    }

    fn drive(&self) {
        while !self.stopping.load(SeqCst) {
            self.bell.wait(TICK);
            self.step();
            let devices = self.devices.lock().len() as u32;
            std::thread::sleep((GATHER + GATHER_EACH * devices).min(GATHER_MOST));
        }
    }

    /// One step of the controller, and what it asks for.
    pub(super) fn step(&self) {
        if self.journal.failure().is_some() {
            // Nothing of it can be made clean any more: it is left for replay.
            return self.made_progress();
        }
        let mut control = self.control.lock();
        let events = std::mem::take(&mut *self.events.lock());
        for event in &events {
            // Not when it is gone: its sync may still run.
            if let Event::Synced { device, .. } = event {
                control.syncing.remove(device);
            }
        }
        let devices = self.concerned();
        let views: Vec<DeviceView> =
            devices.iter().map(|device| self.view(&control, device)).collect();
        let usage = self.journal.usage();
        let world = World {
            now_ms: clock::now_ms(),
            journal_bytes: usage.capacity_bytes,
            journal_used: usage.used_bytes,
            waiting_writers: self.waiting(),
            in_flight: self.in_flight.load(SeqCst),
            flushing_all: self.flushing_all.load(SeqCst) > 0,
            settings: self.settings(),
            devices: &views,
        };
        let tail = self.journal.tail();
        let actions = control.controller.step(&world, tail, &events);
        let mut better = false;
        for (device, view) in devices.iter().zip(&views) {
            let admission = control.controller.admit(device.cached.id, view.journal_share, 0);
            better |= device.admission.swap(admission as u8, SeqCst) != admission as u8;
        }
        if better {
            self.made_progress();
        }
        let has_epoch =
            |(_, view): &(&Arc<Device>, &DeviceView)| view.written_extents > 0 && !view.syncing;
        let epochs = devices.iter().zip(&views).filter(has_epoch).map(|(device, _)| device.clone());
        let epochs: Vec<Arc<Device>> = epochs.collect();
        let more = self.come_home(&control, &views) > epochs.len() / 4;
        self.execute(&mut control, actions, epochs, more);
    }

    /// Devices that are being written home as fast as they go.
    fn come_home(&self, control: &Control, views: &[DeviceView]) -> usize {
        let comes = |view: &&DeviceView| {
            let at_max = || control.controller.mode(view.id).0 == Mode::Max;
            view.dirty_extents + view.in_flight as u64 > 0
                && at_max()
                && !control.controller.is_stuck(view.id)
        };
        views.iter().filter(comes).count()
    }

    /// Every device with something live, and every one whose writers wait. Others that are open
    /// for writing make no difference to the controller, and would make each step slow.
    fn concerned(&self) -> Vec<Arc<Device>> {
        let mut devices = self.devices.lock().clone();
        for (device, _) in self.writers.lock().values() {
            devices.entry(device.cached.id).or_insert_with(|| device.clone());
        }
        let mut devices: Vec<_> = devices.into_values().collect();
        // One order, for the controller's turns and for workloads that are repeated.
        devices.sort_unstable_by_key(|device| device.cached.id);
        devices
    }

    fn settings(&self) -> Settings {
        Settings {
            percent: self.tunables.writeback_percent(),
            delay_ms: self.tunables.writeback_delay_ms(),
            running: self.tunables.writeback_running(),
            order: self.order,
        }
    }

    fn view(&self, control: &Control, device: &Device) -> DeviceView {
        let id = device.cached.id;
        let load = device.dirty.lock().map.load();
        let frontend = device.frontend_ms.load(Relaxed);
        DeviceView {
            id,
            dirty_bytes: load.waiting_bytes,
            dirty_extents: load.waiting,
            dirty_since_ms: load.waiting_since_ms,
            live_seq: load.live_seq,
            in_flight: load.flying,
            oldest_io_ms: load.oldest_io_ms,
            written_extents: load.written,
            written_since_ms: load.written_since_ms,
            syncing: control.syncing.contains(&id),
            frontend_ms: frontend.checked_sub(1),
            flushing: device.flushing.load(SeqCst) > 0,
            // A header and its padding for each.
            journal_share: load.live_bytes + 96 * load.live,
        }
    }

    /// `more`: many devices are about to have an epoch.
    fn execute(
        &self,
        control: &mut Control,
        actions: Vec<Action>,
        epochs: Vec<Arc<Device>>,
        more: bool,
    ) {
        let mut together = Vec::new();
        for action in actions {
            match action {
                Action::FreeTail { last_seq } => self.free_tail(control, last_seq),
                Action::CopyForward { device, up_to } => {
                    if let Some(device) = self.device(device) {
                        self.copy_forward(control, device, up_to);
                    }
                }
                Action::Sync { device } => together.extend(self.device(device)),
                Action::Pass { device, extents, bytes, pick, lba } => {
                    if let Some(device) = self.device(device) {
                        self.pass(control, &device, (extents, bytes), pick, lba);
                    }
                }
            }
        }
        if together.is_empty() {
            return;
        }
        // Where many have an epoch, one call takes all of them: whoever is asked next has none.
        let at_once = epochs.len() > EACH_MAX;
        let now = clock::now_ms();
        if now.saturating_sub(control.singles.0) >= GROUPS_APART_MS {
            control.singles = (now, 0);
        }
        control.singles.1 += if at_once { 0 } else { together.len() };
        if !at_once && control.singles.1 > EACH_MAX && !self.is_by_hand() {
            // A stream of small files: those that come home within this time share a sync.
            return;
        }
        if at_once {
            let wanted = *control.group_wanted_ms.get_or_insert(now);
            let paced = now.saturating_sub(control.grouped_ms) >= GROUPS_APART_MS;
            // Whoever waits for room in the journal waits for the tail, not for all of them.
            let waits =
                more && self.journal.waiting() == 0 && now.saturating_sub(wanted) < GROUP_WAIT_MS;
            if !paced || waits || self.groups_syncing.load(SeqCst) > 0 {
                return;
            }
            (control.grouped_ms, control.group_wanted_ms) = (now, None);
        }
        let mut wanted = if at_once { epochs } else { together };
        wanted.retain(|device| control.syncing.insert(device.cached.id));
        self.sync_epochs(wanted, at_once);
    }
}
