//! Names and attributes of an overlay over real directories.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use super::upper::Lower;
use super::*;
use crate::sys::flags::S_IFIFO;

const ME: Caller = Caller { uid: 1000, gid: 1000, umask: 0o022 };

struct Kit {
    lowers: Vec<TempDir>,
    upper: TempDir,
}

impl Kit {
    fn new(count: usize) -> Kit {
        let lowers = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        Kit { lowers, upper: tempfile::tempdir().unwrap() }
    }

    fn lower(&self, layer: usize, name: &str) -> PathBuf {
        self.lowers[layer].path().join(name)
    }

    fn tree(&self) -> OverlayTree {
        let lowers = self.lowers.iter().map(|dir| open_lower(dir.path())).collect();
        let upper = Upper::open(self.upper.path(), lowers, DirectIo::Never, 100).unwrap();
        let tree = OverlayTree::new(upper, DirectIo::Never, false).unwrap();
        tree.start().unwrap();
        tree
    }
}

fn open_lower(path: &Path) -> Lower {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let root = rustix::fs::open(path, flags, Mode::empty()).unwrap();
    Lower { root, path: path.to_owned() }
}

fn find(tree: &OverlayTree, path: &str) -> Result<Entry> {
    let mut entry = None;
    for name in path.split('/') {
        let parent = entry.map_or(ROOT, |entry: Entry| entry.id);
        entry = Some(tree.lookup(parent, OsStr::new(name))?);
    }
    Ok(entry.unwrap())
}

fn names(tree: &OverlayTree, path: &str) -> Vec<String> {
    let id = if path.is_empty() { ROOT } else { find(tree, path).unwrap().id };
    let mut stream = tree.open_dir(id).unwrap();
    let (mut names, mut cookie) = (Vec::new(), 0);
    while let Some(entry) = stream.peek(cookie).unwrap() {
        cookie = entry.cookie;
        names.push(entry.name.to_string_lossy().into_owned());
        stream.advance();
    }
    assert_eq!(names[..2], [".", ".."]);
    let mut names = names.split_off(2);
    names.sort();
    names
}

fn rename(tree: &OverlayTree, from: (&str, &str), to: (&str, &str), flags: u32) -> Result<Renamed> {
    let dir = |path: &str| if path.is_empty() { ROOT } else { find(tree, path).unwrap().id };
    let (old, new) = (dir(from.0), dir(to.0));
    tree.rename((old, OsStr::new(from.1)), (new, OsStr::new(to.1)), flags)
}

fn gone(tree: &OverlayTree, path: &str) -> bool {
    find(tree, path).is_err_and(|error| error.kind == Kind::NotFound)
}

fn make(tree: &OverlayTree, dir: NodeId, name: &str, what: NewNode<'_>, mode: u32) -> Entry {
    tree.make(dir, OsStr::new(name), what, mode, ME).unwrap()
}

#[test]
fn lower_names_are_shown_renamed_and_removed_and_the_lower_stays() {
    let kit = Kit::new(1);
    fs::create_dir_all(kit.lower(0, "d/e")).unwrap();
    fs::write(kit.lower(0, "d/e/f"), "hello").unwrap();
    fs::write(kit.lower(0, "a"), "a").unwrap();
    symlink("d/e", kit.lower(0, "l")).unwrap();
    let numbers = {
        let tree = kit.tree();
        assert_eq!(names(&tree, ""), ["a", "d", "l"]);
        assert_eq!(tree.readlink(find(&tree, "l").unwrap().id).unwrap(), b"d/e");
        let (d, f) = (find(&tree, "d").unwrap(), find(&tree, "d/e/f").unwrap());
        assert_eq!((d.attr.nlink, f.attr.size), (3, 5));
        rename(&tree, ("", "d"), ("", "moved"), 0).unwrap();
        assert_eq!(find(&tree, "moved/e/f").unwrap().id, f.id);
        assert!(gone(&tree, "d"));
        tree.unlink(ROOT, OsStr::new("a")).unwrap();
        assert!(gone(&tree, "a"));
        // A new directory in the place of the old one shows none of its names.
        make(&tree, ROOT, "d", NewNode::Dir, 0o755);
        assert!(names(&tree, "d").is_empty());
        assert_eq!(names(&tree, ""), ["d", "l", "moved"]);
        rename(&tree, ("moved", "e"), ("d", "e"), 0).unwrap();
        assert_eq!(find(&tree, "moved").unwrap().attr.nlink, 2);
        assert_eq!(find(&tree, "d").unwrap().attr.nlink, 3);
        (f.id, d.id)
    };
    let tree = kit.tree();
    assert_eq!(names(&tree, ""), ["d", "l", "moved"]);
    let ids = (find(&tree, "d/e/f").unwrap().id, find(&tree, "moved").unwrap().id);
    assert_eq!(ids, numbers, "numbers are stable over rename and remount");
    assert_eq!(fs::read(kit.lower(0, "d/e/f")).unwrap(), b"hello");
    assert!(kit.lower(0, "a").exists());
}

