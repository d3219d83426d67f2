//! Full journals, full sources, sources that break: who waits, who gets an error, who goes on.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fuse_tests::loopfs::LoopFs;
use fuse_tests::paths::Scratch;
use fuse_tests::storm::Random;
use fuse_tests::tools::{pattern, sh, wait_for};
use fuse_tests::writeback::{
    builder, device, flush, hold, journaled, number, on_ext4, wait_clean, writeback_is_there,
};
use fuse_tests::{Mount, report, run, try_run};

use super::common::*;

const MIB: u64 = 1 << 20;

/// An ext4 on a file of its own below the scratch directory.
fn small_fs(scratch: &Scratch, mib: u64, at: &Path) -> LoopFs {
    let image = scratch.path().join("small.img");
    File::create(&image).unwrap().set_len(mib * MIB).unwrap();
    LoopFs::make(&image, at).unwrap()
}

fn able() -> bool {
    writeback_is_there() && report::have_fuse() && report::have_root("loop devices")
}

#[test]
fn a_full_source_is_an_error_to_the_writer_at_once() {
    let Some(builder) = on_ext4("space-full", 256) else { return };
    let state = Scratch::new("space-full-state");
    let option = format!("state={}", state.path().display());
    let Some(mount) = builder.journal_option(&option).start() else { return };
    let path = mount.at("grows");
    let file = open(&path);
    let block = pattern(6, MIB as usize);
    let mut written = 0;
    let start = Instant::now();
    let error = loop {
        match file.write_all_at(&block, written * MIB) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 256, "more than the filesystem holds was acknowledged");
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error} after {written} MiB");
    let again = Instant::now();
    let second = file.write_all_at(&block, 300 * MIB).unwrap_err();
    assert_eq!(second.raw_os_error(), Some(libc::ENOSPC));
    assert!(again.elapsed() < Duration::from_secs(1), "{:?}", again.elapsed());
    assert!(written > 60, "only {written} MiB in {:?}", start.elapsed());
    // What was acknowledged has a place.
    flush(&mount);
    let there = fs::read(mount.source_at("grows")).unwrap();
    assert!(there.len() as u64 >= written * MIB);
    let good = |n: u64| there[(n * MIB) as usize..][..MIB as usize] == block[..];
    assert!((0..written).all(good), "an acknowledged MiB is not home");
    drop(file);
    fs::remove_file(&path).unwrap();
    let fits = || fs::write(mount.at("fits"), &block).ok();
    assert!(wait_for(Duration::from_secs(10), fits).is_some(), "no room after an unlink");
    drop(mount);
}

/// A mount whose directory `sick` is a filesystem of its own; the rest is well.
struct Ward {
    mount: Mount,
    sick: LoopFs,
    scratch: Scratch,
}

fn ward(name: &str) -> Option<Ward> {
    if !able() || !journaled() {
        return None;
    }
    let scratch = Scratch::new(name);
    let source = scratch.path().join("source");
    fs::create_dir_all(source.join("sick")).unwrap();
    // With room beyond the 64 MiB that writers must leave.
    let sick = small_fs(&scratch, 160, &source.join("sick"));
    let builder = builder(&format!("{name}-mnt"))?.source(&source);
    let builder = builder.option("journal_size=8M").limit(Duration::from_secs(240));
    let mount = builder.start()?;
    Some(Ward { mount, sick, scratch })
}

/// Ten times the journal's size into a healthy image, with a dirty block of the sick one among
/// each MiB; the longest wait of a healthy write.
fn others_go_on(mount: &Mount, sick: &File) -> Duration {
    let well = open(&mount.at("well.img"));
    well.set_len(64 * MIB).unwrap();
    let longest = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Refused once it has its share of the journal; a hang must not hold the others up.
            for n in 0.. {
                if done.load(Relaxed) {
                    break;
                }
                let _ = sick.write_all_at(&pattern(n, 4096), n % 2000 * 8192);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut random = Random::new(8);
        for n in 0..80 * 16 {
            let at = random.below(1024) * (64 << 10);
            let start = Instant::now();
            well.write_all_at(&pattern(n, 64 << 10), at).unwrap();
            longest.fetch_max(start.elapsed().as_nanos() as u64, Relaxed);
        }
        done.store(true, Relaxed);
    });
    Duration::from_nanos(longest.into_inner())
}

