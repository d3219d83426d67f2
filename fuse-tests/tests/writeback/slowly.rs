//! Images on a slow device, the latency device: what is dirty takes seconds to go home, so that
//! full journals, signals and new mounts meet a flush under way.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fuse_tests::loopfs::LoopFs;
use fuse_tests::paths::{Scratch, ShortPath};
use fuse_tests::seekdisk::SeekDisk;
use fuse_tests::tools::{pattern, rss_bytes};
use fuse_tests::writeback::{
    builder, flush, hold, is_dirty, journaled, stat, try_product, writeback_is_there,
};
use fuse_tests::{Mount, report, run};
use rustix::process::{Pid, Signal, kill_process};

use super::common::*;

const MIB: u64 = 1 << 20;

/// A mount of images on the latency device, its journal elsewhere, and what it tells a service
/// manager. Dropped from top to bottom.
struct Slow {
    mount: Mount,
    _fs: LoopFs,
    _disk: SeekDisk,
    told: UnixDatagram,
    _short: ShortPath,
    source: PathBuf,
    _scratch: Scratch,
}

fn slow(name: &str, options: &[&str]) -> Option<Slow> {
    let able = writeback_is_there() && report::have_fuse() && report::have_root("loop devices");
    if !able || !journaled() {
        return None;
    }
    let scratch = Scratch::new(name);
    let program = Path::new(env!("CARGO_BIN_EXE_seekdisk"));
    let disk = SeekDisk::start(program, scratch.path(), 512 * MIB).unwrap();
    let fs = LoopFs::make(&disk.disk(), &scratch.path().join("slow")).unwrap();
    let source = fs.path().join("images");
    let state = scratch.path().join("state");
    fs::create_dir(&source).unwrap();
    fs::create_dir(&state).unwrap();
    let mut builder = builder(&format!("{name}-mnt"))?.source(&source);
    builder = builder.option(&format!("state={}", state.display()));
    // A socket's name has 108 bytes at most.
    let short = ShortPath::new(scratch.path());
    let notify = short.path().join("notify");
    let told = UnixDatagram::bind(&notify).unwrap();
    told.set_nonblocking(true).unwrap();
    builder = builder.env("NOTIFY_SOCKET", text(&notify));
    for option in options {
        builder = builder.option(option);
    }
    let mount = builder.limit(Duration::from_secs(180)).start()?;
    let (_fs, _disk, _short, _scratch) = (fs, disk, short, scratch);
    Some(Slow { mount, _fs, _disk, told, _short, source, _scratch })
}

/// Offset of write `n` of `count`: 4 KiB all over the file, never next to the last.
fn place(n: u64, count: u64) -> u64 {
    (n * 7919) % count * 8 * 4096
}

fn blocks(path: &Path, count: u64, seed: u64) {
    let file = open(path);
    file.set_len(count * 8 * 4096).unwrap();
    for n in 0..count {
        file.write_all_at(&pattern(seed << 32 | n, 4096), place(n, count)).unwrap();
    }
    drop(file);
    settle();
}

fn are_there(path: &Path, count: u64, seed: u64) {
    let there = fs::read(path).unwrap();
    for n in 0..count {
        let at = place(n, count) as usize;
        let good = there[at..at + 4096] == pattern(seed << 32 | n, 4096);
        assert!(good, "{} at {at}", path.display());
    }
}

/// Blocks that take the device some seconds.
const SECONDS_OF_BLOCKS: u64 = 6000;

#[test]
fn a_full_journal_slows_writers_and_nothing_fails() {
    let Some(slow) = slow("slow-full", &["journal_size=8M", "cache=16M"]) else { return };
    hold(&slow.mount);
    const BLOCKS: u64 = 1500;
    std::thread::scope(|scope| {
        for job in 0..4u64 {
            let path = slow.mount.at(format!("disk-{job}"));
            scope.spawn(move || blocks(&path, BLOCKS, job));
        }
    });
    let stat = stat(&slow.mount);
    assert!(stat["waited"].as_u64() > Some(0), "no writer ever waited: {stat}");
    assert_eq!((stat["errors"].as_u64(), &stat["failed"]), (Some(0), &serde_json::Value::Null));
    // Cache, dirty index, parked requests, and the program itself.
    let most = (16 + 16 + 64 + 64) * MIB;
    let resident = rss_bytes(slow.mount.pid());
    assert!(resident < most, "{resident} bytes resident");
    flush(&slow.mount);
    (0..4).for_each(|job| are_there(&slow.source.join(format!("disk-{job}")), BLOCKS, job));
}