#[test]
fn attributes_are_rows_and_hard_links_stay_one_file() {
    let kit = Kit::new(1);
    fs::write(kit.lower(0, "one"), "x").unwrap();
    fs::hard_link(kit.lower(0, "one"), kit.lower(0, "two")).unwrap();
    let mode = |tree: &OverlayTree, name| find(tree, name).unwrap().attr.mode & 0o7777;
    {
        let tree = kit.tree();
        let one = find(&tree, "one").unwrap();
        tree.set_mode(one.id, 0o4711).unwrap();
        tree.set_owner(one.id, Some(7), Some(8)).unwrap();
        let two = find(&tree, "two").unwrap();
        assert_eq!((two.id, two.attr.nlink, two.attr.uid, two.attr.gid), (one.id, 2, 7, 8));
        assert_eq!(mode(&tree, "two"), 0o711, "chown takes set-user-ID away");
        tree.unlink(ROOT, OsStr::new("one")).unwrap();
        assert_eq!(find(&tree, "two").unwrap().attr.nlink, 1);
        tree.link(two.id, ROOT, OsStr::new("three")).unwrap();
        tree.setxattr(two.id, OsStr::new("user.a"), b"b", 0).unwrap();
    }
    let tree = kit.tree();
    let three = find(&tree, "three").unwrap();
    assert_eq!((three.attr.nlink, mode(&tree, "three")), (2, 0o711));
    let mut value = [0; 8];
    assert_eq!(tree.getxattr(three.id, OsStr::new("user.a"), &mut value).unwrap(), 1);
    assert_eq!(value[0], b'b');
    tree.removexattr(three.id, OsStr::new("user.a")).unwrap();
    let error = tree.getxattr(three.id, OsStr::new("user.a"), &mut value).unwrap_err();
    assert_eq!(error.kind, Kind::NoAttr);
    let lower = fs::metadata(kit.lower(0, "one")).unwrap();
    assert_eq!((lower.nlink(), lower.permissions().mode() & 0o7777 & 0o4000), (2, 0));
}

#[test]
fn what_has_no_name_goes_with_its_last_user_or_with_the_next_mount() {
    let kit = Kit::new(1);
    fs::write(kit.lower(0, "a"), "a").unwrap();
    let (open, left) = {
        let tree = kit.tree();
        let a = find(&tree, "a").unwrap();
        tree.unlink(ROOT, OsStr::new("a")).unwrap();
        assert_eq!(tree.attr(a.id).unwrap().nlink, 0);
        tree.forget(a.id, 1);
        make(&tree, ROOT, "next", NewNode::Dir, 0o777);
        assert!(tree.view().unwrap().inode(a.id).unwrap().is_none());
        let b = make(&tree, ROOT, "b", NewNode::Special { rdev: 0 }, S_IFIFO | 0o600);
        tree.unlink(ROOT, OsStr::new("b")).unwrap();
        (a.id, b.id)
    };
    let tree = kit.tree();
    assert!(tree.view().unwrap().inode(left).unwrap().is_none());
    assert!(tree.rows.meta.orphans().unwrap().is_empty());
    let c = make(&tree, ROOT, "c", NewNode::Dir, 0o777);
    assert!(c.id > left && left > open, "no number is used again");
    assert!(gone(&tree, "a") && gone(&tree, "b"));
}

