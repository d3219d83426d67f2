//! A device's changes by way of the journal (STORE 1): the acknowledgement path of writeback.
//!
//! States of a device: journaled (writeback mode, or not clean since) -> clean -> direct, and back.
//! A write reserves room with no lock held (the only place a writer waits), then takes the device's
//! `dirty` lock and, inside, the journal's append lock: so its record, its piece in the map and its
//! bytes in the cache come in one order. Changes that go around the journal are in `direct`.
//!
//! Invariant: a device is listed as dirty before its record is appended, so whoever frees the tail
//! asks it (J1).

use std::sync::atomic::Ordering::SeqCst;

use super::device::Device;
use super::dirty::{Body, DirtyMap, Fresh};
use super::fsync::Habit;
use super::guard::DirtyGuard;
use super::writeback::Writeback;
use crate::cache::Verdict;
use crate::clock;
use crate::config::CacheMode;
use crate::device::Range;
use crate::error::{Error, Kind, Result};
use crate::journal::{Appended, Change, DeviceIdentity, Entry, Reservation};
use crate::units::{Extent, Timestamp};

/// What `Device.dirty` guards.
pub(super) struct Journaled {
    pub(super) map: DirtyMap,
    /// What the journal knows it by; without it nothing of it is journaled.
    record: Option<DeviceIdentity>,
    /// The journal knows the record.
    announced: bool,
    /// No name is left: its fsync makes none durable.
    nameless: bool,
    /// The last sequence of its last append: what its fsync waits for.
    pub(super) last_seq: u64,
    /// A Revoke of this range and its sequence, with nothing journaled there since.
    pub(super) ahead: Option<(Extent, u64)>,
    /// The log says that the file may be found grown to this size, in a record of this sequence.
    pub(super) grows: Option<(u64, u64)>,
    /// Changes outside the journal that are in flight: journaled ones wait for them.
    pub(super) directs: usize,
    /// Whether its writes are synced one by one.
    habit: Habit,
}

impl Journaled {
    pub(super) fn new(home_size: u64) -> Journaled {
        Journaled {
            map: DirtyMap::new(home_size),
            record: None,
            announced: false,
            nameless: false,
            last_seq: 0,
            ahead: None,
            grows: None,
            directs: 0,
            habit: Habit::default(),
        }
    }

    /// Recovery found this record, and told the journal.
    pub(super) fn know(&mut self, record: DeviceIdentity) {
        (self.record, self.announced) = (Some(record), true);
    }

    /// The file may not be as the journal's last Device record says.
    pub(super) fn announce_again(&mut self) {
        self.announced = false;
    }

    /// No name of it is left: replay does not wonder if it is gone (J10). True if that is news.
    pub(super) fn unname(&mut self) -> bool {
        self.nameless = true;
        let Some(record) = self.record.as_mut().filter(|record| record.named) else { return false };
        record.named = false;
        self.announced = false;
        true
    }
}

/// Where a change of the journal leaves the device.
pub(super) struct After {
    pub(super) size: u64,
    pub(super) mtime: Timestamp,
}

impl Device {
    /// What the journal shall know the device by. Without it, its writes are never journaled.
    pub fn journal_as(&self, record: DeviceIdentity) {
        let mut dirty = self.dirty.lock();
        if dirty.record.as_ref() != Some(&record) {
            dirty.record = Some(record);
            dirty.announced = false;
        }
    }

    /// Whether the journal can know it.
    pub fn has_record(&self) -> bool {
        self.dirty.lock().record.is_some()
    }

    /// A name of it is durable: from now on replay expects to find it, and says so if not. The
    /// journal hears of it with a record that changes nothing.
    pub(super) fn note_named(&self, wb: &Writeback) -> Result<()> {
        let unnamed = |dirty: &Journaled| dirty.record.as_ref().is_some_and(|r| !r.named);
        let gains = |dirty: &Journaled| unnamed(dirty) && !dirty.nameless;
        if !gains(&self.dirty.lock()) || !wb.takes_writes() {
            return Ok(());
        }
        let change = Change::Data(&[]);
        let mut room = wb.reserve_internal(&[change])?;
        let mut dirty = self.dirty.lock();
        if let Some(record) = dirty.record.as_mut() {
            record.named = true;
            dirty.announced = false;
        }
        if dirty.map.is_clean() {
            return Ok(());
        }
        let size = self.size();
        let mtime = dirty.map.times().map_or_else(clock::wall, |(mtime, _)| mtime);
        let after = After { size, mtime };
        self.append(wb, &mut dirty, &mut room, size, change, &after).map(drop)
    }

