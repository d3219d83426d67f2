//! A tiny write-ahead log over two fault devices: its correct form survives every crash state, and
//! each broken form is caught soon. This tests the enumerator, not the log.
//!
//! Journal: bytes 0..40 are the commit record {number, block, block, where its payload of two
//! blocks is, checksum of the record only}; payloads go to 4096 and 8192 in turn (with one place
//! only, an old record found the payload of the next transaction: the enumerator said so). Home:
//! BLOCKS blocks. Transaction n writes n into every byte of two blocks.

use std::sync::Arc;

use super::*;

const BLOCK: usize = 1024;
const BLOCKS: u64 = 4;

fn payload_of(number: u64) -> u64 {
    4096 * (1 + number % 2)
}

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    SyncBeforeCommitRecord,
    SyncBetweenCommitAndHome,
    SyncBetweenHomeAndReuse,
}

fn checksum(record: &[u8]) -> u64 {
    record.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn record(number: u64, blocks: [u64; 2]) -> Vec<u8> {
    let words = [number, blocks[0], blocks[1], payload_of(number)];
    let mut record: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    record.extend(checksum(&record).to_le_bytes());
    record
}

fn blocks_of(number: u64) -> [u64; 2] {
    [number % BLOCKS, (number * 3 + 1) % BLOCKS]
}

struct Toy {
    log: FaultLog,
    journal: Arc<FaultDevice>,
    home: Arc<FaultDevice>,
    /// Where each transaction had been started, and where it was acked.
    started: Vec<usize>,
    acked: Vec<usize>,
}

fn run(transactions: u64, broken: Broken) -> Toy {
    let log = FaultLog::new();
    let journal = log.add("journal", Image::zeros(3 * 4096));
    let home = log.add("home", Image::zeros(BLOCKS * BLOCK as u64));
    let mut toy = Toy { log, journal, home, started: vec![0], acked: vec![0] };
    for number in 1..=transactions {
        toy.started.push(toy.log.position());
        transact(&toy, number, broken);
        toy.acked.push(toy.log.position());
        go_home(&toy.home, number, broken);
    }
    toy
}

fn transact(toy: &Toy, number: u64, broken: Broken) {
    toy.journal.write_at(&[number as u8; 2 * BLOCK], payload_of(number)).unwrap();
    if broken != Broken::SyncBeforeCommitRecord {
        toy.journal.sync(true).unwrap();
    }
    toy.journal.write_at(&record(number, blocks_of(number)), 0).unwrap();
    if broken != Broken::SyncBetweenCommitAndHome {
        toy.journal.sync(true).unwrap();
    }
}

fn go_home(home: &FaultDevice, number: u64, broken: Broken) {
    for block in blocks_of(number) {
        home.write_at(&[number as u8; BLOCK], block * BLOCK as u64).unwrap();
    }
    if broken != Broken::SyncBetweenHomeAndReuse {
        home.sync(true).unwrap();
    }
}

/// Replays the slot if its record is whole.
fn recover(journal: &FaultDevice, home: &FaultDevice) {
    let mut found = [0; 40];
    journal.read_at(&mut found, 0).unwrap();
    let words: Vec<u64> =
        found.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    if words[0] == 0 || checksum(&found[..32]) != words[4] {
        return;
    }
    let mut payload = [0; 2 * BLOCK];
    journal.read_at(&mut payload, words[3]).unwrap();
    for (block, bytes) in words[1..3].iter().zip(payload.chunks(BLOCK)) {
        home.write_at(bytes, block * BLOCK as u64).unwrap();
    }
    home.sync(true).unwrap();
}

fn model(transactions: usize) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK * BLOCKS as usize];
    for number in 1..=transactions as u64 {
        for block in blocks_of(number) {
            bytes[block as usize * BLOCK..][..BLOCK].fill(number as u8);
        }
    }
    bytes
}

/// Whether home holds all acked transactions, and of the others a prefix.
fn is_right(toy: &Toy, state: &CrashState, home: &Image) -> bool {
    let acked = toy.acked.iter().filter(|at| **at <= state.cut).count() - 1;
    let started = toy.started.iter().filter(|at| **at <= state.cut).count() - 1;
    let found = home.to_vec();
    (acked..=started).any(|transactions| found == model(transactions))
}

fn survives(toy: &Toy, state: &CrashState) -> bool {
    let (_, devices) = state.power_on();
    recover(&devices[0], &devices[1]);
    is_right(toy, state, &devices[1].image())
}

#[test]
fn the_correct_form_survives_every_state_also_when_its_recovery_is_cut() {
    let seed = 0x5eed;
    let toy = run(12, Broken::Nothing);
    let (mut states, mut twice) = (0, 0);
    for state in CrashStates::new(&toy.log, seed) {
        states += 1;
        let (log, devices) = state.power_on();
        recover(&devices[0], &devices[1]);
        assert!(is_right(&toy, &state, &devices[1].image()), "{state}");
        if state.number % 5 == 1 {
            for again in CrashStates::new(&log, seed).random(2) {
                twice += 1;
                let (_, devices) = again.power_on();
                recover(&devices[0], &devices[1]);
                assert!(is_right(&toy, &state, &devices[1].image()), "{state}, then {again}");
            }
        }
    }
    assert!(states > 300 && twice > 1000, "{states} states, {twice} of recovery");
}

#[test]
fn every_broken_form_is_caught_soon_whatever_the_seed() {
    let broken = [
        Broken::SyncBeforeCommitRecord,
        Broken::SyncBetweenCommitAndHome,
        Broken::SyncBetweenHomeAndReuse,
    ];
    for broken in broken {
        let toy = run(4, broken);
        for seed in 0..50 {
            let mut states = CrashStates::new(&toy.log, seed).take(300);
            let caught = states.find(|state| !survives(&toy, state));
            let caught = caught.unwrap_or_else(|| panic!("{broken:?} with seed {seed}"));
            let again = CrashStates::new(&toy.log, seed).only(caught.cut);
            let again = again.filter(|state| !survives(&toy, state)).map(|state| state.to_string());
            assert_eq!(again.take(1).collect::<Vec<_>>(), [caught.to_string()]);
        }
    }
}
