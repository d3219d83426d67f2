//! A byte buffer whose address O_DIRECT accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The alignment that every O_DIRECT file takes: address, offset and length.
pub const DIRECT_ALIGN: usize = 4096;

/// A zeroed buffer of fixed length at an address that is a multiple of `DIRECT_ALIGN`.
#[derive(Debug)]
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is plain bytes owned by this value alone, like Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads plain bytes.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A zeroed buffer of `len` bytes. Memory becomes resident when it is touched.
    pub fn new(len: usize) -> AlignedBuf {
        if len == 0 {
            return AlignedBuf { start: NonNull::dangling(), len };
        }
        let layout = AlignedBuf::layout(len);
        // SAFETY: the layout has a non-zero size.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => AlignedBuf { start, len },
            None => handle_alloc_error(layout),
        }
    }

    fn layout(len: usize) -> Layout {
        // A length past isize::MAX cannot be allocated by any layout: report it as out of memory.
        Layout::from_size_align(len, DIRECT_ALIGN)
            .unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()))
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `new` with this very layout, and dropped once.
            unsafe { dealloc(self.start.as_ptr(), AlignedBuf::layout(self.len)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes at `start`, owned by self; dangling only if len is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_zeroed_and_writable() {
        for len in [0, 1, 4096, 100_000] {
            let mut buf = AlignedBuf::new(len);
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&b| b == 0));
            if len > 0 {
                assert_eq!(buf.as_ptr() as usize % DIRECT_ALIGN, 0);
                buf[len - 1] = 7;
                assert_eq!(buf[len - 1], 7);
            }
        }
    }
}
