//! Overlay mounts: changes are kept in an upper directory, block by block, and the lower is never
//! touched.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Output;

use fuse_tests::loopfs::LoopFs;
use fuse_tests::paths::Scratch;
use fuse_tests::tools::pattern;
use fuse_tests::writeback::try_product;
use fuse_tests::{Mount, try_run};

const MIB: usize = 1 << 20;

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// What `diff` prints.
fn diff(mount: &Mount) -> Vec<String> {
    let output = try_product(&["diff".as_ref(), mount.path().as_os_str()]);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn revert(mount: &Mount, words: &[&str]) -> Output {
    let mut args = vec!["revert".as_ref(), mount.path().as_os_str()];
    args.extend(words.iter().map(|word| std::ffi::OsStr::new(*word)));
    try_product(&args)
}

/// Bytes allocated below a directory.
fn allocated(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

fn image(lower: &Path) {
    fs::write(lower.join("disk.img"), pattern(1, 8 * MIB)).unwrap();
    fs::create_dir(lower.join("d")).unwrap();
    fs::write(lower.join("d/small"), "small").unwrap();
}

fn mounted(name: &str) -> Option<Mount> {
    Mount::builder(name).upper().prepare(image).start()
}

#[test]
fn a_write_of_one_block_costs_one_block() {
    let Some(mount) = mounted("over-write") else { return };
    let before = fs::metadata(mount.source_at("disk.img")).unwrap();
    let mut bytes = pattern(1, 8 * MIB);
    let file = open(&mount.at("disk.img"));
    for (seed, offset, len) in [(2, 4096, 4096), (3, 100_000, 10), (4, 8191, 2)] {
        let new = pattern(seed, len);
        file.write_all_at(&new, offset as u64).unwrap();
        bytes[offset..offset + len].copy_from_slice(&new);
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(fs::read(mount.at("disk.img")).unwrap() == bytes);
    assert_eq!(diff(&mount), ["M disk.img  12K"]);
    let data = mount.upper().join("data");
    assert!(allocated(&data) <= 64 << 10, "{} bytes in data/", allocated(&data));
    let after = fs::metadata(mount.source_at("disk.img")).unwrap();
    assert_eq!(
        (before.mtime_nsec(), before.ctime_nsec()),
        (after.mtime_nsec(), after.ctime_nsec())
    );
    assert!(fs::read(mount.source_at("disk.img")).unwrap() == pattern(1, 8 * MIB));
}

#[test]
fn changes_are_there_again_after_a_remount_and_after_a_crash() {
    let Some(mut mount) = mounted("over-crash") else { return };
    let mut bytes = pattern(1, 8 * MIB);
    for round in 0..4_usize {
        let file = open(&mount.at("disk.img"));
        for write in 0..50 {
            let offset = (round * 997 + write * 131_071) % (8 * MIB - 9000);
            let new = pattern((round * 100 + write) as u64, 1 + write * 170);
            file.write_all_at(&new, offset as u64).unwrap();
            bytes[offset..offset + new.len()].copy_from_slice(&new);
        }
        let cut = 7 * MIB + round * 1000;
        file.set_len(cut as u64).unwrap();
        file.set_len(8 * MIB as u64).unwrap();
        bytes[cut..].fill(0);
        drop(file);
        fs::write(mount.at(format!("new-{round}")), format!("{round}")).unwrap();
        fs::create_dir(mount.at(format!("dir-{round}"))).unwrap();
        fs::rename(mount.at("d"), mount.at(format!("dir-{round}/d"))).unwrap();
        if round % 2 == 0 {
            mount.kill();
            mount.start_again();
        } else {
            mount.remount();
        }
        assert!(fs::read(mount.at("disk.img")).unwrap() == bytes, "round {round}");
        assert_eq!(
            fs::read(mount.at(format!("new-{round}"))).unwrap(),
            format!("{round}").as_bytes()
        );
        assert_eq!(fs::read(mount.at(format!("dir-{round}/d/small"))).unwrap(), b"small");
        fs::rename(mount.at(format!("dir-{round}/d")), mount.at("d")).unwrap();
    }
    assert!(fs::read(mount.source_at("disk.img")).unwrap() == pattern(1, 8 * MIB));
    assert_eq!(fs::read_dir(mount.source()).unwrap().count(), 2, "names in the lower");
}

#[test]
fn a_revert_shows_the_lower_again() {
    let Some(mount) = mounted("over-revert") else { return };
    open(&mount.at("disk.img")).write_all_at(&pattern(5, 20_000), 5000).unwrap();
    fs::write(mount.at("new"), "new").unwrap();
    fs::remove_file(mount.at("d/small")).unwrap();
    fs::rename(mount.at("d"), mount.at("e")).unwrap();
    let told = diff(&mount);
    assert_eq!(told, ["M disk.img  24K", "R e/ (was d/)", "D e/small", "A new  4K"]);
    let held = open(&mount.at("disk.img"));
    let output = revert(&mount, &["--yes"]);
    assert!(!output.status.success() && said(&output).contains("disk.img is open"));
    drop(held);
    let output = revert(&mount, &[]);
    assert!(!output.status.success() && said(&output).contains("--yes"), "{}", said(&output));
    // The kernel says of the last close a little later.
    let done = fuse_tests::tools::wait_for(std::time::Duration::from_secs(5), || {
        revert(&mount, &["--yes"]).status.success().then_some(())
    });
    assert!(done.is_some(), "{}", said(&revert(&mount, &["--yes"])));
    assert!(diff(&mount).is_empty());
    assert!(fs::read(mount.at("disk.img")).unwrap() == pattern(1, 8 * MIB));
    assert_eq!(fs::read(mount.at("d/small")).unwrap(), b"small");
    let mut names: Vec<_> =
        fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["d", "disk.img"]);
    assert_eq!(allocated(&mount.upper().join("data")), 0);
}

#[test]
fn what_cannot_be_an_upper_is_refused_in_one_line() {
    let Some(mount) = mounted("over-refused") else { return };
    let (lower, point) = (mount.scratch().join("lower2"), mount.scratch().join("point"));
    let foreign = mount.scratch().join("foreign");
    for directory in [&lower, &point, &foreign] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(foreign.join("mine"), "mine").unwrap();
    let refused = |upper: &Path, lower: &Path, wanted: &str| {
        let args = ["mount".as_ref(), "--upper".as_ref(), upper.as_os_str(), lower.as_os_str()];
        let output = try_product(&[&args[..], &[point.as_os_str()]].concat());
        let said = said(&output);
        assert!(!output.status.success() && said.lines().count() == 1, "{said}");
        assert!(said.contains(wanted), "{said}");
    };
    refused(&lower.join("inside"), &lower, "UPPER lies inside SOURCE");
    refused(&lower, &lower, "UPPER is SOURCE");
    refused(&point.join("below"), &lower, "UPPER lies inside MOUNTPOINT");
    refused(&foreign, &lower, "not an upper: mine is in it");
    refused(&mount.upper(), mount.source(), "UPPER is in use");
    assert_eq!(fs::read(foreign.join("mine")).unwrap(), b"mine");
}

#[test]
fn a_filesystem_in_an_image_is_changed_and_taken_back() {
    if !fuse_tests::report::have_root("a loop mount") {
        return;
    }
    let builder = Mount::builder("over-ext4").upper().prepare(|lower| {
        let image = lower.join("ext4.img");
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        fuse_tests::run("mkfs.ext4", &["-q", image.to_str().unwrap()]);
    });
    let Some(mut mount) = builder.start() else { return };
    let (image, point) = (mount.at("ext4.img"), mount.scratch().join("loop"));
    let golden = fs::read(mount.source_at("ext4.img")).unwrap();
    fs::create_dir(&point).unwrap();
    let words = ["-o", "loop", image.to_str().unwrap(), point.to_str().unwrap()];
    fuse_tests::run("mount", &words);
    for n in 0..200 {
        fs::write(point.join(format!("file-{n}")), pattern(n, 3000)).unwrap();
    }
    fuse_tests::run("umount", &[point.to_str().unwrap()]);
    let check = |path: &Path| try_run("e2fsck", &["-fn", path.to_str().unwrap()]);
    assert!(check(&image).status.success());
    mount.kill();
    mount.start_again();
    assert!(check(&image).status.success());
    fuse_tests::run("mount", &words);
    assert_eq!(fs::read(point.join("file-199")).unwrap(), pattern(199, 3000));
    fuse_tests::run("umount", &[point.to_str().unwrap()]);
    let done = fuse_tests::tools::wait_for(std::time::Duration::from_secs(5), || {
        revert(&mount, &["--yes"]).status.success().then_some(())
    });
    assert!(done.is_some());
    assert!(fs::read(&image).unwrap() == golden);
    assert!(fs::read(mount.source_at("ext4.img")).unwrap() == golden);
}

#[test]
fn an_upper_without_a_mount_is_replayed_told_and_reverted() {
    let Some(mut mount) = mounted("over-alone") else { return };
    let mut bytes = pattern(1, 8 * MIB);
    open(&mount.at("disk.img")).write_all_at(&pattern(5, 20_000), 5000).unwrap();
    bytes[5000..25_000].copy_from_slice(&pattern(5, 20_000));
    fs::create_dir(mount.at("new")).unwrap();
    mount.kill();
    let upper = mount.upper();
    let product = |words: &[&str]| {
        let mut args: Vec<&std::ffi::OsStr> = words.iter().map(|word| (*word).as_ref()).collect();
        args.push(upper.as_os_str());
        try_product(&args)
    };
    let output = product(&["diff"]);
    assert!(!output.status.success() && said(&output).contains("journal replay"));
    let output = product(&["journal", "replay"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(said(&product(&["diff"])), "M disk.img  24K\nA new/\n");
    mount.start_again();
    assert!(fs::read(mount.at("disk.img")).unwrap() == bytes);
    assert!(mount.unmount().success());
    let output = product(&["revert", "--yes"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(said(&product(&["diff"])), "");
    let args = ["mount".as_ref(), upper.as_os_str(), mount.path().as_os_str()];
    let output = try_product(&args);
    assert!(!output.status.success() && said(&output).contains("--upper"), "{}", said(&output));
    mount.start_again();
    assert!(fs::read(mount.at("disk.img")).unwrap() == pattern(1, 8 * MIB));
}

#[test]
fn the_first_of_several_lowers_wins() {
    let Some(mount) = mounted("over-lowers") else { return };
    let (one, two, point) = ("one", "two", "point");
    let at = |name: &str| mount.scratch().join(name);
    for (lower, name) in [(one, "both"), (two, "both"), (two, "only")] {
        let _ = fs::create_dir(at(lower));
        fs::write(at(lower).join(name), lower).unwrap();
    }
    fs::create_dir(at(point)).unwrap();
    let lowers = format!("{}:{}", at(one).display(), at(two).display());
    let upper = at("upper2");
    let args = ["mount".as_ref(), "--upper".as_ref(), upper.as_os_str(), lowers.as_ref()];
    let output = try_product(&[&args[..], &[at(point).as_os_str()]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let read = |name: &str| fs::read_to_string(at(point).join(name)).unwrap();
    let seen = (read("both"), read("only"));
    // Nobody may change a lower; other overlays may use it.
    let locks = ["-s", "-x"].map(|how| {
        try_run("flock", &[how, "-n", at(two).to_str().unwrap(), "true"]).status.success()
    });
    let output = try_product(&["umount".as_ref(), at(point).as_os_str()]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(seen, ("one".into(), "two".into()));
    assert_eq!(locks, [true, false], "a shared lock, and an exclusive one");
}

/// An overlay whose upper is on a filesystem of `mib` MiB; in this order each outlives the next.
fn on_small_disk(name: &str, mib: u64) -> Option<(Scratch, LoopFs, Mount)> {
    if !fuse_tests::report::have_fuse() || !fuse_tests::report::have_root("a loop mount") {
        return None;
    }
    let scratch = Scratch::new(name);
    let disk = scratch.path().join("disk");
    File::create(&disk).unwrap().set_len(mib << 20).unwrap();
    let small = LoopFs::make(&disk, &scratch.path().join("small")).unwrap();
    let upper = format!("upper={}", small.path().join("upper").display());
    let builder = Mount::builder(&format!("{name}-mnt")).default_mode().prepare(image);
    let mount = builder.option(&upper).option("journal_size=8M").start()?;
    Some((scratch, small, mount))
}

#[test]
fn a_full_upper_is_told_and_used_again_once_there_is_room() {
    let Some((_scratch, small, mut mount)) = on_small_disk("over-full", 192) else { return };
    let mut made = Vec::new();
    let full = (0..400).find_map(|n| {
        let path = mount.at(format!("file-{n}"));
        let bytes = pattern(n, MIB);
        let written = fs::write(&path, &bytes).and_then(|()| File::open(&path)?.sync_all());
        match written {
            Ok(()) => made.push((path, bytes)),
            Err(error) => return Some(error),
        }
        None
    });
    let full = full.expect("the disk became full");
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC), "{full}");
    assert!(made.len() > 10, "full after {} MiB", made.len());
    let holds = |made: &[(std::path::PathBuf, Vec<u8>)]| {
        made.iter().for_each(|(path, bytes)| {
            assert!(fs::read(path).unwrap() == *bytes, "{}", path.display());
        });
    };
    holds(&made);
    // Room again (64 MiB are kept free for what is dirty): names and data as before.
    for (path, _) in made.drain(..made.len() / 2) {
        fs::remove_file(path).unwrap();
    }
    let wrote = fuse_tests::tools::wait_for(std::time::Duration::from_secs(20), || {
        fs::write(mount.at("again"), pattern(3, MIB)).ok()
    });
    assert!(wrote.is_some(), "there is no room after files were removed");
    made.push((mount.at("again"), pattern(3, MIB)));
    holds(&made);
    mount.kill();
    mount.start_again();
    holds(&made);
    assert!(mount.unmount().success(), "{}", mount.log());
    drop(mount);
    drop(small);
}

#[test]
fn names_that_find_no_room_are_told_and_go_on_once_there_is_some() {
    let Some((_scratch, small, mut mount)) = on_small_disk("over-names", 64) else { return };
    // Everything but some pages.
    let filler = small.path().join("filler");
    let full = pattern(1, MIB).repeat(64);
    assert!(fs::write(&filler, &full).is_err(), "the disk is larger than it was made");
    let name = |n: usize| format!("{n:05}-{}", "x".repeat(200));
    let refused = (0..20_000).find_map(|n| {
        let made = fs::create_dir(mount.at(name(n)));
        made.err().map(|error| (n, error))
    });
    let (count, error) = refused.expect("names need no room");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    assert!(count > 10, "no room after {count} names");
    fs::remove_file(&filler).unwrap();
    fs::create_dir(mount.at("again")).unwrap();
    mount.kill();
    mount.start_again();
    assert!(mount.at("again").is_dir());
    for n in 0..count {
        assert!(mount.at(name(n)).is_dir(), "{n} of {count} is gone");
    }
    drop(mount);
    drop(small);
}
