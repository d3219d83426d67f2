//! The orderly end.
//!
//! States: running -> threads ended -> everything home: the journal is emptied and the owner mark
//! goes; or not: a note says what the dirty devices were like (J12). No lock is held.

use std::sync::atomic::Ordering::SeqCst;

use super::Writeback;
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, Entry, Freed, Purpose};
use crate::store::checkpoint::{Checkpoint, STAMPS_MAX};
use crate::units::{DeviceId, Timestamp};

impl Writeback {
    /// The end: threads stop, and the journal is left as it should be found. Empty and without a
    /// mark if everything is home, else with what the dirty devices are like now (J12).
    pub(in crate::store) fn close(&self) -> Result<()> {
        self.stop();
        if self.journal.failure().is_some() {
            return Ok(());
        }
        let devices = self.listed();
        if devices.is_empty() {
            return self.empty();
        }
        // Clean files may be changed by anybody from now on: replay must not touch them.
        let dirty = |id: &DeviceId| devices.iter().any(|device| device.cached.id == *id);
        let clean = self.journal.replayable().into_iter().filter(|id| !dirty(id));
        for id in clean {
            if self.append_void(id)?.is_none() {
                log::warn!("journal: no room to say that unit {} is clean", id.0);
            }
        }
        let stamps: Vec<_> = devices
            .iter()
            .filter_map(|device| Some((device.cached.id, device.file.stamp().ok()??)))
            .collect();
        for stamps in stamps.chunks(STAMPS_MAX) {
            self.append_checkpoint(&Checkpoint::stop(clock::wall(), stamps.to_vec()))?;
        }
        self.journal.barrier()
    }

    /// Nothing that the ring has of a tag shall be replayed: its device is clean, or given up, and
    /// nobody uses it. The Revoke's sequence; None without room.
    fn append_void(&self, device: DeviceId) -> Result<Option<u64>> {
        let change = Change::Revoke(u64::MAX);
        let room = self.journal.try_reserve(Purpose::Internal, self.journal.charge(&[change]));
        let Some(mut room) = room else { return Ok(None) };
        let mtime = Timestamp::default();
        let entry = Entry { device, offset: 0, change, size_after: 0, mtime };
        Ok(Some(self.journal.append(&mut room, &[entry])?.seq))
    }

    /// The same for a tag that nobody will use again (J14).
    pub(in crate::store) fn void(&self, device: DeviceId) -> Result<()> {
        if !self.journal.would_replay(device) {
            return Ok(());
        }
        self.check_writable()?;
        self.mark_dirty()?;
        if let Some(seq) = self.append_void(device)? {
            self.journal.voided(device, seq);
        }
        Ok(())
    }

    /// Frees every segment, then the mark.
    fn empty(&self) -> Result<()> {
        if self.names_changed.swap(false, SeqCst)
            && let Some(sync) = self.names.get()
        {
            sync()?;
        }
        while let Some(tail) = self.journal.tail() {
            match self.journal.free_tail(tail.last_seq)? {
                Freed::Yes => {}
                // A reader still has it, or a writer comes late: the next mount finds it clean.
                Freed::Moved | Freed::Pinned | Freed::Busy => return Ok(()),
            }
        }
        match &self.mark {
            Some(mark) => mark.clean(),
            None => Ok(()),
        }
    }
}
