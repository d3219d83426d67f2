//! A umask of one thread: request threads set the caller's before they create a file, so that the
//! source filesystem itself decides between umask and default ACL.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Sets this thread's umask. The first call gives the thread its own (unshare(CLONE_FS)).
pub fn set_thread_umask(mask: u32) {
    CURRENT.with(|current| {
        if current.get() == Some(mask) {
            return;
        }
        if current.get().is_none() {
            // SAFETY: unshare takes no pointers; CLONE_FS only separates this thread's umask,
            // root and current directory. It cannot fail for CLONE_FS short of memory, and then
            // the umask is merely shared for this request.
            unsafe { libc::unshare(libc::CLONE_FS) };
        }
        // SAFETY: umask takes no pointers and cannot fail.
        unsafe { libc::umask(mask as libc::mode_t) };
        current.set(Some(mask));
    });
}
