//! A regular file as a device.
//!
//! Descriptors are opened when first needed and kept until the device is dropped: for reads a
//! direct one (O_DIRECT, so that the host does not cache what we cache), for writes a buffered one;
//! writing home has one more, see `home`. None is ever opened O_APPEND or O_TRUNC.
//! States of direct I/O: unknown -> on | off; off is final for the device. Locks: `fds`, held only
//! to clone a descriptor out or, once per kind, while opening it; `stream`; both leaves; and those
//! on the file itself, see `locks`.
//!
//! The kernel reports a failed write-out once to each open file description that existed when it
//! failed (errseq), and to none that is opened later if another has seen it. So `sync` uses the
//! description of buffered writes, which `prepare(true)` opens, which precedes every write of this
//! device in either way, and which stays open until the device is dropped. Two syncs at one time
//! share it, and the kernel tells only one of them: `failed_syncs` tells the other.

mod home;
mod locks;

use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use parking_lot::Mutex;
use rustix::fs::{
    Advice, FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps, fallocate, fstat, fstatvfs,
    ftruncate, futimens, seek,
};
use rustix::io::{Errno, pread, pwrite};

use self::home::Home;
use self::locks::Locks;
use super::{BlockDevice, Range, RawTarget};
use crate::config::DirectIo;
use crate::error::{Error, OpContext, Result};
use crate::sys::AlignedBuf;
use crate::sys::aligned::DIRECT_ALIGN;
use crate::units::{Stamp, Timestamp};

/// Opens one more descriptor of the device's file, whatever it is called by now.
pub type Opener = Box<dyn Fn(OFlags) -> rustix::io::Result<OwnedFd> + Send + Sync>;

/// Bytes of a stream of writes after which their write-out is started.
const STREAM_STEP: u64 = 8 << 20;

/// The newest stream of writes.
#[derive(Debug, Default)]
struct Stream {
    /// Up to here its write-out has been started.
    started: u64,
    end: u64,
}

#[derive(Default)]
struct Descriptors {
    read: Option<Arc<OwnedFd>>,
    write: Option<Arc<OwnedFd>>,
    direct_read: Option<Arc<OwnedFd>>,
}

#[derive(Clone, Copy)]
enum Which {
    Read,
    Write,
    DirectRead,
}

/// A regular file behind the mount.
pub struct FileDevice {
    opener: Opener,
    policy: DirectIo,
    /// Cleared for good when the file refuses O_DIRECT.
    direct: AtomicBool,
    fds: Mutex<Descriptors>,
    stream: Mutex<Stream>,
    home: Home,
    locks: Locks,
    /// Cleared where the file may be written but not read.
    readable: AtomicBool,
    /// Syncs that failed so far, and how many of them `write_out` has told.
    failed_syncs: AtomicU64,
    told_syncs: AtomicU64,
}

impl std::fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileDevice").field("direct", &self.direct).finish_non_exhaustive()
    }
}

impl FileDevice {
    /// A device over what `opener` opens; nothing is opened yet.
    pub fn new(opener: Opener, policy: DirectIo) -> FileDevice {
        let direct = AtomicBool::new(policy != DirectIo::Never);
        FileDevice {
            opener,
            policy,
            direct,
            fds: Mutex::default(),
            stream: Mutex::default(),
            home: Home::default(),
            locks: Locks::default(),
            readable: AtomicBool::new(true),
            failed_syncs: AtomicU64::new(0),
            told_syncs: AtomicU64::new(0),
        }
    }

    /// Adopts a descriptor opened for reading and writing (by a create).
    pub fn adopt_writable(&self, fd: OwnedFd) {
        self.fds.lock().write.get_or_insert_with(|| Arc::new(fd));
    }

