//! Operations on dirty files, and mode switches: the bytes stay right, dirty, after a crash, clean.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use fuse_tests::mapping::Mapping;
use fuse_tests::tools::pattern;
use fuse_tests::writeback::{
    builder, crash, device, flush, hold, is_dirty, journaled, mode, release, set, try_product,
    wait_clean,
};
use fuse_tests::writers::{self, Writers};
use fuse_tests::{Mount, drop_caches};
use rustix::fs::{FallocateFlags, fallocate};

use super::common::*;

const LEN: usize = 4_000_000;

/// Checks the files dirty, after a crash, and on the source after a flush.
fn check_all(mount: &mut Mount, files: &[(&str, &[u8])]) {
    let through = |mount: &Mount, when: &str| {
        drop_caches();
        for (name, bytes) in files {
            println!("{name} {when}");
            holds(&mount.at(name), bytes);
        }
    };
    through(mount, "dirty");
    crash(mount);
    hold(mount);
    through(mount, "after a crash");
    flush(mount);
    through(mount, "clean");
    for (name, bytes) in files {
        holds(&mount.source_at(name), bytes);
    }
}

fn dirty(name: &str) -> Option<(Mount, Vec<u8>)> {
    let mount = builder(name)?.start()?;
    hold(&mount);
    let bytes = scattered(&mount, "a", LEN, 3);
    is_dirty(&mount);
    Some((mount, bytes))
}

#[test]
fn names_of_dirty_files_change() {
    let Some((mut mount, mut bytes)) = dirty("data-names") else { return };
    fs::create_dir(mount.at("d")).unwrap();
    fs::hard_link(mount.at("a"), mount.at("d/link")).unwrap();
    fs::rename(mount.at("a"), mount.at("d/b")).unwrap();
    scatter(&open(&mount.at("d/link")), &mut bytes, 4, 50);
    holds(&mount.at("d/b"), &bytes);
    // Onto an existing dirty file, as editors save.
    let other = scattered(&mount, "new", 100_000, 5);
    scattered(&mount, "old", 50_000, 6);
    fs::rename(mount.at("new"), mount.at("old")).unwrap();
    check_all(&mut mount, &[("d/b", &bytes), ("d/link", &bytes), ("old", &other)]);
    assert!(!mount.source_at("a").exists() && !mount.source_at("new").exists());
}

#[test]
fn an_unlinked_dirty_file_lives_as_long_as_it_is_open() {
    let Some((mut mount, mut bytes)) = dirty("data-unlink") else { return };
    let file = open(&mount.at("a"));
    fs::remove_file(mount.at("a")).unwrap();
    scatter(&file, &mut bytes, 8, 50);
    let mut there = vec![0; LEN];
    file.read_exact_at(&mut there, 0).unwrap();
    assert!(there == bytes);
    // Another file may get its inode number: nothing of the old one may reach it.
    drop(file);
    let reborn = scattered(&mount, "a", 300_000, 9);
    check_all(&mut mount, &[("a", &reborn)]);
}

#[test]
fn punched_zeroed_and_truncated_ranges_of_dirty_files() {
    let Some((mut mount, mut bytes)) = dirty("data-punch") else { return };
    let file = open(&mount.at("a"));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (n, flags) in [punch, FallocateFlags::ZERO_RANGE].into_iter().enumerate() {
        let (at, len) = (100_001 + n * 700_000, 333_333);
        match fallocate(&file, flags, at as u64, len as u64) {
            Ok(()) => bytes[at..at + len].fill(0),
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(error) => panic!("{flags:?}: {error}"),
        }
        scatter(&file, &mut bytes, 20 + n as u64, 20);
    }
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 2 * LEN as u64).unwrap();
    assert_eq!(file.metadata().unwrap().len(), LEN as u64);
    // Shrunk and grown again: zeros behind the cut, never the old bytes.
    file.set_len(1_234_567).unwrap();
    file.set_len(LEN as u64).unwrap();
    bytes[1_234_567..].fill(0);
    file.write_all_at(b"end", 3_999_000).unwrap();
    bytes[3_999_000..3_999_003].copy_from_slice(b"end");
    fallocate(&file, FallocateFlags::empty(), 0, LEN as u64 + 5).unwrap();
    bytes.resize(LEN + 5, 0);
    drop(file);
    check_all(&mut mount, &[("a", &bytes)]);
}

