//! Rules of freeing segments, switched off: the orders of events that show it are too rare for
//! random workloads, so they are made by hand. Each is tried with the rule, too.
#![cfg(test)]

use super::*;
use crate::device::fault::CrashStates;

/// Of all that power cuts from a place on may leave, how much does not begin with one of these.
fn lost(kit: &Kit, begun: usize, expected: &[u8]) -> usize {
    let states = CrashStates::new(&kit.log, 3).each(4).random(2).filter(|state| state.cut >= begun);
    let wrong = |state: &crate::device::fault::CrashState| {
        let (log, devices) = state.power_on();
        let files = vec![file(devices[1].clone())];
        let after = Kit::open(log, devices[0].clone(), files, &Setup::default());
        !expected.contains(&after.read(0)[0])
    };
    states.filter(wrong).count()
}

/// A durable write in the tail, superseded by one that is not durable: without the barrier of
/// freeing, a power cut between superblock and its sync loses both.
#[test]
fn the_mutant_that_frees_without_a_barrier_is_caught() {
    for skip_free_barrier in [false, true] {
        let journal = Mutants { skip_free_barrier, ..Mutants::default() };
        let mutants = crate::store::Mutants { journal, ..Default::default() };
        let setup = Setup { mutants, ..Setup::default() };
        let kit = Kit::new(SMALL, &[&[1; 8000]], &setup);
        let writeback = kit.store.shared.writeback().unwrap();
        let mut last = 0;
        while writeback.journal.tail().is_none_or(|tail| tail.is_head) {
            last += 1;
            kit.device(0).write(0, &[100 + last; 4000]).unwrap();
            kit.device(0).sync(true).unwrap();
        }
        let begun = kit.log.position();
        kit.device(0).write(0, &[2; 4000]).unwrap();
        let tail = writeback.journal.tail().unwrap();
        writeback.try_free(tail.last_seq).unwrap();
        let wrong = lost(&kit, begun, &[100 + last, 2]);
        assert_eq!(wrong > 0, skip_free_barrier, "{wrong} states without a durable write");
    }
}

/// A durable write, then the oldest segments are freed and used again: with the new tail not
/// durable before, a power cut finds the old tail overwritten, and loses the whole log.
#[test]
fn the_mutant_that_reuses_before_the_superblock_is_durable_is_caught() {
    for skip_superblock_sync in [false, true] {
        let journal = Mutants { skip_superblock_sync, ..Mutants::default() };
        let mutants = crate::store::Mutants { journal, ..Default::default() };
        let setup = Setup { mutants, ..Setup::default() };
        let kit = Kit::new(SMALL, &[&[1; 8000]], &setup);
        let writeback = kit.store.shared.writeback().unwrap();
        while !kit.store.would_wait(4000) {
            kit.device(0).write(0, &[2; 4000]).unwrap();
            kit.device(0).sync(true).unwrap();
        }
        let begun = kit.log.position();
        for _ in 0..4 {
            let tail = writeback.journal.tail().unwrap();
            writeback.try_free(tail.last_seq).unwrap();
        }
        while !kit.store.would_wait(4000) {
            kit.device(0).write(0, &[3; 4000]).unwrap();
        }
        let wrong = lost(&kit, begun, &[2, 3]);
        assert_eq!(wrong > 0, skip_superblock_sync, "{wrong} states without a durable write");
    }
}
