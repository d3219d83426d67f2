//! Reading a host directory. Positions are the source's own cookies (d_off), so telldir and seekdir
//! mean the same as on the source, also after names came and went.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, RawDir, SeekFrom, seek};

use super::STATE_NAME;
use super::node::{Node, Table};
use crate::error::{OpContext, Result};
use crate::tree::{DirEntry, DirStream, ROOT};

/// Bytes asked of getdents64(2) at a time.
const BATCH_BYTES: usize = 32 << 10;

/// An open directory of the host.
pub(super) struct HostDir {
    fd: OwnedFd,
    is_root: bool,
    dev: u64,
    table: Arc<Table>,
    /// The cookie that leads to the first of `ready`.
    position: u64,
    /// Where the descriptor stands: behind the last of `ready`.
    ready: VecDeque<DirEntry>,
    buffer: Vec<MaybeUninit<u8>>,
}

impl HostDir {
    pub(super) fn new(fd: OwnedFd, node: &Node, table: Arc<Table>) -> HostDir {
        HostDir {
            fd,
            is_root: node.id == ROOT,
            dev: node.identity.dev,
            table,
            position: 0,
            ready: VecDeque::new(),
            buffer: Vec::new(),
        }
    }

    /// Reads the next batch; leaves `ready` empty at the end of the directory.
    fn fill(&mut self) -> Result<()> {
        self.buffer.resize(BATCH_BYTES, MaybeUninit::uninit());
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.fill_from(&mut buffer);
        self.buffer = buffer;
        result
    }

    fn fill_from(&mut self, buffer: &mut [MaybeUninit<u8>]) -> Result<()> {
        let mut entries = RawDir::new(&self.fd, buffer);
        loop {
            let Some(entry) = entries.next() else { return Ok(()) };
            let entry = entry.op("readdir")?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let (ino, kind, cookie) = (entry.ino(), entry.file_type(), entry.next_entry_cookie());
            if !(self.is_root && name == STATE_NAME) {
                let kind = if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() };
                let name = name.to_os_string();
                let ino = self.table.number(self.dev, ino);
                self.ready.push_back(DirEntry { name, ino, kind, cookie });
            }
            if entries.is_buffer_empty() && !self.ready.is_empty() {
                return Ok(());
            }
        }
    }
}

impl DirStream for HostDir {
    fn peek(&mut self, cookie: u64) -> Result<Option<&DirEntry>> {
        if cookie != self.position {
            self.ready.clear();
            seek(&self.fd, SeekFrom::Start(cookie)).op("seekdir")?;
            self.position = cookie;
        }
        if self.ready.is_empty() {
            self.fill()?;
        }
        Ok(self.ready.front())
    }

    fn advance(&mut self) {
        if let Some(entry) = self.ready.pop_front() {
            self.position = entry.cookie;
        }
    }
}

/// Subdirectories of an open directory, by d_type (a stat where the filesystem tells none).
pub(super) fn count_subdirs(fd: &OwnedFd) -> Result<u32> {
    let mut count = 0;
    let mut buffer = vec![MaybeUninit::uninit(); BATCH_BYTES];
    let mut entries = RawDir::new(fd, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.op("readdir")?;
        let name = entry.file_name();
        if name.to_bytes() == b"." || name.to_bytes() == b".." {
            continue;
        }
        let is_dir = match entry.file_type() {
            FileType::Unknown => rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
            kind => kind == FileType::Directory,
        };
        count += u32::from(is_dir);
    }
    Ok(count)
}
