//! The real store with its threads: what only they can show (W1, W4, W6, flush, the end).

use std::time::Duration;

use rustix::io::Errno;

use super::*;
use crate::clock;
use crate::device::fault::{Call, Fault};

/// Eight segments of 512 KiB.
const LARGE: Geometry = Geometry { segment_bytes: 512 << 10, count: 8 };

fn setup() -> Setup {
    Setup { by_hand: false, ..Setup::default() }
}

/// Waits for something that needs no help, up to so many ms.
fn within(ms: u64, what: impl Fn() -> bool) -> bool {
    let end = clock::now_ms() + ms;
    while clock::now_ms() < end {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    what()
}

#[test]
fn w1_one_idle_block_goes_home_by_itself_and_the_journal_is_empty_then() {
    let mark = Arc::new(Mark::default());
    let kit = Kit::new(LARGE, &[&[1; 9000]], &Setup { mark: Some(mark.clone()), ..setup() });
    kit.device(0).write(100, &[2; 50]).unwrap();
    assert_eq!(*mark.0.lock(), ["dirty"], "before the first append");
    assert!(within(5000, || !kit.store.is_dirty()), "{:?}", kit.store.snapshot(None).writeback);
    assert_eq!(kit.images[0].image().to_vec()[100..150], [2; 50]);
    kit.store.stop().unwrap();
    assert_eq!(*mark.0.lock(), ["dirty", "clean"]);
    let recovered = Recovered::open(kit.journal.clone(), Mutants::default()).unwrap();
    assert!(recovered.is_empty());
}

#[test]
fn a_stop_with_dirty_data_leaves_it_and_the_mark() {
    let mark = Arc::new(Mark::default());
    let kit = Kit::new(LARGE, &[&[1; 9000]], &Setup { mark: Some(mark.clone()), ..setup() });
    kit.images[0].inject(Fault::fail(Call::Sync, Errno::IO).always());
    kit.device(0).write(100, &[2; 50]).unwrap();
    kit.store.stop().unwrap();
    assert_eq!(*mark.0.lock(), ["dirty"]);
    assert!(kit.device(0).write(0, &[3; 10]).is_err(), "it does not hang");
    kit.images[0].heal();
    let after = kit.killed(&setup());
    assert_eq!(after.read(0)[100..150], [2; 50]);
    after.store.flush(None, &mut |_| true).unwrap();
    assert!(!after.store.is_dirty());
    after.store.stop().unwrap();
}

#[test]
fn a_flush_of_one_device_waits_for_that_one() {
    let kit = Kit::new(LARGE, &[&[1; 9000], &[2; 9000]], &setup());
    let gate = kit.images[1].hang(Call::Sync);
    for number in [0, 1] {
        kit.device(number).write(0, &[7; 5000]).unwrap();
    }
    let progress = kit.store.flush(Some(&identity(0)), &mut |_| true).unwrap();
    assert!(progress.stuck.is_empty() && !kit.device(0).is_dirty());
    assert!(kit.device(1).is_dirty());
    gate.release();
    kit.store.flush(None, &mut |_| true).unwrap();
    assert!(!kit.store.is_dirty());
    kit.store.stop().unwrap();
}

#[test]
fn w6_writers_of_a_small_journal_go_on_and_home_is_what_they_wrote() {
    let size = 1 << 20;
    let contents = vec![1; size];
    let kit = Kit::new(SMALL, &[&contents, &contents, &contents], &setup());
    std::thread::scope(|scope| {
        for number in 0..3 {
            let kit = &kit;
            scope.spawn(move || {
                let mut random = Random::new(number as u64);
                let mut model = vec![1; size];
                // Ten times the journal, together.
                for _ in 0..200 {
                    let offset = random.below(size as u64 - 8000);
                    let len = 1 + random.below(8000) as usize;
                    let new = bytes(&mut random, len);
                    kit.device(number).write(offset, &new).unwrap();
                    put(&mut model, offset, &new);
                    if random.one_in(10) {
                        kit.device(number).sync(true).unwrap();
                    }
                }
                assert!(read(kit.device(number)).unwrap() == model);
                kit.store.flush(Some(&identity(number)), &mut |_| true).unwrap();
                assert!(kit.images[number].image().to_vec() == model);
            });
        }
    });
    kit.store.stop().unwrap();
}

/// One device fails, another one hangs: two more write three times the journal and are done. When
/// the sick ones are well again, all of it goes home.
#[test]
fn w4_a_dead_and_a_hanging_device_never_stop_the_others() {
    let size = 256 << 10;
    let contents = vec![1; size];
    let kit = Kit::new(LARGE, &[&contents[..]; 4], &setup());
    kit.images[0].inject(Fault::fail(Call::Write, Errno::IO).always());
    let gate = kit.images[1].hang(Call::Write);
    let mut sick = vec![contents.clone(); 2];
    for (number, model) in sick.iter_mut().enumerate() {
        kit.device(number).write(5000, &[7; 9000]).unwrap();
        put(model, 5000, &[7; 9000]);
        kit.device(number).sync(true).unwrap();
    }
    std::thread::scope(|scope| {
        for number in [2, 3] {
            let kit = &kit;
            scope.spawn(move || {
                let mut random = Random::new(number as u64);
                let mut written = 0;
                while written < 3 * LARGE.device_bytes() / 2 {
                    let offset = random.below(size as u64 - 64_000);
                    let len = 1000 + random.below(60_000) as usize;
                    kit.device(number).write(offset, &bytes(&mut random, len)).unwrap();
                    written += len as u64;
                }
                kit.store.flush(Some(&identity(number)), &mut |_| true).unwrap();
            });
        }
    });
    for (number, model) in sick.iter().enumerate() {
        assert!(kit.device(number).is_dirty());
        assert!(read(kit.device(number)).unwrap() == *model, "its reads go on");
    }
    kit.images[0].heal();
    gate.release();
    // Within the longest backoff that so few failures make.
    assert!(within(60_000, || !kit.store.is_dirty()), "{:?}", kit.store.snapshot(None));
    for (number, model) in sick.iter().enumerate() {
        assert!(kit.images[number].image().to_vec() == *model);
    }
    kit.store.stop().unwrap();
}
