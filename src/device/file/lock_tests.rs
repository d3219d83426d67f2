//! Who may open a source file at the same time.

use super::*;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::Kind;

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 65536]).unwrap();
    (dir, path)
}

fn device(path: &Path) -> FileDevice {
    let path = path.to_path_buf();
    let opener = move |flags| rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
    FileDevice::new(Box::new(opener), DirectIo::Auto)
}

#[test]
fn two_writers_of_one_file_exclude_each_other_and_readers_do_not() {
    let (_dir, path) = scratch();
    let first = device(&path);
    first.prepare(true).unwrap();
    first.prepare(true).unwrap();
    let second = device(&path);
    second.prepare(false).unwrap();
    let error = second.prepare(true).unwrap_err();
    assert_eq!(error.kind, Kind::Busy);
    assert_eq!(error.at("f").to_string(), "open f: locked by another bcachefs-fuse");
    // Other descriptors of the file come and go without ending it.
    drop(std::fs::File::open(&path).unwrap());
    first.write_home(&[1; 4096], 0).unwrap();
    assert!(second.prepare(true).is_err());
    drop(first);
    second.prepare(true).unwrap();
}

#[test]
fn an_adopted_descriptor_is_locked_too() {
    let (_dir, path) = scratch();
    let first = device(&path);
    let made = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    first.adopt_writable(made.into());
    first.prepare(true).unwrap();
    assert!(device(&path).prepare(true).is_err());
}

#[test]
fn a_successor_waits_for_a_device_that_is_being_closed() {
    let (_dir, path) = scratch();
    let first = device(&path);
    first.prepare(true).unwrap();
    let closing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(first);
    });
    device(&path).prepare(true).unwrap();
    closing.join().unwrap();
}

#[test]
fn a_file_that_can_only_be_written_is_not_for_writeback() {
    let (_dir, path) = scratch();
    let normal = device(&path);
    normal.prepare(true).unwrap();
    assert!(normal.can_write_home());
    drop(normal);
    let opener = move |flags: OFlags| {
        if flags.contains(OFlags::WRONLY) {
            rustix::fs::open(&path, flags, rustix::fs::Mode::empty())
        } else {
            Err(Errno::ACCESS)
        }
    };
    let blind = FileDevice::new(Box::new(opener), DirectIo::Auto);
    blind.prepare(true).unwrap();
    assert!(!blind.can_write_home());
    blind.mark_dirty(true);
}

#[test]
fn a_sync_of_the_filesystem_is_one_of_the_file() {
    let (_dir, path) = scratch();
    let device = device(&path);
    device.prepare(true).unwrap();
    device.write_at(b"x", 0).unwrap();
    assert!(matches!(device.sync_filesystem(), Some(Ok(()))));
    assert_eq!(device.failed_syncs.load(SeqCst), 0);
    device.write_out().unwrap();
    // An error that a sync of somebody else was told is told here, too, and once.
    assert!(device.synced(Err(Error::os("fdatasync", Errno::IO)), 0).is_err());
    assert!(device.write_out().is_err());
    device.write_out().unwrap();
}

/// Whether qemu-img does it, and what it says; None without qemu-img.
fn qemu(path: &Path, words: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("qemu-img").args(words).arg(path).output().ok()?;
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn qemu_refuses_a_dirty_file() {
    let (_dir, path) = scratch();
    let words = ["create", "-q", "-f", "qcow2"];
    let created = Command::new("qemu-img").args(words).arg(&path).arg("1M").status();
    if !created.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no qemu-img");
        return;
    }
    let (info, write) = (["info"], ["bench", "-w", "-c", "1", "-f", "qcow2"]);
    let device = device(&path);
    device.prepare(true).unwrap();
    assert!(qemu(&path, &info).unwrap().0, "clean: anybody may read");
    device.mark_dirty(true);
    let (ok, words) = qemu(&path, &info).unwrap();
    assert!(!ok && words.contains("Failed to get shared \"write\" lock"), "{words}");
    assert!(qemu(&path, &["info", "-U"]).unwrap().0, "asked to share");
    // Byte 201 alone keeps away a writer that would share.
    crate::sys::locks::unlock(&*device.fd(Which::Write).unwrap(), 101, 1).unwrap();
    assert!(qemu(&path, &info).unwrap().0);
    let (ok, words) = qemu(&path, &write).unwrap();
    assert!(!ok && words.contains("Failed to get \"write\" lock"), "{words}");
    device.mark_dirty(false);
    assert!(qemu(&path, &write).unwrap().0);
}

#[test]
fn qemu_copies_no_dirty_raw_image() {
    let (dir, path) = scratch();
    let copy = dir.path().join("copy");
    let convert = |to: &Path| {
        let words = ["convert", "-f", "raw", "-O", "raw", path.to_str().unwrap()];
        qemu(to, &words)
    };
    let Some((true, _)) = convert(&copy) else {
        eprintln!("skipped: no qemu-img");
        return;
    };
    let device = device(&path);
    device.prepare(true).unwrap();
    device.mark_dirty(true);
    let (ok, words) = convert(&copy).unwrap();
    assert!(!ok && words.contains("Failed to get shared \"write\" lock"), "{words}");
    drop(device);
    assert!(convert(&copy).unwrap().0);
}
