//! The store over an overlay device: whatever way a change takes, journal or past it, it is there
//! after a kill, though nobody synced.
#![cfg(test)]

use super::*;
use crate::device::overlay::kit_tests::{lower, overlay};
use crate::device::{MemoryDevice, Range};

const LIMIT: u64 = 400 << 10;

/// What survives a kill.
struct Disk {
    lower: Arc<MemoryDevice>,
    data: Arc<MemoryDevice>,
    slots: Arc<MemoryDevice>,
    journal: Image,
}

impl Disk {
    fn new() -> Disk {
        let geometry = Geometry { segment_bytes: 256 << 10, count: 8 };
        let journal = FaultLog::new().add("journal", Image::default());
        journal.set_size(geometry.device_bytes()).unwrap();
        Journal::format_as(&*journal, geometry, *b"named test store").unwrap();
        let (data, slots, journal) = (Arc::default(), Arc::default(), journal.image());
        Disk { lower: lower(150_000), data, slots, journal }
    }

    /// What it has without the journal.
    fn home(&self) -> Vec<u8> {
        let home = overlay(&self.lower, self.data.clone(), self.slots.clone(), 16384);
        let mut bytes = vec![0; home.size().unwrap() as usize];
        home.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn open(&self, setup: &Setup) -> Kit {
        let device = overlay(&self.lower, self.data.clone(), self.slots.clone(), 16384);
        let journal = FaultLog::new().add("journal", self.journal.clone());
        let file = File { device: Arc::new(device), ctime: 1, nlink: 1 };
        Kit::open(FaultLog::new(), journal, vec![Some(file)], setup)
    }

    /// What a kill leaves; what the old store does from now on goes nowhere.
    fn after(&self, kit: &Kit) -> Disk {
        let copy = |device: &MemoryDevice| Arc::new(MemoryDevice::new(device.image()));
        Disk {
            lower: self.lower.clone(),
            data: copy(&self.data),
            slots: copy(&self.slots),
            journal: kit.journal.image(),
        }
    }
}

fn setup(cache_mode: CacheMode) -> Setup {
    let config = StoreConfig { cache_mode, sequential_cutoff: 64 << 10, ..config() };
    Setup { config, ..Setup::default() }
}

fn change(kit: &Kit, model: &mut Vec<u8>, random: &mut Random) {
    let offset = random.below(LIMIT);
    let most = [3000, 40_000, 100_000][random.below(3) as usize];
    let len = (1 + random.below(most)).min(LIMIT - offset);
    match random.below(8) {
        0 => {
            kit.device(0).set_size(offset).unwrap();
            model.resize(offset as usize, 0);
        }
        1 => {
            kit.device(0).change_range(Range::Punch, offset, len).unwrap();
            let end = model.len().min((offset + len) as usize);
            model.get_mut(offset as usize..end).unwrap_or_default().fill(0);
        }
        2 => {
            // A stream, which goes past the journal once it is long enough.
            for at in (offset..LIMIT).step_by(32 << 10) {
                let bytes = bytes(random, (LIMIT - at).min(32 << 10) as usize);
                kit.write(0, at, &bytes);
                put(model, at, &bytes);
            }
        }
        _ => {
            let bytes = bytes(random, len as usize);
            kit.write(0, offset, &bytes);
            put(model, offset, &bytes);
        }
    }
}

fn run(seed: u64, mode: CacheMode) {
    let mut random = Random::new(seed);
    let setup = setup(mode);
    let mut disk = Disk::new();
    let untouched = disk.lower.image();
    let mut model = untouched.to_vec();
    for life in 0..6 {
        let kit = disk.open(&setup);
        assert!(read(kit.device(0)).unwrap() == model, "seed {seed:#x}, {mode:?}, life {life}");
        for _ in 0..15 {
            change(&kit, &mut model, &mut random);
            kit.work(&mut random, 4);
        }
        assert!(read(kit.device(0)).unwrap() == model, "seed {seed:#x}, {mode:?}, in life {life}");
        if random.one_in(3) {
            kit.drain();
        }
        disk = disk.after(&kit);
    }
    let kit = disk.open(&setup);
    kit.drain();
    assert!(disk.home() == model, "seed {seed:#x}, {mode:?}: not what went home");
    assert!(disk.lower.image() == untouched, "the lower was written");
}

#[test]
fn what_was_acknowledged_survives_a_kill_through_an_overlay() {
    for seed in 0..8 {
        run(seed, CacheMode::Writeback);
        run(seed, CacheMode::Writethrough);
    }
}

#[test]
fn a_stream_past_the_journal_survives_a_kill_at_once() {
    let disk = Disk::new();
    let kit = disk.open(&setup(CacheMode::Writeback));
    let part = vec![7; 64 << 10];
    for number in 0..16 {
        kit.device(0).write(number << 16, &part).unwrap();
        let home = disk.after(&kit).home();
        // The first parts are no stream yet.
        let end = (number as usize + 1) << 16;
        assert!(number < 8 || home.len() >= end && home[end - part.len()..end] == part, "{number}");
    }
}
