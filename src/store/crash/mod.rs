//! Power cuts at every place of a workload, over the store without FUSE (J1 to J5, J10, J13, J14).
//!
//! A rig runs a store by hand over fault devices that share one log: random changes of two images,
//! fsyncs, live mode switches, and home writes done in any order. Then every prefix of the log is
//! tried with what was not synced lost, kept, reordered and torn; recovery must show what some
//! prefix of the journaled changes made, with every completed barrier in it.
#![cfg(test)]

mod model;
mod rig;

use self::rig::{Plan, Rig};
use super::Mutants;
use crate::device::fault::{CrashState, CrashStates, Random};

/// Tries crash states of a workload; the first one that breaks a rule.
fn try_states(rig: &Rig, seed: u64, at_most: usize) -> Result<usize, String> {
    let states = CrashStates::new(&rig.log, seed).each(4).random(6).at_most(at_most);
    let mut tried = 0;
    for state in states.filter(|state| state.cut >= rig.begins_at) {
        check(rig, &state, seed)?;
        tried += 1;
    }
    Ok(tried)
}

/// One crash: recovery, and what it shows. Now and then it is cut as well (J5).
fn check(rig: &Rig, state: &CrashState, seed: u64) -> Result<(), String> {
    let (log, devices) = state.power_on();
    let mut random = Random::new(seed ^ state.cut as u64);
    let words = |what: String| format!("{what}\n  in {state}");
    let first = Rig::recover(&log, &devices).map_err(&words)?;
    let last_seq = first.recovered_seq;
    let seen = first.contents();
    rig.model.check(state.cut, last_seq, &seen).map_err(&words)?;
    if !random.one_in(8) {
        return Ok(());
    }
    // Recovery goes on for a while, then the power fails again.
    first.work(&mut random, 1 + state.cut % 30);
    drop(first);
    let again = CrashStates::new(&log, seed).each(1).random(2).at_most(3);
    let last = log.position();
    for second in again.filter(|second| second.cut == last || second.cut % 7 == 0) {
        let (log, devices) = second.power_on();
        let words = |what: String| format!("{what}\n  in {second}\n  after {state}");
        let rig = Rig::recover(&log, &devices).map_err(&words)?;
        if rig.contents() != seen {
            return Err(words("J5: a recovery that was cut shows something else".into()));
        }
        rig.drain();
        let homes: Vec<Vec<u8>> = rig.homes();
        if homes != seen {
            return Err(words("home is not what was shown after all of it was flushed".into()));
        }
    }
    Ok(())
}

/// Many workloads; the message of the first failure.
fn campaign(plan: &Plan, seeds: std::ops::Range<u64>, at_most: usize) -> Result<usize, String> {
    let mut tried = 0;
    for seed in seeds {
        let rig = Rig::run(seed, plan);
        let states = try_states(&rig, seed, at_most);
        tried += states.map_err(|what| format!("workload seed {seed}: {what}"))?;
    }
    Ok(tried)
}

/// `CRASH_SEEDS=N` is the first N, `CRASH_SEEDS=A..B` those from A to below B.
fn seeds(least: u64) -> std::ops::Range<u64> {
    let text = std::env::var("CRASH_SEEDS").unwrap_or_default();
    let (first, end) = text.split_once("..").unwrap_or(("0", &text));
    first.parse().unwrap_or(0)..end.parse().unwrap_or(least)
}

#[test]
fn j1_j3_every_power_cut_leaves_a_prefix_with_every_barrier() {
    let tried = campaign(&Plan::default(), seeds(3), 4).unwrap_or_else(|what| panic!("{what}"));
    assert!(tried > 1000, "only {tried} states");
}

#[test]
fn j1_the_same_with_a_journal_that_wraps_all_the_time() {
    let plan = Plan { segments: 5, segment_bytes: 32 << 10, ..Plan::default() };
    campaign(&plan, seeds(3), 4).unwrap_or_else(|what| panic!("{what}"));
}

#[test]
fn j14_the_same_with_mode_switches_and_streams() {
    let plan = Plan { switches: true, streams: true, ..Plan::default() };
    campaign(&plan, seeds(3), 3).unwrap_or_else(|what| panic!("{what}"));
}

#[test]
fn j11_the_same_with_image_syncs_that_fail() {
    let plan = Plan { faults: true, ..Plan::default() };
    campaign(&plan, seeds(1), 5).unwrap_or_else(|what| panic!("{what}"));
}

/// A mutant must be caught by some workload.
fn caught(name: &str, plan: &Plan, mutants: Mutants) {
    let plan = Plan { mutants, ..plan.clone() };
    // Workloads differ in how soon they meet it.
    for seed in 0..40 {
        let rig = Rig::run(seed, &plan);
        if let Err(what) = try_states(&rig, seed, 12) {
            println!("{name}, workload seed {seed}: {}", what.lines().next().unwrap_or_default());
            return;
        }
    }
    panic!("the mutant {name} was not caught");
}

#[test]
fn the_mutants_are_caught() {
    let wraps = Plan { segments: 5, segment_bytes: 32 << 10, ..Plan::default() };
    let switches = Plan { switches: true, ..Plan::default() };
    caught("J4", &wraps, Mutants { skip_epoch_sync: true, ..Mutants::default() });
    caught("J13", &Plan::default(), Mutants { skip_wal: true, ..Mutants::default() });
    caught("J14", &switches, Mutants { skip_revoke: true, ..Mutants::default() });
    // Those of freeing need rarer orders: `named::mutants` makes them.
}

#[test]
fn a_workload_is_the_same_for_the_same_seed() {
    let (first, second) = (Rig::run(3, &Plan::default()), Rig::run(3, &Plan::default()));
    assert_eq!(first.contents(), second.contents());
}
