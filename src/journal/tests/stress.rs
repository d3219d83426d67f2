//! Many threads at once, harmed bytes, and Revokes against a plain model.
#![cfg(test)]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

use super::super::revoked::Revoked;
use super::device::Random;
use super::*;

const WRITERS: u64 = 4;
const WRITES: u64 = 150;

fn writer(journal: &Journal, number: u64) {
    for index in 0..WRITES {
        let bytes = vec![number as u8; 100 + (index * 37 % 3000) as usize];
        let charge = journal.charge(&[Change::Data(&bytes)]);
        let mut room = journal.reserve(Purpose::Frontend, charge).unwrap();
        let offset = number << 32 | index << 16;
        let done = journal.append(&mut room, &[entry(offset, Change::Data(&bytes))]).unwrap();
        if index % 8 == number {
            journal.barrier().unwrap();
            assert!(journal.durable_seq() >= done.seq);
        }
    }
}

#[test]
fn threads_append_barrier_and_free_at_once() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let freer = scope.spawn(|| {
            let mut freed = 0;
            while !stop.load(SeqCst) {
                let full = journal.usage().segments == SMALL.count;
                let tail = journal.tail().filter(|_| full || journal.waiting() > 0);
                let done = tail.map(|tail| journal.free_tail(tail.last_seq).unwrap());
                freed += u64::from(done == Some(Freed::Yes));
                thread::yield_now();
            }
            freed
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                scope.spawn({
                    let j = &journal;
                    move || writer(j, number)
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        stop.store(true, SeqCst);
        assert!(freer.join().unwrap() > 10, "the ring wrapped");
    });
    assert!(journal.failure().is_none());
    // Each writer's records are its last ones, in its order, up to its very last.
    let recovered = recover(&device);
    assert_eq!(recovered.corruption(), None);
    let mut last = [None; WRITERS as usize];
    for seen in all(&recovered).iter().filter(|seen| seen.kind == RecordKind::Data) {
        let (number, index) = ((seen.offset >> 32) as usize, seen.offset >> 16 & 0xFFFF);
        assert!(last[number].is_none_or(|last| index == last || index == last + 1));
        assert!(seen.payload.iter().all(|byte| usize::from(*byte) == number));
        last[number] = Some(index);
    }
    assert!(last.iter().flatten().all(|last| *last == WRITES - 1), "{last:?}");
}

#[test]
fn a_harmed_byte_of_a_durable_log_never_yields_other_records() {
    let device = formatted(SMALL);
    let journal = started(&device);
    for index in 0..4 {
        data(&journal, index, &[index as u8; 90]);
    }
    journal.barrier().unwrap();
    append(&journal, &[entry(0, Change::Checkpoint(b"a witness"))]);
    let whole = all(&recover(&device));
    let last_durable = whole.iter().rposition(|seen| seen.kind == RecordKind::Data).unwrap();
    let used = journal.usage().used_bytes;
    for at in SMALL.start(0)..SMALL.start(0) + used {
        let harmed = device.cut(|_| true);
        harmed.flip(at);
        let recovered = recover(&harmed);
        let seen = all(&recovered);
        assert_eq!(seen[..], whole[..seen.len()], "byte {at}");
        // Short of the durable ones only with a word about it; padding may change.
        assert!(seen.len() > last_durable || recovered.corruption().is_some(), "byte {at}");
    }
}

#[test]
fn either_superblock_may_be_lost() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, b"one");
    let latest = *recover(&device).superblock();
    device.flip(latest.position() + 50);
    let older = *recover(&device).superblock();
    assert_eq!(older.serial, latest.serial - 1);
    // The older one does not know the generation of the records: said, not taken for an end.
    assert!(recover(&device).corruption().is_some());
    let journal = recover(&device).start_past_corruption().unwrap();
    assert!(journal.generation() > latest.generation, "never the same twice");
}

#[test]
fn revokes_are_what_a_plain_list_says() {
    let mut random = Random::new(5);
    for _ in 0..300 {
        let mut revoked = Revoked::default();
        let mut plain = [0_u64; 64];
        for seq in (2..40).step_by(2) {
            let offset = random.below(60);
            let len = random.below(64 - offset);
            revoked.insert(DEVICE, Extent { offset, len }, seq);
            plain[offset as usize..(offset + len) as usize].fill(seq);
            let (offset, seq) = (random.below(60), random.below(40) | 1);
            let extent = Extent { offset, len: random.below(64 - offset) };
            let mut live = [false; 64];
            for part in revoked.live(DEVICE, extent, seq) {
                assert!(part.len > 0);
                live[part.offset as usize..part.end() as usize].fill(true);
            }
            for at in 0..64 {
                let inside = (extent.offset..extent.end()).contains(&(at as u64));
                assert_eq!(live[at], inside && plain[at] < seq, "{at} {extent:?} {seq}");
            }
        }
    }
}
