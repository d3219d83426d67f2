//! A boot over a source that takes 5 ms for every read, twice: what the cache is for.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use super::super::Res;
use super::super::contender::Mount;
use super::super::duel::Duel;
use super::super::report::Row;
use super::{Env, write_random};
use crate::slow::SlowSource;

const DELAY: Duration = Duration::from_millis(5);
const SIZE: u64 = 48 << 20;
const DISKS: usize = 3;

/// One read of the boot.
struct Step {
    disk: usize,
    offset: u64,
    len: usize,
}

/// The loader's trace of a raidz boot where the examples have it (its 512-byte blocks taken as
/// 4 KiB ones), else a made-up boot: a superblock, metadata all over, a kernel and an initrd.
fn steps(limit: usize) -> Vec<Step> {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/traces/raidz3_boot.trace");
    let parse = |line: &str| -> Option<Step> {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        let (unit, first, blocks) = (next()?, next()?, next()?);
        let offset = (first * 4096) % (SIZE - (1 << 20));
        let len = (blocks * 4096).clamp(4096, 128 << 10) as usize;
        Some(Step { disk: unit as usize % DISKS, offset, len })
    };
    match fs::read_to_string(trace) {
        Ok(text) => {
            text.lines().filter(|l| !l.starts_with('#')).filter_map(parse).take(limit).collect()
        }
        Err(_) => made_up(limit),
    }
}

fn made_up(limit: usize) -> Vec<Step> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    };
    let step = |n: usize| {
        let len = [4096, 4096, 8192, 16384, 65536, 131_072][random(6) as usize];
        let offset = random((SIZE - len as u64) / 4096) * 4096;
        Step { disk: n % DISKS, offset, len }
    };
    (0..limit).map(step).collect()
}

fn name(disk: usize) -> String {
    format!("disk{disk}.img")
}

/// O_DIRECT, so that each read comes to the daemon; FUSE asks for no alignment of the buffer.
fn read_all(mountpoint: &Path, steps: &[Step]) -> Res<f64> {
    let open = |disk: usize| {
        let mut options = fs::OpenOptions::new();
        options.read(true).custom_flags(libc::O_DIRECT).open(mountpoint.join(name(disk)))
    };
    let disks: Vec<File> = (0..DISKS).map(open).collect::<Result<_, _>>()?;
    let mut buffer = vec![0; 128 << 10];
    let start = Instant::now();
    for step in steps {
        disks[step.disk].read_exact_at(&mut buffer[..step.len], step.offset)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn boot_twice(env: &Env, steps: &[Step]) -> Res<(f64, f64)> {
    let (images, slow_at) = (env.dir("slow-images")?, env.dir("slow-source")?);
    let source = SlowSource::mount(&images, &slow_at, DELAY)?;
    let mount = Mount::ours(&slow_at, &env.dir("slow-mount")?, "")?;
    let first = read_all(mount.path(), steps)?;
    let before = source.reads();
    let second = read_all(mount.path(), steps)?;
    let reads = source.reads() - before;
    mount.unmount()?;
    drop(source);
    if reads > 0 {
        eprintln!("slow: the second boot read {reads} times from the source");
    }
    Ok((first, second))
}

/// The speed of the second boot against the first.
pub fn boot(env: &Env) -> Res<Vec<Row>> {
    let steps = steps(200);
    let images = env.dir("slow-images")?;
    for disk in 0..DISKS {
        write_random(&images.join(name(disk)), SIZE)?;
    }
    let mut pairs = Vec::new();
    for _ in 0..env.rounds {
        let (first, second) = boot_twice(env, &steps)?;
        pairs.push((1.0 / second, 1.0 / first));
    }
    Ok(vec![Row::of("200-read boot, 5 ms a read: second", "1/s", "first", Duel::of(&pairs), 20.0)])
}
