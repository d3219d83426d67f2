//! Changes that go around the journal, beside those in it (J14), and what devices are told.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::*;
use crate::device::fault::CrashStates;
use crate::device::{MemoryDevice, Range};

/// What every power cut at the end of a log leaves an image, recovered.
fn after_a_cut(kit: &Kit) -> Vec<Vec<u8>> {
    let at = kit.log.position();
    let mut seen = Vec::new();
    for state in CrashStates::new(&kit.log, 14).only(at) {
        let (log, devices) = state.power_on();
        let files = devices[1..].iter().cloned().map(file).collect();
        let after = Kit::open(log, devices[0].clone(), files, &Setup::default());
        seen.push(after.read(0));
    }
    seen
}

/// Write, home, clean, closed and opened again, then written through and synced: the record is
/// still in the ring, and the device that knew of it is not.
#[test]
fn j14_a_file_that_was_closed_meanwhile_is_revoked_too() {
    for mode in [CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None] {
        let mut kit = Kit::small(&[&[1; 8192]]);
        kit.write(0, 0, &[2; 4096]);
        kit.device(0).sync(true).unwrap();
        kit.drain();
        kit.devices.clear();
        kit.store.close(&identity(0), &|| None);
        kit.devices.push(kit.open_file(0));
        kit.store.set_cache_mode(mode);
        kit.device(0).write(0, &[3; 4096]).unwrap();
        kit.device(0).sync(true).unwrap();
        let expected = [[3; 4096], [1; 4096]].concat();
        assert!(after_a_cut(&kit).iter().all(|seen| *seen == expected), "{mode:?}");
    }
}

/// The same after a recovery: what was replayed is clean, and its records are still there.
#[test]
fn j14_what_a_recovery_replayed_is_revoked_too() {
    let kit = Kit::small(&[&[1; 8192]]);
    kit.write(0, 0, &[2; 4096]);
    kit.device(0).sync(true).unwrap();
    let kit = kit.killed(&Setup::default());
    kit.store.flush(Some(&identity(0)), &mut |_| true).unwrap();
    kit.store.set_cache_mode(CacheMode::Writethrough);
    kit.device(0).change_range(Range::Punch, 0, 4096).unwrap();
    kit.device(0).sync(true).unwrap();
    let expected = [[0; 4096], [1; 4096]].concat();
    assert!(after_a_cut(&kit).iter().all(|seen| *seen == expected));
}

/// A clean file that somebody else changed gets a new tag: the old one's records are void.
#[test]
fn j14_a_file_changed_behind_the_mount_is_not_replayed_over() {
    let mut kit = Kit::small(&[&[1; 8192]]);
    kit.write(0, 0, &[2; 4096]);
    kit.device(0).sync(true).unwrap();
    kit.drain();
    let unit = kit.device(0).unit();
    kit.devices.clear();
    kit.store.close(&identity(0), &|| None);
    kit.images[0].replace(Image::from(&[9; 6000][..]));
    kit.files[0].as_mut().unwrap().ctime = 50;
    kit.devices.push(kit.open_file(0));
    assert_ne!(kit.device(0).unit(), unit);
    kit.write(0, 5000, &[3; 100]);
    kit.device(0).sync(true).unwrap();
    let mut expected = vec![9; 6000];
    put(&mut expected, 5000, &[3; 100]);
    assert!(after_a_cut(&kit).iter().all(|seen| *seen == expected));
}

/// Writes on its way home, an unsynced direct change of size before them: whatever of the size a
/// power cut leaves, the file is not taken for another one.
#[test]
fn j12_sizes_of_direct_changes_are_explained() {
    let kit = Kit::small(&[&[1; 8192]]);
    kit.write(0, 0, &[2; 100]);
    kit.drain();
    kit.store.set_cache_mode(CacheMode::Writethrough);
    kit.device(0).write(20_000, &[3; 5000]).unwrap();
    kit.device(0).set_size(3000).unwrap();
    kit.device(0).write(9000, &[4; 500]).unwrap();
    kit.store.set_cache_mode(CacheMode::Writeback);
    kit.write(0, 0, &[5; 100]);
    kit.store.shared.writeback().unwrap().journal.barrier().unwrap();
    for seen in after_a_cut(&kit) {
        assert_eq!(seen[..100], [5; 100]);
        assert!([8192, 25_000, 3000, 9500].contains(&seen.len()), "{}", seen.len());
    }
}

