//! J3, J5, J8, J9, writes of several records, Revoke, generations.
#![cfg(test)]

use super::*;
use crate::error::Kind;

#[test]
fn j3_a_power_cut_leaves_a_prefix_with_every_barrier() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, b"one");
    journal.barrier().unwrap();
    data(&journal, 0, b"two");
    data(&journal, 0, b"three");
    data(&journal, 0, b"four");
    assert_eq!(payloads(&device.cut(|_| false)), [b"one"]);
    assert_eq!(payloads(&device.cut(|write| write != 0)), [b"one"]);
    assert_eq!(payloads(&device.cut(|write| write != 1)), [&b"one"[..], b"two"]);
    assert_eq!(payloads(&device.cut(|_| true)).len(), 4);
}

#[test]
fn j5_replay_is_idempotent_also_when_it_is_cut() {
    let device = formatted(SMALL);
    let journal = started(&device);
    for index in 0..60_u8 {
        data(&journal, u64::from(index), &[index; 900]);
    }
    append(&journal, &[entry(10, Change::Revoke(3)), entry(0, Change::Truncate)]);
    let before = all(&recover(&device));
    assert_eq!(all(&recover(&device)), before);
    // A start of three operations (sync, superblock, sync), cut after each; then once more.
    for budget in 0..4 {
        let killed = device.cut(|_| true);
        killed.fail_after(budget);
        assert_eq!(recover(&killed).start().is_ok(), budget >= 3, "{budget}");
        for again in [killed.cut(|_| false), killed.cut(|_| true)] {
            assert_eq!(all(&recover(&again)), before, "{budget}");
            started(&again);
            assert_eq!(all(&recover(&again)), before, "{budget}");
        }
    }
}

/// Generation 1 fills slot 0 and goes on in slot 1; a power cut takes the last record of slot 0
/// only. Generation 2 begins in slot 1, with two records where one of generation 1 was: behind them
/// stands an old record with just the expected sequence.
fn old_record_with_the_expected_sequence() -> Arc<Memory> {
    let device = formatted(SMALL);
    let journal = started(&device);
    while journal.usage().segments < 2 {
        data(&journal, 0, &[1; 500]);
    }
    data(&journal, 0, &[1; 500]);
    let slot_1 = SMALL.start(1);
    let unsynced = device.unsynced();
    let last = unsynced.iter().rposition(|at| *at < slot_1).unwrap();
    let device = device.cut(|write| write != last);
    let journal = started(&device);
    // Two records of 208 bytes take as much as one of 500 (none of them is split).
    data(&journal, 0, &[2; 208]);
    data(&journal, 0, &[2; 208]);
    journal.barrier().unwrap();
    device
}

fn replays_old_bytes(mutants: Mutants) -> bool {
    let device = old_record_with_the_expected_sequence();
    let recovered = Recovered::open(device, mutants).unwrap();
    assert_eq!(recovered.corruption(), None);
    let payloads: Vec<_> = all(&recovered).into_iter().map(|seen| seen.payload).collect();
    let new = payloads.iter().position(|payload| payload[..] == [2; 208]).unwrap();
    payloads[new..].contains(&vec![1; 500])
}

#[test]
fn j8_old_bytes_of_a_reused_segment_never_replay() {
    assert!(!replays_old_bytes(Mutants::default()));
}

#[test]
fn j8_the_mutant_is_caught() {
    assert!(replays_old_bytes(Mutants { ignore_generation: true, ..Mutants::default() }));
}

#[test]
fn j8_records_of_a_journal_made_before_never_replay() {
    let device = formatted(SMALL);
    data(&started(&device), 0, b"old");
    Journal::format_as(&*device, SMALL, [8; 16]).unwrap();
    started(&device);
    assert_eq!(payloads(&device), Vec::<Vec<u8>>::new());
}

