//! SIGINT and SIGTERM: end the running test's process group, remove what it left, exit.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

static WAKE: AtomicI32 = AtomicI32::new(-1);
static GROUP: AtomicU32 = AtomicU32::new(0);
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Does not return once a signal came: the other thread cleans up and ends the process.
pub fn check() {
    while LEAVING.load(SeqCst) {
        thread::sleep(Duration::from_secs(1));
    }
}

/// Forgets the running group when dropped.
#[derive(Debug)]
pub struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        GROUP.store(0, SeqCst);
    }
}

/// Says which process group a signal has to end.
pub fn running(group: u32) -> Running {
    GROUP.store(group, SeqCst);
    Running
}

/// Ends a process group that we started: politely, then not.
pub fn end_group(group: u32) {
    let Some(group) = Pid::from_raw(group as i32) else { return };
    if kill_process_group(group, Signal::TERM).is_err() {
        return;
    }
    let start = Instant::now();
    while test_kill_process_group(group).is_ok() {
        if start.elapsed() > Duration::from_secs(3) {
            let _ = kill_process_group(group, Signal::KILL);
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

extern "C" fn on_signal(_signal: libc::c_int) {
    // SAFETY: write(2) may be called in a signal handler; the descriptor is never closed.
    unsafe { libc::write(WAKE.load(SeqCst), [0u8].as_ptr().cast(), 1) };
}

/// Catches the signals from now on.
pub fn install() {
    let Ok((read, write)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else {
        return;
    };
    WAKE.store(write.as_raw_fd(), SeqCst);
    std::mem::forget(write);
    let handler = on_signal as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only calls write(2).
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    thread::spawn(move || wait_and_leave(read));
}

fn wait_and_leave(read: OwnedFd) {
    let mut byte = [0u8];
    while rustix::io::read(&read, &mut byte) != Ok(1) {}
    LEAVING.store(true, SeqCst);
    let group = GROUP.load(SeqCst);
    if group != 0 {
        end_group(group);
        // The group's leader is our child and a zombie now: sweep_dead sees it as alive.
        if let Some(pid) = Pid::from_raw(group as i32) {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
    super::sweep_dead();
    println!("interrupted\n0 passed, 1 failed");
    std::process::exit(130);
}
