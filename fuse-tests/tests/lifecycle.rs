//! The life of a mount: made, served, ended, on real mounts.

use std::path::Path;
use std::time::Duration;

use bcachefs_fuse::config::MountConfig;
use bcachefs_fuse::fuse::mount::{How, Outcome};
use bcachefs_fuse::fuse::session::{self, End};

/// A root directory and nothing in it.
struct Empty;

impl fuser::Filesystem for Empty {
    fn getattr(
        &self,
        _request: &fuser::Request,
        ino: fuser::INodeNo,
        _fh: Option<fuser::FileHandle>,
        reply: fuser::ReplyAttr,
    ) {
        let epoch = std::time::UNIX_EPOCH;
        let attr = fuser::FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            crtime: epoch,
            kind: fuser::FileType::Directory,
            perm: 0o755,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&Duration::from_secs(1), &attr);
    }
}

fn config(mountpoint: &Path) -> MountConfig {
    MountConfig {
        source: "/nowhere".into(),
        mountpoint: mountpoint.to_owned(),
        read_only: false,
        allow_other: true,
        attr_timeout: Duration::from_secs(1),
        fsname: "/srv/a, b".into(),
        threads: 4,
        flags: vec!["nosuid".into(), "noatime".into()],
    }
}

#[test]
fn a_session_as_root_from_mount_to_end() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mountpoint = directory.path().canonicalize().unwrap();
    let serving = session::serve(Empty, &config(&mountpoint), 0o040755, |_| {}).unwrap();
    let table = bcachefs_fuse::fuse::mountinfo::read().unwrap();
    let entry = bcachefs_fuse::fuse::mountinfo::top_at(&table, &mountpoint).unwrap();
    assert!(entry.is_ours() && serving.mount().is_mounted());
    assert_eq!(entry.source, "/srv/a, b");
    assert_eq!(entry.options, "rw,nosuid,noatime");
    assert!(entry.super_options.contains("default_permissions,allow_other"), "{entry:?}");
    assert_eq!(serving.mount().unmount(How::Politely), Outcome::Gone);
    assert_eq!(serving.run_to_end(|_| {}), End::Unmounted);
    assert_eq!(serving.mount().unmount(How::Politely), Outcome::Gone);
    assert!(!serving.mount().is_mounted());
}
