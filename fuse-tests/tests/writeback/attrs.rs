//! Attributes of dirty files: the same while dirty as on the source afterwards.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use fuse_tests::tools::pattern;
use fuse_tests::writeback::{builder, crash, flush, hold, is_dirty};
use fuse_tests::{Mount, report, run};

use super::common::*;

fn dirty(name: &str) -> Option<(Mount, Vec<u8>)> {
    let mount = builder(name)?.start()?;
    hold(&mount);
    let bytes = scattered(&mount, "file", 3_000_001, 31);
    is_dirty(&mount);
    Some((mount, bytes))
}

/// What must not change when a file becomes clean (ctime may move forward once).
fn lasting(path: &Path) -> (u64, i64, i64, u32, u64) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.mode(), meta.nlink())
}

#[test]
fn a_time_that_was_set_stays() {
    let Some((mut mount, bytes)) = dirty("attr-touch") else { return };
    let file = mount.at("file");
    run("touch", &["-m", "-d", "2001-02-03 04:05:06.123456789 UTC", text(&file)]);
    let set = lasting(&file);
    assert_eq!((set.1, set.2), (981_173_106, 123_456_789));
    crash(&mut mount);
    hold(&mount);
    assert_eq!(lasting(&file), set, "after a crash");
    flush(&mount);
    assert_eq!(lasting(&file), set, "after the flush");
    assert_eq!(lasting(&mount.source_at("file")), set, "on the source");
    holds(&mount.source_at("file"), &bytes);
    // A write after it counts again.
    open(&file).write_all_at(b"x", 5).unwrap();
    assert!(lasting(&file).1 > set.1);
}

#[test]
fn size_and_times_of_a_write_are_the_same_dirty_and_clean() {
    let Some((mut mount, _)) = dirty("attr-write") else { return };
    let file = mount.at("file");
    open(&file).write_all_at(&pattern(1, 777), 4_000_000).unwrap();
    let written = lasting(&file);
    assert_eq!(written.0, 4_000_777);
    crash(&mut mount);
    hold(&mount);
    assert_eq!(lasting(&file), written, "after a crash");
    flush(&mount);
    assert_eq!(lasting(&file), written, "after the flush");
    assert_eq!(lasting(&mount.source_at("file")), written, "on the source");
    mount.remount();
    assert_eq!(lasting(&file), written, "in the next mount");
}

#[test]
fn dirty_data_in_holes_counts_as_blocks() {
    let Some(mount) = builder("attr-blocks").and_then(|b| b.start()) else { return };
    hold(&mount);
    let file = open(&mount.at("sparse"));
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&pattern(2, 100_000), 20 << 20).unwrap();
    is_dirty(&mount);
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks();
    assert!(blocks(&mount.at("sparse")) >= 100_000 / 512, "tar -S would archive zeros");
    let seek = |whence| rustix::fs::seek(&file, whence).unwrap();
    let data = seek(rustix::fs::SeekFrom::Data(0));
    assert!(data <= 20 << 20, "data begins at {data}");
    let hole = seek(rustix::fs::SeekFrom::Hole(20 << 20));
    assert!(hole >= (20 << 20) + 100_000, "a hole at {hole}");
    flush(&mount);
    assert!(blocks(&mount.source_at("sparse")) >= 100_000 / 512);
    assert!(blocks(&mount.source_at("sparse")) < 4096, "holes were filled");
}

#[test]
fn capabilities_and_mode_of_a_dirty_file() {
    if !report::have_root("setcap") {
        return;
    }
    let Some((mount, bytes)) = dirty("attr-setcap") else { return };
    let (file, source) = (mount.at("file"), mount.source_at("file"));
    run("setcap", &["cap_net_raw+ep", text(&file)]);
    let shown = |path: &Path| run("getcap", &[text(path)]);
    assert!(shown(&file).contains("cap_net_raw"), "{:?}", shown(&file));
    flush(&mount);
    assert!(shown(&file).contains("cap_net_raw"), "lost by the flush");
    assert!(shown(&source).contains("cap_net_raw"), "not on the source");
    holds(&source, &bytes);
    // A later write drops it, dirty as well as clean.
    open(&file).write_all_at(b"x", 0).unwrap();
    assert!(!shown(&file).contains("cap_net_raw"));
    flush(&mount);
    assert!(!shown(&source).contains("cap_net_raw"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
    flush(&mount);
    assert_eq!(lasting(&source).3 & 0o7777, 0o4755);
}

#[test]
fn xattrs_and_owner_of_a_dirty_file() {
    if !report::have_root("chown") {
        return;
    }
    let Some((mount, bytes)) = dirty("attr-xattr") else { return };
    let file = mount.at("file");
    run("setfattr", &["-n", "user.color", "-v", "blue", text(&file)]);
    std::os::unix::fs::chown(&file, Some(23_001), Some(23_001)).unwrap();
    let owner = |path: &Path| fs::metadata(path).unwrap().uid();
    let color = |path: &Path| run("getfattr", &["--only-values", "-n", "user.color", text(path)]);
    assert_eq!((owner(&file), color(&file).as_str()), (23_001, "blue"));
    flush(&mount);
    let source = mount.source_at("file");
    assert_eq!((owner(&source), color(&source).as_str()), (23_001, "blue"));
    holds(&source, &bytes);
}
