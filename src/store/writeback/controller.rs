//! The writeback controller (STORE 4): a function from a snapshot of the world and what happened
//! to what is done next. No thread, no clock, no I/O, no lock: its owner has one.
//!
//! The owner calls `step` every 100 ms, when a writer begins to wait, and after each event; it does
//! the actions before it takes the next snapshot and hands in an `Issued` for each pass. A pass
//! that took something, but less than was granted, is an event as well: there may be more to take.
//!
//! A device's mode: max (flush, journal above 70 %, writers wait), else busy (frontend I/O within
//! the last second), else idle. Its health: see `health`. What a pass may take:
//!
//! | | extents, sectors | how many in one step | when |
//! |---|---|---|---|
//! | on trial (last write failed) | 5, 5000 | one, with none in flight | after the backoff |
//! | max | all slots | while there are slots | always |
//! | idle | 30, 30000 | while there are slots | always |
//! | busy, 30 s old | 5, 5000 | while there are slots | always, only what is that old |
//! | busy, fits one idle pass | 30, 30000 | one | `writeback_delay` over |
//! | busy | 5, 5000 | one | `writeback_delay` over and the rate allows it |
//!
//! `writeback_delay` holds for what fits one idle pass, too: a block that is written again and
//! again would go home each time, and the rate would never matter.
//!
//! Invariants: W1, W2, W4, W5 (tests of their names), the controller's part of W6.

use std::collections::BTreeMap;

use super::health::Health;
use super::rate::Rate;
use super::view::{Action, Admission, DeviceView, Event, Mode, Pick, World};
use crate::config::WritebackOrder;
use crate::journal::Tail;
use crate::units::DeviceId;

/// Extents in a pass of a busy device, and of an idle one.
pub const WRITEBACKS_IN_PASS: usize = 5;
const WRITEBACKS_IN_PASS_IDLE: usize = 30;

const SECTOR: u64 = 512;

/// Bytes in a pass of a busy device, and of an idle one.
pub const WRITESIZE_IN_PASS: u64 = 5000 * SECTOR;
const WRITESIZE_IN_PASS_IDLE: u64 = 30_000 * SECTOR;

/// Home I/Os in flight that any device may have.
pub const SLOTS: usize = 64;

/// Slots beside them that only devices with fewer than `RESERVE_EACH` I/Os get: whoever hangs with
/// all that it could have, alone until then, leaves these to those that come later (W4).
pub const RESERVE: usize = 8;
const RESERVE_EACH: usize = 4;

/// Without frontend I/O for so long a device is idle.
const IDLE_MS: u64 = 1000;

/// The age from which dirty extents (W2), and epochs, wait no longer.
const DEADLINE_MS: u64 = 30_000;

/// An epoch of so many extents is synced.
const EPOCH_EXTENTS: u64 = 20_000;

/// Between syncs, tries to free the same tail, or copies of it, that only a full journal asks for.
const PACE_MS: u64 = 100;

/// Before an unused head is freed.
const PATIENCE_MS: u64 = 1000;

#[derive(Debug)]
struct State {
    health: Health,
    mode: Mode,
    why: &'static str,
    share: u64,
    /// When its last sync was asked for.
    synced_ms: Option<u64>,
    /// The last copy forward: up to where, and when.
    copied: Option<(u64, u64)>,
}

impl State {
    fn new() -> State {
        State {
            health: Health::default(),
            mode: Mode::Busy,
            why: "nothing known yet",
            share: 0,
            synced_ms: None,
            copied: None,
        }
    }
}

/// What one device may be given in one step.
#[derive(Clone, Copy)]
struct Plan {
    extents: usize,
    bytes: u64,
    pick: Pick,
    /// One pass, or as many as there are slots for.
    once: bool,
    /// Only while the rate allows it.
    limited: bool,
}

struct Turn<'a> {
    view: &'a DeviceView,
    plan: Plan,
    left: u64,
    in_flight: usize,
    most: usize,
}

