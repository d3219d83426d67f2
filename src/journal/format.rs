//! Byte layouts of the journal (STORE 3). All integers are little-endian; every checksum is CRC32C
//! and starts from the journal's uuid, so that bytes of another journal, or of an earlier one in
//! the same place, never count.
//!
//! No states, no locks. Invariants: J8 (generation and sequence are inside the header's checksum);
//! lengths are bounded before use; decoding takes any bytes and never panics.

use std::io::BufRead;

use crate::units::{DeviceId, Timestamp};

/// Bytes of one superblock slot; the structure uses the first `SUPERBLOCK_BYTES`.
pub const SLOT_BYTES: u64 = 4096;
/// Bytes before the first segment: two superblock slots, the rest reserved.
pub const HEAD_BYTES: u64 = 64 << 10;
/// Encoded size of a superblock. One 512-byte sector holds it, so it is not torn.
pub const SUPERBLOCK_BYTES: usize = 128;
/// Encoded size of a record header.
pub const HEADER_BYTES: usize = 88;
/// Records start at multiples of this.
pub const RECORD_ALIGN: u64 = 8;
/// The longest recorded path.
pub const PATH_MAX: usize = 4096;
/// The longest file handle.
pub const HANDLE_MAX: usize = 128;
/// Encoded size of a device identity without handle and path.
const IDENTITY_BYTES: usize = 52;
/// The longest payload of a Device record.
pub const DEVICE_MAX: usize = IDENTITY_BYTES + HANDLE_MAX + PATH_MAX;

const SUPERBLOCK_MAGIC: [u8; 8] = *b"bcfuseJL";
const RECORD_MAGIC: u32 = 0x4C4A_4642;
const SUPERBLOCK_VERSION: u32 = 1;
const RECORD_VERSION: u16 = 1;

/// Compatible feature: every slot was written once (see `zero`).
pub const COMPAT_WRITTEN: u32 = 1;
/// Features an older program may ignore as long as it does not write.
pub const RO_COMPAT_KNOWN: u32 = 0;
/// Features a program must know to touch the journal at all.
pub const INCOMPAT_KNOWN: u32 = 0;

/// The journal's own name.
pub type Uuid = [u8; 16];

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut word = [0; 2];
    word.copy_from_slice(&bytes[at..at + 2]);
    u16::from_le_bytes(word)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// The superblock: what recovery starts from.
///
/// ```text
///   0  8 magic        24 16 uuid        64 8 tail_seq        92  4 tail_slot
///   8  4 version      40  8 serial      72 8 durable_seq     96 28 reserved, zero
///  12  4 compat       48  8 generation  80 8 segment_bytes  124  4 crc of 0..124
///  16  4 ro_compat    56  8 start_seq   88 4 segment_count
///  20  4 incompat
/// ```
///
/// Two slots are written in turn (slot = serial % 2); the valid one with the greater serial wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Feature bits an older program may ignore.
    pub compat: u32,
    /// Feature bits an older program may ignore while it only reads.
    pub ro_compat: u32,
    /// Feature bits that must be known.
    pub incompat: u32,
    /// The journal's name.
    pub uuid: Uuid,
    /// Counts superblock writes.
    pub serial: u64,
    /// The generation of the latest mount.
    pub generation: u64,
    /// The first sequence of that generation: older generations end before it.
    pub start_seq: u64,
    /// The sequence of the first record of the tail segment.
    pub tail_seq: u64,
    /// Everything up to here was durable when this was written.
    pub durable_seq: u64,
    /// Bytes of a segment slot.
    pub segment_bytes: u64,
    /// Number of segment slots.
    pub segment_count: u32,
    /// The slot of the tail segment.
    pub tail_slot: u32,
}

