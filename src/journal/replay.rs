//! Replay: what the log holds, in order, to a visitor; then the start of a new generation.
//!
//! States: opened (read and judged) -> visited, any number of times (J5: visiting changes nothing)
//! -> started, or read-only. No locks: one thread. Invariants: the new generation is durable in the
//! superblock before the first append; it begins a fresh segment, recovery never appends to a
//! segment it cut; what replay has seen is durable before the new generation is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;

use super::append::{Log, Placed};
use super::barrier::Group;
use super::format::{
    COMPAT_WRITTEN, Header, INCOMPAT_KNOWN, RO_COMPAT_KNOWN, RecordKind, SLOT_BYTES,
    SUPERBLOCK_BYTES, Superblock,
};
use super::health::Health;
use super::reserve::Space;
use super::ring::{Ring, Usage};
use super::scan::{Corruption, Reader, Scan, Walk};
use super::segment::{Geometry, Pins};
use super::{Journal, Mutants, write_superblock};
use crate::device::BlockDevice;
use crate::error::{Error, Kind, Result};
use crate::units::Extent;

/// A record as replay yields it.
#[derive(Debug)]
pub struct Record<'a> {
    /// What it says.
    pub header: Header,
    /// Where it lies. `write_seq` is the log's last sequence: all of it is durable once started.
    pub placed: Placed,
    /// What later Revokes leave of its range: of Data and Zero its bytes, of Truncate everything
    /// from the new size on. A Truncate that is not whole must zero these instead of cutting.
    pub live: Vec<Extent>,
    /// Its payload.
    pub payload: &'a [u8],
}

/// A journal that was read and does not run yet. Opened -> visited any number of times -> started
/// or read-only, which use it up. Owned by one thread, no locks. Until `start` nothing is written.
pub struct Recovered {
    device: Arc<dyn BlockDevice>,
    superblock: Superblock,
    geometry: Geometry,
    mutants: Mutants,
    scan: Scan,
}

impl std::fmt::Debug for Recovered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recovered").field("superblock", &self.superblock).finish_non_exhaustive()
    }
}

fn read_superblock(device: &dyn BlockDevice) -> Result<Superblock> {
    let mut best: Option<Superblock> = None;
    for slot in 0..2 {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let read = device.read_at(&mut bytes, slot * SLOT_BYTES)?;
        let found = Superblock::decode(&bytes[..read]);
        if let Some(found) = found.filter(|found| found.position() == slot * SLOT_BYTES)
            && best.is_none_or(|best| best.serial < found.serial)
        {
            best = Some(found);
        }
    }
    best.ok_or_else(|| Error::new(Kind::Corrupt, "journal", "no superblock"))
}

impl Recovered {
    /// Reads a journal. Writes nothing. Corrupt without a superblock, NotSupported if it has
    /// features this program does not know. `Mutants::default()` outside tests.
    pub fn open(device: Arc<dyn BlockDevice>, mutants: Mutants) -> Result<Recovered> {
        device.prepare(false)?;
        let superblock = read_superblock(&*device)?;
        if superblock.incompat & !INCOMPAT_KNOWN != 0 {
            let which = format!("incompatible features {:#x}", superblock.incompat);
            return Err(Error::new(Kind::NotSupported, "journal", which));
        }
        let size = device.size()?;
        let wrong = || Error::new(Kind::Corrupt, "journal", format!("does not fit {size} bytes"));
        let geometry = Geometry::of(&superblock, size).ok_or_else(wrong)?;
        let scan = Scan::run(&mut Reader::new(device.clone(), superblock, geometry, mutants))?;
        Ok(Recovered { device, superblock, geometry, mutants, scan })
    }

    /// The superblock found.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// A durable record that cannot be read: nothing may be written home (J9).
    pub fn corruption(&self) -> Option<Corruption> {
        self.scan.corruption
    }

    /// Whether the log has no record.
    pub fn is_empty(&self) -> bool {
        self.scan.segments.is_empty()
    }

    /// The sequence of the log's last record.
    pub fn last_seq(&self) -> u64 {
        self.scan.next_seq - 1
    }

    /// Records that do not replay because their write is not whole.
    pub fn dropped(&self) -> u64 {
        self.scan.dropped()
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        let segments = self.scan.segments.iter();
        Usage {
            capacity_bytes: u64::from(self.geometry.count) * self.geometry.segment_bytes,
            used_bytes: segments.map(|segment| segment.used).sum(),
            segments: self.scan.segments.len() as u32,
        }
    }

