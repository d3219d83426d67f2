//! Devices that fail and crash on demand, for tests (rule 10: faults come from here, not from
//! mocks).
//!
//! A `FaultLog` holds ONE order of everything done to all its `FaultDevice`s (the journal and the
//! images alike); `CrashStates` goes through what a power cut at each place of that order may have
//! left. The model, device by device (a device is a file: its sync covers nothing else):
//!
//! 1. A change (write, zeroing, punch, size change) begins, is applied, is done. From its begin on
//!    it is open: a crash loses it, keeps it, or keeps any set of its 512-byte sectors (size
//!    changes are lost or kept as a whole). A write that grows the device may also leave the new
//!    size without its bytes, or its bytes without the new size.
//! 2. A sync makes durable what was done before the sync BEGAN, when it ends with success. What
//!    was not done by then stays open (J4). While it runs, rule 1 holds: anything may be there.
//! 3. Open changes arrive in any order. Of overlapping ones the later wins where both arrived:
//!    the caller orders these, and an earlier one arriving last looks like the later one lost. So
//!    every subset, applied in log order, is every reordering.
//! 4. A sync that fails leaves what it covered doubtful for ever: no later sync makes it durable
//!    (the kernel has marked it clean), nor need it be lost. If it also dropped the pages
//!    (`Fault::dropping`), reads see the old bytes from then on, and it is lost.
//! 5. A change that fails leaves what reads see afterwards: nothing, or the first half of a write.
//! 6. Bytes not written do not change. A sector is whole. Syncs are honest.
//! 7. The content a device has when it is added, or is given by `replace`, is durable.
//! 8. Allocation changes neither bytes nor size, hence is no change.
//!
//! Locks: the log's, then the memory device's; the faults' alone. None is held while a call hangs.

mod inject;
mod op;
mod random;
mod states;
mod view;

use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

pub use self::inject::{Call, Fault, Gate};
use self::inject::{Failure, Faults};
use self::op::Op;
pub use self::op::{Fate, Part};
pub use self::random::Random;
pub use self::states::{CrashState, CrashStates};
use self::view::View;
use super::memory::{Image, MemoryDevice, check_end, check_range};
use super::{BlockDevice, Range};
use crate::error::{Error, Result};

/// What happened, in the order of all devices. `begun` is the place of the begin in the log.
#[derive(Clone)]
enum Event {
    Begin { device: usize, op: Op },
    Done { device: usize, begun: usize, left: Left },
    SyncBegin,
    SyncDone { device: usize, begun: usize, outcome: Synced },
    Replace { device: usize, image: Image },
}

/// What a change that is done has left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    All,
    /// Its first bytes (it failed).
    Head(usize),
}

/// What a sync did to the changes it covered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Synced {
    Durable,
    Doubtful,
    Dropped,
}

#[derive(Clone)]
struct Added {
    name: Arc<str>,
    image: Image,
}

#[derive(Clone, Default)]
struct Records {
    events: Vec<Event>,
    devices: Vec<Added>,
}

/// One order of everything that is done to its devices. Clones are the same log.
#[derive(Clone, Default)]
pub struct FaultLog {
    records: Arc<Mutex<Records>>,
}

impl FaultLog {
    /// An empty log.
    pub fn new() -> FaultLog {
        FaultLog::default()
    }

    /// A device of this log; its content so far counts as durable. `name` is for messages.
    pub fn add(&self, name: &str, image: Image) -> Arc<FaultDevice> {
        let mut records = self.records.lock();
        let number = records.devices.len();
        records.devices.push(Added { name: name.into(), image: image.clone() });
        let live = MemoryDevice::new(image);
        Arc::new(FaultDevice { log: self.clone(), number, live, faults: Faults::default() })
    }

    /// The place in the order: what has returned by now lies before it. A crash state whose `cut`
    /// is not below the position read after a sync contains what that sync covered.
    pub fn position(&self) -> usize {
        self.records.lock().events.len()
    }

