//! Reservations (W6), pins, and what freeing refuses.
#![cfg(test)]

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use super::*;
use crate::error::Kind;

fn fill(journal: &Journal) {
    let bytes = [1; 2000];
    let charge = journal.charge(&[Change::Data(&bytes)]);
    while let Some(mut room) = journal.try_reserve(Purpose::Frontend, charge) {
        journal.append(&mut room, &[entry(0, Change::Data(&bytes))]).unwrap();
    }
}

fn free(journal: &Journal) {
    let tail = journal.tail().unwrap();
    assert_eq!(journal.free_tail(tail.last_seq).unwrap(), Freed::Yes);
}

fn wait_for(journal: &Journal, waiting: usize) {
    while journal.waiting() != waiting {
        thread::yield_now();
    }
}

#[test]
fn w6_a_blocked_writer_goes_on_when_the_tail_is_freed() {
    let device = formatted(SMALL);
    let journal = started(&device);
    fill(&journal);
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let bytes = [2; 5000];
                let charge = journal.charge(&[Change::Data(&bytes)]);
                let mut room = journal.reserve(Purpose::Frontend, charge).unwrap();
                journal.append(&mut room, &[entry(0, Change::Data(&bytes))]).unwrap();
                done.fetch_add(1, SeqCst);
            });
        }
        wait_for(&journal, 4);
        assert_eq!(done.load(SeqCst), 0);
        // The last tenth still takes what empties the journal.
        let mut room = journal.try_reserve(Purpose::Internal, 10_000).unwrap();
        journal.append(&mut room, &[entry(0, Change::Checkpoint(b"time"))]).unwrap();
        drop(room);
        while done.load(SeqCst) < 4 {
            if journal.waiting() > 0 {
                free(&journal);
            }
            thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    assert!(journal.failure().is_none());
}

#[test]
fn w6_room_given_back_wakes_and_a_large_request_is_not_starved() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let large = 60_000;
    let first = journal.try_reserve(Purpose::Frontend, large).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| journal.reserve(Purpose::Frontend, large).map(drop));
        wait_for(&journal, 1);
        assert!(journal.try_reserve(Purpose::Frontend, 1).is_none(), "not past who waits");
        drop(first);
        waiter.join().unwrap().unwrap();
    });
    let refused = journal.reserve(Purpose::Frontend, 1 << 20).unwrap_err();
    assert_eq!(refused.kind, Kind::Invalid, "it could never be");
}

#[test]
fn what_was_reserved_always_fits_however_segments_end() {
    for size in [1, 500, 513, 7000, 8192, 8193, 20_000] {
        let device = formatted(SMALL);
        let journal = started(&device);
        let bytes = vec![1; size];
        let charge = journal.charge(&[Change::Data(&bytes), Change::Attr(&[2; 4000])]);
        for round in 0..120 {
            // The last tenth too: nothing is left when this is refused.
            let Some(mut room) = journal.try_reserve(Purpose::Internal, charge) else {
                free(&journal);
                continue;
            };
            let write = [entry(round, Change::Data(&bytes)), entry(0, Change::Attr(&[2; 4000]))];
            journal.append(&mut room, &write).unwrap();
        }
        assert!(recover(&device).corruption().is_none());
    }
}

#[test]
fn an_append_of_more_than_was_reserved_is_refused_and_harms_nothing() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let mut room = journal.try_reserve(Purpose::Frontend, 100).unwrap();
    let mut refuse = |entry: Entry<'_>| {
        let error = journal.append(&mut room, &[entry]).unwrap_err();
        assert_eq!(error.kind, Kind::Invalid, "{error}");
    };
    refuse(entry(0, Change::Data(b"one")));
    refuse(Entry { device: DeviceId(99), ..entry(0, Change::Data(b"")) });
    refuse(entry(0, Change::Opaque(15, b"")));
    refuse(entry(0, Change::Attr(&[0; 9000])));
    refuse(entry(u64::MAX, Change::Zero(2)));
    assert!(journal.failure().is_none());
    data(&journal, 0, b"two");
    assert_eq!(payloads(&device), [b"two"]);
}

#[test]
fn zeros_go_over_free_slots_once_and_never_over_promised_ones() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, b"one");
    // Slot 0 is the head, 1 the next one: 3 and 2 can be spared, unless they are promised.
    let room = journal.try_reserve(Purpose::Internal, 3 * SMALL.effective()).unwrap();
    assert_eq!(journal.zero_one().unwrap(), Zeroed::Busy);
    drop(room);
    assert_eq!(journal.zero_one().unwrap(), Zeroed::One);
    assert_eq!(journal.zero_one().unwrap(), Zeroed::One);
    assert_eq!(journal.zero_one().unwrap(), Zeroed::Busy, "the next one");
    while journal.usage().segments < 2 {
        data(&journal, 0, &[1; 2000]);
    }
    assert_eq!(journal.zero_one().unwrap(), Zeroed::All);
    free(&journal);
    // Remembered by the superblock, and nothing was harmed.
    let journal = started(&device.cut(|_| true));
    assert_eq!(journal.zero_one().unwrap(), Zeroed::All);
    assert_eq!(recover(&device).corruption(), None);
}

#[test]
fn appends_go_on_while_a_slot_is_zeroed() {
    let device = formatted(SMALL);
    let journal = Arc::new(started(&device));
    let writer = journal.clone();
    // Inside the sync of zeroing slot 3, the journal fills up to it and waits there.
    device.on_sync(move || {
        if writer.usage().used_bytes == 0 {
            fill(&writer);
        }
        Ok(())
    });
    assert_eq!(journal.zero_one().unwrap(), Zeroed::One);
    assert_eq!(journal.usage().segments, 3, "all but the lent one");
    device.on_sync(|| Ok(()));
    fill(&journal);
    assert_eq!(journal.usage().segments, 4);
    assert_eq!(recover(&device).last_seq(), journal.appended_seq());
}

#[test]
fn only_the_tail_is_freed_and_nothing_that_is_read() {
    let device = formatted(SMALL);
    let journal = started(&device);
    assert_eq!(journal.tail(), None);
    assert_eq!(journal.free_tail(0).unwrap(), Freed::Moved);
    let first = data(&journal, 0, b"one").records[0];
    while journal.usage().segments < 3 {
        data(&journal, 0, &[1; 2000]);
    }
    let tail = journal.tail().unwrap();
    assert_eq!(journal.free_tail(tail.last_seq + 1).unwrap(), Freed::Moved);
    let pin = journal.pin(&first);
    let second = journal.pin(&first);
    drop(pin);
    assert_eq!(journal.free_tail(tail.last_seq).unwrap(), Freed::Pinned);
    drop(second);
    assert_eq!(journal.free_tail(tail.last_seq).unwrap(), Freed::Yes);
    assert_eq!(journal.usage().segments, 2);
    // To the very end: the head is closed, an empty journal recovers as one.
    free(&journal);
    let room = journal.try_reserve(Purpose::Internal, 4 * SMALL.effective() - 10_000);
    assert!(journal.tail().unwrap().is_head);
    let last = journal.tail().unwrap().last_seq;
    if room.is_some() {
        assert_eq!(journal.free_tail(last).unwrap(), Freed::Busy, "the head is promised");
    }
    drop(room);
    free(&journal);
    assert_eq!(journal.usage().used_bytes, 0);
    assert!(recover(&device.cut(|_| false)).is_empty());
    data(&journal, 0, b"again");
    assert_eq!(payloads(&device), [b"again"]);
}
