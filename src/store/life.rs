//! A device's way from dirty to clean and back, beside its data: taken up by recovery, settled when
//! clean, dropped with its last name, and described.

use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use super::device::Device;
use super::journaled::After;
use super::recovery::replay::Replayed;
use super::registry::Closed;
use super::writeback::Writeback;
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, DeviceIdentity, Purpose};
use crate::units::Timestamp;

/// What applications see of a dirty file instead of what the source says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// Size in bytes.
    pub size: u64,
    /// Last change of bytes.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
    /// Bytes that may not be allocated at the source yet.
    pub unallocated: u64,
}

impl Device {
    /// Where it was last seen, for people.
    pub(super) fn name(&self) -> String {
        let registry = self.shared.registry.lock();
        let path = registry.path(&self.identity).map(|path| path.display().to_string());
        path.unwrap_or_else(|| format!("unit {}", self.unit()))
    }

    /// Whether anything of it is in the journal only.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty.load(SeqCst)
    }

    /// Tests: the last sequence of its last append.
    #[cfg(test)]
    pub(crate) fn last_seq(&self) -> u64 {
        self.dirty.lock().last_seq
    }

    /// Tests: whether a range is in the journal.
    #[cfg(test)]
    pub(crate) fn knows_of(&self, offset: u64, len: u64) -> bool {
        self.dirty.lock().map.overlaps(crate::units::Extent { offset, len })
    }

    /// Some while it is dirty.
    pub fn overlay(&self) -> Option<Overlay> {
        if !self.is_dirty() {
            return None;
        }
        let dirty = self.dirty.lock();
        let (mtime, ctime) = dirty.map.times()?;
        let unallocated = dirty.map.load().waiting_bytes;
        Some(Overlay { size: self.size(), mtime, ctime, unallocated })
    }

    /// Everything acknowledged of it is durable in the journal when this returns.
    pub fn make_durable(&self) -> Result<()> {
        self.shared.writeback().map_or(Ok(()), |writeback| self.barrier(writeback))
    }

    /// Waits until everything acknowledged of it is home. EIO if it cannot be written.
    pub fn flush(&self) -> Result<()> {
        self.shared.writeback().map_or(Ok(()), |writeback| writeback.flush_device(self))
    }

    /// Recovery found data of it: it is dirty from the start.
    pub(super) fn resume(
        &self,
        writeback: &Writeback,
        mut replayed: Replayed,
        home: u64,
        mut record: DeviceIdentity,
    ) -> Result<()> {
        let size = replayed.size_over(home);
        replayed.settle(home);
        record.named &= !replayed.unlinked;
        let mut dirty = self.dirty.lock();
        // Whoever copies its records forward does not announce it.
        writeback.journal.set_device(self.cached.id, &record, size)?;
        writeback.journal.note_recovered(self.cached.id);
        dirty.last_seq = replayed.last_seq;
        dirty.map = replayed.map;
        dirty.know(record);
        self.note_home(writeback, &dirty);
        self.note_size(size);
        self.note_touch();
        writeback.pieces_changed(0, dirty.map.len());
        self.publish(writeback, &dirty);
        Ok(())
    }

    /// It is clean: whoever opens it next finds the source as our last touch left it.
    pub(super) fn settle(&self) {
        self.take_touched();
        let stamp = self.file.stamp().unwrap_or(None);
        let shared = &self.shared;
        let closed = shared.registry.lock().settle(&self.identity, stamp, &shared.cache);
        match closed {
            Closed::Dropped(device) => device.drop_dirty(),
            Closed::Known(_) | Closed::Open => {}
        }
    }

    /// No name and no handle is left: nothing of it needs to go anywhere.
    pub(super) fn drop_dirty(&self) {
        let Some(writeback) = self.shared.writeback() else { return };
        let mut dirty = self.dirty.lock();
        if dirty.map.is_clean() {
            return;
        }
        let before = dirty.map.len();
        dirty.map.drop_all();
        writeback.pieces_changed(before, 0);
        writeback.dropped_with_name();
        self.publish(writeback, &dirty);
        drop(dirty);
        self.tell_file();
        writeback.ring();
    }

    /// Its last name goes: a note for replay, which then does not wonder (J10). Not durable, and
    /// without room it is left out; what is journaled of it later says it too.
    pub fn note_unlink(&self, path: &Path) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let Some(writeback) = self.shared.writeback() else { return Ok(()) };
        let change = Change::Unlink(path.as_os_str().as_bytes());
        let journal = &writeback.journal;
        let room = journal.try_reserve(Purpose::Internal, journal.charge(&[change]));
        let mut dirty = self.dirty.lock();
        dirty.unname();
        // Clean records count: replay would look for their file.
        let Some(mut room) = room.filter(|_| journal.would_replay(self.cached.id)) else {
            return Ok(());
        };
        let after = After { size: self.size(), mtime: clock::wall() };
        self.append(writeback, &mut dirty, &mut room, 0, change, &after)?;
        Ok(())
    }
}
