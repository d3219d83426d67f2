//! One device at a time: against plain bytes, with threads, with failures, on a real file.

use std::time::Duration;

use rustix::io::Errno;

use super::kit_tests::*;
use super::*;
use crate::device::MemoryDevice;
use crate::device::fault::{Call, Fault, FaultLog, Random};
use crate::device::memory::Image;

const TIMEOUT: Duration = Duration::from_secs(60);

fn memory() -> Arc<MemoryDevice> {
    Arc::default()
}

/// Whatever `seek` calls a hole reads as zeros, and the two take turns up to the end.
fn check_seek(device: &OverlayDevice, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() as u64 {
        let data = device.seek(at, false).unwrap_or(bytes.len() as u64);
        assert!(bytes[at as usize..data as usize].iter().all(|byte| *byte == 0), "hole at {at}");
        if data == bytes.len() as u64 {
            break;
        }
        at = device.seek(data, true).unwrap();
        assert!(at > data, "no data at {data}");
    }
    let errno = |hole| device.seek(bytes.len() as u64, hole).map_err(|error| error.errno());
    let nxio = Err(Errno::NXIO.raw_os_error());
    assert_eq!((errno(false), errno(true)), (nxio, nxio));
}

fn run_model(seed: u64, block: u32, lower_bytes: usize, steps: usize) {
    let mut random = Random::new(seed);
    let (lower, data, slots) = (lower(lower_bytes), memory(), memory());
    let untouched = lower.image();
    let mut model = untouched.to_vec();
    let open = || overlay(&lower, data.clone(), slots.clone(), block);
    let mut device = open();
    let limit = 12 * u64::from(block);
    for number in 0..steps {
        let step = Step::random(&mut random, model.len() as u64, limit, block.into());
        step.apply(&device).unwrap();
        step.model(&mut model);
        let at = || format!("seed {seed:#x}, block {block}, step {number}: {step:?}");
        assert_eq!(device.size().unwrap(), model.len() as u64, "{}", at());
        check_map(&device);
        match random.below(8) {
            0 => device.sync(random.one_in(2)).unwrap(),
            1 => {
                // Killed: what is settled is there without any sync.
                device.settle().unwrap();
                device = open();
            }
            _ => {}
        }
        if content(&device) != model {
            let differs = content(&device).iter().zip(&model).position(|(a, b)| a != b);
            panic!("{}: differs at {differs:?}, {:?}", at(), device.map());
        }
        if number % 8 == 0 {
            check_seek(&device, &model);
            let from = random.below(model.len() as u64 + 10);
            let mut some = vec![1; 1 + random.below(9000) as usize];
            let got = device.read_at(&mut some, from).unwrap();
            let want = model.get(from as usize..).unwrap_or_default();
            assert_eq!(some[..got], want[..want.len().min(some.len())], "{}", at());
        }
    }
    assert!(lower.image() == untouched, "the lower was written");
}

#[test]
fn it_reads_like_plain_bytes_whatever_is_done_and_however_often_it_is_opened() {
    for seed in 0..6 {
        for block in [4096, 16384, 65536] {
            run_model(seed, block, 5 * block as usize + 1234, 250);
            run_model(seed, block, 0, 100);
        }
    }
}

#[test]
fn a_new_file_has_no_lower_and_a_shorter_lower_gives_zeros() {
    let new = OverlayDevice::new(None, memory(), Box::new(Slots::open(memory())), 4096).unwrap();
    assert_eq!((new.size().unwrap(), new.map().lower_end), (0, 0));
    new.write_at(b"abc", 5000).unwrap();
    assert_eq!(content(&new)[4998..], *b"\0\0abc");
    let lower = lower(20_000);
    let device = overlay(&lower, memory(), memory(), 4096);
    lower.replace(Image::from(&[7; 5000][..]));
    device.write_at(b"x", 6000).unwrap();
    let bytes = content(&device);
    assert_eq!((bytes.len(), bytes[4999], bytes[5000], bytes[6000]), (20_000, 7, 0, b'x'));
    assert!(bytes[6001..].iter().all(|byte| *byte == 0));
}

