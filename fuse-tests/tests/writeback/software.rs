//! Programs that people keep images and databases with, over a dirty journal and under kill -9.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fuse_tests::tools::{pattern, sh, wait_for};
use fuse_tests::writeback::{builder, crash, flush, hold, is_dirty, journaled, number, release};
use fuse_tests::{Mount, report, run, try_run};

use super::common::*;

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
        try_run("losetup", &["-d", text(&self.0)]);
    }
}

/// Something to unpack: files of many sizes in some directories.
fn tarball(directory: &Path) -> PathBuf {
    let tree = directory.join("tree");
    for n in 0..300u64 {
        let sub = tree.join(format!("d{}", n % 7)).join(format!("e{}", n % 3));
        fs::create_dir_all(&sub).unwrap();
        fs::write(sub.join(format!("f{n}")), pattern(n, (n * n * 7 % 60_000) as usize)).unwrap();
    }
    let tar = directory.join("tree.tar");
    sh(directory, "tar -cf tree.tar -C tree .");
    tar
}

#[test]
fn a_filesystem_in_an_image_survives_kill_9_after_sync() {
    if !report::have_root("losetup") {
        return;
    }
    let Some(mut mount) = builder("soft-ext4").and_then(|b| b.start()) else { return };
    let scratch = mount.scratch().to_owned();
    let (tar, inside) = (tarball(&scratch), scratch.join("inside"));
    fs::create_dir(&inside).unwrap();
    let image = mount.at("disk.img");
    open(&image).set_len(128 << 20).unwrap();
    hold(&mount);
    run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0", text(&image)]);
    {
        let device = Loop::attach(&image);
        run("mount", &[text(&device.0), text(&inside)]);
        run("tar", &["-xf", text(&tar), "-C", text(&inside)]);
        run("sync", &["-f", text(&inside)]);
        // Frozen, it is consistent without its own journal: fsck -n may not replay that.
        run("fsfreeze", &["-f", text(&inside)]);
        is_dirty(&mount);
        mount.kill();
        run("fsfreeze", &["-u", text(&inside)]);
        run("umount", &[text(&inside)]);
    }
    mount.start_again();
    run("e2fsck", &["-fn", text(&image)]);
    flush(&mount);
    run("e2fsck", &["-fn", text(&mount.source_at("disk.img"))]);
    run("mount", &["-o", "loop,ro", text(&image), text(&inside)]);
    let same =
        try_run("diff", &["-r", "-x", "lost+found", text(&scratch.join("tree")), text(&inside)]);
    run("umount", &[text(&inside)]);
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
}

/// sqlite3 that inserts 1, 2, 3, ... and says each number after its commit.
fn inserter(database: &Path, log: &Path, from: u64) -> Child {
    let mut command = Command::new("stdbuf");
    command.args(["-oL", "sqlite3", "-batch", "-bail", text(database)]);
    command
        .stdin(Stdio::piped())
        .stdout(File::options().append(true).create(true).open(log).unwrap());
    let mut child = command.stderr(Stdio::null()).spawn().expect("sqlite3 and stdbuf");
    let mut input = child.stdin.take().unwrap();
    std::thread::spawn(move || {
        let _ = input.write_all(b"PRAGMA synchronous=FULL;\n");
        for row in from..from + 1_000_000 {
            let padding = (row * 37 % 3000) as usize;
            let insert = format!("INSERT INTO t VALUES({row}, randomblob({padding}));\n");
            if input.write_all((insert + &format!("SELECT 'row', {row};\n")).as_bytes()).is_err() {
                return;
            }
        }
    });
    child
}

/// The last number that was said.
fn committed(log: &Path) -> u64 {
    let text = fs::read_to_string(log).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(|line| line.strip_prefix("row|")?.parse().ok()).max().unwrap_or(0)
}

