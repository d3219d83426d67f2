//! Power cuts: data file and map are devices of one fault log, and every crash state is opened.
//!
//! What must hold in each: the size is one that the file had at or after its last sync before the
//! cut, and every byte has a value that it had there since then. Of a truncation that is lost only
//! the rest of its last block may be zeros, as on any filesystem. Growing the file shows zeros.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

use super::kit_tests::*;
use super::*;
use crate::device::MemoryDevice;
use crate::device::fault::{Call, CrashState, CrashStates, Fault, FaultDevice, FaultLog, Random};
use crate::device::memory::Image;

const BLOCK: u64 = 4096;
const LIMIT: u64 = 6 * BLOCK;

/// What a file has been, and from where in the log on.
struct Moment {
    started: usize,
    bytes: Vec<u8>,
}

struct Run {
    log: FaultLog,
    lower: Arc<MemoryDevice>,
    data: Arc<FaultDevice>,
    slots: Arc<FaultDevice>,
    moments: Vec<Moment>,
    /// Where in the log it was durable, and which moment.
    durable: Vec<(usize, usize)>,
}

impl Run {
    fn now(&self) -> Vec<u8> {
        self.moments.last().unwrap().bytes.clone()
    }

    fn step(&mut self, device: &OverlayDevice, step: &Step) {
        let (before, mut after) = (self.now(), self.now());
        step.model(&mut after);
        self.moments.push(Moment { started: self.log.position(), bytes: after.clone() });
        if step.apply(device).is_ok() {
            return;
        }
        // Some of it may be there; what is, is what the file has from now on.
        let left = content(device);
        for (at, byte) in left.iter().enumerate() {
            let of = |bytes: &[u8]| bytes.get(at).copied().unwrap_or(0);
            assert!([of(&before), of(&after)].contains(byte), "{step:?} left garbage at {at}");
        }
        self.moments.push(Moment { started: self.log.position(), bytes: left });
    }

    fn revert(&mut self, device: &OverlayDevice) {
        let (before, bytes) = (self.now(), self.lower.image().to_vec());
        self.moments.push(Moment { started: self.log.position(), bytes });
        if device.revert().is_ok() {
            self.durable.push((self.log.position(), self.moments.len() - 1));
        } else if content(device) == before {
            self.moments.push(Moment { started: self.log.position(), bytes: before });
        }
        assert_eq!(content(device), self.now(), "half reverted");
    }

    /// Syncs or settles; what that promises is in `durable`.
    fn commit(&mut self, device: &OverlayDevice, settle: bool) {
        // In place a settle has nothing to do: the bytes survive the process, not a power cut.
        let whole = !settle || device.map.lock().is_pending();
        let result = if settle { device.settle() } else { device.sync(true) };
        assert_eq!(content(device), self.now(), "changed by a sync");
        if result.is_ok() && whole {
            self.durable.push((self.log.position(), self.moments.len() - 1));
        }
    }

    /// What is wrong with the file after this crash.
    fn verdict(&self, state: &CrashState) -> std::result::Result<(), String> {
        let (_, devices) = state.power_on();
        let device = overlay(&self.lower, devices[0].clone(), devices[1].clone(), BLOCK as u32);
        let found = content(&device);
        let durable = self.durable.iter().rev().find(|(at, _)| *at <= state.cut);
        let first = durable.map_or(0, |(_, moment)| *moment);
        let may_be = &self.moments[first..];
        let may_be: Vec<&[u8]> = may_be
            .iter()
            .enumerate()
            .filter(|(number, moment)| *number == 0 || moment.started <= state.cut)
            .map(|(_, moment)| &moment.bytes[..])
            .collect();
        if !may_be.iter().any(|bytes| bytes.len() == found.len()) {
            return Err(format!("size {}", found.len()));
        }
        for (at, byte) in found.iter().enumerate() {
            let may_be_of = |bytes: &&[u8]| match bytes.get(at) {
                Some(had) => had == byte,
                None => *byte == 0 && bytes.len() as u64 / BLOCK == at as u64 / BLOCK,
            };
            if !may_be.iter().any(may_be_of) {
                return Err(format!("byte {at} is {byte}, map {:?}", device.map()));
            }
        }
        device.set_size(found.len() as u64 + 2 * BLOCK).unwrap();
        match content(&device)[found.len()..].iter().position(|byte| *byte != 0) {
            Some(at) => Err(format!("garbage {at} bytes behind the size {}", found.len())),
            None => Ok(()),
        }
    }
}

