//! Early write-out of a file's dirty pages.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Starts writing a range's dirty pages to the device, without waiting for them and without making
/// anything durable (sync_file_range(2), SYNC_FILE_RANGE_WRITE).
pub fn start(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: no pointers are passed.
    let result = unsafe {
        libc::sync_file_range(
            fd.as_fd().as_raw_fd(),
            offset as libc::off64_t,
            len as libc::off64_t,
            libc::SYNC_FILE_RANGE_WRITE,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
