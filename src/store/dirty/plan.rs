//! Which home operations a pass issues, and what their outcome means for the pieces.
//!
//! Rules: nothing whose record is not durable in the journal (J13); nothing that shares a unit with
//! an operation in flight (J6); data past the device's end waits until the device has been grown;
//! zeros past its end are true already. A truncate goes home as a truncate, any other zeros as a
//! hole.

use super::super::writeback::view::Pick;
use super::{Body, DirtyMap, Extent, State, Timestamp, record_of};
use crate::clock;
use crate::journal::Placed;

/// Neighbours are written in one call up to this many bytes.
const COALESCED_MAX: u64 = 1 << 20;

/// What a pass may take.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct Limits {
    /// Operations.
    pub(in crate::store) ops: usize,
    /// Bytes; one piece is always taken.
    pub(in crate::store) bytes: u64,
    /// Which pieces.
    pub(in crate::store) pick: Pick,
    /// The baseline: one piece an operation, and the pass ends where the next does not follow.
    pub(in crate::store) contiguous: bool,
    /// The journal is durable up to here.
    pub(in crate::store) durable: u64,
    /// What operations in flight must not share: a power of two.
    pub(in crate::store) unit: u64,
    /// Mutant: do without J13.
    pub(in crate::store) skip_wal: bool,
}

/// A part of a home write: a piece of a record.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct Part {
    pub(in crate::store) placed: Placed,
    pub(in crate::store) skip: u64,
    pub(in crate::store) len: u64,
}

/// What to do to the device.
#[derive(Clone, Debug)]
pub(in crate::store) enum OpKind {
    /// Write these parts, one after the other.
    Write(Vec<Part>),
    /// Make this range zeros.
    Zero,
    /// Cut or grow the device to this size.
    SetSize(u64),
}

/// One home operation; `complete` must be told its outcome.
#[derive(Clone, Debug)]
pub(in crate::store) struct HomeOp {
    pub(in crate::store) id: u64,
    pub(in crate::store) extent: Extent,
    /// The pieces it stands for; may reach past `extent`, where the device has ended.
    covers: Extent,
    pub(in crate::store) kind: OpKind,
}

/// What a plan came to.
#[derive(Debug, Default)]
pub(in crate::store) struct Planned {
    pub(in crate::store) ops: Vec<HomeOp>,
    /// A barrier up to here is needed before the rest can go (J13).
    pub(in crate::store) barrier: Option<u64>,
}

impl Planned {
    fn needs(&mut self, seq: u64) {
        self.barrier = Some(self.barrier.map_or(seq, |other| other.max(seq)));
    }
}

impl DirtyMap {
    /// Takes the next operations, which are in flight from now on.
    pub(in crate::store) fn plan(&mut self, limits: &Limits) -> Planned {
        let mut planned = Planned::default();
        let mut bytes = limits.bytes;
        for start in self.candidates(limits) {
            if bytes == 0 || planned.ops.len() >= limits.ops {
                break;
            }
            let Some(piece) = self.pieces.get(&start).filter(|p| p.state == State::Dirty) else {
                continue;
            };
            if piece.body == Body::Zero {
                self.plan_zero(start, limits, &mut planned);
                continue;
            }
            let follows = planned.ops.last().is_none_or(|last| last.extent.end() == start);
            if limits.contiguous && !follows {
                break;
            }
            bytes = bytes.saturating_sub(self.plan_data(start, bytes, limits, &mut planned));
        }
        self.plan_size(limits, &mut planned);
        planned
    }

    /// Where to look for work, some more than the limits need: from the cursor on and around, what
    /// holds the tail, or what is old.
    fn candidates(&self, limits: &Limits) -> Vec<u64> {
        let most = limits.ops.saturating_mul(4).saturating_add(64);
        let around = || self.places.range(self.cursor..).chain(self.places.range(..self.cursor));
        let in_order = |mut starts: Vec<u64>| {
            starts.sort_unstable_by_key(|start| (*start < self.cursor, *start));
            starts
        };
        match limits.pick {
            Pick::Any => around().take(most).copied().collect(),
            Pick::TailFirst(seq) => {
                let tail = self.waiting.range(..=(seq, u64::MAX)).take(most);
                let mut starts = in_order(tail.map(|(_, start)| *start).collect());
                starts.extend(around().take(most));
                starts
            }
            Pick::DirtySince(ms) => {
                let old = |start: &u64| self.pieces.get(start).is_some_and(|p| p.since_ms <= ms);
                let waiting = self.waiting.iter().map(|(_, start)| *start);
                in_order(waiting.take_while(old).take(most).collect())
            }
        }
    }

    fn is_free(&self, extent: &Extent) -> bool {
        !self.flying.iter().any(|(_, other, _)| other.overlaps(extent))
    }

