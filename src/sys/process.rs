//! Processes and signals (layer 1): what rustix lacks of fork(2) and sigwait(3).
//!
//! Nothing here keeps state. `fork` must be called before the first thread exists; the signals of
//! `block` must be blocked before the first thread too, so that every thread inherits the mask and
//! only `wait` receives them.

use std::io;
use std::mem::MaybeUninit;

use crate::error::{Error, Result};

/// A signal that asks the daemon to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The terminal went away.
    Hangup,
    /// Ctrl-C.
    Interrupt,
    /// kill(1), systemd.
    Terminate,
}

impl Signal {
    /// Every signal that `block` blocks.
    pub const ALL: [Signal; 3] = [Signal::Hangup, Signal::Interrupt, Signal::Terminate];

    /// "SIGTERM".
    pub fn name(self) -> &'static str {
        match self {
            Signal::Hangup => "SIGHUP",
            Signal::Interrupt => "SIGINT",
            Signal::Terminate => "SIGTERM",
        }
    }

    fn number(self) -> i32 {
        match self {
            Signal::Hangup => libc::SIGHUP,
            Signal::Interrupt => libc::SIGINT,
            Signal::Terminate => libc::SIGTERM,
        }
    }
}

/// What `fork` returned.
#[derive(Debug)]
pub enum Forked {
    /// This is the parent; the child's process number.
    Parent(u32),
    /// This is the child.
    Child,
}

/// Duplicates the process. An error if it already has more than one thread: the child would
/// inherit locks that nobody unlocks.
#[allow(unsafe_code)]
pub fn fork() -> Result<Forked> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads > 1 {
        return Err(Error::os("fork", io::Error::other("there are threads already")));
    }
    // SAFETY: the process has one thread, so the child's memory is consistent and no lock is held
    // by a thread that does not exist there.
    match unsafe { libc::fork() } {
        -1 => Err(Error::os("fork", io::Error::last_os_error())),
        0 => Ok(Forked::Child),
        child => Ok(Forked::Parent(child as u32)),
    }
}

/// Waits for the end of `child`: its exit code, or 128 + the signal that ended it.
#[allow(unsafe_code)]
pub fn wait_child(child: u32) -> Option<i32> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for an int for the duration of the call.
        let result = unsafe { libc::waitpid(child as libc::pid_t, &mut status, 0) };
        if result >= 0 {
            break;
        }
        if io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return None;
        }
    }
    if libc::WIFEXITED(status) {
        Some(libc::WEXITSTATUS(status))
    } else {
        Some(128 + libc::WTERMSIG(status))
    }
}

#[allow(unsafe_code)]
fn signal_set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set before anything reads it; sigaddset is given
    // that set and valid signal numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in Signal::ALL {
            libc::sigaddset(set.as_mut_ptr(), signal.number());
        }
        set.assume_init()
    }
}

/// Blocks SIGHUP, SIGINT and SIGTERM for this thread and all it starts from now on. A signal that
/// the parent ignores (nohup) stays ignored.
#[allow(unsafe_code)]
pub fn block_signals() -> Result<()> {
    let set = signal_set();
    // SAFETY: `set` is an initialised signal set; a null old set is allowed.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(Error::os("block signals", io::Error::from_raw_os_error(errno))),
    }
}

/// Waits for the next of the blocked signals.
#[allow(unsafe_code)]
pub fn wait_signal() -> Result<Signal> {
    let set = signal_set();
    let mut number = 0;
    loop {
        // SAFETY: both pointers are to initialised values that live for the whole call.
        let errno = unsafe { libc::sigwait(&set, &mut number) };
        if errno != 0 {
            return Err(Error::os("wait for signals", io::Error::from_raw_os_error(errno)));
        }
        if let Some(signal) = Signal::ALL.into_iter().find(|signal| signal.number() == number) {
            return Ok(signal);
        }
    }
}
