//! The ring of segments in sequence order.
//!
//! States of a slot: see `segment`. The append lock guards it. Invariants: segments lie in
//! consecutive slots; sequences rise without a gap; only the tail is removed, never one behind it.

use std::collections::VecDeque;

use super::segment::{Geometry, Segment};

/// What lies between tail and head: empty, or segments of which the last is open (the head) or
/// sealed. Guarded by the append lock.
#[derive(Debug)]
pub struct Ring {
    geometry: Geometry,
    segments: VecDeque<Segment>,
    /// The slot the next segment takes.
    next_slot: u32,
    /// Whether the last segment still takes records.
    open: bool,
}

/// How full the journal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of all segment slots.
    pub capacity_bytes: u64,
    /// Bytes from tail to head, with what is left over at the ends of segments.
    pub used_bytes: u64,
    /// Segments between tail and head.
    pub segments: u32,
}

impl Ring {
    /// The ring recovery found: `next_slot` follows the last segment, or is the tail's if none.
    pub fn new(geometry: Geometry, segments: VecDeque<Segment>, next_slot: u32) -> Ring {
        Ring { geometry, segments, next_slot, open: false }
    }

    /// Where the slots lie.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The segment that takes records.
    pub fn head(&mut self) -> Option<&mut Segment> {
        if self.open { self.segments.back_mut() } else { None }
    }

    /// The oldest segment.
    pub fn tail(&self) -> Option<&Segment> {
        self.segments.front()
    }

    /// Whether the tail still takes records.
    pub fn tail_is_head(&self) -> bool {
        self.open && self.segments.len() == 1
    }

    /// Starts a segment; false if no slot is free.
    pub fn roll(&mut self, first_seq: u64) -> bool {
        if self.segments.len() >= self.geometry.count as usize {
            return false;
        }
        self.segments.push_back(Segment::new(self.next_slot, first_seq));
        self.next_slot = self.geometry.next(self.next_slot);
        self.open = true;
        true
    }

    /// The head takes no more records.
    pub fn seal(&mut self) {
        self.open = false;
    }

    /// The tail's slot is free.
    pub fn free_tail(&mut self) {
        self.segments.pop_front();
        if self.segments.is_empty() {
            self.open = false;
        }
    }

    /// Bytes that reservations may count on: what is left after the worst use of segment ends.
    pub fn available(&self) -> u64 {
        let head = if self.open { self.segments.back() } else { None };
        let rest = head.map_or(0, |head| self.geometry.effective().saturating_sub(head.used));
        self.available_if_sealed() + rest
    }

    /// The same without the head's rest.
    pub fn available_if_sealed(&self) -> u64 {
        let free = u64::from(self.geometry.count) - self.segments.len() as u64;
        free * self.geometry.effective()
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        let all = self.segments.len() as u64 * self.geometry.segment_bytes;
        let head = if self.open { self.segments.back() } else { None };
        let rest = head.map_or(0, |head| self.geometry.segment_bytes - head.used);
        Usage {
            capacity_bytes: u64::from(self.geometry.count) * self.geometry.segment_bytes,
            used_bytes: all - rest,
            segments: self.segments.len() as u32,
        }
    }
}