impl Superblock {
    /// The bytes of a slot's structure.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        put(&mut bytes, 0, &SUPERBLOCK_MAGIC);
        put(&mut bytes, 8, &SUPERBLOCK_VERSION.to_le_bytes());
        put(&mut bytes, 12, &self.compat.to_le_bytes());
        put(&mut bytes, 16, &self.ro_compat.to_le_bytes());
        put(&mut bytes, 20, &self.incompat.to_le_bytes());
        put(&mut bytes, 24, &self.uuid);
        put(&mut bytes, 40, &self.serial.to_le_bytes());
        put(&mut bytes, 48, &self.generation.to_le_bytes());
        put(&mut bytes, 56, &self.start_seq.to_le_bytes());
        put(&mut bytes, 64, &self.tail_seq.to_le_bytes());
        put(&mut bytes, 72, &self.durable_seq.to_le_bytes());
        put(&mut bytes, 80, &self.segment_bytes.to_le_bytes());
        put(&mut bytes, 88, &self.segment_count.to_le_bytes());
        put(&mut bytes, 92, &self.tail_slot.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..124]);
        put(&mut bytes, 124, &crc.to_le_bytes());
        bytes
    }

    /// None for anything but a whole, unharmed superblock of this version.
    pub fn decode(bytes: &[u8]) -> Option<Superblock> {
        let bytes = bytes.get(..SUPERBLOCK_BYTES)?;
        if bytes[..8] != SUPERBLOCK_MAGIC
            || u32_at(bytes, 124) != crc32c::crc32c(&bytes[..124])
            || u32_at(bytes, 8) != SUPERBLOCK_VERSION
        {
            return None;
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[24..40]);
        Some(Superblock {
            compat: u32_at(bytes, 12),
            ro_compat: u32_at(bytes, 16),
            incompat: u32_at(bytes, 20),
            uuid,
            serial: u64_at(bytes, 40),
            generation: u64_at(bytes, 48),
            start_seq: u64_at(bytes, 56),
            tail_seq: u64_at(bytes, 64),
            durable_seq: u64_at(bytes, 72),
            segment_bytes: u64_at(bytes, 80),
            segment_count: u32_at(bytes, 88),
            tail_slot: u32_at(bytes, 92),
        })
    }

    /// Where this superblock is written.
    pub fn position(&self) -> u64 {
        (self.serial % 2) * SLOT_BYTES
    }
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecordKind {
    /// Bytes of a device; only grows the file.
    Data,
    /// The file ends at `size_after`, which may shrink it.
    Truncate,
    /// A range reads as zeros.
    Zero,
    /// Older records of a range are void: the range changed outside the journal (J14).
    Revoke,
    /// What a tag stands for.
    Device,
    /// Attributes.
    Attr,
    /// The file lost its last name; a note, it deletes nothing.
    Unlink,
    /// A note of the store (heartbeat, stop).
    Checkpoint,
    /// 16..=31: kept for the tree, not looked into.
    Opaque(u8),
}

impl RecordKind {
    fn code(self) -> u16 {
        match self {
            RecordKind::Data => 1,
            RecordKind::Truncate => 2,
            RecordKind::Zero => 3,
            RecordKind::Revoke => 4,
            RecordKind::Device => 5,
            RecordKind::Attr => 6,
            RecordKind::Unlink => 7,
            RecordKind::Checkpoint => 8,
            RecordKind::Opaque(code) => u16::from(code),
        }
    }

    fn of(code: u16) -> Option<RecordKind> {
        Some(match code {
            1 => RecordKind::Data,
            2 => RecordKind::Truncate,
            3 => RecordKind::Zero,
            4 => RecordKind::Revoke,
            5 => RecordKind::Device,
            6 => RecordKind::Attr,
            7 => RecordKind::Unlink,
            8 => RecordKind::Checkpoint,
            16..=31 => RecordKind::Opaque(code as u8),
            _ => return None,
        })
    }

    /// Whether `length` bytes follow the header. The others only name a range.
    pub fn has_payload(self) -> bool {
        !matches!(self, RecordKind::Truncate | RecordKind::Zero | RecordKind::Revoke)
    }

    /// Whether it belongs to a device, whose Device record must precede it in its segment.
    pub fn of_device(self) -> bool {
        !matches!(self, RecordKind::Device | RecordKind::Checkpoint | RecordKind::Opaque(_))
    }
}

