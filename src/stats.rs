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

/// How writeback stands with one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceWriteback {
    /// "clean", "dirty", "flushing", "degraded" or "failed".
    pub state: String,
    /// "busy", "idle" or "max": how fast it is written home.
    pub mode: String,
    /// Why, in a few words.
    pub why: String,
    /// Bytes in the journal that are not home (or home and not yet synced).
    pub dirty_bytes: u64,
    /// Extents they form.
    pub dirty_extents: u64,
    /// Milliseconds since the oldest of them was written.
    pub oldest_ms: u64,
    /// Home writes in flight.
    pub in_flight: u64,
    /// Home writes and syncs that failed since the mount.
    pub errors: u64,
    /// Whether the image file alone, without the journal, is what applications wrote.
    pub consistent: bool,
}

/// The journal and writeback of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WritebackStat {
    /// Bytes of the journal's segments.
    pub journal_bytes: u64,
    /// Bytes of it in use.
    pub journal_used: u64,
    /// Bytes not home (or home and not yet synced), all devices.
    pub dirty_bytes: u64,
    /// Devices that have some.
    pub dirty_devices: u64,
    /// Milliseconds since the oldest of them was written.
    pub oldest_ms: u64,
    /// Bytes a second that busy devices may be written home with; 0: as fast as passes go.
    pub rate: u64,
    /// Home writes in flight.
    pub in_flight: u64,
    /// Bytes overwritten in the journal before they went home.
    pub absorbed_bytes: u64,
    /// Bytes written home.
    pub home_bytes: u64,
    /// Home write calls.
    pub home_writes: u64,
    /// Epochs synced.
    pub epochs: u64,
    /// Journal syncs.
    pub barriers: u64,
    /// Requests that waited for a journal sync; over `barriers`: how many share one.
    pub barrier_waiters: u64,
    /// Writers that wait for journal room now.
    pub waiting: u64,
    /// Writers that had to wait since the mount.
    pub waited: u64,
    /// Home writes and syncs that failed.
    pub errors: u64,
    /// Bytes copied forward from the journal's tail.
    pub copied_bytes: u64,
    /// Records found by recovery at the mount.
    pub replayed: u64,
    /// Home writes go through io_uring.
    pub uring: bool,
    /// Why the journal takes no more writes, once it failed.
    pub failed: Option<String>,
}

/// How far a flush has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlushProgress {
    /// Bytes still to go, of the devices asked for.
    pub left_bytes: u64,
    /// Bytes written home and synced since the flush began.
    pub done_bytes: u64,
    /// Home writes in flight now, of all devices.
    pub in_flight: u64,
    /// The most in flight since the flush began.
    pub depth: u64,
    /// Milliseconds since the flush began.
    pub elapsed_ms: u64,
    /// Devices that cannot be written now: their path and why. They are not waited for.
    pub stuck: Vec<(String, String)>,
    /// Those of them whose file was changed, replaced or is missing: nobody will write them home.
    pub refused: Vec<String>,
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
    /// Writeback, if the mount has a journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writeback: Option<DeviceWriteback>,
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
    /// Journal and writeback, if the mount has a journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writeback: Option<WritebackStat>,
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