    /// It goes by another path: recovery's fallback.
    pub(super) fn record_path(&self, path: &std::path::Path) {
        use std::os::unix::ffi::OsStrExt;
        let mut dirty = self.dirty.lock();
        if let Some(record) = dirty.record.as_mut() {
            record.path = path.as_os_str().as_bytes().to_vec();
            dirty.announced = false;
        }
    }

    fn journals(&self, writeback: &Writeback) -> bool {
        self.shared.tunables.cache_mode() == CacheMode::Writeback
            && writeback.takes_writes()
            && self.dirty.lock().record.is_some()
    }

    pub(super) fn write_with(&self, wb: &Writeback, offset: u64, data: &[u8]) -> Result<()> {
        self.used();
        let extent = Extent { offset, len: data.len() as u64 };
        if !self.journals(wb) {
            let _direct = self.enter_direct(wb, extent, extent.end().max(self.size()))?;
            return self.write_through(offset, data);
        }
        self.may_write(wb, extent)?;
        let cache = &self.shared.cache;
        let verdict = cache.plan_write(&self.cached, offset, extent.len, &self.shared.tunables);
        if verdict != Verdict::Stream {
            return self.append_data(wb, offset, data, verdict == Verdict::Insert);
        }
        let start = offset.next_multiple_of(wb.unit()).min(extent.end());
        let end = (extent.end() & !(wb.unit() - 1)).max(start);
        let (head, rest) = data.split_at((start - offset) as usize);
        let (middle, tail) = rest.split_at((end - start) as usize);
        if !head.is_empty() {
            self.append_data(wb, offset, head, false)?;
        }
        if !middle.is_empty() && !self.write_around(wb, start, middle)? {
            self.append_data(wb, start, middle, false)?;
        }
        if !tail.is_empty() {
            self.append_data(wb, end, tail, false)?;
        }
        Ok(())
    }

    /// Refuses what could never go home: a full source has no room for it. An overwrite of what is
    /// allocated, or promised already, always has.
    fn may_write(&self, wb: &Writeback, extent: Extent) -> Result<()> {
        if wb.has_space(&*self.file, self.identity.dev, extent.len) {
            return Ok(());
        }
        let (known, home_size) = {
            let dirty = self.dirty.lock();
            (dirty.map.lookup(extent), dirty.map.home_size())
        };
        let mut at = extent.offset;
        let promised = known.iter().filter(|known| known.body != Body::Zero);
        let starts = promised.map(|known| (known.extent.offset, known.extent.end()));
        for (start, end) in starts.chain([(extent.end(), extent.end())]) {
            let inside = start <= home_size;
            if at < start && !(inside && self.file.seek(at, true)? >= start) {
                return Err(Error::os("write", rustix::io::Errno::NOSPC));
            }
            at = end;
        }
        Ok(())
    }

