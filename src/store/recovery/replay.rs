//! From records to dirty maps. A record does to the map what its write did when it was made, cut to
//! what later Revokes leave of it; one Revoke of everything makes the device as if it had none.
//!
//! The size needs care: the device's own is not known here. Data lets it grow to what its record
//! says, a Truncate sets it; so it is "at least" until the first Truncate, and "exactly" from then
//! on.

use std::collections::HashMap;

use super::super::checkpoint::Checkpoint;
use super::super::dirty::{Body, DirtyMap, Fresh};
use crate::clock;
use crate::error::Result;
use crate::journal::{DeviceIdentity, Record, RecordKind, Recovered};
use crate::units::{DeviceId, Extent, Stamp, Timestamp};

/// The size that the records say, over the device's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    AtLeast(u64),
    Exactly(u64),
}

/// A device as the log tells it.
#[derive(Default)]
pub(in crate::store) struct Replayed {
    pub(super) record: Option<DeviceIdentity>,
    pub(in crate::store) unlinked: bool,
    pub(super) heartbeat: Option<Timestamp>,
    pub(super) stopped: Option<Stamp>,
    pub(in crate::store) map: DirtyMap,
    pub(in crate::store) last_seq: u64,
    size: Option<(Size, u64)>,
    write_seq: u64,
    /// The least and the greatest size its file may have: what the last Device record says, and
    /// what the records since then made of it.
    sizes: Option<(u64, u64)>,
}

impl Replayed {
    pub(super) fn is_live(&self) -> bool {
        !self.map.is_clean() || self.size.is_some()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.map.load().live_bytes
    }

    /// The size applications see, over a device of this size.
    pub(in crate::store) fn size_over(&self, home: u64) -> u64 {
        match self.size {
            Some((Size::Exactly(bytes), _)) => bytes,
            Some((Size::AtLeast(bytes), _)) => bytes.max(home),
            None => home,
        }
    }

    /// The map over a device of this size.
    pub(in crate::store) fn settle(&mut self, home: u64) {
        self.map.set_home_size(home);
        let (least, most) = self.sizes.unwrap_or((0, u64::MAX));
        self.map.home_was_within(least, most);
        if let Some((_, seq)) = self.size {
            let bytes = self.size_over(home);
            self.map.set_size(bytes, seq, self.write_seq, clock::now_ms());
        }
    }

    /// Whether the journal can explain this size of the file (J12): any from the least to the
    /// greatest it may have, since a power cut may keep a part of a write and lose the size set
    /// before.
    pub(super) fn explains(&self, size: u64) -> bool {
        self.sizes.is_none_or(|(least, most)| least <= size && size <= most)
    }

    fn apply(&mut self, record: &Record<'_>) {
        let header = &record.header;
        self.last_seq = header.seq;
        self.write_seq = record.placed.write_seq;
        self.stopped = None;
        match header.kind {
            RecordKind::Data => self.data(record),
            RecordKind::Zero if record.live.is_empty() => {}
            RecordKind::Zero => {
                self.zero(record);
                self.at_least(header.size_after, header.seq);
                self.map.note_change(header.mtime);
            }
            RecordKind::Truncate if record.live.is_empty() => {}
            RecordKind::Truncate => {
                self.zero(record);
                self.size = Some((Size::Exactly(header.size_after), header.seq));
                self.map.note_change(header.mtime);
            }
            RecordKind::Revoke if header.offset == 0 && header.length == u64::MAX => self.void(),
            RecordKind::Revoke => {}
            RecordKind::Attr => self.map.set_mtime(header.mtime, header.mtime, header.seq),
            RecordKind::Unlink => self.unlinked = true,
            RecordKind::Device => {
                self.record = record.identity();
                self.sizes = Some((header.offset, header.size_after));
            }
            RecordKind::Checkpoint | RecordKind::Opaque(_) => {}
        }
        let sized =
            matches!(header.kind, RecordKind::Data | RecordKind::Zero | RecordKind::Truncate);
        if sized {
            self.had_size(header.size_after);
        }
    }

    /// Everything so far was changed outside the journal since (J14).
    fn void(&mut self) {
        let record = self.record.take();
        let (last_seq, write_seq, unlinked) = (self.last_seq, self.write_seq, self.unlinked);
        *self = Replayed { record, last_seq, write_seq, unlinked, ..Replayed::default() };
    }

    fn had_size(&mut self, bytes: u64) {
        let (least, most) = self.sizes.unwrap_or((bytes, bytes));
        self.sizes = Some((least.min(bytes), most.max(bytes)));
    }

    fn at_least(&mut self, bytes: u64, seq: u64) {
        self.size = Some(match self.size {
            None => (Size::AtLeast(bytes), seq),
            Some((Size::AtLeast(old), _)) => (Size::AtLeast(old.max(bytes)), seq),
            Some((Size::Exactly(old), _)) => (Size::Exactly(old.max(bytes)), seq),
        });
    }

    fn data(&mut self, record: &Record<'_>) {
        let header = &record.header;
        for live in &record.live {
            let Body::Data { at, length, crc, .. } = Body::of(&record.placed) else { continue };
            let skip = (live.offset - header.offset) as u32;
            self.put(record, *live, Body::Data { at, length, crc, skip });
        }
        self.at_least(header.size_after, header.seq);
        self.map.note_change(header.mtime);
    }

    fn zero(&mut self, record: &Record<'_>) {
        record.live.iter().for_each(|live| self.put(record, *live, Body::Zero));
    }

    fn put(&mut self, record: &Record<'_>, extent: Extent, body: Body) {
        let (seq, write_seq) = (record.header.seq, record.placed.write_seq);
        let now_ms = clock::now_ms();
        self.map.insert(Fresh { extent, seq, write_seq, now_ms, body });
    }
}

/// All devices of a log.
#[derive(Default)]
pub(super) struct Log {
    pub(super) devices: HashMap<DeviceId, Replayed>,
    pub(super) records: u64,
    /// The greatest tag used.
    pub(super) last_tag: u32,
}

impl Log {
    /// Reads all of it.
    pub(super) fn read(recovered: &Recovered) -> Result<Log> {
        let mut log = Log::default();
        let mut heartbeat: Option<Timestamp> = None;
        recovered.visit(&mut |record| {
            log.records += 1;
            let id = record.header.device;
            match record.header.kind {
                RecordKind::Checkpoint => {
                    let note = Checkpoint::decode(record.payload);
                    heartbeat = heartbeat.max(note.as_ref().map(|note| note.time));
                    log.stopped(note);
                }
                RecordKind::Opaque(_) => {}
                _ => {
                    // A write says as well when the mount was alive. (An Attr's time is typed.)
                    let timed = matches!(
                        record.header.kind,
                        RecordKind::Data | RecordKind::Zero | RecordKind::Truncate
                    );
                    heartbeat = heartbeat.max(timed.then_some(record.header.mtime));
                    log.last_tag = log.last_tag.max(id.0);
                    log.devices.entry(id).or_default().apply(record);
                }
            }
            Ok(())
        })?;
        log.devices.values_mut().for_each(|device| device.heartbeat = heartbeat);
        Ok(log)
    }

    fn stopped(&mut self, note: Option<Checkpoint>) {
        for (id, stamp) in note.and_then(|note| note.stamps).unwrap_or_default() {
            if let Some(device) = self.devices.get_mut(&id) {
                device.stopped = Some(stamp);
            }
        }
    }
}
