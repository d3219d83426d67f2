//! Write-out of a file's dirty pages apart from making them durable.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Starts writing a range's dirty pages to the device, without waiting for them and without making
/// anything durable (sync_file_range(2), SYNC_FILE_RANGE_WRITE).
pub fn start(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    sync_file_range(fd, (offset, len), libc::SYNC_FILE_RANGE_WRITE)
}

/// Waits for the pages of a file that are being written out, and says if any could not be since
/// this description of it was last told (SYNC_FILE_RANGE_WAIT_BEFORE, ..._WAIT_AFTER): what
/// fsync(2) would say, without a flush of the device.
pub fn wait(fd: impl AsFd) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_file_range(fd, (0, 0), flags)
}

fn sync_file_range(fd: impl AsFd, range: (u64, u64), flags: libc::c_uint) -> io::Result<()> {
    let (offset, len) = (range.0 as libc::off64_t, range.1 as libc::off64_t);
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::sync_file_range(fd.as_fd().as_raw_fd(), offset, len, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