    /// Yields the records in order. A Revoke comes too: those before it are trimmed already.
    pub fn visit(&self, visitor: &mut dyn FnMut(&Record<'_>) -> Result<()>) -> Result<()> {
        let mut reader =
            Reader::new(self.device.clone(), self.superblock, self.geometry, self.mutants);
        let mut walk = Walk::new(&self.superblock);
        let last = self.last_seq();
        let mut seen = self.superblock.tail_seq - 1;
        while seen < last {
            let Some(found) = walk.next(&mut reader)? else {
                let what = format!("record {} was there before", seen + 1);
                return Err(Error::new(Kind::Corrupt, "journal read", what));
            };
            seen = found.header.seq;
            if !self.scan.counts(&found.header) {
                continue;
            }
            let record = Record {
                header: found.header,
                placed: Placed::of(&found.header, found.at, last),
                live: self.scan.live(&found.header),
                payload: reader.payload(&found.header, found.at)?,
            };
            visitor(&record)?;
        }
        Ok(())
    }

    /// Starts a new generation behind the log. Corrupt if the log ends by corruption, ReadOnly if
    /// it has features that forbid writing.
    pub fn start(self) -> Result<Journal> {
        if let Some(corruption) = self.scan.corruption {
            let place = format!("record {} at {}", corruption.seq, corruption.at);
            return Err(Error::new(Kind::Corrupt, "journal", place));
        }
        self.start_past_corruption()
    }

    /// The same where the user has accepted that the log ends at a corrupt record.
    pub fn start_past_corruption(self) -> Result<Journal> {
        let mut superblock = self.superblock;
        if superblock.ro_compat & !RO_COMPAT_KNOWN != 0 {
            let which = format!("features {:#x} forbid writing", superblock.ro_compat);
            return Err(Error::new(Kind::ReadOnly, "journal", which));
        }
        self.device.prepare(true)?;
        // After kill -9 the log may be in the page cache only. A new generation that is durable
        // without it would stand behind a hole.
        self.device.sync(false)?;
        superblock.serial += 1;
        // A lost superblock may have been of the next generation already: never the same twice.
        superblock.generation += if self.scan.corruption.is_some() { 2 } else { 1 };
        superblock.start_seq = self.scan.next_seq;
        superblock.durable_seq = self.scan.next_seq - 1;
        write_superblock(&*self.device, &superblock)?;
        self.device.sync(true)?;
        Ok(self.into_journal(superblock))
    }

    /// A journal that can be read and never written: of a read-only mount.
    pub fn read_only(self) -> Journal {
        let superblock = self.superblock;
        let journal = self.into_journal(superblock);
        journal.fail("opened for reading only");
        journal
    }

    fn into_journal(self, superblock: Superblock) -> Journal {
        let geometry = self.geometry;
        let last = self.scan.segments.back().map(|segment| segment.slot);
        let next_slot = last.map_or(superblock.tail_slot, |slot| geometry.next(slot));
        let written = superblock.compat & COMPAT_WRITTEN != 0;
        let ring = Ring::new(geometry, self.scan.segments, next_slot, written);
        let health = Arc::new(Health::default());
        let next_seq = self.scan.next_seq;
        let durable = superblock.durable_seq.min(next_seq - 1);
        Journal {
            device: self.device,
            geometry,
            uuid: superblock.uuid,
            generation: superblock.generation,
            mutants: self.mutants,
            space: Arc::new(Space::new(geometry, ring.available(), health.clone())),
            health,
            pins: Pins::new(geometry.count),
            log: Mutex::new(Log::new(ring, next_seq)),
            appended: AtomicU64::new(next_seq - 1),
            unstarted: AtomicU64::new(0),
            group: Group::new(durable),
            superblock: Mutex::new(superblock),
            freeing: AtomicBool::new(false),
        }
    }
}

impl Record<'_> {
    /// The identity a Device record holds; None for another kind, or one that makes no sense.
    pub fn identity(&self) -> Option<super::DeviceIdentity> {
        let of_device = self.header.kind == RecordKind::Device;
        of_device.then(|| super::DeviceIdentity::decode(self.payload)).flatten()
    }
}
