//! Reading, and finding data and holes, by the map.

use rustix::io::Errno;

use super::{BlockDevice, BlockState, OverlayDevice};
use crate::error::{Error, Result};

/// Where a run of the map takes its bytes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    Lower,
    Data,
    Nowhere,
}

/// Bytes of one origin, up to `end`.
#[derive(Clone, Copy)]
struct Piece {
    end: u64,
    from: From,
}

impl OverlayDevice {
    /// The bytes from `at` on that come from one place; `end` does not know of the size.
    fn piece(&self, at: u64) -> Piece {
        let map = self.map.lock();
        let run = map.runs.at(at / self.block);
        let end = run.end.saturating_mul(self.block);
        match run.state {
            BlockState::Upper => Piece { end, from: From::Data },
            BlockState::Lower if at < map.lower_end => {
                Piece { end: end.min(map.lower_end), from: From::Lower }
            }
            BlockState::Lower | BlockState::Zero => Piece { end, from: From::Nowhere },
        }
    }

    /// As `read_at`.
    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        loop {
            let (size, reverts) = {
                let map = self.map.lock();
                (map.size, map.reverts)
            };
            let len = size.saturating_sub(offset).min(buf.len() as u64) as usize;
            let out = buf.get_mut(..len).unwrap_or_default();
            let result = self.read_pieces(out, offset);
            // Of a data file that was emptied meanwhile it has read what never was.
            if self.map.lock().reverts == reverts {
                return result.map(|()| len);
            }
        }
    }

    fn read_pieces(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let piece = self.piece(at);
            let len = (piece.end - at).min(rest.len() as u64) as usize;
            let (now, later) = std::mem::take(&mut rest).split_at_mut(len);
            match piece.from {
                From::Lower => self.read_lower(now, at)?,
                From::Data => fill(&*self.data, now, at)?,
                From::Nowhere => now.fill(0),
            }
            (at, rest) = (at + len as u64, later);
        }
        Ok(())
    }

    /// All of `buf` from the lower; zeros where it has got shorter.
    pub(super) fn read_lower(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        match &self.lower {
            Some(lower) => fill(&**lower, buf, offset),
            None => {
                buf.fill(0);
                Ok(())
            }
        }
    }

    /// As `seek`.
    pub(super) fn find(&self, offset: u64, hole: bool) -> Result<u64> {
        let size = self.size()?;
        let nothing = || Error::os("lseek", Errno::NXIO);
        let mut at = offset;
        while at < size {
            let piece = self.piece(at);
            let found = match piece.from {
                From::Data => (!hole).then_some(at),
                From::Nowhere => hole.then_some(at),
                From::Lower => self.find_in_lower(at, hole)?.filter(|found| *found < piece.end),
            };
            if let Some(found) = found {
                return if found < size { Ok(found) } else { Err(nothing()) };
            }
            at = piece.end;
        }
        if hole && offset < size { Ok(size) } else { Err(nothing()) }
    }

    fn find_in_lower(&self, at: u64, hole: bool) -> Result<Option<u64>> {
        let Some(lower) = &self.lower else { return Ok(hole.then_some(at)) };
        match lower.seek(at, hole) {
            // Behind its end, or no more data: a hole begins here, or has begun.
            Err(error) if error.errno() == Errno::NXIO.raw_os_error() => Ok(hole.then_some(at)),
            other => other.map(Some),
        }
    }
}

/// Reads all of `buf`; zeros where the device ends.
pub(super) fn fill(device: &dyn BlockDevice, buf: &mut [u8], offset: u64) -> Result<()> {
    let got = device.read_at(buf, offset)?;
    buf.get_mut(got..).unwrap_or_default().fill(0);
    Ok(())
}
