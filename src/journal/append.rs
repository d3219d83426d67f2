//! Appending: sequence and buffered pwrite under ONE lock for the whole journal, so that an
//! acknowledged record never lies behind a hole.
//!
//! States of a write: reserved -> planned (places and sequences are given) -> written. A failed
//! pwrite latches the journal: its bytes may be there or not. Lock: `Journal::log`, held across the
//! pwrite. Invariants: sequences without a gap; in each segment a device's Device record precedes
//! its first other record; the records of one write carry `index` and `remaining`, so that replay
//! can take all or none; every record carries `durable_seq` (J9).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Journal;
use super::format::{
    DeviceIdentity, HEADER_BYTES, Header, RECORD_ALIGN, RecordKind, Uuid, record_bytes,
};
use super::health::FailUnlessDone;
use super::reserve::{Reservation, pieces_max};
use super::ring::Ring;
use super::segment::SPLIT_MIN;
use crate::device::BlockDevice;
use crate::error::{Error, Kind, Result};
use crate::units::{DeviceId, Timestamp};

/// Buffered records are written when there is this much.
const RUN_BYTES: usize = 1 << 20;

/// What a write does.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Bytes; may be empty (only the size grows). Split over records and segments as needed.
    Data(&'a [u8]),
    /// The file ends at `size_after`.
    Truncate,
    /// This many bytes read as zeros.
    Zero(u64),
    /// Older records of this many bytes are void (J14).
    Revoke(u64),
    /// Attributes, as the store encodes them.
    Attr(&'a [u8]),
    /// A note that the last name is gone.
    Unlink(&'a [u8]),
    /// A note of the store.
    Checkpoint(&'a [u8]),
    /// A record of the tree; the kind is 16..=31.
    Opaque(u8, &'a [u8]),
}

impl<'a> Change<'a> {
    fn kind(&self) -> RecordKind {
        match self {
            Change::Data(_) => RecordKind::Data,
            Change::Truncate => RecordKind::Truncate,
            Change::Zero(_) => RecordKind::Zero,
            Change::Revoke(_) => RecordKind::Revoke,
            Change::Attr(_) => RecordKind::Attr,
            Change::Unlink(_) => RecordKind::Unlink,
            Change::Checkpoint(_) => RecordKind::Checkpoint,
            Change::Opaque(code, _) => RecordKind::Opaque(*code),
        }
    }

    pub(super) fn payload(&self) -> &'a [u8] {
        match self {
            Change::Data(bytes)
            | Change::Attr(bytes)
            | Change::Unlink(bytes)
            | Change::Checkpoint(bytes)
            | Change::Opaque(_, bytes) => bytes,
            Change::Truncate | Change::Zero(_) | Change::Revoke(_) => &[],
        }
    }

    fn length(&self) -> u64 {
        match self {
            Change::Zero(len) | Change::Revoke(len) => *len,
            other => other.payload().len() as u64,
        }
    }
}

/// One change of one device.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Whose; 0 for nobody's.
    pub device: DeviceId,
    /// First byte of its range.
    pub offset: u64,
    /// What.
    pub change: Change<'a>,
    /// The file's size afterwards.
    pub size_after: u64,
    /// The file's mtime afterwards.
    pub mtime: Timestamp,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its sequence.
    pub seq: u64,
    /// The last sequence of its write: home writes need THIS durable (J13), since a write of which
    /// the last record is lost does not replay at all.
    pub write_seq: u64,
    /// Whose.
    pub device: DeviceId,
    /// First byte of its range.
    pub offset: u64,
    /// Bytes of its range.
    pub length: u64,
    /// Where its payload lies on the journal's device.
    pub at: u64,
    /// The payload's checksum.
    pub payload_crc: u32,
}

/// What an append did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The last sequence of the write: durable when a barrier covered it.
    pub seq: u64,
    /// Its records in order, without Device records.
    pub records: Vec<Placed>,
}

/// What the append lock guards.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) ring: Ring,
    /// The sequence the next record gets.
    pub(super) next_seq: u64,
    identities: HashMap<u32, Tag>,
    buffer: Vec<u8>,
}

