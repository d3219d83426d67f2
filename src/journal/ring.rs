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
    /// A free slot that takes no segment now.
    lent: Option<u32>,
    /// Slots that were written, at least from their beginning.
    written: Vec<bool>,
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
    /// `written`: every slot was written once.
    pub fn new(
        geometry: Geometry,
        segments: VecDeque<Segment>,
        next_slot: u32,
        written: bool,
    ) -> Ring {
        let mut written = vec![written; geometry.count as usize];
        segments.iter().for_each(|segment| written[segment.slot as usize] = true);
        Ring { geometry, segments, next_slot, open: false, lent: None, written }
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
        if self.free_slots() == 0 {
            return false;
        }
        self.written[self.next_slot as usize] = true;
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
        u64::from(self.free_slots()) * self.geometry.effective()
    }

    /// Slots that segments may take, in a row: up to a lent one.
    fn free_slots(&self) -> u32 {
        let count = self.geometry.count;
        match self.lent {
            Some(lent) => (lent + count - self.next_slot) % count,
            None => count - self.segments.len() as u32,
        }
    }

    /// Whether every slot was written once.
    pub fn all_written(&self) -> bool {
        self.written.iter().all(|written| *written)
    }

    /// Lends the last free slot that was never written, but not the very next one.
    pub fn lend(&mut self) -> Option<u32> {
        if self.lent.is_some() {
            return None;
        }
        let slots = (1..self.free_slots()).rev();
        let mut slots = slots.map(|ahead| (self.next_slot + ahead) % self.geometry.count);
        self.lent = slots.find(|slot| !self.written[*slot as usize]);
        self.lent
    }

    /// Takes the lent slot back.
    pub fn give_back(&mut self, written: bool) {
        if let Some(slot) = self.lent.take() {
            self.written[slot as usize] |= written;
        }
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