#[test]
fn j9_a_bad_record_is_corruption_only_if_it_was_durable() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, b"one");
    let two = data(&journal, 0, b"two").records[0];
    let three = data(&journal, 0, b"three").records[0];
    // Not durable, valid records behind it: a normal power cut.
    let cut = device.cut(|_| true);
    cut.flip(two.at);
    assert_eq!(recover(&cut).corruption(), None);
    assert_eq!(payloads(&cut), [b"one"]);
    // Durable, and only a later record says so.
    journal.barrier().unwrap();
    data(&journal, 0, b"four");
    let cut = device.cut(|_| true);
    cut.flip(two.at);
    let known = Corruption { seq: two.seq, at: two.at - 88, durable_seq: three.seq };
    assert_eq!(recover(&cut).corruption(), Some(known));
    assert_eq!(payloads(&cut), [b"one"], "what precedes it is shown");
    assert_eq!(recover(&cut).start().unwrap_err().kind, Kind::Corrupt);
    // The user accepts the loss: the new generation goes on, and the old records are history.
    let journal = recover(&cut).start_past_corruption().unwrap();
    journal.set_device(DEVICE, &identity("a.img"), 0).unwrap();
    data(&journal, 0, b"five");
    assert_eq!(recover(&cut).corruption(), None);
    assert_eq!(payloads(&cut), [&b"one"[..], b"five"]);
}

#[test]
fn j9_the_superblock_and_a_later_segment_are_witnesses_too() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let first = data(&journal, 0, b"one").records[0];
    journal.barrier().unwrap();
    // A witness in the next segment, with everything between lost.
    while journal.usage().segments < 2 {
        data(&journal, 0, &[1; 1000]);
    }
    let unsynced = device.unsynced().len();
    let cut = device.cut(|write| write == unsynced - 1);
    assert_eq!(recover(&cut).corruption(), None, "the log ends before what was not durable");
    cut.flip(first.at);
    assert_eq!(recover(&cut).corruption().unwrap().seq, first.seq);
    // The superblock: start() says that all it read is durable.
    let cut = device.cut(|_| false);
    started(&cut);
    cut.flip(first.at);
    assert_eq!(recover(&cut).corruption().unwrap().seq, first.seq);
}

#[test]
fn a_write_of_several_records_replays_all_or_none() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let large = vec![3; 40 << 10];
    let write = data(&journal, 0, &large);
    assert!(write.records.len() >= 5, "{}", write.records.len());
    let writes = device.unsynced().len();
    assert!(writes > 1, "it spans segments");
    let whole: usize = payloads(&device.cut(|_| true)).iter().map(Vec::len).sum();
    assert_eq!(whole, large.len());
    let cut = device.cut(|write| write != writes - 1);
    assert_eq!(payloads(&cut), Vec::<Vec<u8>>::new());
    assert!(recover(&cut).dropped() > 0);
    // What is dropped stays dropped, and the next generation goes on behind it.
    data(&started(&cut), 0, b"next");
    assert_eq!(payloads(&cut), [b"next"]);
    data(&started(&cut), 0, b"third");
    assert_eq!(payloads(&cut), [&b"next"[..], b"third"]);
}

#[test]
fn a_write_whose_head_is_behind_the_tail_counts() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, &[3; 40 << 10]);
    let tail = journal.tail().unwrap();
    assert_eq!(journal.free_tail(tail.last_seq).unwrap(), Freed::Yes);
    data(&journal, 0, b"next");
    let payloads = payloads(&device.cut(|_| true));
    assert_eq!(payloads.last().unwrap(), b"next");
    assert!(payloads.len() >= 2, "the rest of the large write: {}", payloads.len());
}

#[test]
fn a_revoke_cancels_older_records_of_its_range() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, &[1; 100]);
    append(&journal, &[entry(50, Change::Zero(100))]);
    let truncate = Entry { size_after: 40, ..entry(0, Change::Truncate) };
    append(&journal, &[truncate]);
    append(&journal, &[entry(20, Change::Revoke(60))]);
    data(&journal, 30, &[2; 10]);
    let other = DeviceId(8);
    journal.set_device(other, &identity("b.img"), 0).unwrap();
    append(&journal, &[Entry { device: other, ..entry(0, Change::Revoke(1000)) }]);
    let live = |kind| {
        let seen = all(&recover(&device)).into_iter();
        seen.filter(|seen| seen.kind == kind).map(|seen| seen.live).collect::<Vec<_>>()
    };
    let extent = |offset, end: u64| Extent { offset, len: end - offset };
    assert_eq!(
        live(RecordKind::Data),
        [vec![extent(0, 20), extent(80, 100)], vec![extent(30, 40)]]
    );
    assert_eq!(live(RecordKind::Zero), [vec![extent(80, 150)]]);
    assert_eq!(live(RecordKind::Truncate), [vec![extent(80, u64::MAX)]]);
    // One that is not wholly in the log cancels nothing.
    append(&journal, &[entry(0, Change::Revoke(1000)), entry(0, Change::Data(&[9; 40 << 10]))]);
    let last = device.unsynced().len() - 1;
    let cut = device.cut(|write| write != last);
    let first = all(&recover(&cut)).into_iter().find(|seen| seen.kind == RecordKind::Data);
    assert_eq!(first.unwrap().live, [extent(0, 20), extent(80, 100)]);
}

