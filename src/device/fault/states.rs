//! The crash states of a log: for every place of it (a cut), what the devices may hold after it.
//!
//! At each cut there are, without repetition: nothing of what is loose kept; all kept; each alone;
//! all but each (past a bound: the newest, the oldest and random ones); all of one device and
//! nothing of the others, and the reverse; what arrived in order up to a random place; the newest
//! change torn in every way and others torn in random ways; random subsets, partly torn. All of it
//! follows from the log, the seed, the bounds and the cut, so one cut can be tried alone.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::op::{Fate, Op, Part};
use super::random::Random;
use super::view::View;
use super::{Event, FaultDevice, FaultLog, Records};
use crate::device::memory::Image;

/// The ways in which the newest change is torn.
const PARTS: [Part; 6] =
    [Part::First, Part::Last, Part::ButFirst, Part::ButLast, Part::Size, Part::Inside];

/// Changes named in a message; more of them would hide it.
const NAMED: usize = 24;

impl Event {
    /// The device whose view it moves.
    pub(super) fn device(&self) -> Option<usize> {
        match self {
            Event::Begin { device, .. }
            | Event::Done { device, .. }
            | Event::SyncDone { device, .. }
            | Event::Replace { device, .. } => Some(*device),
            Event::SyncBegin => None,
        }
    }

    /// Whether a crash right after it may leave what a crash before it could not, or no longer
    /// what it could.
    fn matters(&self) -> bool {
        match self {
            Event::Begin { .. } | Event::SyncDone { .. } | Event::Replace { .. } => true,
            Event::Done { left, .. } => *left != super::Left::All,
            Event::SyncBegin => false,
        }
    }
}

/// A change that a crash at this cut may lose.
struct Loose {
    device: usize,
    begun: usize,
    op: Op,
}

type Plan = Vec<Fate>;

/// Goes through the crash states of a log, cut by cut. The log may go on meanwhile; what came
/// after `new` is not seen.
pub struct CrashStates {
    records: Arc<Records>,
    seed: u64,
    each: usize,
    random: usize,
    at_most: usize,
    last: usize,
    views: Vec<View>,
    /// The cut whose plans are being given out, and the next one.
    cut: usize,
    next: usize,
    loose: Arc<Vec<Loose>>,
    plans: VecDeque<Plan>,
    given: usize,
}

impl CrashStates {
    /// All crash states of the log so far, chosen by `seed`.
    pub fn new(log: &FaultLog, seed: u64) -> CrashStates {
        let records = log.records.lock().clone();
        let views = records.devices.iter().map(|added| View::new(added.image.clone())).collect();
        CrashStates {
            seed,
            each: 64,
            random: 8,
            at_most: usize::MAX,
            last: records.events.len(),
            views,
            cut: 0,
            next: 0,
            loose: Arc::default(),
            plans: VecDeque::new(),
            given: 0,
            records: Arc::new(records),
        }
    }

    /// At most this many changes are tried alone, and left out alone, at each cut (64).
    pub fn each(mut self, each: usize) -> CrashStates {
        self.each = each;
        self
    }

    /// This many random subsets at each cut (8).
    pub fn random(mut self, random: usize) -> CrashStates {
        self.random = random;
        self
    }

    /// At most this many states at each cut, for recoveries that take long: nothing kept, all kept,
    /// and a random choice of the others (all).
    pub fn at_most(mut self, states: usize) -> CrashStates {
        self.at_most = states;
        self
    }

    /// Only this cut: to try again what a message named.
    pub fn only(mut self, cut: usize) -> CrashStates {
        self.last = cut.min(self.last);
        self.advance_to(self.last);
        self.next = self.last;
        self
    }

    fn advance_to(&mut self, cut: usize) {
        let records = self.records.clone();
        while let Some(event) = records.events.get(self.cut).filter(|_| self.cut < cut) {
            if let Some(view) = event.device().and_then(|device| self.views.get_mut(device)) {
                view.follow(self.cut, event);
            }
            self.cut += 1;
        }
    }

    /// Makes the plans of the next cut that matters; false at the end.
    fn next_cut(&mut self) -> bool {
        while self.next <= self.last {
            let cut = self.next;
            self.next += 1;
            self.advance_to(cut);
            let event = cut.checked_sub(1).and_then(|before| self.records.events.get(before));
            if cut == self.last || event.is_none_or(Event::matters) {
                self.loose = Arc::new(self.loose_now());
                self.plans = self.plans_now();
                self.given = 0;
                return true;
            }
        }
        false
    }

    fn loose_now(&self) -> Vec<Loose> {
        let mut loose = Vec::new();
        for (device, view) in self.views.iter().enumerate() {
            let changes = view.loose();
            loose.extend(changes.map(|change| Loose {
                device,
                begun: change.begun,
                op: change.op.clone(),
            }));
        }
        loose.sort_by_key(|loose| loose.begun);
        loose
    }

    fn plans_now(&self) -> VecDeque<Plan> {
        let mut random = Random::new(self.seed ^ (self.cut as u64).rotate_left(32));
        let all = self.loose.len();
        let mut plans = Plans::default();
        plans.add(vec![Fate::Lost; all]);
        plans.add(vec![Fate::Kept; all]);
        for one in chosen(all, self.each, &mut random) {
            plans.add_but(all, Fate::Lost, one, Fate::Kept);
            plans.add_but(all, Fate::Kept, one, Fate::Lost);
        }
        for device in 0..self.views.len() {
            for (own, others) in [(Fate::Kept, Fate::Lost), (Fate::Lost, Fate::Kept)] {
                let of = |loose: &Loose| if loose.device == device { own } else { others };
                plans.add(self.loose.iter().map(of).collect());
            }
        }
        self.plan_torn(&mut plans, &mut random);
        for _ in 0..self.random.div_ceil(4) {
            let arrived = random.below(all as u64 + 1) as usize;
            let of = |at| if at < arrived { Fate::Kept } else { Fate::Lost };
            plans.add((0..all).map(of).collect());
        }
        for _ in 0..self.random {
            let eighths = [2, 4, 6][random.below(3) as usize];
            plans
                .add(self.loose.iter().map(|l| random_fate(&l.op, eighths, &mut random)).collect());
        }
        plans.thinned(self.at_most, &mut random)
    }

