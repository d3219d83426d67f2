//! Every on-disk structure: round trip, truncation, and every bit flipped.
#![cfg(test)]

use super::super::format::{DeviceIdentity, HEADER_BYTES, Header, RecordKind, Superblock};
use crate::units::{DeviceId, Timestamp};

const UUID: [u8; 16] = *b"0123456789abcdef";

fn header(kind: RecordKind) -> Header {
    Header {
        generation: 0x0102_0304_0506_0708,
        seq: 0x1112_1314_1516_1718,
        durable_seq: 0x2122_2324_2526_2728,
        kind,
        device: DeviceId(0x3132_3334),
        offset: 0x4142_4344_4546_4748,
        length: 0x5152_5354_5556_5758,
        size_after: 0x6162_6364_6566_6768,
        mtime: Timestamp { sec: -5, nsec: 999_999_999 },
        payload_crc: 0x7172_7374,
        index: 0x8182,
        remaining: 0x9192,
    }
}

fn superblock() -> Superblock {
    Superblock {
        compat: 1,
        ro_compat: 2,
        incompat: 4,
        uuid: UUID,
        serial: 0x0102_0304_0506_0708,
        generation: 0x1112_1314_1516_1718,
        start_seq: 0x2122_2324_2526_2728,
        tail_seq: 0x3132_3334_3536_3738,
        durable_seq: 0x4142_4344_4546_4748,
        segment_bytes: 0x5152_5354_5556_5758,
        segment_count: 0x6162_6364,
        tail_slot: 0x7172_7374,
    }
}

fn flips(bytes: &[u8], mut check: impl FnMut(&[u8], usize)) {
    let mut bytes = bytes.to_vec();
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        check(&bytes, bit);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_header_of_every_kind_survives_the_round_trip() {
    use RecordKind::{Attr, Checkpoint, Data, Device, Opaque, Revoke, Truncate, Unlink, Zero};
    let fixed = [Data, Truncate, Zero, Revoke, Device, Attr, Unlink, Checkpoint];
    for kind in fixed.into_iter().chain((16..=31).map(Opaque)) {
        let header = header(kind);
        assert_eq!(Header::decode(&header.encode(&UUID), &UUID), Some(header));
    }
    assert_eq!(Header::decode(&header(Opaque(32)).encode(&UUID), &UUID), None);
}

#[test]
fn a_harmed_header_is_refused() {
    let bytes = header(RecordKind::Data).encode(&UUID);
    for len in 0..HEADER_BYTES {
        assert_eq!(Header::decode(&bytes[..len], &UUID), None, "{len} bytes");
    }
    flips(&bytes, |bytes, bit| assert_eq!(Header::decode(bytes, &UUID), None, "bit {bit}"));
    assert_eq!(Header::decode(&bytes, b"another journal."), None);
}

#[test]
fn a_superblock_survives_the_round_trip_and_no_harm() {
    let bytes = superblock().encode();
    assert_eq!(Superblock::decode(&bytes), Some(superblock()));
    for len in 0..bytes.len() {
        assert_eq!(Superblock::decode(&bytes[..len]), None, "{len} bytes");
    }
    flips(&bytes, |bytes, bit| assert_eq!(Superblock::decode(bytes), None, "bit {bit}"));
}

#[test]
fn a_device_identity_survives_the_round_trip_and_truncation() {
    let identity = DeviceIdentity {
        named: true,
        filesystem: UUID,
        inode: 0x0102_0304_0506_0708,
        birth: Timestamp { sec: -1, nsec: 5 },
        handle_type: -7,
        handle: vec![1, 2, 3, 4, 5, 6, 7, 8],
        path: b"a/b.img".to_vec(),
    };
    let bytes = identity.encode().unwrap();
    assert_eq!(DeviceIdentity::decode(&bytes), Some(identity.clone()));
    for len in 0..bytes.len() {
        assert_eq!(DeviceIdentity::decode(&bytes[..len]), None, "{len} bytes");
    }
    // Its record's checksum finds flips; here none may pass for the same identity or panic, but
    // for those of the four spare bytes.
    flips(&bytes, |bytes, bit| {
        let spare = (28..32).contains(&(bit / 8));
        assert_eq!(DeviceIdentity::decode(bytes) == Some(identity.clone()), spare, "bit {bit}");
    });
    assert_eq!(DeviceIdentity { path: vec![b'x'; 5000], ..identity.clone() }.encode(), None);
    assert_eq!(DeviceIdentity { handle: vec![0; 129], ..identity }.encode(), None);
}
