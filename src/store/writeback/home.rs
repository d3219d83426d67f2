//! Passes and epochs: what goes home, and when it counts as being there.
//!
//! An operation is planned under the device's dirty lock, done by a worker without it, and
//! completed under it again. A completed extent is written, not clean: that it is only after a sync
//! of its device that began later (J4). The cache is brought up to date at completion: while a
//! piece was dirty it hid whatever was fetched below it (J7).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::view::{Event, Pick};
use super::workers::{Job, Task};
use super::{Control, Writeback};
use crate::clock;
use crate::device::{BlockDevice, Range};
use crate::error::{Error, Kind, Result};
use crate::journal::Pin;
use crate::store::device::Device;
use crate::store::dirty::{HomeOp, Limits, OpKind, Part};
use crate::units::Extent;

/// The baseline awaits all its writes after so many.
const GROUP: usize = 500;

/// No home write is made while the last durable heartbeat is older (J12).
const HEARTBEAT_MS: u64 = 1000;

/// Epochs of more devices than this are synced with one call for each filesystem.
pub(super) const EACH_MAX: usize = 16;

/// What zeros are written where holes cannot be made.
const ZERO_STEP: usize = 1 << 20;

/// A device whose epoch is being synced; some: it is the last of it.
struct Epoch {
    device: Arc<Device>,
    is_last: bool,
}

impl Writeback {
    /// Issues a pass of one device.
    pub(super) fn pass(
        &self,
        control: &mut Control,
        device: &Arc<Device>,
        (ops, bytes): (usize, u64),
        pick: Pick,
        contiguous: bool,
    ) {
        let id = device.cached.id;
        let issued = |bytes| self.events.lock().push(Event::Issued { device: id, bytes });
        if contiguous && control.group >= GROUP {
            if self.in_flight.load(SeqCst) > 0 {
                return issued(0);
            }
            control.group = 0;
        }
        if !self.is_by_hand() && !self.has_fresh_heartbeat() {
            // The commit thread makes one within moments, and rings.
            return issued(0);
        }
        let limits = Limits {
            ops,
            bytes,
            pick,
            contiguous,
            durable: self.journal.durable_seq(),
            unit: self.unit,
            skip_wal: self.mutants.skip_wal,
        };
        let mut dirty = device.dirty.lock();
        let planned = dirty.map.plan(&limits);
        let pinned: Vec<(HomeOp, Vec<Pin>)> =
            planned.ops.into_iter().map(|op| (op.clone(), self.pins(&op))).collect();
        device.note_home(self, &dirty);
        device.publish(self, &dirty);
        drop(dirty);
        if planned.barrier.is_some() {
            self.make_durable();
        }
        let total: u64 = pinned.iter().map(|(op, _)| bytes_of(op)).sum();
        control.group += pinned.len();
        if !pinned.is_empty() && pinned.len() < ops && total < bytes {
            // Less than was granted: there may be more to take at once.
            self.ring();
        }
        for (op, pins) in pinned {
            self.dispatch(device, op, pins);
        }
        issued(total);
    }

    /// Whether a durable heartbeat says that this mount is alive: home writes move a file's ctime,
    /// which recovery must be able to explain.
    fn has_fresh_heartbeat(&self) -> bool {
        let beat = self.heartbeat_ms.load(SeqCst);
        beat > 0 && clock::now_ms().saturating_sub(beat) <= HEARTBEAT_MS
    }

    fn pins(&self, op: &HomeOp) -> Vec<Pin> {
        let OpKind::Write(parts) = &op.kind else { return Vec::new() };
        parts.iter().map(|part| self.journal.pin(&part.placed)).collect()
    }

    /// What a pass wanted was not durable yet (J13). One barrier at a time: it covers all.
    fn make_durable(&self) {
        let Some(writeback) = self.me.upgrade() else { return };
        if self.making_durable.swap(true, SeqCst) {
            return;
        }
        self.submit(Task::Call(Box::new(move || {
            // A failure is the journal's for good; the next step sees it.
            let _ = writeback.journal.settle();
            writeback.making_durable.store(false, SeqCst);
            writeback.ring();
        })));
    }

