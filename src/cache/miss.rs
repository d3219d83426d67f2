//! A read that misses whole, begun by one thread and ended by another: the caller fetches the
//! bytes as it likes and comes back with them. Only requests of one shape are taken: whole blocks
//! from a block's start on, none of them resident or in flight. All others go through `Cache::read`.
//!
//! States: begun (its flight is in the shards' maps, others may join) -> finished (settled and
//! landed, as in `fill`). A `Miss` that is dropped unfinished lands as failed.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::device::CacheDevice;
use super::fill::{Fill, Purpose, Run};
use super::flight::{Failure, Flight};
use super::shard::Key;
use super::{Cache, Plan, Span, Verdict};
use crate::clock;
use crate::error::{Error, Result};

/// See the module.
pub struct Miss {
    cache: Arc<Cache>,
    dev: Arc<CacheDevice>,
    span: Span,
    /// None once finished; holds no run for a request that is not inserted.
    begun: Option<Begun>,
}

impl Miss {
    /// Begins a read of `len` bytes at `offset`, if it has the shape; counts it as `read` would.
    pub fn begin(
        cache: &Arc<Cache>,
        dev: &Arc<CacheDevice>,
        plan: &Plan,
        offset: u64,
        len: usize,
        expire_ms: u64,
    ) -> Option<Miss> {
        let block = 1u64 << cache.shift;
        if len == 0 || !offset.is_multiple_of(block) {
            return None;
        }
        let whole = (len as u64).next_multiple_of(block) as usize;
        let span = Span::new(offset, whole, cache.shift);
        let begun = match plan.verdict {
            Verdict::Insert => Begun::all_absent(cache, dev, span, expire_ms)?,
            verdict => {
                if !cache.is_all_absent(dev, span, expire_ms) {
                    return None;
                }
                cache.count_bypassed(dev, verdict, span.blocks());
                Begun::default()
            }
        };
        Some(Miss { cache: cache.clone(), dev: dev.clone(), span, begun: Some(begun) })
    }

    /// Bytes to fetch: the request rounded up to whole blocks.
    pub fn fetch_len(&self) -> usize {
        self.span.len
    }

    /// Ends it: `buf` is `fetch_len` bytes, of which `result` says how many came from the device;
    /// what lies behind becomes zeros.
    pub fn finish(mut self, result: Result<usize>, buf: &mut [u8]) -> Result<()> {
        let stats = &self.dev.stats;
        stats.backing_reads.fetch_add(1, Relaxed);
        let result = result.map(|got| {
            let got = got.min(buf.len());
            stats.backing_blocks.fetch_add((got as u64).div_ceil(1 << self.span.shift), Relaxed);
            if let Some(rest) = buf.get_mut(got..) {
                rest.fill(0);
            }
        });
        let Some(begun) = self.begun.take() else { return result };
        if begun.is_empty() {
            return result;
        }
        begun.end(&self.cache, &self.dev, self.span, buf, result.err())
    }
}

impl Drop for Miss {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take().filter(|begun| !begun.is_empty()) {
            begun.abandon(&self.cache, &self.dev, self.span);
        }
    }
}

impl Cache {
    /// Whether no block of `span` is resident.
    fn is_all_absent(&self, dev: &CacheDevice, span: Span, expire_ms: u64) -> bool {
        let now = clock::now_ms() as u32;
        span.groups().all(|(first, end)| {
            let shard = self.shard(dev.id, first).lock();
            (first..end).all(|block| shard.peek(Key::new(dev.id, block), now, expire_ms).is_none())
        })
    }
}

/// A fill between its look-up and its end, with nothing borrowed.
#[derive(Default)]
struct Begun {
    now: u32,
    runs: Vec<Run>,
    versions: Vec<u64>,
}

impl Begun {
    /// Step 1 of a fill, if every block of `span` is absent and none is in flight. Only for a span
    /// of one shard: whoever joins a flight must find it whole.
    fn all_absent(cache: &Cache, dev: &CacheDevice, span: Span, expire_ms: u64) -> Option<Begun> {
        if span.groups().nth(1).is_some() {
            return None;
        }
        dev.top.fetch_max(span.end, SeqCst);
        let now = clock::now_ms() as u32;
        let mut shard = cache.shard(dev.id, span.first).lock();
        let mut keys = (span.first..span.end).map(|block| Key::new(dev.id, block));
        if keys.any(|key| {
            shard.flights.contains_key(&key) || shard.peek(key, now, expire_ms).is_some()
        }) {
            return None;
        }
        let flight = Arc::new(Flight::new(span.first));
        for block in span.first..span.end {
            shard.flights.insert(Key::new(dev.id, block), flight.clone());
        }
        let versions = vec![shard.version];
        drop(shard);
        dev.stats.misses.fetch_add(span.blocks(), Relaxed);
        let run = Run { flight, end: span.end, own: None, failure: None };
        Some(Begun { now, runs: vec![run], versions })
    }

    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    fn resume<'a>(
        self,
        cache: &'a Cache,
        dev: &'a CacheDevice,
        span: Span,
        out: &'a mut [u8],
    ) -> Fill<'a> {
        let Begun { now, runs, versions } = self;
        let (joined, edges) = (Vec::new(), Vec::new());
        let purpose = Purpose::Demand;
        Fill {
            cache,
            dev,
            span,
            out,
            expire_ms: 0,
            now,
            age_ms: 0,
            purpose,
            runs,
            joined,
            versions,
            edges,
        }
    }

    /// Steps 3 and 4 with the bytes in `out`.
    fn end(
        self,
        cache: &Cache,
        dev: &CacheDevice,
        span: Span,
        out: &mut [u8],
        failure: Option<Error>,
    ) -> Result<()> {
        let mut fill = self.resume(cache, dev, span, out);
        if let Some(run) = fill.runs.first_mut() {
            run.failure = failure.map(Failure::from);
        }
        fill.settle();
        match fill.land() {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }

    /// Lands it as failed.
    fn abandon(self, cache: &Cache, dev: &CacheDevice, span: Span) {
        drop(self.resume(cache, dev, span, &mut []));
    }
}