#[test]
fn renames_replace_exchange_and_refuse_as_the_kernel_does() {
    let kit = Kit::new(1);
    for name in ["full/x", "empty", "other"] {
        fs::create_dir_all(kit.lower(0, name)).unwrap();
    }
    fs::write(kit.lower(0, "f"), "f").unwrap();
    fs::write(kit.lower(0, "g"), "g").unwrap();
    let tree = kit.tree();
    let errno = |result: Result<Renamed>| result.unwrap_err().errno();
    let at_root = |from, to, flags| rename(&tree, ("", from), ("", to), flags);
    assert_eq!(errno(at_root("empty", "full", 0)), Errno::NOTEMPTY.raw_os_error());
    assert_eq!(errno(at_root("f", "empty", 0)), Errno::ISDIR.raw_os_error());
    assert_eq!(errno(at_root("empty", "f", 0)), Errno::NOTDIR.raw_os_error());
    assert_eq!(errno(at_root("f", "g", 1)), Errno::EXIST.raw_os_error());
    assert_eq!(errno(at_root("f", "none", 2)), Errno::NOENT.raw_os_error());
    let (f, full) = (find(&tree, "f").unwrap().id, find(&tree, "full").unwrap().id);
    at_root("f", "full", 2).unwrap();
    assert_eq!(find(&tree, "full").unwrap().id, f);
    assert_eq!(names(&tree, "f"), ["x"]);
    at_root("f", "other", 0).unwrap();
    assert_eq!(find(&tree, "other").unwrap().id, full);
    at_root("full", "g", 4).unwrap();
    let whiteout = find(&tree, "full").unwrap().attr;
    assert_eq!((whiteout.mode & S_IFMT, whiteout.rdev), (crate::sys::flags::S_IFCHR, 0));
    assert_eq!(find(&tree, "g").unwrap().id, f);
    assert_eq!(tree.rmdir(ROOT, OsStr::new("other")).unwrap_err().kind, Kind::NotEmpty);
    tree.rmdir(full, OsStr::new("x")).unwrap();
    tree.rmdir(ROOT, OsStr::new("other")).unwrap();
    assert!(gone(&tree, "other") && kit.lower(0, "full/x").exists());
    assert_eq!(names(&tree, ""), ["empty", "full", "g"]);
}

#[test]
fn the_first_of_several_lowers_wins_and_directories_merge() {
    let kit = Kit::new(2);
    for (layer, name) in [(0, "d/a"), (1, "d/a"), (1, "d/b"), (1, "only")] {
        fs::create_dir_all(kit.lower(layer, name).parent().unwrap()).unwrap();
        fs::write(kit.lower(layer, name), format!("{layer}{name}")).unwrap();
    }
    fs::create_dir(kit.lower(1, "d/sub")).unwrap();
    let tree = kit.tree();
    assert_eq!(names(&tree, ""), ["d", "only"]);
    assert_eq!(names(&tree, "d"), ["a", "b", "sub"]);
    assert_eq!(find(&tree, "d").unwrap().attr.nlink, 3);
    let (a, b) = (find(&tree, "d/a").unwrap(), find(&tree, "d/b").unwrap());
    assert!(a.id >> 52 == 0 && b.id >> 52 == 1);
    rename(&tree, ("", "d"), ("", "moved"), 0).unwrap();
    tree.unlink(find(&tree, "moved").unwrap().id, OsStr::new("a")).unwrap();
    drop(tree);
    let tree = kit.tree();
    assert_eq!(names(&tree, "moved"), ["b", "sub"]);
    assert_eq!(find(&tree, "moved/b").unwrap().id, b.id);
}

#[test]
fn an_upper_belongs_to_its_lowers_and_to_one_user() {
    let kit = Kit::new(1);
    let tree = kit.tree();
    let open = |lower: &Path, upper: &Path| {
        Upper::open(upper, vec![open_lower(lower)], DirectIo::Never, 10).err().map(|e| e.kind)
    };
    let upper = kit.upper.path();
    assert_eq!(open(kit.lowers[0].path(), upper), Some(Kind::Busy));
    drop(tree);
    let other = tempfile::tempdir().unwrap();
    assert_eq!(open(other.path(), upper), Some(Kind::NotSupported));
    assert_eq!(open(upper, other.path()), None);
    let full = tempfile::tempdir().unwrap();
    fs::write(full.path().join("mine"), "").unwrap();
    assert_eq!(open(upper, full.path()), Some(Kind::Exists));
}

#[test]
fn a_lower_that_was_replaced_is_seen() {
    let kit = Kit::new(1);
    fs::write(kit.lower(0, "a"), "a").unwrap();
    {
        let tree = kit.tree();
        rename(&tree, ("", "a"), ("", "b"), 0).unwrap();
    }
    fs::write(kit.lower(0, "new"), "n").unwrap();
    fs::rename(kit.lower(0, "new"), kit.lower(0, "a")).unwrap();
    let tree = kit.tree();
    assert_eq!(find(&tree, "b").unwrap_err().kind, Kind::Stale);
}