    fn dispatch(&self, device: &Arc<Device>, op: HomeOp, pins: Vec<Pin>) {
        let Some(writeback) = self.me.upgrade() else { return };
        self.in_flight.fetch_add(1, SeqCst);
        let (device, file) = (device.clone(), device.file.clone());
        match op.kind.clone() {
            OpKind::Write(parts) => {
                let (offset, len) = (op.extent.offset, op.extent.len as usize);
                let reader = writeback.clone();
                let fill = Box::new(move |out: &mut [u8]| {
                    let _pins = pins;
                    reader.read_parts(&parts, out)
                });
                let done = Box::new(move |result: Result<()>, bytes: &[u8]| {
                    writeback.completed(&device, &op, result, bytes);
                });
                self.submit(Task::Write(Job { device: file, offset, len, fill, done }));
            }
            OpKind::Zero => self.submit(Task::Call(Box::new(move || {
                let result = make_zero(&*file, op.extent);
                writeback.completed(&device, &op, result, &[]);
            }))),
            OpKind::SetSize(bytes) => self.submit(Task::Call(Box::new(move || {
                let result = file.set_size(bytes);
                writeback.completed(&device, &op, result, &[]);
            }))),
        }
    }

    fn read_parts(&self, parts: &[Part], out: &mut [u8]) -> Result<()> {
        let mut rest = out;
        for part in parts {
            let short = || Error::new(Kind::Internal, "writeback", "parts longer than the write");
            let (now, later) = std::mem::take(&mut rest)
                .split_at_mut_checked(part.len as usize)
                .ok_or_else(short)?;
            self.journal.read_payload(&part.placed, part.skip, now)?;
            rest = later;
        }
        Ok(())
    }

    fn completed(&self, device: &Arc<Device>, op: &HomeOp, result: Result<()>, bytes: &[u8]) {
        let id = device.cached.id;
        let ok = result.is_ok();
        let cache = &device.shared.cache;
        let mut dirty = device.dirty.lock();
        match &op.kind {
            OpKind::Write(_) if ok => {
                for part in dirty.map.still_of(op) {
                    let from = (part.offset - op.extent.offset) as usize;
                    if let Some(bytes) = bytes.get(from..from + part.len as usize) {
                        cache.update(&device.cached, part.offset, bytes, false, device.size());
                    }
                }
            }
            OpKind::Write(_) => cache.invalidate(&device.cached, op.extent),
            OpKind::Zero | OpKind::SetSize(_) => cache.invalidate(&device.cached, op.extent),
        }
        dirty.map.complete(op, ok, clock::now_ms());
        if self.mutants.skip_epoch_sync {
            let before = dirty.map.len();
            dirty.map.begin_sync();
            dirty.map.end_sync(true);
            self.pieces_changed(before, dirty.map.len());
        }
        device.publish(self, &dirty);
        drop(dirty);
        device.tell_file();
        self.in_flight.fetch_sub(1, SeqCst);
        if ok {
            self.counts.home_bytes.fetch_add(bytes_of(op), Relaxed);
            self.counts.home_writes.fetch_add(1, Relaxed);
        }
        if let Err(error) = result {
            self.failed(device, "writeback", &error);
        }
        self.tell(Event::Wrote { device: id, ok });
        self.made_progress();
    }

    fn failed(&self, device: &Device, op: &str, error: &Error) {
        self.counts.errors.fetch_add(1, Relaxed);
        device.cached.stats.errors.fetch_add(1, Relaxed);
        log::error!("{op} of {}: {error}", device.name());
    }

    /// Syncs the epochs of these devices: each alone, or with one call for each filesystem.
    pub(super) fn sync_epochs(&self, devices: Vec<Arc<Device>>, at_once: bool) {
        if !at_once {
            for device in devices {
                self.sync_group(vec![device], false);
            }
            return;
        }
        let mut groups: HashMap<u64, Vec<Arc<Device>>> = HashMap::new();
        for device in devices {
            groups.entry(device.identity.dev).or_default().push(device);
        }
        groups.into_values().for_each(|group| self.sync_group(group, true));
    }

