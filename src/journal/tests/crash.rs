//! Every crash state of a history of a journal AND of the home device, by `device/fault`: recovery
//! replays home, and home must be the state after a prefix of the writes with every barrier.
#![cfg(test)]

use super::*;
use crate::device::Image;
use crate::device::fault::{CrashState, CrashStates, FaultDevice, FaultLog, Random};

const HOME_BYTES: u64 = 8 << 10;
const RING: Geometry = Geometry { segment_bytes: 24 << 10, count: 3 };
const SEED: u64 = 0x10_06;

struct Write {
    /// The place in the log before it.
    started: usize,
    offset: usize,
    bytes: Vec<u8>,
}

struct History {
    log: FaultLog,
    home: Arc<FaultDevice>,
    writes: Vec<Write>,
    /// Places after barriers, and the writes that they cover.
    barriers: Vec<(usize, usize)>,
    /// Each byte's newest record and the last of its write; 0 where it is home.
    newest: Vec<(u64, u64)>,
    freed: u64,
}

fn lay(state: &mut [u8], offset: usize, bytes: &[u8]) {
    state[offset..offset + bytes.len()].copy_from_slice(bytes);
}

impl History {
    fn state(&self, prefix: usize) -> Vec<u8> {
        let mut state = vec![0; HOME_BYTES as usize];
        self.writes[..prefix].iter().for_each(|write| lay(&mut state, write.offset, &write.bytes));
        state
    }

    fn append(&mut self, journal: &Journal, random: &mut Random) {
        let len = if random.below(6) == 0 { 7000 } else { 1 + random.below(2500) };
        let offset = random.below(HOME_BYTES - len) as usize;
        let number = self.writes.len() as u8;
        let bytes: Vec<u8> = (0..len as usize).map(|at| number ^ (at / 100) as u8).collect();
        let charge = journal.charge(&[Change::Data(&bytes)]);
        let mut room = loop {
            match journal.try_reserve(Purpose::Frontend, charge) {
                Some(room) => break room,
                None => self.free(journal),
            }
        };
        self.writes.push(Write { started: self.log.position(), offset, bytes: bytes.clone() });
        let change = [entry(offset as u64, Change::Data(&bytes))];
        for placed in journal.append(&mut room, &change).unwrap().records {
            let range = placed.offset as usize..(placed.offset + placed.length) as usize;
            self.newest[range].fill((placed.seq, placed.write_seq));
        }
    }

    fn barrier(&mut self, journal: &Journal) {
        journal.barrier().unwrap();
        self.barriers.push((self.log.position(), self.writes.len()));
    }

    /// J13: what goes home is durable with its whole write; J4: home is synced before the tail is
    /// freed.
    fn free(&mut self, journal: &Journal) {
        let Some(tail) = journal.tail() else { return };
        let live: Vec<usize> = (0..self.newest.len())
            .filter(|at| (1..=tail.last_seq).contains(&self.newest[*at].0))
            .collect();
        if live.iter().any(|at| self.newest[*at].1 > journal.durable_seq()) {
            self.barrier(journal);
        }
        let now = self.state(self.writes.len());
        for run in live.chunk_by(|a, b| a + 1 == *b) {
            let range = run[0]..run[0] + run.len();
            self.home.write_at(&now[range.clone()], run[0] as u64).unwrap();
            self.newest[range].fill((0, 0));
        }
        self.home.sync(true).unwrap();
        self.freed += u64::from(journal.free_tail(tail.last_seq).unwrap() == Freed::Yes);
    }
}

fn history(steps: u64, mutants: Mutants) -> History {
    let log = FaultLog::new();
    let scratch = FaultLog::new().add("scratch", Image::zeros(RING.device_bytes()));
    Journal::format_as(&*scratch, RING, [3; 16]).unwrap();
    let device = log.add("journal", scratch.image());
    let home = log.add("home", Image::zeros(HOME_BYTES));
    let newest = vec![(0, 0); HOME_BYTES as usize];
    let mut history =
        History { log, home, writes: Vec::new(), barriers: vec![(0, 0)], newest, freed: 0 };
    let mut random = Random::new(SEED);
    let journal = Recovered::open(device, mutants).unwrap().start().unwrap();
    journal.set_device(DEVICE, &identity("a.img"), 0).unwrap();
    for _ in 0..steps {
        // Few barriers and frees of its own accord: mostly the tail goes because room is needed,
        // and its slot is reused at once.
        match random.below(24) {
            0..=20 => history.append(&journal, &mut random),
            21 | 22 => history.barrier(&journal),
            _ => history.free(&journal),
        }
    }
    history
}

/// Replays home; false on corruption.
fn recover_home(devices: &[Arc<FaultDevice>]) -> bool {
    let recovered = Recovered::open(devices[0].clone(), Mutants::default()).unwrap();
    if recovered.corruption().is_some() {
        return false;
    }
    // The new generation makes durable what replay saw, before any of it goes home (J13).
    recovered.start().unwrap();
    let recovered = Recovered::open(devices[0].clone(), Mutants::default()).unwrap();
    let mut visitor = |record: &Record<'_>| match record.header.kind {
        RecordKind::Data => devices[1].write_at(record.payload, record.header.offset),
        _ => Ok(()),
    };
    recovered.visit(&mut visitor).unwrap();
    devices[1].sync(true).is_ok()
}

/// Whether home holds a prefix of the writes with all that barriers covered at the crash.
fn is_right(history: &History, state: &CrashState, home: &[u8]) -> bool {
    let covered = history.barriers.iter().filter(|(at, _)| *at <= state.cut);
    let least = covered.map(|(_, writes)| *writes).max().unwrap_or(0);
    let most = history.writes.iter().filter(|write| write.started <= state.cut).count();
    (least..=most).any(|prefix| history.state(prefix) == home)
}

fn survives(history: &History, state: &CrashState) -> bool {
    let (_, devices) = state.power_on();
    recover_home(&devices) && is_right(history, state, &devices[1].image().to_vec())
}

#[test]
fn every_crash_state_recovers_to_a_prefix_also_when_recovery_is_cut() {
    let history = history(200, Mutants::default());
    assert!(history.freed > 6, "the ring of 3 wrapped twice: {}", history.freed);
    let (mut states, mut twice) = (0, 0);
    for state in CrashStates::new(&history.log, SEED).random(2).at_most(8) {
        states += 1;
        assert!(survives(&history, &state), "{state}");
        if states % 41 == 0 {
            let (log, devices) = state.power_on();
            assert!(recover_home(&devices), "{state}");
            for again in CrashStates::new(&log, SEED).random(2).at_most(6) {
                twice += 1;
                let (_, devices) = again.power_on();
                assert!(recover_home(&devices), "{state}, then {again}");
                let home = devices[1].image().to_vec();
                assert!(is_right(&history, &state, &home), "{state}, then {again}");
            }
        }
    }
    println!("{states} states, {twice} of recovery");
    assert!(states > 1000 && twice > 500, "{states} states, {twice} of recovery");
}

#[test]
fn the_mutants_of_freeing_are_caught() {
    let barrier = Mutants { skip_free_barrier: true, ..Mutants::default() };
    let sync = Mutants { skip_superblock_sync: true, ..Mutants::default() };
    for mutants in [barrier, sync] {
        let history = history(200, mutants);
        let mut states = CrashStates::new(&history.log, SEED).random(4).at_most(20);
        let caught = states.find(|state| !survives(&history, state));
        assert!(caught.is_some(), "{mutants:?}");
    }
}