    fn fly(&mut self, claim: Extent) -> u64 {
        self.next_op += 1;
        self.flying.push((self.next_op, claim, clock::now_ms()));
        self.next_op
    }

    fn plan_zero(&mut self, start: u64, limits: &Limits, planned: &mut Planned) {
        let Some(piece) = self.pieces.get(&start).copied() else { return };
        if self.home.is_lost() {
            // Whatever was cut off may be there again.
            return;
        }
        if start >= self.home.now() {
            self.set_state(start, State::Written);
            return;
        }
        if piece.write_seq > limits.durable && !limits.skip_wal {
            return planned.needs(piece.write_seq);
        }
        let (extent, kind) = match piece.end {
            u64::MAX => (from(start), OpKind::SetSize(start)),
            end => (between(start, end.min(self.home.now())), OpKind::Zero),
        };
        let claim = units(extent, limits.unit);
        if !self.is_free(&claim) {
            return;
        }
        if let OpKind::SetSize(bytes) = kind {
            self.home.foresee(bytes);
        }
        let id = self.fly(claim);
        self.set_state(start, State::Writing(id));
        planned.ops.push(HomeOp { id, extent, covers: between(start, piece.end), kind });
    }

    /// One write, from `start` on; the bytes it took.
    fn plan_data(&mut self, start: u64, bytes: u64, limits: &Limits, planned: &mut Planned) -> u64 {
        let mut parts = Vec::new();
        let mut starts = Vec::new();
        let mut end = start;
        while let Some(piece) = self.pieces.get(&end) {
            let is_data = piece.body != Body::Zero && piece.state == State::Dirty;
            let len = piece.end - end;
            let full = !starts.is_empty() && end - start + len > COALESCED_MAX.min(bytes);
            if !is_data || full {
                break;
            }
            if limits.contiguous && !starts.is_empty() {
                break;
            }
            if piece.write_seq > limits.durable && !limits.skip_wal {
                planned.needs(piece.write_seq);
                break;
            }
            let claim = units(between(start, piece.end), limits.unit);
            if piece.end > self.home.now() {
                // What was gathered before it goes first: both may share a unit.
                if starts.is_empty() {
                    self.grow(limits, planned);
                }
                break;
            }
            if !self.is_free(&claim) {
                break;
            }
            let Some((placed, skip)) = record_of(piece.seq, &piece.body) else { break };
            parts.push(Part { placed, skip, len });
            starts.push(end);
            end = piece.end;
        }
        if starts.is_empty() {
            return 0;
        }
        let extent = between(start, end);
        let id = self.fly(units(extent, limits.unit));
        starts.into_iter().for_each(|start| self.set_state(start, State::Writing(id)));
        self.cursor = end;
        let kind = OpKind::Write(parts);
        planned.ops.push(HomeOp { id, extent, covers: extent, kind });
        extent.len
    }

    /// Data lies past the device's end: it gets the size applications see, once that is durable.
    fn grow(&mut self, limits: &Limits, planned: &mut Planned) {
        let Some(size) = self.size.filter(|size| size.bytes > self.home.now()) else { return };
        self.change_size(size.bytes, size.write_seq, limits, planned);
    }

    fn change_size(&mut self, bytes: u64, seq: u64, limits: &Limits, planned: &mut Planned) {
        if seq > limits.durable && !limits.skip_wal {
            return planned.needs(seq);
        }
        let extent = from(bytes.min(self.home.now()));
        let claim = units(extent, limits.unit);
        if !self.is_free(&claim) {
            return;
        }
        let id = self.fly(claim);
        if let Some(size) = self.size.as_mut() {
            size.state = State::Writing(id);
        }
        self.home.foresee(bytes);
        let kind = OpKind::SetSize(bytes);
        planned.ops.push(HomeOp { id, extent, covers: extent, kind });
    }

    fn plan_size(&mut self, limits: &Limits, planned: &mut Planned) {
        if self.home.is_lost() {
            let (bytes, seq) =
                self.size.map_or((self.home.now(), 0), |size| (size.bytes, size.write_seq));
            return self.change_size(bytes, seq, limits, planned);
        }
        let Some(size) = self.size.filter(|size| size.state == State::Dirty) else { return };
        if size.bytes == self.home.now() && self.is_free(&from(self.home.now())) {
            if let Some(size) = self.size.as_mut() {
                size.state = State::Written;
            }
            return;
        }
        // A truncate that waits cuts it, and says when.
        let last = self.pieces.last_key_value();
        let cut = last.is_some_and(|(start, piece)| {
            piece.end == u64::MAX && piece.state != State::Written && *start < self.home.now()
        });
        if !(cut && size.bytes < self.home.now()) {
            self.change_size(size.bytes, size.write_seq, limits, planned);
        }
    }