/// The controller. See the module.
#[derive(Debug)]
pub struct Controller {
    devices: BTreeMap<DeviceId, State>,
    rate: Rate,
    limited: bool,
    now_ms: u64,
    journal_bytes: u64,
    /// The journal is above 70 %, or somebody waits.
    pressed: bool,
    /// The journal is above 50 %, or somebody waits.
    filling: bool,
    /// The last device that got a pass.
    cursor: DeviceId,
    /// The tail's last sequence, and since when it is that.
    tail: Option<(u64, u64)>,
    /// The last try to free a tail: which, and when.
    freed: Option<(u64, u64)>,
}

impl Controller {
    /// Knows nothing yet.
    pub fn new() -> Controller {
        Controller {
            devices: BTreeMap::new(),
            rate: Rate::new(),
            limited: false,
            now_ms: 0,
            journal_bytes: 0,
            pressed: false,
            filling: false,
            cursor: DeviceId(0),
            tail: None,
            freed: None,
        }
    }

    /// What is to be done now.
    pub fn step(&mut self, world: &World<'_>, tail: Option<Tail>, events: &[Event]) -> Vec<Action> {
        self.now_ms = world.now_ms;
        self.journal_bytes = world.journal_bytes;
        self.limited = world.settings.percent > 0;
        let waiting = world.waiting_writers > 0;
        self.pressed = waiting || above(world, 70);
        self.filling = waiting || above(world, 50);
        self.note(world, events);
        self.judge(world, tail);
        let mut actions = Vec::new();
        self.free_tail(world, tail, &mut actions);
        self.copy_forward(world, tail, &mut actions);
        self.sync(world, tail, &mut actions);
        self.passes(world, tail, &mut actions);
        actions
    }

    /// A device's mode at the last step, and why, in a few words.
    pub fn mode(&self, id: DeviceId) -> (Mode, &'static str) {
        self.devices.get(&id).map_or((Mode::Idle, "unknown"), |state| (state.mode, state.why))
    }

    /// Whether a device is DEGRADED.
    pub fn is_degraded(&self, id: DeviceId) -> bool {
        self.devices.get(&id).is_some_and(|state| state.health.is_degraded())
    }

    /// Whether a device is failing, hanging or degraded: a flush does not wait for it.
    pub fn is_stuck(&self, id: DeviceId) -> bool {
        self.devices.get(&id).is_some_and(|state| state.health.is_stuck(self.now_ms))
    }

    /// Failed home writes and syncs of a device.
    pub fn errors(&self, id: DeviceId) -> u64 {
        self.devices.get(&id).map_or(0, |state| state.health.errors())
    }

    /// Bytes a second that busy devices may be written home with; 0: as fast as passes go.
    pub fn rate(&self) -> u64 {
        if self.limited { self.rate.rate() } else { 0 }
    }

    /// Whether a write of so many bytes to a device that holds `share` bytes of the journal may go
    /// on (W4): a device that is degraded gets a quarter of the journal, all of them together a
    /// half. One that only fails so far waits there, one that stalls at half of the journal.
    pub fn admit(&self, id: DeviceId, share: u64, bytes: u64) -> Admission {
        let Some(state) = self.devices.get(&id) else { return Admission::Yes };
        let share = share.saturating_add(bytes);
        let (quarter, half) = (self.journal_bytes / 4, self.journal_bytes / 2);
        let sick = |state: &State| state.health.is_degraded() || state.health.is_failing();
        if !sick(state) {
            let stalls = self.devices.len() > 1 && state.health.stalls(self.now_ms);
            return if stalls && share > half { Admission::Later } else { Admission::Yes };
        }
        let others = self.devices.iter().filter(|(other, state)| **other != id && sick(state));
        let all = others.fold(share, |sum, (_, state)| sum.saturating_add(state.share));
        match share <= quarter && all <= half {
            true => Admission::Yes,
            false if state.health.is_degraded() => Admission::Refused,
            false => Admission::Later,
        }
    }

