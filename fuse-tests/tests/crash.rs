//! kill -9 under a storm of writes: every acknowledged byte is there after the next mount.
//!
//! `FUSE_TESTS_CRASH=1000` for more rounds (`make crash`), `FUSE_TESTS_SEED` for those of an
//! earlier run.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuse_tests::Mount;
use fuse_tests::storm::{self, FILES, Model, Random};
use fuse_tests::tools::wait_for;
use fuse_tests::writeback::{builder, flush, journaled, number};

const WRITERS: u64 = 4;

fn asked(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 & 0xffff;
    asked("FUSE_TESTS_SEED").unwrap_or_else(now)
}

/// The writers of one round; ended when dropped.
struct Writers(Vec<Child>);

impl Writers {
    fn start(mount: &Mount, seed: u64, round: u64) -> Writers {
        let start = |writer: u64| {
            let log = storm::log(mount.scratch(), round, writer);
            let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
            command.arg(mount.path()).args([seed, round, writer].map(|n| n.to_string()));
            command.arg(log).stdin(Stdio::null()).spawn().expect("storm")
        };
        Writers((0..WRITERS).map(start).collect())
    }

    fn end(&mut self) {
        for (writer, child) in self.0.iter_mut().enumerate() {
            let ended = wait_for(Duration::from_secs(20), || child.try_wait().expect("wait"));
            let status = ended.unwrap_or_else(|| panic!("writer {writer} hangs"));
            assert!(status.success(), "writer {writer} ended with {status}");
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn acks(mount: &Mount, round: u64, writer: u64) -> u64 {
    fs::metadata(storm::log(mount.scratch(), round, writer)).map_or(0, |meta| meta.len())
}

/// Another round: a storm, a kill at a random moment, a mount, a look at every file.
fn round(mount: &mut Mount, seed: u64, round: u64, models: &mut [Model]) -> u64 {
    let mut writers = Writers::start(mount, seed, round);
    let mut random = Random::new(seed ^ round);
    // Early kills meet an empty journal, late ones a full one that wraps.
    let longest = [80, 400, 1500][random.below(3) as usize];
    let milliseconds = 20 + random.below(longest);
    std::thread::sleep(Duration::from_millis(milliseconds));
    mount.kill();
    writers.end();
    mount.start_again();
    let mut all = 0;
    for (writer, model) in (0..WRITERS).zip(models.iter_mut()) {
        let log = storm::log(mount.scratch(), round, writer);
        if !log.exists() {
            // Killed before it had opened its files.
            continue;
        }
        let acks = acks(mount, round, writer);
        all += acks;
        let checked = storm::check(mount.path(), seed, round, writer, acks, model);
        if let Err(wrong) = checked {
            panic!("seed {seed}, round {round}, killed after {milliseconds} ms: {wrong}");
        }
        fs::remove_file(log).unwrap();
    }
    all
}

fn source_equals(source: &Path, models: &[Model]) {
    for (writer, model) in (0u64..).zip(models) {
        for (file, wanted) in (0..FILES).zip(model) {
            let name = storm::name(writer, file);
            let there = fs::read(source.join(&name)).unwrap_or_default();
            if let Some(wrong) = storm::same(&there, wanted) {
                panic!("{name} in the source: {wrong}");
            }
        }
    }
}

fn crashes(name: &str, journal: &str) {
    let rounds = asked("FUSE_TESTS_CRASH").unwrap_or(10).div_ceil(2);
    let Some(builder) = builder(name) else { return };
    let limit = Duration::from_secs(60 + 30 * rounds);
    let builder = builder.journal_option(&format!("journal_size={journal}")).limit(limit);
    let Some(mut mount) = builder.start() else { return };
    let seed = seed();
    println!("seed {seed}");
    let mut models = vec![vec![Vec::new(); FILES]; WRITERS as usize];
    let mut acknowledged = 0;
    for number in 0..rounds {
        acknowledged += round(&mut mount, seed, number, &mut models);
        if number % 5 == 4 {
            // The next crash meets a journal that has seen an orderly stop.
            flush(&mount);
            source_equals(mount.source(), &models);
            mount.remount();
        }
    }
    assert!(acknowledged > 20 * rounds, "seed {seed}: only {acknowledged} operations");
    if journaled() {
        assert_eq!(number(&mount, "errors"), 0);
    }
    flush(&mount);
    assert!(mount.unmount().success(), "{}", mount.log());
    source_equals(mount.source(), &models);
}

#[test]
fn kill_9_loses_no_acknowledged_byte_with_a_journal_that_wraps() {
    crashes("crash-8m", "8M");
}

#[test]
fn kill_9_loses_no_acknowledged_byte_with_a_large_journal() {
    crashes("crash-256m", "256M");
}
