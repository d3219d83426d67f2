//! The time-out of a test: a hung mount must not hang the suite.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use crate::{cleanup, paths, report};

/// Ends the test when it takes too long: first by aborting the FUSE connections of this process's
/// scratch directories (the hung calls then fail and the test with them), 20 s later by ending
/// the process, its mounts removed. Disarmed when dropped.
#[derive(Debug)]
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Starts the clock for the running test.
    pub fn new(limit: Duration) -> Watchdog {
        let (alive, dropped) = channel::<()>();
        let name = report::test_name();
        thread::spawn(move || {
            if dropped.recv_timeout(limit) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            eprintln!("\nTIME-OUT: {name} took more than {} s", limit.as_secs());
            let own = format!("-{}-", std::process::id());
            let is_own = |mount: &cleanup::MountLine| mount.path.to_string_lossy().contains(&own);
            let mounts = cleanup::mounts_below(&paths::scratch_base());
            for mount in mounts.iter().filter(|mount| is_own(mount)) {
                cleanup::abort_connection(mount);
            }
            let grace = Duration::from_secs(20);
            if dropped.recv_timeout(grace) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            eprintln!("TIME-OUT: {name} hangs still: giving up this test file");
            for mount in mounts.iter().rev().filter(|mount| is_own(mount)) {
                let detach = rustix::mount::UnmountFlags::DETACH;
                let _ = cleanup::unmount_path(&mount.path, detach);
            }
            std::process::exit(102);
        });
        Watchdog { _alive: alive }
    }
}