/// A device that counts what it is told, and has little room.
#[derive(Default)]
pub(super) struct Told {
    pub(super) inner: MemoryDevice,
    pub(super) free: AtomicU64,
    pub(super) dirty: AtomicBool,
    changes: AtomicU64,
}

impl BlockDevice for Told {
    fn prepare(&self, write: bool) -> Outcome<()> {
        self.inner.prepare(write)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Outcome<usize> {
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Outcome<()> {
        self.inner.write_at(data, offset)
    }

    fn size(&self) -> Outcome<u64> {
        self.inner.size()
    }

    fn set_size(&self, bytes: u64) -> Outcome<()> {
        self.inner.set_size(bytes)
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Outcome<()> {
        self.inner.change_range(what, offset, len)
    }

    fn sync(&self, data_only: bool) -> Outcome<()> {
        self.inner.sync(data_only)
    }

    fn seek(&self, offset: u64, hole: bool) -> Outcome<u64> {
        self.inner.seek(offset, hole)
    }

    fn mark_dirty(&self, dirty: bool) {
        self.dirty.store(dirty, SeqCst);
        self.changes.fetch_add(1, SeqCst);
    }

    fn free_bytes(&self) -> Outcome<Option<u64>> {
        Ok(Some(self.free.load(SeqCst)))
    }
}

/// A kit of one such device.
pub(super) fn told(bytes: &[u8], free: u64) -> (Kit, Arc<Told>) {
    let told = Arc::new(Told::default());
    told.inner.replace(Image::from(bytes));
    told.free.store(free, SeqCst);
    let log = FaultLog::new();
    let journal = log.add("journal", Image::default());
    journal.set_size(SMALL.device_bytes()).unwrap();
    Journal::format_as(&*journal, SMALL, *b"named test store").unwrap();
    let files = vec![Some(File { device: told.clone(), ctime: 1, nlink: 1 })];
    (Kit::open(log, journal, files, &Setup::default()), told)
}

#[test]
fn a_file_hears_when_it_becomes_dirty_and_clean() {
    let (kit, told) = told(&[1; 9000], u64::MAX);
    let expect = |dirty, changes| {
        assert_eq!((told.dirty.load(SeqCst), told.changes.load(SeqCst)), (dirty, changes));
    };
    expect(false, 0);
    kit.write(0, 0, &[2; 100]);
    kit.write(0, 200, &[2; 100]);
    expect(true, 1);
    kit.drain();
    expect(false, 2);
    kit.write(0, 0, &[3; 100]);
    expect(true, 3);
    kit.store.forget(&identity(0));
    kit.store.close(&identity(0), &|| None);
    expect(false, 4);
}

/// A panic under the lock of a dirty map: nobody knows what it left.
#[test]
fn a_panic_under_a_dirty_lock_makes_the_store_read_only() {
    let kit = Kit::small(&[&[1; 9000], &[2; 9000]]);
    kit.write(0, 0, &[3; 100]);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _dirty = kit.device(0).dirty.lock();
        panic!("as intended");
    }));
    assert!(panicked.is_err());
    assert!(kit.device(0).write(0, &[4; 100]).is_err() && kit.device(1).write(0, &[4]).is_err());
    let begun = kit.log.position();
    (0..100).for_each(|which| kit.store.run_by_hand(true, which));
    assert_eq!(kit.log.position(), begun, "writeback stopped");
    assert_eq!(kit.killed(&Setup::default()).read(0)[..100], [3; 100], "left for replay");
}
