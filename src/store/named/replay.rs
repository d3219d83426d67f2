//! Which file gets what the journal has of it (J10, J12).

use super::*;
use crate::store::recovery::Fate;

/// A store that was killed with durable, dirty data of its files; nothing of it is home.
fn dirty(contents: &[&[u8]]) -> Kit {
    let kit = Kit::small(contents);
    for number in 0..contents.len() {
        kit.write(number, 1000, &[7; 3000]);
        kit.device(number).sync(true).unwrap();
    }
    kit
}

/// Recovery of that journal over other files.
fn over(kit: &Kit, files: Vec<Option<File>>) -> Kit {
    let log = FaultLog::new();
    let journal = log.add("journal", kit.journal.image());
    Kit::open(log, journal, files, &Setup::default())
}

fn plain(bytes: &[u8]) -> File {
    file(FaultLog::new().add("file", Image::from(bytes))).unwrap()
}

fn fate(kit: &Kit) -> Option<&Fate> {
    kit.report.devices.first().map(|found| &found.fate)
}

#[test]
fn j10_an_unlinked_dirty_file_is_dropped_and_its_number_is_another_file() {
    let kit = dirty(&[&[1; 8000]]);
    kit.store.note_unlink(&identity(0), "0.img".as_ref()).unwrap();
    kit.device(0).sync(true).unwrap();
    let after = over(&kit, vec![None]);
    assert_eq!(fate(&after), Some(&Fate::Dropped));
    assert!(!after.store.is_dirty(), "nothing of it goes anywhere");
    // Open, without a name, and killed: as gone as that.
    let nameless = File { nlink: 0, ..plain(&[1; 8000]) };
    assert_eq!(fate(&over(&kit, vec![Some(nameless)])), Some(&Fate::Dropped));
    // The unlink itself was lost: the file is there, and so is its data.
    let again = over(&kit, vec![Some(plain(&[1; 8000]))]);
    assert_eq!(fate(&again), Some(&Fate::Resumed));
    assert_eq!(again.read(0)[1000..4000], [7; 3000]);
}

#[test]
fn j10_a_clean_file_that_is_unlinked_is_not_missed() {
    for closed in [false, true] {
        let kit = dirty(&[&[1; 8000], &[2; 8000]]);
        // Home, but its records are still in the ring.
        kit.store.flush(Some(&identity(0)), &mut |_| true).unwrap();
        assert!(!kit.device(0).is_dirty());
        if closed {
            kit.store.close(&identity(0), &|| None);
        }
        kit.store.note_unlink(&identity(0), "0.img".as_ref()).unwrap();
        kit.device(1).sync(true).unwrap();
        let after = over(&kit, vec![None, Some(plain(&[2; 8000]))]);
        let missing = after.report.devices.iter().any(|found| found.fate == Fate::Missing);
        assert!(!missing, "closed: {closed}: {:?}", after.report.devices);
    }
}

#[test]
fn j10_an_open_unlinked_file_is_written_on_and_dropped_at_the_last_close() {
    let kit = Kit::small(&[&[1; 8000]]);
    kit.store.note_unlink(&identity(0), "0.img".as_ref()).unwrap();
    kit.store.forget(&identity(0));
    // All that the journal ever hears of it comes after the note would have come.
    kit.write(0, 0, &[5; 4000]);
    kit.device(0).sync(true).unwrap();
    assert_eq!(fate(&over(&kit, vec![None])), Some(&Fate::Dropped));
    assert_eq!(kit.read(0)[..4000], [5; 4000]);
    assert!(kit.store.is_dirty());
    kit.store.close(&identity(0), &|| None);
    assert!(!kit.store.is_dirty());
    assert_eq!(kit.images[0].image().to_vec(), [1; 8000], "nothing went home");
}

#[test]
fn j10_a_file_that_never_had_a_durable_name_is_dropped() {
    let kit = Kit::small(&[&[1; 8000]]);
    kit.device(0).journal_as(DeviceIdentity { named: false, ..record(0) });
    kit.write(0, 0, &[5; 4000]);
    kit.device(0).sync(true).unwrap();
    assert_eq!(fate(&over(&kit, vec![None])), Some(&Fate::Dropped));
}

