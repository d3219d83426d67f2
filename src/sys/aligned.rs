//! A byte buffer whose address O_DIRECT accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

/// The alignment that every O_DIRECT file takes: address, offset and length.
pub const DIRECT_ALIGN: usize = 4096;

/// Freed buffers of up to this many bytes are kept for the next request.
const KEPT_MAX: usize = 1 << 20;

/// Bytes of freed buffers kept in all. Freeing and faulting a MiB anew for each request would cost
/// as much as reading it; leaving it to malloc keeps a heap for each thread.
const KEPT_TOTAL: usize = 16 << 20;

/// Size classes of kept buffers: 4 KiB << class.
const CLASSES: usize = 9;

static KEPT: [Mutex<Vec<AlignedBuf>>; CLASSES] = [const { Mutex::new(Vec::new()) }; CLASSES];
static KEPT_BYTES: AtomicUsize = AtomicUsize::new(0);

fn class_of(capacity: usize) -> Option<usize> {
    let class = (capacity.max(DIRECT_ALIGN) / DIRECT_ALIGN).next_power_of_two().trailing_zeros();
    (capacity > 0 && capacity <= KEPT_MAX).then_some(class as usize)
}

/// A buffer of fixed length at an address that is a multiple of `DIRECT_ALIGN`.
#[derive(Debug)]
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the buffer is plain bytes owned by this value alone, like Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads plain bytes.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A zeroed buffer of `len` bytes. Memory becomes resident when it is touched.
    pub fn new(len: usize) -> AlignedBuf {
        if len == 0 {
            return AlignedBuf { start: NonNull::dangling(), len, capacity: 0 };
        }
        let layout = AlignedBuf::layout(len);
        // SAFETY: the layout has a non-zero size.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => AlignedBuf { start, len, capacity: len },
            None => handle_alloc_error(layout),
        }
    }

    /// A buffer of `len` bytes whose contents are left over from an earlier one: for callers that
    /// fill it.
    pub fn lend(len: usize) -> AlignedBuf {
        // A length of the middle of its class takes a buffer of the whole class.
        let Some(class) = class_of(len.next_multiple_of(DIRECT_ALIGN)) else {
            return AlignedBuf::new(len);
        };
        let kept = KEPT.get(class).and_then(|kept| kept.lock().pop());
        let mut buf = match kept {
            Some(buf) => {
                KEPT_BYTES.fetch_sub(buf.capacity, Relaxed);
                buf
            }
            None => AlignedBuf::new(DIRECT_ALIGN << class),
        };
        buf.len = len;
        buf
    }

    fn layout(len: usize) -> Layout {
        // A length past isize::MAX cannot be allocated by any layout: report it as out of memory.
        Layout::from_size_align(len, DIRECT_ALIGN)
            .unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()))
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let class = class_of(self.capacity).filter(|class| DIRECT_ALIGN << class == self.capacity);
        if let Some(kept) = class.and_then(|class| KEPT.get(class)) {
            if KEPT_BYTES.fetch_add(self.capacity, Relaxed) + self.capacity <= KEPT_TOTAL {
                let (start, capacity) = (self.start, self.capacity);
                kept.lock().push(AlignedBuf { start, len: capacity, capacity });
                return;
            }
            KEPT_BYTES.fetch_sub(self.capacity, Relaxed);
        }
        if self.capacity > 0 {
            // SAFETY: allocated in `new` with this very layout, and owned by this value alone: the
            // kept copy above is made only where this is not reached.
            unsafe { dealloc(self.start.as_ptr(), AlignedBuf::layout(self.capacity)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: at least `len` initialised bytes at `start`, owned by self; dangling only if len
        // is 0.
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

    #[test]
    fn lent_buffers_come_back_and_are_bounded() {
        for len in [1, 4096, 4097, 130_000, 1 << 20, (1 << 20) + 1, 3 << 20] {
            let mut buf = AlignedBuf::lend(len);
            assert_eq!((buf.len(), buf.as_ptr() as usize % DIRECT_ALIGN), (len, 0));
            buf.fill(1);
        }
        let many: Vec<AlignedBuf> = (0..100).map(|_| AlignedBuf::lend(1 << 20)).collect();
        drop(many);
        assert!(KEPT_BYTES.load(Relaxed) <= KEPT_TOTAL + (1 << 20));
    }
}