fn fault(random: &mut Random, data: &FaultDevice, slots: &FaultDevice) {
    let errno = if random.one_in(2) { Errno::IO } else { Errno::NOSPC };
    match random.below(5) {
        0 | 1 => data.inject(Fault::fail(Call::Sync, errno)),
        2 => data.inject(Fault::fail(Call::Write, errno).partly()),
        3 => slots.inject(Fault::fail(Call::Sync, errno)),
        _ => slots.inject(Fault::fail(Call::Write, errno).partly()),
    }
}

fn run(seed: u64, steps: usize, faults: bool, mutants: Mutants) -> Run {
    let mut random = Random::new(seed);
    let log = FaultLog::new();
    let (data, slots) = (log.add("data", Image::default()), log.add("map", Image::default()));
    let lower = lower(3 * BLOCK as usize + 1234);
    let first = Moment { started: 0, bytes: lower.image().to_vec() };
    let mut run = Run { log, lower, data, slots, moments: vec![first], durable: vec![(0, 0)] };
    let open = |run: &Run| {
        let (data, slots) = (run.data.clone(), run.slots.clone());
        let mut device = overlay(&run.lower, data, slots, BLOCK as u32);
        device.mutants = mutants;
        device
    };
    let mut device = open(&run);
    for _ in 0..steps {
        let size = run.now().len() as u64;
        if faults && random.one_in(6) {
            fault(&mut random, &run.data, &run.slots);
        }
        run.step(&device, &Step::random(&mut random, size, LIMIT, BLOCK));
        check_map(&device);
        if random.one_in(3) {
            run.commit(&device, random.one_in(2));
        }
        if random.one_in(30) {
            run.revert(&device);
        }
        if random.one_in(20) {
            run.data.heal();
            run.slots.heal();
            run.commit(&device, false);
            device = open(&run);
        }
    }
    run
}

#[test]
fn every_crash_shows_what_was_synced_or_something_newer() {
    let mut states = 0;
    for seed in 0..20 {
        let run = run(seed, 40, seed % 2 == 1, Mutants::default());
        let untouched = lower(3 * BLOCK as usize + 1234).image();
        assert!(run.lower.image() == untouched);
        for state in CrashStates::new(&run.log, seed).at_most(40) {
            states += 1;
            if let Err(why) = run.verdict(&state) {
                panic!("run {seed}: {why}");
            }
        }
    }
    assert!(states > 10_000, "{states}");
}

/// Whether the checks above notice, within a few runs.
fn is_caught(mutants: Mutants, faults: bool) -> bool {
    (0..20).any(|seed| {
        let run = catch_unwind(AssertUnwindSafe(|| run(seed, 40, faults, mutants)));
        let Ok(run) = run else { return true };
        CrashStates::new(&run.log, seed).at_most(40).any(|state| run.verdict(&state).is_err())
    })
}

#[test]
fn a_map_that_is_saved_before_its_bytes_are_durable_is_noticed() {
    assert!(is_caught(Mutants { save_before_sync: true, ..Mutants::default() }, false));
}

#[test]
fn holes_made_before_the_map_is_saved_are_noticed() {
    assert!(is_caught(Mutants { punch_before_save: true, ..Mutants::default() }, true));
}

#[test]
fn a_tail_that_is_taken_for_zeros_is_noticed() {
    assert!(is_caught(Mutants { trust_tail: true, ..Mutants::default() }, false));
}

#[test]
fn doubtful_bytes_that_are_not_written_again_are_noticed() {
    assert!(is_caught(Mutants { skip_rewrite: true, ..Mutants::default() }, true));
}
