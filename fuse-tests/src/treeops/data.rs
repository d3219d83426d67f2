//! The operations on bytes, also through descriptors that are held open and through mappings.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Answer, Hands, NOTHING, Op};
use crate::tools::pattern;
use crate::treestate;

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn write_at(file: &File, bytes: &[u8], offset: u64) -> Answer {
    file.write_all_at(bytes, offset).map_err(errno)?;
    NOTHING
}

fn read_at(file: &File, offset: u64, len: usize) -> Answer {
    let mut bytes = vec![0; len];
    let mut got = 0;
    while got < len {
        match file.read_at(&mut bytes[got..], offset + got as u64).map_err(errno)? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// What a descriptor shows of its file.
fn look(file: &File) -> Answer {
    let stat = rustix::fs::fstat(file)?;
    let bytes = read_at(file, 0, stat.st_size as usize)?;
    let (mode, links) = (treestate::mode(stat.st_mode), stat.st_nlink);
    let hash = treestate::hash(&bytes);
    let (size, read) = (stat.st_size, bytes.len());
    Ok(format!("{mode:o}, {links} links, {size} bytes, {read} read, hash {hash:x}").into_bytes())
}

/// Copies until all is there; how much a single call copies is the kernel's choice.
fn copy(from: &File, mut offset: u64, to: &File, mut to_offset: u64, len: usize) -> Answer {
    let mut done = 0;
    while done < len {
        let (input, output) = (Some(&mut offset), Some(&mut to_offset));
        match rustix::fs::copy_file_range(from, input, to, output, len - done)? {
            0 => break,
            more => done += more,
        }
    }
    Ok(done.to_string().into_bytes())
}

/// Stores bytes through a shared mapping, as far as the file goes.
fn map(file: &File, offset: u64, len: usize, seed: u64) -> Answer {
    let size = rustix::fs::fstat(file)?.st_size as u64;
    if size == 0 {
        return Ok(b"empty".to_vec());
    }
    let offset = offset % size;
    let len = len.min((size - offset) as usize);
    let page = offset & !4095;
    let whole = (offset - page) as usize + len;
    // The kernel copies the bytes into the mapping: a page that cannot be had is EFAULT then, and
    // no signal.
    let bytes = File::from(rustix::fs::memfd_create("bytes", MemfdFlags::CLOEXEC)?);
    bytes.write_all_at(&pattern(seed, len), 0).map_err(errno)?;
    let last = || io::Error::last_os_error();
    // SAFETY: a new mapping of `whole` bytes; only the kernel writes to it, inside its bounds, and
    // it is gone at the end of the block.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_fd().as_raw_fd();
        let at = libc::mmap(ptr::null_mut(), whole, protection, libc::MAP_SHARED, fd, page as i64);
        if at == libc::MAP_FAILED {
            return Err(errno(last()));
        }
        let mut result = NOTHING;
        let mut done = 0;
        while done < len && result.is_ok() {
            let into = at.cast::<u8>().add((offset - page) as usize + done);
            match libc::pread(bytes.as_raw_fd(), into.cast(), len - done, done as i64) {
                more @ 1.. => done += more as usize,
                _ => result = Err(errno(last())),
            }
        }
        if libc::msync(at, whole, libc::MS_SYNC) != 0 && result.is_ok() {
            result = Err(errno(last()));
        }
        libc::munmap(at, whole);
        result
    }
}

impl Hands {
    pub(super) fn bytes(&self, op: &Op) -> Answer {
        let write = OFlags::WRONLY;
        match op {
            Op::Create { path, mode, exclusive } => {
                let new = OFlags::RDWR | OFlags::CREATE;
                let flags = if *exclusive { new | OFlags::EXCL } else { new };
                self.open(path, flags, mode.0)?;
                NOTHING
            }
            Op::Write { path, offset, len, seed } => {
                write_at(&self.open(path, write, 0)?, &pattern(*seed, *len), *offset)
            }
            Op::Append { path, len, seed } => {
                let file = self.open(path, write | OFlags::APPEND, 0)?;
                io::Write::write_all(&mut &file, &pattern(*seed, *len)).map_err(errno)?;
                NOTHING
            }
            Op::OpenTruncate { path } => {
                self.open(path, write | OFlags::TRUNC, 0)?;
                NOTHING
            }
            Op::Truncate { path, len } => {
                rustix::fs::ftruncate(self.open(path, write, 0)?, *len)?;
                NOTHING
            }
            Op::Allocate { path, mode, offset, len } => {
                let file = self.open(path, write, 0)?;
                let mode = FallocateFlags::from_bits_retain(*mode);
                rustix::fs::fallocate(file, mode, *offset, *len)?;
                NOTHING
            }
            Op::Copy { path, offset, to, to_offset, len } => {
                let from = self.open(path, OFlags::RDONLY, 0)?;
                copy(&from, *offset, &self.open(to, write, 0)?, *to_offset, *len)
            }
            Op::Map { path, offset, len, seed } => {
                map(&self.open(path, OFlags::RDWR, 0)?, *offset, *len, *seed)
            }
            Op::Read { path, offset, len } => {
                read_at(&self.open(path, OFlags::RDONLY, 0)?, *offset, *len)
            }
            Op::Sync { path } => {
                rustix::fs::fsync(self.open(path, OFlags::RDONLY, 0)?)?;
                NOTHING
            }
            _ => unreachable!("{op:?} is no operation on bytes"),
        }
    }

    pub(super) fn hold(&mut self, op: &Op) -> Answer {
        let held = |hands: &Hands, slot: usize| {
            hands.held[slot].as_ref().map(|file| file.try_clone().map_err(errno)).transpose()
        };
        let slot = match op {
            Op::Hold { path, slot } => {
                self.held[*slot] = Some(self.open(path, OFlags::RDWR, 0)?);
                *slot
            }
            Op::HeldWrite { slot, offset, len, seed } => {
                if let Some(file) = held(self, *slot)? {
                    write_at(&file, &pattern(*seed, *len), *offset)?;
                }
                *slot
            }
            Op::HeldTruncate { slot, len } => {
                if let Some(file) = held(self, *slot)? {
                    rustix::fs::ftruncate(file, *len)?;
                }
                *slot
            }
            Op::HeldMode { slot, mode } => {
                if let Some(file) = held(self, *slot)? {
                    rustix::fs::fchmod(file, Mode::from_raw_mode(mode.0))?;
                }
                *slot
            }
            Op::Release { slot } => {
                self.held[*slot] = None;
                *slot
            }
            _ => unreachable!("{op:?} is no operation on what is held"),
        };
        self.look(slot)
    }

    /// What the descriptor in `slot` shows of its file.
    pub fn look(&self, slot: usize) -> Answer {
        self.held[slot].as_ref().map_or(NOTHING, look)
    }

    /// Whether there is one.
    pub fn holds(&self, slot: usize) -> bool {
        self.held[slot].is_some()
    }
}
