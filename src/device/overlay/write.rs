//! Writing and zeroing: blocks go to the data file as a whole before the map says `Upper`.
//!
//! Writes hold `shape` shared: no block stops being `Upper` under one. Two writes that share a
//! block without sharing bytes meet only where the block is not `Upper` yet, that is in `copy_up`,
//! which looks again once it has the lock. Writes that share bytes are ordered by the caller.

use super::{BlockState, OverlayDevice};
use crate::clock;
use crate::device::memory::check_end;
use crate::error::Result;
use crate::sys::AlignedBuf;

/// Bytes of one write, and what they are part of.
#[derive(Clone, Copy)]
struct Part<'a> {
    bytes: &'a [u8],
    offset: u64,
    /// As writeback writes: size and time are the caller's.
    home: bool,
}

impl Part<'_> {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

impl OverlayDevice {
    /// As `write_at`, or (`home`) as `write_home`.
    pub(super) fn write(&self, data: &[u8], offset: u64, home: bool) -> Result<()> {
        check_end("write", offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        let end = offset + data.len() as u64;
        let _shape = self.shape.read();
        self.clean_tail(end)?;
        let (first, last) = (self.first_block(offset), self.first_block(end - 1));
        let (head, tail) = {
            let map = self.map.lock();
            let lacks = |block| map.runs.at(block).state != BlockState::Upper;
            // A block that is both is the head.
            let cut = !end.is_multiple_of(self.block);
            let head = !offset.is_multiple_of(self.block) || first == last && cut;
            (head && lacks(first), first != last && cut && lacks(last))
        };
        let from = if head { ((first + 1) * self.block).min(end) } else { offset };
        let to = if tail { last * self.block } else { end };
        let (before, rest) = data.split_at((from - offset) as usize);
        let (middle, after) = rest.split_at((to - from) as usize);
        if !before.is_empty() {
            self.copy_up(Part { bytes: before, offset, home })?;
        }
        if !middle.is_empty() {
            let part = Part { bytes: middle, offset: from, home };
            self.put(middle, from, part)?;
        }
        if !after.is_empty() {
            self.copy_up(Part { bytes: after, offset: to, home })?;
        }
        Ok(())
    }

    /// Writes a part of one block, and with it, if need be, the rest.
    fn copy_up(&self, part: Part<'_>) -> Result<()> {
        let one = self.copy_up.lock();
        let block = self.first_block(part.offset);
        let start = block * self.block;
        let (state, lower_end) = {
            let map = self.map.lock();
            (map.runs.at(block).state, map.lower_end)
        };
        if state == BlockState::Upper {
            // Somebody else was first.
            drop(one);
            return self.put(part.bytes, part.offset, part);
        }
        let mut whole = AlignedBuf::lend(self.block as usize);
        let visible = match state {
            BlockState::Lower => lower_end.saturating_sub(start).min(self.block) as usize,
            _ => 0,
        };
        let (from, to) = ((part.offset - start) as usize, (part.end() - start) as usize);
        let (old, behind) = whole.split_at_mut(visible);
        behind.fill(0);
        // What is overwritten as a whole need not be read.
        if from > 0 || to < visible {
            self.read_lower(old, start)?;
        }
        if let Some(place) = whole.get_mut(from..to) {
            place.copy_from_slice(part.bytes);
        }
        self.put(&whole, start, part)
    }

    /// Writes `bytes`, which are `part` or the block around it, to the data file and tells the map:
    /// all their blocks are `Upper`, by this or from before.
    fn put(&self, bytes: &[u8], offset: u64, part: Part<'_>) -> Result<()> {
        let end = offset + bytes.len() as u64;
        let result = if part.home {
            self.data.write_home(bytes, offset)
        } else {
            self.data.write_at(bytes, offset)
        };
        if result.is_err() && !part.home {
            self.scrub(offset, end);
        }
        let (first, last) = (self.first_block(offset), end.div_ceil(self.block));
        let mut map = self.map.lock();
        // Also of a failed one: some of it may be there.
        map.note_written(first, last);
        result?;
        map.set_upper(first, last);
        if !part.home {
            map.grow(part.end());
            map.mtime = Some(clock::wall());
        }
        Ok(())
    }

    /// After a failed write: what it may have left behind the size, in the block that the size is
    /// in, must not come into view with a later one.
    fn scrub(&self, offset: u64, end: u64) {
        let (size, upper) = {
            let map = self.map.lock();
            (map.size, map.runs.at(map.size / self.block).state == BlockState::Upper)
        };
        let (from, to) = (offset.max(size), end.min(size.next_multiple_of(self.block)));
        if upper && from < to {
            // The write's own error is told; of this one nothing else is known.
            let _ = self.data.write_at(&vec![0; (to - from) as usize], from);
        }
    }

    /// Before the size becomes `size`: makes zeros of what the data file may have behind the old
    /// one. Whoever writes there has come through here before, so nothing is lost.
    pub(super) fn clean_tail(&self, size: u64) -> Result<()> {
        if self.mutants.trust_tail || self.tail_in_the_way(size).is_none() {
            return Ok(());
        }
        let _one = self.copy_up.lock();
        let Some(from) = self.tail_in_the_way(size) else { return Ok(()) };
        let zeros = vec![0; (from.next_multiple_of(self.block) - from) as usize];
        let result = self.data.write_at(&zeros, from);
        let block = self.first_block(from);
        let mut map = self.map.lock();
        map.note_written(block, block + 1);
        result?;
        map.tail_unknown = false;
        Ok(())
    }

    /// The present size, if growing to `size` would show unknown bytes behind it.
    fn tail_in_the_way(&self, size: u64) -> Option<u64> {
        let mut map = self.map.lock();
        (size > map.size && map.must_clean_tail()).then_some(map.size)
    }

    /// Makes `offset..end` zeros as far as it lies within the size. Alone in `shape`.
    pub(super) fn zero(&self, offset: u64, end: u64) -> Result<()> {
        let size = self.map.lock().size;
        if offset >= size {
            return Ok(());
        }
        // Behind the size there is nothing to keep: the last block may go as a whole.
        let end = if end >= size { size.next_multiple_of(self.block) } else { end };
        let head_end = offset.next_multiple_of(self.block).min(end);
        let tail = (end - end % self.block).max(head_end);
        self.zero_part(offset, head_end.min(size))?;
        self.zero_part(tail, end.min(size))?;
        let (first, last) = (self.first_block(head_end), self.first_block(tail));
        if head_end.is_multiple_of(self.block) && first < last {
            self.map.lock().set_zero(first, last);
        }
        Ok(())
    }

    /// Makes a part of one block zeros, unless it reads so already.
    fn zero_part(&self, from: u64, to: u64) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let (state, lower_end) = {
            let map = self.map.lock();
            (map.runs.at(self.first_block(from)).state, map.lower_end)
        };
        let to = if state == BlockState::Lower { to.min(lower_end) } else { to };
        if state == BlockState::Zero || from >= to {
            return Ok(());
        }
        let mut bytes = vec![0; (to - from) as usize];
        self.read(&mut bytes, from)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        bytes.fill(0);
        self.copy_up(Part { bytes: &bytes, offset: from, home: false })
    }
}
