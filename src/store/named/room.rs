//! Who waits, who is refused, and who is not: room in the journal and at the source.

use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;

use super::home::told;
use super::*;
use crate::device::fault::{Call, Fault};
use crate::error::Kind;
use crate::journal::Purpose;
use crate::store::writeback::view::Admission;

/// The source has 64 MiB to keep and nothing beyond.
const NOTHING: u64 = 64 << 20;

#[test]
fn no_space_shows_at_a_write_into_a_hole_and_never_at_an_overwrite() {
    // Data, a hole (the blocks of memory are 16 KiB), data.
    let (kit, told) = told(&[1; 16 << 10], NOTHING + (8 << 10));
    told.inner.set_size(32 << 10).unwrap();
    told.inner.write_at(&[1; 16 << 10], 32 << 10).unwrap();
    kit.device(0).observe(48 << 10, kit.device(0).size_version());
    assert_eq!(kit.device(0).size(), 48 << 10);
    let write = |offset: u64, len: usize| kit.device(0).write(offset, &vec![5; len]);
    let refused = |result: Outcome<()>| {
        assert_eq!(result.unwrap_err().errno(), Errno::NOSPC.raw_os_error());
    };
    // There is room for 8 KiB: these are promised the first 4.
    write(16 << 10, 4 << 10).unwrap();
    refused(write(20 << 10, 8 << 10));
    refused(write(48 << 10, 8 << 10));
    // An overwrite of data, of what is promised, and of both side by side.
    write(0, 12 << 10).unwrap();
    write(16 << 10, 4 << 10).unwrap();
    write(12 << 10, 8 << 10).unwrap();
    write(40 << 10, 8 << 10).unwrap();
    refused(write(46 << 10, 4 << 10));
    told.free.store(u64::MAX, SeqCst);
    kit.drain();
    assert_eq!(read(kit.device(0)).unwrap().len(), 48 << 10);
}

/// W6 without threads: every write goes on, however small the journal, as long as anything can go
/// home.
#[test]
fn w6_a_writer_of_a_full_journal_goes_on() {
    let kit = Kit::small(&[&[1; 60_000]]);
    let mut random = Random::new(6);
    let mut model = vec![1; 60_000];
    for _ in 0..300 {
        let (offset, len) = (random.below(60_000), 1 + random.below(9000) as usize);
        let new = bytes(&mut random, len);
        // It waits inside.
        kit.device(0).write(offset, &new).unwrap();
        put(&mut model, offset, &new);
    }
    assert_eq!(kit.read(0), model);
    kit.drain();
    assert_eq!(kit.images[0].image().to_vec(), model);
}

#[test]
fn a_refused_device_gets_eio_and_is_admitted_again_when_it_is_clean() {
    let kit = Kit::small(&[&[1; 9000], &[2; 9000]]);
    kit.write(0, 0, &[3; 100]);
    kit.device(0).admission.store(Admission::Refused as u8, SeqCst);
    let error = kit.device(0).write(0, &[4; 100]).unwrap_err();
    assert_eq!(error.kind, Kind::Io);
    kit.write(1, 0, &[4; 100]);
    kit.drain();
    kit.device(0).write(0, &[4; 100]).unwrap();
}

#[test]
fn a_device_whose_turn_comes_later_waits_until_the_controller_says_yes() {
    let kit = Kit::small(&[&[1; 9000]]);
    kit.write(0, 0, &[3; 100]);
    kit.device(0).admission.store(Admission::Later as u8, SeqCst);
    // Steps are made inside, and the device is well.
    kit.device(0).write(0, &[4; 100]).unwrap();
    assert_eq!(kit.device(0).admission.load(SeqCst), Admission::Yes as u8);
}

/// Between an append and its place in the map nobody may free the segment: the device is listed
/// before.
#[test]
fn the_tail_is_not_freed_under_an_append() {
    let kit = Kit::small(&[&[1; 9000]]);
    let writeback = kit.store.shared.writeback().unwrap();
    let gate = kit.journal.hang(Call::Write);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| kit.device(0).write(0, &[7; 100]));
        assert!(gate.wait_for(1, std::time::Duration::from_secs(20)));
        assert_eq!(writeback.listed().len(), 1, "it is asked before the tail goes");
        gate.release();
        writer.join().unwrap().unwrap();
    });
    assert_eq!(kit.killed(&Setup::default()).read(0)[..100], [7; 100]);
}

/// A write that fails in the journal leaves no trace in the lists.
#[test]
fn a_failed_append_leaves_no_dirty_device() {
    let kit = Kit::small(&[&[1; 9000]]);
    kit.journal.inject(Fault::fail(Call::Write, Errno::IO).always());
    assert!(kit.device(0).write(0, &[7; 100]).is_err());
    assert!(!kit.store.is_dirty() && !kit.device(0).is_dirty());
    assert_eq!(kit.read(0), [1; 9000]);
    let journal = &kit.store.shared.writeback().unwrap().journal;
    assert!(journal.try_reserve(Purpose::Internal, 1).is_none(), "it has failed");
}
