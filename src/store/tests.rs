//! The store over a device in memory, without FUSE.

use rustix::io::Errno;

use super::*;
use crate::device::fault::{Call, Fault, FaultDevice, FaultLog};
use crate::device::{Image, Range};
use crate::error::Kind;
use crate::units::{Extent, Timestamp};

fn store() -> BlockStore {
    BlockStore::new(&StoreConfig { cache_bytes: 4 << 20, ..StoreConfig::default() })
}

fn identity(ino: u64) -> Identity {
    Identity { dev: 1, ino, generation: 1 }
}

fn stamp(size: u64, sec: i64) -> Stamp {
    let time = Timestamp { sec, nsec: 0 };
    Stamp { size, mtime: time, ctime: time }
}

fn memory(bytes: &[u8]) -> Arc<FaultDevice> {
    FaultLog::new().add("file", Image::from(bytes))
}

/// Somebody else changes the file.
fn behind(file: &FaultDevice, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = file.image().to_vec();
    change(&mut bytes);
    file.replace(Image::from(&bytes[..]));
}

fn open(store: &BlockStore, ino: u64, stamp: Stamp, memory: &Arc<FaultDevice>) -> OpenedDevice {
    store.open(identity(ino), stamp, memory.clone(), &|| format!("{ino}").into())
}

fn read(device: &Device, offset: u64, len: usize) -> Vec<u8> {
    let plan = device.plan_read(offset, len);
    let mut out = vec![0xee; plan.len()];
    if !plan.is_empty() && !device.try_cached(&plan, &mut out) {
        device.read(&plan, &mut out).unwrap();
    }
    out
}

#[test]
fn a_closed_unchanged_file_keeps_its_blocks_and_a_changed_one_does_not() {
    let (store, file) = (store(), memory(&[7; 8192]));
    let first = open(&store, 5, stamp(8192, 1), &file);
    assert!(!first.unchanged, "nothing is known of it");
    assert_eq!(read(&first.device, 0, 8192), [7; 8192]);
    store.close(&identity(5), &|| None);
    let again = open(&store, 5, stamp(8192, 1), &file);
    assert!(again.unchanged && again.device.unit() == first.device.unit());
    read(&again.device, 0, 8192);
    assert_eq!(file.calls(Call::Read), 1, "the second read hits");
    store.close(&identity(5), &|| None);
    behind(&file, |bytes| bytes.fill(8));
    let changed = open(&store, 5, stamp(8192, 2), &file);
    assert!(!changed.unchanged && changed.device.unit() != first.device.unit());
    assert_eq!(read(&changed.device, 0, 8192), [8; 8192]);
}

#[test]
fn a_change_behind_an_open_handle_is_seen_at_the_next_open_and_not_forgotten_at_close() {
    let (store, file) = (store(), memory(&[7; 8192]));
    let first = open(&store, 5, stamp(8192, 1), &file);
    read(&first.device, 0, 8192);
    behind(&file, |bytes| bytes.fill(8));
    // Closed without a write of ours: the stamp of the open stays, so the change is noticed.
    store.close(&identity(5), &|| Some(stamp(8192, 2)));
    let next = open(&store, 5, stamp(8192, 2), &file);
    assert_eq!((next.unchanged, read(&next.device, 0, 1)), (false, vec![8]));
    behind(&file, |bytes| bytes.fill(9));
    let second = open(&store, 5, stamp(8192, 3), &file);
    assert!(!second.unchanged && second.device.unit() == next.device.unit());
    assert_eq!(read(&next.device, 0, 1), [9]);
}

#[test]
fn a_closed_writer_leaves_a_reader_that_notices_foreign_changes() {
    let (store, file) = (store(), memory(&[7; 4096]));
    let reader = open(&store, 5, stamp(4096, 1), &file).device;
    let writer = open(&store, 5, stamp(4096, 1), &file);
    writer.device.write(0, &[1; 10]).unwrap();
    assert!(open(&store, 5, stamp(4096, 2), &file).unchanged, "the change was our own");
    store.close(&identity(5), &|| Some(stamp(4096, 2)));
    store.close(&identity(5), &|| None);
    assert!(open(&store, 5, stamp(4096, 2), &file).unchanged);
    read(&reader, 0, 4096);
    behind(&file, |bytes| bytes.fill(9));
    assert!(!open(&store, 5, stamp(4096, 3), &file).unchanged);
    assert_eq!(read(&reader, 0, 1), [9]);
}

#[test]
fn our_own_touches_move_the_stamp() {
    let (store, file) = (store(), memory(&[7; 4096]));
    let opened = open(&store, 5, stamp(4096, 1), &file);
    opened.device.write(0, &[1; 10]).unwrap();
    store.close(&identity(5), &|| Some(stamp(4096, 9)));
    assert!(open(&store, 5, stamp(4096, 9), &file).unchanged, "after our write");
    store.close(&identity(5), &|| None);
    // chmod: the ctime moves, bytes do not.
    let changed = Stamp { ctime: Timestamp { sec: 20, nsec: 0 }, ..stamp(4096, 9) };
    store.touched(&identity(5), changed, false);
    assert!(open(&store, 5, changed, &file).unchanged, "after our chmod");
    store.close(&identity(5), &|| None);
    // The mtime moved as well: that was somebody else.
    store.touched(&identity(5), stamp(4096, 30), false);
    assert!(!open(&store, 5, stamp(4096, 30), &file).unchanged);
}