#[test]
fn a_device_record_precedes_the_first_record_of_its_device_in_each_segment() {
    let device = formatted(SMALL);
    let journal = started(&device);
    for index in 0..70 {
        data(&journal, index, &[1; 1000]);
    }
    journal.set_device(DEVICE, &identity("renamed.img"), 0).unwrap();
    data(&journal, 0, b"after the rename");
    append(&journal, &[entry(0, Change::Opaque(16, b"meta")), entry(0, Change::Checkpoint(b""))]);
    let mut known = std::collections::HashMap::new();
    let mut names = Vec::new();
    let mut visitor = |record: &Record<'_>| {
        let slot = SMALL.slot_of(record.placed.at);
        if let Some(identity) = record.identity() {
            known.insert(slot, identity.path.clone());
            names.push(String::from_utf8(identity.path).unwrap());
        }
        assert!(known.contains_key(&slot), "seq {} in slot {slot}", record.header.seq);
        Ok(())
    };
    recover(&device).visit(&mut visitor).unwrap();
    assert_eq!(known.len(), 3);
    assert_eq!(names.last().unwrap(), "renamed.img");
}

#[test]
fn every_mount_begins_a_segment_under_a_durable_generation() {
    let mut device = formatted(SMALL);
    for generation in 1..=3 {
        let journal = started(&device);
        let superblock = *recover(&device.cut(|_| false)).superblock();
        assert_eq!(superblock.generation, generation, "durable before the first append");
        data(&journal, 0, &[generation as u8; 100]);
        assert_eq!(u64::from(journal.usage().segments), generation);
        device = device.cut(|_| true);
    }
    // A full ring: it starts, and gets room when the tail is freed.
    let journal = started(&device);
    data(&journal, 0, b"four");
    let journal = started(&device);
    assert!(journal.try_reserve(Purpose::Internal, 1).is_none());
    let tail = journal.tail().unwrap();
    assert_eq!(journal.free_tail(tail.last_seq).unwrap(), Freed::Yes);
    data(&journal, 0, b"five");
    assert_eq!(payloads(&device).last().unwrap(), b"five");
}

#[test]
fn features_this_program_does_not_know_are_respected() {
    let device = formatted(SMALL);
    let known = *recover(&device).superblock();
    let ro_compat = Superblock { serial: known.serial + 1, ro_compat: 4, ..known };
    write_superblock(&*device, &ro_compat).unwrap();
    assert_eq!(recover(&device).start().unwrap_err().kind, Kind::ReadOnly);
    let incompat = Superblock { serial: known.serial + 2, incompat: 4, ..known };
    write_superblock(&*device, &incompat).unwrap();
    let refused = Recovered::open(device, Mutants::default()).unwrap_err();
    assert_eq!(refused.kind, Kind::NotSupported);
}

#[test]
fn a_journal_on_any_size_from_8m_and_no_other_bytes() {
    for (mib, segment_kib, count) in [(8, 512, 15), (256, 16 << 10, 15), (4096, 64 << 10, 63)] {
        let geometry = Geometry::for_size(mib << 20).unwrap();
        assert_eq!((geometry.segment_bytes, geometry.count), (segment_kib << 10, count));
    }
    assert!(Geometry::for_size((8 << 20) - 1).is_err());
    let device = Memory::new(0);
    Journal::format(&*device, 8 << 20, [1; 16]).unwrap();
    data(&started(&device), 0, &[5; 300 << 10]);
    assert_eq!(payloads(&device).iter().map(Vec::len).sum::<usize>(), 300 << 10);
    let zeros = Memory::new(1 << 20);
    assert_eq!(Recovered::open(zeros, Mutants::default()).unwrap_err().kind, Kind::Corrupt);
}
