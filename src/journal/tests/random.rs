//! Random histories with crashes against a model: appends, barriers, home writes and freeing in a
//! ring that wraps; unsynced writes lost, kept, reordered, torn at 512 bytes; replay; compare.
//!
//! The model is one small device, written home by the test itself (at once and durably; J4 is not
//! under test here). After a crash its home bytes with the log replayed over them must be the
//! state after some prefix of the writes, and the prefix must contain every barrier.
#![cfg(test)]

use std::sync::Arc;

use super::device::{Crash, Memory, Random};
use super::*;

const DEVICE_BYTES: usize = 24 << 10;
const RING: Geometry = Geometry { segment_bytes: 24 << 10, count: 3 };

struct Write {
    offset: usize,
    bytes: Vec<u8>,
}

/// What happened in histories, to see that they try what they are for.
#[derive(Debug, Default)]
struct Counts {
    freed: u64,
    failed: u64,
    dropped: u64,
    lost: u64,
}

struct Model {
    counts: Counts,
    random: Random,
    /// Two sizes of writes, two of one taking as much as one of the other: then records of two
    /// generations may lie at the same places.
    uniform: bool,
    writes: Vec<Write>,
    /// Writes that a crash may not take.
    durable: usize,
    /// Writes that were acknowledged.
    acked: usize,
    /// The state before the first of `writes`.
    base: Vec<u8>,
    home: Vec<u8>,
    /// The sequence of the record that holds each byte's newest value, and of its write's last;
    /// 0 where it is home.
    newest: Vec<(u64, u64)>,
}

fn lay(state: &mut [u8], offset: usize, bytes: &[u8]) {
    state[offset..offset + bytes.len()].copy_from_slice(bytes);
}

impl Model {
    fn new(seed: u64) -> Model {
        Model {
            counts: Counts::default(),
            random: Random::new(seed),
            uniform: seed.is_multiple_of(2),
            writes: Vec::new(),
            durable: 0,
            acked: 0,
            base: vec![0; DEVICE_BYTES],
            home: vec![0; DEVICE_BYTES],
            newest: vec![(0, 0); DEVICE_BYTES],
        }
    }

    fn state(&self, prefix: usize) -> Vec<u8> {
        let mut state = self.base.clone();
        for write in &self.writes[..prefix] {
            lay(&mut state, write.offset, &write.bytes);
        }
        state
    }

    fn append(&mut self, journal: &Journal) -> Result<()> {
        let large = if self.random.one_in(5) { 14_000 } else { 3000 };
        let mut len = 1 + self.random.below(large) as usize;
        if self.uniform {
            len = if self.random.one_in(2) { 208 } else { 500 };
        }
        let offset = self.random.below((DEVICE_BYTES - len) as u64) as usize;
        let stamp = (self.random.below(1 << 40)).to_le_bytes();
        let bytes: Vec<u8> = (0..len).map(|at| stamp[at % 5] ^ (at / 5) as u8).collect();
        let charge = journal.charge(&[Change::Data(&bytes)]);
        while journal.failure().is_none() {
            let Some(mut room) = journal.try_reserve(Purpose::Frontend, charge) else {
                self.free(journal)?;
                continue;
            };
            self.writes.push(Write { offset, bytes: bytes.clone() });
            let done = journal.append(&mut room, &[entry(offset as u64, Change::Data(&bytes))])?;
            self.acked = self.writes.len();
            for placed in done.records {
                let range = placed.offset as usize..(placed.offset + placed.length) as usize;
                self.newest[range].fill((placed.seq, placed.write_seq));
            }
            return Ok(());
        }
        Ok(())
    }

    fn barrier(&mut self, journal: &Journal) -> Result<()> {
        journal.barrier()?;
        self.durable = self.acked;
        Ok(())
    }

    /// Writes the tail's live bytes home and frees it.
    fn free(&mut self, journal: &Journal) -> Result<()> {
        let Some(tail) = journal.tail() else { return Ok(()) };
        let live = |newest: &&(u64, u64)| newest.0 > 0 && newest.0 <= tail.last_seq;
        let needed = self.newest.iter().filter(live).map(|newest| newest.1).max().unwrap_or(0);
        if journal.durable_seq() < needed {
            self.barrier(journal)?; // J13
        }
        let now = self.state(self.acked);
        for (at, byte) in now.iter().enumerate() {
            if live(&&self.newest[at]) {
                self.home[at] = *byte;
                self.newest[at] = (0, 0);
            }
        }
        let freed = journal.free_tail(tail.last_seq)?;
        self.counts.freed += u64::from(freed == Freed::Yes);
        Ok(())
    }

    fn run(&mut self, journal: &Journal, steps: u64) -> Result<()> {
        for _ in 0..steps {
            match self.random.below(20) {
                0..=14 => self.append(journal)?,
                15..=17 => self.barrier(journal)?,
                18 => drop(journal.zero_one()?),
                _ => self.free(journal)?,
            }
        }
        Ok(())
    }

