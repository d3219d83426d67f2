//! The rules of the model, one by one, and the devices against a plain memory device.

use std::collections::BTreeSet;
use std::thread::scope;
use std::time::Duration;

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn device(bytes: &[u8]) -> (FaultLog, Arc<FaultDevice>) {
    let log = FaultLog::new();
    let device = log.add("d", Image::from(bytes));
    (log, device)
}

/// The contents that a crash at the end of the log can leave, as text.
fn ends(log: &FaultLog) -> BTreeSet<String> {
    let states = CrashStates::new(log, 1).only(log.position());
    states.map(|state| String::from_utf8(state.images()[0].to_vec()).unwrap()).collect()
}

fn texts(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(ToString::to_string).collect()
}

#[test]
fn open_changes_are_lost_or_kept_and_a_sync_ends_that() {
    let (log, device) = device(b"old.");
    assert_eq!(ends(&log), texts(&["old."]));
    device.write_at(b"a", 0).unwrap();
    device.write_at(b"b", 2).unwrap();
    let all = texts(&["old.", "ald.", "olb.", "alb."]);
    assert_eq!(ends(&log), all);
    // Every cut: before, after one, after two.
    let every: Vec<_> = CrashStates::new(&log, 1).map(|state| state.images()[0].to_vec()).collect();
    assert!(every.len() >= 7 && every.iter().all(|one| one.len() == 4), "{every:?}");
    device.sync(true).unwrap();
    assert_eq!(ends(&log), texts(&["alb."]));
    device.write_at(b"c", 0).unwrap();
    device.write_at(b"d", 0).unwrap();
    assert_eq!(ends(&log), texts(&["alb.", "clb.", "dlb."]), "either of two, or neither");
}

#[test]
fn a_sync_covers_its_own_device_only() {
    let log = FaultLog::new();
    let (one, two) = (log.add("one", Image::zeros(1)), log.add("two", Image::zeros(1)));
    one.write_at(b"1", 0).unwrap();
    two.write_at(b"2", 0).unwrap();
    two.sync(true).unwrap();
    let states = CrashStates::new(&log, 1).only(log.position());
    let seen = states.map(|state| state.images().iter().map(Image::to_vec).collect::<Vec<_>>());
    let seen: BTreeSet<_> = seen.collect();
    assert_eq!(
        seen,
        BTreeSet::from([vec![b"\0".to_vec(), b"2".into()], vec![b"1".into(), b"2".into()]])
    );
}

#[test]
fn size_changes_and_zeroing_can_be_lost_like_writes() {
    let (log, device) = device(b"abcd");
    device.set_size(2).unwrap();
    assert_eq!(ends(&log), texts(&["abcd", "ab"]));
    device.sync(false).unwrap();
    device.set_size(3).unwrap();
    assert_eq!(ends(&log), texts(&["ab", "ab\0"]));
    device.sync(false).unwrap();
    device.change_range(Range::Punch, 0, 1).unwrap();
    assert_eq!(ends(&log), texts(&["ab\0", "\0b\0"]));
    device.sync(false).unwrap();
    device.change_range(Range::Allocate, 0, 100).unwrap();
    assert_eq!(ends(&log), texts(&["\0b\0"]));
    device.change_range(Range::AllocateGrow, 2, 3).unwrap();
    assert_eq!(ends(&log), texts(&["\0b\0", "\0b\0\0\0"]));
    device.sync(false).unwrap();
    // A write across the end: size without bytes, and bytes without size.
    device.write_at(b"xyz", 4).unwrap();
    let grown = ["\0b\0\0\0", "\0b\0\0xyz", "\0b\0\0\0\0\0", "\0b\0\0x"];
    assert_eq!(ends(&log), texts(&grown));
}

#[test]
fn torn_writes_are_among_the_states() {
    let (log, device) = device(&[b'-'; 2048]);
    device.write_at(&[b'x'; 2048], 0).unwrap();
    let short = |text: String| text.chars().step_by(512).collect::<String>();
    let ends: BTreeSet<_> = ends(&log).into_iter().map(short).collect();
    for sectors in ["x---", "---x", "-xxx", "xxx-"] {
        assert!(ends.contains(sectors), "{sectors} in {ends:?}");
    }
}

#[test]
fn a_sync_that_runs_promises_nothing_and_never_covers_what_came_after_its_begin() {
    let (log, device) = device(b"....");
    let gate = device.hang(Call::Sync);
    device.write_at(b"a", 0).unwrap();
    scope(|scope| {
        let sync = scope.spawn(|| device.sync(true));
        assert!(gate.wait_for(1, SOON));
        device.write_at(b"b", 1).unwrap();
        assert_eq!(ends(&log), texts(&["....", "a...", ".b..", "ab.."]), "it still runs");
        gate.release();
        sync.join().unwrap().unwrap();
    });
    assert_eq!(ends(&log), texts(&["a...", "ab.."]), "b came after its begin");
}

