//! A journal of the released format, read by the program of today.
//!
//! `fixtures/journal-v1.txt` must NEVER be made anew, whatever changes: journals like it lie on
//! disks. If one of these tests fails, the program has lost a format it must read. A new format
//! adds a fixture and a test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bcachefs_fuse::device::{Image, MemoryDevice};
use bcachefs_fuse::journal::{Header, RecordKind, Recovered};
use bcachefs_fuse::store::recovery::Fate;
use fuse_tests::fixture::{self, GIVEN, NAMES, TIME, UUID};

const V1: &str = include_str!("../fixtures/journal-v1.txt");

fn v1() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(fixture::parse(V1).expect("the fixture's text")))
}

fn headers() -> Vec<Header> {
    let mut headers = Vec::new();
    let recovered = Recovered::open(v1(), Default::default()).unwrap();
    recovered
        .visit(&mut |record| {
            headers.push(record.header);
            Ok(())
        })
        .unwrap();
    headers
}

#[test]
fn version_1_is_followed_record_by_record() {
    let recovered = Recovered::open(v1(), Default::default()).unwrap();
    assert_eq!((recovered.superblock().uuid, recovered.superblock().generation), (UUID, 2));
    assert_eq!((recovered.corruption(), recovered.dropped()), (None, 0));
    let headers = headers();
    assert!(headers.windows(2).all(|pair| pair[0].seq + 1 == pair[1].seq), "{headers:?}");
    assert_eq!(headers.last().map(|last| last.seq), Some(recovered.last_seq()));
    let generations: BTreeSet<u64> = headers.iter().map(|header| header.generation).collect();
    assert_eq!(generations, BTreeSet::from([1, 2]));
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for header in &headers {
        *kinds.entry(format!("{:?}", header.kind)).or_default() += 1;
    }
    let every = ["Attr", "Checkpoint", "Data", "Device", "Revoke", "Truncate", "Unlink", "Zero"];
    assert_eq!(kinds.keys().map(String::as_str).collect::<Vec<_>>(), every, "{kinds:?}");
    let attr = headers.iter().find(|header| header.kind == RecordKind::Attr).unwrap();
    assert_eq!(attr.mtime, GIVEN);
    assert!(headers.iter().any(|header| header.remaining > 0), "a write of several records");
}

#[test]
fn version_1_names_its_devices() {
    let mut found = BTreeMap::new();
    let recovered = Recovered::open(v1(), Default::default()).unwrap();
    recovered
        .visit(&mut |record| {
            if let Some(identity) = record.identity() {
                found.insert(String::from_utf8(identity.path.clone()).unwrap(), identity);
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), NAMES.iter().collect::<Vec<_>>());
    for (number, name) in NAMES.iter().enumerate() {
        let identity = &found[*name];
        // c.img's last record comes after its unlink.
        assert_eq!(identity.named, *name != "c.img", "{name}");
        assert!(identity.birth == TIME && identity.handle_type == 1, "{name}");
        assert_eq!(identity.handle, [1, 2, 3, number as u8]);
        assert_eq!(
            (identity.inode, &identity.filesystem),
            (11 + number as u64, b"of the fixture..")
        );
    }
}

#[test]
fn version_1_reads_and_goes_home() {
    let homes = fixture::homes();
    let (store, report) = fixture::mount(v1(), &homes).unwrap();
    let fates: Vec<_> = report.devices.iter().map(|found| (&*found.path, &found.fate)).collect();
    let wanted = [
        ("a.img".as_ref(), &Fate::Resumed),
        ("b.img".as_ref(), &Fate::Resumed),
        ("c.img".as_ref(), &Fate::Dropped),
        ("d.img".as_ref(), &Fate::Resumed),
    ];
    assert_eq!(fates, wanted, "{report:?}");
    assert_eq!((report.corruption, report.generation), (None, 3));
    for number in [0, 1, 3] {
        let device = fixture::open(&store, &homes, number).unwrap();
        let name = NAMES[number];
        assert!(device.is_dirty(), "{name}");
        assert!(fixture::read(&device).unwrap() == fixture::expected(number), "{name}");
    }
    store.start().unwrap();
    let end = store.flush(None, &mut |_| true).unwrap();
    assert_eq!((end.left_bytes, end.stuck), (0, Vec::new()));
    store.stop().unwrap();
    for number in [0, 1, 3] {
        let home = homes.0[number].as_ref().unwrap();
        assert!(home.bytes() == fixture::expected(number), "{} at home", NAMES[number]);
    }
}

#[test]
fn an_image_that_the_stop_did_not_leave_so_is_not_touched() {
    let mut homes = fixture::homes();
    let a = fixture::Home::new(&[b'a'; 31 << 10]);
    homes.0[0] = Some(a.clone());
    let (store, report) = fixture::mount(v1(), &homes).unwrap();
    let changed = report.devices.iter().filter(|found| matches!(found.fate, Fate::Changed(_)));
    assert_eq!(changed.map(|found| found.path.to_str()).collect::<Vec<_>>(), [Some("a.img")]);
    store.start().unwrap();
    store.flush(None, &mut |_| true).unwrap();
    store.stop().unwrap();
    assert!(a.bytes() == [b'a'; 31 << 10]);
}

#[test]
fn what_is_made_today_reads_the_same() {
    let image = fixture::make().unwrap();
    let text = fixture::render(&image);
    assert!(fixture::parse(&text) == Some(image.clone()), "the text is not the image");
    assert_eq!(fixture::parse("size 8\n4: 0g\n"), None);
    let homes = fixture::homes();
    let journal = Arc::new(MemoryDevice::new(image));
    let (store, report) = fixture::mount(journal, &homes).unwrap();
    assert_eq!(report.devices.len(), 4, "{report:?}");
    for number in [0, 1, 3] {
        let device = fixture::open(&store, &homes, number).unwrap();
        assert!(fixture::read(&device).unwrap() == fixture::expected(number), "{number}");
    }
}

#[test]
fn one_flipped_bit_of_the_fixture_is_noticed() {
    let mut text = V1.to_owned();
    let at = text.rfind(": ").unwrap() + 2;
    let digit = u8::from_str_radix(&text[at..=at], 16).unwrap() ^ 1;
    text.replace_range(at..=at, &format!("{digit:x}"));
    let image: Image = fixture::parse(&text).unwrap();
    let recovered =
        Recovered::open(Arc::new(MemoryDevice::new(image)), Default::default()).unwrap();
    let whole = Recovered::open(v1(), Default::default()).unwrap();
    let harmed = recovered.corruption().is_some() || recovered.last_seq() < whole.last_seq();
    assert!(harmed, "the last record's bytes are covered");
}
