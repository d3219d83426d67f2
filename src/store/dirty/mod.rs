//! What of one device is in the journal and not safely home: byte ranges that point into journal
//! records, so that a write of any size needs no read of what lies around it.
//!
//! ```text
//! piece:  dirty -> writing(op) -> written -> syncing -> gone (clean)
//!           ^          |             |          |
//!           +- failed -+----- sync failed ------+          (J4, J11)
//! ```
//!
//! A newer write carves its range out of older pieces in any state: the rest of them keeps its own.
//! Truncate, punch and zero are pieces of zeros (J10); a truncate's reaches to the end of the
//! world. So the map always says the newest state of every byte, and home only ever gets that: the
//! order of records does not matter any more (W3).
//!
//! No lock here: `Device.dirty` guards it. Invariants: pieces do not overlap; each is in exactly
//! one of `waiting` (dirty) and `busy` (the others), by its record's sequence; operations in flight
//! do not overlap (J6); the size is live until the device has it and was synced.

mod home;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use self::home::HomeSize;
pub(super) use self::plan::{HomeOp, Limits, OpKind, Part};
use crate::journal::Placed;
use crate::units::{DeviceId, Extent, Timestamp};

/// About what a piece costs in memory, its share of the indexes included.
pub(super) const PIECE_BYTES: u64 = 192;

/// Where a piece's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// `skip` bytes into a record's payload.
    Data { at: u64, length: u32, crc: u32, skip: u32 },
    /// Zeros.
    Zero,
}

impl Body {
    /// The payload of a data record.
    pub(super) fn of(placed: &Placed) -> Body {
        Body::Data { at: placed.at, length: placed.length as u32, crc: placed.payload_crc, skip: 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Dirty,
    Writing(u64),
    Written,
    Syncing,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u64,
    seq: u64,
    write_seq: u64,
    since_ms: u64,
    body: Body,
    state: State,
}

/// A part of a range that the map knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) extent: Extent,
    pub(super) seq: u64,
    pub(super) body: Body,
}

impl Known {
    /// The record to read, and how far into it the bytes are; None for zeros.
    pub(super) fn record(&self) -> Option<(Placed, u64)> {
        record_of(self.seq, &self.body)
    }
}

fn record_of(seq: u64, body: &Body) -> Option<(Placed, u64)> {
    let Body::Data { at, length, crc, skip } = *body else { return None };
    let placed = Placed {
        seq,
        write_seq: seq,
        device: DeviceId::default(),
        offset: 0,
        length: u64::from(length),
        at,
        payload_crc: crc,
    };
    Some((placed, u64::from(skip)))
}

/// What a change adds to the map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    pub(super) extent: Extent,
    pub(super) seq: u64,
    pub(super) write_seq: u64,
    pub(super) now_ms: u64,
    pub(super) body: Body,
}

/// The size that applications see, and the record that says so.
#[derive(Clone, Copy, Debug)]
struct SizeRecord {
    bytes: u64,
    seq: u64,
    write_seq: u64,
    since_ms: u64,
    state: State,
}

/// A set time, and the record that says so.
#[derive(Clone, Copy, Debug)]
struct TimeRecord {
    mtime: Timestamp,
    /// Zero: of a write, whose own record is enough.
    seq: u64,
    syncing: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct DirtyMap {
    pieces: BTreeMap<u64, Piece>,
    waiting: BTreeSet<(u64, u64)>,
    /// The same pieces by place.
    places: BTreeSet<u64>,
    busy: BTreeSet<(u64, u64)>,
    size: Option<SizeRecord>,
    time: Option<TimeRecord>,
    ctime: Timestamp,
    /// The device's own size, as home operations left it.
    home: HomeSize,
    /// Operations in flight: their name, what they may not share with others (J6), their start.
    flying: Vec<(u64, Extent, u64)>,
    next_op: u64,
    /// Operations up to here were in flight when a sync failed: nobody knows of their outcome.
    doubtful: u64,
    cursor: u64,
    syncing: bool,
    /// An error of home writes was told to somebody else while a sync ran.
    spoiled: bool,
    /// Bytes of data pieces: all, and those not written home yet.
    data_bytes: u64,
    waiting_bytes: u64,
    written: u64,
    written_since_ms: u64,
}

/// Numbers for the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) waiting_bytes: u64,
    pub(super) waiting: u64,
    pub(super) waiting_since_ms: u64,
    pub(super) live_bytes: u64,
    pub(super) live: u64,
    pub(super) live_seq: Option<u64>,
    pub(super) written: u64,
    pub(super) written_since_ms: u64,
    pub(super) flying: usize,
    pub(super) oldest_io_ms: Option<u64>,
}

