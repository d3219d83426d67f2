//! Counters (layer 0): per device, names and meaning as in FreeBSD's `bcachestat` (ops, bypasses,
//! hits, misses), and the honest number beside them: blocks really read from the device.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of one device (or of all retired ones). Relaxed: they are statistics.
        #[derive(Debug, Default)]
        pub struct DeviceStats {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// The values of `DeviceStats` at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Counters {
            $($(#[$doc])* #[serde(default)] pub $name: u64,)*
        }

        impl DeviceStats {
            /// Reads every counter.
            pub fn counters(&self) -> Counters {
                Counters { $($name: self.$name.load(Relaxed),)* }
            }

            /// Adds `values` (of a device that retires) to these.
            pub fn absorb(&self, values: &Counters) {
                $(self.$name.fetch_add(values.$name, Relaxed);)*
            }
        }

        impl Counters {
            /// The counters by name, in their documented order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name),)*];

            /// The values in the order of `NAMES`.
            pub fn values(&self) -> Vec<u64> {
                vec![$(self.$name,)*]
            }

            /// Adds `other` to these values.
            pub fn add(&mut self, other: &Counters) {
                $(self.$name += other.$name;)*
            }

            /// What happened since `earlier` (saturating).
            pub fn since(&self, earlier: &Counters) -> Counters {
                Counters { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Read requests.
    ops,
    /// Read requests that were served but not admitted to the cache.
    bypasses,
    /// Blocks of admitted reads found in the cache (or joined in flight).
    hits,
    /// Blocks of admitted reads that were not.
    misses,
    /// Blocks of requests that were not admitted; hits + misses + bypassed == requested (C2).
    bypassed,
    /// Of the bypassed blocks, those of requests larger than `bypass`.
    bypassed_large,
    /// Of the bypassed blocks, those of streams past `sequential_cutoff`.
    bypassed_stream,
    /// Of the bypassed blocks, those that were served from the cache all the same.
    bypass_hits,
    /// Blocks really read from the device, read-ahead included.
    backing_blocks,
    /// Device read calls.
    backing_reads,
    /// Blocks read ahead of a stream.
    readahead_blocks,
    /// Of these, blocks that a request then used.
    readahead_used,
    /// Of these, blocks evicted or invalidated unused.
    readahead_wasted,
    /// Blocks evicted to make room.
    evictions,
    /// Blocks dropped because their bytes changed.
    invalidations,
    /// Write requests.
    writes,
    /// Bytes of read requests.
    read_bytes,
    /// Bytes of write requests.
    written_bytes,
    /// fsync requests that reached the device.
    syncs,
    /// Requests that failed with an I/O error.
    errors,
}

/// One device in a `Snapshot`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceSnapshot {
    /// Its tag.
    pub unit: u32,
    /// Where it was last seen below the source.
    pub path: String,
    /// Blocks of it in the cache.
    pub resident_blocks: u64,
    /// Whether a file handle is open.
    pub open: bool,
    /// Its counters.
    pub counters: Counters,
}

/// What `stat` shows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// Bytes of one block.
    pub block_size: u32,
    /// Blocks the cache can hold.
    pub capacity_blocks: u64,
    /// Blocks it holds.
    pub resident_blocks: u64,
    /// Sum over every device since the mount, those forgotten included.
    pub total: Counters,
    /// Known devices that saw a request, busiest first.
    pub devices: Vec<DeviceSnapshot>,
}

/// One resident block, for `stat --blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// The device's tag.
    pub unit: u32,
    /// The block's number.
    pub block: u64,
    /// Milliseconds since it was read or written.
    pub age_ms: u64,
    /// Hits since then.
    pub count: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_and_subtract() {
        let live = DeviceStats::default();
        live.hits.fetch_add(3, Relaxed);
        let first = live.counters();
        live.absorb(&Counters { hits: 4, misses: 1, ..Counters::default() });
        let change = live.counters().since(&first);
        assert_eq!((change.hits, change.misses), (4, 1));
        assert_eq!(Counters::NAMES.len(), change.values().len());
        assert_eq!(change.values()[3], 4 - 3);
    }
}
