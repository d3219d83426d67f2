//! The journal (layer 3): the writeback log of STORE 3 over one `BlockDevice`. It knows neither the
//! cache nor the store.
//!
//! ```text
//! device:  superblock 0 | superblock 1 | (to 64 KiB) | slot 0 | slot 1 | ... | slot n-1
//! slot:    record record record ... (each: header, payload, padding to 8 bytes)
//! ring:    tail -> ... -> head, in consecutive slots, sequences without a gap
//! ```
//!
//! States: `Recovered` (read, not yet writing) -> `Journal` (running) -> failed, for good.
//!
//! How a log is followed: the record at a position must have the next sequence. Where it has not,
//! the segment may have ended: then the next slot begins with that sequence. Else the log ends.
//! So neither the end of a segment nor the end of a generation needs a mark of its own.
//!
//! Lock order, outermost first; only `log` is held across device I/O (the buffered pwrite):
//!   1. `log`, the append lock
//!   2. `Space`'s and `Health`'s own
//!
//!   `Group`'s lock and `superblock` are leaves, taken with none of the others held.
//!
//! Invariants: J3 (at this level), J5, J8, J9, J11 (the journal's half), W6 (room).

pub mod append;
pub mod barrier;
pub mod format;
pub mod free;
pub mod health;
pub mod replay;
pub mod reserve;
mod revoked;
pub mod ring;
mod scan;
pub mod segment;
pub mod zero;

use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed},
};

use parking_lot::Mutex;

use self::append::Log;
pub use self::append::{Appended, Change, Entry, Placed};
use self::barrier::Group;
pub use self::format::{DeviceIdentity, Header, RecordKind, Superblock, Uuid};
pub use self::free::{Freed, Tail};
use self::health::Health;
pub use self::replay::{Record, Recovered};
pub use self::reserve::{Purpose, Reservation};
use self::reserve::{Space, charge_data, charge_whole};
pub use self::ring::Usage;
pub use self::scan::Corruption;
use self::segment::Pins;
pub use self::segment::{Geometry, Pin};
pub use self::zero::Zeroed;
use crate::device::{BlockDevice, Range};
use crate::error::{Error, Kind, Result};

/// Appended bytes whose write-out is started together.
const WRITE_OUT_BYTES: u64 = 1 << 20;

/// Rules that tests switch off to prove that the tests would notice. All false in production.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mutants {
    /// Free the tail without a barrier before.
    pub skip_free_barrier: bool,
    /// Reuse the tail's slot before the superblock is durable.
    pub skip_superblock_sync: bool,
    /// Let records of any generation count (J8).
    pub ignore_generation: bool,
}

/// A running journal. All methods may be called from any thread. Running -> failed, for good (J11):
/// then nothing is written any more, and reads are checked. Locks: as above. Invariant: a sequence
/// given is in the page cache, or the journal has failed.
pub struct Journal {
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    uuid: Uuid,
    generation: u64,
    mutants: Mutants,
    health: Arc<Health>,
    space: Arc<Space>,
    pins: Pins,
    /// The append lock.
    log: Mutex<Log>,
    /// The last sequence that is wholly in the page cache.
    appended: AtomicU64,
    /// Bytes appended since their write-out was last started.
    unstarted: AtomicU64,
    group: Group,
    /// The superblock as last written; changed only by whoever holds `freeing`.
    superblock: Mutex<Superblock>,
    freeing: AtomicBool,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Journal");
        out.field("generation", &self.generation).field("appended", &self.appended);
        out.finish_non_exhaustive()
    }
}

impl Journal {
    /// Makes an empty journal of this many bytes; what the device held is lost. Space is allocated,
    /// so that "no space" shows here.
    pub fn format(device: &dyn BlockDevice, bytes: u64, uuid: Uuid) -> Result<()> {
        let geometry = Geometry::for_size(bytes)?;
        device.prepare(true)?;
        if device.size()? < bytes {
            match device.change_range(Range::AllocateGrow, 0, bytes) {
                Err(error) if error.kind == Kind::NotSupported => device.set_size(bytes)?,
                other => other?,
            }
        }
        Journal::format_as(device, geometry, uuid)
    }

    pub(crate) fn format_as(
        device: &dyn BlockDevice,
        geometry: Geometry,
        uuid: Uuid,
    ) -> Result<()> {
        let mut superblock = Superblock {
            compat: 0,
            ro_compat: 0,
            incompat: 0,
            uuid,
            serial: 0,
            generation: 0,
            start_seq: 1,
            tail_seq: 1,
            durable_seq: 0,
            segment_bytes: geometry.segment_bytes,
            segment_count: geometry.count,
            tail_slot: 0,
        };
        for serial in 0..2 {
            superblock.serial = serial;
            write_superblock(device, &superblock)?;
        }
        device.sync(false)
    }

