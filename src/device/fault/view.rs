//! One device at one place of the log: what is durable, and what is not.
//!
//! Invariant: `base` plus the durable ones of `changes` is what every crash keeps. A durable
//! change waits in `changes` only behind one that is not: they are applied in log order.

use std::collections::VecDeque;

use super::op::{Fate, Op};
use super::{Event, Left, Records, Synced};
use crate::device::memory::Image;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Durable,
    Doubtful,
}

/// A change that `base` does not have.
#[derive(Clone)]
pub(super) struct Change {
    /// Its place in the log, and its name.
    pub(super) begun: usize,
    pub(super) op: Op,
    done: Option<usize>,
    state: State,
}

impl Change {
    /// Whether a crash may lose it.
    pub(super) fn is_loose(&self) -> bool {
        self.state != State::Durable
    }
}

/// What a crash finds of one device.
#[derive(Clone)]
pub(super) struct View {
    base: Image,
    changes: VecDeque<Change>,
}

impl View {
    pub(super) fn new(image: Image) -> View {
        View { base: image, changes: VecDeque::new() }
    }

    /// What reads see of a device at the end of the log.
    pub(super) fn live(records: &Records, device: usize) -> Image {
        let added = records.devices.get(device);
        let mut view = View::new(added.map(|added| added.image.clone()).unwrap_or_default());
        for (place, event) in records.events.iter().enumerate() {
            if event.device() == Some(device) {
                view.follow(place, event);
            }
        }
        view.image(|change| if change.done.is_some() { Fate::Kept } else { Fate::Lost })
    }

    /// Changes in log order.
    pub(super) fn loose(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| change.is_loose())
    }

    /// The content after a crash that treats what is not durable as `fate` says.
    pub(super) fn image(&self, mut fate: impl FnMut(&Change) -> Fate) -> Image {
        let mut image = self.base.clone();
        for change in &self.changes {
            let fate = if change.is_loose() { fate(change) } else { Fate::Kept };
            change.op.apply(&mut image, fate);
        }
        image
    }

    /// Takes the next event of this device, which stands at `place` of the log.
    pub(super) fn follow(&mut self, place: usize, event: &Event) {
        match event {
            Event::Begin { op, .. } => {
                let (op, state) = (op.clone(), State::Open);
                self.changes.push_back(Change { begun: place, op, done: None, state });
            }
            Event::Done { begun, left, .. } => self.finish(*begun, place, *left),
            Event::SyncBegin => {}
            Event::SyncDone { begun, outcome, .. } => self.synced(*begun, *outcome),
            Event::Replace { image, .. } => {
                // What hangs meanwhile still comes.
                self.changes.retain(|change| change.done.is_none());
                self.base = image.clone();
            }
        }
    }

    fn finish(&mut self, begun: usize, place: usize, left: Left) {
        let Some(at) = self.changes.iter().position(|change| change.begun == begun) else { return };
        let Some(change) = self.changes.get_mut(at) else { return };
        change.done = Some(place);
        match change.op.left(left) {
            Some(op) => change.op = op,
            None => drop(self.changes.remove(at)),
        }
    }

    fn synced(&mut self, begun: usize, outcome: Synced) {
        let covered = |change: &Change| {
            change.state == State::Open && change.done.is_some_and(|done| done < begun)
        };
        let state = match outcome {
            Synced::Durable => State::Durable,
            Synced::Doubtful => State::Doubtful,
            Synced::Dropped => return self.changes.retain(|change| !covered(change)),
        };
        for change in self.changes.iter_mut().filter(|change| covered(change)) {
            change.state = state;
        }
        self.settle();
    }

    /// Moves into `base` what is durable with nothing loose before it. A doubtful change that a
    /// durable one hides is forgotten: otherwise one failed sync would hold up all that follows.
    fn settle(&mut self) {
        while let Some(front) = self.changes.front() {
            if front.state == State::Doubtful {
                let mut later = self.changes.iter().skip(1).filter(|later| !later.is_loose());
                if !later.any(|later| later.op.hides(&front.op)) {
                    return;
                }
            } else if front.state == State::Durable {
                front.op.apply(&mut self.base, Fate::Kept);
            } else {
                return;
            }
            self.changes.pop_front();
        }
    }
}
