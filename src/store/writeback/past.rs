//! Devices that are closed and clean, but of which the ring still has records: whoever changes such
//! a file outside the journal must void them first (J14), though nobody holds its dirty map any
//! more.

use super::Writeback;
use crate::clock;
use crate::error::Result;
use crate::journal::{Change, Entry};
use crate::store::device::Device;
use crate::units::{DeviceId, Identity};

/// Entries above which those that the tail has passed are dropped.
const TIDY_AT: usize = 1024;

impl Writeback {
    /// A device is closed for good.
    pub(in crate::store) fn leave(&self, device: &Device) {
        let replayable = device.dirty.lock().replayable;
        if !self.in_ring(replayable) {
            return;
        }
        let first = self.journal.tail().map_or(u64::MAX, |tail| tail.first_seq);
        let mut past = self.past.lock();
        past.insert(device.identity, (device.cached.id, replayable));
        if past.len() > TIDY_AT {
            past.retain(|_, (_, seq)| *seq >= first);
        }
    }

    /// Whether replay would still see a record of this sequence.
    pub(in crate::store) fn in_ring(&self, seq: u64) -> bool {
        seq > 0 && self.journal.tail().is_some_and(|tail| tail.first_seq <= seq)
    }

    /// A file is opened again: its records are the new device's. Those of another tag are voided:
    /// it was changed by others since it was clean.
    pub(in crate::store) fn come_back(&self, identity: &Identity, device: &Device) -> Result<()> {
        let Some((id, replayable)) = self.past.lock().remove(identity) else { return Ok(()) };
        if id == device.cached.id {
            device.dirty.lock().replayable = replayable;
            return Ok(());
        }
        if self.in_ring(replayable) { self.revoke_tag(id) } else { Ok(()) }
    }

    fn revoke_tag(&self, device: DeviceId) -> Result<()> {
        let change = Change::Revoke(u64::MAX);
        let mut room = self.reserve_internal(&[change])?;
        let mtime = clock::wall();
        let entry = Entry { device, offset: 0, change, size_after: 0, mtime };
        let appended = self.journal.append(&mut room, &[entry])?;
        self.journal.barrier_to(appended.seq)
    }
}