    /// An operation came to its end.
    pub(in crate::store) fn complete(&mut self, op: &HomeOp, ok: bool, now_ms: u64) {
        self.flying.retain(|(id, ..)| *id != op.id);
        // A sync that failed meanwhile may have been of its bytes, and its error is told only once.
        let (done, ok) = (ok, ok && op.id > self.doubtful);
        let state = if ok { State::Written } else { State::Dirty };
        let was_written = self.load_written();
        for start in self.mine(op) {
            self.set_state(start, state);
        }
        if let OpKind::SetSize(bytes) = op.kind {
            if done {
                self.home.set(bytes);
                self.home.rely(ok);
            }
            if let Some(size) = self.size.as_mut()
                && size.state == State::Writing(op.id)
            {
                let done = ok && size.bytes == bytes;
                size.state = if done { State::Written } else { State::Dirty };
            }
        }
        if was_written == 0 {
            self.written_since_ms = now_ms;
        }
    }

    fn load_written(&self) -> u64 {
        self.written + u64::from(self.size_is_written())
    }

    /// Pieces that an operation still stands for.
    pub(in crate::store) fn mine(&self, op: &HomeOp) -> Vec<u64> {
        let range = op.covers.offset..op.covers.end();
        let pieces = self.pieces.range(range);
        pieces
            .filter(|(_, piece)| piece.state == State::Writing(op.id))
            .map(|(start, _)| *start)
            .collect()
    }

    /// The parts of an operation's range that nothing newer covers.
    pub(in crate::store) fn still_of(&self, op: &HomeOp) -> Vec<Extent> {
        let ends = |start: u64| self.pieces.get(&start).map(|piece| between(start, piece.end));
        self.mine(op).into_iter().filter_map(ends).collect()
    }

    /// Registers a change of the device outside the journal; None while something in flight
    /// shares a unit with it (J6).
    pub(in crate::store) fn begin_direct(&mut self, extent: Extent, unit: u64) -> Option<u64> {
        let claim = units(extent, unit);
        self.is_free(&claim).then(|| self.fly(claim))
    }

    /// The end of such a change.
    pub(in crate::store) fn end_direct(&mut self, id: u64) {
        self.flying.retain(|(other, ..)| *other != id);
    }

    /// A sync of the device begins: it covers what is written now (J4). Some if it takes the last
    /// of it home: the time to set before.
    pub(in crate::store) fn begin_sync(&mut self) -> Option<Option<Timestamp>> {
        self.syncing = true;
        self.home.begin_sync(self.flying.is_empty());
        let is_last = self.waiting.is_empty()
            && self.flying.is_empty()
            && self.size.is_none_or(|size| size.state == State::Written);
        for start in self.in_state(State::Written) {
            self.set_state(start, State::Syncing);
        }
        if let Some(size) = self.size.as_mut()
            && size.state == State::Written
        {
            size.state = State::Syncing;
        }
        if !is_last {
            return None;
        }
        Some(self.time.as_mut().map(|time| {
            time.syncing = true;
            time.mtime
        }))
    }

    /// A sync by somebody else failed: the error may be of home writes, and is told only once.
    pub(in crate::store) fn spoil(&mut self) {
        let syncing = self.syncing;
        self.end_sync(false);
        (self.syncing, self.spoiled) = (syncing, syncing);
    }

    /// The sync ended. After a failure everything since the last good one is dirty again (J11).
    pub(in crate::store) fn end_sync(&mut self, ok: bool) {
        self.syncing = false;
        let ok = !std::mem::take(&mut self.spoiled) && ok;
        self.home.end_sync(ok);
        if !ok {
            self.doubtful = self.next_op;
            for state in [State::Syncing, State::Written] {
                self.in_state(state).into_iter().for_each(|s| self.set_state(s, State::Dirty));
            }
            if let Some(size) = self.size.as_mut()
                && matches!(size.state, State::Syncing | State::Written)
            {
                size.state = State::Dirty;
            }
            if let Some(time) = self.time.as_mut() {
                time.syncing = false;
            }
            return;
        }
        for start in self.in_state(State::Syncing) {
            self.take(start);
        }
        self.size = self.size.filter(|size| size.state != State::Syncing);
        self.time = self.time.filter(|time| !time.syncing);
    }

    fn in_state(&self, state: State) -> Vec<u64> {
        let of_state = |start: &u64| self.pieces.get(start).is_some_and(|p| p.state == state);
        self.busy.iter().map(|(_, start)| *start).filter(of_state).collect()
    }
}

fn between(start: u64, end: u64) -> Extent {
    Extent { offset: start, len: end.saturating_sub(start) }
}

fn from(start: u64) -> Extent {
    between(start, u64::MAX)
}

/// The units an extent touches.
fn units(extent: Extent, unit: u64) -> Extent {
    let start = extent.offset & !(unit - 1);
    let end = extent.end().checked_next_multiple_of(unit).unwrap_or(u64::MAX);
    between(start, end)
}