#[test]
fn copies_within_the_mount_of_dirty_data() {
    let Some((mut mount, bytes)) = dirty("data-copy") else { return };
    let (from, to) = (open(&mount.at("a")), open(&mount.at("copy")));
    let mut copied = 0;
    while copied < LEN {
        let (mut start, mut end) = (copied as u64, copied as u64);
        let done =
            rustix::fs::copy_file_range(&from, Some(&mut start), &to, Some(&mut end), LEN - copied);
        let done = done.unwrap();
        assert!(done > 0, "copy_file_range ends at {copied}");
        copied += done;
    }
    // Back into itself, elsewhere.
    let mut own = bytes.clone();
    let (mut start, mut end) = (0, 2_000_000);
    let len = 900_000;
    let done =
        rustix::fs::copy_file_range(&from, Some(&mut start), &from, Some(&mut end), len).unwrap();
    own.copy_within(0..done, 2_000_000);
    drop((from, to));
    check_all(&mut mount, &[("a", &own), ("copy", &bytes)]);
}

#[test]
fn appends_and_mapped_writes_while_dirty() {
    let Some((mut mount, mut bytes)) = dirty("data-mmap") else { return };
    let file = open(&mount.at("a"));
    let mapping = Mapping::new(&file, LEN, true).unwrap();
    mapping.write(1_000_000, &pattern(40, 100_000));
    bytes[1_000_000..1_100_000].copy_from_slice(&pattern(40, 100_000));
    mapping.sync();
    scatter(&file, &mut bytes, 41, 50);
    assert_eq!(mapping.read(0, 3), bytes[..3]);
    drop(mapping);
    let mut options = File::options();
    let append = options.append(true).open(mount.at("a")).unwrap();
    for n in 0..100 {
        let line = pattern(500 + n, 1 + n as usize * 7);
        std::io::Write::write_all(&mut &append, &line).unwrap();
        bytes.extend_from_slice(&line);
    }
    drop((file, append));
    check_all(&mut mount, &[("a", &bytes)]);
}

#[test]
fn a_stream_past_the_cutoff_and_random_writes_into_it() {
    let Some(builder) = builder("data-stream") else { return };
    let builder = builder.option("sequential_cutoff=1M").journal_option("journal_size=8M");
    let Some(mut mount) = builder.start() else { return };
    let mut bytes = pattern(60, 24 << 20);
    let file = open(&mount.at("a"));
    let mut at = 0;
    // Ragged steps: the ends of each are not whole blocks.
    for (n, len) in (0..).zip([100_001, 65_536, 1 << 20, 4095].into_iter().cycle()) {
        let end = (at + len).min(bytes.len());
        file.write_all_at(&bytes[at..end], at as u64).unwrap();
        at = end;
        if n % 7 == 3 {
            let back = at / 2;
            let line = pattern(n, 10_000);
            file.write_all_at(&line, back as u64).unwrap();
            bytes[back..back + 10_000].copy_from_slice(&line);
        }
        if n % 11 == 5 {
            file.sync_data().unwrap();
        }
        if at == bytes.len() {
            break;
        }
    }
    drop(file);
    check_all(&mut mount, &[("a", &bytes)]);
}

#[test]
fn the_mode_is_switched_under_load() {
    let Some(builder) = builder("data-switch") else { return };
    let builder = builder.journal_option("journal_size=8M").limit(Duration::from_secs(180));
    let Some(mut mount) = builder.start() else { return };
    let (seed, mut models) = (20_250_801, writers::nothing());
    for round in 0..3 {
        let mut writers = Writers::start(env!("CARGO_BIN_EXE_storm"), &mount, seed, round);
        let modes = ["writethrough", mode(), "writearound", mode(), "none", mode()];
        for mode in modes.iter().cycle().take(8 + round as usize) {
            std::thread::sleep(Duration::from_millis(120));
            set(&mount, &[&format!("cache_mode={mode}")]);
        }
        assert!(writers.alive(), "a writer met an error or wrong bytes");
        mount.kill();
        writers.end();
        mount.start_again();
        let acks = writers::check(&mount, seed, round, &mut models);
        let acks = acks.unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
        assert!(acks > 50, "round {round}: only {acks} operations");
    }
    flush(&mount);
    writers::source_equals(mount.source(), &models);
}