    /// Whether reads go around the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Relaxed)
    }

    fn fd(&self, which: Which) -> Result<Arc<OwnedFd>> {
        let mut fds = self.fds.lock();
        let (slot, flags) = match which {
            Which::Read => (&mut fds.read, OFlags::RDONLY),
            Which::Write => (&mut fds.write, OFlags::RDWR),
            Which::DirectRead => (&mut fds.direct_read, OFlags::RDONLY | OFlags::DIRECT),
        };
        if let Some(fd) = slot {
            return Ok(fd.clone());
        }
        let opened = match (self.opener)(flags) {
            // Somebody who may write but not read still may write.
            Err(Errno::ACCESS) if matches!(which, Which::Write) => {
                let fd = (self.opener)(OFlags::WRONLY).op("open")?;
                self.readable.store(false, Relaxed);
                fd
            }
            other => other.op("open")?,
        };
        Ok(slot.insert(Arc::new(opened)).clone())
    }

    /// Any descriptor that can be asked about the file: an open one first.
    fn any_fd(&self) -> Result<Arc<OwnedFd>> {
        let fds = self.fds.lock();
        let open = [&fds.write, &fds.read, &fds.direct_read];
        if let Some(fd) = open.into_iter().flatten().next() {
            return Ok(fd.clone());
        }
        drop(fds);
        self.fd(Which::Read)
    }

    fn read_fd(&self) -> Result<Arc<OwnedFd>> {
        if self.is_direct() {
            match self.fd(Which::DirectRead) {
                Ok(fd) => return Ok(fd),
                Err(error) if error.errno() == Errno::INVAL.raw_os_error() => {
                    self.direct_refused()?;
                }
                Err(error) => return Err(error),
            }
        }
        self.fd(Which::Read)
    }

    /// What a sync that began at `failed_before` failures may report. One that another overtook
    /// with an error must not say that all is well: the error may have been of its own bytes.
    fn synced(&self, result: Result<()>, failed_before: u64) -> Result<()> {
        match result {
            Err(error) => {
                self.failed_syncs.fetch_add(1, SeqCst);
                Err(error)
            }
            Ok(()) if self.failed_syncs.load(SeqCst) != failed_before => {
                Err(Error::os("fdatasync", Errno::IO))
            }
            Ok(()) => Ok(()),
        }
    }

    fn direct_refused(&self) -> Result<()> {
        if self.policy == DirectIo::Always {
            return Err(Error::os("open O_DIRECT", Errno::INVAL));
        }
        self.direct.store(false, Relaxed);
        Ok(())
    }

    /// Every write is buffered, and this decides when its pages leave the host's page cache: a
    /// stream's as it goes, the others' when the host sees fit. Writing directly costs each writer
    /// the device's latency: 4 KiB appends ran at 102 MiB/s direct and at 619 MiB/s buffered, and
    /// a copy waits for every 128 KiB. Started early, the write-out of a long stream overlaps with
    /// its arrival, and its pages need not be kept: the block cache above has what it wants.
    fn streamed(&self, fd: &OwnedFd, offset: u64, len: u64) {
        let (from, to) = {
            let mut stream = self.stream.lock();
            if stream.end != offset {
                *stream = Stream { started: offset, end: offset };
            }
            stream.end = offset + len;
            if stream.end - stream.started < STREAM_STEP {
                return;
            }
            let from = std::mem::replace(&mut stream.started, offset + len);
            (from, offset + len)
        };
        // Both are advice: a failure costs speed or memory, not bytes.
        let _ = crate::sys::write_out::start(fd, from, to - from);
        let clean = from.saturating_sub(2 * STREAM_STEP);
        if let Some(len) = NonZeroU64::new(from - clean)
            && self.is_direct()
        {
            let _ = rustix::fs::fadvise(fd, clean, Some(len), Advice::DontNeed);
        }
    }

    /// Reads an unaligned range of a direct file through an aligned buffer around it.
    fn read_around(&self, fd: &OwnedFd, buf: &mut [u8], offset: u64) -> Result<usize> {
        let align = DIRECT_ALIGN as u64;
        let start = offset - offset % align;
        let skip = (offset - start) as usize;
        let len = (skip + buf.len()).next_multiple_of(DIRECT_ALIGN);
        let mut around = AlignedBuf::lend(len);
        let got = read_full(fd, &mut around, start)?.saturating_sub(skip).min(buf.len());
        if let (Some(to), Some(from)) = (buf.get_mut(..got), around.get(skip..skip + got)) {
            to.copy_from_slice(from);
        }
        Ok(got)
    }
}

fn read_full(fd: &OwnedFd, buf: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match pread(fd, rest, offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            // A direct read may stop at an unaligned end of file: what follows is past it.
            Err(Errno::INVAL) if done > 0 && !done.is_multiple_of(DIRECT_ALIGN) => break,
            Err(error) => return Err(Error::os("read", error)),
        }
    }
    Ok(done)
}

fn write_all(fd: &OwnedFd, data: &[u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
        match pwrite(fd, rest, offset + done as u64) {
            Ok(0) => return Err(Error::os("write", Errno::IO)),
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::os("write", error)),
        }
    }
    Ok(())
}

