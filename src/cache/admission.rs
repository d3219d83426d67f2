//! Admission and read-ahead: what of the request stream is worth a place in the cache. Everything
//! here depends on the requests alone (size, position in their stream), never on the capacity, a
//! hit or a miss: that is C1.
//!
//! A stream is a run of requests of one device, each near the end of the one before. The kernel
//! cuts one reader's read-ahead into requests that 16 threads take in any order, so "near" allows
//! for a few requests to either side; what keeps random reads out is density: a stream has read at
//! least half of what it spans. New streams are on probation (a ring); from the third request on
//! they are established, where a flood of random reads cannot push them out. A stream's position
//! is the distance from its start to its highest end.

use std::cmp::Ordering;

use crate::config::Tunables;
use crate::units::Extent;

const PROBATION: usize = 256;
const ESTABLISHED: usize = 32;
/// Requests (of its own length) by which one may be early or late.
const REORDER: u64 = 16;
/// Most bytes by which a request may be early or late.
const REORDER_BYTES: u64 = 4 << 20;
/// The smallest read-ahead window, and the bytes read straight on that it takes, at least.
const WINDOW_BYTES: u64 = 32 << 10;

/// Whether a request's blocks enter the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Admitted.
    Insert,
    /// Larger than `bypass`.
    Large,
    /// Of a stream past `sequential_cutoff`.
    Stream,
}

/// What to do with one read request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether its blocks enter the cache.
    pub verdict: Verdict,
    /// What a worker should `prefetch`.
    pub readahead: Option<Extent>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    start: u64,
    end: u64,
    /// Bytes asked for, at most those spanned.
    bytes: u64,
    requests: u32,
    /// Requests that began exactly at the end, less those that came early.
    straight: u32,
}

