//! Reading the log: which records count, where it ends, and whether it ends by corruption.
//!
//! States of a walk: at the start of a segment -> inside it -> the next segment ... -> the end. No
//! locks: one thread, before anything runs. Invariants: J8 (a record counts only with the expected
//! sequence and a generation that can stand there), J9 (a bad record is corruption only if
//! something says that its sequence was durable), all records of a write or none.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Mutants;
use super::format::{HEADER_BYTES, Header, RECORD_ALIGN, RecordKind, Superblock};
use super::revoked::Revoked;
use super::segment::{Geometry, Segment};
use crate::device::BlockDevice;
use crate::error::Result;
use crate::units::Extent;

const WINDOW_BYTES: u64 = 1 << 20;

/// A durable record that cannot be read (J9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// Its sequence.
    pub seq: u64,
    /// Where it should be, in bytes of the journal.
    pub at: u64,
    /// What was known durable.
    pub durable_seq: u64,
}

/// A journal's bytes, read in large pieces.
pub(super) struct Reader {
    device: Arc<dyn BlockDevice>,
    superblock: Superblock,
    geometry: Geometry,
    mutants: Mutants,
    start: u64,
    /// The first `filled` bytes are what the device has from `start` on.
    buffer: Vec<u8>,
    filled: usize,
}

impl Reader {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        superblock: Superblock,
        geometry: Geometry,
        mutants: Mutants,
    ) -> Reader {
        Reader { device, superblock, geometry, mutants, start: 0, buffer: Vec::new(), filled: 0 }
    }

    /// Bytes `at..at + len`, of which `end` bounds what may be read; fewer where they end.
    fn bytes(&mut self, at: u64, len: u64, end: u64) -> Result<&[u8]> {
        let len = len.min(end.saturating_sub(at));
        let have = self.start + self.filled as u64;
        if at < self.start || at + len > have {
            let wanted = len.max(WINDOW_BYTES).min(end - at) as usize;
            if self.buffer.len() < wanted {
                self.buffer = vec![0; wanted];
            }
            (self.start, self.filled) = (at, 0);
            self.filled = self.device.read_at(&mut self.buffer[..wanted], at)?;
        }
        let from = (at - self.start) as usize;
        let to = (from + len as usize).min(self.filled);
        Ok(&self.buffer[from.min(to)..to])
    }

    /// The header at a place if it is unharmed and its payload could be there.
    fn header(&mut self, at: u64, end: u64) -> Result<Option<Header>> {
        let (uuid, payload_max) = (self.superblock.uuid, self.geometry.payload_max());
        let header = Header::decode(self.bytes(at, HEADER_BYTES as u64, end)?, &uuid);
        Ok(header.filter(|header| {
            header.payload_bytes() <= payload_max && at + header.record_bytes() <= end
        }))
    }

    /// The payload of a record at a place.
    pub(super) fn payload(&mut self, header: &Header, at: u64) -> Result<&[u8]> {
        let len = header.payload_bytes();
        let start = at + HEADER_BYTES as u64;
        self.bytes(start, len, start + len)
    }

    fn payload_is_whole(&mut self, header: &Header, at: u64) -> Result<bool> {
        let payload = self.payload(header, at)?;
        let whole = payload.len() as u64 == header.payload_bytes();
        Ok(whole && crc32c::crc32c(payload) == header.payload_crc)
    }
}

/// A position in the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    slot: u32,
    offset: u64,
    expected: u64,
    generation: u64,
    segments: u32,
}

/// A record that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) header: Header,
    /// Where it begins.
    pub(super) at: u64,
    pub(super) slot: u32,
}

impl Walk {
    /// At the tail.
    pub(super) fn new(superblock: &Superblock) -> Walk {
        Walk {
            slot: superblock.tail_slot,
            offset: 0,
            expected: superblock.tail_seq,
            generation: 0,
            segments: 1,
        }
    }

