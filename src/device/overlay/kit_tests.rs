//! What the tests share: a map store in two slots of a device, and a file as plain bytes.

use std::collections::BTreeMap;

use super::*;
use crate::device::fault::Random;
use crate::device::memory::Image;
use crate::device::{FileDevice, MemoryDevice};

pub(super) const SLOT: u64 = 32 << 10;

/// Keeps the whole map in one of two slots in turn, each with number and checksum.
pub(crate) struct Slots {
    device: Arc<dyn BlockDevice>,
    state: Mutex<(u64, Option<Kept>)>,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    size: u64,
    lower_end: u64,
    rows: BTreeMap<u64, MapExtent>,
    mtime: Timestamp,
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn encode(number: u64, kept: &Kept) -> Vec<u8> {
    let time = [kept.mtime.sec as u64, kept.mtime.nsec.into()];
    let mut words = vec![number, kept.size, kept.lower_end, time[0], time[1]];
    words.push(kept.rows.len() as u64);
    for row in kept.rows.values() {
        words.extend([row.first, row.blocks, u64::from(row.state == BlockState::Upper)]);
    }
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(checksum(&bytes).to_le_bytes());
    assert!(bytes.len() as u64 <= SLOT);
    bytes
}

fn decode(bytes: &[u8]) -> Option<(u64, Kept)> {
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let rows = *words.get(5)? as usize;
    let end = rows.checked_mul(3)?.checked_add(6)?;
    let sum = *words.get(end)?;
    if words[0] == 0 || checksum(&bytes[..end * 8]) != sum {
        return None;
    }
    let mut kept = Kept { size: words[1], lower_end: words[2], ..Kept::default() };
    kept.mtime = Timestamp { sec: words[3] as i64, nsec: words[4] as u32 };
    for row in words[6..end].chunks(3) {
        let state = if row[2] == 1 { BlockState::Upper } else { BlockState::Zero };
        kept.rows.insert(row[0], MapExtent { first: row[0], blocks: row[1], state });
    }
    Some((words[0], kept))
}

impl Slots {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Slots {
        let mut newest = (0, None);
        for slot in 0..2 {
            let mut bytes = vec![0; SLOT as usize];
            device.read_at(&mut bytes, slot * SLOT).unwrap();
            if let Some((number, kept)) = decode(&bytes).filter(|found| found.0 > newest.0) {
                newest = (number, Some(kept));
            }
        }
        Slots { device, state: Mutex::new(newest) }
    }
}

impl MapStore for Slots {
    fn load(&self) -> Result<Option<SavedMap>> {
        Ok(self.state.lock().1.as_ref().map(|kept| SavedMap {
            size: kept.size,
            lower_end: kept.lower_end,
            extents: kept.rows.values().copied().collect(),
        }))
    }

    fn save(&self, change: &MapChange) -> Result<()> {
        let mut state = self.state.lock();
        let mut kept = state.1.clone().unwrap_or_default();
        (kept.size, kept.lower_end) = (change.size, change.lower_end);
        kept.rows.retain(|first, _| !change.remove.contains(first));
        kept.rows.extend(change.put.iter().map(|row| (row.first, *row)));
        kept.mtime = change.mtime.unwrap_or(kept.mtime);
        let mut end = 0;
        for row in kept.rows.values() {
            assert!(row.first >= end && row.blocks > 0, "overlapping rows: {kept:?}");
            assert_ne!(row.state, BlockState::Lower);
            end = row.first + row.blocks;
        }
        let number = state.0 + 1;
        self.device.write_at(&encode(number, &kept), number % 2 * SLOT)?;
        self.device.sync(true)?;
        *state = (number, Some(kept));
        Ok(())
    }

    fn times(&self) -> Result<(Timestamp, Timestamp)> {
        let mtime = self.state.lock().1.as_ref().map_or(Timestamp::default(), |kept| kept.mtime);
        Ok((mtime, mtime))
    }
}

/// A device over these three, with the map as it was saved.
pub(crate) fn overlay(
    lower: &Arc<MemoryDevice>,
    data: Arc<dyn BlockDevice>,
    slots: Arc<dyn BlockDevice>,
    block: u32,
) -> OverlayDevice {
    let store = Box::new(Slots::open(slots));
    OverlayDevice::new(Some(lower.clone()), data, store, block).unwrap()
}

/// A lower whose every byte says where it is, and is not zero.
pub(crate) fn lower(bytes: usize) -> Arc<MemoryDevice> {
    let bytes: Vec<u8> = (0..bytes).map(|at| 1 + (at % 97) as u8).collect();
    Arc::new(MemoryDevice::new(Image::from(&bytes[..])))
}

pub(super) fn content(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xaa; device.size().unwrap() as usize];
    assert_eq!(device.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

/// A change of a file.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Write {
        offset: u64,
        len: usize,
        fill: u8,
    },
    /// Within the size.
    Home {
        offset: u64,
        len: usize,
        fill: u8,
    },
    Size(u64),
    Range(Range, u64, u64),
}