/// The header of a record; its payload follows, padded to `RECORD_ALIGN`.
///
/// ```text
///   0 4 magic        24 8 durable_seq   56 8 size_after    80 2 index      (continuation)
///   4 2 version      32 4 device        64 8 mtime sec     82 2 remaining  (continuation)
///   6 2 kind         36 4 zero          72 4 mtime nsec    84 4 crc of uuid and 0..84
///   8 8 generation   40 8 offset        76 4 payload crc
///  16 8 seq          48 8 length
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The mount that wrote it (J8).
    pub generation: u64,
    /// Its place in the journal's order; the next record's is one more.
    pub seq: u64,
    /// The greatest sequence known durable when it was appended (J9).
    pub durable_seq: u64,
    /// What it says.
    pub kind: RecordKind,
    /// Whose it is; 0 where it is nobody's.
    pub device: DeviceId,
    /// First byte of its range.
    pub offset: u64,
    /// Bytes of its range; of its payload, where it has one.
    pub length: u64,
    /// The file's size afterwards. Of a Device record, the greatest size that the file had or may
    /// have where it lies, before the device's next record; the least one is `offset`.
    pub size_after: u64,
    /// The file's mtime afterwards.
    pub mtime: Timestamp,
    /// Checksum of the payload.
    pub payload_crc: u32,
    /// Records of the same write before this one (Device records do not count).
    pub index: u16,
    /// Records of the same write still to come. All of a write replay or none.
    pub remaining: u16,
}

impl Header {
    /// Bytes that follow the header, without padding.
    pub fn payload_bytes(&self) -> u64 {
        if self.kind.has_payload() { self.length } else { 0 }
    }

    /// Bytes of the whole record with its padding. Saturates on a length nobody would write.
    pub fn record_bytes(&self) -> u64 {
        record_bytes(self.payload_bytes())
    }

    /// The bytes of the header in the journal of this name.
    pub fn encode(&self, uuid: &Uuid) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, &RECORD_MAGIC.to_le_bytes());
        put(&mut bytes, 4, &RECORD_VERSION.to_le_bytes());
        put(&mut bytes, 6, &self.kind.code().to_le_bytes());
        put(&mut bytes, 8, &self.generation.to_le_bytes());
        put(&mut bytes, 16, &self.seq.to_le_bytes());
        put(&mut bytes, 24, &self.durable_seq.to_le_bytes());
        put(&mut bytes, 32, &self.device.0.to_le_bytes());
        put(&mut bytes, 40, &self.offset.to_le_bytes());
        put(&mut bytes, 48, &self.length.to_le_bytes());
        put(&mut bytes, 56, &self.size_after.to_le_bytes());
        put(&mut bytes, 64, &self.mtime.sec.to_le_bytes());
        put(&mut bytes, 72, &self.mtime.nsec.to_le_bytes());
        put(&mut bytes, 76, &self.payload_crc.to_le_bytes());
        put(&mut bytes, 80, &self.index.to_le_bytes());
        put(&mut bytes, 82, &self.remaining.to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(uuid), &bytes[..84]);
        put(&mut bytes, 84, &crc.to_le_bytes());
        bytes
    }

    /// None for anything but an unharmed header of the journal of this name.
    pub fn decode(bytes: &[u8], uuid: &Uuid) -> Option<Header> {
        let bytes = bytes.get(..HEADER_BYTES)?;
        if u32_at(bytes, 0) != RECORD_MAGIC
            || u32_at(bytes, 84) != crc32c::crc32c_append(crc32c::crc32c(uuid), &bytes[..84])
            || u16_at(bytes, 4) != RECORD_VERSION
        {
            return None;
        }
        Some(Header {
            kind: RecordKind::of(u16_at(bytes, 6))?,
            generation: u64_at(bytes, 8),
            seq: u64_at(bytes, 16),
            durable_seq: u64_at(bytes, 24),
            device: DeviceId(u32_at(bytes, 32)),
            offset: u64_at(bytes, 40),
            length: u64_at(bytes, 48),
            size_after: u64_at(bytes, 56),
            mtime: Timestamp { sec: u64_at(bytes, 64) as i64, nsec: u32_at(bytes, 72) },
            payload_crc: u32_at(bytes, 76),
            index: u16_at(bytes, 80),
            remaining: u16_at(bytes, 82),
        })
    }

    /// The first place at or after `from` where a header may begin: a cheap look, at the speed of
    /// memchr. `bytes` begin at a multiple of `RECORD_ALIGN`.
    pub fn look_for_one(bytes: &[u8], from: usize) -> Option<usize> {
        let magic = RECORD_MAGIC.to_le_bytes();
        let mut at = from;
        loop {
            let mut rest = bytes.get(at..)?;
            let found = at + rest.skip_until(magic[0]).ok()?.checked_sub(1)?;
            if found % RECORD_ALIGN as usize == 0 && bytes.get(found..)?.starts_with(&magic) {
                return Some(found);
            }
            at = found + 1;
        }
    }
}