    fn push(&self, event: Event) -> usize {
        let events = &mut self.records.lock().events;
        events.push(event);
        events.len() - 1
    }
}

impl std::fmt::Debug for FaultLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultLog({} events)", self.position())
    }
}

/// A device in memory whose every change is in the log, and which fails or hangs when told to.
#[derive(Debug)]
pub struct FaultDevice {
    log: FaultLog,
    number: usize,
    live: MemoryDevice,
    faults: Faults,
}

impl FaultDevice {
    /// Its number within the log: the index of its image in a crash state.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The content as reads see it.
    pub fn image(&self) -> Image {
        self.live.image()
    }

    /// Puts another content in its place, as somebody behind our back would; it is durable.
    pub fn replace(&self, image: Image) {
        let mut records = self.log.records.lock();
        records.events.push(Event::Replace { device: self.number, image: image.clone() });
        self.live.replace(image);
    }

    /// Calls made so far, failed ones included.
    pub fn calls(&self, call: Call) -> u64 {
        self.faults.calls(call)
    }

    /// Adds a fault. Of several that are due at a call the first one added decides.
    pub fn inject(&self, fault: Fault) {
        self.faults.add(fault);
    }

    /// Forgets all faults; what hangs is released.
    pub fn heal(&self) {
        self.faults.clear();
    }

    /// Every such call from now on waits until the gate is released or dropped. A change that
    /// hangs has begun: a crash may have kept it, though reads do not see it yet.
    pub fn hang(&self, call: Call) -> Gate {
        self.faults.hang(call)
    }

    fn change(&self, call: Call, op: Option<Op>) -> Result<()> {
        let verdict = self.faults.enter(call);
        let Some(op) = op else {
            verdict.wait();
            return verdict.failure.map_or(Ok(()), |failure| Err(failure.error(call)));
        };
        let begun = self.log.push(Event::Begin { device: self.number, op: op.clone() });
        verdict.wait();
        let left = match &verdict.failure {
            None => Left::All,
            Some(Failure { partly: true, .. }) => Left::Head(op.len() / 2),
            Some(_) => Left::Head(0),
        };
        let mut records = self.log.records.lock();
        records.events.push(Event::Done { device: self.number, begun, left });
        if let Some(op) = op.left(left) {
            self.live.change(|image| op.apply(image, Fate::Kept));
        }
        drop(records);
        verdict.failure.map_or(Ok(()), |failure| Err(failure.error(call)))
    }
}

impl BlockDevice for FaultDevice {
    fn prepare(&self, _write: bool) -> Result<()> {
        self.faults.enter(Call::Prepare).finish(Call::Prepare)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.faults.enter(Call::Read).finish(Call::Read)?;
        self.live.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        check_end("write", offset, data.len() as u64)?;
        let op = Op::Write { offset, data: data.into() };
        self.change(Call::Write, (!data.is_empty()).then_some(op))
    }

    fn size(&self) -> Result<u64> {
        self.live.size()
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        check_end("truncate", bytes, 0)?;
        self.change(Call::SetSize, Some(Op::SetSize { bytes }))
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len)?;
        self.change(Call::ChangeRange, Op::of_range(what, offset, len))
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        let device = self.number;
        let verdict = self.faults.enter(Call::Sync);
        let begun = self.log.push(Event::SyncBegin);
        verdict.wait();
        let outcome = match &verdict.failure {
            None => Synced::Durable,
            Some(Failure { dropping: true, .. }) => Synced::Dropped,
            Some(_) => Synced::Doubtful,
        };
        let mut records = self.log.records.lock();
        records.events.push(Event::SyncDone { device, begun, outcome });
        if outcome == Synced::Dropped {
            self.live.replace(View::live(&records, device));
        }
        drop(records);
        verdict.failure.map_or(Ok(()), |failure| Err(failure.error(Call::Sync)))
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.live.seek(offset, hole)
    }
}

fn os_error(call: Call, errno: Errno) -> Error {
    Error::os(call.op(), errno).at("fault device")
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod toy_tests;
