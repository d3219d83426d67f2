//! Reading and writing: open flags, holes, allocation, copies, locks, times.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use fuse_tests::second::Second;
use fuse_tests::tools::{pattern, wait_for, write_synced};
use fuse_tests::{Backing, Mount, drop_caches};
use rustix::fs::{FallocateFlags, FlockOperation, Timespec, Timestamps, fallocate, flock};
use rustix::io::Errno;

fn direct(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn second(what: &str, file: &Path) -> String {
    Second::start(env!("CARGO_BIN_EXE_second"), what, file, &[]).said().to_owned()
}

/// A deterministic sequence of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % limit.max(1)
    }
}

/// Random reads, writes and truncates against a copy in memory, with and without O_DIRECT.
fn compare_with_memory(mount: &Mount, seed: u64, operations: u32) {
    eprintln!("seed {seed}");
    let mut random = Random(seed);
    let path = mount.at("random");
    let files = [direct(&path), File::options().read(true).write(true).open(&path).unwrap()];
    let mut memory: Vec<u8> = Vec::new();
    for number in 0..operations {
        // Half of the requests are aligned, as O_DIRECT users' are.
        let align = [1, 1, 512, 4096][random.below(4) as usize];
        let offset = random.below(600_000) / align * align;
        let len = (random.below(70_000) / align * align).max(align);
        let file = &files[random.below(2) as usize];
        match random.below(10) {
            0 => {
                let size = random.below(600_000) / align * align;
                file.set_len(size).unwrap();
                memory.resize(size as usize, 0);
            }
            1..=4 => {
                let bytes = pattern(u64::from(number), len as usize);
                file.write_all_at(&bytes, offset).unwrap();
                let end = (offset + len) as usize;
                memory.resize(memory.len().max(end), 0);
                memory[offset as usize..end].copy_from_slice(&bytes);
            }
            _ => {
                let mut bytes = vec![1u8; len as usize];
                let count = file.read_at(&mut bytes, offset).unwrap();
                let from = memory.len().min(offset as usize);
                let to = memory.len().min((offset + len) as usize);
                assert_eq!(count, to - from, "operation {number}: length at {offset}+{len}");
                assert!(bytes[..count] == memory[from..to], "operation {number}: {offset}+{len}");
            }
        }
    }
    assert!(fs::read(&path).unwrap() == memory, "the whole file");
    assert!(fs::read(mount.source_at("random")).unwrap() == memory, "the file of the source");
}

#[test]
fn random_requests_agree_with_memory() {
    let Some(mount) = Mount::builder("random").start() else { return };
    compare_with_memory(&mount, 1, 1500);
}

#[test]
fn random_requests_agree_with_memory_in_a_tiny_cache() {
    let builder = Mount::builder("random-tiny").option("cache=256K").option("bypass=16K");
    let Some(mount) = builder.start() else { return };
    compare_with_memory(&mount, 2, 1000);
}

#[test]
fn random_requests_agree_with_memory_without_o_direct_below() {
    let Some(mount) = Mount::builder("random-never").option("direct-io=never").start() else {
        return;
    };
    compare_with_memory(&mount, 3, 1000);
}

#[test]
fn random_requests_agree_with_memory_without_a_cache() {
    let Some(mount) = Mount::builder("random-none").option("cache-mode=none").start() else {
        return;
    };
    compare_with_memory(&mount, 4, 1000);
}

#[test]
fn appends_of_many_writers_lose_nothing() {
    let Some(mount) = Mount::builder("append").start() else { return };
    let path = mount.at("log");
    let writer = |name: char| {
        let mut file = File::options().append(true).create(true).open(&path).unwrap();
        for number in 0..200 {
            let line = format!("{name}{number:03}{}\n", "-".repeat(90));
            file.write_all(line.as_bytes()).unwrap();
        }
    };
    thread::scope(|scope| {
        for name in ['a', 'b', 'c', 'd'] {
            scope.spawn(move || writer(name));
        }
    });
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    assert!(lines.iter().all(|line| line.len() == 94));
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), 800);
    assert_eq!(fs::read_to_string(mount.source_at("log")).unwrap(), text);
}

#[test]
fn opening_truncates_and_appends() {
    let Some(mount) = Mount::builder("truncate").start() else { return };
    let path = mount.at("f");
    fs::write(&path, pattern(1, 100_000)).unwrap();
    assert_eq!(fs::read(&path).unwrap().len(), 100_000);
    fs::write(&path, "short").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"short");
    assert_eq!(fs::read(mount.source_at("f")).unwrap(), b"short");
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(10).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"short\0\0\0\0\0");
    let mut both = File::options().read(true).append(true).open(&path).unwrap();
    both.seek(SeekFrom::Start(0)).unwrap();
    both.write_all(b"end").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"short\0\0\0\0\0end");
    let sync = File::options().write(true).custom_flags(libc::O_SYNC).open(&path).unwrap();
    sync.write_all_at(b"S", 0).unwrap();
    assert_eq!(fs::read(mount.source_at("f")).unwrap(), b"Short\0\0\0\0\0end");
}