impl Step {
    /// A random one on a file of `size` bytes that shall not grow past `limit`.
    pub(super) fn random(random: &mut Random, size: u64, limit: u64, block: u64) -> Step {
        let fill = 100 + random.below(150) as u8;
        let mut offset = random.below(limit);
        let most = [700, block, 3 * block, 3 * block][random.below(4) as usize];
        let mut len = 1 + random.below(most);
        if random.one_in(3) {
            offset -= offset % block;
            len = len.next_multiple_of(block);
        }
        if random.one_in(6) {
            offset = size.min(limit - 1);
        }
        let len = len.min(limit - offset);
        match random.below(12) {
            0..4 => Step::Write { offset, len: len as usize, fill },
            4 | 5 if offset < size => {
                Step::Home { offset, len: len.min(size - offset) as usize, fill }
            }
            4..7 => Step::Size(if random.one_in(2) { offset } else { size.min(offset) }),
            7 => Step::Size(size.max(offset)),
            8 => Step::Range(Range::ZeroKeep, offset, len),
            9 => Step::Range(Range::ZeroGrow, offset, len),
            10 => Step::Range(Range::AllocateGrow, offset, len),
            _ => Step::Range(Range::Punch, offset, len),
        }
    }

    pub(super) fn apply(&self, device: &OverlayDevice) -> Result<()> {
        match self {
            Step::Write { offset, len, fill } => device.write_at(&vec![*fill; *len], *offset),
            Step::Home { offset, len, fill } => device.write_home(&vec![*fill; *len], *offset),
            Step::Size(bytes) => device.set_size(*bytes),
            Step::Range(what, offset, len) => device.change_range(*what, *offset, *len),
        }
    }

    /// The same on plain bytes.
    pub(super) fn model(&self, bytes: &mut Vec<u8>) {
        match *self {
            Step::Write { offset, len, fill } | Step::Home { offset, len, fill } => {
                let (offset, end) = (offset as usize, offset as usize + len);
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset..end].fill(fill);
            }
            Step::Size(size) => bytes.resize(size as usize, 0),
            Step::Range(what, offset, len) => {
                let end = (offset + len) as usize;
                if matches!(what, Range::AllocateGrow | Range::ZeroGrow) {
                    bytes.resize(bytes.len().max(end), 0);
                }
                if !matches!(what, Range::Allocate | Range::AllocateGrow) {
                    let end = end.min(bytes.len());
                    bytes.get_mut(offset as usize..end).unwrap_or_default().fill(0);
                }
            }
        }
    }
}

/// What the map promises at any time.
pub(super) fn check_map(device: &OverlayDevice) {
    let map = device.map();
    assert!(map.lower_end <= map.size, "{map:?}");
    for row in &map.extents {
        assert!(row.blocks > 0 && row.state != BlockState::Lower, "{map:?}");
        assert!(row.first + row.blocks <= map.size.div_ceil(device.block), "past the end: {map:?}");
        let needed = row.state == BlockState::Upper
            || row.first + row.blocks <= map.lower_end.div_ceil(device.block);
        assert!(needed, "zeros over nothing: {map:?}");
    }
    for pair in map.extents.windows(2) {
        let touch = pair[0].first + pair[0].blocks == pair[1].first;
        assert!(pair[0].first + pair[0].blocks <= pair[1].first, "{map:?}");
        assert!(!touch || pair[0].state != pair[1].state, "not merged: {map:?}");
    }
}

/// A data file that is made by its first write, as the tree's opener does.
pub(super) fn lazy_file(path: &std::path::Path) -> Arc<FileDevice> {
    use rustix::fs::{Mode, OFlags};
    let path = path.to_path_buf();
    let opener = move |flags: OFlags| {
        let writes = flags.intersects(OFlags::RDWR | OFlags::WRONLY);
        let flags = if writes { flags | OFlags::CREATE } else { flags };
        rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))
    };
    Arc::new(FileDevice::new(Box::new(opener), crate::config::DirectIo::Auto))
}
