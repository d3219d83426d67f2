//! Requests and replies that carry bulk: data and directory entries.

use std::sync::Arc;

use fuser::{Generation, INodeNo, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyWrite};

use super::convert::{file_attr, file_type};
use super::reply::{errno, with_buffer, written};
use crate::fs::{Fs, ReadPlace};

/// Answers a read from the cache, or hands it to the pool with its reply.
pub(super) fn read(fs: &Fs, place: ReadPlace, reply: ReplyData) {
    with_buffer(place.len, |buffer| match fs.read(place, buffer) {
        Ok(Ok(len)) => reply.data(buffer.get(..len).unwrap_or_default()),
        Ok(Err(read)) => {
            fs.pool().run_with(buffer, read.len(), move |buffer| match read.run(buffer) {
                Ok(()) => reply.data(buffer),
                Err(error) => reply.error(errno("read", &error)),
            })
        }
        Err(error) => reply.error(errno("read", &error)),
    });
}

/// Writes at (file, handle, offset): here, or where it may wait for room in the journal.
pub(super) fn write(fs: &Arc<Fs>, place: (u64, u64, u64), data: &[u8], reply: ReplyWrite) {
    let (node, fh, offset) = place;
    if !fs.write_would_wait(data.len()) {
        return written(reply, data.len(), fs.write(node, fh, offset, data));
    }
    // Not on a request thread: hits and the other files' writes go on.
    let (data, shared) = (data.to_vec(), fs.clone());
    fs.waiters().defer(data.len(), move || {
        written(reply, data.len(), shared.write(node, fh, offset, &data));
    });
}

/// Names from (directory, handle, position) on.
pub(super) fn readdir(fs: &Fs, place: (u64, u64, u64), mut reply: ReplyDirectory) {
    let result = fs.read_dir(place.0, place.1, place.2, false, &mut |entry, _| {
        !reply.add(INodeNo(entry.ino), entry.cookie, file_type(entry.kind), &entry.name)
    });
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno("readdir", &error)),
    }
}

/// Names with their nodes from (directory, handle, position) on.
pub(super) fn readdirplus(fs: &Fs, place: (u64, u64, u64), mut reply: ReplyDirectoryPlus) {
    let ttl = fs.attr_timeout();
    let result = fs.read_dir(place.0, place.1, place.2, true, &mut |entry, found| {
        let Some(found) = found else { return true };
        let (attr, generation) = (file_attr(&found.attr), Generation(found.generation));
        !reply.add(INodeNo(entry.ino), entry.cookie, &entry.name, &ttl, &attr, generation)
    });
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno("readdirplus", &error)),
    }
}