#[test]
fn block_sizes_and_maps_that_cannot_be_are_refused() {
    let store = || Box::new(Slots::open(memory()));
    for block in [0, 2048, 5000, 131_072] {
        assert!(OverlayDevice::new(None, memory(), store(), block).is_err(), "{block}");
    }
    let row = |first, blocks| MapExtent { first, blocks, state: BlockState::Zero };
    let of = |size, lower_end, extents| SavedMap { size, lower_end, extents };
    assert!(Map::load(&of(9, 9, vec![row(0, 2), row(2, 1)]), 4096).is_some());
    for bad in [
        of(9, 10, vec![]),
        of(u64::MAX, 0, vec![]),
        of(9, 9, vec![row(0, 0)]),
        of(9, 9, vec![row(0, 2), row(1, 1)]),
        of(9, 9, vec![row(u64::MAX, 1)]),
        of(9, 9, vec![row(0, u64::MAX)]),
        of(9, 9, vec![MapExtent { first: 0, blocks: 1, state: BlockState::Lower }]),
    ] {
        assert!(Map::load(&bad, 4096).is_none(), "{bad:?}");
    }
}

#[test]
fn partial_writes_of_many_threads_into_the_same_blocks_lose_nothing() {
    const THREADS: u64 = 4;
    const SECTORS: u64 = 3 * 128;
    let (lower, data, slots) = (lower(SECTORS as usize * 512), memory(), memory());
    let device = overlay(&lower, data.clone(), slots.clone(), 65536);
    let old = lower.image().to_vec();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let device = &device;
                scope.spawn(move || {
                    for sector in (thread..SECTORS).step_by(THREADS as usize) {
                        let bytes = [200 + thread as u8; 512];
                        if sector % 8 < 4 {
                            device.write_at(&bytes, sector * 512).unwrap();
                        } else {
                            device.write_home(&bytes, sector * 512).unwrap();
                        }
                    }
                })
            })
            .collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            device.sync(true).unwrap();
            let seen = content(&device);
            let right = |at: usize| {
                seen[at] == old[at] || u64::from(seen[at]) == 200 + at as u64 / 512 % THREADS
            };
            assert!((0..seen.len()).all(right));
        }
    });
    device.settle().unwrap();
    for device in [device, overlay(&lower, data, slots, 65536)] {
        let seen = content(&device);
        let wrong = |at: &usize| u64::from(seen[*at]) != 200 + *at as u64 / 512 % THREADS;
        assert_eq!((0..seen.len()).find(wrong), None);
        assert_eq!(device.map().extents.len(), 1);
    }
}

#[test]
fn a_million_scattered_rows_cost_a_save_only_what_changed() {
    let saved = SavedMap { size: 1 << 40, lower_end: 1 << 40, extents: Vec::new() };
    let mut map = Map::load(&saved, 4096).unwrap();
    let mut random = Random::new(7);
    for _ in 0..1_000_000 {
        let block = random.below(1 << 28);
        map.note_written(block, block + 1);
        map.set_upper(block, block + 1);
    }
    let all = map.take_batch().change;
    assert!(all.put.len() > 900_000, "{}", all.put.len());
    map.set_upper(all.put[5].first + all.put[5].blocks, all.put[5].first + all.put[5].blocks + 1);
    map.set_zero(all.put[500].first, all.put[500].first + 1);
    let some = map.take_batch().change;
    assert!((2..=4).contains(&(some.put.len() + some.remove.len())), "{some:?}");
}

/// Two fault devices of one log, and an overlay over them.
struct Rig {
    lower: Arc<MemoryDevice>,
    data: Arc<crate::device::fault::FaultDevice>,
    slots: Arc<crate::device::fault::FaultDevice>,
    device: OverlayDevice,
}

fn rig(bytes: usize) -> Rig {
    let log = FaultLog::new();
    let (data, slots) = (log.add("data", Image::default()), log.add("map", Image::default()));
    let lower = lower(bytes);
    let device = overlay(&lower, data.clone(), slots.clone(), 4096);
    Rig { lower, data, slots, device }
}

impl Rig {
    fn reopened(&self) -> OverlayDevice {
        overlay(&self.lower, self.data.clone(), self.slots.clone(), 4096)
    }

    fn saved(&self) -> SavedMap {
        Slots::open(self.slots.clone()).load().unwrap().unwrap_or_default()
    }
}

fn upper(first: u64, blocks: u64) -> MapExtent {
    MapExtent { first, blocks, state: BlockState::Upper }
}

