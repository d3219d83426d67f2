//! What a daemon that the kernel waits for asks of memory reclaim: not to wait for itself, and not
//! to be killed first. Both need CAP_SYS_RESOURCE and are only wishes: refused, all works on.

/// linux/prctl.h; absent from older libc crates.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Marks the calling thread as one that writes out dirty memory: its allocations start no I/O,
/// which might wait for this very daemon, and it is not throttled for dirty pages of others.
/// Threads started from now on inherit it, so this comes before the first. Whether it was taken.
pub fn set_io_flusher() -> bool {
    // SAFETY: this prctl takes numbers only.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0 }
}

/// Sets how likely the kernel is to kill this process when memory runs out: -1000 (never) to 1000,
/// -500 is usual for what others depend on. Children inherit it. Whether it was taken.
pub fn protect_from_oom(score: i32) -> bool {
    std::fs::write("/proc/self/oom_score_adj", score.to_string()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flusher_is_one_as_far_as_the_kernel_lets_it() {
        const PR_GET_IO_FLUSHER: libc::c_int = 58;
        // In a thread of its own: the other tests keep their state.
        let (taken, state) = std::thread::spawn(|| {
            let taken = set_io_flusher();
            // SAFETY: this prctl takes numbers only.
            (taken, unsafe { libc::prctl(PR_GET_IO_FLUSHER, 0, 0, 0, 0) })
        })
        .join()
        .unwrap();
        assert_eq!(taken, state == 1);
    }

    #[test]
    fn a_score_is_written_and_a_wrong_one_refused() {
        let score = || std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        let before: i32 = score().trim().parse().unwrap();
        // One's own value may always be written.
        assert!(protect_from_oom(before));
        assert!(!protect_from_oom(1001));
        assert_eq!(score().trim(), before.to_string());
    }
}
