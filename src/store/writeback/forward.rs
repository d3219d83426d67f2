//! Keeping the journal's tail moving: freeing it when nothing in it is live, and copying live
//! records of devices that cannot be written forward, so that they hold up nobody else (W4).
//!
//! A copy is a new record with the bytes of a live piece, made under the device's dirty lock if the
//! piece is still that one; so it never brings back anything older than what lies beside it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::workers::Task;
use super::{Control, Writeback};
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, Entry, Freed, Placed, Purpose};
use crate::store::device::Device;
use crate::store::dirty::{Body, Fresh, Known};
use crate::units::{Extent, Timestamp};

impl Writeback {
    /// Tries to free the tail, on a worker.
    pub(super) fn free_tail(&self, control: &mut Control, last_seq: u64) {
        if std::mem::replace(&mut control.freeing, true) {
            return;
        }
        let Some(writeback) = self.me.upgrade() else { return };
        self.submit(Task::Call(Box::new(move || {
            if let Err(error) = writeback.try_free(last_seq) {
                log::error!("journal: its oldest segment cannot be freed: {error}");
            }
            writeback.control.lock().freeing = false;
            writeback.ring();
            writeback.made_progress();
        })));
    }

    pub(in crate::store) fn try_free(&self, last_seq: u64) -> Result<Freed> {
        // A device is listed before its record is appended, so `last_seq` is older than the list.
        let live = self.listed().iter().filter_map(|d| d.dirty.lock().map.live_seq()).min();
        if live.is_some_and(|live| live <= last_seq) {
            return Ok(Freed::Moved);
        }
        // Dropped records are gone for good only once the source agrees that the file is.
        if self.names_changed.swap(false, SeqCst) {
            let synced = self.names.get().map_or(Ok(()), |sync| sync());
            if let Err(error) = synced {
                self.names_changed.store(true, SeqCst);
                return Err(error);
            }
        }
        self.journal.free_tail(last_seq)
    }

    /// Appends a device's live records up to a sequence again, on a worker.
    pub(super) fn copy_forward(&self, control: &mut Control, device: Arc<Device>, up_to: u64) {
        if !control.copying.insert(device.cached.id) {
            return;
        }
        let Some(writeback) = self.me.upgrade() else { return };
        self.submit(Task::Call(Box::new(move || {
            if let Err(error) = writeback.copy_all(&device, up_to) {
                log::warn!("journal: {} cannot be copied forward: {error}", device.name());
            }
            writeback.control.lock().copying.remove(&device.cached.id);
            writeback.ring();
        })));
    }

    fn copy_all(&self, device: &Device, up_to: u64) -> Result<()> {
        let (pieces, size, mtime) = device.dirty.lock().map.live_up_to(up_to);
        for known in pieces {
            self.copy_piece(device, &known)?;
        }
        if let Some(bytes) = size {
            self.copy_note(device, Change::Data(&[]), Some(bytes), None)?;
        }
        if let Some(mtime) = mtime {
            self.copy_note(device, Change::Attr(&[]), None, Some(mtime))?;
        }
        Ok(())
    }

