//! Files recorded by one tree and found by the next, as after a crash.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::*;
use crate::store::recovery::Located;

fn tree(dir: &Path, by_handle: bool) -> HostTree {
    let root =
        rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .unwrap();
    let mut tree = HostTree::new(root, DirectIo::Auto, false, 100).unwrap();
    tree.opens_by_handle &= by_handle;
    tree
}

fn node(tree: &HostTree, path: &str) -> NodeId {
    path.split('/').fold(ROOT, |at, name| tree.lookup(at, name.as_ref()).unwrap().id)
}

/// Makes a file with its path as its bytes, and what a journal would know it by.
fn recorded(dir: &Path, path: &str) -> DeviceIdentity {
    fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
    fs::write(dir.join(path), path).unwrap();
    record(dir, path)
}

fn record(dir: &Path, path: &str) -> DeviceIdentity {
    let tree = tree(dir, true);
    tree.record(node(&tree, path)).unwrap().unwrap()
}

fn find(dir: &Path, record: &DeviceIdentity, by_handle: bool) -> Option<Located> {
    tree(dir, by_handle).resolver().unwrap().find(record).unwrap()
}

fn bytes(located: &Located) -> Vec<u8> {
    let mut bytes = vec![0; 100];
    let len = located.device.read_at(&mut bytes, 0).unwrap();
    bytes.truncate(len);
    bytes
}

/// Scratch directories on the filesystems there are, each with both ways to search.
fn everywhere(test: impl Fn(&Path, bool)) {
    let places = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")];
    for place in places.into_iter().flatten() {
        for by_handle in [true, false] {
            let dir = tempfile::tempdir_in(place.path()).unwrap();
            test(dir.path(), by_handle);
        }
    }
}

#[test]
fn a_record_says_what_the_source_says() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/f"), "x").unwrap();
    let tree = tree(dir.path(), true);
    let id = node(&tree, "d/f");
    let record = tree.record(id).unwrap().unwrap();
    let meta = fs::metadata(dir.path().join("d/f")).unwrap();
    assert_eq!((record.named, &record.path[..], record.inode), (true, &b"d/f"[..], meta.ino()));
    let handle = FileHandle::of(fs::File::open(dir.path().join("d/f")).unwrap()).unwrap();
    assert_eq!((record.handle_type, &record.handle[..]), (handle.kind(), handle.bytes()));
    let born = meta.created().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    let birth = Timestamp { sec: born.as_secs() as i64, nsec: born.subsec_nanos() };
    assert_eq!(record.birth, birth);
    // The second time from memory, but for the path.
    tree.rename((ROOT, "d".as_ref()), (ROOT, "e".as_ref()), 0).unwrap();
    let again = tree.record(id).unwrap().unwrap();
    assert_eq!(again, DeviceIdentity { path: b"e/f".to_vec(), ..record });
    assert_eq!(tree.record(node(&tree, "e")).unwrap(), None, "a directory");
    tree.sync_names().unwrap();
}

#[test]
fn a_source_without_handles_and_birth_times_records_nothing() {
    let tree = tree(Path::new("/proc/sys/kernel"), true);
    assert_eq!(tree.record(node(&tree, "ostype")).unwrap(), None);
}

#[test]
fn an_untouched_file_is_found_as_the_node_that_it_will_be() {
    everywhere(|dir, by_handle| {
        let record = recorded(dir, "a/b/f");
        let tree = tree(dir, by_handle);
        let found = tree.resolver().unwrap().find(&record).unwrap().unwrap();
        assert_eq!((&bytes(&found)[..], found.path.to_str()), (&b"a/b/f"[..], Some("a/b/f")));
        assert_eq!((found.nlink, found.stamp.size), (1, 5));
        assert_eq!(found.device.stamp().unwrap(), Some(found.stamp));
        let id = node(&tree, "a/b/f");
        assert_eq!(found.identity, tree.identity(id).unwrap());
        found.device.prepare(true).unwrap();
        found.device.write_home(b"A", 0).unwrap();
        assert_eq!(fs::read(dir.join("a/b/f")).unwrap(), b"A/b/f");
    });
}

#[test]
fn a_renamed_or_moved_file_is_found_under_its_new_name() {
    everywhere(|dir, by_handle| {
        let record = recorded(dir, "f");
        for to in ["g", "d/e/f"] {
            fs::create_dir_all(dir.join(to).parent().unwrap()).unwrap();
            let from = if dir.join("f").exists() { "f" } else { "g" };
            fs::rename(dir.join(from), dir.join(to)).unwrap();
            let found = find(dir, &record, by_handle).unwrap();
            assert_eq!((&bytes(&found)[..], found.path.to_str()), (&b"f"[..], Some(to)));
        }
        // Another file by the old name changes nothing.
        fs::write(dir.join("f"), "other").unwrap();
        assert_eq!(bytes(&find(dir, &record, by_handle).unwrap()), b"f");
    });
}

