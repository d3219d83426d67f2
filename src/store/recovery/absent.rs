//! A device whose file must not be touched, or is not there: every call fails with the reason.

use std::path::{Path, PathBuf};

use crate::device::{BlockDevice, Range};
use crate::error::{Error, Kind, Result};

/// See the module.
pub(super) struct Absent {
    why: String,
    path: PathBuf,
}

impl Absent {
    pub(super) fn new(why: String, path: &Path) -> Absent {
        Absent { why, path: path.into() }
    }

    fn refuse<T>(&self, op: &'static str) -> Result<T> {
        Err(Error::new(
            Kind::Io,
            op,
            format!("{}: {}; the journal has data of it", self.path.display(), self.why),
        ))
    }
}

impl BlockDevice for Absent {
    fn prepare(&self, _write: bool) -> Result<()> {
        self.refuse("open")
    }

    fn refused(&self) -> Option<&str> {
        Some(&self.why)
    }

    fn read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<usize> {
        self.refuse("read")
    }

    fn write_at(&self, _data: &[u8], _offset: u64) -> Result<()> {
        self.refuse("write")
    }

    fn size(&self) -> Result<u64> {
        self.refuse("stat")
    }

    fn set_size(&self, _bytes: u64) -> Result<()> {
        self.refuse("truncate")
    }

    fn change_range(&self, _what: Range, _offset: u64, _len: u64) -> Result<()> {
        self.refuse("fallocate")
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        self.refuse("fsync")
    }

    fn seek(&self, _offset: u64, _hole: bool) -> Result<u64> {
        self.refuse("lseek")
    }
}
