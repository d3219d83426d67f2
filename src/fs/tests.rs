//! The filesystem on a real directory, without FUSE.

use super::*;
use crate::config::{CacheMode, DaemonConfig, MountConfig, StoreConfig};
use crate::tree::{ROOT, SetTime, Timestamp};
use rustix::fs::{Mode, OFlags};

const CALLER: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };
const RDWR: i32 = crate::sys::flags::O_RDWR;

fn config(dir: &Path) -> Config {
    Config {
        mount: MountConfig {
            source: dir.into(),
            upper: None,
            lowers: Vec::new(),
            mountpoint: dir.into(),
            read_only: false,
            allow_other: true,
            attr_timeout: Duration::from_secs(1),
            fsname: "test".into(),
            threads: 8,
            flags: Vec::new(),
            test_panic: None,
        },
        store: StoreConfig { cache_bytes: 4 << 20, ..StoreConfig::default() },
        daemon: DaemonConfig::default(),
    }
}

fn fs(dir: &Path) -> Arc<Fs> {
    let root = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let fs = Fs::without_journal(host_tree(root, &config(dir)).unwrap(), &config(dir));
    fs.start().unwrap();
    fs
}

fn read(fs: &Fs, node: NodeId, fh: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let got = match fs.read(ReadPlace { node, fh, offset, len }, &mut out).unwrap() {
        Ok(got) => got,
        Err(read) => {
            let len = read.len();
            read.run(&mut out[..len]).unwrap();
            len
        }
    };
    out.truncate(got);
    out
}

#[test]
fn a_file_lives_from_create_to_release() {
    let dir = tempfile::tempdir().unwrap();
    let fs = fs(dir.path());
    let (file, open) = fs.create(ROOT, "f".as_ref(), 0o644, RDWR, CALLER).unwrap();
    fs.write(file.id, open.fh, 0, b"hello world").unwrap();
    assert_eq!(read(&fs, file.id, open.fh, 6, 100), b"world");
    fs.sync(file.id, open.fh, false).unwrap();
    assert_eq!(fs.attr(file.id).unwrap().size, 11);
    fs.release(open.fh);
    assert_eq!(fs.store().open_count(), 0);
    // A handle is a hint: the node's number is enough.
    assert_eq!(read(&fs, file.id, 0, 0, 5), b"hello");
    fs.write(file.id, 999, 0, b"J").unwrap();
    assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"Jello world");
    assert_eq!(fs.store().open_count(), 0);
    let again = fs.open(file.id, 0).unwrap();
    assert!(again.keep_cache, "only we have touched it");
    fs.release(again.fh);
    assert!(fs.unit_of(Path::new("f")).unwrap().is_some());
    assert_eq!(fs.unit_of(Path::new("nope")).unwrap_err().kind, Kind::NotFound);
    fs.stop().unwrap();
}

#[test]
fn setattr_changes_owner_before_mode_and_keeps_the_tag() {
    let dir = tempfile::tempdir().unwrap();
    let fs = fs(dir.path());
    let (file, open) = fs.create(ROOT, "f".as_ref(), 0o644, RDWR, CALLER).unwrap();
    fs.write(file.id, open.fh, 0, &[1; 100]).unwrap();
    fs.release(open.fh);
    let at = SetTime::At(Timestamp { sec: -2, nsec: 300_000_000 });
    let changes = Changes {
        mode: Some(0o4755),
        uid: Some(rustix::process::getuid().as_raw()),
        gid: None,
        size: Some(50),
        atime: SetTime::Omit,
        mtime: at,
    };
    let attr = fs.set_attr(file.id, None, &changes).unwrap();
    assert_eq!((attr.mode & 0o7777, attr.size), (0o4755, 50));
    assert_eq!(attr.mtime, Timestamp { sec: -2, nsec: 300_000_000 });
    let again = fs.open(file.id, 0).unwrap();
    assert!(again.keep_cache);
    assert_eq!(read(&fs, file.id, again.fh, 0, 100), [1; 50]);
    fs.stop().unwrap();
}

