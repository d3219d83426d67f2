//! mmap(2) of a file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr;

/// A writable mapping of the first bytes of a file; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes, shared (writes reach the file) or private (they do not).
    pub fn new(file: &File, len: usize, shared: bool) -> std::io::Result<Mapping> {
        let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, kind, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Mapping { start: start.cast(), len })
    }

    /// Copies bytes out; every call looks at memory again.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: inside the mapping; volatile, since another process may write it.
        (offset..offset + len).map(|at| unsafe { self.start.add(at).read_volatile() }).collect()
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping.
            unsafe { self.start.add(offset + at).write_volatile(*byte) };
        }
    }

    /// msync(MS_SYNC) of everything.
    pub fn sync(&self) {
        // SAFETY: our own mapping.
        let result = unsafe { libc::msync(self.start.cast(), self.len, libc::MS_SYNC) };
        assert_eq!(result, 0, "msync: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, used by nobody any more.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
