//! Tests of the journal. `device` is a small device in memory; crash states come from it.
#![cfg(test)]

mod barrier;
mod crash;
mod device;
mod format;
mod random;
mod replay;
mod room;
mod stress;

use std::sync::Arc;

use self::device::Memory;
use super::*;
use crate::units::{DeviceId, Extent, Timestamp};

const DEVICE: DeviceId = DeviceId(7);
/// Small segments, so that a test wraps soon.
const SMALL: Geometry = Geometry { segment_bytes: 32 << 10, count: 4 };

fn identity(path: &str) -> DeviceIdentity {
    DeviceIdentity { named: true, path: path.into(), ..DeviceIdentity::default() }
}

/// An empty journal of small segments.
fn formatted(geometry: Geometry) -> Arc<Memory> {
    let device = Memory::new(geometry.device_bytes());
    Journal::format_as(&*device, geometry, [7; 16]).unwrap();
    device
}

fn recover(device: &Arc<Memory>) -> Recovered {
    Recovered::open(device.clone(), Mutants::default()).unwrap()
}

fn started(device: &Arc<Memory>) -> Journal {
    let journal = recover(device).start().unwrap();
    journal.set_device(DEVICE, &identity("a.img"), 0).unwrap();
    journal
}

fn entry<'a>(offset: u64, change: Change<'a>) -> Entry<'a> {
    Entry { device: DEVICE, offset, change, size_after: 1 << 20, mtime: Timestamp::default() }
}

fn append(journal: &Journal, entries: &[Entry<'_>]) -> Appended {
    let changes: Vec<_> = entries.iter().map(|entry| entry.change).collect();
    let mut room = journal.try_reserve(Purpose::Frontend, journal.charge(&changes)).unwrap();
    journal.append(&mut room, entries).unwrap()
}

fn data(journal: &Journal, offset: u64, bytes: &[u8]) -> Appended {
    append(journal, &[entry(offset, Change::Data(bytes))])
}

/// A record without what differs from mount to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    seq: u64,
    kind: RecordKind,
    offset: u64,
    live: Vec<Extent>,
    payload: Vec<u8>,
}

fn all(recovered: &Recovered) -> Vec<Seen> {
    let mut seen = Vec::new();
    let mut visitor = |record: &Record<'_>| {
        let Header { seq, kind, offset, .. } = record.header;
        let (live, payload) = (record.live.clone(), record.payload.to_vec());
        seen.push(Seen { seq, kind, offset, live, payload });
        Ok(())
    };
    recovered.visit(&mut visitor).unwrap();
    seen
}

/// The Data records' payloads.
fn payloads(device: &Arc<Memory>) -> Vec<Vec<u8>> {
    let seen = all(&recover(device)).into_iter();
    seen.filter(|seen| seen.kind == RecordKind::Data).map(|seen| seen.payload).collect()
}
