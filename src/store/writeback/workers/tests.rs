//! Jobs over real files, over devices that fail and hang, and over pipes that stand for both.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::*;
use crate::config::DirectIo;
use crate::device::fault::{Call, Fault, FaultLog, Random};
use crate::device::{BlockDevice, FileDevice, Image, MemoryDevice, Range, RawTarget};
use crate::error::{Error, Kind};

/// How long a test waits for what must happen soon.
const SOON: Duration = Duration::from_secs(60);

/// Both ways to write.
fn both() -> impl Iterator<Item = Workers> {
    [false, true].into_iter().map(|no_uring| Workers::start(no_uring).unwrap())
}

fn file(path: &Path) -> Arc<FileDevice> {
    let path = path.to_path_buf();
    let opener = move |flags| rustix::fs::open(&path, flags, Mode::empty());
    let device = FileDevice::new(Box::new(opener), DirectIo::Auto);
    // From then on there is a raw target.
    device.write_home(&[], 0).unwrap();
    Arc::new(device)
}

type Outcome = (usize, std::result::Result<Vec<u8>, Kind>);

/// A job that writes `bytes` and reports as `number`.
fn job(
    device: &Arc<impl BlockDevice + 'static>,
    offset: u64,
    bytes: Vec<u8>,
    number: usize,
    outcomes: &Sender<Outcome>,
) -> Task {
    let outcomes = outcomes.clone();
    Task::Write(Job {
        device: device.clone(),
        offset,
        len: bytes.len(),
        fill: Box::new(move |buffer| {
            buffer.copy_from_slice(&bytes);
            Ok(())
        }),
        done: Box::new(move |result, written| {
            let outcome = result.map(|()| written.to_vec()).map_err(|error| error.kind);
            outcomes.send((number, outcome)).unwrap();
        }),
    })
}

fn next(outcomes: &Receiver<Outcome>) -> Outcome {
    outcomes.recv_timeout(SOON).expect("an outcome")
}

#[test]
fn jobs_of_any_shape_are_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for workers in both() {
        let mut expected = vec![0u8; 3 << 20];
        std::fs::write(&path, &expected).unwrap();
        let device = file(&path);
        let shapes = [
            (0, 4096),
            (8192, 65536),
            (100_001, 50),
            (200_000, 20_000),
            (300_000 - 1, 4096),
            (1 << 20, 1 << 20),
            ((2 << 20) + 5, (1 << 20) - 10),
            (500_000, 0),
        ];
        let (sender, outcomes) = channel();
        for (number, (offset, len)) in shapes.into_iter().enumerate() {
            let bytes = vec![number as u8 + 1; len];
            expected[offset..offset + len].copy_from_slice(&bytes);
            workers.submit(job(&device, offset as u64, bytes, number, &sender));
        }
        workers.stop();
        drop(sender);
        let mut told: Vec<Outcome> = outcomes.iter().collect();
        told.sort_by_key(|(number, _)| *number);
        assert_eq!(told.len(), shapes.len());
        for ((number, bytes), (_, len)) in told.into_iter().zip(shapes) {
            assert_eq!(bytes.unwrap(), vec![number as u8 + 1; len]);
        }
        assert!(std::fs::read(&path).unwrap() == expected, "uring {}", workers.uses_uring());
    }
}

#[test]
fn random_jobs_read_back() {
    const SIZE: u64 = 4 << 20;
    const JOBS: usize = 500;
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let dir = tempfile::tempdir().unwrap();
    for workers in both() {
        let mut random = Random::new(seed);
        let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
        let mut expected = vec![vec![0u8; SIZE as usize]; paths.len()];
        let devices = paths.each_ref().map(|path| {
            std::fs::write(path, vec![0; SIZE as usize]).unwrap();
            file(path)
        });
        let (sender, outcomes) = channel();
        // What overlaps, also by page, is ordered by the caller (J6).
        let mut flying: HashMap<usize, (usize, u64, u64)> = HashMap::new();
        let mut told = [false; JOBS];
        let mut finish = |flying: &mut HashMap<usize, (usize, u64, u64)>| {
            let (number, result) = next(&outcomes);
            assert!(result.is_ok() && !std::mem::replace(&mut told[number], true));
            flying.remove(&number);
        };
        for number in 0..JOBS {
            let target = random.below(paths.len() as u64) as usize;
            let longest = if random.below(10) == 0 { 300_000 } else { 20_000 };
            let mut offset = random.below(SIZE);
            let mut len = (1 + random.below(longest)).min(SIZE - offset);
            if random.below(2) == 0 {
                offset -= offset % 4096;
                len = len.next_multiple_of(4096).min(SIZE - offset);
            }
            let (first, last) = (offset / 4096, (offset + len - 1) / 4096);
            while flying.values().any(|f| f.0 == target && f.1 <= last && first <= f.2)
                || flying.len() >= 64
            {
                finish(&mut flying);
            }
            flying.insert(number, (target, first, last));
            let bytes: Vec<u8> = (0..len).map(|i| (number as u64 * 7 + i) as u8).collect();
            expected[target][offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
            workers.submit(job(&devices[target], offset, bytes, number, &sender));
        }
        while !flying.is_empty() {
            finish(&mut flying);
        }
        assert!(told.iter().all(|told| *told));
        for (path, expected) in paths.iter().zip(&expected) {
            assert!(std::fs::read(path).unwrap() == *expected, "seed {seed} {}", path.display());
        }
    }
}

#[test]
fn errors_and_panics_are_told_once_and_cost_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 65536]).unwrap();
    for workers in both() {
        let device = file(&path);
        let (sender, outcomes) = channel();
        // More than there are threads.
        for number in 0..100 {
            let Task::Write(mut job) = job(&device, 0, vec![1; 4096], number, &sender) else {
                unreachable!()
            };
            job.fill = match number % 2 {
                0 => Box::new(|_| Err(Error::new(Kind::Corrupt, "read", ""))),
                _ => Box::new(|_| panic!("as intended")),
            };
            workers.submit(Task::Write(job));
        }
        for _ in 0..100 {
            let (number, result) = next(&outcomes);
            let expected = if number % 2 == 0 { Kind::Corrupt } else { Kind::Internal };
            assert_eq!(result, Err(expected));
        }
        for _ in 0..100 {
            workers.submit(Task::Write(Job {
                device: device.clone(),
                offset: 0,
                len: 4096,
                fill: Box::new(|_| Ok(())),
                done: Box::new(|_, _| panic!("as intended")),
            }));
        }
        workers.submit(job(&device, 4096, vec![2; 4096], 7, &sender));
        assert_eq!(next(&outcomes), (7, Ok(vec![2; 4096])));
        workers.stop();
        assert!(outcomes.try_recv().is_err());
    }
}