#[test]
fn a_diff_tells_what_was_added_modified_removed_and_moved() {
    let kit = Kit::new(1);
    fs::create_dir_all(kit.lower(0, "d/e")).unwrap();
    for name in ["d/e/f", "d/same", "a", "b", "c", "x"] {
        fs::write(kit.lower(0, name), name).unwrap();
    }
    let tree = kit.tree();
    assert_eq!(tree.diff().unwrap(), []);
    let told = || -> Vec<String> {
        let line = |difference: &diff::Difference| {
            let from = difference.from.as_ref().map(|from| format!(" < {}", from.display()));
            let path = difference.path.display();
            format!("{} {path}{}", difference.kind.letter(), from.unwrap_or_default())
        };
        tree.diff().unwrap().iter().map(line).collect()
    };
    tree.unlink(ROOT, OsStr::new("a")).unwrap();
    rename(&tree, ("", "d"), ("", "m"), 0).unwrap();
    tree.set_mode(find(&tree, "m/e/f").unwrap().id, 0o600).unwrap();
    make(&tree, find(&tree, "m/e").unwrap().id, "new", NewNode::Dir, 0o755);
    tree.copy_up(&tree.node(find(&tree, "b").unwrap().id).unwrap()).unwrap();
    tree.link(find(&tree, "c").unwrap().id, ROOT, OsStr::new("c2")).unwrap();
    make(&tree, ROOT, "x2", NewNode::Special { rdev: 0 }, S_IFIFO | 0o600);
    rename(&tree, ("", "x2"), ("", "x"), 0).unwrap();
    let wanted = ["D a", "A c2", "R m < d", "M m/e/f", "A m/e/new", "A x", "D x"];
    assert_eq!(told(), wanted);
    rename(&tree, ("", "m"), ("", "d"), 0).unwrap();
    assert_eq!(told(), ["D a", "A c2", "M d/e/f", "A d/e/new", "A x", "D x"]);
    tree.rmdir(find(&tree, "d/e").unwrap().id, OsStr::new("new")).unwrap();
    tree.unlink(find(&tree, "d/e").unwrap().id, OsStr::new("f")).unwrap();
    tree.rmdir(find(&tree, "d").unwrap().id, OsStr::new("e")).unwrap();
    assert_eq!(told(), ["D a", "A c2", "D d/e", "A x", "D x"]);
}

#[test]
fn a_kill_keeps_every_name_and_a_power_cut_a_prefix() {
    let kit = Kit::new(1);
    fs::write(kit.lower(0, "lower"), "x").unwrap();
    let tree = kit.tree();
    make(&tree, ROOT, "durable", NewNode::Dir, 0o755);
    tree.sync_names().unwrap();
    let made = |n: usize| format!("d{n}");
    for n in 0..10 {
        make(&tree, ROOT, &made(n), NewNode::Dir, 0o755);
    }
    rename(&tree, ("", "lower"), ("d9", "moved"), 0).unwrap();
    tree.rmdir(ROOT, OsStr::new("d0")).unwrap();
    let copy = |name: &str| fs::read(kit.upper.path().join(name)).unwrap();
    let (database, log) = (copy("meta.redb"), copy("names.log"));
    // What is on disk now, opened by another.
    let reopened = |log: &[u8]| {
        let upper = tempfile::tempdir().unwrap();
        fs::write(upper.path().join("meta.redb"), &database).unwrap();
        fs::write(upper.path().join("names.log"), log).unwrap();
        fs::create_dir(upper.path().join("data")).unwrap();
        let lowers = vec![open_lower(kit.lowers[0].path())];
        let opened = Upper::open(upper.path(), lowers, DirectIo::Never, 100).unwrap();
        let tree = OverlayTree::new(opened, DirectIo::Never, false).unwrap();
        tree.start().unwrap();
        (tree, upper)
    };
    let (killed, _upper) = reopened(&log);
    assert_eq!(names(&killed, ""), names(&tree, ""));
    assert_eq!(names(&killed, "d9"), ["moved"]);
    drop(killed);
    let mut seen = std::collections::BTreeSet::new();
    for cut in (0..log.len()).step_by(37) {
        let (cut, _upper) = reopened(&log[..cut]);
        let there = names(&cut, "");
        let count = (0..10).take_while(|n| there.contains(&made(*n))).count();
        assert_eq!(there.len(), count + 2, "no prefix: {there:?}");
        assert!(there.contains(&"durable".to_owned()) && there.contains(&"lower".to_owned()));
        seen.insert(count);
        if count == 10 {
            break;
        }
    }
    assert!(seen.contains(&0) && seen.contains(&9), "{seen:?}");
}
