//! Reading a device that has dirty pieces: bytes come from the journal first, then cache, then
//! device (STORE 1, a binding order: a cached block under a dirty piece may be of any age).
//!
//! The positions are taken and their segments pinned under the device's dirty lock; all reading is
//! done without it. Blocks that no clean byte is wanted of are not fetched.

use super::device::{Admission, Device, ReadPlan};
use super::dirty::{Body, Known};
use crate::error::{Error, Kind, Result};
use crate::journal::{Journal, Pin};
use crate::units::Extent;

/// What holes and data are multiples of.
const GRAIN: u64 = 4096;

/// A piece, and what keeps its bytes where they are.
pub(super) struct Pinned {
    known: Known,
    _pin: Option<Pin>,
}

impl Pinned {
    /// Its bytes, in their place of a request that begins at `offset`.
    fn copy(&self, journal: &Journal, offset: u64, out: &mut [u8]) -> Result<()> {
        let at = (self.known.extent.offset - offset) as usize;
        let target = out.get_mut(at..at + self.known.extent.len as usize);
        let target =
            target.ok_or_else(|| Error::new(Kind::Internal, "read", "past the request"))?;
        match self.known.record() {
            Some((placed, skip)) => journal.read_payload(&placed, skip, target),
            None => {
                target.fill(0);
                Ok(())
            }
        }
    }
}

impl Device {
    /// What the dirty map knows of a request, pinned.
    pub(super) fn known(&self, plan: &ReadPlan) -> Vec<Pinned> {
        let Some(writeback) = self.shared.writeback() else { return Vec::new() };
        let extent = Extent { offset: plan.offset, len: plan.len as u64 };
        let dirty = self.dirty.lock();
        let known = dirty.map.lookup(extent);
        let pin = |known: Known| Pinned {
            known,
            _pin: known.record().map(|(placed, _)| writeback.journal.pin(&placed)),
        };
        known.into_iter().map(pin).collect()
    }

    /// A request of which something is dirty: answered if all of it is. None if nothing is.
    pub(super) fn try_dirty(&self, plan: &ReadPlan, out: &mut [u8]) -> Option<bool> {
        let writeback = self.shared.writeback()?;
        let known = self.known(plan);
        if known.is_empty() {
            return None;
        }
        let covered: u64 = known.iter().map(|pinned| pinned.known.extent.len).sum();
        if covered < plan.len as u64 {
            return Some(false);
        }
        let copied =
            known.iter().try_for_each(|pinned| pinned.copy(&writeback.journal, plan.offset, out));
        if copied.is_err() {
            // `read` meets it again, and tells.
            return Some(false);
        }
        self.count_dirty(plan, self.blocks_of(plan));
        Some(true)
    }

    /// Reads what is clean of a request, then puts the dirty pieces over it.
    pub(super) fn read_merged(
        &self,
        plan: &ReadPlan,
        known: Vec<Pinned>,
        out: &mut [u8],
    ) -> Result<()> {
        let Some(writeback) = self.shared.writeback() else { return self.read_clean(plan, out) };
        let mut left = self.blocks_of(plan);
        for gap in self.gaps(plan, &known) {
            let at = (gap.offset - plan.offset) as usize;
            let admission = match &plan.admission {
                Admission::Cached(admission) => Admission::Cached(*admission),
                Admission::Off => Admission::Off,
            };
            let part = ReadPlan { offset: gap.offset, len: gap.len as usize, admission };
            left = left.saturating_sub(self.blocks_of(&part));
            self.read_clean(&part, out.get_mut(at..at + part.len).unwrap_or_default())?;
        }
        self.count_dirty(plan, left);
        known.iter().try_for_each(|pinned| pinned.copy(&writeback.journal, plan.offset, out))
    }

    fn blocks_of(&self, plan: &ReadPlan) -> u64 {
        let block = u64::from(self.shared.block_size);
        (plan.offset + plan.len as u64).div_ceil(block) - plan.offset / block
    }

    fn count_dirty(&self, plan: &ReadPlan, blocks: u64) {
        if let Admission::Cached(admission) = &plan.admission {
            self.shared.cache.count_dirty(&self.cached, admission, blocks);
        }
    }

    /// The runs of blocks of which some byte is clean, clipped to the request.
    fn gaps(&self, plan: &ReadPlan, known: &[Pinned]) -> Vec<Extent> {
        let block = u64::from(self.shared.block_size);
        let end = plan.offset + plan.len as u64;
        let mut gaps: Vec<Extent> = Vec::new();
        let mut add = |from: u64, to: u64| {
            if from >= to {
                return;
            }
            let start = (from - from % block).max(plan.offset);
            let stop = to.next_multiple_of(block).min(end);
            match gaps.last_mut() {
                Some(last) if last.end() >= start => last.len = stop - last.offset,
                _ => gaps.push(Extent { offset: start, len: stop - start }),
            }
        };
        let mut at = plan.offset;
        for pinned in known {
            add(at, pinned.known.extent.offset);
            at = pinned.known.extent.end();
        }
        add(at, end);
        gaps
    }

    /// The next data or hole, with what is in the journal. As of a file system, both begin at
    /// multiples of `GRAIN`: tar(1) fails on others.
    pub(super) fn seek_merged(&self, offset: u64, hole: bool) -> Result<u64> {
        let (size, end) = (self.size(), Error::os("lseek", rustix::io::Errno::NXIO));
        if offset >= size {
            return Err(end);
        }
        let mut at = offset;
        while at < size {
            let (is_hole, until) = self.stretch(at, size)?;
            if is_hole == hole {
                return Ok(at);
            }
            at = until;
        }
        if hole { Ok(size) } else { Err(end) }
    }

    /// Whether a byte is in a hole, and up to where that is so, at least.
    fn stretch(&self, at: u64, size: u64) -> Result<(bool, u64)> {
        let grain = at - at % GRAIN;
        let dirty = self.dirty.lock();
        let (piece, home_size) = (dirty.map.at(at), dirty.map.home_size());
        let near = dirty.map.lookup(Extent { offset: grain, len: GRAIN });
        let next = dirty.map.next_piece(grain + GRAIN).unwrap_or(u64::MAX);
        drop(dirty);
        if near.iter().any(|known| known.body != Body::Zero) {
            let whole = piece.filter(|(body, _)| *body != Body::Zero).map_or(0, |(_, end)| end);
            return Ok((false, (whole - whole % GRAIN).max(grain + GRAIN).min(size)));
        }
        let inside = (grain + GRAIN).min(size);
        if let Some((Body::Zero, end)) = piece {
            let zeros: u64 = near
                .iter()
                .map(|known| known.extent.end().min(inside).saturating_sub(known.extent.offset))
                .sum();
            if zeros >= inside - grain {
                return Ok((true, (end - end % GRAIN).max(inside).min(size)));
            }
            // The rest of the block is as at home.
            let is_hole = grain >= home_size || self.home_data(grain)? >= inside;
            return Ok((is_hole, inside));
        }
        let until = (next - next % GRAIN).max(grain + GRAIN).min(size);
        if at >= home_size {
            return Ok((true, until));
        }
        match self.home_data(at)? {
            data if data <= at => {
                let hole = self.file.seek(at, true)?;
                Ok((false, if hole > at { hole.min(until) } else { until }))
            }
            data => Ok((true, data.min(until))),
        }
    }

    /// The next data at home; none is far away.
    fn home_data(&self, at: u64) -> Result<u64> {
        match self.file.seek(at, false) {
            Err(error) if error.errno() == rustix::io::Errno::NXIO.raw_os_error() => Ok(u64::MAX),
            other => other,
        }
    }
}