    fn copy_piece(&self, device: &Device, known: &Known) -> Result<()> {
        let mut bytes = Vec::new();
        if let Some((placed, skip)) = known.record() {
            let pin = {
                let dirty = device.dirty.lock();
                if !dirty.map.has(known) {
                    return Ok(());
                }
                self.journal.pin(&placed)
            };
            bytes = vec![0; known.extent.len as usize];
            self.journal.read_payload(&placed, skip, &mut bytes)?;
            drop(pin);
        }
        if known.extent.end() == u64::MAX {
            return self.copy_cut(device, known);
        }
        let change = match known.body {
            Body::Data { .. } => Change::Data(&bytes),
            Body::Zero => Change::Zero(known.extent.len),
        };
        let room = self.journal.charge(&[change]);
        let Some(mut room) = self.journal.try_reserve(Purpose::Internal, room) else {
            return Ok(());
        };
        let mut dirty = device.dirty.lock();
        if !dirty.map.has(known) {
            return Ok(());
        }
        let mtime = dirty.map.times().map_or_else(clock::wall, |(mtime, _)| mtime);
        let (offset, size_after) = (known.extent.offset, device.size());
        let entry = Entry { device: device.cached.id, offset, change, size_after, mtime };
        let appended = self.journal.append(&mut room, &[entry])?;
        dirty.last_seq = appended.seq;
        let pieces = dirty.map.len();
        let part = |placed: &Placed| Fresh {
            extent: Extent { offset: placed.offset, len: placed.length },
            seq: placed.seq,
            write_seq: appended.seq,
            now_ms: 0,
            body: if known.body == Body::Zero { Body::Zero } else { Body::of(placed) },
        };
        let parts: Vec<Fresh> = appended.records.iter().map(part).collect();
        dirty.map.moved(known, &parts);
        self.pieces_changed(pieces, dirty.map.len());
        self.counts.copied.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
    }

    /// What is left of a truncate: zeros up to the end as it is now, and a truncate there. Zeros
    /// alone would not cut what the file still has behind it.
    fn copy_cut(&self, device: &Device, known: &Known) -> Result<()> {
        let charge = self.journal.charge(&[Change::Zero(0), Change::Truncate]);
        let Some(mut room) = self.journal.try_reserve(Purpose::Internal, charge) else {
            return Ok(());
        };
        let mut dirty = device.dirty.lock();
        let (start, size) = (known.extent.offset, device.size());
        if !dirty.map.has(known) || size < start {
            return Ok(());
        }
        let mtime = dirty.map.times().map_or_else(clock::wall, |(mtime, _)| mtime);
        let id = device.cached.id;
        let zero = Entry {
            device: id,
            offset: start,
            change: Change::Zero(size - start),
            size_after: size,
            mtime,
        };
        let cut = Entry { offset: size, change: Change::Truncate, ..zero };
        let appended = self.journal.append(&mut room, &[zero, cut])?;
        dirty.last_seq = appended.seq;
        let pieces = dirty.map.len();
        let ends = [(start, size), (size, u64::MAX)];
        let part = |((from, to), placed): ((u64, u64), &Placed)| Fresh {
            extent: Extent { offset: from, len: to - from },
            seq: placed.seq,
            write_seq: appended.seq,
            now_ms: 0,
            body: Body::Zero,
        };
        let parts = ends.into_iter().zip(&appended.records).map(part);
        let parts: Vec<Fresh> = parts.filter(|part| part.extent.len > 0).collect();
        dirty.map.moved(known, &parts);
        self.pieces_changed(pieces, dirty.map.len());
        Ok(())
    }

    fn copy_note(
        &self,
        device: &Device,
        change: Change<'_>,
        bytes: Option<u64>,
        time: Option<Timestamp>,
    ) -> Result<()> {
        let Some(mut room) =
            self.journal.try_reserve(Purpose::Internal, self.journal.charge(&[change]))
        else {
            return Ok(());
        };
        let mut dirty = device.dirty.lock();
        let mtime = time.or(dirty.map.times().map(|(mtime, _)| mtime));
        let size_after = device.size();
        if bytes.is_some_and(|bytes| bytes != size_after) {
            return Ok(());
        }
        let mtime = mtime.unwrap_or_else(clock::wall);
        let id = device.cached.id;
        let entry = Entry { device: id, offset: size_after, change, size_after, mtime };
        let appended = self.journal.append(&mut room, &[entry])?;
        dirty.last_seq = appended.seq;
        match (bytes, time) {
            (Some(bytes), _) => dirty.map.moved_size(bytes, appended.seq, appended.seq),
            (None, Some(mtime)) => dirty.map.moved_time(mtime, appended.seq),
            (None, None) => {}
        }
        Ok(())
    }
}
