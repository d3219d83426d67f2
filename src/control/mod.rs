//! Talking to a live mount (layer 8): a unix socket beside each daemon, one JSON line a request.
//!
//! [`server`] answers inside the daemon, [`client`] asks; [`proto`] is what they say, [`socket`]
//! where they meet; [`live`] changes options, [`errors`] keeps the last errors; [`mod@format`] and
//! [`explain`] turn answers into text, [`writeback`] what they say of the journal. The server knows
//! the filesystem only through [`Mounted`].
//! States: a server is listening from [`server::spawn`] until its handle is dropped; a trace
//! started over a connection ends with that connection. Invariant: no request holds a lock of the
//! filesystem while it waits for its peer.

pub mod client;
pub mod errors;
pub mod explain;
pub mod format;
pub mod live;
mod of_fs;
pub mod prometheus;
pub mod proto;
pub mod server;
pub mod socket;
pub mod writeback;

use std::path::Path;

use crate::config::{CacheMode, Tunables};
use crate::control::proto::PathChange;
use crate::error::{Error, Kind, Result};
use crate::stats::{BlockInfo, FlushProgress, Snapshot};

/// What the control socket may ask of a mounted filesystem.
pub trait Mounted: Send + Sync {
    /// Counters of one device, or of all.
    fn snapshot(&self, unit: Option<u32>) -> Snapshot;
    /// The tag of the device at a path relative to the mount's root; None for directories.
    /// A file no request touched yet gets its tag here.
    fn resolve(&self, below: &Path) -> Result<Option<u32>>;
    /// The resident blocks of one device, or of all.
    fn blocks(&self, unit: Option<u32>) -> Vec<BlockInfo>;
    /// The values `set` changes.
    fn tunables(&self) -> &Tunables;
    /// Changes what writes do, in the tunables too; blocks cached before `none` are dropped.
    fn set_cache_mode(&self, mode: CacheMode);
    /// Starts to record every read request in `file`; Busy if a recording runs.
    fn start_trace(&self, file: &Path) -> Result<()>;
    /// Ends the recording and closes its file.
    fn stop_trace(&self);
    /// Open file handles.
    fn open_files(&self) -> usize;
    /// Writes home and syncs what is dirty of one file, or of all; returns when nothing of it is
    /// left but what is stuck. `tell` is called about four times a second, at least once a second
    /// also while nothing moves; when it says false the waiting ends, the writing goes on at its
    /// own rate. No lock may be held while it is called: it writes to a socket.
    fn flush(
        &self,
        below: Option<&Path>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress>;
    /// Whether what is dirty when the mount ends stays in the journal instead of being flushed.
    fn leave_rest(&self, leave: bool);
    /// What differs from the lowers; NotSupported without an upper.
    fn diff(&self) -> Result<Vec<PathChange>> {
        Err(Error::new(Kind::NotSupported, "diff", ""))
    }
    /// Drops what differs; Busy while a file is open, unless forced.
    fn revert(&self, _force: bool) -> Result<()> {
        Err(Error::new(Kind::NotSupported, "revert", ""))
    }
}
