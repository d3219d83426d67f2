//! A device in memory: for tests, examples and images decoded in memory.
//!
//! `Image` is the content, `MemoryDevice` the device over one. An image is sparse and its copies
//! share their blocks until one of them is written, so that thousands of crash states of one
//! device cost little more than what differs between them. Invariant: bytes at and behind `size`
//! are zero in every block that is there. Lock: `image`, held for one copy of bytes, never
//! together with another.

use std::collections::BTreeMap;
use std::ops::Range as Span;
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::io::Errno;

use super::{BlockDevice, Range};
use crate::error::{Error, Result};

/// Bytes of one shared block.
const BLOCK: usize = 16 << 10;

type Block = [u8; BLOCK];

/// The bytes of a device, copied when written. Absent blocks are zeros.
#[derive(Clone, Default)]
pub struct Image {
    size: u64,
    blocks: Arc<BTreeMap<u64, Arc<Block>>>,
}

/// The part of a byte run that lies in one block.
struct Piece {
    block: u64,
    within: Span<usize>,
    of_run: Span<usize>,
}

fn pieces(offset: u64, len: usize) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let start = (at % BLOCK as u64) as usize;
        let count = (BLOCK - start).min(len - done);
        let of_run = done..done + count;
        done += count;
        let block = at / BLOCK as u64;
        (count > 0).then_some(Piece { block, within: start..start + count, of_run })
    })
}

impl Image {
    /// `bytes` zeros.
    pub fn zeros(bytes: u64) -> Image {
        Image { size: bytes, blocks: Arc::default() }
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads at `offset` until `buf` is full or the image ends; the bytes read.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let len = self.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        for Piece { block, within, of_run } in pieces(offset, len) {
            match self.blocks.get(&block) {
                Some(bytes) => buf[of_run].copy_from_slice(&bytes[within]),
                None => buf[of_run].fill(0),
            }
        }
        len
    }

    /// Writes `data` at `offset`; the size grows if needed. Nothing happens if `data` is empty.
    pub fn write(&mut self, data: &[u8], offset: u64) {
        let blocks = Arc::make_mut(&mut self.blocks);
        for Piece { block, within, of_run } in pieces(offset, data.len()) {
            let bytes = blocks.entry(block).or_insert_with(|| Arc::new([0; BLOCK]));
            Arc::make_mut(bytes)[within].copy_from_slice(&data[of_run]);
        }
        if !data.is_empty() {
            self.size = self.size.max(offset + data.len() as u64);
        }
    }

    /// Truncates or extends with zeros.
    pub fn set_size(&mut self, bytes: u64) {
        self.zero(bytes, u64::MAX);
        self.size = bytes;
    }

    /// Zeroes what the image has of a range; its whole blocks become holes.
    pub fn zero(&mut self, offset: u64, len: u64) {
        if offset >= self.size {
            return;
        }
        let end = offset.saturating_add(len);
        // Behind the end there are only zeros: the last block may go as a whole.
        let end = if end >= self.size { u64::MAX } else { end };
        let blocks = Arc::make_mut(&mut self.blocks);
        let size = BLOCK as u64;
        let gone: Vec<u64> = blocks.range(offset / size..).map(|(block, _)| *block).collect();
        for block in gone.into_iter().take_while(|block| block * size < end) {
            let start = offset.saturating_sub(block * size).min(size) as usize;
            let stop = (end - block * size).min(size) as usize;
            if stop - start == BLOCK {
                blocks.remove(&block);
            } else if let Some(bytes) = blocks.get_mut(&block) {
                Arc::make_mut(bytes)[start..stop].fill(0);
            }
        }
    }

    /// The next data or hole at or after `offset`; None past the end.
    pub fn seek(&self, offset: u64, hole: bool) -> Option<u64> {
        let size = BLOCK as u64;
        let first = offset / size;
        let found = if hole {
            let mut block = first;
            while self.blocks.contains_key(&block) {
                block += 1;
            }
            (block * size).max(offset).min(self.size)
        } else {
            (self.blocks.range(first..).next()?.0 * size).max(offset)
        };
        (offset < self.size && (hole || found < self.size)).then_some(found)
    }

    /// All bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size as usize];
        self.read(&mut bytes, 0);
        bytes
    }
}

impl From<&[u8]> for Image {
    fn from(bytes: &[u8]) -> Image {
        let mut image = Image::default();
        image.write(bytes, 0);
        image
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Image) -> bool {
        let within = |a: &Image, b: &Image| {
            a.blocks.iter().all(|(block, bytes)| match b.blocks.get(block) {
                Some(same) => Arc::ptr_eq(bytes, same) || bytes == same,
                None => bytes.iter().all(|byte| *byte == 0),
            })
        };
        self.size == other.size && within(self, other) && within(other, self)
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} bytes, {} blocks)", self.size, self.blocks.len())
    }
}

