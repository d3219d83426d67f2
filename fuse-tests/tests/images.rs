//! Disk images on the mount, used by the programs that use disk images; sources of every kind.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fuse_tests::tools::{pattern, sh, write_synced};
use fuse_tests::{Backing, Mount, drop_caches, report, run, try_run};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn qemu_img_makes_converts_and_compares() {
    let Some(mount) = Mount::builder("qemu-img").start() else { return };
    let raw = mount.at("a.img");
    fs::write(&raw, pattern(1, 3 << 20)).unwrap();
    sh(mount.path(), "qemu-img convert -f raw -O qcow2 a.img b.qcow2 && qemu-img check b.qcow2");
    sh(mount.path(), "qemu-img convert -T none -t none -f qcow2 -O raw b.qcow2 c.img");
    sh(mount.path(), "qemu-img compare -f raw -F qcow2 c.img b.qcow2");
    assert!(fs::read(mount.source_at("c.img")).unwrap() == fs::read(&raw).unwrap());
    sh(mount.path(), "qemu-img resize -q -f raw c.img +1M && qemu-img snapshot -c one b.qcow2");
    assert_eq!(fs::metadata(mount.source_at("c.img")).unwrap().len(), 4 << 20);
}

#[test]
fn qemu_io_reads_what_it_wrote_with_and_without_the_page_cache() {
    let Some(mount) = Mount::builder("qemu-io").start() else { return };
    for (name, mode) in [("none.img", "none"), ("writeback.img", "writeback")] {
        let image = mount.at(name);
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let commands = ["write -P 0xab 0 64k", "write -P 0xcd 1M 4k", "flush"];
        let checks = ["read -P 0xab 0 64k", "read -P 0 64k 64k", "read -P 0xcd 1M 4k"];
        let discard = ["discard 0 64k", "read -P 0 0 64k", "write -z 1M 4k", "read -P 0 1M 4k"];
        let mut args = vec!["-f", "raw", "-t", mode, "-d", "unmap"];
        for command in commands.iter().chain(&checks).chain(&discard) {
            args.extend(["-c", command]);
        }
        args.push(text(&image));
        let said = run("qemu-io", &args);
        assert!(!said.contains("Pattern verification failed"), "{mode}: {said}");
    }
}

/// A loop device; detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn attach(image: &Path) -> Loop {
        let said = run("losetup", &["--direct-io=on", "--find", "--show", text(image)]);
        Loop(said.trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["-d", text(&self.0)]);
    }
}

#[test]
fn a_loop_device_with_direct_io_carries_a_filesystem() {
    if !report::have_root("losetup") {
        return;
    }
    let Some(mount) = Mount::builder("loop").start() else { return };
    let image = mount.at("disk.img");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let inside = mount.scratch().join("inside");
    fs::create_dir(&inside).unwrap();
    let bytes = pattern(5, 5 << 20);
    {
        let device = Loop::attach(&image);
        let direct = run("losetup", &["-n", "-O", "DIO", text(&device.0)]);
        assert_eq!(direct.trim(), "1");
        run("mkfs.ext4", &["-q", text(&device.0)]);
        run("mount", &[text(&device.0), text(&inside)]);
        write_synced(&inside.join("file"), &bytes);
        run("umount", &[text(&inside)]);
    }
    drop_caches();
    for image in [&image, &mount.source_at("disk.img")] {
        run("e2fsck", &["-fn", text(image)]);
    }
    run("mount", &["-o", "loop,ro", text(&image), text(&inside)]);
    assert!(fs::read(inside.join("file")).unwrap() == bytes);
    run("umount", &[text(&inside)]);
}

#[test]
fn two_reads_of_48_mib_hit_at_the_defaults() {
    let Some(mount) = Mount::builder("twice").start() else { return };
    let len = 48usize << 20;
    write_synced(&mount.source_at("disk.img"), &pattern(8, len));
    drop_caches();
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(mount.at("disk.img")).unwrap();
    const STEP: usize = 128 << 10;
    let mut space = vec![0u8; STEP + 4096];
    let start = space.as_ptr().align_offset(4096);
    let counters = || {
        let total = mount.stat_json("")["snapshot"]["total"].clone();
        [&total["hits"], &total["misses"]].map(|value| value.as_u64().unwrap())
    };
    let mut pass = || {
        let before = counters();
        for at in (0..len).step_by(STEP) {
            file.read_exact_at(&mut space[start..start + STEP], at as u64).unwrap();
        }
        let after = counters();
        [after[0] - before[0], after[1] - before[1]]
    };
    pass();
    let [hits, misses] = pass();
    assert_eq!(hits + misses, (len / 4096) as u64);
    assert!(hits * 100 >= 95 * (hits + misses), "{hits} hits, {misses} misses");
}