#[test]
fn the_tail_behind_a_shrunk_end_is_zero() {
    let Some(mount) = Mount::builder("tail").start() else { return };
    let file = direct(&mount.at("f"));
    file.write_all_at(&[7u8; 8192], 0).unwrap();
    let mut bytes = vec![1u8; 8192];
    for cut in [4097, 4096, 1000, 1] {
        file.set_len(cut).unwrap();
        file.set_len(8192).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[..cut as usize].iter().all(|byte| *byte == 7), "front, cut at {cut}");
        assert!(bytes[cut as usize..].iter().all(|byte| *byte == 0), "tail, cut at {cut}");
    }
}

#[test]
fn allocation_holes_and_zeroes() {
    let Some(mount) = Mount::builder("fallocate").start() else { return };
    let file = direct(&mount.at("f"));
    file.write_all_at(&[5u8; 1 << 20], 0).unwrap();
    let size = || file.metadata().unwrap().len();
    let zeroes = |from: u64, len: usize| {
        let mut bytes = vec![1u8; len];
        file.read_exact_at(&mut bytes, from).unwrap();
        bytes.iter().all(|byte| *byte == 0)
    };
    let mut bytes = vec![0u8; 1 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, 2 << 20).unwrap();
    assert_eq!(size(), 2 << 20);
    assert!(zeroes(1 << 20, 1 << 20));
    fallocate(&file, FallocateFlags::KEEP_SIZE, 2 << 20, 1 << 20).unwrap();
    assert_eq!(size(), 2 << 20);
    assert!(file.metadata().unwrap().blocks() * 512 >= 3 << 20);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 4096, 65536).unwrap();
    assert!(zeroes(4096, 65536) && !zeroes(0, 4096) && !zeroes(69632, 4096));
    // Not on block borders.
    fallocate(&file, punch, 200_001, 999).unwrap();
    assert!(zeroes(200_001, 999) && !zeroes(200_000, 1) && !zeroes(201_000, 1));
    fallocate(&file, FallocateFlags::ZERO_RANGE, 300_000, 10_000).unwrap();
    assert!(zeroes(300_000, 10_000) && !zeroes(299_999, 1) && !zeroes(310_000, 1));
    let other = fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(other, Err(Errno::OPNOTSUPP));
    drop_caches();
    let (ours, source) = (mount.at("f"), mount.source_at("f"));
    assert!(fs::read(&ours).unwrap() == fs::read(source).unwrap());
}

/// Data and hole borders as lseek tells them.
fn borders(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        at = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data)).unwrap();
        found.push((data, at));
    }
    found
}

#[test]
fn holes_are_where_the_source_has_them() {
    let Some(mount) = Mount::builder("holes").start() else { return };
    let file = File::create(mount.at("f")).unwrap();
    for at in [1u64 << 20, 3 << 20, 10 << 20] {
        file.write_all_at(&pattern(at, 8192), at).unwrap();
    }
    file.set_len(12 << 20).unwrap();
    file.sync_all().unwrap();
    let expected = borders(&mount.source_at("f"));
    assert_eq!(expected.len(), 3);
    assert_eq!(borders(&mount.at("f")), expected);
    let file = File::open(mount.at("f")).unwrap();
    let behind = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(12 << 20));
    assert_eq!(behind, Err(Errno::NXIO));
}

#[test]
fn ranges_are_copied() {
    let Some(mount) = Mount::builder("copy-range").start() else { return };
    let bytes = pattern(9, 1 << 20);
    fs::write(mount.at("a"), &bytes).unwrap();
    fs::write(mount.at("b"), vec![1u8; 1 << 20]).unwrap();
    assert_eq!(fs::read(mount.at("b")).unwrap(), vec![1u8; 1 << 20]);
    let a = File::open(mount.at("a")).unwrap();
    let b = direct(&mount.at("b"));
    let mut whole = vec![0u8; 1 << 20];
    b.read_exact_at(&mut whole, 0).unwrap();
    let (mut from, mut to) = (1000u64, 5000u64);
    let mut left = 300_000;
    while left > 0 {
        let count = rustix::fs::copy_file_range(&a, Some(&mut from), &b, Some(&mut to), left);
        left -= count.unwrap();
    }
    assert_eq!((from, to), (301_000, 305_000));
    b.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole[5000..305_000] == bytes[1000..301_000]);
    assert!(whole[..5000].iter().chain(&whole[305_000..]).all(|byte| *byte == 1));
    assert!(fs::read(mount.source_at("b")).unwrap() == whole);
    assert!(fs::read(mount.at("b")).unwrap() == whole);
}

