//! Memory mappings, alone and between two processes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use fuse_tests::mapping::Mapping;
use fuse_tests::second::Second;
use fuse_tests::tools::{pattern, write_synced};
use fuse_tests::{Mount, drop_caches};

const LEN: usize = 300_000;

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn second(what: &str, file: &Path, more: &[&str]) -> Second {
    Second::start(env!("CARGO_BIN_EXE_second"), what, file, more)
}

#[test]
fn a_shared_mapping_is_the_file() {
    let Some(mount) = Mount::builder("mmap-shared").start() else { return };
    let path = mount.at("f");
    let bytes = pattern(1, LEN);
    write_synced(&path, &bytes);
    drop_caches();
    let file = open(&path);
    let mapping = Mapping::new(&file, LEN, true).unwrap();
    assert!(mapping.read(0, LEN) == bytes);
    mapping.write(12_345, b"through memory");
    mapping.write(LEN - 4, b"tail");
    let mut seen = [0u8; 14];
    file.read_exact_at(&mut seen, 12_345).unwrap();
    assert_eq!(&seen, b"through memory");
    mapping.sync();
    let source = fs::read(mount.source_at("f")).unwrap();
    assert_eq!(&source[12_345..12_359], b"through memory");
    assert_eq!((&source[LEN - 4..], source.len()), (&b"tail"[..], LEN));
    // And the other way: what write(2) brings is in the mapping.
    file.write_all_at(b"by write", 70_000).unwrap();
    assert_eq!(mapping.read(70_000, 8), b"by write");
    drop(mapping);
    drop(file);
    drop_caches();
    assert_eq!(&fs::read(&path).unwrap()[70_000..70_008], b"by write");
}

#[test]
fn a_private_mapping_keeps_its_writes() {
    let Some(mount) = Mount::builder("mmap-private").start() else { return };
    let path = mount.at("f");
    let bytes = pattern(2, LEN);
    write_synced(&path, &bytes);
    let mapping = Mapping::new(&open(&path), LEN, false).unwrap();
    mapping.write(100, b"mine alone");
    assert_eq!(mapping.read(100, 10), b"mine alone");
    drop(mapping);
    drop_caches();
    assert!(fs::read(&path).unwrap() == bytes);
}

#[test]
fn two_processes_share_a_mapping() {
    let Some(mount) = Mount::builder("mmap-two").start() else { return };
    let path = mount.at("f");
    write_synced(&path, &vec![b'.'; LEN]);
    let file = open(&path);
    let mapping = Mapping::new(&file, LEN, true).unwrap();
    let writer = second("map-write", &path, &["200000", "from the other"]);
    assert_eq!(writer.said(), "written");
    assert_eq!(mapping.read(200_000, 14), b"from the other");
    mapping.write(5_000, b"from here");
    let reader = second("map-read", &path, &["5000", "9"]);
    assert_eq!(reader.said(), "from here");
    drop((reader, writer));
    mapping.sync();
    let source = fs::read(mount.source_at("f")).unwrap();
    assert_eq!(&source[200_000..200_014], b"from the other");
    assert_eq!(&source[5_000..5_009], b"from here");
}

#[test]
fn a_mapping_of_a_file_that_is_removed_and_truncated() {
    let Some(mount) = Mount::builder("mmap-gone").start() else { return };
    let path = mount.at("f");
    write_synced(&path, &pattern(3, LEN));
    let file = open(&path);
    let mapping = Mapping::new(&file, LEN, true).unwrap();
    fs::remove_file(&path).unwrap();
    mapping.write(0, b"still here");
    mapping.sync();
    let mut seen = [0u8; 10];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"still here");
    // The page of the new end reads as zero behind it.
    file.set_len(5_000).unwrap();
    assert_eq!(mapping.read(5_000, 100), vec![0u8; 100]);
}