/// Leaves no block of a filesystem free: every one of a file written for that, until not even one
/// byte more has a place, and what was reserved beyond need is used, too.
fn fill(at: &Path) -> PathBuf {
    let path = at.join("filler");
    let mut filler = File::create(&path).unwrap();
    let mut len = 0;
    for size in [1 << 20, 1024] {
        loop {
            let before = len;
            while filler.write_all(&vec![1; size]).is_ok() {}
            filler.sync_all().unwrap();
            len = filler.metadata().unwrap().len();
            if len == before {
                break;
            }
        }
    }
    path
}

fn sickness(mount: &Mount) -> String {
    let state = device(mount, "sick/disk.img").map(|device| device["state"].clone());
    state.and_then(|state| state.as_str().map(str::to_owned)).unwrap_or_default()
}

#[test]
fn an_image_on_a_full_filesystem_holds_nobody_up_and_heals_by_itself() {
    let Some(Ward { scratch, sick, mount }) = ward("space-sick") else { return };
    let image = mount.at("sick/disk.img");
    let file = open(&image);
    file.set_len(32 * MIB).unwrap();
    hold(&mount);
    file.write_all_at(b"acknowledged", 16 * MIB).unwrap();
    // Behind the mount's back: what was promised is taken away.
    let filler = fill(sick.path());
    let errors = number(&mount, "errors");
    fuse_tests::writeback::release(&mount);
    let degraded = || (sickness(&mount) == "degraded").then_some(());
    let longest = others_go_on(&mount, &file);
    println!("the longest wait of a healthy write: {longest:?}");
    assert!(longest < Duration::from_secs(1), "a healthy write waited {longest:?}");
    assert!(wait_for(Duration::from_secs(10), degraded).is_some(), "{}", sickness(&mount));
    assert!(number(&mount, "errors") > errors);
    let said = mount.log();
    assert!(said.contains("writeback of sick/disk.img: write: No space left"), "{said}");
    let mut there = [0; 12];
    File::open(&image).unwrap().read_exact_at(&mut there, 16 * MIB).unwrap();
    assert_eq!(&there, b"acknowledged");
    drop(file);
    fs::remove_file(&filler).unwrap();
    wait_clean(&mount, Duration::from_secs(90));
    File::open(sick.path().join("disk.img")).unwrap().read_exact_at(&mut there, 16 * MIB).unwrap();
    assert_eq!(&there, b"acknowledged");
    drop(mount);
    drop(sick);
    drop(scratch);
}

#[test]
fn an_image_on_a_filesystem_that_became_read_only_holds_nobody_up() {
    let Some(Ward { scratch, sick, mut mount }) = ward("space-ro") else { return };
    let image = mount.at("sick/disk.img");
    // Kept open: nobody can open a file there for writing afterwards.
    let file = open(&image);
    file.set_len(32 * MIB).unwrap();
    file.sync_all().unwrap();
    hold(&mount);
    file.write_all_at(b"acknowledged", 16 * MIB).unwrap();
    file.sync_all().unwrap();
    // An ordinary remount is refused while the daemon has the file open: what an error does.
    let at: PathBuf = sick.path().to_owned();
    sh(scratch.path(), &format!("mount -o remount,abort {}", at.display()));
    fuse_tests::writeback::release(&mount);
    let longest = others_go_on(&mount, &file);
    println!("the longest wait of a healthy write: {longest:?}");
    assert!(longest < Duration::from_secs(1), "a healthy write waited {longest:?}");
    let mut there = [0; 12];
    File::open(&image).unwrap().read_exact_at(&mut there, 16 * MIB).unwrap();
    assert_eq!(&there, b"acknowledged");
    assert!(number(&mount, "errors") > 0);
    // The repair of such a filesystem is a new mount of it.
    mount.kill();
    drop(file);
    let device = sick.device().path().to_owned();
    // Not before the dead daemon's ring has let go of the old one: it would be the same.
    let gone = || try_run("umount", &[&at]).status.success().then_some(());
    assert!(wait_for(Duration::from_secs(20), gone).is_some(), "{}", at.display());
    run("mount", &[&device, &at]);
    mount.start_again();
    flush(&mount);
    File::open(at.join("disk.img")).unwrap().read_exact_at(&mut there, 16 * MIB).unwrap();
    assert_eq!(&there, b"acknowledged");
    drop(mount);
    drop(sick);
}