#[test]
fn a_failing_device_is_told_its_error_and_the_bytes() {
    for workers in both() {
        let device = FaultLog::new().add("d", Image::zeros(8192));
        device.inject(Fault::fail(Call::Write, Errno::NOSPC));
        let (sender, outcomes) = channel();
        workers.submit(job(&device, 0, vec![1; 4096], 0, &sender));
        assert_eq!(next(&outcomes), (0, Err(Kind::NoSpace)));
        workers.submit(job(&device, 4096, vec![1; 4096], 1, &sender));
        assert_eq!(next(&outcomes).1, Ok(vec![1; 4096]));
        assert_eq!(device.image().to_vec(), [[0; 4096], [1; 4096]].concat());
    }
}

#[test]
fn a_hanging_device_stops_no_other_and_no_call() {
    for workers in both() {
        let hanging = FaultLog::new().add("d", Image::zeros(1 << 20));
        let gate = hanging.hang(Call::Write);
        let fine = Arc::new(MemoryDevice::new(Image::zeros(1 << 20)));
        let (sender, outcomes) = channel();
        for number in 0..32 {
            workers.submit(job(&hanging, number as u64 * 4096, vec![1; 4096], number, &sender));
        }
        assert!(gate.wait_for(32, SOON));
        for number in 100..200 {
            workers.submit(job(&fine, number as u64 * 10, vec![1; 10], number, &sender));
        }
        for _ in 0..100 {
            assert!(next(&outcomes).0 >= 100);
        }
        let (called, calls) = channel();
        workers.submit(Task::Call(Box::new(move || called.send(()).unwrap())));
        calls.recv_timeout(SOON).unwrap();
        drop(gate);
        for _ in 0..32 {
            assert!(next(&outcomes).1.is_ok());
        }
    }
}

#[test]
fn slow_calls_hold_up_no_write() {
    for workers in both() {
        let (gates, waits): (Vec<_>, Vec<_>) = (0..20).map(|_| channel::<()>()).unzip();
        let ran = Arc::new(AtomicUsize::new(0));
        for wait in waits {
            let ran = ran.clone();
            workers.submit(Task::Call(Box::new(move || {
                let _ = wait.recv();
                ran.fetch_add(1, SeqCst);
            })));
        }
        let device = Arc::new(MemoryDevice::new(Image::zeros(10)));
        let (sender, outcomes) = channel();
        workers.submit(job(&device, 0, vec![1; 10], 0, &sender));
        assert!(next(&outcomes).1.is_ok());
        assert_eq!(ran.load(SeqCst), 0);
        drop(gates);
        workers.stop();
        assert_eq!(ran.load(SeqCst), 20);
    }
}

#[test]
fn stop_finishes_what_is_queued_and_later_tasks_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 200 * 4096]).unwrap();
    for workers in both() {
        let device = file(&path);
        let (sender, outcomes) = channel();
        for number in 0..200 {
            workers.submit(job(&device, number as u64 * 4096, vec![3; 4096], number, &sender));
        }
        workers.stop();
        assert_eq!(outcomes.try_iter().filter(|(_, result)| result.is_ok()).count(), 200);
        assert!(std::fs::read(&path).unwrap() == vec![3; 200 * 4096]);
        workers.submit(job(&device, 0, vec![4; 4096], 0, &sender));
        assert!(outcomes.try_recv().unwrap().1 == Err(Kind::Busy));
        let (called, calls) = channel();
        workers.submit(Task::Call(Box::new(move || called.send(()).unwrap())));
        calls.try_recv().unwrap();
        workers.stop();
    }
}

