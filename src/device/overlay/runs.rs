//! Runs of blocks by their first: what the map's rows are made of.
//!
//! Invariants: runs do not overlap, none is empty, none is `Lower`, and a change leaves no two
//! touching runs of one state. Every change costs the runs it replaces, each in logarithmic time.

use std::collections::BTreeMap;

use super::BlockState;

/// Runs in one state each; what no run covers is `Lower`.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs {
    /// First block: one past the last, and the state.
    by_first: BTreeMap<u64, (u64, BlockState)>,
}

/// Blocks `first..end` in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) state: BlockState,
}

impl Runs {
    pub(super) fn is_empty(&self) -> bool {
        self.by_first.is_empty()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = Run> {
        self.by_first.iter().map(|(first, (end, state))| Run {
            first: *first,
            end: *end,
            state: *state,
        })
    }

    /// The run that begins at this very block.
    pub(super) fn starting_at(&self, first: u64) -> Option<Run> {
        self.by_first.get(&first).map(|(end, state)| Run { first, end: *end, state: *state })
    }

    /// What `block` is in, from there on: the end is that of its run, or where the next one begins.
    pub(super) fn at(&self, block: u64) -> Run {
        if let Some((_, (end, state))) = self.by_first.range(..=block).next_back()
            && block < *end
        {
            return Run { first: block, end: *end, state: *state };
        }
        let next = self.by_first.range(block..).next().map_or(u64::MAX, |(first, _)| *first);
        Run { first: block, end: next, state: BlockState::Lower }
    }

    /// The runs of `first..end`, `Lower` ones too, cut at its ends.
    pub(super) fn within(&self, first: u64, end: u64) -> impl Iterator<Item = Run> {
        let mut at = first;
        std::iter::from_fn(move || {
            let run = self.at(at);
            let run = Run { end: run.end.min(end), ..run };
            let more = at < end;
            at = run.end;
            more.then_some(run)
        })
    }

    /// Puts `first..end` into `state`. `touched` is called with the first block of every run that
    /// came, went or changed; `replaced` with what was there before, as far as it differs.
    pub(super) fn set(
        &mut self,
        first: u64,
        end: u64,
        state: BlockState,
        mut touched: impl FnMut(u64),
        mut replaced: impl FnMut(Run),
    ) {
        let now = self.at(first);
        if first >= end || now.state == state && end <= now.end {
            return;
        }
        let cut_first = self.cut(first);
        if cut_first && let Some((before, _)) = self.by_first.range(..first).next_back() {
            touched(*before);
        }
        let cut_end = self.cut(end);
        while let Some(old) = self.next_from(first).filter(|old| old.first < end) {
            self.by_first.remove(&old.first);
            if !(cut_first && old.first == first) {
                touched(old.first);
            }
            if old.state != state {
                replaced(old);
            }
        }
        let mut new = Run { first, end, state };
        let after = self.starting_at(end).filter(|after| after.state == state);
        if let Some(after) = after {
            self.by_first.remove(&end);
            new.end = after.end;
        }
        // A row that the cut alone has made, and that is gone again, was never there.
        if cut_end != after.is_some() {
            touched(end);
        }
        if state == BlockState::Lower {
            return;
        }
        if let Some((before, (stop, other))) = self.by_first.range(..first).next_back()
            && (*stop, *other) == (first, state)
        {
            new.first = *before;
        }
        self.by_first.insert(new.first, (new.end, state));
        touched(new.first);
    }

    /// Parts the run that lies across `block`, so that one begins there; false if there is none.
    fn cut(&mut self, block: u64) -> bool {
        let across = self.by_first.range_mut(..block).next_back();
        let Some((_, (end, state))) = across.filter(|(_, (end, _))| *end > block) else {
            return false;
        };
        let rest = (std::mem::replace(end, block), *state);
        self.by_first.insert(block, rest);
        true
    }

    /// The first run that begins at or behind `block`.
    pub(super) fn next_from(&self, block: u64) -> Option<Run> {
        let (first, (end, state)) = self.by_first.range(block..).next()?;
        Some(Run { first: *first, end: *end, state: *state })
    }

    /// Adds a run behind all others, as it is; false if it is empty, or not behind them.
    pub(super) fn push(&mut self, run: Run) -> bool {
        let behind = self.by_first.last_key_value().is_none_or(|(_, (end, _))| *end <= run.first);
        let fits = behind && run.first < run.end && run.state != BlockState::Lower;
        if fits {
            self.by_first.insert(run.first, (run.end, run.state));
        }
        fits
    }

    /// A set of blocks: `Upper` stands for "in it".
    pub(super) fn add(&mut self, first: u64, end: u64) {
        self.set(first, end, BlockState::Upper, |_| (), |_| ());
    }

    /// Takes blocks out of a set.
    pub(super) fn subtract(&mut self, first: u64, end: u64) {
        self.set(first, end, BlockState::Lower, |_| (), |_| ());
    }

    /// Adds all blocks of another set.
    pub(super) fn add_all(&mut self, other: &Runs) {
        other.iter().for_each(|run| self.add(run.first, run.end));
    }
}