/// A device in memory. Nothing of it is ever durable; `fault` models that.
#[derive(Debug, Default)]
pub struct MemoryDevice {
    image: RwLock<Image>,
}

impl MemoryDevice {
    /// A device with this content.
    pub fn new(image: Image) -> MemoryDevice {
        MemoryDevice { image: RwLock::new(image) }
    }

    /// The content now; later writes do not change the copy.
    pub fn image(&self) -> Image {
        self.image.read().clone()
    }

    /// Puts another content in its place, as somebody behind our back would.
    pub fn replace(&self, image: Image) {
        *self.image.write() = image;
    }

    /// Changes the content under the lock.
    pub(super) fn change(&self, change: impl FnOnce(&mut Image)) {
        change(&mut self.image.write());
    }
}

/// EFBIG where a file could not end, EINVAL for an empty range, as the kernel answers.
pub(super) fn check_end(op: &'static str, offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(Error::os(op, Errno::FBIG)),
    }
}

pub(super) fn check_range(offset: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::os("fallocate", Errno::INVAL));
    }
    check_end("fallocate", offset, len)
}

impl BlockDevice for MemoryDevice {
    fn prepare(&self, _write: bool) -> Result<()> {
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        Ok(self.image.read().read(buf, offset))
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        check_end("write", offset, data.len() as u64)?;
        self.change(|image| image.write(data, offset));
        Ok(())
    }

    fn size(&self) -> Result<u64> {
        Ok(self.image.read().size())
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        check_end("truncate", bytes, 0)?;
        self.change(|image| image.set_size(bytes));
        Ok(())
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len)?;
        self.change(|image| {
            if matches!(what, Range::Punch | Range::ZeroKeep | Range::ZeroGrow) {
                image.zero(offset, len);
            }
            if matches!(what, Range::AllocateGrow | Range::ZeroGrow) {
                image.set_size(image.size().max(offset + len));
            }
        });
        Ok(())
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.image.read().seek(offset, hole).ok_or_else(|| Error::os("lseek", Errno::NXIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `Image` must do, on plain bytes.
    fn plain(bytes: &mut Vec<u8>, what: u64, offset: usize, len: usize, fill: u8) {
        let end = offset + len;
        match what {
            0 => {
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset..end].fill(fill);
            }
            1 => bytes.resize(offset, 0),
            _ => {
                let end = end.min(bytes.len());
                bytes.get_mut(offset..end).unwrap_or_default().fill(0);
            }
        }
    }

    #[test]
    fn it_reads_like_plain_bytes_and_copies_stay_as_they_were() {
        let mut random = 0x5eed_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % limit
        };
        let (device, mut bytes) = (MemoryDevice::default(), Vec::new());
        let mut copies = Vec::new();
        for step in 0..3000 {
            let (offset, len) = (below(100_000) as usize, 1 + below(50_000) as usize);
            let (what, fill) = (below(5).saturating_sub(2), below(256) as u8);
            plain(&mut bytes, what, offset, len, fill);
            match what {
                0 => device.write_at(&vec![fill; len], offset as u64).unwrap(),
                1 => device.set_size(offset as u64).unwrap(),
                _ => device.change_range(Range::Punch, offset as u64, len as u64).unwrap(),
            }
            if step % 100 == 0 {
                assert_eq!(device.image().to_vec(), bytes, "step {step}");
                assert_eq!(device.image(), Image::from(&bytes[..]), "step {step}");
                copies.push((device.image(), bytes.clone()));
            }
        }
        assert!(copies.iter().all(|(image, bytes)| image.to_vec() == *bytes));
        assert!(copies.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }

    #[test]
    fn holes_are_found_and_the_ends_are_checked() {
        let device = MemoryDevice::new(Image::zeros(10 * BLOCK as u64));
        let block = BLOCK as u64;
        device.write_at(&[1; 10], 3 * block + 7).unwrap();
        assert_eq!(device.seek(0, false).unwrap(), 3 * block);
        assert_eq!(device.seek(3 * block + 1, false).unwrap(), 3 * block + 1);
        assert_eq!(device.seek(3 * block + 1, true).unwrap(), 4 * block);
        assert_eq!(device.seek(5, true).unwrap(), 5);
        let nxio = Some(Errno::NXIO.raw_os_error());
        assert_eq!(device.seek(4 * block, false).err().map(|error| error.errno()), nxio);
        assert_eq!(device.seek(10 * block, true).err().map(|error| error.errno()), nxio);
        assert!(device.write_at(&[1], i64::MAX as u64).is_err());
        assert!(device.change_range(Range::Punch, 0, 0).is_err());
        device.set_size(1 << 50).unwrap();
        device.set_size(3 * block).unwrap();
        assert_eq!(device.image(), Image::zeros(3 * block));
    }
}
