//! What is there when: acknowledged, durable, home, clean (J2, J4, J5, J6, J7).

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::*;
use crate::device::fault::CrashStates;
use crate::device::{MemoryDevice, Range};

#[test]
fn j2_an_acked_write_survives_kill_9_without_a_sync() {
    let kit = Kit::small(&[&[1; 9000], &[2; 100]]);
    let setup = Setup::default();
    let mut random = Random::new(2);
    let mut models = [vec![1; 9000], vec![2; 100]];
    for step in 0..40 {
        let number = random.below(2) as usize;
        let (offset, len) = (random.below(12_000), 1 + random.below(3000) as usize);
        let new = bytes(&mut random, len);
        kit.write(number, offset, &new);
        put(&mut models[number], offset, &new);
        kit.work(&mut random, step % 4);
        let after = kit.killed(&setup);
        for (number, model) in models.iter().enumerate() {
            assert_eq!(after.read(number), *model, "step {step}, image {number}");
        }
    }
}

#[test]
fn j4_clean_means_durable_at_home_at_that_very_moment() {
    let kit = Kit::small(&[&[1; 20_000]]);
    let mut random = Random::new(4);
    let mut model = vec![1; 20_000];
    let mut clean = 0;
    for _ in 0..60 {
        let (offset, len) = (random.below(24_000), 1 + random.below(5000) as usize);
        let new = bytes(&mut random, len);
        kit.write(0, offset, &new);
        put(&mut model, offset, &new);
        for _ in 0..1 + random.below(30) {
            kit.store.run_by_hand(random.one_in(2), random.bits());
            if kit.device(0).is_dirty() {
                continue;
            }
            clean += 1;
            // A power cut now that loses all it may.
            let at = kit.log.position();
            let state = CrashStates::new(&kit.log, 1).only(at).next().unwrap();
            assert_eq!(state.images()[1].to_vec(), model);
            break;
        }
    }
    assert!(clean > 20, "only {clean} clean points");
}

#[test]
fn j5_a_replay_that_is_cut_again_and_again_shows_the_same() {
    let first = Kit::small(&[&[1; 20_000]]);
    let mut random = Random::new(5);
    let mut model = vec![1; 20_000];
    for _ in 0..12 {
        let (offset, len) = (random.below(24_000), 1 + random.below(5000) as usize);
        let new = bytes(&mut random, len);
        first.write(0, offset, &new);
        put(&mut model, offset, &new);
    }
    first.device(0).set_size(15_000).unwrap();
    first.device(0).change_range(Range::Punch, 3000, 4000).unwrap();
    model.truncate(15_000);
    model[3000..7000].fill(0);
    first.device(0).sync(true).unwrap();
    let mut log = first.log.clone();
    for round in 0..30 {
        let at = log.position();
        let states: Vec<_> = CrashStates::new(&log, round).only(at).collect();
        let state = &states[random.below(states.len() as u64) as usize];
        let (next, devices) = state.power_on();
        let files = vec![file(devices[1].clone())];
        let kit = Kit::open(next.clone(), devices[0].clone(), files, &Setup::default());
        assert_eq!(kit.read(0), model, "round {round}");
        kit.work(&mut random, round % 7);
        log = next;
        if round == 29 {
            kit.drain();
            assert_eq!(devices[1].image().to_vec(), model);
        }
    }
}

#[test]
fn j6_ten_thousand_interleavings_of_overwrites_and_home_writes() {
    for seed in 0..50 {
        let kit = Kit::small(&[&[0; 3 * BLOCK as usize]]);
        let mut random = Random::new(seed);
        let mut model = vec![0; 3 * BLOCK as usize];
        for _ in 0..200 {
            // Three blocks, so that nearly everything meets something in flight.
            let (offset, len) = (random.below(2 * BLOCK), 1 + random.below(BLOCK) as usize);
            let new = bytes(&mut random, len);
            kit.write(0, offset, &new);
            put(&mut model, offset, &new);
            let times = random.below(6);
            kit.work(&mut random, times);
            if random.one_in(4) {
                assert_eq!(kit.read(0), model, "seed {seed}");
            }
        }
        kit.drain();
        let home = kit.images[0].image().to_vec();
        assert!(home == model && kit.read(0) == model, "seed {seed}");
    }
}

/// A device that reads at once and answers late.
#[derive(Default)]
struct Late {
    inner: MemoryDevice,
    /// Readers held, and whether they are.
    held: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Late {
    fn hold(&self, on: bool) {
        self.held.lock().1 = on;
        self.changed.notify_all();
    }

    fn wait_for_reader(&self) {
        let mut held = self.held.lock();
        while held.0 == 0 {
            let late = self.changed.wait_for(&mut held, Duration::from_secs(20)).timed_out();
            assert!(!late, "no reader came");
        }
    }
}

impl BlockDevice for Late {
    fn prepare(&self, write: bool) -> Outcome<()> {
        self.inner.prepare(write)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Outcome<usize> {
        let got = self.inner.read_at(buf, offset);
        let mut held = self.held.lock();
        held.0 += 1;
        self.changed.notify_all();
        while held.1 {
            self.changed.wait(&mut held);
        }
        held.0 -= 1;
        got
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Outcome<()> {
        self.inner.write_at(data, offset)
    }

    fn size(&self) -> Outcome<u64> {
        self.inner.size()
    }

    fn set_size(&self, bytes: u64) -> Outcome<()> {
        self.inner.set_size(bytes)
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Outcome<()> {
        self.inner.change_range(what, offset, len)
    }

    fn sync(&self, data_only: bool) -> Outcome<()> {
        self.inner.sync(data_only)
    }

    fn seek(&self, offset: u64, hole: bool) -> Outcome<u64> {
        self.inner.seek(offset, hole)
    }
}

/// A reader's fetch begins before a write, or between it and its home write, and ends when the
/// block is clean again: its old bytes must not stay in the cache.
#[test]
fn j7_no_stale_fill_whenever_the_fetch_began() {
    for after_write in [false, true] {
        let late = Arc::new(Late::default());
        late.inner.replace(Image::from(&[1; 2 * BLOCK as usize][..]));
        let log = FaultLog::new();
        let journal = log.add("journal", Image::default());
        journal.set_size(SMALL.device_bytes()).unwrap();
        Journal::format_as(&*journal, SMALL, *b"named test store").unwrap();
        let files = vec![Some(File { device: late.clone(), ctime: 1, nlink: 1 })];
        let kit = Kit::open(log, journal, files, &Setup::default());
        let half = BLOCK as usize / 2;
        std::thread::scope(|scope| {
            if after_write {
                kit.write(0, 0, &[2; 2048]);
            }
            late.hold(true);
            let reader = scope.spawn(|| {
                let plan = kit.device(0).plan_read(0, BLOCK as usize);
                let mut out = vec![0xee; plan.len()];
                kit.device(0).read(&plan, &mut out).unwrap();
                out
            });
            late.wait_for_reader();
            if !after_write {
                kit.write(0, 0, &[2; 2048]);
            }
            kit.drain();
            late.hold(false);
            let seen = reader.join().unwrap();
            assert_eq!(seen[half..], [1; 2048], "what nobody wrote");
            assert!(!after_write || seen[..half] == [2; 2048], "the journal's bytes win");
        });
        let now = kit.read(0);
        assert_eq!((&now[..half], &now[half..]), (&[2; 2048][..], &[1; 6144][..]), "{after_write}");
    }
}