    /// The journal's name.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// This mount's generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Where segments lie.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Why nothing is written any more, once it failed (J11).
    pub fn failure(&self) -> Option<String> {
        if self.health.is_failed() { self.health.why() } else { None }
    }

    /// The sequence of the last record that survives kill -9.
    pub fn appended_seq(&self) -> u64 {
        self.appended.load(Acquire)
    }

    /// The sequence up to which everything survives a power cut.
    pub fn durable_seq(&self) -> u64 {
        self.group.durable_seq()
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        self.log.lock().ring.usage()
    }

    /// Requests that wait for room.
    pub fn waiting(&self) -> usize {
        self.space.waiting()
    }

    /// Starts the write-out of what was appended, once it is a MiB, or at once for somebody who is
    /// about to sync: so that the kernel neither throttles appends nor leaves all of it to the
    /// barrier. Never call it with a lock held.
    pub fn start_write_out(&self, at_once: bool) {
        if at_once || self.unstarted.load(Relaxed) >= WRITE_OUT_BYTES {
            self.unstarted.store(0, Relaxed);
            self.device.start_write_out();
        }
    }

    /// The room that these changes need at most; what `reserve` is asked for.
    pub fn charge(&self, changes: &[Change<'_>]) -> u64 {
        changes.iter().fold(0, |sum, change| sum.saturating_add(self.charge_one(change)))
    }

    /// The room that this many bytes of data need at most.
    pub fn charge_bytes(&self, bytes: u64) -> u64 {
        charge_data(&self.geometry, bytes)
    }

    fn charge_one(&self, change: &Change<'_>) -> u64 {
        match change {
            Change::Data(bytes) => charge_data(&self.geometry, bytes.len() as u64),
            other => charge_whole(other.payload().len() as u64),
        }
    }

    /// Waits for room. EIO once the journal failed; Invalid if it could never hold this much.
    /// Never call it with a lock held.
    pub fn reserve(&self, purpose: Purpose, bytes: u64) -> Result<Reservation> {
        self.space.reserve(purpose, bytes)
    }

    /// Room if there is some at once.
    pub fn try_reserve(&self, purpose: Purpose, bytes: u64) -> Option<Reservation> {
        self.space.try_reserve(purpose, bytes)
    }

    /// Keeps the segment of a record from being reused while the guard lives. Call it before the
    /// lock under which the position was found is given up.
    pub fn pin(&self, placed: &Placed) -> Pin {
        self.pins.pin(self.geometry.slot_of(placed.at))
    }

    /// Reads part of a payload, `skip` bytes into it; the caller holds a pin. After a failure the
    /// payload of a record above `durable_seq` is checked as a whole: EIO, never other bytes (J11).
    pub fn read_payload(&self, placed: &Placed, skip: u64, out: &mut [u8]) -> Result<()> {
        let end = skip.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > placed.length) {
            return Err(Error::new(Kind::Invalid, "journal read", "past the record"));
        }
        if !self.health.is_failed() || placed.seq <= self.durable_seq() {
            return read_exact(&*self.device, placed.at + skip, out);
        }
        let mut whole = vec![0; placed.length as usize];
        read_exact(&*self.device, placed.at, &mut whole)?;
        if crc32c::crc32c(&whole) != placed.payload_crc {
            return Err(Error::new(Kind::Corrupt, "journal read", format!("at {}", placed.at)));
        }
        out.copy_from_slice(&whole[skip as usize..skip as usize + out.len()]);
        Ok(())
    }

    /// Stops for good: whoever calls this has lost track of what is in it.
    pub fn give_up(&self, why: &str) {
        self.fail(why);
    }

    fn fail(&self, why: &str) {
        self.health.fail(why);
        self.space.wake();
    }
}

fn read_exact(device: &dyn BlockDevice, at: u64, out: &mut [u8]) -> Result<()> {
    if device.read_at(out, at)? == out.len() {
        return Ok(());
    }
    Err(Error::new(Kind::Io, "journal read", format!("past its end at {at}")))
}

fn write_superblock(device: &dyn BlockDevice, superblock: &Superblock) -> Result<()> {
    device.write_at(&superblock.encode(), superblock.position())
}

#[cfg(test)]
mod tests;