fn sqlite(mode: &str) {
    let Some(builder) = builder(&format!("soft-sqlite-{mode}")) else { return };
    let Some(mut mount) = builder.journal_option("journal_size=8M").start() else { return };
    let (database, log) = (mount.at("db"), mount.scratch().join("rows"));
    let create = format!("PRAGMA journal_mode={mode}; CREATE TABLE t(n INTEGER, b BLOB);");
    run("sqlite3", &[text(&database), &create]);
    let mut last = 0;
    for round in 0..3 {
        let mut child = inserter(&database, &log, last + 1);
        let some = || (committed(&log) >= last + 20).then_some(());
        let enough = wait_for(Duration::from_secs(30), some);
        std::thread::sleep(Duration::from_millis(37 * round));
        mount.kill();
        let _ = child.kill();
        let _ = child.wait();
        assert!(enough.is_some(), "only {} rows", committed(&log));
        mount.start_again();
        last = committed(&log);
        let question = "PRAGMA integrity_check; SELECT count(*) FROM t WHERE n <= ";
        let said = run("sqlite3", &[text(&database), &format!("{question}{last};")]);
        assert_eq!(said.trim(), format!("ok\n{last}"), "{mode}, round {round}");
        let most = run("sqlite3", &[text(&database), "SELECT max(n) FROM t;"]);
        last = most.trim().parse().unwrap();
    }
    flush(&mount);
    let copy = mount.scratch().join("copy");
    for suffix in ["", "-journal", "-wal"] {
        let from = mount.source_at(format!("db{suffix}"));
        let _ = fs::copy(from, format!("{}{suffix}", text(&copy)));
    }
    let said = run("sqlite3", &[text(&copy), "PRAGMA integrity_check; SELECT count(*) FROM t;"]);
    assert_eq!(said.trim(), format!("ok\n{last}"), "{mode}: the source alone");
}

#[test]
fn sqlite_keeps_every_committed_row_with_a_rollback_journal() {
    sqlite("DELETE");
}

#[test]
fn sqlite_keeps_every_committed_row_with_a_write_ahead_log() {
    sqlite("WAL");
}

#[test]
fn archives_and_sparse_copies_of_a_dirty_image() {
    let Some(mount) = builder("soft-tar").and_then(|b| b.start()) else { return };
    hold(&mount);
    let mut bytes = vec![0; 40 << 20];
    let file = open(&mount.at("disk.img"));
    file.set_len(bytes.len() as u64).unwrap();
    scatter(&file, &mut bytes, 17, 150);
    drop(file);
    is_dirty(&mount);
    let scratch = mount.scratch().to_owned();
    let archive = |from: &Path, name: &str| {
        let out = scratch.join(format!("{name}.tar"));
        run("tar", &["-cSf", text(&out), "-C", text(from), "disk.img"]);
        let into = scratch.join(name);
        fs::create_dir(&into).unwrap();
        run("tar", &["-xf", text(&out), "-C", text(&into)]);
        holds(&into.join("disk.img"), &bytes);
        let listed = run("tar", &["--full-time", "-tvf", text(&out)]);
        (fs::metadata(&out).unwrap().len(), listed)
    };
    let copy = |from: &Path, name: &str| {
        let to = scratch.join(name);
        run("cp", &["--sparse=always", text(&from.join("disk.img")), text(&to)]);
        holds(&to, &bytes);
        fs::metadata(&to).unwrap().len()
    };
    let (size, listed) = archive(mount.path(), "dirty");
    copy(mount.path(), "dirty.img");
    flush(&mount);
    let (clean_size, clean_listed) = archive(mount.source(), "clean");
    copy(mount.source(), "clean.img");
    assert_eq!(listed, clean_listed);
    // Holes are left out, dirty or not.
    assert!(size < 30 << 20 && clean_size < 30 << 20, "{size} {clean_size}");
}

