//! Files that change behind the mount are read fresh at the next open; a new size shows after
//! attr-timeout.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use fuse_tests::Mount;
use fuse_tests::tools::{pattern, write_synced};

fn mounted(name: &str) -> Option<Mount> {
    Mount::builder(name).option("attr-timeout=0").start()
}

/// Reads twice, so that the second read comes from a cache.
fn read_twice(mount: &Mount, name: &str) -> Vec<u8> {
    let first = fs::read(mount.at(name)).unwrap();
    assert!(fs::read(mount.at(name)).unwrap() == first);
    first
}

#[test]
fn a_grown_file_is_read_to_its_new_end() {
    let Some(mount) = mounted("grown") else { return };
    let bytes = pattern(1, 50_000);
    write_synced(&mount.source_at("f"), &bytes[..20_001]);
    assert!(read_twice(&mount, "f") == bytes[..20_001]);
    let mut file = File::options().append(true).open(mount.source_at("f")).unwrap();
    file.write_all(&bytes[20_001..]).unwrap();
    assert_eq!(fs::metadata(mount.at("f")).unwrap().len(), 50_000);
    assert!(read_twice(&mount, "f") == bytes);
}

#[test]
fn a_shrunk_file_ends_where_it_ends() {
    let Some(mount) = mounted("shrunk") else { return };
    let bytes = pattern(2, 50_000);
    write_synced(&mount.source_at("f"), &bytes);
    assert!(read_twice(&mount, "f") == bytes);
    let file = File::options().write(true).open(mount.source_at("f")).unwrap();
    file.set_len(10_003).unwrap();
    assert!(read_twice(&mount, "f") == bytes[..10_003]);
    // Grown again behind the mount: zeroes, not what was there before.
    file.set_len(50_000).unwrap();
    let seen = read_twice(&mount, "f");
    assert!(seen[..10_003] == bytes[..10_003] && seen[10_003..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_rewritten_file_of_the_same_size_is_read_fresh() {
    let Some(mount) = mounted("rewritten") else { return };
    write_synced(&mount.source_at("f"), &pattern(3, 50_000));
    for seed in 4..14 {
        read_twice(&mount, "f");
        let bytes = pattern(seed, 50_000);
        let file = File::options().write(true).open(mount.source_at("f")).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        drop(file);
        assert!(read_twice(&mount, "f") == bytes, "rewrite {seed}");
    }
}

#[test]
fn a_file_replaced_by_rename_is_the_new_one() {
    let Some(mount) = mounted("replaced") else { return };
    write_synced(&mount.source_at("f"), b"old text");
    let old = File::open(mount.at("f")).unwrap();
    assert_eq!(read_twice(&mount, "f"), b"old text");
    write_synced(&mount.source_at("g"), b"new");
    fs::rename(mount.source_at("g"), mount.source_at("f")).unwrap();
    assert_eq!(read_twice(&mount, "f"), b"new");
    let mut seen = [0u8; 8];
    old.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"old text");
    // An inode number that is used again is another file.
    for round in 0..20 {
        let text = format!("round {round}");
        fs::remove_file(mount.source_at("f")).unwrap();
        fs::write(mount.source_at("f"), &text).unwrap();
        assert_eq!(read_twice(&mount, "f"), text.as_bytes());
    }
}

#[test]
fn with_the_default_timeout_a_new_size_shows_after_a_second() {
    let Some(mount) = Mount::builder("timeout").start() else { return };
    write_synced(&mount.source_at("f"), b"short");
    assert_eq!(read_twice(&mount, "f"), b"short");
    write_synced(&mount.source_at("f"), b"now it is longer");
    write_synced(&mount.source_at("new"), b"n");
    thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::metadata(mount.at("f")).unwrap().len(), 16);
    assert_eq!(read_twice(&mount, "f"), b"now it is longer");
    assert_eq!(read_twice(&mount, "new"), b"n");
    fs::remove_file(mount.source_at("new")).unwrap();
    thread::sleep(Duration::from_millis(1100));
    assert!(!mount.at("new").exists());
}

#[test]
fn our_own_writes_are_not_mistaken_for_foreign_ones() {
    let Some(mount) = mounted("own") else { return };
    write_synced(&mount.at("f"), &pattern(1, 100_000));
    let reads = || mount.stat_json("")["snapshot"]["total"]["backing_blocks"].as_u64().unwrap();
    fuse_tests::drop_caches();
    read_twice(&mount, "f");
    let before = reads();
    for _ in 0..5 {
        let file = File::options().write(true).open(mount.at("f")).unwrap();
        file.write_all_at(b"ours", 5000).unwrap();
        drop(file);
        fuse_tests::drop_caches();
        read_twice(&mount, "f");
    }
    // Writing into a block that is cached needs no read, and reopening the file none either.
    assert_eq!(reads(), before);
}
