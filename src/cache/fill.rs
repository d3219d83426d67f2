//! Reads that miss. An admitted request (or a read-ahead) goes through four steps:
//! 1. look up, ascending: resident blocks are copied, blocks in flight joined, maximal runs of
//!    the others become flights of our own;
//! 2. fetch our runs, no lock held;
//! 3. settle, ascending: EVERY block of the request is touched in order, hits promoted and misses
//!    inserted, so the order does not depend on what hit (C1). A hit that our own insertions have
//!    pushed out since step 1 is inserted again, unless bytes of its shard changed meanwhile;
//! 4. land our flights, then wait for the joined ones: nobody who waits owns a flight in the air.
//!
//! A panic of the source drops `Fill`, which lands what is left as failed.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::device::{CacheDevice, Gone};
use super::flight::{Failure, Flight, Landed};
use super::shard::Key;
use super::{Cache, Fetch, Span, Verdict};
use crate::clock;
use crate::error::Result;
use crate::sys::AlignedBuf;

/// Two runs of a request that is not inserted become one read if at most this many bytes of
/// resident blocks lie between them. Closing gaps keeps C1: fewer misses never read more.
const GAP_BYTES: u64 = 64 << 10;

/// Why a fill happens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A request.
    Demand,
    /// A request whose joined flight failed for a run larger than itself: counted already.
    Again,
    /// Read-ahead.
    Ahead,
}

/// One of our own flights.
struct Run {
    flight: Arc<Flight>,
    end: u64,
    /// The bytes, where they do not lie in the request's own buffer.
    own: Option<AlignedBuf>,
    failure: Option<Failure>,
}

struct Fill<'a> {
    cache: &'a Cache,
    dev: &'a CacheDevice,
    span: Span,
    out: &'a mut [u8],
    expire_ms: u64,
    now: u32,
    /// Of the oldest block that hit.
    age_ms: u32,
    purpose: Purpose,
    /// Ascending; emptied when they land.
    runs: Vec<Run>,
    /// Ascending.
    joined: Vec<(u64, Arc<Flight>)>,
    /// Of each group, the shard's version in step 1.
    versions: Vec<u64>,
    /// First and last block whole, if they hit and the request covers a part only.
    edges: Vec<(u64, Vec<u8>)>,
}

impl Cache {
    /// An admitted read, or a read-ahead.
    pub(super) fn fill(
        &self,
        dev: &CacheDevice,
        offset: u64,
        out: &mut [u8],
        expire_ms: u64,
        source: &dyn Fetch,
        purpose: Purpose,
    ) -> Result<()> {
        let span = Span::new(offset, out.len(), self.shift);
        let mut fill = Fill {
            cache: self,
            dev,
            span,
            out,
            expire_ms,
            now: clock::now_ms() as u32,
            age_ms: 0,
            purpose,
            runs: Vec::new(),
            joined: Vec::new(),
            versions: Vec::new(),
            edges: Vec::new(),
        };
        fill.look_up();
        fill.fetch(source);
        fill.settle();
        let failure = fill.land();
        if purpose == Purpose::Ahead {
            return Ok(());
        }
        match failure {
            Some(failure) => Err(failure.into()),
            None => fill.wait(source),
        }
    }

    /// A read that is not admitted: what is resident is promoted and copied, the rest is read
    /// past the cache.
    pub(super) fn read_around(
        &self,
        dev: &CacheDevice,
        verdict: Verdict,
        offset: u64,
        out: &mut [u8],
        expire_ms: u64,
        source: &dyn Fetch,
    ) -> Result<()> {
        let span = Span::new(offset, out.len(), self.shift);
        let now = clock::now_ms() as u32;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let (mut found, mut used) = (0, 0);
        for (first, end) in span.groups() {
            let mut shard = self.shard(dev.id, first).lock();
            for block in first..end {
                let piece = span.piece(block);
                let target = &mut out[piece.out..piece.out + piece.len];
                match shard.hit(Key::new(dev.id, block), piece.at, target, now, expire_ms) {
                    Some(ahead) => {
                        found += 1;
                        used += u64::from(ahead);
                    }
                    None => match runs.last_mut() {
                        Some(run) if run.1 == block => run.1 += 1,
                        _ => runs.push((block, block + 1)),
                    },
                }
            }
        }
        dev.count_used(used);
        dev.stats.bypass_hits.fetch_add(found, Relaxed);
        self.count_bypassed(dev, verdict, span.blocks());
        for pieces in runs.chunk_by(|a, b| (b.0 - a.1) << self.shift <= GAP_BYTES) {
            let whole = (pieces[0].0, pieces[pieces.len() - 1].1);
            if self.fetch_run(dev, span, whole, out, source).is_err() {
                // Perhaps only a block between failed, and that one is here.
                for &run in pieces {
                    self.fetch_run(dev, span, run, out, source)?;
                }
            }
        }
        Ok(())
    }

