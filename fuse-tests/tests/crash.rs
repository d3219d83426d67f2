//! kill -9 under a storm of writes: every acknowledged byte is there after the next mount.
//!
//! `FUSE_TESTS_CRASH=1000` for more rounds (`make crash`), `FUSE_TESTS_SEED` for those of an
//! earlier run.

use std::env;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuse_tests::Mount;
use fuse_tests::storm::{Model, Random};
use fuse_tests::writeback::{builder, flush, journaled, number};
use fuse_tests::writers::{self, Writers};

const PROGRAM: &str = env!("CARGO_BIN_EXE_storm");

fn asked(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 & 0xffff;
    asked("FUSE_TESTS_SEED").unwrap_or_else(now)
}

/// Another round: a storm, a kill at a random moment, a mount, a look at every file.
fn round(mount: &mut Mount, seed: u64, round: u64, models: &mut [Model]) -> u64 {
    let mut writers = Writers::start(PROGRAM, mount, seed, round);
    let mut random = Random::new(seed ^ round);
    // Early kills meet an empty journal, late ones a full one that wraps.
    let longest = [80, 400, 1500][random.below(3) as usize];
    let milliseconds = 20 + random.below(longest);
    std::thread::sleep(Duration::from_millis(milliseconds));
    mount.kill();
    writers.end();
    mount.start_again();
    let checked = writers::check(mount, seed, round, models);
    checked.unwrap_or_else(|wrong| {
        panic!("seed {seed}, round {round}, killed after {milliseconds} ms: {wrong}")
    })
}

fn crashes(name: &str, journal: &str) {
    let rounds = asked("FUSE_TESTS_CRASH").unwrap_or(10).div_ceil(2);
    let Some(builder) = builder(name) else { return };
    let limit = Duration::from_secs(60 + 30 * rounds);
    let builder = builder.journal_option(&format!("journal_size={journal}")).limit(limit);
    let Some(mut mount) = builder.start() else { return };
    let seed = seed();
    println!("seed {seed}");
    let mut models = writers::nothing();
    let mut acknowledged = 0;
    for number in 0..rounds {
        acknowledged += round(&mut mount, seed, number, &mut models);
        if number % 5 == 4 {
            // The next crash meets a journal that has seen an orderly stop.
            flush(&mount);
            writers::source_equals(mount.source(), &models);
            mount.remount();
        }
    }
    assert!(acknowledged > 20 * rounds, "seed {seed}: only {acknowledged} operations");
    if journaled() {
        assert_eq!(number(&mount, "errors"), 0);
    }
    flush(&mount);
    assert!(mount.unmount().success(), "{}", mount.log());
    writers::source_equals(mount.source(), &models);
}

#[test]
fn kill_9_loses_no_acknowledged_byte_with_a_journal_that_wraps() {
    crashes("crash-8m", "8M");
}

#[test]
fn kill_9_loses_no_acknowledged_byte_with_a_large_journal() {
    crashes("crash-256m", "256M");
}