impl DirtyMap {
    /// The map of a device that has this size now.
    pub(super) fn new(home_size: u64) -> DirtyMap {
        DirtyMap { home: HomeSize::new(home_size), ..DirtyMap::default() }
    }

    /// Nothing is live: the device alone is what applications wrote.
    pub(super) fn is_clean(&self) -> bool {
        self.pieces.is_empty() && self.size.is_none() && self.time.is_none()
    }

    /// No piece: reads need not look.
    pub(super) fn has_no_pieces(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Pieces, for the cap on memory.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The device has this size, by what happened outside the journal.
    pub(super) fn set_home_size(&mut self, bytes: u64) {
        self.home.set(bytes);
    }

    /// A change outside the journal may give it any size from its own to this one.
    pub(super) fn expect_home_size(&mut self, bytes: u64) {
        self.home.foresee(bytes);
    }

    /// What a power cut before may have left: one of these sizes.
    pub(super) fn home_was_within(&mut self, least: u64, most: u64) {
        self.home.within(least, most);
    }

    /// The device's own size.
    pub(super) fn home_size(&self) -> u64 {
        self.home.now()
    }

    /// The sizes a power cut may leave it, least and greatest.
    pub(super) fn home_range(&self) -> (u64, u64) {
        self.home.range()
    }

    /// The size a record says; None if the device's own is right.
    #[cfg(test)]
    pub(super) fn size(&self) -> Option<u64> {
        self.size.map(|size| size.bytes)
    }

    /// mtime and ctime as applications see them while it is dirty.
    pub(super) fn times(&self) -> Option<(Timestamp, Timestamp)> {
        self.time.map(|time| (time.mtime, self.ctime))
    }

    /// A change of bytes or size happened at `now`.
    pub(super) fn note_change(&mut self, now: Timestamp) {
        let seq = self.time.map_or(0, |time| time.seq);
        self.time = Some(TimeRecord { mtime: now, seq, syncing: false });
        self.ctime = self.ctime.max(now);
    }

    /// A time was set by a record of its own.
    pub(super) fn set_mtime(&mut self, mtime: Timestamp, now: Timestamp, seq: u64) {
        self.time = Some(TimeRecord { mtime, seq, syncing: false });
        self.ctime = self.ctime.max(now);
    }

    /// Attributes changed.
    pub(super) fn note_ctime(&mut self, now: Timestamp) {
        self.ctime = self.ctime.max(now);
    }

    /// A record changed the size.
    pub(super) fn set_size(&mut self, bytes: u64, seq: u64, write_seq: u64, now_ms: u64) {
        let state = State::Dirty;
        self.size = Some(SizeRecord { bytes, seq, write_seq, since_ms: now_ms, state });
    }

    /// Adds the newest state of a range; the bytes of older dirty data it makes needless.
    pub(super) fn insert(&mut self, fresh: Fresh) -> u64 {
        let Extent { offset, .. } = fresh.extent;
        let end = fresh.extent.end();
        if offset >= end {
            return 0;
        }
        let absorbed = self.carve(offset, end);
        let Fresh { seq, write_seq, now_ms: since_ms, body, .. } = fresh;
        self.put(offset, Piece { end, seq, write_seq, since_ms, body, state: State::Dirty });
        absorbed
    }

    /// Everything is needless: the file has no name and no handle any more.
    pub(super) fn drop_all(&mut self) {
        self.pieces.clear();
        self.waiting.clear();
        self.places.clear();
        self.busy.clear();
        (self.size, self.time) = (None, None);
        (self.data_bytes, self.waiting_bytes, self.written) = (0, 0, 0);
    }

    /// What the map knows of a range, in order.
    pub(super) fn lookup(&self, extent: Extent) -> Vec<Known> {
        let (start, end) = (extent.offset, extent.end());
        let mut found = Vec::new();
        if self.pieces.is_empty() || start >= end {
            return found;
        }
        let first = self.pieces.range(..=start).next_back().map_or(start, |(from, _)| *from);
        for (from, piece) in self.pieces.range(first..end) {
            let (at, to) = (start.max(*from), end.min(piece.end));
            if at < to {
                let extent = Extent { offset: at, len: to - at };
                found.push(Known { extent, seq: piece.seq, body: skipped(piece.body, at - from) });
            }
        }
        found
    }

    /// The piece over a byte, and its end.
    pub(super) fn at(&self, at: u64) -> Option<(Body, u64)> {
        let (_, piece) = self.pieces.range(..=at).next_back()?;
        (piece.end > at).then_some((piece.body, piece.end))
    }

    /// Whether a range has any piece.
    pub(super) fn overlaps(&self, extent: Extent) -> bool {
        let before = self.pieces.range(..extent.end()).next_back();
        before.is_some_and(|(_, piece)| piece.end > extent.offset)
    }

    /// The first byte at or after `from` that has a piece.
    pub(super) fn next_piece(&self, from: u64) -> Option<u64> {
        let before = self.pieces.range(..=from).next_back();
        if before.is_some_and(|(_, piece)| piece.end > from) {
            return Some(from);
        }
        self.pieces.range(from..).next().map(|(start, _)| *start)
    }

    /// Live records up to a sequence, to be copied forward: the pieces as they are now, and the
    /// size and time that records up to there say.
    pub(super) fn live_up_to(&self, seq: u64) -> (Vec<Known>, Option<u64>, Option<Timestamp>) {
        let both =
            self.waiting.range(..=(seq, u64::MAX)).chain(self.busy.range(..=(seq, u64::MAX)));
        let known = |(seq, start): &(u64, u64)| {
            let piece = self.pieces.get(start)?;
            let extent = Extent { offset: *start, len: piece.end - start };
            Some(Known { extent, seq: *seq, body: piece.body })
        };
        let size = self.size.filter(|size| size.seq <= seq).map(|size| size.bytes);
        let time = self.time.filter(|time| time.seq > 0 && time.seq <= seq);
        (both.filter_map(known).collect(), size, time.map(|time| time.mtime))
    }

    /// Whether a piece is still as it was found.
    pub(super) fn has(&self, known: &Known) -> bool {
        self.pieces.get(&known.extent.offset).is_some_and(|piece| {
            piece.seq == known.seq && piece.end == known.extent.end() && piece.body == known.body
        })
    }

    /// A piece was copied forward: it lies in these records now, in the state that it is in.
    pub(super) fn moved(&mut self, known: &Known, parts: &[Fresh]) {
        if !self.has(known) {
            return;
        }
        let Some(piece) = self.take(known.extent.offset) else { return };
        for part in parts {
            let Fresh { seq, write_seq, body, .. } = *part;
            let end = part.extent.end();
            self.put(part.extent.offset, Piece { end, seq, write_seq, body, ..piece });
        }
    }

    /// The record of size or time was copied forward.
    pub(super) fn moved_size(&mut self, bytes: u64, seq: u64, write_seq: u64) {
        if let Some(size) = self.size.as_mut().filter(|size| size.bytes == bytes) {
            (size.seq, size.write_seq) = (seq, write_seq);
        }
    }

    /// The record of the time was copied forward.
    pub(super) fn moved_time(&mut self, mtime: Timestamp, seq: u64) {
        if let Some(time) = self.time.as_mut().filter(|time| time.seq > 0 && time.mtime == mtime) {
            time.seq = seq;
        }
    }

    /// The least live sequence.
    pub(super) fn live_seq(&self) -> Option<u64> {
        let first = |set: &BTreeSet<(u64, u64)>| set.first().map(|(seq, _)| *seq);
        let size = self.size.map(|size| size.seq);
        let time = self.time.map(|time| time.seq).filter(|seq| *seq > 0);
        [first(&self.waiting), first(&self.busy), size, time].into_iter().flatten().min()
    }

    /// Numbers for the controller.
    pub(super) fn load(&self) -> Load {
        let oldest = self.waiting.first().and_then(|(_, start)| self.pieces.get(start));
        let size_waits = self.size.filter(|size| size.state == State::Dirty);
        let mut waiting_since_ms = oldest.map_or(u64::MAX, |piece| piece.since_ms);
        if let Some(size) = size_waits {
            waiting_since_ms = waiting_since_ms.min(size.since_ms);
        }
        // A time alone is waiting too: only a sync takes it home.
        let time_only = self.pieces.is_empty() && self.size.is_none() && self.time.is_some();
        Load {
            waiting_bytes: self.waiting_bytes,
            waiting: self.waiting.len() as u64 + u64::from(size_waits.is_some()),
            waiting_since_ms,
            live_bytes: self.data_bytes,
            live: self.pieces.len() as u64,
            live_seq: self.live_seq(),
            written: self.written + u64::from(self.size_is_written()) + u64::from(time_only),
            written_since_ms: self.written_since_ms,
            flying: self.flying.len(),
            oldest_io_ms: self.flying.iter().map(|(.., started)| *started).min(),
        }
    }

    fn size_is_written(&self) -> bool {
        self.size.is_some_and(|size| size.state == State::Written)
    }

    fn put(&mut self, start: u64, piece: Piece) {
        self.index(start, &piece);
        self.pieces.insert(start, piece);
        if let Body::Data { .. } = piece.body {
            self.data_bytes += piece.end - start;
        }
    }

    fn take(&mut self, start: u64) -> Option<Piece> {
        let piece = self.pieces.remove(&start)?;
        self.unindex(start, &piece);
        if let Body::Data { .. } = piece.body {
            self.data_bytes -= piece.end - start;
        }
        Some(piece)
    }

    fn index(&mut self, start: u64, piece: &Piece) {
        if piece.state == State::Dirty {
            self.waiting.insert((piece.seq, start));
            self.places.insert(start);
            if let Body::Data { .. } = piece.body {
                self.waiting_bytes += piece.end - start;
            }
        } else {
            self.busy.insert((piece.seq, start));
            self.written += u64::from(piece.state == State::Written);
        }
    }

    fn unindex(&mut self, start: u64, piece: &Piece) {
        if piece.state == State::Dirty {
            self.waiting.remove(&(piece.seq, start));
            self.places.remove(&start);
            if let Body::Data { .. } = piece.body {
                self.waiting_bytes -= piece.end - start;
            }
        } else {
            self.busy.remove(&(piece.seq, start));
            self.written -= u64::from(piece.state == State::Written);
        }
    }

    fn set_state(&mut self, start: u64, state: State) {
        let Some(mut piece) = self.pieces.get(&start).copied() else { return };
        self.unindex(start, &piece);
        piece.state = state;
        self.index(start, &piece);
        self.pieces.insert(start, piece);
    }

    /// Cuts a range out of all pieces; the bytes of data in it that never went home.
    fn carve(&mut self, start: u64, end: u64) -> u64 {
        let before = self.pieces.range(..start).next_back();
        let first = before.filter(|(_, piece)| piece.end > start).map_or(start, |(from, _)| *from);
        let mut absorbed = 0;
        while let Some(from) = self.pieces.range(first..end).next().map(|(from, _)| *from) {
            let Some(piece) = self.take(from) else { break };
            let cut = piece.end.min(end) - from.max(start);
            if piece.state == State::Dirty && piece.body != Body::Zero {
                absorbed += cut;
            }
            if from < start {
                self.put(from, Piece { end: start, ..piece });
            }
            if piece.end > end {
                self.put(end, Piece { body: skipped(piece.body, end - from), ..piece });
            }
            if from < start && piece.end > start {
                // The left rest stands before `first` no more: go on behind it.
                return absorbed + self.carve(start, end);
            }
        }
        absorbed
    }
}

fn skipped(body: Body, by: u64) -> Body {
    match body {
        Body::Data { at, length, crc, skip } => {
            Body::Data { at, length, crc, skip: skip + by as u32 }
        }
        Body::Zero => Body::Zero,
    }
}
