//! Making changes durable: the bytes, then the map, then the holes.
//!
//! Why a save never names bytes that are not durable. Only a write that has returned from the data
//! file makes a block `Upper` in the map in memory, and notes it as written in the same step. A
//! save takes what changed, and its values, in one step (`take_batch`) BEFORE the sync of the data
//! file begins, and nothing is added to it later. So every block that it calls `Upper` was written
//! before that sync began, which covers it; what writes change meanwhile is noted anew and belongs
//! to the next save. The saved map is then exactly the map of that moment: it is the one saved
//! before, with every row replaced that changed since.
//!
//! Why a crash finds no block with bytes of another time. A block that the saved map calls `Upper`
//! is in the data file only ever overwritten by newer bytes of that block, or punched after a save
//! that no longer calls it so; of all others nobody looks at the bytes. A punch must not meet a
//! write that makes the block `Upper` again: it holds `shape` alone and looks at the map then.
//!
//! A sync that fails leaves bytes that no later sync makes durable, as the kernel takes them for
//! clean. They are `doubtful`, and written again before the next sync. Where the kernel has dropped
//! them, they are lost: the error was told.

use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;

use super::map::Batch;
use super::read::fill;
use super::runs::{Run, Runs};
use super::{BlockState, MapChange, OverlayDevice};
use crate::device::Range;
use crate::error::{Error, Result};
use crate::sys::AlignedBuf;
use crate::units::Timestamp;

/// Bytes written again, or punched, while writes wait.
const REWRITE_STEP: u64 = 1 << 20;
const PUNCH_STEP: u64 = 1 << 30;

/// What is durable.
pub(super) struct Saved {
    size: u64,
    lower_end: u64,
    /// Blocks that were written before a sync of the data file that failed.
    doubtful: Runs,
}

impl Saved {
    pub(super) fn new(size: u64, lower_end: u64) -> Saved {
        Saved { size, lower_end, doubtful: Runs::default() }
    }
}

impl OverlayDevice {
    /// Makes all changes durable; with `settle` only if bytes would be lost by the end of this
    /// process: rows or sizes are pending. After an error all of them still are.
    pub(super) fn commit(&self, settle: bool) -> Result<()> {
        let failed_before = self.failed_syncs.load(SeqCst);
        let mut saved = self.saved.lock();
        let failed_meanwhile = self.failed_syncs.load(SeqCst) != failed_before;
        let (rows, written) = {
            let map = self.map.lock();
            (map.is_pending(), map.has_written())
        };
        if rows || !settle && (written || !saved.doubtful.is_empty()) {
            self.write_again(&mut saved.doubtful)?;
            let batch = self.map.lock().take_batch();
            self.save_batch(&mut saved, batch)?;
        } else {
            self.save_time(&saved)?;
        }
        // The failure that another caller was told may have been of our bytes, too.
        if failed_meanwhile { Err(Error::os("fdatasync", Errno::IO)) } else { Ok(()) }
    }

    fn save_batch(&self, saved: &mut Saved, mut batch: Batch) -> Result<()> {
        if self.mutants.punch_before_save {
            self.punch_all(&batch.freed);
        }
        if self.mutants.save_before_sync {
            self.store.save(&batch.change)?;
        }
        if !batch.written.is_empty()
            && let Err(error) = self.data.sync(true)
        {
            self.failed_syncs.fetch_add(1, SeqCst);
            saved.doubtful.add_all(&batch.written);
            self.map.lock().put_back(batch);
            return Err(error);
        }
        if batch.changes()
            && let Err(error) = self.store.save(&batch.change)
        {
            self.map.lock().put_back(batch);
            return Err(error);
        }
        (saved.size, saved.lower_end) = (batch.change.size, batch.change.lower_end);
        let freed = std::mem::take(&mut batch.freed);
        self.punch_all(&freed);
        Ok(())
    }

    /// Saves a pending time, which needs no bytes to be durable.
    fn save_time(&self, saved: &Saved) -> Result<()> {
        let Some(mtime) = self.map.lock().mtime.take() else { return Ok(()) };
        let (size, lower_end) = (saved.size, saved.lower_end);
        let change = MapChange { size, lower_end, mtime: Some(mtime), ..MapChange::default() };
        self.store.save(&change).inspect_err(|_| {
            self.map.lock().mtime.get_or_insert(mtime);
        })
    }

    /// As `set_mtime`: durable on return, with the rows if all their bytes are durable already.
    pub(super) fn save_mtime(&self, mtime: Timestamp) -> Result<()> {
        let mut saved = self.saved.lock();
        let batch = {
            let mut map = self.map.lock();
            map.mtime = Some(mtime);
            let safe = !map.has_written() && saved.doubtful.is_empty();
            safe.then(|| map.take_batch())
        };
        match batch {
            Some(batch) => self.save_batch(&mut saved, batch),
            None => self.save_time(&saved),
        }
    }

    /// Writes again what a failed sync left doubtful; what is not `Upper` any more needs it not.
    fn write_again(&self, doubtful: &mut Runs) -> Result<()> {
        if self.mutants.skip_rewrite {
            *doubtful = Runs::default();
        }
        let step = REWRITE_STEP / self.block;
        while let Some(run) = doubtful.next_from(0) {
            let end = run.end.min(run.first + step);
            let _shape = self.shape.write();
            let parts: Vec<Run> = self.map.lock().runs.within(run.first, end).collect();
            for part in parts.iter().filter(|part| part.state == BlockState::Upper) {
                let offset = part.first * self.block;
                let mut bytes = AlignedBuf::lend(((part.end - part.first) * self.block) as usize);
                fill(&*self.data, &mut bytes, offset)?;
                self.data.write_at(&bytes, offset)?;
                self.map.lock().note_written(part.first, part.end);
            }
            doubtful.subtract(run.first, end);
        }
        Ok(())
    }

    /// Makes holes of what is not used any more. Failures cost space, not bytes: they are not told.
    fn punch_all(&self, freed: &Runs) {
        let step = PUNCH_STEP / self.block;
        for run in freed.iter() {
            let mut first = run.first;
            while first < run.end {
                let end = run.end.min(first.saturating_add(step));
                self.punch(first, end);
                first = end;
            }
        }
    }

    fn punch(&self, first: u64, end: u64) {
        let _shape = self.shape.write();
        let parts = self.map.lock().not_upper(first, end);
        for part in parts {
            let (offset, len) = (part.first * self.block, (part.end - part.first) * self.block);
            match self.data.change_range(Range::Punch, offset, len) {
                Err(error) if error.kind != crate::error::Kind::NotSupported => {
                    self.map.lock().free_again(part.first, part.end);
                }
                _ => {}
            }
        }
    }
}