#[test]
fn told_not_to_nobody_uses_a_ring() {
    assert!(!Workers::start(true).unwrap().uses_uring());
    let refused = crate::sys::uring::Ring::new(1).is_err();
    assert_eq!(Workers::start(false).unwrap().uses_uring(), !refused);
}

/// A device whose raw target is any descriptor; what the ring leaves goes to memory.
struct Raw {
    fd: Arc<OwnedFd>,
    align: u64,
    rest: MemoryDevice,
    home_writes: Mutex<Vec<(u64, usize)>>,
}

fn raw(fd: impl Into<OwnedFd>, align: u64) -> Arc<Raw> {
    let rest = MemoryDevice::new(Image::zeros(0));
    Arc::new(Raw { fd: Arc::new(fd.into()), align, rest, home_writes: Mutex::default() })
}

impl BlockDevice for Raw {
    fn prepare(&self, _write: bool) -> Result<()> {
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.rest.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.home_writes.lock().push((offset, data.len()));
        self.rest.write_at(data, offset)
    }

    fn size(&self) -> Result<u64> {
        self.rest.size()
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        self.rest.set_size(bytes)
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        self.rest.change_range(what, offset, len)
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.rest.seek(offset, hole)
    }

    fn raw(&self) -> Option<RawTarget> {
        Some(RawTarget { fd: self.fd.clone(), offset: 8192, align: self.align })
    }
}

fn ring_workers() -> Option<Workers> {
    Some(Workers::start(false).unwrap()).filter(Workers::uses_uring)
}

#[test]
fn a_short_write_goes_on_and_a_full_ring_target_stops_no_other() {
    let Some(workers) = ring_workers() else { return };
    // A pipe takes 64 KiB at a time and then waits for its reader.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let device = raw(writer, 4096);
    let (sender, outcomes) = channel();
    let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i / 4096) as u8).collect();
    workers.submit(job(&device, 0, bytes.clone(), 0, &sender));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 100 * 4096]).unwrap();
    let fine = file(&path);
    for number in 1..100 {
        workers.submit(job(&fine, number as u64 * 4096, vec![1; 4096], number, &sender));
    }
    for _ in 1..100 {
        let (number, result) = next(&outcomes);
        assert!(number > 0 && result.is_ok());
    }
    let middle = bytes.len() - bytes.len() % 4096;
    let mut got = vec![0; middle];
    reader.read_exact(&mut got).unwrap();
    assert!(got == bytes[..middle]);
    assert!(next(&outcomes) == (0, Ok(bytes.clone())));
    assert_eq!(*device.home_writes.lock(), [(middle as u64, bytes.len() - middle)]);
}

#[test]
fn what_a_ring_refuses_is_written_by_the_device() {
    let Some(workers) = ring_workers() else { return };
    let (sender, outcomes) = channel();
    // Aligned to 512, told that 1 will do: EINVAL.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 65536]).unwrap();
    let strict = rustix::fs::open(&path, OFlags::RDWR | OFlags::DIRECT, Mode::empty()).unwrap();
    let device = raw(strict, 1);
    workers.submit(job(&device, 100, vec![5; 10_001], 0, &sender));
    assert!(next(&outcomes) == (0, Ok(vec![5; 10_001])));
    assert_eq!(*device.home_writes.lock(), [(100, 10_001)]);
    assert!(device.rest.image().to_vec() == [vec![0; 100], vec![5; 10_001]].concat());
    // A real error is told as it is, and the ragged ends are left alone.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let device = raw(full, 4096);
    workers.submit(job(&device, 100, vec![5; 10_001], 1, &sender));
    assert_eq!(next(&outcomes), (1, Err(Kind::NoSpace)));
    assert!(device.home_writes.lock().is_empty());
}

#[test]
fn the_target_lies_at_its_offset() {
    let Some(workers) = ring_workers() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 65536]).unwrap();
    let device = raw(std::fs::OpenOptions::new().write(true).open(&path).unwrap(), 4096);
    let (sender, outcomes) = channel();
    workers.submit(job(&device, 4096, vec![6; 4096], 0, &sender));
    assert!(next(&outcomes).1.is_ok());
    let bytes = std::fs::read(&path).unwrap();
    assert!((0..65536).all(|i| (bytes[i] == 6) == (12288..16384).contains(&i)));
}

#[test]
fn no_wake_is_lost() {
    let Some(workers) = ring_workers() else { return };
    let file = tempfile::tempfile().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (workers, device) = (&workers, raw(file.try_clone().unwrap(), 4096));
            scope.spawn(move || {
                let (sender, outcomes) = channel();
                for turn in 0..1000 {
                    // One at a time: the rings sleep between most of them.
                    workers.submit(job(&device, thread << 20, vec![1; 4096], turn, &sender));
                    assert_eq!(next(&outcomes).0, turn);
                }
            });
        }
    });
}