    fn plan_torn(&self, plans: &mut Plans, random: &mut Random) {
        let can_tear = |at: &usize| self.loose.get(*at).is_some_and(|loose| loose.op.can_tear());
        let all = self.loose.len();
        let Some(newest) = (0..all).rev().find(can_tear) else { return };
        for part in PARTS {
            plans.add_but(all, Fate::Kept, newest, Fate::Torn(part));
        }
        for others in [Fate::Kept, Fate::Lost, Fate::Kept, Fate::Lost] {
            plans.add_but(all, others, newest, Fate::Torn(Part::Some(random.bits())));
            let one = random.below(all as u64) as usize;
            if can_tear(&one) {
                plans.add_but(all, others, one, Fate::Torn(random_part(random)));
            }
        }
    }

    fn state(&self, plan: Plan) -> CrashState {
        let fate = |begun: &usize| {
            let at = self.loose.binary_search_by_key(begun, |loose| loose.begun);
            at.ok().and_then(|at| plan.get(at)).copied().unwrap_or(Fate::Lost)
        };
        let images = self.views.iter().map(|view| view.image(|change| fate(&change.begun)));
        let images = images.collect();
        CrashState {
            cut: self.cut,
            number: self.given,
            seed: self.seed,
            images,
            records: self.records.clone(),
            loose: self.loose.clone(),
            plan,
        }
    }
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        while self.plans.is_empty() {
            if !self.next_cut() {
                return None;
            }
        }
        let plan = self.plans.pop_front()?;
        self.given += 1;
        Some(self.state(plan))
    }
}

/// Plans in the order they were thought of, each once.
#[derive(Default)]
struct Plans {
    seen: HashSet<Plan>,
    in_order: VecDeque<Plan>,
}

impl Plans {
    fn add(&mut self, plan: Plan) {
        if self.seen.insert(plan.clone()) {
            self.in_order.push_back(plan);
        }
    }

    /// The first two, and random ones of the rest.
    fn thinned(mut self, at_most: usize, random: &mut Random) -> VecDeque<Plan> {
        while self.in_order.len() > at_most.max(2) {
            let one = 2 + random.below(self.in_order.len() as u64 - 2) as usize;
            self.in_order.remove(one);
        }
        self.in_order
    }

    /// All `others`, but one.
    fn add_but(&mut self, all: usize, others: Fate, one: usize, fate: Fate) {
        self.add((0..all).map(|at| if at == one { fate } else { others }).collect());
    }
}

/// At most `limit` numbers below `all`: the newest, the oldest, and random ones.
fn chosen(all: usize, limit: usize, random: &mut Random) -> Vec<usize> {
    if all <= limit {
        return (0..all).rev().collect();
    }
    let mut chosen = vec![all - 1, 0];
    chosen.extend((2..limit).map(|_| random.below(all as u64) as usize));
    chosen.truncate(limit);
    chosen
}

fn random_part(random: &mut Random) -> Part {
    let at = random.below(2 * PARTS.len() as u64) as usize;
    PARTS.get(at).copied().unwrap_or_else(|| Part::Some(random.bits()))
}

fn random_fate(op: &Op, eighths: u64, random: &mut Random) -> Fate {
    if random.below(8) >= eighths {
        Fate::Lost
    } else if op.can_tear() && random.below(8) == 0 {
        Fate::Torn(random_part(random))
    } else {
        Fate::Kept
    }
}

/// What the devices hold after one crash. Dropped by a panicking test, it prints itself.
pub struct CrashState {
    /// Events of the log that had happened.
    pub cut: usize,
    /// Its number among the states of its cut, from 1.
    pub number: usize,
    seed: u64,
    images: Vec<Image>,
    records: Arc<Records>,
    loose: Arc<Vec<Loose>>,
    plan: Plan,
}

impl CrashState {
    /// What this device holds (nothing if it is of another log).
    pub fn image(&self, device: &FaultDevice) -> Image {
        self.images.get(device.number()).cloned().unwrap_or_default()
    }

    /// What the devices hold, by their numbers.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Devices of a new log that hold this, in the order of the old ones: a recovery over them can
    /// be crashed in turn.
    pub fn power_on(&self) -> (FaultLog, Vec<Arc<FaultDevice>>) {
        let log = FaultLog::new();
        let named = self.records.devices.iter().zip(&self.images);
        let devices = named.map(|(added, image)| log.add(&added.name, image.clone())).collect();
        (log, devices)
    }
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.records.events.len();
        write!(f, "seed {:#x}, cut {} of {all}, state {}", self.seed, self.cut, self.number)?;
        let left_out = self.plan.len().saturating_sub(NAMED);
        if left_out > 0 {
            write!(f, "; {left_out} older changes not shown")?;
        }
        for (loose, fate) in self.loose.iter().zip(&self.plan).skip(left_out) {
            let added = self.records.devices.get(loose.device);
            let name = added.map_or("?", |added| &*added.name);
            write!(f, "; {name}: {} {fate:?}", loose.op)?;
        }
        Ok(())
    }
}

impl fmt::Debug for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Drop for CrashState {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("crash state: {self}");
        }
    }
}