    /// The next record, None at the end of the log.
    pub(super) fn next(&mut self, reader: &mut Reader) -> Result<Option<Found>> {
        let geometry = reader.geometry;
        if let Some(found) = self.look(reader, self.slot, self.offset)? {
            return Ok(Some(found));
        }
        // The segment may have ended: then the next one goes on.
        if self.offset == 0 || self.segments >= geometry.count {
            return Ok(None);
        }
        let found = self.look(reader, geometry.next(self.slot), 0)?;
        self.segments += u32::from(found.is_some());
        Ok(found)
    }

    fn look(&mut self, reader: &mut Reader, slot: u32, offset: u64) -> Result<Option<Found>> {
        let start = reader.geometry.start(slot);
        let (at, end) = (start + offset, start + reader.geometry.segment_bytes);
        let Some(header) = reader.header(at, end)? else { return Ok(None) };
        if !self.accepts(reader, &header, offset == 0) || !reader.payload_is_whole(&header, at)? {
            return Ok(None);
        }
        self.slot = slot;
        self.offset = offset + header.record_bytes();
        self.expected += 1;
        self.generation = header.generation;
        Ok(Some(Found { header, at, slot }))
    }

    fn accepts(&self, reader: &Reader, header: &Header, first: bool) -> bool {
        let superblock = &reader.superblock;
        if header.seq != self.expected {
            return false;
        }
        // A mount begins a segment; older generations end before the latest one's first sequence.
        let generation = if first {
            let latest = header.generation == superblock.generation;
            let older = header.generation < superblock.generation;
            header.generation >= self.generation
                && (latest || (older && header.seq < superblock.start_seq))
        } else {
            header.generation == self.generation
        };
        generation || reader.mutants.ignore_generation
    }

    /// Where the next record would be.
    fn position(&self, geometry: &Geometry) -> u64 {
        geometry.start(self.slot) + self.offset
    }
}

/// Writes of several records: all or none.
///
/// `open` is the write whose records are coming in. A write that begins before the tail counts as
/// if its head were there; that can only be the first write seen.
#[derive(Debug, Default)]
struct Writes {
    open: Option<Open>,
    any: bool,
    dropped: Vec<(u64, u64)>,
}

#[derive(Debug)]
struct Open {
    first_seq: u64,
    last: Header,
}

impl Writes {
    /// Takes the next record; true if its write is whole now.
    fn take(&mut self, header: &Header) -> bool {
        let continues = self.open.as_ref().is_some_and(|open| {
            open.last.generation == header.generation
                && open.last.index.checked_add(1) == Some(header.index)
                && open.last.remaining.checked_sub(1) == Some(header.remaining)
        });
        if let (true, Some(open)) = (continues, &mut self.open) {
            open.last = *header;
        } else {
            self.drop_open();
            if header.index > 0 && self.any {
                self.dropped.push((header.seq, header.seq));
                return false;
            }
            self.open = Some(Open { first_seq: header.seq, last: *header });
        }
        self.any = true;
        if header.remaining == 0 {
            self.open = None;
        }
        header.remaining == 0
    }

    fn drop_open(&mut self) {
        if let Some(open) = self.open.take() {
            self.dropped.push((open.first_seq, open.last.seq));
        }
    }
}

/// What reading the whole log told.
#[derive(Debug)]
pub(super) struct Scan {
    pub(super) segments: VecDeque<Segment>,
    pub(super) next_seq: u64,
    /// Records of writes that are not whole: sequences from, to.
    dropped: Vec<(u64, u64)>,
    revoked: Revoked,
    pub(super) corruption: Option<Corruption>,
}

impl Scan {
    /// Reads the log from the tail.
    pub(super) fn run(reader: &mut Reader) -> Result<Scan> {
        let mut walk = Walk::new(&reader.superblock);
        let mut scan = Scan {
            segments: VecDeque::new(),
            next_seq: walk.expected,
            dropped: Vec::new(),
            revoked: Revoked::default(),
            corruption: None,
        };
        let mut writes = Writes::default();
        let mut pending = Vec::new();
        while let Some(found) = walk.next(reader)? {
            scan.add(&found);
            let header = found.header;
            if header.kind == RecordKind::Device {
                continue;
            }
            if header.kind == RecordKind::Revoke {
                pending.push(header);
            }
            if writes.take(&header) {
                pending.drain(..).for_each(|header| scan.revoke(&header));
            } else if writes.open.as_ref().is_none_or(|open| open.first_seq == header.seq) {
                // What an earlier write left is void.
                pending.retain(|other| other.seq == header.seq && writes.open.is_some());
            }
        }
        writes.drop_open();
        scan.dropped = writes.dropped;
        scan.corruption = judge(reader, &walk)?;
        Ok(scan)
    }