#[test]
fn qemu_io_without_the_page_cache_under_kill_9() {
    let Some(mut mount) = builder("soft-qemu-io").and_then(|b| b.start()) else { return };
    let image = mount.at("disk.img");
    open(&image).set_len(64 << 20).unwrap();
    hold(&mount);
    let qemu = |commands: &[&str]| {
        let mut args = vec!["-f", "raw", "-t", "none", "-d", "unmap"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(text(&image));
        let said = run("qemu-io", &args);
        assert!(!said.contains("verification failed"), "{said}");
    };
    qemu(&["write -P 0xab 0 64k", "write -P 0xcd 1M 4k", "write -P 0xef 2M 512k", "flush"]);
    qemu(&["discard 16k 16k", "write -z 2M 64k", "flush"]);
    let checks = [
        "read -P 0xab 0 16k",
        "read -P 0xab 32k 32k",
        "read -P 0xcd 1M 4k",
        "read -P 0 2M 64k",
        "read -P 0xef 2112k 448k",
    ];
    qemu(&checks);
    crash(&mut mount);
    qemu(&checks);
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", text(&image), text(&mount.at("b.qcow2"))],
    );
    run("qemu-img", &["check", text(&mount.at("b.qcow2"))]);
    flush(&mount);
    let (image, copy) = (mount.source_at("disk.img"), mount.source_at("b.qcow2"));
    run("qemu-img", &["compare", "-U", "-f", "raw", "-F", "qcow2", text(&image), text(&copy)]);
}

/// Whether qemu-img takes a raw image for itself, and why not. (To `info` it is any file.)
fn convert(mount: &Mount, image: &Path) -> Result<(), String> {
    let copy = mount.scratch().join("converted");
    let args = ["convert", "-f", "raw", "-O", "raw", text(image), text(&copy)];
    let output = try_run("qemu-img", &args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[test]
fn qemu_refuses_the_source_file_while_it_is_dirty() {
    let Some(mut mount) = builder("soft-qemu-lock").and_then(|b| b.start()) else { return };
    if !journaled() {
        return;
    }
    hold(&mount);
    scattered(&mount, "disk.img", 2 << 20, 5);
    is_dirty(&mount);
    let source = mount.source_at("disk.img");
    let refused = |mount: &Mount| {
        let said = convert(mount, &source).expect_err("qemu-img read a dirty image's file");
        assert!(said.contains("lock"), "{said}");
        let resize = ["resize", "-q", "-f", "raw", text(&source), "3M"];
        assert!(!try_run("qemu-img", &resize).status.success(), "qemu-img resized it");
        convert(mount, &mount.at("disk.img")).unwrap();
    };
    refused(&mount);
    // What recovery found dirty is dirty from the start, opened or not.
    mount.kill();
    mount.start_again();
    hold(&mount);
    if number(&mount, "dirty_bytes") > 0 {
        let said = convert(&mount, &source).expect_err("qemu-img read a resumed image's file");
        assert!(said.contains("lock"), "{said}");
    }
    scatter(&open(&mount.at("disk.img")), &mut vec![0; 2 << 20], 6, 20);
    refused(&mount);
    release(&mount);
    flush(&mount);
    let free = || convert(&mount, &source).ok();
    assert!(wait_for(Duration::from_secs(5), free).is_some(), "{:?}", convert(&mount, &source));
}

#[test]
fn a_tree_is_unpacked_and_compared() {
    let Some(builder) = builder("soft-tree") else { return };
    let Some(mut mount) = builder.journal_option("journal_size=8M").start() else { return };
    let tar = tarball(mount.scratch());
    fs::create_dir(mount.at("tree")).unwrap();
    run("tar", &["-xf", text(&tar), "-C", text(&mount.at("tree"))]);
    let wanted = mount.scratch().join("tree");
    let same = |there: &Path| {
        let output = try_run("diff", &["-r", text(&wanted), text(there)]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    };
    same(&mount.at("tree"));
    crash(&mut mount);
    same(&mount.at("tree"));
    flush(&mount);
    same(&mount.source_at("tree"));
}