    /// Reads blocks `run` into their place in `out`.
    fn fetch_run(
        &self,
        dev: &CacheDevice,
        span: Span,
        run: (u64, u64),
        out: &mut [u8],
        source: &dyn Fetch,
    ) -> Result<()> {
        if let Some(target) = inside(span, run, out) {
            return self.fetch(dev, run.0, target, source);
        }
        let mut own = AlignedBuf::lend(((run.1 - run.0) << self.shift) as usize);
        self.fetch(dev, run.0, &mut own, source)?;
        copy_out(span, run, &own, out);
        Ok(())
    }

    fn fetch(
        &self,
        dev: &CacheDevice,
        first: u64,
        buf: &mut [u8],
        source: &dyn Fetch,
    ) -> Result<()> {
        dev.stats.backing_reads.fetch_add(1, Relaxed);
        let got = source.fetch(first << self.shift, buf)?.min(buf.len());
        dev.stats.backing_blocks.fetch_add((got as u64).div_ceil(1 << self.shift), Relaxed);
        buf[got..].fill(0);
        Ok(())
    }
}

/// The part of `out` that `run` fills whole, if it does and direct I/O could go there.
fn inside(span: Span, run: (u64, u64), out: &mut [u8]) -> Option<&mut [u8]> {
    let at = (run.0 << span.shift).checked_sub(span.offset)? as usize;
    let len = ((run.1 - run.0) << span.shift) as usize;
    let target = out.get_mut(at..at + len)?;
    (target.as_ptr() as usize).is_multiple_of(4096).then_some(target)
}

fn copy_out(span: Span, run: (u64, u64), own: &[u8], out: &mut [u8]) {
    let (first, last) = (span.piece(run.0), span.piece(run.1 - 1));
    let len = last.out + last.len - first.out;
    out[first.out..first.out + len].copy_from_slice(&own[first.at..first.at + len]);
}

