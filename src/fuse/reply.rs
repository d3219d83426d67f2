//! Replies: errors to errno, and the buffers answers are built in.

use std::cell::RefCell;
use std::time::Duration;

use fuser::{
    Errno, FileHandle, FopenFlags, Generation, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr,
};

use super::convert::file_attr;
use crate::error::{Error, Kind, Result};
use crate::fs::{Fs, OpenReply};
use crate::sys::AlignedBuf;
use crate::tree::{Entry, FsStat};

/// Replies up to this size keep their thread's buffer.
const KEEP_BUFFER: usize = 256 << 10;

/// The longest extended attribute (XATTR_SIZE_MAX).
const XATTR_MAX: usize = 64 << 10;

/// The longest name, as the kernel's own filesystems say it.
const NAME_MAX: u32 = 255;

thread_local! {
    static BUFFER: RefCell<AlignedBuf> = RefCell::new(AlignedBuf::new(0));
}

/// The errno of an error on its way out; what no application expects is logged, once.
pub(super) fn errno(op: &'static str, error: &Error) -> Errno {
    if matches!(error.kind, Kind::Io | Kind::Corrupt | Kind::Internal) {
        log::error!("{op}: {error}");
    }
    Errno::from_i32(error.errno())
}

pub(super) fn written(reply: ReplyWrite, len: usize, result: Result<()>) {
    match result {
        Ok(()) => reply.written(len as u32),
        Err(error) => reply.error(errno("write", &error)),
    }
}

pub(super) fn empty(op: &'static str, reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(op, &error)),
    }
}

/// Lends the thread's aligned buffer of at least `len` bytes. Long ones are not kept: 36 threads
/// with a MiB each would count.
pub(super) fn with_buffer<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with(|buffer| {
        let mut buffer = buffer.borrow_mut();
        if buffer.len() < len {
            *buffer = AlignedBuf::lend(len.next_power_of_two());
        }
        let result = work(buffer.get_mut(..len).unwrap_or_default());
        if buffer.len() > KEEP_BUFFER {
            *buffer = AlignedBuf::new(0);
        }
        result
    })
}

pub(super) fn opened(reply: ReplyOpen, result: Result<OpenReply>) {
    match result {
        Ok(open) => reply.opened(FileHandle(open.fh), open_flags(open)),
        Err(error) => reply.error(errno("open", &error)),
    }
}

fn open_flags(open: OpenReply) -> FopenFlags {
    if open.keep_cache { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() }
}

/// Answers getxattr and listxattr by the size the application asked with.
pub(super) fn xattr(reply: ReplyXattr, size: u32, ask: impl FnOnce(&mut [u8]) -> Result<usize>) {
    let mut value = vec![0; (size as usize).min(XATTR_MAX)];
    match ask(&mut value) {
        Ok(len) if size == 0 => reply.size(len as u32),
        Ok(len) => reply.data(value.get(..len).unwrap_or_default()),
        Err(error) => reply.error(errno("xattr", &error)),
    }
}

pub(super) fn statfs(reply: ReplyStatfs, result: Result<FsStat>) {
    match result {
        Ok(s) => {
            reply
                .statfs(s.blocks, s.bfree, s.bavail, s.files, s.ffree, s.bsize, NAME_MAX, s.frsize);
        }
        Err(error) => reply.error(errno("statfs", &error)),
    }
}

pub(super) fn created(reply: ReplyCreate, ttl: Duration, result: Result<(Entry, OpenReply)>) {
    match result {
        Ok((entry, open)) => reply.created(
            &ttl,
            &file_attr(&entry.attr),
            Generation(entry.generation),
            FileHandle(open.fh),
            open_flags(open),
        ),
        Err(error) => reply.error(errno("create", &error)),
    }
}

pub(super) fn entry(reply: ReplyEntry, fs: &Fs, result: Result<Entry>) {
    match result {
        Ok(entry) => {
            reply.entry(&fs.attr_timeout(), &file_attr(&entry.attr), Generation(entry.generation))
        }
        Err(error) => reply.error(errno("entry", &error)),
    }
}