/// What every writable source must be able to do.
fn exercise(mount: &Mount) {
    let bytes = pattern(3, 200_000);
    fs::create_dir(mount.at("dir")).unwrap();
    write_synced(&mount.at("dir/file"), &bytes);
    let file = File::options().read(true).write(true).open(mount.at("dir/file")).unwrap();
    file.write_all_at(b"changed", 100_001).unwrap();
    fs::rename(mount.at("dir/file"), mount.at("moved")).unwrap();
    fs::hard_link(mount.at("moved"), mount.at("dir/link")).unwrap();
    drop(file);
    drop_caches();
    let mut expected = bytes;
    expected[100_001..100_008].copy_from_slice(b"changed");
    for path in [mount.at("moved"), mount.at("dir/link"), mount.source_at("moved")] {
        assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
    }
    fs::remove_file(mount.at("moved")).unwrap();
    fs::remove_dir_all(mount.at("dir")).unwrap();
    assert_eq!(fs::metadata(mount.path()).unwrap().nlink(), 2 + directories(mount.path()));
}

fn directories(dir: &Path) -> u64 {
    fs::read_dir(dir).unwrap().filter(|e| e.as_ref().unwrap().file_type().unwrap().is_dir()).count()
        as u64
}

#[test]
fn the_source_is_a_tmpfs() {
    if let Some(mount) = Mount::builder("tmpfs").backing(Backing::Tmpfs(32)).start() {
        exercise(&mount);
    }
}

#[test]
fn the_source_is_xfs() {
    if let Some(mount) = Mount::builder("xfs").backing(Backing::Xfs(300)).start() {
        exercise(&mount);
    }
}

#[test]
fn the_source_is_btrfs_with_a_subvolume() {
    let prepare = |source: &Path| {
        sh(source, "btrfs -q subvolume create sub && mkdir plain && echo s > sub/f");
        sh(source, "echo p > plain/f && btrfs -q subvolume snapshot sub snap");
    };
    let builder = Mount::builder("btrfs").backing(Backing::Btrfs(256)).prepare(prepare);
    let Some(mount) = builder.start() else { return };
    exercise(&mount);
    assert_eq!(fs::read(mount.at("snap/f")).unwrap(), b"s\n");
    // One inode number in two subvolumes: two files.
    let ino = |name: &str| fs::metadata(mount.at(name)).unwrap().ino();
    assert_eq!(
        fs::metadata(mount.source_at("sub/f")).unwrap().ino(),
        fs::metadata(mount.source_at("snap/f")).unwrap().ino()
    );
    assert_ne!(ino("sub/f"), ino("snap/f"));
    fs::write(mount.at("sub/f"), "changed").unwrap();
    assert_eq!(fs::read(mount.at("snap/f")).unwrap(), b"s\n");
    let error = fs::hard_link(mount.at("plain/f"), mount.at("sub/g")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EXDEV));
}

#[test]
fn the_source_is_a_squashfs() {
    if !report::have_root("mounting a squashfs") || !report::have_fuse() {
        return;
    }
    let scratch = fuse_tests::paths::Scratch::new("squashfs");
    let dir = scratch.path();
    fs::create_dir_all(dir.join("tree/d")).unwrap();
    let bytes = pattern(6, 300_000);
    fs::write(dir.join("tree/d/file"), &bytes).unwrap();
    sh(dir, "mksquashfs tree image -quiet -no-progress && mkdir source");
    sh(dir, "mount -o loop,ro image source");
    let mount = Mount::builder("squashfs-mnt").source(&dir.join("source")).start().unwrap();
    assert!(fs::read(mount.at("d/file")).unwrap() == bytes);
    let error = fs::write(mount.at("new"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    drop(mount);
    sh(dir, "umount source");
}

#[test]
fn the_source_is_another_fuse_mount() {
    if !report::have_fuse() {
        return;
    }
    let scratch = fuse_tests::paths::Scratch::new("bindfs");
    let dir = scratch.path();
    sh(dir, "mkdir straight source && bindfs --no-allow-other straight source");
    let mount = Mount::builder("bindfs-mnt").source(&dir.join("source")).start().unwrap();
    exercise(&mount);
    drop(mount);
    let unmounted = try_run("fusermount3", &["-u", text(&dir.join("source"))]);
    assert!(unmounted.status.success());
}
