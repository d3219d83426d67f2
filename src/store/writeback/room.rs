//! Room for writers: the only place where they wait, with no lock held (STORE 1, W6).
//!
//! A writer waits while the journal or the dirty index is full, or while its device fails and holds
//! much of the journal (W4). States: admitted -> waiting -> granted, or refused: EIO for a device
//! that is degraded and has its share, EROFS or EIO for all once the journal failed. Whoever waits
//! is counted, and its device is known to the controller. Locks: `writers` and `progress`, leaves.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use super::view::Admission;
use super::{Event, Executor, Writeback};
use crate::error::{Error, Kind, Result};
use crate::journal::{Change, Purpose, Reservation};
use crate::store::device::Device;

/// Between two looks of somebody who waits.
const LOOK: Duration = Duration::from_millis(100);

/// A writer that waits.
struct Waiter<'a> {
    writeback: &'a Writeback,
    device: &'a Device,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let id = self.device.cached.id;
        let mut writers = self.writeback.writers.lock();
        let Some((_, count)) = writers.get_mut(&id) else { return };
        *count -= 1;
        let gone = if *count == 0 { writers.remove(&id) } else { None };
        drop(writers);
        if gone.is_some() && !self.device.is_dirty() {
            self.writeback.tell(Event::Gone { device: id });
        }
    }
}

impl Writeback {
    /// EROFS or EIO where nothing may be changed any more (J9, J11).
    pub(in crate::store) fn check_writable(&self) -> Result<()> {
        match self.journal.failure() {
            None => Ok(()),
            Some(why) if self.read_only => Err(Error::new(Kind::ReadOnly, "write", why)),
            Some(why) => Err(Error::new(Kind::Io, "write: the journal failed", why)),
        }
    }

    /// Room for these changes of a device: the only place where a writer waits.
    pub(in crate::store) fn reserve(
        &self,
        device: &Device,
        changes: &[Change<'_>],
    ) -> Result<Reservation> {
        self.check_writable()?;
        self.mark_dirty()?;
        let bytes = self.journal.charge(changes);
        if self.admits(device)?
            && self.has_index(device)
            && let Some(room) = self.journal.try_reserve(Purpose::Frontend, bytes)
        {
            return Ok(room);
        }
        self.counts.waited.fetch_add(1, Relaxed);
        let _waiter = self.wait_as(device);
        loop {
            self.wait_for_index(device)?;
            self.ring();
            if !self.is_by_hand() {
                return self.journal.reserve(Purpose::Frontend, bytes);
            }
            if let Some(room) = self.journal.try_reserve(Purpose::Frontend, bytes) {
                return Ok(room);
            }
            self.check_writable()?;
            self.run_by_hand(true, 0);
        }
    }

    fn wait_as<'a>(&'a self, device: &'a Device) -> Waiter<'a> {
        if let Some(shared) = device.me.upgrade() {
            let mut writers = self.writers.lock();
            writers.entry(device.cached.id).or_insert((shared, 0)).1 += 1;
        }
        Waiter { writeback: self, device }
    }

    /// Whether a map may grow. Dirty devices keep their descriptors, too: one more than may be
    /// waits until others are clean.
    fn has_index(&self, device: &Device) -> bool {
        self.pieces.load(SeqCst) < self.pieces_max && (device.is_dirty() || self.has_devices())
    }

    fn has_devices(&self) -> bool {
        self.devices.lock().len() < self.devices_max.load(Relaxed)
    }

    /// At most so many devices are dirty.
    pub(in crate::store) fn set_devices_max(&self, most: usize) {
        self.devices_max.store(most.max(16), Relaxed);
    }

    /// Whether a write of so many bytes may have to wait now.
    pub(in crate::store) fn would_wait(&self, bytes: u64) -> bool {
        let bytes = self.journal.charge_bytes(bytes);
        self.pieces.load(SeqCst) >= self.pieces_max
            || !self.has_devices()
            || self.journal.try_reserve(Purpose::Frontend, bytes).is_none()
    }

    /// Whether writes of a device may go on; EIO if they may not even wait.
    fn admits(&self, device: &Device) -> Result<bool> {
        let admission = device.admission.load(SeqCst);
        if admission == Admission::Refused as u8 {
            let why = "degraded: its share of the journal is full";
            return Err(Error::new(Kind::Io, "write", why));
        }
        Ok(admission == Admission::Yes as u8)
    }

    /// The dirty index is at its cap, or the device's turn comes later: as in a full journal, the
    /// writer waits.
    fn wait_for_index(&self, device: &Device) -> Result<()> {
        let full = !self.has_index(device);
        if full {
            self.index_waiters.fetch_add(1, SeqCst);
        }
        let result = self.until_admitted(device);
        if full {
            self.index_waiters.fetch_sub(1, SeqCst);
        }
        result
    }

    fn until_admitted(&self, device: &Device) -> Result<()> {
        loop {
            if self.admits(device)? && self.has_index(device) {
                return Ok(());
            }
            self.check_writable()?;
            if !self.takes_writes() {
                return Err(Error::new(Kind::Busy, "write", "writeback has ended"));
            }
            self.ring();
            if self.is_by_hand() {
                self.wait_a_little();
                continue;
            }
            let mut guard = self.progress.0.lock();
            self.progress.1.wait_for(&mut guard, LOOK);
        }
    }

    pub(super) fn is_by_hand(&self) -> bool {
        matches!(self.executor, Executor::ByHand(_))
    }
}