    fn add(&mut self, found: &Found) {
        let seq = found.header.seq;
        if self.segments.back().is_none_or(|segment| segment.slot != found.slot) {
            self.segments.push_back(Segment::new(found.slot, seq));
        }
        if let Some(segment) = self.segments.back_mut() {
            segment.last_seq = seq;
            segment.used += found.header.record_bytes();
        }
        self.next_seq = seq + 1;
    }

    fn revoke(&mut self, header: &Header) {
        let extent = Extent { offset: header.offset, len: header.length };
        self.revoked.insert(header.device, extent, header.seq);
    }

    /// Whether a record's write is whole.
    pub(super) fn counts(&self, header: &Header) -> bool {
        let in_range = |(from, to): &(u64, u64)| (*from..=*to).contains(&header.seq);
        header.kind == RecordKind::Device || !self.dropped.iter().any(in_range)
    }

    /// Records that are dropped because their write is not whole, Device records included.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.iter().map(|(from, to)| to - from + 1).sum()
    }

    /// What later Revokes leave of a record's range.
    pub(super) fn live(&self, header: &Header) -> Vec<Extent> {
        let (offset, len) = match header.kind {
            RecordKind::Data | RecordKind::Zero => (header.offset, header.length),
            RecordKind::Truncate => (header.size_after, u64::MAX - header.size_after),
            _ => return Vec::new(),
        };
        self.revoked.live(header.device, Extent { offset, len }, header.seq)
    }
}

/// Whether the log ends where it must not (J9): something says that the next sequence was durable.
/// A record of a generation that the superblock does not know says that a superblock is lost, since
/// a generation's superblock is durable before its first record.
fn judge(reader: &mut Reader, walk: &Walk) -> Result<Option<Corruption>> {
    let superblock = reader.superblock;
    let at = walk.position(&reader.geometry);
    let known = |durable_seq| Corruption { seq: walk.expected, at, durable_seq };
    if superblock.durable_seq >= walk.expected {
        return Ok(Some(known(superblock.durable_seq)));
    }
    // What an older generation left behind its end says nothing about this sequence.
    let latest = walk.expected >= superblock.start_seq;
    let floor = if latest { superblock.generation } else { walk.generation };
    let mut slot = walk.slot;
    let mut offset = walk.offset;
    for _ in 0..reader.geometry.count {
        let start = reader.geometry.start(slot);
        let end = start + reader.geometry.segment_bytes;
        if let Some(seq) = durable_in(reader, start + offset, end, walk.expected, floor)? {
            return Ok(Some(known(seq)));
        }
        slot = reader.geometry.next(slot);
        offset = 0;
    }
    Ok(None)
}

/// What a record between two places that makes the end at `expected` a corruption says is durable.
fn durable_in(
    reader: &mut Reader,
    from: u64,
    end: u64,
    expected: u64,
    floor: u64,
) -> Result<Option<u64>> {
    let Superblock { uuid, generation: latest, .. } = reader.superblock;
    let mut at = from;
    while at + HEADER_BYTES as u64 <= end {
        let window = reader.bytes(at, WINDOW_BYTES, end)?;
        if window.len() < HEADER_BYTES {
            return Ok(None);
        }
        let last = window.len() - HEADER_BYTES;
        let mut next = 0;
        while let Some(place) = Header::look_for_one(window, next) {
            next = place + RECORD_ALIGN as usize;
            let header = Header::decode(&window[place..], &uuid);
            let known = header.filter(|header| {
                let witness = header.generation >= floor && header.durable_seq >= expected;
                witness || header.generation > latest
            });
            if let Some(header) = known {
                return Ok(Some(header.durable_seq));
            }
        }
        at += (last as u64 / RECORD_ALIGN + 1) * RECORD_ALIGN;
    }
    Ok(None)
}
