//! Waiting for devices to be clean.
//!
//! A flush waits for what was acknowledged before it began, so one beside a busy writer ends. It
//! does not wait for a device that cannot be written: it says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use super::Writeback;
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::stats::FlushProgress;
use crate::store::device::Device;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// A device counted as flushing while this lives.
struct Asked<'a>(&'a AtomicU32);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Everything counted as flushing while this lives.
struct All<'a>(&'a AtomicUsize);

impl Drop for All<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Writeback {
    /// Waits until everything acknowledged of a device so far is home and synced. EIO if it cannot
    /// be written.
    pub(in crate::store) fn flush_device(&self, device: &Device) -> Result<()> {
        let Some(device) = device.me.upgrade() else { return Ok(()) };
        let end = self.flush(Some(vec![device]), &mut |_| true)?;
        match end.stuck.first() {
            None => Ok(()),
            Some((_, why)) => Err(Error::new(Kind::Io, "flush", why.clone())),
        }
    }

    /// Flushes these devices, or all; `tell` hears of the progress and may stop the waiting. What
    /// cannot be written is not waited for: it is in `stuck`.
    pub(in crate::store) fn flush(
        &self,
        only: Option<Vec<Arc<Device>>>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        let all = only.is_none().then(|| {
            self.flushing_all.fetch_add(1, SeqCst);
            All(&self.flushing_all)
        });
        let devices = only.unwrap_or_else(|| self.listed());
        let asked: Vec<Asked<'_>> = devices
            .iter()
            .map(|device| {
                device.flushing.fetch_add(1, SeqCst);
                Asked(&device.flushing)
            })
            .collect();
        let until = self.journal.appended_seq();
        let start = clock::now_ms();
        let mut progress = FlushProgress::default();
        let total = left(&devices, until).0;
        self.ring();
        loop {
            if let Some(why) = self.journal.failure() {
                return Err(Error::new(Kind::Io, "flush: the journal failed", why));
            }
            let (bytes, waiting) = left(&devices, until);
            progress.left_bytes = bytes;
            progress.done_bytes = total.saturating_sub(bytes);
            progress.in_flight = self.in_flight.load(Relaxed) as u64;
            progress.depth = progress.depth.max(progress.in_flight);
            progress.elapsed_ms = clock::now_ms().saturating_sub(start);
            progress.stuck = self.stuck(&waiting);
            progress.refused = waiting.iter().filter_map(refused).map(|(path, _)| path).collect();
            let done = waiting.len() <= progress.stuck.len();
            if !tell(&progress) || done {
                break;
            }
            if self.stopping.load(SeqCst) {
                return Err(Error::new(Kind::Busy, "flush", "writeback has ended"));
            }
            if self.is_by_hand() {
                self.go_on();
                continue;
            }
            let mut guard = self.progress.0.lock();
            self.progress.1.wait_for(&mut guard, LOOK);
        }
        drop((asked, all));
        Ok(progress)
    }

    fn stuck(&self, devices: &[Arc<Device>]) -> Vec<(String, String)> {
        let control = self.control.lock();
        let stuck = |device: &Arc<Device>| {
            let id = device.cached.id;
            let why = || (device.name(), control.controller.mode(id).1.to_owned());
            refused(device).or_else(|| control.controller.is_stuck(id).then(why))
        };
        devices.iter().filter_map(stuck).collect()
    }
}

/// The path of a device whose file must not be touched, and why.
fn refused(device: &Arc<Device>) -> Option<(String, String)> {
    device.file.refused().map(|why| (device.name(), why.to_owned()))
}

/// Bytes still to go, and the devices they are of.
fn left(devices: &[Arc<Device>], until: u64) -> (u64, Vec<Arc<Device>>) {
    let mut bytes = 0;
    let mut waiting = Vec::new();
    for device in devices {
        let dirty = device.dirty.lock();
        let old = dirty.map.live_seq().is_some_and(|seq| seq <= until);
        // A time that was not set yet has no record of its own.
        if old || (dirty.map.has_no_pieces() && !dirty.map.is_clean()) {
            bytes += dirty.map.load().live_bytes;
            drop(dirty);
            waiting.push(device.clone());
        }
    }
    (bytes, waiting)
}
