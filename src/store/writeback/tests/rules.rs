//! Single rules, each in the smallest world that shows it.
#![cfg(test)]

use super::super::controller::Controller;
use super::super::health::Health;
use super::super::rate::{FLOOR, Rate};
use super::super::view::*;
use super::sim::MIB;
use crate::config::WritebackOrder;
use crate::journal::Tail;
use crate::units::DeviceId;

const A: DeviceId = DeviceId(1);
const B: DeviceId = DeviceId(2);
const C: DeviceId = DeviceId(3);
const JOURNAL: u64 = 160 * MIB;

/// One snapshot after the other of two devices.
struct Desk {
    controller: Controller,
    now: u64,
    used: u64,
    waiting: usize,
    settings: Settings,
    tail: Option<Tail>,
    views: [DeviceView; 3],
}

fn desk() -> Desk {
    let order = WritebackOrder::Unordered;
    Desk {
        controller: Controller::new(),
        now: 100_000,
        used: 10 * MIB,
        waiting: 0,
        settings: Settings { percent: 10, delay_ms: 1000, running: true, order },
        tail: Some(Tail { first_seq: 1, last_seq: 100, is_head: false }),
        views: [A, B, C].map(|id| DeviceView { id, ..DeviceView::default() }),
    }
}

impl Desk {
    fn step(&mut self, events: &[Event]) -> Vec<Action> {
        let world = World {
            now_ms: self.now,
            journal_bytes: JOURNAL,
            journal_used: self.used,
            waiting_writers: self.waiting,
            in_flight: self.views.iter().map(|view| view.in_flight).sum(),
            flushing_all: false,
            settings: self.settings,
            devices: &self.views,
        };
        self.controller.step(&world, self.tail, events)
    }

    fn later(&mut self, ms: u64, events: &[Event]) -> Vec<Action> {
        self.now += ms;
        self.step(events)
    }

    /// So many extents of 4 KiB, just dirtied, behind the tail.
    fn dirty(&mut self, index: usize, extents: u64) -> &mut DeviceView {
        let view = &mut self.views[index];
        view.dirty_extents = extents;
        view.dirty_bytes = extents * 4096;
        view.dirty_since_ms = self.now;
        view.live_seq = Some(500);
        view
    }
}

fn passes(actions: &[Action]) -> Vec<(DeviceId, usize)> {
    let passes = actions.iter().filter_map(|action| match action {
        Action::Pass { device, extents, .. } => Some((*device, *extents)),
        _ => None,
    });
    passes.collect()
}

fn failed(device: DeviceId) -> Event {
    Event::Wrote { device, ok: false }
}

#[test]
fn passes_have_the_sizes_of_bcache() {
    let mut desk = desk();
    desk.dirty(0, 1000);
    let pass = |extents| Action::Pass {
        device: A,
        extents,
        bytes: 30_000 * 512,
        pick: Pick::Any,
        lba: false,
    };
    assert_eq!(desk.step(&[]), [pass(30), pass(30), pass(4)]);
    assert_eq!(desk.controller.mode(A), (Mode::Idle, "no frontend I/O for 1 s"));
    // Busy: nothing before the delay is over and the rate has a balance, then one small pass.
    desk.views[0].frontend_ms = Some(desk.now);
    assert_eq!(desk.step(&[]), []);
    assert_eq!(desk.later(999, &[]), []);
    desk.views[0].frontend_ms = Some(desk.now);
    let actions = desk.later(1, &[]);
    let Some(Action::Pass { extents: 5, bytes, .. }) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!((actions.len(), *bytes), (1, MIB - 1), "a second's worth of the floor");
    // The same device 1 s later is idle again; the baseline keeps to small passes.
    desk.settings.order = WritebackOrder::Lba;
    let actions = desk.later(1000, &[]);
    assert_eq!(passes(&actions).len(), 13, "{actions:?}");
    for action in actions {
        assert!(matches!(action, Action::Pass { extents: 1..=5, bytes: 2_560_000, lba: true, .. }));
    }
}

