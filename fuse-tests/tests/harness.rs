//! The harness itself: what it does when a mount hangs or a daemon dies.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use fuse_tests::{Mount, cleanup};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn a_hung_daemon_is_given_up_and_leaves_nothing() {
    let Some(mount) = Mount::builder("hung").limit(Duration::from_secs(2)).start() else { return };
    let scratch = mount.scratch().to_owned();
    let daemon = Pid::from_raw(mount.pid() as i32).unwrap();
    kill_process(daemon, Signal::STOP).unwrap();
    let start = Instant::now();
    // The watchdog aborts the connection: root can without the control filesystem, a user where
    // it is mounted.
    if rustix::process::geteuid().is_root() {
        fs::read_dir(mount.at("never-asked")).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(15));
    }
    kill_process(daemon, Signal::CONT).unwrap();
    let _ = catch_unwind(AssertUnwindSafe(|| drop(mount)));
    assert!(cleanup::mounts_below(&scratch).is_empty());
    assert!(!scratch.exists());
}

#[test]
fn a_killed_daemon_leaves_a_mount_that_is_taken_away() {
    let Some(mut mount) = Mount::builder("killed").start() else { return };
    let scratch = mount.scratch().to_owned();
    mount.kill();
    let error = fs::read_dir(mount.path()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    drop(mount);
    assert!(cleanup::mounts_below(&scratch).is_empty());
    assert!(!scratch.exists());
}

#[test]
fn a_mount_after_a_kill_answers_at_once() {
    let Some(mut mount) = Mount::builder("again").start() else { return };
    for round in 0..20 {
        std::fs::write(mount.at("file"), format!("{round}")).unwrap();
        mount.kill();
        mount.start_again();
        // Through the control socket: its place may still hold that of the dead daemon.
        assert_eq!(mount.stat_json("")["snapshot"]["block_size"], 4096, "round {round}");
        assert_eq!(std::fs::read_to_string(mount.at("file")).unwrap(), format!("{round}"));
    }
}