    /// The dirty lock for a journaled change: none outside the journal is in flight, and a clean
    /// map knows the device's size.
    pub(super) fn lock_journaled(&self, wb: &Writeback) -> DirtyGuard<'_> {
        loop {
            let mut dirty = self.dirty.lock();
            if dirty.directs == 0 {
                if dirty.map.is_clean() {
                    let size = self.size();
                    if size != dirty.map.home_size() {
                        dirty.map.set_home_size(size);
                        dirty.announce_again();
                    }
                }
                return dirty;
            }
            drop(dirty);
            wb.wait_a_little();
        }
    }

    fn append_data(&self, wb: &Writeback, offset: u64, data: &[u8], insert: bool) -> Result<()> {
        let change = Change::Data(data);
        let mut room = wb.reserve(self, &[change])?;
        let end = offset + data.len() as u64;
        let mut dirty = self.lock_journaled(wb);
        let old = self.size();
        let after = After { size: old.max(end), mtime: clock::wall() };
        let appended = self.append(wb, &mut dirty, &mut room, offset, change, &after)?;
        let pieces = dirty.map.len();
        for placed in &appended.records {
            let extent = Extent { offset: placed.offset, len: placed.length };
            let seqs = (placed.seq, appended.seq);
            self.insert(wb, &mut dirty, extent, seqs, Body::of(placed));
        }
        if after.size != old {
            self.resized(&mut dirty, after.size, &appended);
        }
        dirty.map.note_change(after.mtime);
        self.shared.cache.update(&self.cached, offset, data, insert, after.size);
        self.changed(wb, dirty, pieces);
        Ok(())
    }

    /// Appends one change of this device. The caller holds its dirty lock.
    pub(super) fn append(
        &self,
        wb: &Writeback,
        dirty: &mut Journaled,
        room: &mut Reservation,
        offset: u64,
        change: Change<'_>,
        after: &After,
    ) -> Result<Appended> {
        if !dirty.announced {
            let unknown = || Error::new(Kind::Internal, "journal write", "no record of the file");
            let record = dirty.record.as_ref().ok_or_else(unknown)?;
            wb.journal.set_device(self.cached.id, record, self.size())?;
            self.note_home(wb, dirty);
            dirty.announced = true;
        }
        let lives = !matches!(change, Change::Revoke(_) | Change::Unlink(_));
        if lives && !self.is_dirty.swap(true, SeqCst) {
            wb.list(self, true);
        }
        let (size_after, mtime) = (after.size, after.mtime);
        let device = self.cached.id;
        let entry = Entry { device, offset, change, size_after, mtime };
        let appended = wb.journal.append(room, &[entry]);
        match &appended {
            Ok(appended) => dirty.last_seq = appended.seq,
            // Listed for nothing.
            Err(_) => self.publish(wb, dirty),
        }
        appended
    }

    /// The journal hears what sizes the file may have at home.
    pub(super) fn note_home(&self, wb: &Writeback, dirty: &Journaled) {
        wb.journal.note_home(self.cached.id, dirty.map.home_range());
    }

    fn insert(
        &self,
        wb: &Writeback,
        dirty: &mut Journaled,
        extent: Extent,
        (seq, write_seq): (u64, u64),
        body: Body,
    ) {
        if dirty.ahead.is_some_and(|(ahead, _)| ahead.overlaps(&extent)) {
            dirty.ahead = None;
        }
        let now_ms = clock::now_ms();
        let absorbed = dirty.map.insert(Fresh { extent, seq, write_seq, now_ms, body });
        wb.absorbed(absorbed);
    }

    pub(super) fn resized(&self, dirty: &mut Journaled, bytes: u64, appended: &Appended) {
        // The first record says the size; the last one's durability says that it counts.
        let first = appended.records.first().map_or(appended.seq, |placed| placed.seq);
        dirty.map.set_size(bytes, first, appended.seq, clock::now_ms());
        self.note_size(bytes);
    }

    /// A change is in the map: the device is dirty, and writeback hears of it.
    fn changed(&self, wb: &Writeback, mut dirty: DirtyGuard<'_>, pieces_before: usize) {
        self.note_touch();
        wb.pieces_changed(pieces_before, dirty.map.len());
        self.publish(wb, &dirty);
        let sync_follows = dirty.habit.wrote();
        drop(dirty);
        wb.journal.start_write_out(sync_follows);
        self.tell_file();
        wb.ring();
    }

    /// Tells those who look without the lock. Under it, so that none of it is ever late.
    pub(super) fn publish(&self, wb: &Writeback, dirty: &Journaled) {
        let is_dirty = !dirty.map.is_clean();
        self.has_pieces.store(!dirty.map.has_no_pieces(), SeqCst);
        if self.is_dirty.swap(is_dirty, SeqCst) != is_dirty {
            wb.list(self, is_dirty);
        }
    }

    pub(super) fn set_size_with(&self, wb: &Writeback, bytes: u64) -> Result<()> {
        self.used();
        if !self.journals(wb) {
            let all = Extent { offset: 0, len: u64::MAX };
            let _direct = self.enter_direct(wb, all, bytes)?;
            return self.set_size_through(bytes);
        }
        let mut room = wb.reserve(self, &[Change::Truncate])?;
        let mut dirty = self.lock_journaled(wb);
        let after = After { size: bytes, mtime: clock::wall() };
        let appended = self.append(wb, &mut dirty, &mut room, bytes, Change::Truncate, &after)?;
        let pieces = dirty.map.len();
        let extent = Extent { offset: bytes, len: u64::MAX - bytes };
        self.insert(wb, &mut dirty, extent, (appended.seq, appended.seq), Body::Zero);
        self.resized(&mut dirty, bytes, &appended);
        dirty.map.note_change(after.mtime);
        self.shared.cache.set_size(&self.cached, bytes);
        self.changed(wb, dirty, pieces);
        Ok(())
    }

    pub(super) fn change_range_with(
        &self,
        wb: &Writeback,
        what: Range,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        self.used();
        if !self.journals(wb) {
            let grows = matches!(what, Range::AllocateGrow | Range::ZeroGrow);
            let end = if grows { offset.saturating_add(len) } else { 0 };
            let size = end.max(self.size());
            let _direct = self.enter_direct(wb, Extent { offset, len }, size)?;
            return self.change_range_through(what, offset, len);
        }
        match what {
            Range::Allocate => self.allocate(offset, len),
            Range::AllocateGrow => {
                self.allocate(offset, len)?;
                self.append_size(wb, offset + len)
            }
            Range::Punch | Range::ZeroKeep => self.append_zeros(wb, offset, len, false),
            Range::ZeroGrow => self.append_zeros(wb, offset, len, true),
        }
    }

    /// Allocation changes no byte: it is done at home, at once, without touching the size there.
    fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.note_change();
        let result = self.file.change_range(Range::Allocate, offset, len);
        // Again: a sync may have begun before the change and cleared the note.
        self.note_change();
        result?;
        self.file.settle()?;
        self.touch()
    }

    /// The device is at least this long.
    fn append_size(&self, wb: &Writeback, bytes: u64) -> Result<()> {
        let change = Change::Data(&[]);
        let mut room = wb.reserve(self, &[change])?;
        let mut dirty = self.lock_journaled(wb);
        if self.size() >= bytes {
            return Ok(());
        }
        let after = After { size: bytes, mtime: clock::wall() };
        let appended = self.append(wb, &mut dirty, &mut room, bytes, change, &after)?;
        let pieces = dirty.map.len();
        self.resized(&mut dirty, bytes, &appended);
        dirty.map.note_change(after.mtime);
        self.changed(wb, dirty, pieces);
        Ok(())
    }

    fn append_zeros(&self, wb: &Writeback, offset: u64, len: u64, grows: bool) -> Result<()> {
        let mut room = wb.reserve(self, &[Change::Zero(len)])?;
        let mut dirty = self.lock_journaled(wb);
        let old = self.size();
        let size = if grows { old.max(offset + len) } else { old };
        let len = len.min(size.saturating_sub(offset));
        if len == 0 {
            drop((dirty, room));
            return self.touch();
        }
        let after = After { size, mtime: clock::wall() };
        let change = Change::Zero(len);
        let appended = self.append(wb, &mut dirty, &mut room, offset, change, &after)?;
        let pieces = dirty.map.len();
        let extent = Extent { offset, len };
        self.insert(wb, &mut dirty, extent, (appended.seq, appended.seq), Body::Zero);
        if size != old {
            self.resized(&mut dirty, size, &appended);
        }
        dirty.map.note_change(after.mtime);
        self.shared.cache.invalidate(&self.cached, extent);
        self.changed(wb, dirty, pieces);
        Ok(())
    }

    /// A change that changes no byte still is one: of the time.
    fn touch(&self) -> Result<()> {
        let now = clock::wall();
        if !self.set_mtime(now)? {
            self.file.set_mtime(now)?;
            self.note_attributes();
        }
        Ok(())
    }

    /// utimens of a dirty device: a record, which wins over the writes' own mtime. False if the
    /// device is clean: then it is the source's business.
    pub fn set_mtime(&self, mtime: Timestamp) -> Result<bool> {
        let Some(wb) = self.shared.writeback() else { return Ok(false) };
        if !self.is_dirty.load(SeqCst) {
            return Ok(false);
        }
        let change = Change::Attr(&[]);
        let mut room = wb.reserve(self, &[change])?;
        let mut dirty = self.lock_journaled(wb);
        if dirty.map.is_clean() {
            return Ok(false);
        }
        let after = After { size: self.size(), mtime };
        let appended = self.append(wb, &mut dirty, &mut room, 0, change, &after)?;
        let pieces = dirty.map.len();
        dirty.map.set_mtime(mtime, clock::wall(), appended.seq);
        self.changed(wb, dirty, pieces);
        Ok(true)
    }

    /// Attributes of it changed at the source.
    pub fn note_attributes(&self) {
        self.note_unsynced();
        if self.is_dirty.load(SeqCst) {
            self.dirty.lock().map.note_ctime(clock::wall());
        }
    }

    /// Everything acknowledged of this device is durable in the journal when this returns.
    pub(super) fn barrier(&self, wb: &Writeback) -> Result<()> {
        let seq = {
            let mut dirty = self.dirty.lock();
            dirty.habit.synced();
            dirty.last_seq
        };
        self.shared.cache.reset_write_streams(&self.cached);
        wb.journal.barrier_to(seq)
    }
}