impl Stream {
    /// The stream with this request added, if it belongs here.
    fn with(&self, offset: u64, len: u64) -> Option<Stream> {
        let slack = slack(len);
        if offset > self.end.saturating_add(slack) || offset.saturating_add(slack) < self.end {
            return None;
        }
        let start = self.start.min(offset);
        let end = self.end.max(offset.saturating_add(len));
        if end == self.end && start == self.start && self.bytes == end - start {
            // Nothing is missing: not a late request of this stream, but another reader.
            return None;
        }
        let bytes = self.bytes.saturating_add(len).min(end - start);
        let requests = self.requests.saturating_add(1);
        let straight = match offset.cmp(&self.end) {
            Ordering::Equal => self.straight.saturating_add(1),
            Ordering::Greater => self.straight.saturating_sub(1),
            Ordering::Less => self.straight,
        };
        let grown = Stream { start, end, bytes, requests, straight };
        (bytes >= (end - start) / 2).then_some(grown)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Established {
    stream: Stream,
    /// The next read-ahead's bytes; 0: none so far.
    window: u64,
    /// Read ahead up to here.
    ahead: u64,
    used: u64,
}

/// The streams of one device.
#[derive(Debug, Default)]
pub(super) struct Streams {
    established: Vec<Established>,
    probation: Vec<Stream>,
    /// Of each stream on probation, `mark` of its end: most requests are near none of 256, and
    /// comparing these takes a few vector instructions.
    marks: Vec<u32>,
    oldest: usize,
    tick: u64,
}

impl Streams {
    /// Adds one request; its verdict and its read-ahead, whole blocks within `size` bytes.
    pub(super) fn plan(
        &mut self,
        offset: u64,
        len: u64,
        size: u64,
        block_size: u64,
        tunables: &Tunables,
    ) -> Plan {
        let cutoff = limit(tunables.sequential_cutoff());
        let (before, stream, entry) = self.add(offset, len);
        let verdict = verdict(len, stream.end - stream.start, tunables);
        let most = tunables.readahead();
        let wanted = verdict == Verdict::Insert && most > 0 && stream.end > before;
        let entry = entry.filter(|_| wanted).and_then(|i| self.established.get_mut(i));
        let readahead = entry.and_then(|entry| entry.readahead(len, most, block_size)).and_then(
            |(from, to)| {
                let to = to.min(size).min(stream.start.saturating_add(cutoff));
                (from < to).then(|| Extent { offset: from, len: to - from })
            },
        );
        Plan { verdict, readahead }
    }

    /// Adds one request; its verdict.
    pub(super) fn admit(&mut self, offset: u64, len: u64, tunables: &Tunables) -> Verdict {
        let (_, stream, _) = self.add(offset, len);
        verdict(len, stream.end - stream.start, tunables)
    }

    /// Finds or makes the request's stream: its end before, the stream now, and its place if it
    /// is established.
    fn add(&mut self, offset: u64, len: u64) -> (u64, Stream, Option<usize>) {
        self.tick += 1;
        let nearest = self
            .established
            .iter()
            .enumerate()
            .filter_map(|(i, entry)| Some((i, entry.stream.with(offset, len)?)))
            .min_by_key(|(i, _)| self.established[*i].stream.end.abs_diff(offset));
        if let Some((i, stream)) = nearest {
            let entry = &mut self.established[i];
            let before = std::mem::replace(&mut entry.stream, stream).end;
            entry.used = self.tick;
            return (before, stream, Some(i));
        }
        match self.on_probation(offset, len) {
            Some((i, stream)) if stream.requests > 2 => {
                let before = self.probation.swap_remove(i).end;
                self.marks.swap_remove(i);
                (before, stream, Some(self.establish(stream)))
            }
            Some((i, stream)) => {
                self.probation[i] = stream;
                self.marks[i] = mark(stream.end);
                (offset, stream, None)
            }
            None => {
                let end = offset.saturating_add(len);
                let stream = Stream { start: offset, end, bytes: len, requests: 1, straight: 0 };
                if self.probation.len() < PROBATION {
                    self.probation.push(stream);
                    self.marks.push(mark(end));
                } else {
                    self.probation[self.oldest] = stream;
                    self.marks[self.oldest] = mark(end);
                    self.oldest = (self.oldest + 1) % PROBATION;
                }
                (offset, stream, None)
            }
        }
    }

    /// The first stream on probation the request belongs to, with it added.
    fn on_probation(&self, offset: u64, len: u64) -> Option<(usize, Stream)> {
        let slack = slack(len);
        let low = mark(offset.saturating_sub(slack));
        let width = mark(offset.saturating_add(slack)).wrapping_sub(low);
        let near = |mark: u32| mark.wrapping_sub(low) <= width;
        for (i, marks) in self.marks.chunks(32).enumerate() {
            // Without an early exit: this is what makes it a vector loop.
            if !marks.iter().fold(false, |any, &mark| any | near(mark)) {
                continue;
            }
            let mut streams = self.probation.iter().enumerate().skip(i * 32).take(32);
            let found = streams.find_map(|(i, stream)| Some((i, stream.with(offset, len)?)));
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn establish(&mut self, stream: Stream) -> usize {
        let entry = Established { stream, used: self.tick, ..Established::default() };
        if self.established.len() < ESTABLISHED {
            self.established.push(entry);
            return self.established.len() - 1;
        }
        let (mut oldest, mut used) = (0, u64::MAX);
        for (i, entry) in self.established.iter().enumerate() {
            if entry.used < used {
                (oldest, used) = (i, entry.used);
            }
        }
        self.established[oldest] = entry;
        oldest
    }
}

impl Established {
    /// What to read ahead now that the stream has advanced, from byte to byte. The window starts
    /// at two requests at least (the kernel has its next one under way before we could) and
    /// doubles; it is refilled when half of it is left.
    fn readahead(&mut self, len: u64, most: u64, block_size: u64) -> Option<(u64, u64)> {
        let Stream { end, straight, .. } = self.stream;
        // Who keeps many requests in the air (out of order) needs nobody to read ahead.
        if straight < 2 || u64::from(straight).saturating_mul(len) < WINDOW_BYTES {
            return None;
        }
        let window = self.window.max(WINDOW_BYTES).max(2 * len).min(most);
        let from = self.ahead.max(end);
        if from - end > window / 2 {
            return None;
        }
        let to = (end + window).next_multiple_of(block_size);
        self.window = (window * 2).min(most);
        self.ahead = to;
        Some((from.next_multiple_of(block_size), to))
    }
}

/// Bytes by which a request may be early or late.
fn slack(len: u64) -> u64 {
    len.saturating_mul(REORDER).min(REORDER_BYTES)
}

/// A byte offset in a few bits: enough to say that it is far from another.
fn mark(offset: u64) -> u32 {
    (offset >> 12) as u32
}

/// 0 switches a limit off, as it does in Linux bcache.
fn limit(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}

fn verdict(len: u64, position: u64, tunables: &Tunables) -> Verdict {
    if len > limit(tunables.bypass()) {
        Verdict::Large
    } else if position > limit(tunables.sequential_cutoff()) {
        Verdict::Stream
    } else {
        Verdict::Insert
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StoreConfig;

    const K: u64 = 1 << 10;
    const M: u64 = 1 << 20;
    const HUGE: u64 = 1 << 40;

    fn plan(streams: &mut Streams, offset: u64, len: u64) -> Plan {
        streams.plan(offset, len, HUGE, 4096, &Tunables::new(&StoreConfig::default()))
    }

    /// Steps of xorshift: reproducible and good enough.
    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn a_stream_is_bypassed_past_the_cutoff_and_read_ahead_before() {
        let mut streams = Streams::default();
        let (mut windows, mut ahead) = (Vec::new(), 0);
        for i in 0..1024 {
            let plan = plan(&mut streams, i * 128 * K, 128 * K);
            let stream = (i + 1) * 128 * K > 64 * M;
            assert_eq!(plan.verdict == Verdict::Stream, stream, "{i}");
            if let Some(extent) = plan.readahead {
                assert!(extent.offset >= (i + 1) * 128 * K && extent.end() <= 64 * M && !stream);
                assert!(ahead == 0 || extent.offset == ahead, "no byte twice, none left out");
                ahead = extent.end();
                windows.push(ahead - (i + 1) * 128 * K);
            }
        }
        assert_eq!((windows[0], windows[1], windows[2]), (256 * K, 512 * K, M));
        assert_eq!(ahead, 64 * M);
    }

    #[test]
    fn requests_of_a_stream_may_come_in_any_order_of_16_threads() {
        let mut streams = Streams::default();
        let mut seed = 88172645463325252;
        for batch in 0..128 {
            let mut order: Vec<u64> = (0..8).collect();
            for i in (1..8).rev() {
                order.swap(i, (random(&mut seed) % (i as u64 + 1)) as usize);
            }
            for i in order {
                let plan = plan(&mut streams, (batch * 8 + i) * 128 * K, 128 * K);
                assert!(batch < 65 || plan.verdict == Verdict::Stream, "{batch}");
                assert!(batch > 62 || plan.verdict == Verdict::Insert, "{batch}");
            }
        }
        assert!(streams.established.len() + streams.probation.len() < 4);
    }

    #[test]
    fn small_random_reads_are_no_stream() {
        for size in [16 * M, 64 * M, 1 << 30, 1 << 38] {
            let mut streams = Streams::default();
            let mut seed = 88172645463325252;
            let mut ahead = 0;
            for _ in 0..50_000 {
                let plan = plan(&mut streams, random(&mut seed) % (size / 4096) * 4096, 4096);
                assert_eq!(plan.verdict, Verdict::Insert);
                ahead += plan.readahead.map_or(0, |extent| extent.len / 4096);
            }
            assert!(ahead < 10, "{ahead} of 50000 in {size}");
        }
    }

    #[test]
    fn a_slow_scan_is_seen_among_many_random_reads() {
        let mut streams = Streams::default();
        let mut seed = 88172645463325252;
        let mut last = Verdict::Insert;
        for i in 0..1000 {
            last = plan(&mut streams, HUGE + i * 128 * K, 128 * K).verdict;
            for _ in 0..100 {
                plan(&mut streams, random(&mut seed) % (1 << 25) * 4096, 4096);
            }
        }
        assert_eq!(last, Verdict::Stream);
    }

    #[test]
    fn rereading_the_end_of_a_long_stream_is_not_that_stream() {
        let mut streams = Streams::default();
        for i in 0..1024 {
            plan(&mut streams, i * 128 * K, 128 * K);
        }
        assert_eq!(plan(&mut streams, 128 * M - 8 * K, 4 * K).verdict, Verdict::Insert);
        assert_eq!(plan(&mut streams, 0, 128 * K).verdict, Verdict::Insert);
        assert_eq!(plan(&mut streams, 128 * M, 128 * K).verdict, Verdict::Stream);
    }

    #[test]
    fn limits_are_exact_and_zero_switches_them_off() {
        let tunables = Tunables::new(&StoreConfig::default());
        let mut streams = Streams::default();
        let mut verdict = |len, at: u64| streams.plan(at, len, HUGE, 4096, &tunables).verdict;
        assert_eq!(verdict(256 * K, 1 << 34), Verdict::Insert);
        assert_eq!(verdict(256 * K + 1, 1 << 35), Verdict::Large);
        tunables.set_bypass(0);
        assert_eq!(verdict(M, 1 << 36), Verdict::Insert);
        assert_eq!(verdict(65 * M, 1 << 37), Verdict::Stream);
        tunables.set_sequential_cutoff(0);
        assert_eq!(verdict(65 * M, 1 << 38), Verdict::Insert);
    }

    #[test]
    fn read_ahead_stays_within_the_device_and_its_option() {
        let tunables = Tunables::new(&StoreConfig::default());
        for (most, size, expect) in [(0, HUGE, 0), (64 * K, HUGE, 64 * K), (M, 99_999, 99_999)] {
            tunables.set_readahead(most);
            let mut streams = Streams::default();
            let mut end = 0;
            for i in 0..20 {
                let plan = streams.plan(i * 4 * K, 4 * K, size, 4096, &tunables);
                if let Some(extent) = plan.readahead {
                    assert!(extent.offset % 4096 == 0 && (i + 1) * 4 * K >= WINDOW_BYTES);
                    end = extent.end();
                }
            }
            assert!(end >= expect && end <= size.min(80 * K + most), "{most} {size}: {end}");
        }
    }
}