#[test]
fn locks_hold_between_processes() {
    let Some(mount) = Mount::builder("locks").start() else { return };
    let path = mount.at("f");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    assert_eq!(second("flock", &path), "locked");
    flock(&file, FlockOperation::LockExclusive).unwrap();
    assert_eq!(second("flock", &path), "busy");
    flock(&file, FlockOperation::Unlock).unwrap();
    assert_eq!(second("flock", &path), "locked");
    rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
    assert_eq!(second("posix", &path), "busy");
    // Closing any descriptor of the file gives a process's POSIX locks up.
    drop(File::open(&path).unwrap());
    assert_eq!(second("posix", &path), "locked");
}

#[test]
fn times_are_kept_to_the_nanosecond_also_before_1970() {
    let Some(mount) = Mount::builder("times").start() else { return };
    let (ours, straight) = (mount.at("ours"), mount.source_at("straight"));
    File::create(&ours).unwrap();
    File::create(&straight).unwrap();
    let set = |path: &Path, sec: i64, nsec: i64| {
        let time = Timespec { tv_sec: sec, tv_nsec: nsec };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::empty())
    };
    let cases = [
        (0, 0),
        (-1, 500_000_000),
        (-5, 0),
        (-2, 1),
        (-1, 999_999_999),
        (-2_147_483_648, 0),
        (2_147_483_648, 999_999_999),
        ((1 << 32) + 5, 7),
    ];
    for (sec, nsec) in cases {
        assert_eq!(set(&ours, sec, nsec), Ok(()));
        set(&straight, sec, nsec).unwrap();
        let expected = fs::metadata(&straight).unwrap();
        let expected = (expected.mtime(), expected.mtime_nsec(), expected.atime());
        for path in [&mount.source_at("ours"), &ours] {
            let meta = fs::metadata(path).unwrap();
            let seen = (meta.mtime(), meta.mtime_nsec(), meta.atime());
            assert_eq!(seen, expected, "{sec}.{nsec:09} on {}", path.display());
        }
        drop_caches();
        let meta = fs::metadata(&ours).unwrap();
        assert_eq!((meta.mtime(), meta.mtime_nsec(), meta.atime()), expected);
    }
    // Whatever is answered to these, the mount lives on.
    for sec in [i64::MIN, i64::MIN + 1, i64::MAX] {
        let _ = set(&ours, sec, 0);
        drop_caches();
        fs::read(&ours).unwrap();
    }
}

#[test]
fn writes_move_times_and_reads_do_not() {
    let Some(mount) = Mount::builder("mtime").start() else { return };
    let path = mount.at("f");
    write_synced(&path, &pattern(1, 10_000));
    let before = fs::metadata(&path).unwrap();
    thread::sleep(std::time::Duration::from_millis(20));
    fs::read(&path).unwrap();
    let stamp = |meta: &fs::Metadata| (meta.mtime(), meta.mtime_nsec());
    assert_eq!(stamp(&fs::metadata(&path).unwrap()), stamp(&before));
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert!(stamp(&after) > stamp(&before));
    assert_eq!(stamp(&after), stamp(&fs::metadata(mount.source_at("f")).unwrap()));
}

#[test]
fn a_full_source_says_so() {
    let Some(mount) = Mount::builder("full").backing(Backing::Tmpfs(4)).start() else { return };
    let mut file = File::create(mount.at("big")).unwrap();
    let error = file.write_all(&vec![1u8; 8 << 20]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    let size = file.metadata().unwrap().len();
    assert_eq!(size, mount.source_at("big").metadata().unwrap().len());
    let bytes = fs::read(mount.at("big")).unwrap();
    assert!(bytes.len() as u64 == size && bytes.iter().all(|byte| *byte == 1));
    fs::remove_file(mount.at("big")).unwrap();
    drop(file);
    // The kernel tells the daemon of the last close when it gets round to it; space follows.
    let fits = wait_for(Duration::from_secs(10), || fs::write(mount.at("small"), "fits").ok());
    assert!(fits.is_some(), "the space of an unlinked, closed file comes back");
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let prepare = |source: &Path| {
        fs::write(source.join("f"), "text").unwrap();
        fs::create_dir(source.join("d")).unwrap();
    };
    let builder = Mount::builder("ro").option("ro").prepare(prepare);
    let Some(mount) = builder.start() else { return };
    let rofs = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EROFS));
    };
    let mut text = String::new();
    File::open(mount.at("f")).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
    rofs(fs::write(mount.at("new"), "x"));
    rofs(fs::write(mount.at("f"), "x"));
    rofs(fs::create_dir(mount.at("dir")));
    rofs(fs::remove_file(mount.at("f")));
    rofs(fs::remove_dir(mount.at("d")));
    rofs(fs::rename(mount.at("f"), mount.at("g")));
    rofs(fs::hard_link(mount.at("f"), mount.at("g")));
    rofs(std::os::unix::fs::symlink("x", mount.at("s")));
    use std::os::unix::fs::PermissionsExt;
    rofs(fs::set_permissions(mount.at("f"), fs::Permissions::from_mode(0o600)));
    let names: Vec<_> = fs::read_dir(mount.source()).unwrap().collect();
    assert_eq!(names.len(), 2);
}
