//! A device over another: a lower one that is never written, and a sparse file for what changed.
//!
//! Every block is `Lower`, `Upper` (all its bytes are in the data file, at their own offsets) or
//! `Zero`. Bytes of the lower are visible below `lower_end`, the smallest size the file ever had;
//! behind it `Lower` reads as zeros. The size is the map's; that of the data file means nothing.
//!
//! Life of a change: written to the data file -> in the map in memory, pending -> the data file is
//! synced -> saved in the `MapStore` -> what the map does not need any more is punched. See `save`
//! for why no crash shows a block before its bytes.
//!
//! Bytes of the data file that nobody may see are those of blocks that are not `Upper`, and those
//! behind the size. The former are overwritten as a whole before the block becomes `Upper`. The
//! latter are zeros, or `tail_unknown` is set and they are zeroed before the size grows. It is set
//! by truncating, which so writes nothing and cannot fail, and when a map is loaded: a crash may
//! have kept what was written behind a size that was never saved.
//!
//! The data file is written past its end, also by `write_home`: its size is nobody's.
//!
//! Locks, in their order: `saved` (one save at a time), `shape` (shared by writes; alone: changes
//! of size, ranges becoming zeros, punching, writing again), `copy_up` (one partial copy-up, or the
//! cleaning of the tail), `map` (a leaf, never held across I/O). Reads take `map` only.

mod map;
mod read;
mod runs;
mod save;
mod write;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use self::map::Map;
use self::save::Saved;
use super::memory::{check_end, check_range};
use super::{BlockDevice, Range};
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::units::{Stamp, Timestamp};

/// State of an overlay block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockState {
    /// As the lower has it; zeros at and behind `lower_end`.
    Lower,
    /// In the data file.
    Upper,
    /// Zeros.
    Zero,
}

/// A run of blocks in one state: a row of the map. `Lower` is never stored: it is what no row
/// covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MapExtent {
    /// The first block, which names the row.
    pub first: u64,
    /// How many.
    pub blocks: u64,
    /// `Upper` or `Zero`.
    pub state: BlockState,
}

/// What is kept of a file's data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedMap {
    /// The file's size.
    pub size: u64,
    /// Where the lower ends to be visible; never more than `size`.
    pub lower_end: u64,
    /// The rows, in order; none overlaps another.
    pub extents: Vec<MapExtent>,
}

/// What a save changes: rows by their first block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapChange {
    /// The file's size.
    pub size: u64,
    /// As in `SavedMap`.
    pub lower_end: u64,
    /// Rows that are new, or replace the one of the same first block.
    pub put: Vec<MapExtent>,
    /// First blocks of rows that are gone. Some may never have been saved.
    pub remove: Vec<u64>,
    /// The time of the last change, if it is another than before.
    pub mtime: Option<Timestamp>,
}

/// Where the map of one file is kept.
pub trait MapStore: Send + Sync {
    /// The map as it was saved; None: nothing was saved yet.
    fn load(&self) -> Result<Option<SavedMap>>;

    /// Saves a change: durable on return, all or nothing. After an error the same rows come again.
    fn save(&self, change: &MapChange) -> Result<()>;

    /// Times of the last change of bytes and of attributes, as saved.
    fn times(&self) -> Result<(Timestamp, Timestamp)>;
}

/// A file whose changes lie in another place than what it was.
pub struct OverlayDevice {
    lower: Option<Arc<dyn BlockDevice>>,
    data: Arc<dyn BlockDevice>,
    store: Box<dyn MapStore>,
    block: u64,
    saved: Mutex<Saved>,
    /// Syncs of the data file that failed.
    failed_syncs: AtomicU64,
    shape: RwLock<()>,
    copy_up: Mutex<()>,
    map: Mutex<Map>,
    mutants: Mutants,
}

/// Rules that tests switch off to prove that the tests would notice. All false in production.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mutants {
    /// The map is saved before the bytes that it speaks of are durable.
    save_before_sync: bool,
    /// What is free is punched before the map that frees it is saved.
    punch_before_save: bool,
    /// Bytes behind the size are taken for zeros.
    trust_tail: bool,
    /// What a failed sync left doubtful is not written again.
    skip_rewrite: bool,
}

impl std::fmt::Debug for OverlayDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OverlayDevice").field("block", &self.block).finish_non_exhaustive()
    }
}

impl OverlayDevice {
    /// A device over `lower` (None: the file began in the upper layer), `data` (the sparse file;
    /// its own opener opens and makes it at its first write) and the saved map. `block_bytes` is a
    /// power of two, 4096 to 65536. Errors: what the lower and the store say; Corrupt for a map
    /// that cannot be.
    pub fn new(
        lower: Option<Arc<dyn BlockDevice>>,
        data: Arc<dyn BlockDevice>,
        map: Box<dyn MapStore>,
        block_bytes: u32,
    ) -> Result<OverlayDevice> {
        if !block_bytes.is_power_of_two() || !(4096..=65536).contains(&block_bytes) {
            return Err(Error::new(
                Kind::Invalid,
                "open",
                format!("blocks of {block_bytes} bytes"),
            ));
        }
        let store = map;
        let saved = match store.load()? {
            Some(saved) => saved,
            None => {
                let size = lower_size(lower.as_deref())?;
                SavedMap { size, lower_end: size, extents: Vec::new() }
            }
        };
        let map = Map::load(&saved, block_bytes.into())
            .ok_or_else(|| Error::new(Kind::Corrupt, "open", "block map"))?;
        Ok(OverlayDevice {
            lower,
            data,
            store,
            block: block_bytes.into(),
            saved: Mutex::new(Saved::new(saved.size, saved.lower_end)),
            failed_syncs: AtomicU64::new(0),
            shape: RwLock::new(()),
            copy_up: Mutex::new(()),
            map: Mutex::new(map),
            mutants: Mutants::default(),
        })
    }

