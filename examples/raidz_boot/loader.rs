//! The loader's cache of 2011 as a model: a request of more than half the cache is bypassed, every
//! block of any other is looked up once, the missing ones are read and inserted, the oldest
//! insertion goes first (a hit changes nothing: a FIFO). Its two seconds' expiry needs a clock
//! and is left out.

use std::collections::{HashSet, VecDeque};

use crate::{Outcome, Request};

pub struct Loader {
    blocks: u64,
    /// The patch: blocks know their unit. Without it another unit empties the cache.
    tags: bool,
    unit: Option<u32>,
    held: HashSet<(u32, u64)>,
    order: VecDeque<(u32, u64)>,
    pub outcome: Outcome,
}

impl Loader {
    pub fn new(blocks: u64, tags: bool) -> Loader {
        let (held, order) = (HashSet::new(), VecDeque::new());
        Loader { blocks, tags, unit: None, held, order, outcome: Outcome::default() }
    }

    pub fn read(&mut self, request: Request) {
        if !self.tags && self.unit != Some(request.unit) {
            self.held.clear();
            self.order.clear();
            self.unit = Some(request.unit);
        }
        if request.blocks * 2 > self.blocks {
            self.outcome.bypasses += 1;
            return;
        }
        let wanted = (request.first..request.first + request.blocks).map(|b| (request.unit, b));
        let missing: Vec<_> = wanted.filter(|key| !self.held.contains(key)).collect();
        self.outcome.misses += missing.len() as u64;
        self.outcome.hits += request.blocks - missing.len() as u64;
        for key in missing {
            if self.order.len() as u64 == self.blocks
                && let Some(oldest) = self.order.pop_front()
            {
                self.held.remove(&oldest);
            }
            self.order.push_back(key);
            self.held.insert(key);
        }
    }
}