    fn sync_group(&self, devices: Vec<Arc<Device>>, at_once: bool) {
        let Some(writeback) = self.me.upgrade() else { return };
        self.groups_syncing.fetch_add(usize::from(at_once), SeqCst);
        self.submit(Task::Call(Box::new(move || {
            let epochs: Vec<Epoch> = devices.into_iter().map(begin_epoch).collect();
            let whole = if at_once {
                epochs.first().and_then(|epoch| epoch.device.file.sync_filesystem())
            } else {
                None
            };
            match whole {
                Some(result) => {
                    // An error is everybody's: nobody knows whose it was. Without one each file is
                    // asked for its own: the kernel told it to whoever asked the filesystem first.
                    let why = result.err().map(|error| error.to_string());
                    for (number, epoch) in epochs.into_iter().enumerate() {
                        let result = match &why {
                            Some(why) => Err(Error::new(Kind::Io, "syncfs", why.clone())),
                            None => epoch.device.file.write_out(),
                        };
                        writeback.synced(&epoch, result);
                        if number % EACH_MAX == 0 {
                            // Whoever waits for clean devices does not wait for all of them.
                            writeback.made_progress();
                        }
                    }
                }
                None => {
                    for epoch in epochs {
                        // The last sync takes the restored mtime along.
                        let result = epoch.device.file.sync(!epoch.is_last);
                        writeback.synced(&epoch, result);
                    }
                }
            }
            writeback.counts.epochs.fetch_add(1, Relaxed);
            writeback.groups_syncing.fetch_sub(usize::from(at_once), SeqCst);
            writeback.made_progress();
        })));
    }

    fn synced(&self, epoch: &Epoch, result: Result<()>) {
        let device = &epoch.device;
        let ok = result.is_ok();
        if !ok && device.unsynced.load(SeqCst) {
            device.lost.store(true, SeqCst);
        }
        let mut dirty = device.dirty.lock();
        let (before, sizes) = (dirty.map.len(), dirty.map.home_range());
        dirty.map.end_sync(ok);
        if dirty.map.home_range() != sizes {
            // Its size is known better now, and so shall the log.
            dirty.grows = None;
            dirty.announce_again();
        }
        self.pieces_changed(before, dirty.map.len());
        device.publish(self, &dirty);
        let is_clean = dirty.map.is_clean();
        drop(dirty);
        device.tell_file();
        if let Err(error) = result {
            self.failed(device, "sync", &error);
        }
        if is_clean {
            device.settle();
        }
        self.tell(Event::Synced { device: device.cached.id, ok });
    }
}

fn begin_epoch(device: Arc<Device>) -> Epoch {
    let last = device.dirty.lock().map.begin_sync();
    if let Some(Some(mtime)) = last {
        // A wrong mtime is no reason to keep data in the journal.
        if let Err(error) = device.file.set_mtime(mtime) {
            log::warn!("{}: its modification time cannot be set: {error}", device.name());
        }
    }
    Epoch { device, is_last: last.is_some() }
}

fn bytes_of(op: &HomeOp) -> u64 {
    if let OpKind::Write(_) = op.kind { op.extent.len } else { 0 }
}

/// A hole, or zeros where the source makes none.
fn make_zero(file: &dyn BlockDevice, extent: Extent) -> Result<()> {
    match file.change_range(Range::Punch, extent.offset, extent.len) {
        Err(error) if error.kind == Kind::NotSupported => {}
        other => return other,
    }
    let zeros = vec![0; ZERO_STEP.min(extent.len as usize)];
    let mut at = extent.offset;
    while at < extent.end() {
        let step = zeros.len().min((extent.end() - at) as usize);
        file.write_home(&zeros[..step], at)?;
        at += step as u64;
    }
    Ok(())
}
