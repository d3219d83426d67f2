//! Segment slots: where they lie, what one holds, and who still reads it.
//!
//! A slot's life: free -> head (the one being appended to) -> sealed -> tail -> free. No locks
//! here: `Segment` is guarded by the append lock, `Pins` are atomic. Invariant: a pinned segment is
//! not reused.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use super::format::{DEVICE_MAX, HEAD_BYTES, HEADER_BYTES, Superblock, record_bytes};
use crate::error::{Error, Kind, Result};

/// The smallest journal.
pub const JOURNAL_MIN: u64 = 8 << 20;
const SEGMENT_MIN: u64 = 512 << 10;
const SEGMENT_MAX: u64 = 64 << 20;
const PAYLOAD_MAX: u64 = 1 << 20;
/// A write is split at the end of a segment if at least this much of it fits there.
pub const SPLIT_MIN: u64 = 512;

/// Where slots lie. Fixed when the journal is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a slot.
    pub segment_bytes: u64,
    /// Number of slots.
    pub count: u32,
}

impl Geometry {
    /// For a journal of this many bytes: slots of a sixteenth, 512 KiB to 64 MiB.
    pub fn for_size(journal_bytes: u64) -> Result<Geometry> {
        if journal_bytes < JOURNAL_MIN {
            return Err(Error::new(Kind::Invalid, "journal", "smaller than 8M"));
        }
        let segment_bytes = (journal_bytes / 16).clamp(SEGMENT_MIN, SEGMENT_MAX) & !4095;
        let count = (journal_bytes - HEAD_BYTES) / segment_bytes;
        Ok(Geometry { segment_bytes, count: u32::try_from(count).unwrap_or(u32::MAX) })
    }

    /// As a superblock says; None if that makes no sense on a device of this size.
    pub fn of(superblock: &Superblock, device_bytes: u64) -> Option<Geometry> {
        let geometry =
            Geometry { segment_bytes: superblock.segment_bytes, count: superblock.segment_count };
        let small = geometry.segment_bytes < 4 * geometry.slack() || geometry.count < 2;
        let end = u64::from(geometry.count)
            .checked_mul(geometry.segment_bytes)
            .and_then(|bytes| bytes.checked_add(HEAD_BYTES))?;
        let fits = end <= device_bytes && superblock.tail_slot < geometry.count;
        (!small && fits && geometry.segment_bytes <= SEGMENT_MAX).then_some(geometry)
    }

    /// The device offset of a slot.
    pub fn start(&self, slot: u32) -> u64 {
        HEAD_BYTES + u64::from(slot) * self.segment_bytes
    }

    /// The slot after this one in the ring.
    pub fn next(&self, slot: u32) -> u32 {
        (slot + 1) % self.count
    }

    /// The slot a device offset lies in.
    pub fn slot_of(&self, at: u64) -> u32 {
        (at.saturating_sub(HEAD_BYTES) / self.segment_bytes) as u32
    }

    /// Bytes of the whole journal.
    pub fn device_bytes(&self) -> u64 {
        self.start(self.count)
    }

    /// The longest payload of one record.
    pub fn payload_max(&self) -> u64 {
        PAYLOAD_MAX.min(self.segment_bytes / 4)
    }

    /// What may be left unused at the end of a segment by a record that can be split.
    pub fn slack(&self) -> u64 {
        record_bytes(DEVICE_MAX as u64) + HEADER_BYTES as u64 + SPLIT_MIN + 16
    }

    /// Bytes of a segment that a reservation may count on.
    pub fn effective(&self) -> u64 {
        self.segment_bytes - self.slack()
    }
}

/// A segment between the tail and the head.
#[derive(Debug)]
pub struct Segment {
    /// Its slot.
    pub slot: u32,
    /// The sequence of its first record.
    pub first_seq: u64,
    /// The sequence of its last record (one less than the first if it has none).
    pub last_seq: u64,
    /// Bytes used.
    pub used: u64,
    /// Devices whose Device record it has.
    pub devices: HashSet<u32>,
}

impl Segment {
    /// An empty segment.
    pub fn new(slot: u32, first_seq: u64) -> Segment {
        Segment {
            slot,
            first_seq,
            last_seq: first_seq.saturating_sub(1),
            used: 0,
            devices: HashSet::new(),
        }
    }
}

/// Readers per slot.
#[derive(Clone, Debug)]
pub struct Pins(Arc<[AtomicU32]>);

impl Pins {
    /// No readers of any slot.
    pub fn new(slots: u32) -> Pins {
        Pins((0..slots).map(|_| AtomicU32::new(0)).collect())
    }

    /// Pins a slot until the guard is dropped.
    pub fn pin(&self, slot: u32) -> Pin {
        if let Some(pins) = self.0.get(slot as usize) {
            pins.fetch_add(1, SeqCst);
        }
        Pin { pins: self.clone(), slot }
    }

    /// Whether anybody reads the slot.
    pub fn is_pinned(&self, slot: u32) -> bool {
        self.0.get(slot as usize).is_some_and(|pins| pins.load(SeqCst) > 0)
    }
}

/// Keeps a segment from being reused. Taken before the dirty map's lock is given up.
#[derive(Debug)]
pub struct Pin {
    pins: Pins,
    slot: u32,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(pins) = self.pins.0.get(self.slot as usize) {
            pins.fetch_sub(1, SeqCst);
        }
    }
}