#[test]
fn a_write_that_was_not_done_when_the_sync_began_is_not_covered() {
    let (log, device) = device(b"....");
    let gate = device.hang(Call::Write);
    scope(|scope| {
        let write = scope.spawn(|| device.write_at(b"a", 0));
        assert!(gate.wait_for(1, SOON));
        assert_eq!(device.image().to_vec(), b"....", "reads do not see it yet");
        assert_eq!(ends(&log), texts(&["....", "a..."]), "a crash may have kept it");
        let syncs = device.hang(Call::Sync);
        let sync = scope.spawn(|| device.sync(true));
        assert!(syncs.wait_for(1, SOON));
        gate.release();
        write.join().unwrap().unwrap();
        syncs.release();
        sync.join().unwrap().unwrap();
    });
    assert_eq!(device.image().to_vec(), b"a...");
    assert_eq!(ends(&log), texts(&["....", "a..."]));
    device.sync(true).unwrap();
    assert_eq!(ends(&log), texts(&["a..."]));
}

#[test]
fn what_a_failed_sync_covered_is_never_durable_by_a_later_one() {
    let (log, device) = device(b"....");
    device.write_at(b"a", 0).unwrap();
    device.inject(Fault::fail(Call::Sync, Errno::IO));
    assert_eq!(device.sync(true).unwrap_err().errno(), Errno::IO.raw_os_error());
    device.write_at(b"b", 1).unwrap();
    device.sync(true).unwrap();
    assert_eq!(device.image().to_vec(), b"ab..", "the page cache still has it");
    assert_eq!(ends(&log), texts(&["ab..", ".b.."]), "the second sync says it is fine");
    device.write_at(b"ab", 0).unwrap();
    device.sync(true).unwrap();
    assert_eq!(ends(&log), texts(&["ab.."]), "written again and synced");
}

#[test]
fn a_sync_that_drops_pages_takes_the_bytes_from_readers_too() {
    let (log, device) = device(b"....");
    device.write_at(b"a", 0).unwrap();
    device.sync(true).unwrap();
    device.write_at(b"bcde", 0).unwrap();
    device.write_at(b"longer", 2).unwrap();
    device.inject(Fault::fail(Call::Sync, Errno::NOSPC).dropping());
    let other = log.add("other", Image::default());
    other.write_at(b"other", 0).unwrap();
    other.sync(true).unwrap();
    assert!(device.sync(true).is_err());
    assert_eq!(
        (device.image().to_vec(), other.image().to_vec()),
        (b"a...".into(), b"other".into())
    );
    assert_eq!(ends(&log), texts(&["a..."]));
}

#[test]
fn faults_come_at_their_call_and_leave_what_they_say() {
    let (log, device) = device(b"....");
    device.inject(Fault::fail(Call::Write, Errno::NOSPC).nth(2).times(2));
    let write = |byte: &[u8]| device.write_at(byte, 0).err().map(|error| error.errno());
    let nospc = Some(Errno::NOSPC.raw_os_error());
    assert_eq!([write(b"1"), write(b"2"), write(b"3"), write(b"4")], [None, nospc, nospc, None]);
    assert_eq!(ends(&log), texts(&["....", "1...", "4..."]), "failed ones left nothing");
    device.sync(true).unwrap();
    device.inject(Fault::fail(Call::Write, Errno::IO).partly());
    assert!(write(b"abcd").is_some());
    assert_eq!(ends(&log), texts(&["4...", "ab.."]));
    device.inject(Fault::fail(Call::Read, Errno::IO).always());
    device.inject(Fault::fail(Call::SetSize, Errno::ROFS));
    device.inject(Fault::fail(Call::ChangeRange, Errno::OPNOTSUPP));
    device.inject(Fault::fail(Call::Prepare, Errno::TXTBSY));
    assert!(device.read_at(&mut [0], 0).is_err() && device.read_at(&mut [0], 0).is_err());
    assert!(device.set_size(0).is_err() && device.prepare(true).is_err());
    assert!(device.change_range(Range::Punch, 0, 4).is_err());
    device.heal();
    assert_eq!(device.read_at(&mut [0; 9], 0).unwrap(), 4);
    assert_eq!((device.image().to_vec(), device.calls(Call::Read)), (b"ab..".to_vec(), 3));
}

#[test]
fn a_hanging_device_goes_on_when_it_is_healed_or_the_gate_is_dropped() {
    let (_, device) = device(b"....");
    scope(|scope| {
        let gate = device.hang(Call::Read);
        let reads: Vec<_> = (0..3).map(|_| scope.spawn(|| device.read_at(&mut [0], 0))).collect();
        assert!(gate.wait_for(3, SOON) && gate.waiting() == 3);
        assert!(!gate.wait_for(4, Duration::from_millis(1)));
        device.write_at(b"x", 0).unwrap();
        device.heal();
        assert!(reads.into_iter().all(|read| read.join().unwrap().is_ok()));
        let gate = device.hang(Call::Read);
        let read = scope.spawn(|| device.read_at(&mut [0], 0));
        assert!(gate.wait_for(1, SOON));
        drop(gate);
        assert!(read.join().unwrap().is_ok());
    });
}