/// What a tag stands for.
#[derive(Clone, Debug)]
struct Tag {
    identity: Arc<[u8]>,
    /// The size after its last record.
    size: u64,
    /// The sizes that its file may have where it lies, least and greatest.
    home: (u64, u64),
    /// The last record that replay would bring back; 0: none.
    last: u64,
}

impl Tag {
    /// The sizes its file may be found with.
    fn sizes(&self) -> (u64, u64) {
        (self.home.0.min(self.size), self.home.1.max(self.size))
    }
}

enum Payload<'a> {
    Given(&'a [u8]),
    Identity(Arc<[u8]>),
}

impl Payload<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::Given(bytes) => bytes,
            Payload::Identity(bytes) => bytes,
        }
    }
}

/// A record with its place.
struct Item<'a> {
    header: Header,
    payload: Payload<'a>,
    at: u64,
}

impl Log {
    pub(super) fn new(ring: Ring, next_seq: u64) -> Log {
        Log { ring, next_seq, identities: HashMap::new(), buffer: Vec::new() }
    }

    /// Room for a record of `least` bytes of `device` in the head, rolling if needed; places the
    /// Device record. The bytes left.
    fn make_room<'a>(
        &mut self,
        device: Option<u32>,
        least: u64,
        items: &mut Vec<Item<'a>>,
    ) -> Result<u64> {
        let identity = match device {
            Some(tag) => Some((tag, self.identity(tag)?)),
            None => None,
        };
        let whole = self.ring.geometry().segment_bytes;
        let fits = self.ring.head().is_some_and(|head| {
            let missing = identity.as_ref().filter(|(tag, _)| !head.devices.contains(tag));
            let before = missing.map_or(0, |(_, tag)| record_bytes(tag.identity.len() as u64));
            head.used + before + least <= whole
        });
        if !fits && !self.ring.roll(self.next_seq) {
            return Err(Error::new(Kind::Internal, "journal write", "no free segment"));
        }
        if let Some((number, tag)) = identity
            && self.ring.head().is_some_and(|head| head.devices.insert(number))
        {
            let (offset, size_after) = tag.sizes();
            let length = tag.identity.len() as u64;
            let header = blank(RecordKind::Device, DeviceId(number));
            let header = Header { offset, length, size_after, ..header };
            items.push(self.place(header, Payload::Identity(tag.identity))?);
        }
        Ok(self.ring.head().map_or(0, |head| whole - head.used))
    }

    fn note_last(&mut self, entries: &[Entry<'_>], seq: u64) {
        for entry in entries {
            if let Some(tag) = self.identities.get_mut(&entry.device.0) {
                tag.size = entry.size_after;
                if !matches!(entry.change, Change::Revoke(_) | Change::Unlink(_)) {
                    tag.last = seq;
                }
            }
        }
    }

    fn identity(&self, tag: u32) -> Result<Tag> {
        let unknown = || Error::new(Kind::Invalid, "journal write", format!("no device {tag}"));
        self.identities.get(&tag).cloned().ok_or_else(unknown)
    }

    /// Gives a record its sequence and place at the head.
    fn place<'a>(&mut self, mut header: Header, payload: Payload<'a>) -> Result<Item<'a>> {
        let geometry = self.ring.geometry();
        let none = || Error::new(Kind::Internal, "journal write", "no head");
        let head = self.ring.head().ok_or_else(none)?;
        header.seq = self.next_seq;
        header.payload_crc = crc32c::crc32c(payload.bytes());
        let at = geometry.start(head.slot) + head.used;
        head.used += header.record_bytes();
        head.last_seq = header.seq;
        self.next_seq += 1;
        Ok(Item { header, payload, at })
    }

    /// Places the records of one change.
    fn plan<'a>(&mut self, entry: &Entry<'a>, items: &mut Vec<Item<'a>>) -> Result<()> {
        let kind = entry.change.kind();
        let device = kind.of_device().then_some(entry.device.0);
        let header = Header {
            offset: entry.offset,
            length: entry.change.length(),
            size_after: entry.size_after,
            mtime: entry.mtime,
            ..blank(kind, entry.device)
        };
        let mut rest = entry.change.payload();
        if kind != RecordKind::Data {
            self.make_room(device, record_bytes(rest.len() as u64), items)?;
            items.push(self.place(header, Payload::Given(rest))?);
            return Ok(());
        }
        let mut offset = entry.offset;
        loop {
            let least = record_bytes((rest.len() as u64).min(SPLIT_MIN));
            let room = self.make_room(device, least, items)? & !(RECORD_ALIGN - 1);
            let fits = (room - HEADER_BYTES as u64).min(self.ring.geometry().payload_max());
            let mut piece = rest.len();
            if rest.len() as u64 > fits {
                piece = fits as usize & !(SPLIT_MIN as usize - 1);
            }
            let (now, later) = rest.split_at(piece);
            let part = Header { offset, length: piece as u64, ..header };
            items.push(self.place(part, Payload::Given(now))?);
            offset += piece as u64;
            rest = later;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Writes placed records, neighbours in one call.
    fn write(&mut self, device: &dyn BlockDevice, uuid: &Uuid, items: &[Item<'_>]) -> Result<()> {
        let mut start = 0;
        self.buffer.clear();
        for item in items {
            let adjacent = start + self.buffer.len() as u64 == item.at;
            if !self.buffer.is_empty() && (!adjacent || self.buffer.len() >= RUN_BYTES) {
                device.write_at(&self.buffer, start)?;
                self.buffer.clear();
            }
            if self.buffer.is_empty() {
                start = item.at;
            }
            self.buffer.extend_from_slice(&item.header.encode(uuid));
            self.buffer.extend_from_slice(item.payload.bytes());
            let padded = self.buffer.len().next_multiple_of(RECORD_ALIGN as usize);
            self.buffer.resize(padded, 0);
        }
        if self.buffer.is_empty() { Ok(()) } else { device.write_at(&self.buffer, start) }
    }
}

fn blank(kind: RecordKind, device: DeviceId) -> Header {
    Header {
        generation: 0,
        seq: 0,
        durable_seq: 0,
        kind,
        device,
        offset: 0,
        length: 0,
        size_after: 0,
        mtime: Timestamp::default(),
        payload_crc: 0,
        index: 0,
        remaining: 0,
    }
}

impl Journal {
    /// Says what a tag stands for, now or after a rename; it goes into the log before the device's
    /// next record, with the size after the record before that: `size` for now. Invalid if handle
    /// or path are too long.
    pub fn set_device(&self, device: DeviceId, identity: &DeviceIdentity, size: u64) -> Result<()> {
        let too_long = || Error::new(Kind::Invalid, "journal device", "path or handle too long");
        let bytes: Arc<[u8]> = identity.encode().ok_or_else(too_long)?.into();
        let mut log = self.log.lock();
        let last = log.identities.get(&device.0).map_or(0, |tag| tag.last);
        let tag = Tag { identity: bytes, size, home: (size, size), last };
        log.identities.insert(device.0, tag);
        if let Some(head) = log.ring.head() {
            head.devices.remove(&device.0);
        }
        Ok(())
    }

    /// The sizes that a file may have where it lies, from now on: its next Device record says them,
    /// so that recovery can tell a file that was replaced by another (J12).
    pub fn note_home(&self, device: DeviceId, (least, most): (u64, u64)) {
        if let Some(tag) = self.log.lock().identities.get_mut(&device.0) {
            tag.home = (least, most);
        }
    }

    /// The log that recovery read has records of this device.
    pub fn note_recovered(&self, device: DeviceId) {
        let last = self.appended_seq();
        if let Some(tag) = self.log.lock().identities.get_mut(&device.0) {
            tag.last = last;
        }
    }

    /// Whether replay would bring back anything of a device (J14).
    pub fn would_replay(&self, device: DeviceId) -> bool {
        let log = self.log.lock();
        let last = log.identities.get(&device.0).map_or(0, |tag| tag.last);
        log.ring.tail().is_some_and(|tail| tail.first_seq <= last)
    }

    /// The devices of which replay would bring back something.
    pub fn replayable(&self) -> Vec<DeviceId> {
        let log = self.log.lock();
        let Some(first) = log.ring.tail().map(|tail| tail.first_seq) else { return Vec::new() };
        let tags = log.identities.iter().filter(|(_, tag)| first <= tag.last);
        tags.map(|(number, _)| DeviceId(*number)).collect()
    }

    /// A durable Revoke of everything, with this sequence: older records do not matter any more.
    pub fn voided(&self, device: DeviceId, seq: u64) {
        if let Some(tag) = self.log.lock().identities.get_mut(&device.0)
            && tag.last < seq
        {
            tag.last = 0;
        }
    }

    /// A tag that will have no more records.
    pub fn forget_device(&self, device: DeviceId) {
        self.log.lock().identities.remove(&device.0);
    }

    /// Appends one write: all of its records replay or none. Returns once it is in the page cache.
    /// Invalid: more than reserved, an unknown device, a record too long; nothing was appended.
    /// Any other error: the journal failed (J11).
    pub fn append(&self, room: &mut Reservation, entries: &[Entry<'_>]) -> Result<Appended> {
        let (mut charge, mut records) = (0_u64, 0);
        for entry in entries {
            self.check_entry(entry)?;
            charge = charge.saturating_add(self.charge_one(&entry.change));
            records += pieces_max(&self.geometry, entry.change.payload().len() as u64);
        }
        if records > u64::from(u16::MAX) {
            return Err(Error::new(Kind::Invalid, "journal write", "too many records"));
        }
        let mut log = self.log.lock();
        for entry in entries.iter().filter(|entry| entry.change.kind().of_device()) {
            log.identity(entry.device.0)?;
        }
        self.health.check()?;
        room.spend(charge)?;
        let guard = FailUnlessDone::new(&self.health, &self.space);
        let result = self.append_locked(&mut log, entries);
        match &result {
            Ok(_) => {
                guard.done();
                let last = log.next_seq - 1;
                log.note_last(entries, last);
            }
            Err(error) => self.health.fail(&error.to_string()),
        }
        self.space.set_available(log.ring.available());
        result
    }

    fn check_entry(&self, entry: &Entry<'_>) -> Result<()> {
        let kind = entry.change.kind();
        let long = entry.change.payload().len() as u64 > self.geometry.payload_max();
        let code = matches!(kind, RecordKind::Opaque(code) if !(16..=31).contains(&code));
        if code || (long && kind != RecordKind::Data) {
            return Err(Error::new(Kind::Invalid, "journal write", format!("{kind:?}")));
        }
        match entry.offset.checked_add(entry.change.length()) {
            Some(_) => Ok(()),
            None => Err(Error::new(Kind::Invalid, "journal write", "range overflows")),
        }
    }

    fn append_locked(&self, log: &mut Log, entries: &[Entry<'_>]) -> Result<Appended> {
        let mut items = Vec::with_capacity(entries.len() + 1);
        for entry in entries {
            log.plan(entry, &mut items)?;
        }
        let durable_seq = self.durable_seq();
        let of_write = |item: &&mut Item<'_>| item.header.kind != RecordKind::Device;
        let count = items.iter_mut().filter(of_write).count();
        let seq = log.next_seq - 1;
        let mut records = Vec::with_capacity(count);
        let mut index = 0;
        for item in &mut items {
            let header = &mut item.header;
            header.generation = self.generation;
            header.durable_seq = durable_seq;
            if header.kind == RecordKind::Device {
                continue;
            }
            header.index = index as u16;
            header.remaining = (count - 1 - index) as u16;
            index += 1;
            records.push(Placed::of(header, item.at, seq));
        }
        log.write(&*self.device, &self.uuid, &items)?;
        let bytes: u64 = items.iter().map(|item| item.header.record_bytes()).sum();
        self.unstarted.fetch_add(bytes, Relaxed);
        self.appended.store(seq, Release);
        Ok(Appended { seq, records })
    }
}

impl Placed {
    /// The place of a record that begins at `start`.
    pub(super) fn of(header: &Header, start: u64, write_seq: u64) -> Placed {
        Placed {
            seq: header.seq,
            write_seq,
            device: header.device,
            offset: header.offset,
            length: header.length,
            at: start + HEADER_BYTES as u64,
            payload_crc: header.payload_crc,
        }
    }
}