#[test]
fn a_file_changed_behind_the_mount_is_read_fresh_at_the_next_open() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), [1; 9000]).unwrap();
    let fs = fs(dir.path());
    let file = fs.lookup(ROOT, "f".as_ref()).unwrap();
    for (fill, len) in [(1u8, 9000), (2, 9000), (3, 12_000), (4, 100)] {
        std::fs::write(dir.path().join("f"), vec![fill; len]).unwrap();
        let open = fs.open(file.id, 0).unwrap();
        assert!(!open.keep_cache);
        assert_eq!(read(&fs, file.id, open.fh, 0, 20_000), vec![fill; len]);
        fs.release(open.fh);
    }
    fs.stop().unwrap();
}

#[test]
fn a_grown_and_a_shrunk_size_reach_an_open_handle_with_the_attributes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), [1; 5000]).unwrap();
    let fs = fs(dir.path());
    let file = fs.lookup(ROOT, "f".as_ref()).unwrap();
    let open = fs.open(file.id, 0).unwrap();
    assert_eq!(read(&fs, file.id, open.fh, 0, 20_000).len(), 5000);
    let mut behind = std::fs::OpenOptions::new().append(true).open(dir.path().join("f")).unwrap();
    std::io::Write::write_all(&mut behind, &[2; 1000]).unwrap();
    fs.attr(file.id).unwrap();
    assert_eq!(read(&fs, file.id, open.fh, 4999, 3), [1, 2, 2]);
    behind.set_len(10).unwrap();
    fs.lookup(ROOT, "f".as_ref()).unwrap();
    assert_eq!(read(&fs, file.id, open.fh, 0, 20_000), [1; 10]);
    fs.stop().unwrap();
}

#[test]
fn names_that_go_take_their_tags_along() {
    let dir = tempfile::tempdir().unwrap();
    let fs = fs(dir.path());
    for name in ["a", "b"] {
        let (file, open) = fs.create(ROOT, name.as_ref(), 0o644, RDWR, CALLER).unwrap();
        fs.write(file.id, open.fh, 0, name.as_bytes()).unwrap();
        fs.release(open.fh);
    }
    let unit = fs.unit_of(Path::new("a")).unwrap();
    fs.rename((ROOT, "a".as_ref()), (ROOT, "b".as_ref()), 0).unwrap();
    assert_eq!(fs.unit_of(Path::new("b")).unwrap(), unit);
    let snapshot = fs.store().snapshot(None);
    assert_eq!(snapshot.devices.len(), 1, "{snapshot:?}");
    assert_eq!(snapshot.devices[0].path, "b");
    assert_eq!(snapshot.total.writes, 2, "the retired device's writes still count");
    fs.unlink(ROOT, "b".as_ref()).unwrap();
    assert!(fs.store().snapshot(None).devices.is_empty());
    fs.stop().unwrap();
}

#[test]
fn copy_range_reads_and_writes_through_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i % 253) as u8).collect();
    std::fs::write(dir.path().join("in"), &bytes).unwrap();
    let fs = fs(dir.path());
    let from = fs.lookup(ROOT, "in".as_ref()).unwrap();
    let (to, open) = fs.create(ROOT, "out".as_ref(), 0o644, RDWR, CALLER).unwrap();
    let copied = fs.copy_range((from.id, 0, 5), (to.id, open.fh, 7), u64::MAX >> 1).unwrap();
    assert_eq!(copied, bytes.len() as u64 - 5);
    let out = std::fs::read(dir.path().join("out")).unwrap();
    assert_eq!((&out[..7], &out[7..]), (&[0; 7][..], &bytes[5..]));
    fs.store().set_cache_mode(CacheMode::None);
    assert_eq!(read(&fs, to.id, open.fh, 7, 100), bytes[5..105]);
    fs.stop().unwrap();
}

#[test]
fn a_full_pool_runs_the_work_where_it_is_and_loses_none() {
    let pool = Pool::new("test", 20, 8);
    pool.start().unwrap();
    let done = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            let (pool, done) = (&pool, done.clone());
            scope.spawn(move || {
                for _ in 0..200 {
                    let done = done.clone();
                    pool.run_with(&mut [0; 4096], 4096, move |buffer| {
                        assert_eq!(buffer.len(), 4096);
                        std::thread::yield_now();
                        done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    });
                }
            });
        }
    });
    pool.offer(|| panic!("a job that fails takes no worker along"));
    pool.stop();
    assert_eq!(done.load(std::sync::atomic::Ordering::SeqCst), 3200);
}