    /// Compares what recovery gives with the model, and goes on from there.
    fn compare(&mut self, recovered: &Recovered, how: Crash, failed: bool) -> Outcome {
        if let Some(corruption) = recovered.corruption() {
            return Err(format!("{how:?}: {corruption:?}"));
        }
        let mut state = self.home.clone();
        let mut newest = vec![(0, 0); DEVICE_BYTES];
        let mut visitor = |record: &Record<'_>| {
            if record.header.kind == RecordKind::Data {
                let from = record.header.offset as usize;
                lay(&mut state, from, record.payload);
                let range = from..from + record.payload.len();
                newest[range].fill((record.placed.seq, record.placed.write_seq));
            }
            Ok(())
        };
        recovered.visit(&mut visitor).map_err(|error| error.to_string())?;
        let least = if how == Crash::KeepAll { self.acked } else { self.durable };
        let mut after = self.state(least);
        let mut found = (after == state).then_some(least);
        for (index, write) in self.writes.iter().enumerate().skip(least) {
            lay(&mut after, write.offset, &write.bytes);
            found = if after == state { Some(index + 1) } else { found };
        }
        let Some(prefix) = found else {
            let (durable, acked) = (self.durable, self.acked);
            return Err(format!(
                "{how:?} failed {failed}: durable {durable} of {acked}: no prefix"
            ));
        };
        self.counts.lost += (self.writes.len() - prefix) as u64;
        self.counts.dropped += u64::from(recovered.dropped() > 0);
        self.counts.failed += u64::from(failed);
        self.base = self.state(prefix);
        self.writes.clear();
        (self.durable, self.acked, self.newest) = (0, 0, newest);
        Ok(())
    }
}

type Outcome = std::result::Result<(), String>;

fn crash_of(random: &mut Random) -> Crash {
    match random.below(6) {
        0 => Crash::KeepAll,
        1 => Crash::LoseAll,
        2 | 3 => Crash::Some,
        _ => Crash::Torn,
    }
}

/// One history of several mounts.
fn history(seed: u64, mutants: Mutants) -> std::result::Result<Counts, String> {
    let mut model = Model::new(seed);
    let mut device = formatted(RING);
    for mount in 0..4 {
        let fails = |error: Error| format!("mount {mount}: {error}");
        let recovered = Recovered::open(device.clone(), mutants).map_err(fails)?;
        let journal = recovered.start().map_err(fails)?;
        // What replay gave is durable once the journal has started.
        model.durable = model.acked;
        journal.set_device(DEVICE, &identity("a.img"), 0).map_err(fails)?;
        if !model.random.one_in(3) {
            device.fail_after(10 + model.random.below(120));
        }
        let steps = 20 + model.random.below(100);
        let failed = model.run(&journal, steps).is_err();
        assert_eq!(failed, journal.failure().is_some(), "seed {seed}: a failure of its own");
        let how = crash_of(&mut model.random);
        device = device.crash(how, &mut model.random);
        let recovered = Recovered::open(device.clone(), mutants).map_err(fails)?;
        model.compare(&recovered, how, failed).map_err(|why| format!("mount {mount}: {why}"))?;
    }
    Ok(model.counts)
}

/// The first of these seeds whose history goes wrong.
fn first_failure(seeds: u64, mutants: Mutants) -> Option<(u64, String)> {
    (0..seeds).find_map(|seed| history(seed, mutants).err().map(|why| (seed, why)))
}

#[test]
fn random_histories_keep_every_barrier_and_leave_a_prefix() {
    let mut sum = Counts::default();
    for seed in 0..250 {
        let counts = history(seed, Mutants::default());
        let counts = counts.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        sum.freed += counts.freed;
        sum.failed += counts.failed;
        sum.dropped += counts.dropped;
        sum.lost += counts.lost;
    }
    println!("{sum:?}");
    let Counts { freed, failed, dropped, lost } = sum;
    assert!(freed > 1000 && failed > 100 && dropped > 10 && lost > 1000, "{sum:?}");
}

#[test]
fn the_mutant_that_skips_the_barrier_is_caught() {
    let mutants = Mutants { skip_free_barrier: true, ..Mutants::default() };
    assert!(first_failure(300, mutants).is_some());
}

#[test]
fn the_mutant_that_skips_the_superblock_sync_is_caught() {
    let mutants = Mutants { skip_superblock_sync: true, ..Mutants::default() };
    assert!(first_failure(300, mutants).is_some());
}

#[test]
fn a_device_that_keeps_all_is_like_kill_9() {
    let device: Arc<Memory> = formatted(RING);
    let journal = started(&device);
    data(&journal, 0, b"acked");
    assert_eq!(payloads(&device.crash(Crash::KeepAll, &mut Random::new(1))), [b"acked"]);
}