    fn note(&mut self, world: &World<'_>, events: &[Event]) {
        let now = self.now_ms;
        for event in events {
            match *event {
                Event::Issued { device, bytes } => {
                    if self.mode(device).0 == Mode::Busy {
                        self.rate.spend(bytes);
                    }
                }
                // Of a device that is gone there is nothing to know: it would stay here for ever.
                Event::Wrote { device, .. } | Event::Synced { device, .. }
                    if !self.devices.contains_key(&device)
                        && world.devices.iter().all(|view| view.id != device) => {}
                Event::Wrote { device, ok } => self.state(device).health.wrote(now, ok),
                Event::Synced { device, ok } => self.state(device).health.synced(now, ok),
                Event::Gone { device } => {
                    self.devices.remove(&device);
                }
            }
        }
    }

    fn state(&mut self, id: DeviceId) -> &mut State {
        self.devices.entry(id).or_insert_with(State::new)
    }

    /// Modes, health, and the rate.
    fn judge(&mut self, world: &World<'_>, tail: Option<Tail>) {
        let (now, pressed, waiting) = (self.now_ms, self.pressed, world.waiting_writers > 0);
        for view in world.devices {
            let idle = view.frontend_ms.is_none_or(|last| now.saturating_sub(last) >= IDLE_MS);
            let state = self.state(view.id);
            state.health.observe(now, view.oldest_io_ms, view.syncing);
            state.share = view.journal_share;
            (state.mode, state.why) = match () {
                () if world.flushing_all || view.flushing => (Mode::Max, "flush"),
                () if waiting => (Mode::Max, "writers wait for room"),
                () if pressed => (Mode::Max, "journal above 70 %"),
                () if idle => (Mode::Idle, "no frontend I/O for 1 s"),
                () => (Mode::Busy, "frontend I/O"),
            };
            if state.health.is_degraded() {
                state.why = "degraded";
            } else if state.health.in_backoff(now) {
                state.why = "waits after an error";
            } else if state.health.hangs(now) {
                state.why = "an I/O hangs";
            } else if !world.settings.running && state.mode != Mode::Max {
                state.why = "writeback_running is off";
            }
        }
        let well = || world.devices.iter().filter(|view| !self.is_stuck(view.id));
        let dirty: u64 = well().map(|view| view.dirty_bytes).sum();
        let others_work = dirty > 0 || (waiting && well().next().is_some());
        self.rate.advance(now, dirty, world.journal_bytes / 100 * world.settings.percent);
        if others_work {
            for view in world.devices.iter().filter(|view| holds(view, tail)) {
                self.state(view.id).health.in_the_way(now);
            }
        }
        self.tail = tail.map(|tail| match self.tail {
            Some((last_seq, since)) if last_seq == tail.last_seq => (last_seq, since),
            _ => (tail.last_seq, now),
        });
    }

    /// Nothing live is in the tail, and its room is wanted; or nothing is live at all: an empty
    /// journal becomes really empty, so that it is clean.
    fn free_tail(&mut self, world: &World<'_>, tail: Option<Tail>, actions: &mut Vec<Action>) {
        let Some(tail) = tail else { return };
        if world.devices.iter().any(|view| holds(view, Some(tail))) {
            return;
        }
        let unused =
            self.tail.is_some_and(|(_, since)| self.now_ms.saturating_sub(since) >= PATIENCE_MS);
        let empty = world.devices.iter().all(|view| view.live_seq.is_none())
            && (!tail.is_head || unused || world.flushing_all);
        let again = self.freed.is_some_and(|(last_seq, when)| {
            last_seq == tail.last_seq && self.now_ms.saturating_sub(when) < PACE_MS
        });
        if (self.filling || empty) && !again {
            self.freed = Some((tail.last_seq, self.now_ms));
            actions.push(Action::FreeTail { last_seq: tail.last_seq });
        }
    }