/// Bytes a record with this much payload takes. Saturates.
pub fn record_bytes(payload: u64) -> u64 {
    let bytes = payload.saturating_add(HEADER_BYTES as u64);
    bytes.checked_next_multiple_of(RECORD_ALIGN).unwrap_or(u64::MAX)
}

/// What a device tag stands for (J12): the payload of a Device record.
///
/// ```text
///   0  4 flags (1 = named: a name of it is durable)    40  4 birth nsec
///   4 16 filesystem uuid                               44  4 handle type
///  20  8 inode                                         48  2 handle bytes
///  28  4 zero                                          50  2 path bytes
///  32  8 birth sec                                     52 .. handle, then path
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DeviceIdentity {
    /// Whether a name of it is known durable.
    pub named: bool,
    /// The filesystem's uuid, or what stands for it.
    pub filesystem: [u8; 16],
    /// Inode number.
    pub inode: u64,
    /// Birth time; zero where unknown.
    pub birth: Timestamp,
    /// The file handle's type.
    pub handle_type: i32,
    /// The file handle; empty where there is none. It holds the inode's generation.
    pub handle: Vec<u8>,
    /// The path below the source, as last known.
    pub path: Vec<u8>,
}

impl DeviceIdentity {
    /// The payload; None if handle or path are longer than any can be.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.handle.len() > HANDLE_MAX || self.path.len() > PATH_MAX {
            return None;
        }
        let mut bytes = vec![0; IDENTITY_BYTES];
        put(&mut bytes, 0, &u32::from(self.named).to_le_bytes());
        put(&mut bytes, 4, &self.filesystem);
        put(&mut bytes, 20, &self.inode.to_le_bytes());
        put(&mut bytes, 32, &self.birth.sec.to_le_bytes());
        put(&mut bytes, 40, &self.birth.nsec.to_le_bytes());
        put(&mut bytes, 44, &self.handle_type.to_le_bytes());
        put(&mut bytes, 48, &(self.handle.len() as u16).to_le_bytes());
        put(&mut bytes, 50, &(self.path.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&self.handle);
        bytes.extend_from_slice(&self.path);
        Some(bytes)
    }

    /// None if the lengths do not fit the bytes. The record's checksum guards the rest.
    pub fn decode(bytes: &[u8]) -> Option<DeviceIdentity> {
        let fixed = bytes.get(..IDENTITY_BYTES)?;
        let handle_len = usize::from(u16_at(fixed, 48));
        let path_len = usize::from(u16_at(fixed, 50));
        let rest = &bytes[IDENTITY_BYTES..];
        let fits = handle_len <= HANDLE_MAX && path_len <= PATH_MAX;
        if !fits || u32_at(fixed, 0) > 1 || rest.len() != handle_len + path_len {
            return None;
        }
        let mut filesystem = [0; 16];
        filesystem.copy_from_slice(&fixed[4..20]);
        Some(DeviceIdentity {
            named: u32_at(fixed, 0) == 1,
            filesystem,
            inode: u64_at(fixed, 20),
            birth: Timestamp { sec: u64_at(fixed, 32) as i64, nsec: u32_at(fixed, 40) },
            handle_type: u32_at(fixed, 44) as i32,
            handle: rest[..handle_len].to_vec(),
            path: rest[handle_len..].to_vec(),
        })
    }
}