impl BlockDevice for FileDevice {
    fn prepare(&self, write: bool) -> Result<()> {
        if write {
            self.locks.claim(&*self.fd(Which::Write)?)?;
        } else if self.fds.lock().write.is_none() {
            self.read_fd()?;
        }
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let fd = self.read_fd()?;
        if !self.is_direct() {
            return read_full(&fd, buf, offset);
        }
        let aligned = (buf.as_ptr() as usize).is_multiple_of(DIRECT_ALIGN)
            && buf.len().is_multiple_of(DIRECT_ALIGN)
            && offset.is_multiple_of(DIRECT_ALIGN as u64);
        let result =
            if aligned { read_full(&fd, buf, offset) } else { self.read_around(&fd, buf, offset) };
        match result {
            // Some filesystems take O_DIRECT at open and refuse it at the first read.
            Err(error) if error.errno() == Errno::INVAL.raw_os_error() => {
                self.direct_refused()?;
                read_full(&*self.fd(Which::Read)?, buf, offset)
            }
            other => other,
        }
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let fd = self.fd(Which::Write)?;
        write_all(&fd, data, offset)?;
        self.streamed(&fd, offset, data.len() as u64);
        Ok(())
    }

    fn size(&self) -> Result<u64> {
        let stat = fstat(&*self.any_fd()?).op("stat")?;
        Ok(stat.st_size as u64)
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        ftruncate(&*self.fd(Which::Write)?, bytes).op("truncate")
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        let flags = match what {
            Range::Allocate => FallocateFlags::KEEP_SIZE,
            Range::AllocateGrow => FallocateFlags::empty(),
            Range::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Range::ZeroKeep => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            Range::ZeroGrow => FallocateFlags::ZERO_RANGE,
        };
        fallocate(&*self.fd(Which::Write)?, flags, offset, len).op("fallocate")
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        let fd = self.any_fd()?;
        let failed_before = self.failed_syncs.load(SeqCst);
        let synced = if data_only {
            rustix::fs::fdatasync(&*fd).op("fdatasync")
        } else {
            rustix::fs::fsync(&*fd).op("fsync")
        };
        self.synced(synced, failed_before)
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        let to = if hole { SeekFrom::Hole(offset) } else { SeekFrom::Data(offset) };
        seek(&*self.any_fd()?, to).op("lseek")
    }

    fn write_home(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_around_cache(data, offset)
    }

    fn raw(&self) -> Option<RawTarget> {
        self.home.raw()
    }

    fn can_write_home(&self) -> bool {
        self.readable.load(Relaxed)
    }

    fn sync_filesystem(&self) -> Option<Result<()>> {
        let failed_before = self.failed_syncs.load(SeqCst);
        let synced = self.any_fd().and_then(|fd| {
            rustix::fs::syncfs(&*fd).op("syncfs")?;
            // Of this file, too: where no metadata changed, syncfs(2) may leave the disk's cache.
            rustix::fs::fdatasync(&*fd).op("fdatasync")
        });
        Some(self.synced(synced, failed_before))
    }

    fn write_out(&self) -> Result<()> {
        let written = self.any_fd().and_then(|fd| match crate::sys::write_out::wait(&*fd) {
            Ok(()) => Ok(()),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::SPIPE) => {
                    rustix::fs::fdatasync(&*fd).op("fdatasync")
                }
                _ => Err(error).op("sync_file_range"),
            },
        });
        if written.is_err() {
            self.failed_syncs.fetch_add(1, SeqCst);
        }
        // Somebody else's sync may have heard what was meant for us: told once more than needed is
        // better than not at all.
        let failed = self.failed_syncs.load(SeqCst);
        let told = self.told_syncs.swap(failed, SeqCst);
        written?;
        if failed == told { Ok(()) } else { Err(Error::os("fdatasync", Errno::IO)) }
    }

    fn mark_dirty(&self, dirty: bool) {
        if !dirty && self.fds.lock().write.is_none() {
            return;
        }
        if let Ok(fd) = self.fd(Which::Write) {
            self.locks.mark_dirty(&*fd, dirty);
        }
    }

    fn start_write_out(&self) {
        if self.home.take_buffered()
            && let Ok(fd) = self.any_fd()
        {
            // A hint: what it does not start, the sync writes.
            let _ = crate::sys::write_out::start(&*fd, 0, 0);
        }
    }

    fn set_mtime(&self, mtime: Timestamp) -> Result<()> {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
            last_modification: Timespec { tv_sec: mtime.sec, tv_nsec: mtime.nsec.into() },
        };
        futimens(&*self.any_fd()?, &times).op("utimensat")
    }

    fn stamp(&self) -> Result<Option<Stamp>> {
        let stat = fstat(&*self.any_fd()?).op("stat")?;
        let time = |sec, nsec| Timestamp { sec, nsec: nsec as u32 };
        Ok(Some(Stamp {
            size: stat.st_size as u64,
            mtime: time(stat.st_mtime, stat.st_mtime_nsec),
            ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        }))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let stat = fstatvfs(&*self.any_fd()?).op("statfs")?;
        // Network and stacked filesystems report 0 blocks where they do not know.
        Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
    }
}

#[cfg(test)]
mod lock_tests;
#[cfg(test)]
mod tests;