    /// Whether the tail does not wait for a device: it is stuck; where room is short, it stalls.
    fn is_late(&self, id: DeviceId) -> bool {
        let stalls = |state: &State| self.pressed && state.health.stalls(self.now_ms);
        self.is_stuck(id) || self.devices.get(&id).is_some_and(stalls)
    }

    /// Only late devices hold the tail: their records go to the head, so that the others go on.
    /// Not if nearly everything is theirs: then copying frees nothing.
    fn copy_forward(&mut self, world: &World<'_>, tail: Option<Tail>, actions: &mut Vec<Action>) {
        let Some(tail) = tail.filter(|tail| self.filling && !tail.is_head) else { return };
        let holders = || world.devices.iter().filter(|view| holds(view, Some(tail)));
        let late = |view: &DeviceView| self.is_late(view.id);
        let share = world.devices.iter().filter(|view| late(view)).map(|view| view.journal_share);
        if !holders().all(late) || share.sum::<u64>() > world.journal_used / 4 * 3 {
            return;
        }
        let now = self.now_ms;
        for view in holders() {
            let state = self.state(view.id);
            let again = state.copied.is_some_and(|(up_to, when)| {
                up_to == tail.last_seq && now.saturating_sub(when) < PACE_MS
            });
            if !again {
                state.copied = Some((tail.last_seq, now));
                actions.push(Action::CopyForward { device: view.id, up_to: tail.last_seq });
            }
        }
    }

    fn sync(&mut self, world: &World<'_>, tail: Option<Tail>, actions: &mut Vec<Action>) {
        let (now, pressed, filling) = (self.now_ms, self.pressed, self.filling);
        for view in world.devices {
            let state = self.state(view.id);
            let left_alone = state.health.in_backoff(now) || state.health.hangs(now);
            if view.written_extents == 0 || view.syncing || left_alone {
                continue;
            }
            let all_home = view.dirty_extents == 0 && view.in_flight == 0;
            let old = now.saturating_sub(view.written_since_ms) >= DEADLINE_MS;
            // The head is everybody's tail in a journal of one segment: only room wanted counts.
            let wanted = pressed || (filling && holds(view, tail));
            let rested = state.synced_ms.is_none_or(|last| now.saturating_sub(last) >= PACE_MS);
            if all_home || old || view.written_extents >= EPOCH_EXTENTS || (wanted && rested) {
                state.synced_ms = Some(now);
                actions.push(Action::Sync { device: view.id });
            }
        }
    }

    /// What a device may be given now, as if it were alone.
    fn plan(&self, world: &World<'_>, tail: Option<Tail>, view: &DeviceView) -> Option<Plan> {
        let state = self.devices.get(&view.id)?;
        let (now, settings) = (self.now_ms, world.settings);
        let stopped = !settings.running && state.mode != Mode::Max;
        if view.dirty_extents == 0 || stopped || state.health.in_backoff(now) {
            return None;
        }
        let tail = tail.filter(|_| self.pressed && holds(view, tail));
        let pick = tail.map_or(Pick::Any, |tail| Pick::TailFirst(tail.last_seq));
        let (extents, bytes) = (WRITEBACKS_IN_PASS, WRITESIZE_IN_PASS);
        let small = Plan { extents, bytes, pick, once: true, limited: false };
        let (extents, bytes) = (WRITEBACKS_IN_PASS_IDLE, WRITESIZE_IN_PASS_IDLE);
        let large = Plan { extents, bytes, pick, once: false, limited: false };
        if state.health.is_on_trial() {
            return (view.in_flight == 0).then_some(small);
        }
        let age = now.saturating_sub(view.dirty_since_ms);
        let fits = view.dirty_extents <= extents as u64 && view.dirty_bytes <= bytes;
        match state.mode {
            Mode::Max => Some(Plan { extents: SLOTS, bytes: u64::MAX, ..large }),
            Mode::Idle => Some(large),
            Mode::Busy if age >= DEADLINE_MS => {
                let pick = Pick::DirtySince(now - DEADLINE_MS);
                Some(Plan { once: false, pick, ..small })
            }
            Mode::Busy if age < settings.delay_ms => None,
            Mode::Busy if fits => Some(Plan { once: true, ..large }),
            Mode::Busy => {
                let limited = settings.percent > 0;
                (!limited || self.rate.balance() > 0).then_some(Plan { limited, ..small })
            }
        }
    }