#[test]
fn what_is_written_while_a_sync_runs_belongs_to_the_next() {
    let rig = rig(40_960);
    rig.device.write_at(&[200; 4096], 0).unwrap();
    let gate = rig.data.hang(Call::Sync);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| rig.device.sync(true));
        assert!(gate.wait_for(1, TIMEOUT));
        rig.device.write_at(&[201; 4096], 4096).unwrap();
        rig.device.set_size(30_000).unwrap();
        gate.release();
        sync.join().unwrap().unwrap();
    });
    assert_eq!((rig.saved().extents, rig.saved().size), (vec![upper(0, 1)], 40_960));
    rig.device.sync(true).unwrap();
    assert_eq!((rig.saved().extents, rig.saved().size), (vec![upper(0, 2)], 30_000));
}

#[test]
fn a_block_that_is_in_use_again_is_not_punched() {
    let rig = rig(40_960);
    rig.device.write_at(&[200; 12_288], 0).unwrap();
    rig.device.sync(true).unwrap();
    rig.device.change_range(Range::Punch, 0, 12_288).unwrap();
    let gate = rig.slots.hang(Call::Sync);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| rig.device.sync(true));
        assert!(gate.wait_for(1, TIMEOUT));
        assert_eq!(rig.data.image().to_vec(), [200; 12_288], "punched before the save");
        rig.device.write_at(&[201; 4096], 4096).unwrap();
        gate.release();
        sync.join().unwrap().unwrap();
    });
    let want = [[0; 4096], [201; 4096], [0; 4096]].concat();
    assert_eq!(rig.data.image().to_vec(), want);
    assert_eq!(content(&rig.device)[..12_288], want);
}

#[test]
fn failures_are_told_and_lose_nothing() {
    for call in [Call::Write, Call::Sync] {
        let rig = rig(40_960);
        rig.device.write_at(b"abc", 5000).unwrap();
        let now = content(&rig.device);
        rig.slots.inject(Fault::fail(call, Errno::NOSPC));
        assert_eq!(rig.device.sync(true).map_err(|error| error.kind), Err(Kind::NoSpace));
        assert_eq!(content(&rig.device), now);
        rig.device.settle().unwrap();
        assert_eq!(content(&rig.reopened()), now);
    }
    let rig = rig(40_960);
    rig.device.write_at(b"abc", 5000).unwrap();
    rig.data.inject(Fault::fail(Call::Sync, Errno::IO));
    assert!(rig.device.settle().is_err());
    assert_eq!(rig.slots.calls(Call::Write), 0, "saved after a failed sync");
    assert_eq!(&content(&rig.device)[5000..5003], b"abc");
    rig.device.settle().unwrap();
    assert_eq!(content(&rig.reopened()), content(&rig.device));
}

#[test]
fn a_sync_that_waited_for_a_failed_one_fails_too() {
    // Whether the second one waits already cannot be seen: it does in one round or another.
    let waited = |_| {
        let rig = rig(40_960);
        rig.device.write_at(b"abc", 5000).unwrap();
        rig.data.inject(Fault::fail(Call::Sync, Errno::IO));
        let gate = rig.data.hang(Call::Sync);
        let second = std::thread::scope(|scope| {
            let first = scope.spawn(|| rig.device.sync(true));
            assert!(gate.wait_for(1, TIMEOUT));
            let second = scope.spawn(|| rig.device.sync(true));
            std::thread::sleep(Duration::from_millis(20));
            gate.release();
            assert!(first.join().unwrap().is_err());
            second.join().unwrap()
        });
        rig.device.sync(true).unwrap();
        second.is_err()
    };
    assert!((0..100).any(waited));
}

