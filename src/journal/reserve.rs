//! Room in the journal, promised before a write takes any lock: the only place a writer waits.
//!
//! States of a request: waiting (a ticket in the queue) -> granted -> returned by drop. Lock:
//! `state`, a leaf (the append lock may be held outside it); nobody waits with another lock held.
//! Invariants: what is granted fits, however segments end (so an append never lacks a slot); the
//! last tenth is granted to internal records and copies forward only; frontend requests are served
//! in order, so a large one is not starved (W6: room that is freed or returned wakes all waiters).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::format::{DEVICE_MAX, record_bytes};
use super::health::Health;
use super::segment::Geometry;
use crate::error::{Error, Kind, Result};

/// Who asks for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A write of an application: waits while the journal is 90 % full.
    Frontend,
    /// Records that help to empty the journal, and copies forward: may use the last tenth.
    Internal,
}

#[derive(Debug, Default)]
struct State {
    available: u64,
    reserved: u64,
    next_ticket: u64,
    queue: VecDeque<u64>,
}

/// The promises. Lock: `state`, a leaf. Invariant: what is granted and not yet used fits into what
/// the ring has, however segments end.
#[derive(Debug)]
pub struct Space {
    geometry: Geometry,
    state: Mutex<State>,
    changed: Condvar,
    health: Arc<Health>,
}

/// The most records a splittable write of `len` bytes becomes.
pub fn pieces_max(geometry: &Geometry, len: u64) -> u64 {
    len / geometry.payload_max() + len / geometry.effective() + 2
}

/// The most room a splittable write of `len` bytes can take.
pub fn charge_data(geometry: &Geometry, len: u64) -> u64 {
    // A header and padding each, and a Device record in each segment.
    let headers = pieces_max(geometry, len).saturating_mul(record_bytes(0) + 8);
    let segments = len / geometry.effective() + 2;
    let devices = segments.saturating_mul(record_bytes(DEVICE_MAX as u64));
    len.saturating_add(headers).saturating_add(devices)
}

/// The most a record that is not split can take: it may leave as much unused before it.
pub fn charge_whole(payload: u64) -> u64 {
    2 * (record_bytes(payload) + record_bytes(DEVICE_MAX as u64))
}

impl Space {
    /// All room that a ring has.
    pub fn new(geometry: Geometry, available: u64, health: Arc<Health>) -> Space {
        let state = State { available, ..State::default() };
        Space { geometry, state: Mutex::new(state), changed: Condvar::new(), health }
    }

    /// Kept for internal use: a tenth.
    pub fn kept(&self) -> u64 {
        u64::from(self.geometry.count) * self.geometry.effective() / 10
    }

    /// What the ring has now; wakes waiters.
    pub fn set_available(&self, bytes: u64) {
        let mut state = self.state.lock();
        let more = bytes > state.available;
        state.available = bytes;
        drop(state);
        if more {
            self.changed.notify_all();
        }
    }

    /// Lowers what the ring has, unless it is promised already; whether it did.
    pub fn shrink(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        let free = state.reserved <= bytes;
        if free {
            state.available = bytes;
        }
        free
    }

    /// The journal failed: waiters look and leave.
    pub fn wake(&self) {
        // Taken so that nobody between its look at `health` and its wait misses this.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    fn grant(&self, state: &mut State, purpose: Purpose, bytes: u64) -> bool {
        let kept = if purpose == Purpose::Frontend { self.kept() } else { 0 };
        let wanted = state.reserved.saturating_add(bytes).saturating_add(kept);
        if wanted > state.available {
            return false;
        }
        state.reserved += bytes;
        true
    }

    /// Waits for room. Invalid if the journal could never hold it, EIO once it failed.
    pub fn reserve(self: &Arc<Space>, purpose: Purpose, bytes: u64) -> Result<Reservation> {
        let whole = u64::from(self.geometry.count) * self.geometry.effective();
        if bytes > whole - self.kept() {
            return Err(Error::new(Kind::Invalid, "journal write", "larger than the journal"));
        }
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        if purpose == Purpose::Frontend {
            state.next_ticket += 1;
            state.queue.push_back(ticket);
        }
        loop {
            let failed = self.health.check();
            let turn = purpose == Purpose::Internal || state.queue.front() == Some(&ticket);
            if failed.is_ok() && !(turn && self.grant(&mut state, purpose, bytes)) {
                self.changed.wait(&mut state);
                continue;
            }
            if purpose == Purpose::Frontend {
                state.queue.retain(|other| *other != ticket);
            }
            drop(state);
            self.changed.notify_all();
            failed?;
            return Ok(Reservation { space: self.clone(), bytes, left: bytes });
        }
    }

    /// Room if there is some at once and nobody waits for it.
    pub fn try_reserve(self: &Arc<Space>, purpose: Purpose, bytes: u64) -> Option<Reservation> {
        let mut state = self.state.lock();
        let turn = purpose == Purpose::Internal || state.queue.is_empty();
        if self.health.check().is_err() || !turn || !self.grant(&mut state, purpose, bytes) {
            return None;
        }
        drop(state);
        Some(Reservation { space: self.clone(), bytes, left: bytes })
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }
}

/// Promised room; what is not used goes back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    space: Arc<Space>,
    bytes: u64,
    left: u64,
}

impl Reservation {
    /// Uses part of it; Invalid if it is not that large.
    pub(super) fn spend(&mut self, bytes: u64) -> Result<()> {
        let left = self
            .left
            .checked_sub(bytes)
            .ok_or_else(|| Error::new(Kind::Invalid, "journal write", "more than was reserved"))?;
        self.left = left;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.space.state.lock().reserved -= self.bytes;
        self.space.changed.notify_all();
    }
}