    fn passes(&mut self, world: &World<'_>, tail: Option<Tail>, actions: &mut Vec<Action>) {
        let plans =
            world.devices.iter().filter_map(|view| Some((view, self.plan(world, tail, view)?)));
        let mut turns: Vec<Turn<'_>> = plans
            .map(|(view, plan)| Turn {
                view,
                plan,
                left: view.dirty_extents,
                in_flight: view.in_flight,
                most: SLOTS,
            })
            .collect();
        let alone = turns.len() == 1;
        for turn in &mut turns {
            let hangs =
                self.devices.get(&turn.view.id).is_some_and(|s| s.health.hangs(self.now_ms));
            turn.most = match () {
                () if hangs => 1,
                () if alone => SLOTS,
                () => SLOTS / 2,
            };
        }
        // Round robin from behind the last one served; whoever holds the tail comes first.
        let (pressed, cursor) = (self.pressed, self.cursor);
        turns.sort_by_key(|turn| {
            let id = turn.view.id;
            (!(pressed && holds(turn.view, tail)), id <= cursor, id)
        });
        let mut free = (SLOTS + RESERVE).saturating_sub(world.in_flight);
        let mut budget = self.rate.balance();
        let lba = world.settings.order == WritebackOrder::Lba;
        loop {
            let before = actions.len();
            for turn in &mut turns {
                if let Some(pass) = turn.take(&mut free, &mut budget, lba) {
                    self.cursor = turn.view.id;
                    actions.push(pass);
                }
            }
            turns.retain(|turn| turn.left > 0);
            if actions.len() == before {
                return;
            }
        }
    }
}

impl Turn<'_> {
    fn take(&mut self, free: &mut usize, budget: &mut i64, lba: bool) -> Option<Action> {
        let shared = free.saturating_sub(RESERVE);
        let own = RESERVE_EACH.saturating_sub(self.in_flight).min(*free);
        let slots = shared.max(own).min(self.most.saturating_sub(self.in_flight));
        if slots == 0 || (self.plan.limited && *budget <= 0) {
            return None;
        }
        let (mut extents, mut bytes) = (self.plan.extents, self.plan.bytes);
        if lba {
            extents = extents.min(WRITEBACKS_IN_PASS);
            bytes = bytes.min(WRITESIZE_IN_PASS);
        }
        if self.plan.limited {
            bytes = bytes.min(*budget as u64);
            *budget -= bytes.min(self.view.dirty_bytes) as i64;
        }
        extents = extents.min(slots).min(usize::try_from(self.left).unwrap_or(slots));
        self.left = if self.plan.once { 0 } else { self.left - extents as u64 };
        self.in_flight += extents;
        *free -= extents;
        let (device, pick) = (self.view.id, self.plan.pick);
        Some(Action::Pass { device, extents, bytes, pick, lba })
    }
}

impl Default for Controller {
    fn default() -> Controller {
        Controller::new()
    }
}

fn above(world: &World<'_>, percent: u64) -> bool {
    u128::from(world.journal_used) * 100 > u128::from(world.journal_bytes) * u128::from(percent)
}

/// Whether the tail cannot be freed because of this device.
fn holds(view: &DeviceView, tail: Option<Tail>) -> bool {
    tail.is_some_and(|tail| view.live_seq.is_some_and(|seq| seq <= tail.last_seq))
}
