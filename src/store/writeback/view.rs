//! What the controller is told and what it answers. All of it is plain data.

use crate::config::WritebackOrder;
use crate::units::DeviceId;

/// The options that matter here, read anew for each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Part of the journal, in percent, that may be dirty while devices are busy; 0: no rate.
    pub percent: u64,
    /// How long the first dirty bytes of a busy device wait.
    pub delay_ms: u64,
    /// Whether anything is written home.
    pub running: bool,
    /// The order of home writes.
    pub order: WritebackOrder,
}

/// A snapshot of everything, taken for one step.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// The clock; never goes back.
    pub now_ms: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Bytes from tail to head.
    pub journal_used: u64,
    /// Writers that wait for room in the journal or in the dirty index.
    pub waiting_writers: usize,
    /// Home I/Os in flight, all devices.
    pub in_flight: usize,
    /// Everything is to go home (`flush`, shutdown).
    pub flushing_all: bool,
    /// The options.
    pub settings: Settings,
    /// Every device that has a live record, and every one that is open for writing.
    pub devices: &'a [DeviceView],
}

/// One device of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceView {
    /// Its tag.
    pub id: DeviceId,
    /// Bytes that are not being written home yet.
    pub dirty_bytes: u64,
    /// Extents they form.
    pub dirty_extents: u64,
    /// Since when the oldest of them is dirty (of no meaning if there is none).
    pub dirty_since_ms: u64,
    /// The least sequence that is live: dirty, being written, or written and not synced.
    pub live_seq: Option<u64>,
    /// Home I/Os in flight.
    pub in_flight: usize,
    /// When the oldest of them began.
    pub oldest_io_ms: Option<u64>,
    /// Extents that are home but not synced: the epoch.
    pub written_extents: u64,
    /// When the first of them came home (of no meaning if there is none).
    pub written_since_ms: u64,
    /// A sync is asked for: from the action on until its event is handed in.
    pub syncing: bool,
    /// The last frontend I/O.
    pub frontend_ms: Option<u64>,
    /// Somebody waits for it to be clean.
    pub flushing: bool,
    /// Bytes of its live records, about.
    pub journal_share: u64,
}

/// What happened since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A pass took this much; also of importance if it was nothing.
    Issued {
        /// Whose.
        device: DeviceId,
        /// How much.
        bytes: u64,
    },
    /// A home write ended.
    Wrote {
        /// Whose.
        device: DeviceId,
        /// Whether all of it is home.
        ok: bool,
    },
    /// A sync ended.
    Synced {
        /// Whose.
        device: DeviceId,
        /// Whether it succeeded.
        ok: bool,
    },
    /// The device will never be seen again.
    Gone {
        /// Which.
        device: DeviceId,
    },
}

/// Which extents a pass takes. Within each group they are taken in LBA order, going on where the
/// device's last pass ended and beginning again at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Any.
    Any,
    /// Those with a record up to this sequence first (the journal's tail), then any.
    TailFirst(u64),
    /// Only those that are dirty since then or longer.
    DirtySince(u64),
}

/// What is to be done now, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Try to free the journal's tail that ends with this sequence.
    FreeTail {
        /// Its last sequence.
        last_seq: u64,
    },
    /// Append the device's live records up to a sequence again.
    CopyForward {
        /// Whose.
        device: DeviceId,
        /// The last sequence to copy.
        up_to: u64,
    },
    /// Sync the device's epoch. Many of them in one answer may become one syncfs.
    Sync {
        /// Whose.
        device: DeviceId,
    },
    /// Write extents home.
    Pass {
        /// Whose.
        device: DeviceId,
        /// The most I/Os: extents, after neighbours were joined to at most 1 MiB.
        extents: usize,
        /// Stop after this many bytes; one extent is always taken.
        bytes: u64,
        /// Which extents.
        pick: Pick,
        /// Only contiguous ones, submitted in sequence: the baseline `--writeback-order=lba`.
        lba: bool,
    },
}

/// How fast a device is written home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Small passes, limited by the rate: its frontend is busy.
    Busy,
    /// Large passes.
    Idle,
    /// As fast as it takes them.
    Max,
}

impl Mode {
    /// The word that statistics use.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Busy => "busy",
            Mode::Idle => "idle",
            Mode::Max => "max",
        }
    }
}

/// What a write to a device may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Go on (and wait for room like everybody).
    Yes,
    /// Wait until the device is better or worse: it fails or stalls, and holds much of the journal.
    Later,
    /// EIO: the device is degraded and its share of the journal is used up.
    Refused,
}