    /// The map as it is now: rows in order, `lower_end`, size.
    pub fn map(&self) -> SavedMap {
        self.map.lock().saved_form()
    }

    /// Forgets every change: all is the lower's again, and saved so; then the data file is emptied.
    /// An error of the latter leaves bytes there that nobody sees.
    pub fn revert(&self) -> Result<()> {
        let mut saved = self.saved.lock();
        let _shape = self.shape.write();
        let size = lower_size(self.lower.as_deref())?;
        let change = self.map.lock().change_to_revert(size);
        // A save that fails may have been made all the same: then every row is missing.
        self.store.save(&change).inspect_err(|_| self.map.lock().touch_all())?;
        *saved = Saved::new(size, size);
        self.map.lock().reverted(size);
        match self.data.size() {
            Ok(0) => Ok(()),
            Ok(_) => self.data.set_size(0),
            // It was never made.
            Err(error) if error.kind == Kind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn first_block(&self, offset: u64) -> u64 {
        offset / self.block
    }

    /// Whether a range that is not in the data file yet has room there.
    fn check_room(&self, offset: u64, len: u64) -> Result<()> {
        let end = offset + len;
        let parts = {
            let map = self.map.lock();
            map.not_upper(self.first_block(offset), end.div_ceil(self.block))
        };
        let bytes = |first: u64, last: u64| {
            (last * self.block).min(end).saturating_sub((first * self.block).max(offset))
        };
        let missing: u64 = parts.iter().map(|part| bytes(part.first, part.end)).sum();
        match self.free_bytes()? {
            Some(free) if free < missing => Err(Error::os("fallocate", rustix::io::Errno::NOSPC)),
            _ => Ok(()),
        }
    }
}

fn lower_size(lower: Option<&dyn BlockDevice>) -> Result<u64> {
    lower.map_or(Ok(0), BlockDevice::size)
}

impl BlockDevice for OverlayDevice {
    fn prepare(&self, _write: bool) -> Result<()> {
        // The data file is opened when it is used: opening a file must not make it.
        self.lower.as_ref().map_or(Ok(()), |lower| lower.prepare(false))
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.read(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write(data, offset, false)
    }

    fn size(&self) -> Result<u64> {
        Ok(self.map.lock().size)
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        check_end("truncate", bytes, 0)?;
        let _shape = self.shape.write();
        self.clean_tail(bytes)?;
        let mut map = self.map.lock();
        map.shrink(bytes);
        map.grow(bytes);
        map.mtime = Some(clock::wall());
        Ok(())
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len)?;
        let end = offset + len;
        let _shape = self.shape.write();
        match what {
            Range::Allocate => self.check_room(offset, len)?,
            Range::AllocateGrow => {
                self.check_room(offset, len)?;
                self.clean_tail(end)?;
            }
            Range::Punch | Range::ZeroKeep => self.zero(offset, end)?,
            Range::ZeroGrow => {
                self.clean_tail(end)?;
                self.zero(offset, end)?;
            }
        }
        let mut map = self.map.lock();
        if matches!(what, Range::AllocateGrow | Range::ZeroGrow) {
            map.grow(end);
        }
        map.mtime = Some(clock::wall());
        Ok(())
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        self.commit(false)
    }

    fn settle(&self) -> Result<()> {
        self.commit(true)
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.find(offset, hole)
    }

    fn write_home(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write(data, offset, true)
    }

    /// Asked after somebody else's sync of a whole filesystem, which knows nothing of the map.
    fn write_out(&self) -> Result<()> {
        self.commit(false)
    }

    fn start_write_out(&self) {
        if self.map.lock().has_written() {
            self.data.start_write_out();
        }
    }

    fn set_mtime(&self, mtime: Timestamp) -> Result<()> {
        self.save_mtime(mtime)
    }

    fn stamp(&self) -> Result<Option<Stamp>> {
        let (saved, ctime) = self.store.times()?;
        let map = self.map.lock();
        Ok(Some(Stamp { size: map.size, mtime: map.mtime.unwrap_or(saved), ctime }))
    }

    fn refused(&self) -> Option<&str> {
        self.lower.as_ref().and_then(|lower| lower.refused())
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        match self.data.free_bytes() {
            // It was not made yet: nobody can say.
            Err(error) if error.kind == Kind::NotFound => Ok(None),
            other => other,
        }
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
pub(crate) mod kit_tests;
#[cfg(test)]
mod tests;