impl Fill<'_> {
    fn look_up(&mut self) {
        // Before anything of ours is in the air: `drop_blocks` relies on it.
        self.dev.top.fetch_max(self.span.end, SeqCst);
        let block_size = 1usize << self.span.shift;
        let mut open = false;
        for (first, end) in self.span.groups() {
            let mut shard = self.cache.shard(self.dev.id, first).lock();
            self.versions.push(shard.version);
            for block in first..end {
                let key = Key::new(self.dev.id, block);
                if let Some((bytes, stamp)) = shard.peek(key, self.now, self.expire_ms) {
                    self.age_ms = self.age_ms.max(self.now.wrapping_sub(stamp));
                    let piece = self.span.piece(block);
                    let part = &bytes[piece.at..piece.at + piece.len];
                    self.out[piece.out..piece.out + piece.len].copy_from_slice(part);
                    if piece.len < block_size {
                        self.edges.push((block, bytes.to_vec()));
                    }
                    open = false;
                } else if let Some(flight) = shard.flights.get(&key) {
                    flight.join();
                    self.joined.push((block, Arc::clone(flight)));
                    open = false;
                } else {
                    if !open {
                        let flight = Arc::new(Flight::new(block));
                        self.runs.push(Run { flight, end: block, own: None, failure: None });
                        open = true;
                    }
                    if let Some(run) = self.runs.last_mut() {
                        run.end = block + 1;
                        shard.flights.insert(key, Arc::clone(&run.flight));
                    }
                }
            }
        }
        if self.purpose == Purpose::Demand {
            let missed: u64 = self.runs.iter().map(|run| run.end - run.flight.first).sum();
            self.dev.stats.misses.fetch_add(missed, Relaxed);
            self.dev.stats.hits.fetch_add(self.span.blocks() - missed, Relaxed);
        }
    }

    fn fetch(&mut self, source: &dyn Fetch) {
        for i in 0..self.runs.len() {
            let (first, end) = (self.runs[i].flight.first, self.runs[i].end);
            let result = match inside(self.span, (first, end), self.out) {
                Some(target) => self.cache.fetch(self.dev, first, target, source),
                None => {
                    let mut own = AlignedBuf::lend(((end - first) << self.span.shift) as usize);
                    let result = self.cache.fetch(self.dev, first, &mut own, source);
                    if result.is_ok() {
                        copy_out(self.span, (first, end), &own, self.out);
                        self.runs[i].own = Some(own);
                    }
                    result
                }
            };
            self.runs[i].failure = result.err().map(Failure::from);
        }
    }

    fn settle(&mut self) {
        let block_size = 1usize << self.span.shift;
        let ahead = self.purpose == Purpose::Ahead;
        let mut gone = Gone::default();
        let mut runs = self.runs.iter().peekable();
        let (mut used, mut fetched) = (0, 0);
        for ((first, end), version) in self.span.groups().zip(&self.versions) {
            let mut shard = self.cache.shard(self.dev.id, first).lock();
            for block in first..end {
                let key = Key::new(self.dev.id, block);
                while runs.next_if(|run| run.end <= block).is_some() {}
                if let Some(run) = runs.peek().filter(|run| run.flight.first <= block) {
                    let ours = |flight: &Arc<Flight>| Arc::ptr_eq(flight, &run.flight);
                    if !shard.flights.get(&key).is_some_and(ours) {
                        continue;
                    }
                    shard.flights.remove(&key);
                    if run.failure.is_none() {
                        let bytes = self.fetched(run, block);
                        let new = shard.insert(key, bytes, self.now, ahead, &mut gone);
                        self.dev.count_inserted(new);
                        fetched += 1;
                    }
                } else if ahead && shard.promote(key) {
                } else if let Some(first_use) = (!ahead).then(|| shard.touch(key)).flatten() {
                    used += u64::from(first_use);
                } else if shard.version == *version && !self.is_joined(block) {
                    let piece = self.span.piece(block);
                    let edge = self.edges.iter().find(|edge| edge.0 == block);
                    let bytes = match edge {
                        Some((_, bytes)) => bytes.as_slice(),
                        None if piece.len == block_size => &self.out[piece.out..][..block_size],
                        None => continue,
                    };
                    let stamp = self.now.wrapping_sub(self.age_ms);
                    self.dev.count_inserted(shard.insert(key, bytes, stamp, false, &mut gone));
                }
            }
        }
        self.cache.devices.settle(self.dev, gone);
        self.dev.count_used(used);
        if ahead && fetched > 0 {
            self.dev.stats.readahead_blocks.fetch_add(fetched, Relaxed);
        }
    }

    fn is_joined(&self, block: u64) -> bool {
        self.joined.binary_search_by_key(&block, |joined| joined.0).is_ok()
    }

    /// One block of a run that was fetched.
    fn fetched<'a>(&'a self, run: &'a Run, block: u64) -> &'a [u8] {
        let block_size = 1usize << self.span.shift;
        match &run.own {
            Some(own) => {
                &own[((block - run.flight.first) << self.span.shift) as usize..][..block_size]
            }
            None => &self.out[self.span.piece(block).out..][..block_size],
        }
    }

    /// Lands every flight of ours; the first failure.
    fn land(&mut self) -> Option<Failure> {
        let mut first = None;
        for run in std::mem::take(&mut self.runs) {
            let blocks = run.end - run.flight.first;
            let result = match (run.failure, run.own) {
                (Some(failure), _) => {
                    first.get_or_insert_with(|| failure.clone());
                    Err(failure)
                }
                _ if !run.flight.has_waiters() => Ok(AlignedBuf::new(0)),
                (None, Some(own)) => Ok(own),
                (None, None) => {
                    let at = self.span.piece(run.flight.first).out;
                    let mut kept = AlignedBuf::lend((blocks << self.span.shift) as usize);
                    let len = kept.len();
                    kept.copy_from_slice(&self.out[at..][..len]);
                    Ok(kept)
                }
            };
            run.flight.land(Landed { blocks, result });
        }
        first
    }

    /// Takes the joined blocks from their flights.
    fn wait(mut self, source: &dyn Fetch) -> Result<()> {
        let joined = std::mem::take(&mut self.joined);
        // A block of the run that was detached may be a hit between two joined ones.
        for same in joined.chunk_by(|a, b| a.0 + 1 == b.0 && Arc::ptr_eq(&a.1, &b.1)) {
            let flight = &same[0].1;
            let (first, end) = (same[0].0, same[same.len() - 1].0 + 1);
            let (from, to) = (self.span.piece(first), self.span.piece(end - 1));
            let target = &mut self.out[from.out..to.out + to.len];
            let failed = flight.wait(|landed| match &landed.result {
                Ok(bytes) => {
                    let skip = ((first - flight.first) << self.span.shift) as usize + from.at;
                    let len = target.len();
                    target.copy_from_slice(&bytes[skip..skip + len]);
                    None
                }
                Err(failure) => Some((failure.clone(), landed.blocks)),
            });
            match failed {
                None => self.touch(first, end),
                // The bad block may not be one of ours.
                Some((_, blocks)) if blocks > end - first => {
                    let offset = self.span.offset + from.out as u64;
                    let again = Purpose::Again;
                    self.cache.fill(self.dev, offset, target, self.expire_ms, source, again)?;
                }
                Some((failure, _)) => return Err(failure.into()),
            }
        }
        Ok(())
    }

    fn touch(&self, first: u64, end: u64) {
        let mut used = 0;
        for (from, to) in super::groups(first, end) {
            let mut shard = self.cache.shard(self.dev.id, from).lock();
            for block in from..to {
                used += u64::from(shard.touch(Key::new(self.dev.id, block)) == Some(true));
            }
        }
        self.dev.count_used(used);
    }
}

impl Drop for Fill<'_> {
    /// Only after a panic is something left in the air: take it out of the maps and land it.
    fn drop(&mut self) {
        for run in std::mem::take(&mut self.runs) {
            let first = run.flight.first;
            for (from, to) in super::groups(first, run.end) {
                let mut shard = self.cache.shard(self.dev.id, from).lock();
                for block in from..to {
                    let key = Key::new(self.dev.id, block);
                    if shard.flights.get(&key).is_some_and(|f| Arc::ptr_eq(f, &run.flight)) {
                        shard.flights.remove(&key);
                    }
                }
            }
            let result = Err(Failure::abandoned());
            run.flight.land(Landed { blocks: run.end - first, result });
        }
    }
}