#[test]
fn a_second_signal_ends_a_long_flush_and_the_journal_keeps_the_rest() {
    let Some(mut slow) = slow("slow-signals", &[]) else { return };
    hold(&slow.mount);
    blocks(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 1);
    is_dirty(&slow.mount);
    let pid = Pid::from_raw(slow.mount.pid() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    kill_process(pid, Signal::TERM).expect("the flush was over at once");
    let _ = slow.mount.ended();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?} to leave", start.elapsed());
    // It says what is left where.
    let said = slow.mount.log();
    assert!(said.contains("journal"), "{said}");
    slow.mount.start_again();
    is_dirty(&slow.mount);
    are_there(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 1);
    flush(&slow.mount);
    are_there(&slow.source.join("disk"), SECONDS_OF_BLOCKS, 1);
}

#[test]
fn a_new_mount_takes_over_from_a_flush_that_goes_on() {
    let Some(mut slow) = slow("slow-over", &[]) else { return };
    hold(&slow.mount);
    blocks(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 2);
    run("fusermount3", &["-u", text(slow.mount.path())]);
    let old = slow.mount.part();
    slow.mount.start_again();
    ended_well(old);
    are_there(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 2);
    flush(&slow.mount);
    are_there(&slow.source.join("disk"), SECONDS_OF_BLOCKS, 2);
}

#[test]
fn a_service_that_stops_tells_how_far_its_flush_is() {
    let Some(mut slow) = slow("slow-notify", &[]) else { return };
    hold(&slow.mount);
    blocks(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 5);
    kill_process(Pid::from_raw(slow.mount.pid() as i32).unwrap(), Signal::TERM).unwrap();
    assert!(slow.mount.ended().success(), "{}", slow.mount.log());
    let mut said = String::new();
    let mut bytes = [0; 4096];
    while let Ok(length) = slow.told.recv(&mut bytes) {
        said.push_str(&String::from_utf8_lossy(&bytes[..length]));
        said.push('\n');
    }
    assert!(said.contains("STOPPING=1"), "{said}");
    // Else the manager kills it after its own time-out.
    assert!(said.contains("EXTEND_TIMEOUT_USEC="), "{said}");
    assert!(said.matches("STATUS=").count() >= 3, "ready, flushing, more of it: {said}");
    are_there(&slow.source.join("disk"), SECONDS_OF_BLOCKS, 5);
}

#[test]
fn umount_waits_for_a_slow_flush() {
    let Some(mut slow) = slow("slow-umount", &[]) else { return };
    hold(&slow.mount);
    blocks(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 3);
    is_dirty(&slow.mount);
    let output = try_product(&["umount".as_ref(), slow.mount.path().as_os_str()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(slow.mount.ended().success(), "{}", slow.mount.log());
    are_there(&slow.source.join("disk"), SECONDS_OF_BLOCKS, 3);
}

#[test]
fn reads_and_fsyncs_do_not_wait_for_the_flush() {
    let Some(slow) = slow("slow-fsync", &[]) else { return };
    hold(&slow.mount);
    blocks(&slow.mount.at("disk"), SECONDS_OF_BLOCKS, 4);
    let file = open(&slow.mount.at("log"));
    file.write_all_at(b"first", 0).unwrap();
    file.sync_all().unwrap();
    let path = slow.mount.path().to_owned();
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| try_product(&["flush".as_ref(), path.as_os_str()]));
        std::thread::sleep(Duration::from_millis(300));
        let mut longest = Duration::ZERO;
        for n in 0..100u64 {
            let start = Instant::now();
            file.write_all_at(&pattern(n, 512), n * 512).unwrap();
            file.sync_data().unwrap();
            longest = longest.max(start.elapsed());
        }
        assert!(!flushing.is_finished(), "the flush was over too soon to show anything");
        assert!(longest < Duration::from_secs(1), "an fsync took {longest:?}");
        let output = flushing.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
}