#[test]
fn leaving_writeback_brings_everything_home() {
    let Some((mut mount, mut bytes)) = dirty("data-leave") else { return };
    if !journaled() {
        return;
    }
    for (n, mode) in ["writethrough", "writearound", "none"].into_iter().enumerate() {
        release(&mount);
        set(&mount, &[&format!("cache_mode={mode}")]);
        wait_clean(&mount, Duration::from_secs(20));
        holds(&mount.source_at("a"), &bytes);
        // Written outside the journal now; an old record of it must not come back (J14).
        scatter(&open(&mount.at("a")), &mut bytes, 70 + n as u64, 50);
        open(&mount.at("a")).sync_all().unwrap();
        holds(&mount.source_at("a"), &bytes);
        crash(&mut mount);
        holds(&mount.at("a"), &bytes);
        set(&mount, &["cache_mode=writeback"]);
        hold(&mount);
        scatter(&open(&mount.at("a")), &mut bytes, 80 + n as u64, 50);
        is_dirty(&mount);
    }
    check_all(&mut mount, &[("a", &bytes)]);
}

#[test]
fn dirty_data_is_there_whatever_mode_is_typed_next() {
    for mode in ["writethrough", "writearound", "none"] {
        let Some((mut mount, bytes)) = dirty("data-typed") else { return };
        mount.kill();
        mount.change_options(|options| {
            options.retain(|option| !option.starts_with("cache_mode="));
            options.push(format!("cache_mode={mode}"));
        });
        mount.start_again();
        holds(&mount.at("a"), &bytes);
        wait_clean(&mount, Duration::from_secs(20));
        holds(&mount.source_at("a"), &bytes);
    }
}

#[test]
fn an_idle_mount_becomes_clean_by_itself() {
    let Some(mount) = builder("data-idle").and_then(|b| b.start()) else { return };
    let bytes = scattered(&mount, "a", LEN, 12);
    wait_clean(&mount, Duration::from_secs(10));
    holds(&mount.source_at("a"), &bytes);
    if journaled() {
        let state = device(&mount, "a").expect("a device that saw requests");
        assert_eq!((state["state"].as_str(), &state["consistent"]), (Some("clean"), &true.into()));
    }
    // One block more: W1 from a clean state.
    open(&mount.at("a")).write_all_at(b"one more", 1_000_001).unwrap();
    wait_clean(&mount, Duration::from_secs(5));
    let mut there = [0; 8];
    let source: &Path = &mount.source_at("a");
    File::open(source).unwrap().read_exact_at(&mut there, 1_000_001).unwrap();
    assert_eq!(&there, b"one more");
}

#[test]
fn one_file_is_flushed_and_the_other_stays_dirty() {
    let Some((mut mount, one)) = dirty("data-flush-one") else { return };
    if !journaled() {
        return;
    }
    let two = scattered(&mount, "b", LEN, 91);
    for (name, wanted) in [("a", "dirty"), ("b", "dirty")] {
        let state = device(&mount, name).expect("a device that saw requests");
        assert_eq!(state["state"], wanted, "{name}: {state}");
        assert_eq!(state["consistent"], false, "{name}: {state}");
    }
    let args = ["flush".as_ref(), mount.path().as_os_str(), "a".as_ref()];
    let mut output = try_product(&args);
    if !output.status.success() {
        // FILE may be meant as a path of its own.
        let file = mount.at("a");
        output = try_product(&["flush".as_ref(), mount.path().as_os_str(), file.as_os_str()]);
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    holds(&mount.source_at("a"), &one);
    assert_eq!(device(&mount, "a").unwrap()["state"], "clean");
    assert_eq!(device(&mount, "b").unwrap()["state"], "dirty");
    check_all(&mut mount, &[("a", &one), ("b", &two)]);
}

#[test]
fn data_behind_a_ragged_hole_is_data() {
    use rustix::fs::{SeekFrom, seek};
    let Some(mount) = builder("data-ragged").and_then(|builder| builder.start()) else { return };
    let mut bytes = pattern(9, 60_000);
    fs::write(mount.at("f"), &bytes).unwrap();
    flush(&mount);
    hold(&mount);
    let file = open(&mount.at("f"));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Ends in the middle of a block, begins in the middle of one, lies inside one.
    for (offset, len) in [(16_742, 15_234), (40_000, 9_152), (54_000, 100)] {
        fallocate(&file, punch, offset, len).unwrap();
        bytes[offset as usize..(offset + len) as usize].fill(0);
    }
    // What data and holes are said to be hides no byte.
    let (mut at, mut told) = (0, vec![0; bytes.len()]);
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let hole = seek(&file, SeekFrom::Hole(data)).unwrap();
        let part = data as usize..hole as usize;
        told[part.clone()].copy_from_slice(&bytes[part]);
        at = hole;
    }
    assert!(told == bytes, "bytes behind a hole are hidden");
    assert_eq!(seek(&file, SeekFrom::Data(20_480)).unwrap(), 28_672);
    holds(&mount.at("f"), &bytes);
}
