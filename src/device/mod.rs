//! Devices (layer 2): anything with bytes at offsets. The block store above knows only this trait.

pub mod fault;
pub mod file;
pub mod memory;
pub mod overlay;

pub use file::FileDevice;
pub use memory::{Image, MemoryDevice};
pub use overlay::OverlayDevice;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::Result;
use crate::units::{Stamp, Timestamp};

/// What a device can be asked for beyond bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Allocate without changing bytes or size.
    Allocate,
    /// Allocate and, where it ends past the end of file, grow the size.
    AllocateGrow,
    /// Punch a hole: the bytes read as zeros, the size stays.
    Punch,
    /// Zero the bytes, the size stays.
    ZeroKeep,
    /// Zero the bytes and grow the size to the end of the range.
    ZeroGrow,
}

/// Where a ring may submit a direct write itself, instead of calling `write_home`.
#[derive(Clone, Debug)]
pub struct RawTarget {
    /// A descriptor opened O_DIRECT for writing.
    pub fd: Arc<OwnedFd>,
    /// Where the device's byte 0 lies behind it.
    pub offset: u64,
    /// Position, length and memory must be multiples of this.
    pub align: u64,
}

/// A run of bytes with a size: a file, a partition, memory. Every call may come from any thread;
/// overlapping writes of one device are ordered by the caller.
pub trait BlockDevice: Send + Sync {
    /// Opens what reading or writing needs now, so that the application sees EACCES, ETXTBSY or
    /// EROFS at open(2) and not at its first write.
    fn prepare(&self, write: bool) -> Result<()>;

    /// Reads at `offset` until `buf` is full or the device ends; the bytes read. EIO and the like.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes all of `data` at `offset`; the size grows if needed. An error may leave part of it.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()>;

    /// The size in bytes.
    fn size(&self) -> Result<u64>;

    /// Truncates or extends with zeros.
    fn set_size(&self, bytes: u64) -> Result<()>;

    /// Allocates, zeroes or punches a range. NotSupported where the filesystem has no such thing:
    /// whoever needs the zeros then writes them.
    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()>;

    /// Makes written bytes durable; with `data_only` attributes that no read needs may be left. An
    /// error is reported once and counts for whatever was written since the last good sync.
    fn sync(&self, data_only: bool) -> Result<()>;

    /// Changes made by write_at, set_size and change_range survive kill -9 from now on; asked after
    /// each change that goes around the journal.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// The next data (`hole` false) or hole at or after `offset`; ENXIO past the end.
    fn seek(&self, offset: u64, hole: bool) -> Result<u64>;

    /// Writes as writeback does: around the host's page cache where that is possible. Never past
    /// the end: the caller sets the size before.
    fn write_home(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_at(data, offset)
    }

    /// For submitting aligned home writes to a ring; None where only `write_home` works, which may
    /// be so until the first of these has opened what it needs. Never blocks.
    fn raw(&self) -> Option<RawTarget> {
        None
    }

    /// Makes everything of the filesystem durable that holds it, for whoever would sync many
    /// devices of one; None where there is no such thing. Errors of any file of it may be told, and
    /// that of one file to one caller only: each device is then asked for its own, by `write_out`.
    fn sync_filesystem(&self) -> Option<Result<()>> {
        None
    }

    /// Waits until what is being written out of the device is; an error if any of that failed since
    /// its last sync. Makes nothing durable.
    fn write_out(&self) -> Result<()> {
        Ok(())
    }

    /// The device becomes dirty or clean: while it is dirty, others are kept from its file where
    /// they ask (qemu's lock bytes). A hint; failures are not told.
    fn mark_dirty(&self, _dirty: bool) {}

    /// Whether its bytes can be written home at any time: only what can be read can. Asked after
    /// `prepare(true)`.
    fn can_write_home(&self) -> bool {
        true
    }

    /// Starts writing out what `write_home` had to leave in the host's page cache; a hint.
    fn start_write_out(&self) {}

    /// Sets the time of the last change of bytes; nothing where a device has none.
    fn set_mtime(&self, _mtime: Timestamp) -> Result<()> {
        Ok(())
    }

    /// Size and times as the source says now; None where a device has no times.
    fn stamp(&self) -> Result<Option<Stamp>> {
        Ok(None)
    }

    /// Why its file must not be touched, whoever asks and for as long as the mount lasts.
    fn refused(&self) -> Option<&str> {
        None
    }

    /// Bytes that may still be allocated on the source; None where nobody knows.
    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
