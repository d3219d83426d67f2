//! The notes the store leaves in the journal (Checkpoint records): the heartbeat and, at an orderly
//! stop with a dirty journal, the stamps of the dirty devices (J12).
//!
//! ```text
//!   0 4 kind (1 heartbeat, 2 stop)   4 8 time sec   12 4 time nsec   16 .. stamps (of a stop)
//!   stamp: 0 4 device   4 8 size   12 8 mtime sec   20 4 nsec   24 8 ctime sec   32 4 nsec
//! ```
//!
//! No states, no locks.

use crate::units::{DeviceId, Stamp, Timestamp};

const HEARTBEAT: u32 = 1;
const STOP: u32 = 2;
const HEAD_BYTES: usize = 16;
const STAMP_BYTES: usize = 36;

/// Stamps in one note, so that it fits into any segment.
pub(super) const STAMPS_MAX: usize = 2000;

/// A note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Checkpoint {
    /// The time of day it was made at.
    pub(super) time: Timestamp,
    /// Of a stop: what the dirty devices were like. None: a heartbeat.
    pub(super) stamps: Option<Vec<(DeviceId, Stamp)>>,
}

impl Checkpoint {
    pub(super) fn heartbeat(time: Timestamp) -> Checkpoint {
        Checkpoint { time, stamps: None }
    }

    pub(super) fn stop(time: Timestamp, stamps: Vec<(DeviceId, Stamp)>) -> Checkpoint {
        Checkpoint { time, stamps: Some(stamps) }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let kind = if self.stamps.is_some() { STOP } else { HEARTBEAT };
        let mut bytes = kind.to_le_bytes().to_vec();
        put_time(&mut bytes, self.time);
        for (device, stamp) in self.stamps.iter().flatten() {
            bytes.extend_from_slice(&device.0.to_le_bytes());
            bytes.extend_from_slice(&stamp.size.to_le_bytes());
            put_time(&mut bytes, stamp.mtime);
            put_time(&mut bytes, stamp.ctime);
        }
        bytes
    }

    /// None for anything that `encode` does not make.
    pub(super) fn decode(bytes: &[u8]) -> Option<Checkpoint> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let time = time_at(head, 4)?;
        match u32::from_le_bytes(head.get(..4)?.try_into().ok()?) {
            HEARTBEAT if rest.is_empty() => Some(Checkpoint::heartbeat(time)),
            STOP if rest.len().is_multiple_of(STAMP_BYTES) => {
                let stamps = rest.chunks_exact(STAMP_BYTES).map(stamp_of);
                Some(Checkpoint::stop(time, stamps.collect::<Option<_>>()?))
            }
            _ => None,
        }
    }
}

fn put_time(bytes: &mut Vec<u8>, time: Timestamp) {
    bytes.extend_from_slice(&time.sec.to_le_bytes());
    bytes.extend_from_slice(&time.nsec.to_le_bytes());
}

fn time_at(bytes: &[u8], at: usize) -> Option<Timestamp> {
    let sec = i64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?);
    let nsec = u32::from_le_bytes(bytes.get(at + 8..at + 12)?.try_into().ok()?);
    Some(Timestamp { sec, nsec })
}

fn stamp_of(bytes: &[u8]) -> Option<(DeviceId, Stamp)> {
    let device = DeviceId(u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?));
    let size = u64::from_le_bytes(bytes.get(4..12)?.try_into().ok()?);
    let (mtime, ctime) = (time_at(bytes, 12)?, time_at(bytes, 24)?);
    Some((device, Stamp { size, mtime, ctime }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_round_trip_and_wrong_bytes_are_none() {
        let time = Timestamp { sec: -3, nsec: 7 };
        let stamp = Stamp { size: 9, mtime: time, ctime: Timestamp { sec: 1 << 40, nsec: 1 } };
        let stop = Checkpoint::stop(time, vec![(DeviceId(4), stamp), (DeviceId(5), stamp)]);
        for note in [Checkpoint::heartbeat(time), stop] {
            let bytes = note.encode();
            assert_eq!(Checkpoint::decode(&bytes), Some(note));
            for len in 0..bytes.len() {
                let cut = Checkpoint::decode(&bytes[..len]);
                // Cut between two stamps it is a shorter note; the record's checksum rules it out.
                assert!(cut.is_none() || (len - HEAD_BYTES).is_multiple_of(STAMP_BYTES));
            }
        }
        assert_eq!(Checkpoint::decode(&[0xff; 16]), None);
    }
}
