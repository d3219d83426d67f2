//! Changes of a device that go around the journal: all of them while the mode is not writeback, and
//! the whole units of long streams.
//!
//! States of a direct change: entered (the device is clean, or the stream's range is; what the ring
//! has of it is void for replay, durably: J14) -> in flight (as a home write: J6) -> done. What of
//! it is durable nobody knows before the next sync of the file, so the sizes it may leave are noted
//! (J12). Locks: the device's dirty lock, never held while the change is made.

use std::sync::atomic::Ordering::SeqCst;

use super::device::Device;
use super::journaled::{After, Journaled};
use super::writeback::Writeback;
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, Entry, Reservation};
use crate::units::Extent;

/// How far ahead of a stream of writes its range may be revoked.
const REVOKE_AHEAD: u64 = 64 << 20;

/// A change outside the journal in flight; over when dropped.
struct Direct<'a> {
    device: &'a Device,
    id: u64,
    /// Journaled changes wait for it: it is not ordered with them.
    excludes: bool,
}

impl Drop for Direct<'_> {
    fn drop(&mut self) {
        let mut dirty = self.device.dirty.lock();
        dirty.map.end_direct(self.id);
        dirty.directs -= usize::from(self.excludes);
    }
}

impl Device {
    /// Whether replay would bring back bytes of it over what is changed outside the journal.
    fn needs_revoke(&self, wb: &Writeback) -> bool {
        !wb.mutants.skip_revoke && wb.journal.would_replay(self.cached.id)
    }

    /// Registers a change outside the journal: waits until the device is clean, voids what the
    /// ring still has of it (J14), waits for home writes nearby (J6). `size`: what its size may
    /// become. EIO or EROFS once the journal failed: then the store is read-only (J9, J11).
    pub(super) fn enter_direct(
        &self,
        wb: &Writeback,
        extent: Extent,
        size: u64,
    ) -> Result<impl Drop + '_> {
        loop {
            wb.check_writable()?;
            if self.is_dirty.load(SeqCst) {
                wb.flush_device(self)?;
            }
            if self.needs_revoke(wb) {
                self.revoke_all(wb)?;
            }
            let mut dirty = self.dirty.lock();
            if !dirty.map.is_clean() || self.needs_revoke(wb) {
                continue;
            }
            if let Some(id) = dirty.map.begin_direct(extent, wb.unit()) {
                dirty.directs += 1;
                dirty.announce_again();
                dirty.map.expect_home_size(self.size());
                dirty.map.expect_home_size(size);
                return Ok(Direct { device: self, id, excludes: true });
            }
            drop(dirty);
            wb.wait_a_little();
        }
    }

    /// Voids everything the ring has of this device, if it is clean.
    fn revoke_all(&self, wb: &Writeback) -> Result<()> {
        let change = Change::Revoke(u64::MAX);
        let mut room = wb.reserve_internal(&[change])?;
        let mut dirty = self.dirty.lock();
        if !dirty.map.is_clean() {
            return Ok(());
        }
        let (device, size_after, mtime) = (self.cached.id, self.size(), clock::wall());
        let entry = Entry { device, offset: 0, change, size_after, mtime };
        let appended = wb.journal.append(&mut room, &[entry])?;
        (dirty.last_seq, dirty.ahead, dirty.grows) = (appended.seq, None, None);
        // What recovery knows of its size begins anew.
        dirty.announce_again();
        drop(dirty);
        wb.journal.barrier_to(appended.seq)?;
        wb.journal.voided(self.cached.id, appended.seq);
        Ok(())
    }

    /// Whole units of a stream, past the journal. False: they must be journaled after all.
    pub(super) fn write_around(&self, wb: &Writeback, offset: u64, data: &[u8]) -> Result<bool> {
        let extent = Extent { offset, len: data.len() as u64 };
        let changes = [Change::Revoke(0), Change::Data(&[])];
        let mut room = wb.reserve(self, &changes)?;
        let direct = loop {
            let mut dirty = self.lock_journaled(wb);
            if dirty.map.overlaps(extent) {
                return Ok(false);
            }
            let id = dirty.map.begin_direct(extent, wb.unit());
            let Some(id) = id else {
                drop(dirty);
                wb.wait_a_little();
                continue;
            };
            let direct = Direct { device: self, id, excludes: false };
            let ready = self.prepare_stream(wb, &mut dirty, &mut room, extent);
            drop(dirty);
            wb.journal.barrier_to(ready?)?;
            break direct;
        };
        self.note_change();
        let result = self.file.write_at(data, offset);
        // Again: a sync may have begun before the write and cleared the note.
        self.note_change();
        self.shared.cache.invalidate(&self.cached, extent);
        let mut dirty = self.dirty.lock();
        let home = dirty.map.home_size();
        dirty.map.set_home_size(if result.is_ok() { home.max(extent.end()) } else { home });
        self.publish(wb, &dirty);
        drop(dirty);
        drop(direct);
        self.tell_file();
        wb.ring();
        result.and_then(|()| self.file.settle()).map(|()| true)
    }

    /// Voids what replay would write over a stream, for some way ahead; the sequence that must be
    /// durable before the stream goes on.
    fn revoke_ahead(
        &self,
        wb: &Writeback,
        dirty: &mut Journaled,
        room: &mut Reservation,
        extent: Extent,
    ) -> Result<u64> {
        let covers = |ahead: &Extent| ahead.offset <= extent.offset && extent.end() <= ahead.end();
        if let Some((_, seq)) = dirty.ahead.filter(|(ahead, _)| covers(ahead)) {
            // Perhaps not durable yet: another writer's.
            return Ok(seq);
        }
        if !self.needs_revoke(wb) {
            return Ok(0);
        }
        let next = dirty.map.next_piece(extent.offset).unwrap_or(u64::MAX);
        let end = next.min(extent.offset.saturating_add(REVOKE_AHEAD.max(extent.len)));
        let len = end - extent.offset;
        let after = After { size: self.size(), mtime: clock::wall() };
        let appended = self.append(wb, dirty, room, extent.offset, Change::Revoke(len), &after)?;
        dirty.ahead = Some((Extent { offset: extent.offset, len }, appended.seq));
        Ok(appended.seq)
    }

    /// Records what must be known before a stream goes on; the sequence that must be durable.
    fn prepare_stream(
        &self,
        wb: &Writeback,
        dirty: &mut Journaled,
        room: &mut Reservation,
        extent: Extent,
    ) -> Result<u64> {
        let (now, end) = (clock::wall(), extent.end());
        let revoked = self.revoke_ahead(wb, dirty, room, extent)?;
        let grows = end > dirty.map.home_size();
        let known = dirty.grows.filter(|(most, _)| end <= *most);
        if grows && known.is_none() {
            // One record for some way ahead: recovery must not wonder at the size (J12).
            dirty.map.expect_home_size(end.saturating_add(REVOKE_AHEAD));
            dirty.announce_again();
        }
        if self.size() < end {
            let after = After { size: end, mtime: now };
            let appended = self.append(wb, dirty, room, end, Change::Data(&[]), &after)?;
            self.resized(dirty, end, &appended);
            dirty.map.note_change(now);
            if grows && known.is_none() {
                dirty.grows = Some((end.saturating_add(REVOKE_AHEAD), appended.seq));
            }
        } else if !dirty.map.is_clean() {
            dirty.map.note_change(now);
        }
        Ok(match known {
            _ if !grows => revoked,
            Some((_, seq)) => revoked.max(seq),
            // Within a size that is acknowledged already, which the last record says.
            None => revoked.max(dirty.last_seq),
        })
    }
}
