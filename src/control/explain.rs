//! Why a cache is idle, in words (layer 8): conclusions from the counters of `stat`.

use crate::control::proto::StatReply;
use crate::stats::{Counters, Snapshot};
use crate::units::format_size;

/// What the counters say to somebody who expected hits; empty when the cache does its work.
pub fn idle(stat: &StatReply) -> Vec<String> {
    let (snapshot, total) = (&stat.snapshot, counters(stat));
    let requested = total.hits + total.misses + total.bypassed;
    if stat.cache_mode == "none" {
        return vec![format!(
            "cache_mode is none, nothing is cached: bcachefs-fuse set {} cache_mode=writethrough",
            stat.mount.mountpoint
        )];
    }
    if total.ops == 0 {
        return vec![
            "no reads reached the daemon: the kernel's page cache answers buffered re-reads".into(),
        ];
    }
    let mut lines = Vec::new();
    let percent = |part: u64| part * 100 / requested.max(1);
    let (stream, large) = (percent(total.bypassed_stream), percent(total.bypassed_large));
    if stream >= 50 {
        lines.push(format!(
            "{stream} % of the bytes read belonged to streams past sequential_cutoff ({})",
            format_size(stat.sequential_cutoff)
        ));
    }
    if large >= 50 {
        lines.push(format!(
            "{large} % of the bytes read came in requests larger than bypass ({})",
            format_size(stat.bypass)
        ));
    }
    let admitted = total.hits + total.misses;
    if lines.is_empty() && admitted > 0 && total.hits * 2 < admitted {
        lines.extend(few_hits(snapshot, &total));
    }
    lines
}

fn few_hits(snapshot: &Snapshot, total: &Counters) -> Option<String> {
    let capacity = snapshot.capacity_blocks.max(1);
    if total.evictions >= capacity {
        return Some(format!(
            "the cache was replaced {} times over: what is read again and again is larger than \
             cache ({})",
            total.evictions / capacity,
            format_size(capacity * u64::from(snapshot.block_size))
        ));
    }
    if total.invalidations > total.misses {
        return Some("most cached blocks were written to before they were read again".into());
    }
    Some("most blocks were read once so far: hits come when they are read again".into())
}

/// The counters a narrowed or a whole answer is about.
pub fn counters(stat: &StatReply) -> Counters {
    match stat.unit {
        Some(unit) => {
            let device = stat.snapshot.devices.iter().find(|device| device.unit == unit);
            device.map(|device| device.counters).unwrap_or_default()
        }
        None => stat.snapshot.total,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::format::tests::sample;

    fn lines(change: impl FnOnce(&mut StatReply)) -> Vec<String> {
        let mut stat = sample();
        change(&mut stat);
        idle(&stat)
    }

    #[test]
    fn a_busy_cache_needs_no_words() {
        assert!(lines(|_| ()).is_empty());
    }

    #[test]
    fn each_reason_has_its_words() {
        let stream = lines(|stat| {
            stat.snapshot.total = Counters {
                ops: 9,
                misses: 6,
                bypassed: 94,
                bypassed_stream: 94,
                ..Counters::default()
            }
        });
        let expected = "94 % of the bytes read belonged to streams past sequential_cutoff (64M)";
        assert_eq!(stream, [expected]);
        let nothing = lines(|stat| stat.snapshot.total = Counters::default());
        let expected =
            "no reads reached the daemon: the kernel's page cache answers buffered re-reads";
        assert_eq!(nothing, [expected]);
        let off = lines(|stat| stat.cache_mode = "none".into());
        assert!(off[0].starts_with("cache_mode is none"));
        let small = lines(|stat| {
            stat.snapshot.total = Counters {
                ops: 9,
                hits: 1,
                misses: 200_000,
                evictions: 131_072,
                ..Counters::default()
            }
        });
        assert!(small[0].starts_with("the cache was replaced 2 times over"), "{small:?}");
        let large = lines(|stat| {
            stat.snapshot.total =
                Counters { ops: 9, bypassed: 10, bypassed_large: 10, ..Counters::default() }
        });
        assert!(large[0].starts_with("100 % of the bytes read came in requests larger"));
    }
}
