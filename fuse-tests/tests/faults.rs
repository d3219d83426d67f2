//! Errors and limits: EIO of the source, a panicking handler, memory, inodes, descriptors.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fuse_tests::paths::Scratch;
use fuse_tests::slow::SlowSource;
use fuse_tests::tools::{open_descriptors, pattern, rss_bytes, wait_for, write_synced};
use fuse_tests::{Mount, drop_caches, report};

fn direct(path: &Path) -> File {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn eio(result: std::io::Result<()>) {
    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
}

#[test]
fn an_error_of_the_source_reaches_the_reader_for_just_those_blocks() {
    if !report::have_fuse() {
        return;
    }
    let scratch = Scratch::new("eio");
    let (plain, slow) = (scratch.path().join("plain"), scratch.path().join("slow"));
    fs::create_dir(&plain).unwrap();
    fs::create_dir(&slow).unwrap();
    let bytes = pattern(1, 1 << 20);
    write_synced(&plain.join("disk.img"), &bytes);
    let source = SlowSource::mount(&plain, &slow, Duration::ZERO).unwrap();
    {
        let builder = Mount::builder("eio-mnt").source(&slow).option("readahead=0");
        let mount = builder.start().unwrap();
        source.fail_reads("disk.img", 40_960..45_056);
        let file = direct(&mount.at("disk.img"));
        let mut block = [0u8; 4096];
        let mut read = |at: u64| file.read_exact_at(&mut block, at).map(|()| block);
        eio(read(40_960).map(drop));
        // Its neighbours are read, and the error is told again.
        for at in [36_864u64, 45_056] {
            assert!(read(at).unwrap()[..] == bytes[at as usize..at as usize + 4096]);
        }
        eio(read(40_960).map(drop));
        let mut wide = vec![0u8; 16_384];
        eio(file.read_exact_at(&mut wide, 32_768));
        // The error was not cached.
        source.heal();
        assert!(read(40_960).unwrap()[..] == bytes[40_960..45_056]);
        let reads = source.reads();
        assert!(read(40_960).unwrap()[..] == bytes[40_960..45_056]);
        assert_eq!(source.reads(), reads, "and what was read at last is cached");
        file.read_exact_at(&mut wide, 32_768).unwrap();
        assert!(wide == bytes[32_768..49_152]);
    }
}

#[test]
fn a_handler_that_panics_answers_eio_and_the_mount_lives_on() {
    let builder = Mount::builder("panic").option("test_panic=panic-here");
    let Some(mount) = builder.expect_panics().start() else { return };
    fs::write(mount.at("f"), "alive").unwrap();
    // More often than there are threads.
    for _ in 0..40 {
        eio(fs::metadata(mount.at("panic-here")).map(drop));
    }
    drop_caches();
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"alive");
    fs::write(mount.at("g"), "still").unwrap();
    assert!(mount.log().contains("panic"), "{}", mount.log());
}

#[test]
fn a_full_cache_stays_inside_its_memory() {
    let limit = Duration::from_secs(300);
    let builder = Mount::builder("rss").option("cache=256M").option("sequential-cutoff=1G");
    let Some(mount) = builder.limit(limit).start() else { return };
    let len: u64 = 300 << 20;
    File::create(mount.source_at("disk.img")).unwrap().set_len(len).unwrap();
    let file = direct(&mount.at("disk.img"));
    let mut buffer = vec![0u8; (128 << 10) + 4096];
    let at = buffer.as_ptr().align_offset(4096);
    for offset in (0..len).step_by(128 << 10) {
        file.read_exact_at(&mut buffer[at..at + (128 << 10)], offset).unwrap();
    }
    let snapshot = mount.stat_json("")["snapshot"].clone();
    let blocks = |name: &str| snapshot[name].as_u64().unwrap();
    assert!(blocks("resident_blocks") * 100 >= blocks("capacity_blocks") * 95, "{snapshot}");
    let most = (256u64 << 20) * 103 / 100 + (64 << 20);
    let rss = rss_bytes(mount.pid());
    assert!(rss <= most, "{} MiB resident, at most {} MiB", rss >> 20, most >> 20);
}

fn make_files(root: &Path, directories: u32, each: u32) {
    for directory in 0..directories {
        let dir = root.join(format!("d{directory:05}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..each {
            File::create(dir.join(format!("f{file:04}"))).unwrap();
        }
    }
}

fn look_up_all(root: &Path) -> usize {
    let find = Command::new("find").arg(root).args(["-printf", "%s\n"]).output().unwrap();
    let error = String::from_utf8_lossy(&find.stderr);
    assert!(
        find.status.success(),
        "{} errors, {:?} ..",
        error.lines().count(),
        error.lines().next()
    );
    find.stdout.iter().filter(|byte| **byte == b'\n').count()
}

#[test]
fn forgotten_files_give_their_descriptors_back() {
    if !report::have_root("dropping the kernel's caches") {
        return;
    }
    let limit = Duration::from_secs(900);
    let Some(mount) = Mount::builder("forget").limit(limit).start() else { return };
    let (directories, each) = if report::full() { (200, 1000) } else { (20, 500) };
    make_files(mount.source(), directories, each);
    let before = open_descriptors(mount.pid());
    assert_eq!(look_up_all(mount.path()) as u32, directories * (each + 1) + 1);
    let during = open_descriptors(mount.pid());
    let gone = wait_for(Duration::from_secs(60), || {
        drop_caches();
        (open_descriptors(mount.pid()) <= before + 8).then_some(())
    });
    let after = open_descriptors(mount.pid());
    assert!(gone.is_some(), "descriptors: {before}, {during} with all files, {after} after");
    assert!(during > before, "descriptors: {before}, {during}: the test sees nothing");
}

#[test]
fn a_tree_larger_than_the_descriptor_limit_works() {
    let limit = Duration::from_secs(900);
    let builder = Mount::builder("nofile").descriptors(1024).limit(limit);
    let Some(mount) = builder.start() else { return };
    let directories = if report::full() { 100_000 } else { 4_000 };
    make_files(mount.source(), directories, 1);
    // Held open, so that the kernel cannot forget what is on the way to it.
    let held: Vec<File> =
        (0..300).map(|n| File::open(mount.at(format!("d{n:05}"))).unwrap()).collect();
    assert_eq!(look_up_all(mount.path()) as u32, directories * 2 + 1);
    assert!(open_descriptors(mount.pid()) < 1024);
    for n in (0..directories).step_by(97) {
        let path = mount.at(format!("d{n:05}/f0000"));
        fs::write(&path, n.to_string()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), n.to_string());
        fs::rename(&path, mount.at(format!("d{n:05}/renamed"))).unwrap();
    }
    // A directory that was moved is found at its new place.
    fs::rename(mount.at("d00001"), mount.at("d00000/moved")).unwrap();
    assert_eq!(look_up_all(mount.path()) as u32, directories * 2 + 1);
    fs::write(mount.at("d00000/moved/f0000"), "moved").unwrap();
    assert_eq!(fs::read(mount.source_at("d00000/moved/f0000")).unwrap(), b"moved");
    drop(held);
}
