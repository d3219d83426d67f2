//! Group commit and J11.
#![cfg(test)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread;

use super::*;
use crate::error::Kind;

fn wait_until(condition: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if condition() {
            return;
        }
        thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("it did not happen in 20 s");
}

#[test]
fn one_sync_serves_all_who_waited_for_it() {
    let device = formatted(SMALL);
    let journal = Arc::new(started(&device));
    data(&journal, 0, b"one");
    journal.barrier().unwrap();
    let before = device.syncs();
    journal.barrier().unwrap();
    assert_eq!(device.syncs(), before, "nothing new, no sync");
    let open = Arc::new(AtomicBool::new(false));
    let hold = open.clone();
    device.on_sync(move || {
        wait_until(|| hold.load(SeqCst));
        Ok(())
    });
    let covered = data(&journal, 0, b"two").seq;
    thread::scope(|scope| {
        scope.spawn(|| journal.barrier().unwrap());
        wait_until(|| device.syncs() == before + 1);
        // Not covered by the sync that runs: eight of them share the next one.
        data(&journal, 0, b"three");
        for _ in 0..8 {
            scope.spawn(|| journal.barrier().unwrap());
        }
        wait_until(|| journal.barrier_counts().1 == 1 + 1 + 8);
        assert!(journal.durable_seq() < covered);
        open.store(true, SeqCst);
    });
    assert_eq!(device.syncs(), before + 2);
    assert_eq!(journal.durable_seq(), journal.appended_seq());
}

#[test]
fn j11_a_failed_sync_is_never_followed_by_a_success() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let kept = data(&journal, 0, b"durable").records[0];
    journal.barrier().unwrap();
    let lost = data(&journal, 0, b"not durable").records[0];
    let intact = data(&journal, 0, b"not durable but intact").records[0];
    let mut early = journal.try_reserve(Purpose::Frontend, 20_000).unwrap();
    let durable = journal.durable_seq();
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    device.on_sync(move || match count.fetch_add(1, SeqCst) {
        // The kernel reports the error once and then says all is well.
        0 => Err(Error::new(Kind::Io, "fdatasync", "test")),
        _ => Ok(()),
    });
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..4).map(|_| scope.spawn(|| journal.barrier())).collect();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().unwrap_err().errno(), libc::EIO);
        }
    });
    assert_eq!(calls.load(SeqCst), 1, "never retried");
    assert_eq!(journal.barrier().unwrap_err().errno(), libc::EIO);
    assert_eq!(journal.durable_seq(), durable);
    assert!(journal.failure().unwrap().contains("fdatasync"));
    let refused = journal.append(&mut early, &[entry(0, Change::Data(b"x"))]);
    assert_eq!(refused.unwrap_err().errno(), libc::EIO);
    assert_eq!(journal.reserve(Purpose::Frontend, 1).unwrap_err().errno(), libc::EIO);
    assert_eq!(journal.free_tail(journal.tail().unwrap().last_seq).unwrap_err().errno(), libc::EIO);
    // Reads: durable bytes as ever; others only if they are still what was written.
    device.flip(lost.at);
    let mut byte = [0; 3];
    journal.read_payload(&kept, 1, &mut byte).unwrap();
    assert_eq!(&byte, b"ura");
    journal.read_payload(&intact, 4, &mut byte).unwrap();
    assert_eq!(&byte, b"dur");
    assert_eq!(journal.read_payload(&lost, 4, &mut byte).unwrap_err().errno(), libc::EIO);
    assert!(journal.read_payload(&kept, 5, &mut byte).is_err(), "past its end");
}

#[test]
fn j11_a_panic_in_a_barrier_fails_the_journal_and_frees_the_waiters() {
    let device = formatted(SMALL);
    let journal = started(&device);
    data(&journal, 0, b"one");
    let ran = Arc::new(AtomicBool::new(false));
    let flag = ran.clone();
    device.on_sync(move || {
        flag.store(true, SeqCst);
        thread::sleep(std::time::Duration::from_millis(50));
        panic!("a test's own panic");
    });
    thread::scope(|scope| {
        let leader = scope.spawn(|| journal.barrier());
        wait_until(|| ran.load(SeqCst));
        let waiter = scope.spawn(|| journal.barrier());
        assert!(leader.join().is_err());
        assert_eq!(waiter.join().unwrap().unwrap_err().errno(), libc::EIO);
    });
    assert!(journal.failure().is_some());
}

#[test]
fn a_failed_append_fails_the_journal_and_is_not_acknowledged() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let mut room = journal.try_reserve(Purpose::Frontend, 40_000).unwrap();
    device.fail_after(1);
    let one = journal.append(&mut room, &[entry(0, Change::Data(b"one"))]).unwrap();
    assert!(journal.append(&mut room, &[entry(0, Change::Data(b"two"))]).is_err());
    assert_eq!(journal.appended_seq(), one.seq);
    assert!(journal.append(&mut room, &[entry(0, Change::Data(b"three"))]).is_err());
    assert_eq!(payloads(&device.cut(|write| write == 0)), [b"one"]);
}

#[test]
fn a_panic_under_the_append_lock_fails_the_journal_and_wakes_writers() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let mut room = journal.try_reserve(Purpose::Frontend, 60_000).unwrap();
    device.panic_at_write();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| journal.reserve(Purpose::Frontend, 60_000).map(drop));
        wait_until(|| journal.waiting() == 1);
        let writer = scope.spawn(|| {
            let done = journal.append(&mut room, &[entry(0, Change::Data(b"x"))]);
            (done, room)
        });
        assert!(writer.join().is_err());
        assert_eq!(waiter.join().unwrap().unwrap_err().errno(), libc::EIO);
    });
    assert!(journal.barrier_to(1000).is_err());
}

#[test]
fn a_journal_opened_for_reading_only_reads_and_never_writes() {
    let device = formatted(SMALL);
    let journal = started(&device);
    let placed = data(&journal, 0, b"bytes").records[0];
    let journal = recover(&device).read_only();
    let mut bytes = [0; 5];
    journal.read_payload(&placed, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"bytes");
    assert!(journal.reserve(Purpose::Internal, 1).is_err());
}