#[test]
fn a_full_data_file_is_told_and_what_was_there_stays() {
    let rig = rig(40_960);
    rig.device.set_size(41_000).unwrap();
    rig.device.write_at(b"end", 40_990).unwrap();
    let now = content(&rig.device);
    rig.data.inject(Fault::fail(Call::Write, Errno::NOSPC).partly());
    let failed = rig.device.write_at(&[9; 100], 5000).map_err(|error| error.errno());
    assert_eq!(failed, Err(Errno::NOSPC.raw_os_error()));
    assert_eq!(content(&rig.device), now, "half of a block came into view");
    // In place, behind the size: what arrived must not come into view later.
    rig.data.inject(Fault::fail(Call::Write, Errno::NOSPC).partly());
    assert!(rig.device.write_at(&[9; 100], 42_000).is_err());
    rig.device.set_size(43_000).unwrap();
    assert_eq!(content(&rig.device)[..41_000], now);
    assert!(content(&rig.device)[41_000..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_settle_without_changes_does_nothing_and_times_are_saved_alone() {
    let rig = rig(40_960);
    rig.device.settle().unwrap();
    rig.device.sync(false).unwrap();
    assert_eq!((rig.data.calls(Call::Sync), rig.slots.calls(Call::Sync)), (0, 0));
    rig.device.write_at(&[1; 4096], 0).unwrap();
    rig.device.settle().unwrap();
    assert_eq!((rig.data.calls(Call::Sync), rig.slots.calls(Call::Sync)), (1, 1));
    // In place: the bytes survive by themselves, only the time is saved.
    rig.device.write_at(&[2; 4096], 0).unwrap();
    rig.device.write_home(&[3; 8192], 0).unwrap();
    let time = Timestamp { sec: 77, nsec: 5 };
    rig.device.set_mtime(time).unwrap();
    assert_eq!((rig.data.calls(Call::Sync), rig.slots.calls(Call::Sync)), (1, 2));
    assert_eq!(rig.saved().extents, [upper(0, 1)], "a block whose bytes are not durable");
    assert_eq!(
        rig.device.stamp().unwrap().map(|stamp| (stamp.size, stamp.mtime)),
        Some((40_960, time))
    );
    rig.device.sync(true).unwrap();
    assert_eq!(rig.saved().extents, [upper(0, 2)]);
    assert_eq!(rig.reopened().stamp().unwrap().map(|stamp| stamp.mtime), Some(time));
    rig.device.write_at(&[2; 4096], 0).unwrap();
    assert_ne!(rig.device.stamp().unwrap().map(|stamp| stamp.mtime), Some(time));
}

#[test]
fn allocation_asks_only_for_what_is_missing() {
    let (lower, slots) = (lower(40_960), memory());
    let dir = tempfile::tempdir().unwrap();
    let device = overlay(&lower, lazy_file(&dir.path().join("data")), slots, 4096);
    // Nobody knows of a file that is not there.
    device.change_range(Range::Allocate, 0, 1 << 50).unwrap();
    device.write_at(&[1; 4096], 0).unwrap();
    device.change_range(Range::Allocate, 0, 4096).unwrap();
    let refused = device.change_range(Range::AllocateGrow, 0, 1 << 50);
    assert_eq!(refused.map_err(|error| error.kind), Err(Kind::NoSpace));
    assert_eq!(device.size().unwrap(), 40_960);
    device.change_range(Range::AllocateGrow, 0, 50_000).unwrap();
    assert_eq!((device.size().unwrap(), device.map().extents), (50_000, vec![upper(0, 1)]));
}

#[test]
fn the_data_file_is_made_by_the_first_write_and_emptied_by_a_revert() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let (lower, slots) = (lower(40_960), memory());
    let old = content(&*lower);
    let device = overlay(&lower, lazy_file(&path), slots.clone(), 4096);
    device.prepare(false).unwrap();
    device.prepare(true).unwrap();
    assert_eq!(content(&device), old);
    device.set_size(40_000).unwrap();
    device.change_range(Range::Punch, 4096, 4096).unwrap();
    device.set_size(40_960).unwrap();
    device.sync(false).unwrap();
    device.revert().unwrap();
    assert!(!path.exists(), "made by what writes nothing");
    assert_eq!(content(&device), old);
    device.write_at(b"abc", 5000).unwrap();
    device.write_home(&[9; 20_000], 4000).unwrap();
    device.sync(true).unwrap();
    let again = overlay(&lower, lazy_file(&path), slots.clone(), 4096);
    assert_eq!(content(&again), content(&device));
    again.set_size(100).unwrap();
    again.revert().unwrap();
    assert_eq!((content(&again), again.map().extents), (old.clone(), vec![]));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    assert_eq!(content(&overlay(&lower, lazy_file(&path), slots, 4096)), old);
}

#[test]
fn a_revert_that_cannot_be_saved_changes_nothing() {
    let rig = rig(40_960);
    rig.device.write_at(b"abc", 5000).unwrap();
    let now = content(&rig.device);
    rig.slots.inject(Fault::fail(Call::Sync, Errno::IO));
    assert!(rig.device.revert().is_err());
    assert_eq!(content(&rig.device), now);
    rig.device.sync(true).unwrap();
    assert_eq!(content(&rig.reopened()), now);
}
