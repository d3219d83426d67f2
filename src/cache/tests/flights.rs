//! What happens while a fetch is in the air: joining (C5), detaching (J7), failing, panicking.
#![cfg(test)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread::JoinHandle;

use super::*;

#[test]
fn a_panicking_fetch_leaves_nothing_behind() {
    let rig = rig(300);
    rig.disk.panics.store(true, Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| rig.read(0, 5 * 512))).is_err());
    rig.disk.panics.store(false, Relaxed);
    rig.good(0, 5 * 512);
}

/// What a gated fetch does once it may go on.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Good,
    Bad,
    Panic,
}

/// A source whose fetch reads the bytes, reports, and returns only when told to.
struct Gate {
    rig: Arc<Rig>,
    end: End,
    entered: Mutex<mpsc::Sender<()>>,
    leave: Mutex<mpsc::Receiver<()>>,
}

impl Fetch for Gate {
    fn fetch(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let result = self.rig.disk.fetch(offset, buf);
        self.entered.lock().send(()).unwrap();
        self.leave.lock().recv().unwrap();
        match self.end {
            End::Good => result,
            End::Bad => Err(Error::new(Kind::Io, "read", "bad sector")),
            End::Panic => panic!("the source panics"),
        }
    }
}

/// A fetch of blocks 0..8 in the air.
struct InAir {
    leave: mpsc::Sender<()>,
    leader: JoinHandle<std::thread::Result<Result<Vec<u8>>>>,
}

impl InAir {
    fn start(rig: &Arc<Rig>, end: End) -> InAir {
        let (entered, enter) = mpsc::channel();
        let (leave, left) = mpsc::channel();
        let (entered, left) = (Mutex::new(entered), Mutex::new(left));
        let gate = Gate { rig: Arc::clone(rig), end, entered, leave: left };
        let leader = std::thread::spawn(move || {
            let rig = &gate.rig;
            let plan = rig.plan(0, 8 * BLOCK);
            let mut out = vec![0; 8 * BLOCK];
            catch_unwind(AssertUnwindSafe(|| {
                rig.cache.read(&rig.dev, &plan, 0, &mut out, 0, &gate).map(|()| out)
            }))
        });
        enter.recv().unwrap();
        InAir { leave, leader }
    }

    fn land(self) -> std::thread::Result<Result<Vec<u8>>> {
        self.leave.send(()).unwrap();
        self.leader.join().unwrap()
    }
}

fn reader(rig: &Arc<Rig>, offset: usize, len: usize) -> JoinHandle<Result<Vec<u8>>> {
    let rig = Arc::clone(rig);
    std::thread::spawn(move || rig.read(offset, len))
}

fn wait_for(condition: impl Fn() -> bool) {
    for _ in 0..5000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("waited in vain");
}

#[test]
fn readers_of_a_cold_block_cause_one_device_read() {
    let rig = Arc::new(rig(300));
    let air = InAir::start(&rig, End::Good);
    let readers: Vec<_> = (0..6).map(|i| reader(&rig, i * BLOCK + 5, 600)).collect();
    wait_for(|| rig.counters().hits == 12);
    assert!(air.land().unwrap().unwrap() == rig.disk.slice(0, 8 * BLOCK));
    for (i, reader) in readers.into_iter().enumerate() {
        assert!(reader.join().unwrap().unwrap() == rig.disk.slice(i * BLOCK + 5, 600));
    }
    assert_eq!((rig.reads(), rig.counters().misses), (1, 8));
    assert_eq!(rig.cache.blocks(None).iter().map(|info| info.count).sum::<u32>(), 12);
}

#[test]
fn waiters_share_the_error_of_their_run_and_retry_that_of_a_larger_one() {
    let rig = Arc::new(rig(300));
    let air = InAir::start(&rig, End::Bad);
    let same = reader(&rig, 0, 8 * BLOCK);
    let part = reader(&rig, BLOCK, BLOCK);
    wait_for(|| rig.counters().hits == 9);
    assert_eq!(air.land().unwrap().unwrap_err().errno(), libc::EIO);
    let error = same.join().unwrap().unwrap_err();
    assert_eq!((error.errno(), error.to_string().as_str()), (libc::EIO, "read bad sector: Io"));
    assert!(part.join().unwrap().unwrap() == rig.disk.slice(BLOCK, BLOCK));
    assert_eq!(rig.cache.snapshot().1, 1);
}

#[test]
fn waiters_of_a_panicking_fetch_get_an_error() {
    let rig = Arc::new(rig(300));
    let air = InAir::start(&rig, End::Panic);
    let waiter = reader(&rig, 0, 8 * BLOCK);
    wait_for(|| rig.counters().hits == 8);
    assert!(air.land().is_err());
    assert_eq!(waiter.join().unwrap().unwrap_err().kind, Kind::Internal);
    rig.good(0, 8 * BLOCK);
}

#[test]
fn a_write_during_a_fetch_detaches_it() {
    let rig = Arc::new(rig(300));
    let old = rig.disk.slice(0, 8 * BLOCK);
    let air = InAir::start(&rig, End::Good);
    let joined = reader(&rig, 0, 8 * BLOCK);
    wait_for(|| rig.counters().hits == 8);
    // A part of block 2, all of block 4 (inserted), block 6 invalidated.
    for (offset, data) in [(2 * BLOCK + 9, vec![1; 20]), (4 * BLOCK, vec![2; BLOCK])] {
        rig.disk.write(offset, &data);
        rig.cache.update(&rig.dev, offset as u64, &data, true, SIZE as u64);
    }
    rig.disk.write(6 * BLOCK, &[3; BLOCK]);
    let block6 = Extent { offset: 6 * BLOCK as u64 + 1, len: 1 };
    rig.cache.invalidate(&rig.dev, block6);
    // Who comes now sees the new bytes, and waits for nobody where they changed.
    for block in [2, 4, 6] {
        rig.good(block * BLOCK, BLOCK);
    }
    let late = reader(&rig, 0, 8 * BLOCK);
    wait_for(|| rig.counters().hits == 8 + 1 + 8);
    // The leader and who had joined before see the old ones.
    assert!(air.land().unwrap().unwrap() == old);
    assert!(joined.join().unwrap().unwrap() == old);
    assert!(late.join().unwrap().unwrap() == rig.disk.slice(0, 8 * BLOCK));
    let before = rig.reads();
    rig.good(0, 8 * BLOCK);
    assert_eq!(rig.reads(), before);
}

#[test]
fn a_truncate_or_clear_during_a_fetch_detaches_it() {
    for clear in [false, true] {
        let rig = Arc::new(rig(300));
        let air = InAir::start(&rig, End::Good);
        match clear {
            true => rig.cache.clear(),
            false => rig.cache.set_size(&rig.dev, 100),
        }
        air.land().unwrap().unwrap();
        assert_eq!(rig.cache.snapshot().1, 0);
    }
}