#[test]
fn another_file_with_the_number_and_the_name_is_not_it() {
    everywhere(|dir, by_handle| {
        let record = recorded(dir, "f");
        let mut reused = false;
        for _ in 0..200 {
            fs::remove_file(dir.join("f")).unwrap();
            fs::write(dir.join("f"), "f").unwrap();
            assert!(find(dir, &record, by_handle).is_none());
            reused |= fs::metadata(dir.join("f")).unwrap().ino() == record.inode;
        }
        eprintln!("{}: number reused: {reused}", dir.display());
        fs::remove_file(dir.join("f")).unwrap();
        assert!(find(dir, &record, by_handle).is_none());
    });
}

#[test]
fn any_name_of_a_file_with_several_does() {
    everywhere(|dir, by_handle| {
        let record = recorded(dir, "f");
        fs::create_dir(dir.join("d")).unwrap();
        fs::hard_link(dir.join("f"), dir.join("d/second")).unwrap();
        let found = find(dir, &record, by_handle).unwrap();
        assert_eq!((found.nlink, found.path.to_str()), (2, Some("f")));
        fs::remove_file(dir.join("f")).unwrap();
        let found = find(dir, &record, by_handle).unwrap();
        assert_eq!((found.nlink, &bytes(&found)[..]), (1, &b"f"[..]));
    });
}

#[test]
fn an_unlinked_file_that_is_open_is_found_by_its_handle_without_a_name() {
    everywhere(|dir, by_handle| {
        let record = recorded(dir, "f");
        let tree = tree(dir, by_handle);
        let open = fs::File::open(dir.join("f")).unwrap();
        fs::remove_file(dir.join("f")).unwrap();
        let found = tree.resolver().unwrap().find(&record).unwrap();
        assert_eq!(found.map(|found| found.nlink), tree.opens_by_handle.then_some(0));
        drop(open);
        assert!(tree.resolver().unwrap().find(&record).unwrap().is_none());
    });
}

#[test]
fn what_left_the_source_is_still_it_to_root_and_gone_to_others() {
    everywhere(|dir, by_handle| {
        let source = dir.join("source");
        let record = recorded(&source, "f");
        fs::rename(source.join("f"), dir.join("f")).unwrap();
        let tree = tree(&source, by_handle);
        let found = tree.resolver().unwrap().find(&record).unwrap();
        assert_eq!(found.is_some(), tree.opens_by_handle);
        // Where it is now cannot be told from here.
        assert!(found.is_none_or(|found| found.path == Path::new("f")));
    });
}

#[test]
fn without_a_handle_number_and_birth_time_must_both_fit() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let whole = recorded(dir, "d/f");
    let bare = DeviceIdentity { handle_type: 0, handle: Vec::new(), ..whole.clone() };
    fs::rename(dir.join("d"), dir.join("e")).unwrap();
    assert_eq!(find(dir, &bare, true).unwrap().path, Path::new("e/f"));
    let mut other = bare.clone();
    other.birth.nsec ^= 1;
    assert!(find(dir, &other, true).is_none());
    let unborn = DeviceIdentity { birth: Timestamp::default(), ..bare.clone() };
    assert!(find(dir, &unborn, true).is_none(), "a number alone names nothing");
    assert!(find(dir, &DeviceIdentity { inode: bare.inode ^ 1, ..bare }, true).is_none());
    let mut handle = whole.clone();
    handle.handle[0] ^= 1;
    for by_handle in [true, false] {
        assert!(find(dir, &handle, by_handle).is_none());
        let elsewhere = DeviceIdentity { filesystem: [7; 16], ..whole.clone() };
        assert!(find(dir, &elsewhere, by_handle).is_none());
        let newborn = DeviceIdentity { birth: other.birth, ..whole.clone() };
        assert!(find(dir, &newborn, by_handle).is_none());
    }
}

#[test]
fn no_path_leads_out_or_into_our_own_directory() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("s");
    let record = recorded(&source, "d/f");
    std::os::unix::fs::symlink("d", source.join("l")).unwrap();
    std::os::unix::fs::symlink("d/f", source.join("m")).unwrap();
    let tree = tree(&source, false);
    assert!(tree.open_below(Path::new("d/f")).unwrap().is_some());
    for path in ["l/f", "../s/d/f", "d/../d/f", "/d/f", "", "d/f/x"] {
        assert!(tree.open_below(Path::new(path)).unwrap().is_none(), "{path}");
    }
    // Found by the walk where it is, whatever the record says.
    for path in ["l/f", "m", "../s/d/f"] {
        let record = DeviceIdentity { path: path.into(), ..record.clone() };
        let found = tree.resolver().unwrap().find(&record).unwrap().unwrap();
        assert_eq!(found.path, Path::new("d/f"));
    }
    fs::rename(source.join("d"), source.join(STATE_NAME)).unwrap();
    assert!(tree.resolver().unwrap().find(&record).unwrap().is_none());
}