#[test]
fn an_unlinked_file_takes_its_tag_along() {
    let (store, file) = (store(), memory(&[7; 4096]));
    let unit = open(&store, 5, stamp(4096, 1), &file).device.unit();
    store.forget(&identity(5));
    assert!(store.knows(&identity(5)), "as long as it is open");
    store.close(&identity(5), &|| None);
    assert!(!store.knows(&identity(5)));
    assert_ne!(open(&store, 5, stamp(4096, 1), &file).device.unit(), unit);
}

#[test]
fn reads_are_clamped_and_follow_writes_truncates_and_holes() {
    let (store, file) = (store(), memory(&[1; 5000]));
    let device = open(&store, 5, stamp(5000, 1), &file).device;
    assert_eq!(read(&device, 4096, 4096), [1; 904]);
    assert!(read(&device, 5000, 10).is_empty());
    device.write(6000, &[2; 4]).unwrap();
    assert_eq!(device.size(), 6004);
    let tail = read(&device, 4990, 4096);
    assert_eq!(
        (&tail[..10], &tail[10..1010], &tail[1010..]),
        (&[1; 10][..], &[0; 1000][..], &[2; 4][..])
    );
    device.set_size(4100).unwrap();
    device.set_size(8192).unwrap();
    assert_eq!(read(&device, 4096, 8), [1, 1, 1, 1, 0, 0, 0, 0]);
    device.change_range(Range::Punch, 0, 4096).unwrap();
    assert_eq!(read(&device, 4090, 8), [0, 0, 0, 0, 0, 0, 1, 1]);
    device.change_range(Range::ZeroGrow, 8000, 1000).unwrap();
    assert_eq!((device.size(), read(&device, 8990, 100).len()), (9000, 10));
    assert_eq!(file.size().unwrap(), 9000);
}

#[test]
fn a_size_seen_behind_the_mount_counts_only_if_we_did_not_change_it_meanwhile() {
    let (store, file) = (store(), memory(&[1; 100]));
    let device = open(&store, 5, stamp(100, 1), &file).device;
    read(&device, 0, 100);
    let version = device.size_version();
    device.write(100, &[2; 100]).unwrap();
    device.observe(100, version);
    assert_eq!(device.size(), 200, "an old attribute never cuts our write off");
    behind(&file, |bytes| bytes.resize(4000, 3));
    device.observe(4000, device.size_version());
    assert_eq!(read(&device, 190, 20)[..], [[2; 10], [3; 10]].concat());
    behind(&file, |bytes| bytes.truncate(10));
    device.observe(10, device.size_version());
    assert_eq!(read(&device, 0, 100), [1; 10]);
}

#[test]
fn errors_reach_the_caller_and_nothing_wrong_is_cached() {
    let (store, file) = (store(), memory(&[1; 16384]));
    let device = open(&store, 5, stamp(16384, 1), &file).device;
    read(&device, 0, 4096);
    for call in [Call::Read, Call::Write, Call::Sync] {
        // A failing write may leave part of its bytes behind.
        file.inject(Fault::fail(call, Errno::IO).partly().always());
    }
    assert_eq!(read(&device, 0, 4096), [1; 4096], "cached blocks are still served");
    let plan = device.plan_read(4096, 4096);
    assert_eq!(device.read(&plan, &mut [0; 4096]).unwrap_err().kind, Kind::Io);
    assert!(device.write(0, &[9; 4096]).is_err());
    assert!(device.sync(true).is_err());
    file.heal();
    assert_eq!(read(&device, 4096, 4), [1; 4]);
    let after = read(&device, 0, 4096);
    assert_eq!((after[0], after[4095]), (9, 1), "what the failed write left, not what was cached");
    assert!(device.sync(true).is_ok());
}

#[test]
fn modes_decide_what_a_write_leaves_in_the_cache() {
    let (store, file) = (store(), memory(&[1; 8192]));
    let device = open(&store, 5, stamp(8192, 1), &file).device;
    device.write(0, &[2; 4096]).unwrap();
    assert_eq!((read(&device, 0, 1), file.calls(Call::Read)), (vec![2], 0));
    store.set_cache_mode(CacheMode::Writearound);
    device.write(0, &[3; 4096]).unwrap();
    assert_eq!((read(&device, 0, 1), file.calls(Call::Read)), (vec![3], 1));
    store.set_cache_mode(CacheMode::None);
    assert_eq!(store.snapshot(None).resident_blocks, 0);
    for _ in 0..2 {
        read(&device, 0, 4096);
    }
    assert_eq!((file.calls(Call::Read), store.snapshot(None).resident_blocks), (3, 0));
    let total = store.snapshot(None).total;
    assert_eq!((total.bypassed, total.hits + total.misses), (2, 2));
}

#[test]
fn concurrent_writers_and_readers_end_with_cache_equal_to_device() {
    let seed = 0x5eed_u64;
    println!("seed {seed:#x}");
    let (store, file) = (store(), memory(&[0; 1 << 16]));
    let device = open(&store, 5, stamp(1 << 16, 1), &file).device;
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let device = &device;
            scope.spawn(move || {
                let mut state = seed + worker;
                for i in 0..2000u64 {
                    state =
                        state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let offset = (state >> 33) % 60_000;
                    let len = 1 + (state >> 20) as usize % 5000;
                    match i % 4 {
                        0 | 1 => device.write(offset, &vec![(state >> 50) as u8; len]).unwrap(),
                        2 => device.change_range(Range::ZeroKeep, offset, len as u64).unwrap(),
                        _ => drop(read(device, offset, len)),
                    }
                }
            });
        }
    });
    let cached = read(&device, 0, 1 << 17);
    assert_eq!(cached, file.image().to_vec(), "J7: no stale block, whatever the interleaving");
    let extent = Extent { offset: 0, len: 1 };
    assert!(extent.overlaps(&extent));
}
