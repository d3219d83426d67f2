//! Faults of one device: calls that fail, calls that hang.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::os_error;
use crate::error::{Error, Result};

/// The calls that can fail or hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `prepare`
    Prepare,
    /// `read_at`
    Read,
    /// `write_at`
    Write,
    /// `set_size`
    SetSize,
    /// `change_range`
    ChangeRange,
    /// `sync`
    Sync,
}

impl Call {
    pub(super) fn op(self) -> &'static str {
        match self {
            Call::Prepare => "open",
            Call::Read => "read",
            Call::Write => "write",
            Call::SetSize => "truncate",
            Call::ChangeRange => "fallocate",
            Call::Sync => "fdatasync",
        }
    }
}

/// How a call shall fail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    errno: Errno,
    pub(super) partly: bool,
    pub(super) dropping: bool,
}

impl Failure {
    pub(super) fn error(self, call: Call) -> Error {
        os_error(call, self.errno)
    }
}

/// A call that shall fail: the next one, once, unless told otherwise.
#[derive(Clone, Debug)]
pub struct Fault {
    call: Call,
    failure: Failure,
    /// Calls that pass before.
    skip: u64,
    times: u64,
}

impl Fault {
    /// The next such call fails with `errno` and changes nothing.
    pub fn fail(call: Call, errno: Errno) -> Fault {
        let failure = Failure { errno, partly: false, dropping: false };
        Fault { call, failure, skip: 0, times: 1 }
    }

    /// The `n`-th such call from now (1 is the next) is the first that fails.
    pub fn nth(mut self, n: u64) -> Fault {
        self.skip = n.saturating_sub(1);
        self
    }

    /// This many calls in a row fail.
    pub fn times(mut self, times: u64) -> Fault {
        self.times = times;
        self
    }

    /// All calls fail from then on, until `heal`.
    pub fn always(self) -> Fault {
        self.times(u64::MAX)
    }

    /// The failing write leaves the first half of its bytes.
    pub fn partly(mut self) -> Fault {
        self.failure.partly = true;
        self
    }

    /// The failing sync drops what it should have made durable: reads see the bytes of before.
    pub fn dropping(mut self) -> Fault {
        self.failure.dropping = true;
        self
    }

    /// One more call: whether this fault is due.
    fn strike(&mut self) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let due = self.times > 0;
        if self.times != u64::MAX {
            self.times = self.times.saturating_sub(1);
        }
        due
    }
}

#[derive(Debug, Default)]
struct Waiting {
    open: bool,
    callers: usize,
}

#[derive(Debug, Default)]
struct GateState {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl GateState {
    fn release(&self) {
        self.waiting.lock().open = true;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut waiting = self.waiting.lock();
        waiting.callers += 1;
        self.changed.notify_all();
        while !waiting.open {
            self.changed.wait(&mut waiting);
        }
        waiting.callers -= 1;
    }
}

/// What calls wait for; released for good when dropped, so that a failing test does not hang.
#[derive(Debug)]
pub struct Gate(Arc<GateState>);

impl Gate {
    /// Lets all callers go on, also those to come.
    pub fn release(&self) {
        self.0.release();
    }

    /// Callers that hang now.
    pub fn waiting(&self) -> usize {
        self.0.waiting.lock().callers
    }

    /// Waits until this many callers hang; false if that takes longer than `timeout`.
    pub fn wait_for(&self, callers: usize, timeout: Duration) -> bool {
        let mut waiting = self.0.waiting.lock();
        let short = |waiting: &mut Waiting| waiting.callers < callers;
        !self.0.changed.wait_while_for(&mut waiting, short, timeout).timed_out()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.release();
    }
}

/// What shall happen to one call.
#[derive(Debug)]
pub(super) struct Verdict {
    gates: Vec<Arc<GateState>>,
    pub(super) failure: Option<Failure>,
}

impl Verdict {
    /// Hangs as long as it shall.
    pub(super) fn wait(&self) {
        self.gates.iter().for_each(|gate| gate.pass());
    }

    /// For calls that change nothing.
    pub(super) fn finish(self, call: Call) -> Result<()> {
        self.wait();
        self.failure.map_or(Ok(()), |failure| Err(failure.error(call)))
    }
}

#[derive(Debug, Default)]
struct Rules {
    faults: Vec<Fault>,
    gates: Vec<(Call, Arc<GateState>)>,
    calls: [u64; 6],
}

/// The faults of one device. States: counted down by each call of their kind, then spent.
#[derive(Debug, Default)]
pub(super) struct Faults {
    rules: Mutex<Rules>,
}

impl Faults {
    pub(super) fn add(&self, fault: Fault) {
        self.rules.lock().faults.push(fault);
    }

    pub(super) fn clear(&self) {
        let mut rules = self.rules.lock();
        rules.faults.clear();
        let gates = std::mem::take(&mut rules.gates);
        drop(rules);
        gates.iter().for_each(|(_, gate)| gate.release());
    }

    pub(super) fn hang(&self, call: Call) -> Gate {
        let gate = Arc::<GateState>::default();
        self.rules.lock().gates.push((call, gate.clone()));
        Gate(gate)
    }

    pub(super) fn calls(&self, call: Call) -> u64 {
        self.rules.lock().calls[call as usize]
    }

    /// Counts a call and says what shall happen to it.
    pub(super) fn enter(&self, call: Call) -> Verdict {
        let mut rules = self.rules.lock();
        rules.calls[call as usize] += 1;
        rules.gates.retain(|(_, gate)| !gate.waiting.lock().open);
        let gates = rules.gates.iter().filter(|(of, _)| *of == call);
        let gates = gates.map(|(_, gate)| gate.clone()).collect();
        let mut failure = None;
        for fault in rules.faults.iter_mut().filter(|fault| fault.call == call) {
            if fault.strike() {
                failure = failure.or(Some(fault.failure));
            }
        }
        Verdict { gates, failure }
    }
}