/// The records of a missing file stay, copied forward while the journal wraps beside them, and
/// another recovery with the file finds them all: data, zeros and the truncate.
#[test]
fn j10_a_missing_file_keeps_its_records_while_the_journal_wraps() {
    let kit = Kit::small(&[&[1; 30_000], &[2; 8000]]);
    let device = kit.device(0);
    kit.write(0, 20_000, &[6; 1000]);
    device.set_size(10_000).unwrap();
    kit.write(0, 9000, &[7; 6000]);
    kit.write(0, 1000, &[8; 3000]);
    device.change_range(crate::device::Range::Punch, 2000, 500).unwrap();
    let model = kit.read(0);
    assert_eq!(model.len(), 15_000);
    device.sync(true).unwrap();
    let after = over(&kit, vec![None, Some(plain(&[2; 8000]))]);
    assert_eq!(fate(&after), Some(&Fate::Missing));
    let mut random = Random::new(1);
    let mut other = vec![2; 8000];
    let mut written = 0;
    // Three times the journal.
    while written < 3 * SMALL.device_bytes() {
        let (offset, len) = (random.below(4000), 2000 + random.below(2000) as usize);
        let new = bytes(&mut random, len);
        after.write(1, offset, &new);
        put(&mut other, offset, &new);
        written += len as u64;
        let times = random.below(8);
        after.work(&mut random, times);
    }
    assert_eq!(after.read(1), other);
    after.device(1).sync(true).unwrap();
    let old = plain(&[1; 30_000]);
    let back = over(&after, vec![Some(old.clone()), after.files[1].clone()]);
    let found = back.report.devices.iter().find(|found| found.path.ends_with("0.img"));
    assert_eq!(found.map(|found| &found.fate), Some(&Fate::Resumed));
    assert_eq!(back.read(0), model);
    back.drain();
    let mut home = vec![0; old.device.size().unwrap() as usize];
    old.device.read_at(&mut home, 0).unwrap();
    assert_eq!(home, model);
}

#[test]
fn j12_every_fate() {
    // A durable size is known after the first clean point.
    let kit = Kit::small(&[&[1; 8000]]);
    kit.write(0, 0, &[6; 100]);
    kit.drain();
    kit.write(0, 1000, &[7; 3000]);
    kit.device(0).sync(true).unwrap();
    let with = |file: File| over(&kit, vec![Some(file)]);
    let resumed = with(plain(&[1; 8000]));
    assert_eq!(fate(&resumed), Some(&Fate::Resumed));
    assert_eq!(fate(&over(&kit, vec![None])), Some(&Fate::Missing));
    assert_eq!(fate(&with(File { nlink: 0, ..plain(&[1; 8000]) })), Some(&Fate::Replaced));
    for size in [7999, 8001, 100_000] {
        let changed = with(plain(&vec![9; size]));
        assert!(matches!(fate(&changed), Some(Fate::Changed(why)) if why.contains("size")));
        // Refused by name, and neither touched nor forgotten.
        let device = changed.device(0);
        assert!(read(device).is_err() || size == 0);
        (0..300).for_each(|which| changed.store.run_by_hand(true, which));
        let file = changed.files[0].clone().unwrap().device;
        let mut home = vec![0; size];
        file.read_at(&mut home, 0).unwrap();
        assert!(home.iter().all(|byte| *byte == 9) && changed.store.is_dirty());
    }
    let source = Source(vec![file(FaultLog::new().add("0", Image::from(&[1; 8000][..])))]);
    let journal = FaultLog::new().add("journal", kit.journal.image());
    let recovered = Recovered::open(journal, Mutants::default()).unwrap();
    let skip = ["0.img".into()];
    let opening = Opening { by_hand: true, skip: &skip, ..Opening::new(&source) };
    let (store, report) = BlockStore::with_journal(&config(), recovered, &opening).unwrap();
    assert_eq!(report.devices[0].fate, Fate::Skipped);
    assert!(!store.is_dirty());
}

#[test]
fn j12_a_change_after_an_orderly_stop_or_the_last_heartbeat_is_told() {
    let kit = dirty(&[&[1; 8000]]);
    let by = |journal: Image, ctime: i64| {
        let journal = FaultLog::new().add("journal", journal);
        let files = vec![Some(File { ctime, ..plain(&[1; 8000]) })];
        Kit::open(FaultLog::new(), journal, files, &Setup::default())
    };
    // No heartbeat yet: nothing to compare with.
    assert_eq!(fate(&by(kit.journal.image(), 1 << 40)), Some(&Fate::Resumed));
    kit.store.beat_by_hand();
    let now = crate::clock::wall().sec;
    assert_eq!(fate(&by(kit.journal.image(), now + 1)), Some(&Fate::Resumed));
    let late = by(kit.journal.image(), now + 60);
    assert!(matches!(fate(&late), Some(Fate::Changed(_))), "{:?}", late.report);
}

/// What is clean at an orderly stop may be changed by anybody afterwards: its old records, still
/// in the ring because another file is dirty, must not come over that.
#[test]
fn what_was_clean_at_the_stop_is_not_replayed() {
    let kit = dirty(&[&[1; 8000], &[2; 8000]]);
    kit.store.flush(Some(&identity(0)), &mut |_| true).unwrap();
    kit.store.stop().unwrap();
    assert!(kit.device(1).is_dirty() && !kit.device(0).is_dirty());
    let changed = File { ctime: 1 << 40, ..plain(&[9; 500]) };
    let after = over(&kit, vec![Some(changed), Some(plain(&[2; 8000]))]);
    assert_eq!(after.read(0), [9; 500]);
    assert_eq!(after.report.devices.len(), 1);
    assert_eq!(after.read(1)[1000..4000], [7; 3000]);
}
