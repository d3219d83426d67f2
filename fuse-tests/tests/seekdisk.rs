//! The latency device itself, without our product: its model's times, its depth, its bytes, and
//! what threads and io_uring reach on an ext4 over it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fuse_tests::bench::fio::{Job, fio};
use fuse_tests::loopfs::LoopFs;
use fuse_tests::paths::Scratch;
use fuse_tests::report::{have_fuse, have_root};
use fuse_tests::seekdisk::{ARMS, STRIPE, SeekDisk, service};
use fuse_tests::tools::pattern;
use fuse_tests::watch::Watchdog;

const MIB: u64 = 1 << 20;

fn disk(scratch: &Scratch, bytes: u64) -> SeekDisk {
    SeekDisk::start(Path::new(env!("CARGO_BIN_EXE_seekdisk")), scratch.path(), bytes).unwrap()
}

fn open(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

#[test]
fn one_request_at_a_time_takes_the_time_of_the_model() {
    if !have_fuse() {
        return;
    }
    let _watchdog = Watchdog::new(Duration::from_secs(60));
    let scratch = Scratch::new("seek-one");
    let disk = disk(&scratch, 256 * MIB);
    let file = open(&disk.disk());
    let block = pattern(1, 4096);
    let arm = 256 * MIB / ARMS;
    let mut head = 0;
    let (mut model, mut took) = (Duration::ZERO, Duration::ZERO);
    for n in 0..40u64 {
        // All on arm 3, back and forth.
        let stripe = (n * 37 % (arm / STRIPE)) * ARMS + 3;
        let from = stripe / ARMS * STRIPE;
        model += service(head, from, arm);
        head = from + 4096;
        let start = Instant::now();
        file.write_all_at(&block, stripe * STRIPE).unwrap();
        took += start.elapsed();
        let mut back = vec![0; 4096];
        model += service(head, from, arm);
        let start = Instant::now();
        file.read_exact_at(&mut back, stripe * STRIPE).unwrap();
        took += start.elapsed();
        assert!(back == block);
    }
    assert!(took >= model, "{took:?} for {model:?}");
    assert!(took < model.mul_f64(1.5), "{took:?} for {model:?}");
    let (_, arms) = disk.arms().unwrap();
    let ops: Vec<u64> = arms.iter().map(|arm| arm.ops as u64).collect();
    assert_eq!(ops, [0, 0, 0, 80, 0, 0, 0, 0]);
}

#[test]
fn sixty_four_threads_keep_every_arm_busy() {
    if !have_fuse() {
        return;
    }
    let _watchdog = Watchdog::new(Duration::from_secs(60));
    let scratch = Scratch::new("seek-deep");
    let disk = disk(&scratch, 256 * MIB);
    let next = AtomicUsize::new(0);
    const WRITES: usize = 3000;
    let before = disk.arms().unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                let file = open(&disk.disk());
                let block = pattern(2, 4096);
                loop {
                    let n = next.fetch_add(1, Relaxed);
                    if n >= WRITES {
                        break;
                    }
                    let at = (n as u64 * 40_503) % (256 * MIB / 4096) * 4096;
                    file.write_all_at(&block, at).unwrap();
                }
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let after = disk.arms().unwrap();
    let depths = SeekDisk::depths(&before, &after);
    let depth: f64 = depths.iter().sum();
    let rate = WRITES as f64 / seconds;
    // Random and unsorted: 2 ms + a third of 8 ms each, eight arms.
    let model = ARMS as f64 / 0.004_667;
    println!("depth {depth:.1} {depths:.1?}, {rate:.0}/s, model {model:.0}/s");
    assert!(depth >= 50.0, "{depth} {depths:?}");
    assert!(rate > 0.6 * model && rate < 1.5 * model, "{rate}/s, model {model}/s");
}

#[test]
fn io_uring_reaches_the_depth_on_an_ext4_over_it() {
    if !have_fuse() || !have_root("a loop device") {
        return;
    }
    let _watchdog = Watchdog::new(Duration::from_secs(90));
    let scratch = Scratch::new("seek-ext4");
    let disk = disk(&scratch, 512 * MIB);
    let fs = LoopFs::make(&disk.disk(), &scratch.path().join("on-it")).unwrap();
    fs.device().set_scheduler("none").unwrap();
    let file = fs.path().join("image");
    fs::write(&file, pattern(3, 300 << 20)).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    let (before, arms) = (fs.device().stat().unwrap(), disk.arms().unwrap());
    let (rw, block, seconds) = ("randwrite", "4k", Some(3.0));
    let job = Job { rw, block, direct: true, depth: 64, jobs: 1, size: 300 * MIB, seconds };
    let iops = fio(&file, &job).unwrap().iops;
    let stat = fs.device().stat().unwrap().since(before);
    let depths = SeekDisk::depths(&arms, &disk.arms().unwrap());
    // fio's own start and end are in the window, so the peak is higher than this mean.
    let depth: f64 = depths.iter().sum();
    println!("{iops:.0}/s, depth {depth:.1} {depths:.1?}, {:.0} writes", stat.writes);
    assert!(iops > 900.0, "{iops}/s");
    assert!(depth >= 45.0, "{depth} {depths:?}");
    assert!(stat.writes >= iops * 2.0, "{stat:?}");
}
