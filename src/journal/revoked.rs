//! Which records of a range are void: per device, the newest Revoke of every byte.
//!
//! No states but the map, no locks. Invariant: ranges do not overlap; a byte's entry is the newest
//! Revoke that covers it, so a record's byte is void if and only if that one is newer.

use std::collections::{BTreeMap, HashMap};

use crate::units::{DeviceId, Extent};

/// First byte -> one past the last, and the Revoke's sequence.
type Ranges = BTreeMap<u64, (u64, u64)>;

/// All Revokes of a log.
#[derive(Debug, Default)]
pub(super) struct Revoked(HashMap<DeviceId, Ranges>);

impl Revoked {
    /// A Revoke; they come in the order of their sequences.
    pub(super) fn insert(&mut self, device: DeviceId, extent: Extent, seq: u64) {
        let (start, end) = (extent.offset, extent.end());
        if start >= end {
            return;
        }
        let ranges = self.0.entry(device).or_default();
        let before = ranges.range(..start).next_back().map(|(from, to)| (*from, *to));
        if let Some((from, (to, older))) = before
            && to > start
        {
            ranges.insert(from, (start, older));
            if to > end {
                ranges.insert(end, (to, older));
            }
        }
        while let Some((from, (to, older))) =
            ranges.range(start..end).next().map(|(from, to)| (*from, *to))
        {
            ranges.remove(&from);
            if to > end {
                ranges.insert(end, (to, older));
            }
        }
        ranges.insert(start, (end, seq));
    }

    /// What newer Revokes leave of a record's range.
    pub(super) fn live(&self, device: DeviceId, extent: Extent, seq: u64) -> Vec<Extent> {
        let (mut at, end) = (extent.offset, extent.end());
        let mut live = Vec::new();
        let mut keep = |from: u64, to: u64| {
            if from < to {
                live.push(Extent { offset: from, len: to - from });
            }
        };
        if let Some(ranges) = self.0.get(&device) {
            let first = ranges.range(..=at).next_back().map_or(at, |(from, _)| *from);
            let overlapping = ranges.range(first..end.max(first));
            for (from, (to, _)) in overlapping.filter(|(_, (_, revoke))| *revoke > seq) {
                if *to > at {
                    keep(at, *from);
                    at = at.max(*to);
                }
            }
        }
        keep(at, end);
        live
    }
}
