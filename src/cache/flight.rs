//! A flight: a maximal run of absent blocks that one reader (its leader) fetches and others may
//! wait for (C5). States: in the air -> landed (bytes or failure), once.
//!
//! A flight is in the shards' maps, block by block, while it may be joined; only under the shard's
//! lock does anyone join. Its leader takes it out of the maps first and lands it then, so the
//! number of waiters is final when it lands, and bytes are kept only if somebody waits. Who
//! changed the bytes of a block takes it out too: the flight is detached there, serves those who
//! had joined before, and is not inserted (J7).

use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Kind};
use crate::sys::AlignedBuf;

/// Why a flight failed, for each of its readers.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    kind: Kind,
    op: &'static str,
    place: Box<str>,
    errno: Option<i32>,
}

impl Failure {
    /// The leader's fetch did not return.
    pub(super) fn abandoned() -> Failure {
        Failure { kind: Kind::Internal, op: "read", place: "".into(), errno: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let errno = error.source.as_ref().and_then(io::Error::raw_os_error);
        Failure { kind: error.kind, op: error.op, place: error.place, errno }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let source = failure.errno.map(io::Error::from_raw_os_error);
        Error { kind: failure.kind, op: failure.op, place: failure.place, source }
    }
}

/// How a flight ended.
pub(super) struct Landed {
    /// Blocks of the run.
    pub(super) blocks: u64,
    /// Its bytes, empty if nobody waited.
    pub(super) result: Result<AlignedBuf, Failure>,
}

/// One run in the air.
pub(super) struct Flight {
    /// First block of the run.
    pub(super) first: u64,
    waiters: AtomicU32,
    landed: Mutex<Option<Landed>>,
    changed: Condvar,
}

impl Flight {
    pub(super) fn new(first: u64) -> Flight {
        Flight {
            first,
            waiters: AtomicU32::new(0),
            landed: Mutex::new(None),
            changed: Condvar::new(),
        }
    }

    /// Call under the lock of the shard the flight was found in.
    pub(super) fn join(&self) {
        self.waiters.fetch_add(1, Relaxed);
    }

    /// Final once the flight is in no map any more (the shard's lock orders it).
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(Relaxed) > 0
    }

    pub(super) fn land(&self, landed: Landed) {
        *self.landed.lock() = Some(landed);
        self.changed.notify_all();
    }

    /// Waits until it has landed and shows how.
    pub(super) fn wait<T>(&self, look: impl FnOnce(&Landed) -> T) -> T {
        let mut landed = self.landed.lock();
        loop {
            match landed.as_ref() {
                Some(landed) => return look(landed),
                None => self.changed.wait(&mut landed),
            }
        }
    }
}
