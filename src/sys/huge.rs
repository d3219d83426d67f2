//! Memory in huge pages.

use rustix::mm::Advice;

/// Asks for huge pages under a large, long-lived, randomly read buffer: without them a read of it
/// misses the TLB as well. Memory still becomes resident only where it is touched, in steps of the
/// huge page. Advice only.
pub fn advise(buffer: &mut [u8]) {
    const HUGE: usize = 2 << 20;
    let start = buffer.as_mut_ptr();
    let skip = start.align_offset(HUGE);
    let len = buffer.len().saturating_sub(skip) / HUGE * HUGE;
    if len > 0 && skip < buffer.len() {
        // SAFETY: the range lies within the buffer, and MADV_HUGEPAGE changes no bytes of it.
        let _ = unsafe { rustix::mm::madvise(start.add(skip).cast(), len, Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_as_they_are() {
        for len in [0, 1, 5 << 20] {
            let mut buffer = vec![7u8; len];
            advise(&mut buffer);
            assert!(buffer.iter().all(|&byte| byte == 7));
        }
    }
}
