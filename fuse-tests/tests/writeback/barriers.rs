//! What waits for the journal, and what must not.

use std::fs::{self, File};
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use fuse_tests::Mount;
use fuse_tests::tools::pattern;
use fuse_tests::writeback::{builder, crash, flush, hold, journaled, number};

use super::common::*;

fn waiters(mount: &Mount) -> u64 {
    number(mount, "barrier_waiters")
}

/// pwritev2 of one buffer.
fn pwritev2(file: &File, bytes: &[u8], offset: i64, flags: i32) {
    let parts = [IoSlice::new(bytes)];
    // SAFETY: IoSlice has the layout of iovec; it and the buffer outlive the call.
    let done = unsafe { libc::pwritev2(file.as_raw_fd(), parts.as_ptr().cast(), 1, offset, flags) };
    assert_eq!(done, bytes.len() as isize, "{}", std::io::Error::last_os_error());
}

#[test]
fn synchronous_writes_are_in_a_barrier() {
    let Some(mut mount) = builder("barrier-dsync").and_then(|b| b.start()) else { return };
    if !journaled() {
        return;
    }
    hold(&mount);
    // Of ten a few may find that a heartbeat or the autocommit was there first.
    let bytes = pattern(4, 8192);
    let path = mount.at("file");
    let plain = open(&path);
    plain.write_all_at(&bytes, 0).unwrap();
    plain.sync_all().unwrap();
    let before = waiters(&mount);
    for n in 0..10 {
        plain.write_all_at(&bytes, n * 8192).unwrap();
    }
    assert_eq!(waiters(&mount), before, "a plain write waits for no barrier");
    let mut options = File::options();
    let dsync = options.write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
    let before = waiters(&mount);
    for n in 0..10 {
        dsync.write_all_at(&bytes, n * 8192).unwrap();
    }
    assert!(waiters(&mount) >= before + 8, "O_DSYNC: {} of 10", waiters(&mount) - before);
    let before = waiters(&mount);
    for n in 0..10 {
        pwritev2(&plain, &bytes, n * 8192, libc::RWF_DSYNC);
    }
    assert!(waiters(&mount) >= before + 8, "RWF_DSYNC: {} of 10", waiters(&mount) - before);
    let before = waiters(&mount);
    for _ in 0..10 {
        plain.write_all_at(&bytes, 0).unwrap();
        plain.sync_data().unwrap();
    }
    assert!(waiters(&mount) >= before + 8, "fdatasync: {} of 10", waiters(&mount) - before);
    crash(&mut mount);
    assert_eq!(fs::metadata(&path).unwrap().len(), 10 * 8192);
}

#[test]
fn waiters_share_barriers() {
    let Some(mount) = builder("barrier-group").and_then(|b| b.start()) else { return };
    if !journaled() {
        return;
    }
    hold(&mount);
    let (barriers, before) = (number(&mount, "barriers"), waiters(&mount));
    const EACH: u64 = 50;
    std::thread::scope(|scope| {
        for job in 0..8 {
            let path = mount.at(format!("job-{job}"));
            scope.spawn(move || {
                let file = open(&path);
                for n in 0..EACH {
                    file.write_all_at(&pattern(n, 4096), n * 4096).unwrap();
                    file.sync_data().unwrap();
                }
            });
        }
    });
    let waited = waiters(&mount) - before;
    let barriers = number(&mount, "barriers") - barriers;
    // Some may find that a heartbeat or the autocommit was there first.
    assert!(waited >= 8 * EACH * 9 / 10, "{waited} of {} fsyncs waited", 8 * EACH);
    assert!(barriers * 10 <= waited * 9, "{barriers} barriers for {waited} waiters");
}

/// What counts every sync of the mount that somebody waited for.
fn syncs(mount: &Mount) -> [u64; 3] {
    let total = mount.stat_json("")["snapshot"]["total"]["syncs"].as_u64().unwrap();
    [total, number(mount, "epochs"), waiters(mount)]
}

fn many(name: &str, act: impl Fn(&std::path::Path)) -> Option<Mount> {
    const FILES: u64 = 10_000;
    // Recovery keeps a descriptor for each file that the journal has records of.
    let builder = builder(name)?.limit(Duration::from_secs(300));
    let mount = builder.journal_option("journal_size=256M").start()?;
    hold(&mount);
    fs::create_dir(mount.at("many")).unwrap();
    let path = |n: u64| mount.at(format!("many/file-{n}"));
    for n in 0..FILES {
        fs::write(path(n), pattern(n, 300)).unwrap();
    }
    let before = journaled().then(|| syncs(&mount));
    let start = Instant::now();
    (0..FILES).for_each(|n| act(&path(n)));
    let took = start.elapsed();
    assert!(took < Duration::from_secs(60), "{took:?} for {FILES} files");
    if let Some(before) = before {
        let after = syncs(&mount);
        let all: u64 = after.iter().zip(before).map(|(after, before)| after - before).sum();
        assert!(all <= FILES / 50, "{before:?} {after:?}: syncs for {FILES} files");
    }
    Some(mount)
}

#[test]
fn unlinking_ten_thousand_dirty_files_costs_no_sync_each() {
    let Some(mut mount) = many("many-unlink", |path| fs::remove_file(path).unwrap()) else {
        return;
    };
    assert_eq!(fs::read_dir(mount.at("many")).unwrap().count(), 0);
    crash(&mut mount);
    assert_eq!(fs::read_dir(mount.at("many")).unwrap().count(), 0, "replay brought files back");
    flush(&mount);
    assert_eq!(fs::read_dir(mount.source_at("many")).unwrap().count(), 0);
}

#[test]
fn truncating_ten_thousand_dirty_files_costs_no_sync_each() {
    let truncate = |path: &std::path::Path| drop(File::create(path).unwrap());
    let Some(mut mount) = many("many-trunc", truncate) else { return };
    let sizes = |directory: std::path::PathBuf| -> u64 {
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum()
    };
    assert_eq!(sizes(mount.at("many")), 0);
    crash(&mut mount);
    assert_eq!(sizes(mount.at("many")), 0, "replay brought bytes back");
    flush(&mount);
    assert_eq!(sizes(mount.source_at("many")), 0);
}
