//! What must never be answered by success (J9, J11).

use rustix::io::Errno;

use super::*;
use crate::device::Range;
use crate::device::fault::{Call, Fault};
use crate::error::Kind;

/// A journal of five durable writes, the third of which rots; its files as they were.
fn broken() -> (Kit, FaultLog, Arc<FaultDevice>) {
    let kit = Kit::small(&[&[1; 20_000]]);
    let mut third = 0;
    for n in 0..5 {
        kit.write(0, n * 2000, &[10 + n as u8; 2000]);
        kit.device(0).sync(true).unwrap();
        if n == 2 {
            let image = kit.journal.image().to_vec();
            let at = image.windows(2000).position(|run| run.iter().all(|byte| *byte == 12));
            third = at.unwrap();
        }
    }
    let log = FaultLog::new();
    let mut image = kit.journal.image();
    image.write(&[0xff], third as u64 + 1000);
    let journal = log.add("journal", image);
    (kit, log, journal)
}

#[test]
fn j9_behind_a_corrupt_record_data_is_shown_and_nothing_is_written() {
    let (_, log, journal) = broken();
    let image = log.add("0", Image::from(&[1; 20_000][..]));
    let before = journal.image();
    let kit = Kit::open(log.clone(), journal.clone(), vec![file(image.clone())], &Setup::default());
    let corruption = kit.report.corruption.expect("it is told where");
    assert!(corruption.durable_seq >= corruption.seq);
    let begun = log.position();
    let seen = kit.read(0);
    assert_eq!(seen[..4000], [[10; 2000], [11; 2000]].concat(), "what stands before it");
    assert_eq!(seen[4000..], [1; 16_000]);
    let device = kit.device(0);
    let errors = [
        device.write(0, &[9; 100]).unwrap_err(),
        device.write(19_000, &[9; 100]).unwrap_err(),
        device.set_size(100).unwrap_err(),
        device.change_range(Range::Punch, 0, 4096).unwrap_err(),
        device.change_range(Range::AllocateGrow, 0, 40_000).unwrap_err(),
    ];
    assert!(errors.iter().all(|error| matches!(error.kind, Kind::Io | Kind::ReadOnly)));
    (0..200).for_each(|which| kit.store.run_by_hand(true, which));
    kit.store.stop().unwrap();
    assert_eq!(log.position(), begun, "nothing was written anywhere");
    assert!(journal.image() == before && image.image().to_vec() == [1; 20_000]);
}

#[test]
fn j9_a_clean_file_is_not_written_behind_a_corrupt_record_either() {
    let (_, log, journal) = broken();
    let images = [log.add("0", Image::from(&[1; 20_000][..])), log.add("1", Image::zeros(5000))];
    let files = images.iter().cloned().map(file).collect();
    let kit = Kit::open(log, journal, files, &Setup::default());
    for mode in CacheMode::ALL {
        kit.store.set_cache_mode(mode);
        let error = kit.device(1).write(0, &[9; 100]).unwrap_err();
        assert!(matches!(error.kind, Kind::Io | Kind::ReadOnly), "{mode:?}: {error}");
    }
    assert_eq!(images[1].image().to_vec(), [0; 5000]);
}

#[test]
fn j11_a_failed_image_sync_is_rewritten_from_the_journal() {
    for dropping in [false, true] {
        let kit = Kit::small(&[&[1; 20_000]]);
        let image = image_of(&kit, 0);
        kit.write(0, 0, &[2; 9000]);
        kit.device(0).set_size(30_000).unwrap();
        kit.write(0, 25_000, &[3; 1000]);
        kit.device(0).set_size(26_500).unwrap();
        let fault = Fault::fail(Call::Sync, Errno::IO);
        image.inject(if dropping { fault.dropping() } else { fault });
        let model = kit.read(0);
        kit.drain();
        assert_eq!(kit.read(0), model);
        // What a power cut now leaves at least.
        let at = kit.log.position();
        let state = crate::device::fault::CrashStates::new(&kit.log, 1).only(at).next().unwrap();
        assert!(state.images()[1].to_vec() == model, "dropping: {dropping}");
    }
}

#[test]
fn j11_a_failed_journal_sync_is_eio_for_the_waiter_and_the_store_is_read_only() {
    let kit = Kit::small(&[&[1; 20_000], &[2; 5000]]);
    kit.write(0, 0, &[3; 3000]);
    kit.device(0).sync(true).unwrap();
    kit.write(0, 3000, &[4; 3000]);
    let model = kit.read(0);
    kit.journal.inject(Fault::fail(Call::Sync, Errno::IO).dropping());
    assert_eq!(kit.device(0).sync(true).unwrap_err().kind, Kind::Io);
    assert_eq!(kit.device(0).sync(true).unwrap_err().kind, Kind::Io, "not only once");
    for number in [0, 1] {
        assert!(kit.device(number).write(0, &[9; 10]).is_err());
        assert!(kit.device(number).set_size(0).is_err());
    }
    // What was durable is still there; what was not is right or EIO, never other bytes.
    kit.store.set_cache_mode(CacheMode::None);
    let device = kit.device(0);
    for at in (0..20_000).step_by(500) {
        let plan = device.plan_read(at as u64, 500);
        let mut out = vec![0xee; plan.len()];
        match device.read(&plan, &mut out) {
            Ok(()) => assert_eq!(out, model[at..at + 500]),
            Err(error) => {
                assert!((3000..6000).contains(&at), "{at}");
                assert!(matches!(error.kind, Kind::Io | Kind::Corrupt));
            }
        }
    }
    assert_eq!(read(kit.device(1)).unwrap(), [2; 5000], "others are read");
}

/// Writeback's sync takes the error of a change that went around the journal: fsync must tell it.
#[test]
fn j11_an_error_that_writeback_heard_is_told_to_the_next_fsync() {
    let kit = Kit::small(&[&[1; 20_000]]);
    let image = image_of(&kit, 0);
    kit.device(0).sync(true).unwrap();
    kit.store.set_cache_mode(CacheMode::Writethrough);
    kit.device(0).write(0, &[2; 4096]).unwrap();
    kit.store.set_cache_mode(CacheMode::Writeback);
    kit.write(0, 8192, &[3; 4096]);
    image.inject(Fault::fail(Call::Sync, Errno::IO).dropping());
    kit.drain();
    assert_eq!(kit.device(0).sync(true).unwrap_err().kind, Kind::Io);
    assert!(kit.device(0).sync(true).is_ok());
}

/// Two callers sync at once: the second must not return before what the first one syncs is
/// durable, nor succeed when that fails.
#[test]
fn two_fsyncs_at_once_share_no_false_success() {
    let kit = Kit::small(&[&[1; 20_000]]);
    let image = image_of(&kit, 0);
    kit.store.set_cache_mode(CacheMode::Writethrough);
    kit.device(0).write(0, &[2; 4096]).unwrap();
    let gate = image.hang(Call::Sync);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| kit.device(0).sync(true));
        assert!(gate.wait_for(1, std::time::Duration::from_secs(20)));
        let second = scope.spawn(|| kit.device(0).sync(true));
        // It waits; there is no event to wait for.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!second.is_finished(), "the bytes are not durable yet");
        gate.release();
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
    });
}

fn image_of(kit: &Kit, number: usize) -> Arc<FaultDevice> {
    kit.images[number].clone()
}