#[test]
fn a_busy_device_is_limited_by_what_its_passes_took() {
    let mut desk = desk();
    desk.dirty(0, 1000).frontend_ms = Some(desk.now);
    desk.step(&[]);
    desk.views[0].frontend_ms = Some(desk.now + 1000);
    assert_eq!(passes(&desk.later(1000, &[])), [(A, 5)]);
    // Two seconds' worth of the floor was taken: one second of debt, no more.
    assert_eq!(desk.later(0, &[Event::Issued { device: A, bytes: 3 * MIB }]), []);
    desk.views[0].frontend_ms = Some(desk.now + 1100);
    assert_eq!(desk.later(900, &[]), []);
    assert_eq!(passes(&desk.later(200, &[])), [(A, 5)]);
    // What fits one idle pass needs no balance, but the delay.
    desk.dirty(0, 30);
    desk.step(&[Event::Issued { device: A, bytes: 3 * MIB }]);
    desk.views[0].frontend_ms = Some(desk.now + 1000);
    assert_eq!(desk.later(900, &[Event::Issued { device: A, bytes: 3 * MIB }]), []);
    assert_eq!(passes(&desk.later(100, &[])), [(A, 30)]);
}

#[test]
fn overdue_extents_go_whatever_the_rate() {
    let mut desk = desk();
    desk.settings.delay_ms = 3_600_000;
    desk.dirty(0, 1000).frontend_ms = Some(desk.now + 30_000);
    let since = desk.now;
    assert_eq!(desk.step(&[]), []);
    assert_eq!(desk.later(29_999, &[]), []);
    let actions = desk.later(1, &[Event::Issued { device: A, bytes: 100 * MIB }]);
    assert_eq!(passes(&actions).len(), 13);
    let Some(Action::Pass { pick, .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!(*pick, Pick::DirtySince(since));
}

#[test]
fn a_stopped_writeback_runs_above_70_percent() {
    let mut desk = desk();
    desk.settings.running = false;
    desk.dirty(0, 1000);
    assert_eq!(desk.step(&[]), []);
    assert_eq!(desk.controller.mode(A).1, "writeback_running is off");
    desk.used = JOURNAL / 10 * 7;
    assert_eq!(passes(&desk.step(&[])), []);
    desk.used += 1;
    assert_eq!(passes(&desk.step(&[])), [(A, 64)]);
    assert_eq!(desk.controller.mode(A), (Mode::Max, "journal above 70 %"));
    desk.used = 10 * MIB;
    assert_eq!(desk.step(&[]), []);
    // A flush and a writer that waits (for the dirty index) overrule it too.
    desk.views[0].flushing = true;
    assert_eq!(passes(&desk.step(&[])), [(A, 64)]);
    desk.views[0].flushing = false;
    desk.waiting = 1;
    assert_eq!(passes(&desk.step(&[]))[0].0, A);
}

#[test]
fn the_tails_extents_go_first_when_room_is_short() {
    let mut desk = desk();
    desk.used = JOURNAL / 100 * 75;
    desk.dirty(0, 1000);
    desk.dirty(1, 1000).live_seq = Some(100);
    let actions = desk.step(&[]);
    let Some(Action::Pass { device: B, extents: 32, pick, .. }) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!(*pick, Pick::TailFirst(100));
    assert_eq!(passes(&actions)[1], (A, 32));
    desk.used = JOURNAL / 100 * 65;
    assert!(desk.step(&[]).iter().all(|a| matches!(a, Action::Pass { pick: Pick::Any, .. })));
}

#[test]
fn the_next_one_is_served_when_slots_are_scarce() {
    let mut desk = desk();
    desk.dirty(0, 1000).in_flight = 30;
    desk.dirty(1, 1000).in_flight = 25;
    desk.views[2].in_flight = 8;
    let first = passes(&desk.step(&[]));
    let second = passes(&desk.step(&[]));
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_ne!(first[0].0, second[0].0, "round robin");
    desk.views[0].in_flight = 32;
    desk.views[1].in_flight = 32;
    assert_eq!(desk.step(&[]), []);
}

#[test]
fn a_hanging_device_gets_one_slot() {
    let mut desk = desk();
    let now = desk.now;
    let view = desk.dirty(0, 1000);
    (view.in_flight, view.oldest_io_ms) = (1, Some(now - 5000));
    assert_eq!(passes(&desk.step(&[]))[0], (A, 30));
    assert_eq!(desk.later(1, &[]), []);
    assert_eq!(desk.controller.mode(A).1, "an I/O hangs");
}

#[test]
fn backoff_doubles_to_a_minute_and_ends_with_a_success() {
    let mut health = Health::default();
    let mut now = 1_000_000;
    for wait in [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000] {
        health.wrote(now, false);
        // Those that were in flight with it do not lengthen it.
        health.wrote(now + 50, false);
        assert!(health.in_backoff(now + wait - 1), "{wait}");
        assert!(!health.in_backoff(now + wait), "{wait}");
        now += wait;
    }
    assert_eq!(health.errors(), 24);
    assert!(health.is_degraded());
    health.wrote(now, true);
    assert!(!health.is_degraded() && !health.is_failing());
    health.synced(now, false);
    assert!(health.in_backoff(now + 99) && !health.in_backoff(now + 100), "from the start");
    // A page cache that takes every write does not hide that syncs fail.
    for _ in 0..3 {
        now += 60_000;
        health.wrote(now, true);
        assert!(!health.is_degraded());
        health.synced(now, false);
    }
    assert!(health.is_degraded() && health.in_backoff(now + 799));
    health.wrote(now, true);
    assert!(health.is_degraded());
    health.synced(now, true);
    assert!(!health.is_degraded() && !health.in_backoff(now));
}

#[test]
fn one_extent_that_fails_for_three_seconds_degrades() {
    let mut health = Health::default();
    let mut now = 1_000_000;
    for wait in [100, 200, 400, 800, 1600] {
        health.wrote(now, false);
        now += wait;
        assert!(health.is_failing() && !health.is_degraded(), "{wait}");
    }
    health.wrote(now, false);
    assert!(health.is_degraded());
    health.wrote(now, true);
    assert!(!health.is_degraded());
    // Long ago is not for long.
    health.wrote(now + 10_000, false);
    assert!(!health.is_degraded());
}

#[test]
fn a_device_on_trial_gets_one_small_pass() {
    let mut desk = desk();
    desk.dirty(0, 1000);
    assert_eq!(desk.step(&[failed(A)]), []);
    assert_eq!(desk.controller.mode(A).1, "waits after an error");
    assert_eq!(desk.later(99, &[]), []);
    assert_eq!(passes(&desk.later(1, &[])), [(A, 5)]);
    desk.views[0].in_flight = 5;
    assert_eq!(desk.step(&[]), []);
    desk.views[0].in_flight = 0;
    assert_eq!(
        passes(&desk.step(&[Event::Wrote { device: A, ok: true }])),
        [(A, 30), (A, 30), (A, 4)]
    );
    assert_eq!(desk.controller.errors(A), 1);
    desk.step(&[Event::Gone { device: A }]);
    assert_eq!(desk.controller.errors(A), 0);
}

#[test]
fn degraded_devices_have_shares() {
    let mut desk = desk();
    let fail: Vec<Event> = (0..16).map(|_| failed(A)).collect();
    desk.step(&fail[..15]);
    assert!(!desk.controller.is_degraded(A));
    // Failing, not degraded: its writers wait.
    assert_eq!(desk.controller.admit(A, JOURNAL / 4 - 1, 1), Admission::Yes);
    assert_eq!(desk.controller.admit(A, JOURNAL / 4, 1), Admission::Later);
    desk.step(&fail[..1]);
    assert!(desk.controller.is_degraded(A) && !desk.controller.is_degraded(B));
    assert_eq!(desk.controller.admit(A, JOURNAL / 4 - 1, 1), Admission::Yes);
    assert_eq!(desk.controller.admit(A, JOURNAL / 4, 1), Admission::Refused);
    assert_eq!(desk.controller.admit(B, JOURNAL, 1), Admission::Yes);
    let fail: Vec<Event> = (0..16).map(|_| failed(B)).collect();
    desk.views[1].journal_share = JOURNAL / 8 * 3;
    desk.step(&fail);
    assert_eq!(desk.controller.admit(A, JOURNAL / 8 - 1, 1), Admission::Yes);
    assert_eq!(desk.controller.admit(A, JOURNAL / 8, 1), Admission::Refused);
    desk.step(&[Event::Wrote { device: A, ok: true }]);
    assert_eq!(desk.controller.admit(A, JOURNAL, 1), Admission::Yes);
    // Stalling: half of the journal.
    desk.views[0].oldest_io_ms = Some(desk.now - 1001);
    desk.step(&[]);
    assert_eq!(desk.controller.admit(A, JOURNAL / 2 - 1, 1), Admission::Yes);
    assert_eq!(desk.controller.admit(A, JOURNAL / 2, 1), Admission::Later);
}

#[test]
fn a_hang_degrades_only_in_the_way_of_others() {
    let mut desk = desk();
    let now = desk.now;
    let view = &mut desk.views[0];
    (view.in_flight, view.oldest_io_ms, view.live_seq) = (1, Some(now - 6000), Some(7));
    desk.step(&[]);
    assert!(!desk.controller.is_degraded(A), "nobody else has work");
    desk.views[0].live_seq = Some(101);
    desk.dirty(1, 10);
    desk.step(&[]);
    assert!(!desk.controller.is_degraded(A), "it does not hold the tail");
    desk.views[0].live_seq = Some(100);
    desk.step(&[]);
    assert!(desk.controller.is_degraded(A) && !desk.controller.is_degraded(B));
    (desk.views[0].in_flight, desk.views[0].oldest_io_ms) = (0, None);
    desk.step(&[Event::Wrote { device: A, ok: true }]);
    assert!(!desk.controller.is_degraded(A));
    // A sync may take half a minute.
    desk.views[0].syncing = true;
    desk.step(&[]);
    desk.later(30_000, &[]);
    assert!(!desk.controller.is_degraded(A));
    desk.later(1, &[]);
    assert!(desk.controller.is_degraded(A));
}

#[test]
fn copies_forward_only_where_it_helps() {
    let copy = [Action::CopyForward { device: A, up_to: 100 }];
    let mut desk = desk();
    desk.used = JOURNAL / 100 * 60;
    desk.views[0].live_seq = Some(3);
    desk.views[0].journal_share = JOURNAL / 4;
    assert_eq!(desk.step(&[]), [], "it is well");
    assert_eq!(desk.step(&[failed(A)]), copy);
    assert_eq!(desk.later(99, &[]), [], "asked for already");
    assert_eq!(desk.later(1, &[failed(A)]), copy);
    desk.now += 1000;
    let mut no = |change: &dyn Fn(&mut Desk), why: &str| {
        let (used, tail, views) = (desk.used, desk.tail, desk.views);
        change(&mut desk);
        let actions = desk.later(1000, &[]);
        assert!(!actions.contains(&copy[0]), "{why}");
        (desk.used, desk.tail, desk.views) = (used, tail, views);
    };
    no(&|desk| desk.used = JOURNAL / 100 * 50, "there is room");
    no(&|desk| desk.views[1].live_seq = Some(50), "a well device holds it as well");
    no(&|desk| desk.views[0].journal_share = JOURNAL / 100 * 46, "nearly all of it is its own");
    no(&|desk| desk.tail.as_mut().unwrap().is_head = true, "the tail is the head");
    assert_eq!(desk.step(&[]), copy);
    desk.views[0].live_seq = Some(101);
    assert_eq!(desk.step(&[]), [Action::FreeTail { last_seq: 100 }]);
    // A write for more than a second: late only where room is short.
    desk.step(&[Event::Wrote { device: A, ok: true }]);
    desk.views[0].live_seq = Some(100);
    (desk.views[0].in_flight, desk.views[0].oldest_io_ms) = (1, Some(desk.now));
    assert_eq!(desk.later(1001, &[]), []);
    desk.used = JOURNAL / 100 * 71;
    assert_eq!(desk.step(&[]), copy);
}

#[test]
fn the_tail_is_freed_when_room_is_wanted_or_nothing_is_live() {
    let free = [Action::FreeTail { last_seq: 100 }];
    let mut desk = desk();
    desk.views[0].live_seq = Some(101);
    assert_eq!(desk.step(&[]), [], "no need");
    desk.used = JOURNAL / 2 + 1;
    assert_eq!(desk.step(&[]), free);
    assert_eq!(desk.later(99, &[]), [], "asked for already");
    assert_eq!(desk.later(1, &[]), free);
    desk.views[0].live_seq = Some(100);
    assert_eq!(desk.later(1000, &[]), [], "held");
    desk.used = MIB;
    desk.views[0].live_seq = None;
    assert_eq!(desk.step(&[]), free, "an empty journal is clean");
    // The head waits until it was not used for a second.
    desk.tail = Some(Tail { first_seq: 101, last_seq: 120, is_head: true });
    assert_eq!(desk.step(&[]), []);
    assert_eq!(desk.later(999, &[]), []);
    assert_eq!(desk.later(1, &[]), [Action::FreeTail { last_seq: 120 }]);
    desk.tail = Some(Tail { first_seq: 101, last_seq: 121, is_head: true });
    assert_eq!(desk.later(1000, &[]), [], "a record came");
    desk.tail = None;
    assert_eq!(desk.later(1000, &[]), []);
}

#[test]
fn epochs_are_synced_when_there_is_a_reason() {
    let sync = [Action::Sync { device: A }];
    let case = |change: &dyn Fn(&mut Desk)| {
        let mut desk = desk();
        let now = desk.now;
        let view = desk.dirty(0, 1000);
        view.frontend_ms = Some(now);
        (view.written_extents, view.written_since_ms, view.in_flight) = (19_999, now - 29_999, 3);
        change(&mut desk);
        let mut actions = desk.step(&[]);
        actions.retain(|action| matches!(action, Action::Sync { .. }));
        actions
    };
    assert_eq!(case(&|_| {}), []);
    assert_eq!(case(&|desk| desk.views[0].dirty_extents = 0), [], "some are in flight");
    let all_home = |desk: &mut Desk| {
        desk.views[0].dirty_extents = 0;
        desk.views[0].in_flight = 0;
    };
    assert_eq!(case(&all_home), sync);
    assert_eq!(case(&|desk| desk.views[0].written_extents = 20_000), sync);
    assert_eq!(case(&|desk| desk.views[0].written_since_ms -= 1), sync);
    assert_eq!(case(&|desk| desk.used = JOURNAL / 100 * 71), sync);
    assert_eq!(case(&|desk| desk.views[0].live_seq = Some(1)), [], "the tail is not wanted yet");
    let tail_wanted = |desk: &mut Desk| {
        desk.views[0].live_seq = Some(1);
        desk.used = JOURNAL / 100 * 51;
    };
    assert_eq!(case(&tail_wanted), sync);
    let at_once = |desk: &mut Desk| {
        all_home(desk);
        desk.views[0].syncing = true;
    };
    assert_eq!(case(&at_once), [], "one is going on");
    let backoff = |desk: &mut Desk| {
        all_home(desk);
        assert_eq!(desk.step(&[Event::Synced { device: A, ok: false }]), []);
    };
    assert_eq!(case(&backoff), []);
}

#[test]
fn the_rate_is_that_of_bcache() {
    let mut rate = Rate::new();
    let (target, over) = (100 * MIB, 180 * MIB);
    rate.advance(0, over, target);
    assert_eq!(rate.rate(), FLOOR);
    let mut now = 0;
    let mut second = |rate: &mut Rate, dirty, uses| {
        now += 1000;
        if uses {
            rate.spend(2 * rate.rate());
        }
        rate.advance(now, dirty, target);
        rate.rate()
    };
    assert_eq!(second(&mut rate, over, true), 80 * MIB / 40 + 80 * MIB / 10_000);
    assert_eq!(second(&mut rate, over, true), 80 * MIB / 40 + 2 * 80 * MIB / 10_000);
    // A device that does not keep up: the balance fills, the integral stays.
    second(&mut rate, over, false);
    let lagging = second(&mut rate, over, false);
    assert_eq!(second(&mut rate, over, false), lagging);
    // Below the target the integral shrinks, to nothing and no further.
    assert!(second(&mut rate, 60 * MIB, true) < lagging);
    (0..100).for_each(|_| assert!(second(&mut rate, 0, true) >= FLOOR));
    assert_eq!(second(&mut rate, over, true), 80 * MIB / 40 + 80 * MIB / 10_000);
}