#[test]
fn a_replaced_content_is_durable_and_a_new_device_begins_with_its_own() {
    let (log, device) = device(b"....");
    device.write_at(b"a", 0).unwrap();
    device.replace(Image::from(&b"backup"[..]));
    assert_eq!((ends(&log), device.image().to_vec()), (texts(&["backup"]), b"backup".to_vec()));
    scope(|scope| {
        let gate = device.hang(Call::Write);
        let write = scope.spawn(|| device.write_at(b"B", 0));
        assert!(gate.wait_for(1, SOON));
        device.replace(Image::from(&b"second"[..]));
        gate.release();
        write.join().unwrap().unwrap();
    });
    assert_eq!(
        (ends(&log), device.image().to_vec()),
        (texts(&["second", "Becond"]), b"Becond".into())
    );
    let late = log.add("late", Image::from(&b"late"[..]));
    assert_eq!(late.number(), 1);
    assert!(CrashStates::new(&log, 1).all(|state| state.image(&late).to_vec() == b"late"));
}

/// One random call on each of two devices.
fn step(random: &mut Random, one: &dyn BlockDevice, two: &dyn BlockDevice) {
    let (offset, len) = (random.below(60_000), 1 + random.below(20_000));
    let what = random.below(10);
    let fill = random.bits() as u8;
    for device in [one, two] {
        match what {
            0..=4 => device.write_at(&vec![fill; len as usize], offset).unwrap(),
            5 => device.set_size(offset).unwrap(),
            6 => device.change_range(Range::Punch, offset, len).unwrap(),
            7 => device.change_range(Range::ZeroGrow, offset, len).unwrap(),
            8 => device.change_range(Range::AllocateGrow, offset, len).unwrap(),
            _ => device.sync(fill.is_multiple_of(2)).unwrap(),
        }
    }
}

#[test]
fn the_live_content_is_always_a_plain_memory_device_s() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let (log, plain) = (FaultLog::new(), MemoryDevice::default());
        let fault = log.add("d", Image::default());
        for _ in 0..200 {
            step(&mut random, &*fault, &plain);
            assert_eq!(fault.image(), plain.image());
            assert_eq!(fault.size().unwrap(), plain.size().unwrap());
            let offset = random.below(70_000);
            let mut bufs = [[1; 3000]; 2];
            let got = [fault.read_at(&mut bufs[0], offset), plain.read_at(&mut bufs[1], offset)];
            let [one, two] = got.map(|got| got.unwrap());
            assert!(one == two && bufs[0] == bufs[1]);
            for hole in [false, true] {
                assert_eq!(fault.seek(offset, hole).ok(), plain.seek(offset, hole).ok());
            }
        }
        assert_eq!(View::live(&log.records.lock(), 0), plain.image(), "the log tells the same");
        fault.sync(true).unwrap();
        let last = CrashStates::new(&log, seed).only(log.position());
        assert!(last.map(|state| state.images()[0].clone()).eq([plain.image()]));
    }
}

#[test]
fn the_states_follow_from_log_and_seed_and_their_number_is_bounded() {
    let log = FaultLog::new();
    let devices = [log.add("a", Image::default()), log.add("b", Image::default())];
    let mut random = Random::new(7);
    for _ in 0..60 {
        let device = &devices[random.below(2) as usize];
        step(&mut random, &**device, &MemoryDevice::default());
    }
    let all =
        |seed| CrashStates::new(&log, seed).each(8).map(|state| (state.cut, state.to_string()));
    let once: Vec<_> = all(3).collect();
    assert!(all(3).eq(once.iter().cloned()), "twice the same");
    assert!(all(4).ne(once.iter().cloned()), "another seed, other states");
    assert!(once.len() < 50 * log.position(), "{} states", once.len());
    let (cut, _) = once[once.len() / 2];
    let alone = CrashStates::new(&log, 3).each(8).only(cut).map(|state| (cut, state.to_string()));
    assert!(alone.eq(once.iter().filter(|state| state.0 == cut).cloned()), "one cut alone");
    let names = CrashStates::new(&log, 3).only(cut).map(|state| state.to_string());
    assert_eq!(names.collect::<BTreeSet<_>>().len(), CrashStates::new(&log, 3).only(cut).count());
}

#[test]
fn more_changes_than_the_bound_are_sampled() {
    let (log, device) = device(&[]);
    for at in 0..500 {
        device.write_at(&[1], at).unwrap();
    }
    let states: Vec<_> = CrashStates::new(&log, 9).each(10).random(4).only(1000).collect();
    assert!((25..60).contains(&states.len()), "{}", states.len());
    let kept =
        |state: &CrashState| state.image(&device).to_vec().iter().filter(|b| **b == 1).count();
    let kept: BTreeSet<_> = states.iter().map(kept).collect();
    assert!(kept.is_superset(&BTreeSet::from([0, 1, 499, 500])), "{kept:?}");
    let few: Vec<_> = CrashStates::new(&log, 9).at_most(5).only(1000).collect();
    let sizes: Vec<_> = few.iter().map(|state| state.image(&device).size()).collect();
    assert_eq!((sizes.len(), &sizes[..2]), (5, &[0, 500][..]));
}
