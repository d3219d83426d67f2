//! The host tree on real directories, without FUSE.

use super::*;
use crate::tree::NewNode;

const CALLER: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };

fn tree(dir: &std::path::Path, max_open: usize) -> HostTree {
    let root =
        rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .unwrap();
    HostTree::new(root, DirectIo::Auto, false, max_open).unwrap()
}

fn names(tree: &HostTree, node: NodeId, mut cookie: u64) -> Vec<(OsString, NodeId, u64)> {
    let mut stream = tree.open_dir(node).unwrap();
    let mut found = Vec::new();
    while let Some(entry) = stream.peek(cookie).unwrap() {
        found.push((entry.name.clone(), entry.ino, entry.cookie));
        cookie = entry.cookie;
        stream.advance();
    }
    found
}

#[test]
fn names_numbers_and_attributes_are_the_sources() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path(), 100);
    let made = tree.make(ROOT, "d".as_ref(), NewNode::Dir, 0o777, CALLER).unwrap();
    assert_eq!((made.attr.mode & 0o777, made.attr.nlink), (0o755, 2));
    let link = NewNode::Symlink("target".as_ref());
    let link = tree.make(made.id, "l".as_ref(), link, 0, CALLER).unwrap();
    assert_eq!(tree.readlink(link.id).unwrap(), b"target");
    let (file, opened) = tree.create(made.id, "f".as_ref(), 0o666, true, CALLER).unwrap();
    opened.device.prepare(true).unwrap();
    let stat = std::fs::metadata(dir.path().join("d/f")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&stat), file.id);
    assert_eq!(tree.path(file.id), std::path::Path::new("d/f"));
    let listed = names(&tree, made.id, 0);
    let mut only: Vec<_> = listed.iter().map(|(name, ino, _)| (name.to_str(), *ino)).collect();
    only.sort();
    assert_eq!(only[2..], [(Some("f"), file.id), (Some("l"), link.id)]);
    // Any position continues where it was taken.
    for (i, (_, _, cookie)) in listed.iter().enumerate() {
        assert_eq!(names(&tree, made.id, *cookie), listed[i + 1..]);
    }
    assert_eq!(
        tree.make(ROOT, "d".as_ref(), NewNode::Dir, 0, CALLER).unwrap_err().kind,
        Kind::Exists
    );
    assert_eq!(tree.rmdir(ROOT, "d".as_ref()).unwrap_err().kind, Kind::NotEmpty);
}

#[test]
fn our_own_name_in_the_root_is_hidden_and_reserved() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join(STATE_NAME)).unwrap();
    let tree = tree(dir.path(), 100);
    let name = OsStr::new(STATE_NAME);
    assert_eq!(tree.lookup(ROOT, name).unwrap_err().kind, Kind::NotFound);
    assert_eq!(names(&tree, ROOT, 0).len(), 2);
    assert_eq!(tree.rmdir(ROOT, name).unwrap_err().kind, Kind::NotPermitted);
    assert_eq!(
        tree.create(ROOT, name, 0o600, true, CALLER).err().map(|error| error.kind),
        Some(Kind::NotPermitted)
    );
    let sub = tree.make(ROOT, "sub".as_ref(), NewNode::Dir, 0o755, CALLER).unwrap();
    tree.make(sub.id, name, NewNode::Dir, 0o755, CALLER).unwrap();
}

#[test]
fn descriptors_are_closed_and_reopened_after_renames_of_parents() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path(), 32);
    let deep = tree.make(ROOT, "deep".as_ref(), NewNode::Dir, 0o755, CALLER).unwrap();
    let ids: Vec<NodeId> = (0..500)
        .map(|i| {
            let name = format!("d{i}");
            tree.make(deep.id, name.as_ref(), NewNode::Dir, 0o755, CALLER).unwrap().id
        })
        .collect();
    assert!(tree.load().1 <= 33, "{:?}", tree.load());
    tree.rename((ROOT, "deep".as_ref()), (ROOT, "moved".as_ref()), 0).unwrap();
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(tree.attr(*id).unwrap().ino, *id);
        assert_eq!(tree.path(*id), PathBuf::from(format!("moved/d{i}")));
    }
    ids.iter().for_each(|id| tree.forget(*id, 1));
    tree.forget(deep.id, 1);
    assert_eq!(tree.load().0, 1, "only the root is left");
    assert!(tree.load().1 <= 1);
    assert_eq!(tree.attr(ids[0]).unwrap_err().kind, Kind::Stale);
}

#[test]
fn without_handles_a_reopen_walks_and_accepts_only_the_same_inode() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path(), 1000);
    std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
    std::fs::write(dir.path().join("a/b/f"), "x").unwrap();
    let a = tree.lookup(ROOT, "a".as_ref()).unwrap();
    let b = tree.lookup(a.id, "b".as_ref()).unwrap();
    let f = tree.lookup(b.id, "f".as_ref()).unwrap();
    let node = tree.node(f.id).unwrap();
    tree.mounts.write().clear();
    assert!(tree.reopen(&node, 0).is_ok());
    std::fs::rename(dir.path().join("a/b/f"), dir.path().join("a/b/old")).unwrap();
    std::fs::write(dir.path().join("a/b/f"), "y").unwrap();
    assert_eq!(tree.reopen(&node, 0).unwrap_err().kind, Kind::Stale, "another inode by that name");
}

#[test]
fn device_numbers_survive_the_kernels_encoding() {
    for (major, minor) in [(1, 3), (8, 300), (259, 70_000), (4095, 1_048_575)] {
        let dev = rustix::fs::makedev(major, minor);
        assert_eq!(decode_rdev(encode_rdev(dev)), dev);
    }
}

#[test]
fn an_unlinked_open_file_still_has_attributes_and_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path(), 16);
    let (file, opened) = tree.create(ROOT, "f".as_ref(), 0o644, true, CALLER).unwrap();
    assert_eq!(tree.unlink(ROOT, "f".as_ref()).unwrap(), Some(file.id));
    // Push it out of the descriptors: it is held by its device.
    for i in 0..100 {
        let name = format!("x{i}");
        tree.make(ROOT, name.as_ref(), NewNode::Dir, 0o755, CALLER).unwrap();
    }
    assert_eq!(tree.attr(file.id).unwrap().nlink, 0);
    opened.device.write_at(b"late", 0).unwrap();
    assert_eq!(tree.attr(file.id).unwrap().size, 4);
}
