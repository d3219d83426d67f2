//! The lines of `make bench`, one function each; what they need stands in `Env`.

mod durable;
mod frontend;
mod memory;
mod names;
mod overlay;
mod reads;
mod recovery;
mod rig;
mod slow;
mod writeback;
mod writes;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::contender::Mount;
use super::fio::{Job, fio};
use super::report::Row;
use super::{Res, target_dir};

/// What every line works with.
pub struct Env {
    scratch: TempDir,
    /// Samples of each contender.
    pub rounds: usize,
    /// Seconds of one fio sample.
    pub seconds: f64,
    /// A smoke run: small files, few samples.
    pub quick: bool,
}

/// One line (or a few that share their set-up).
pub struct Line {
    /// What `bench NAME` selects it by.
    pub name: &'static str,
    /// One sentence for --list.
    pub what: &'static str,
    /// Measures it.
    pub run: fn(&Env) -> Res<Vec<Row>>,
}

use writeback::{latency, plain};

/// Every line, in the order of the table.
pub const ALL: &[Line] = &[
    Line { name: "null", what: "examples/null against bindfs", run: reads::null_itself },
    Line { name: "hot-1", what: "4 KiB random reads in our cache, one job", run: reads::hot_one },
    Line { name: "hot-2", what: "the same, two jobs", run: reads::hot_two },
    Line { name: "hot-32", what: "the same, one job, depth 32", run: reads::hot_deep },
    Line { name: "cold-32", what: "cold 4 KiB random reads, depth 32", run: reads::cold_random },
    Line { name: "cold-seq", what: "cold 1 MiB sequential reads", run: reads::cold_sequential },
    Line { name: "again", what: "48 MiB twice, 128 KiB O_DIRECT requests", run: reads::again },
    Line { name: "buffered", what: "buffered re-reads reach no daemon", run: reads::buffered },
    Line { name: "cp", what: "cp of 2 GiB and sync", run: writes::copy },
    Line { name: "write-4k", what: "4 KiB buffered writes", run: writes::small },
    Line { name: "names", what: "create, stat, ls -l, unlink", run: names::files },
    Line { name: "slow", what: "a boot over a source with 5 ms a read", run: slow::boot },
    Line { name: "memory", what: "memory with a full 256M cache", run: memory::full },
    Line { name: "wb-latency", what: "writeback, latency device, schedulers", run: latency },
    Line { name: "wb-loop", what: "writeback, plain loop device, schedulers", run: plain },
    Line { name: "wb-epoch", what: "the cost of an epoch's sync", run: writeback::epoch },
    Line { name: "wb-p99", what: "writes while flushing and quiet", run: frontend::p99 },
    Line { name: "wb-durable", what: "4 KiB writes + fdatasync, 1 job", run: durable::one },
    Line { name: "wb-durable8", what: "the same, 8 jobs on 8 files", run: durable::eight },
    Line { name: "wb-shared", what: "the same, 8 jobs on one file", run: durable::shared },
    Line { name: "wb-fast-journal", what: "the same, image on a slow device", run: durable::slow },
    Line { name: "wb-seq", what: "1 GiB sequential write + fsync", run: frontend::sequential },
    Line { name: "wb-recovery", what: "a mount with a dirty journal", run: recovery::large },
    Line { name: "ov-first", what: "the first write into a lower image", run: overlay::first },
    Line { name: "ov-random", what: "what random writes cost in the upper", run: overlay::random },
    Line { name: "ov-names", what: "small files, against fuse-overlayfs", run: overlay::names },
    Line { name: "ov-read", what: "reads of what is not changed", run: overlay::reads },
    Line { name: "ov-durable", what: "4 KiB writes + fdatasync", run: overlay::durable },
    Line { name: "wb-recovery64", what: "the same, records of 64 bytes", run: recovery::tiny },
];

impl Env {
    /// A scratch directory below target/, so on the disk that is measured.
    pub fn new(quick: bool) -> Res<Env> {
        let scratch = tempfile::Builder::new().prefix("bench-").tempdir_in(target_dir()?)?;
        let (rounds, seconds) = if quick { (1, 0.5) } else { (5, 2.0) };
        Ok(Env { scratch, rounds, seconds, quick })
    }

    /// `full`, or an eighth of it in a smoke run.
    pub fn scaled(&self, full: u64) -> u64 {
        if self.quick { full / 8 } else { full }
    }

    /// A new empty directory.
    pub fn dir(&self, name: &str) -> Res<PathBuf> {
        let path = self.scratch.path().join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// The source directory, with a file `name` of `size` random bytes on the disk in it. Files
    /// are kept until the end: several lines read the same one.
    pub fn file(&self, name: &str, size: u64) -> Res<PathBuf> {
        let path = self.dir("source")?.join(name);
        if fs::metadata(&path).is_ok_and(|m| m.len() == size) {
            return Ok(path);
        }
        write_random(&path, size)?;
        Ok(path)
    }

    /// Mounts ours over the source.
    pub fn ours(&self, options: &str) -> Res<Mount> {
        Mount::ours(&self.dir("source")?, &self.dir("ours")?, options)
    }

    /// Mounts bindfs over the source.
    pub fn bindfs(&self) -> Res<Mount> {
        Mount::bindfs(&self.dir("source")?, &self.dir("bindfs")?)
    }

    /// Mounts `examples/null`.
    pub fn null(&self) -> Res<Mount> {
        Mount::null(&self.dir("null")?)
    }
}

/// Bytes no disk can compress, different in every block.
fn write_random(path: &Path, size: u64) -> Res<()> {
    let mut random = File::open("/dev/urandom")?;
    let mut bytes = vec![0; 1 << 20];
    random.read_exact(&mut bytes)?;
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(path)?;
    let mut left = size;
    while left > 0 {
        for block in bytes.chunks_mut(4096) {
            let stamp = left.to_le_bytes();
            block[..8].copy_from_slice(&stamp);
        }
        let part = left.min(bytes.len() as u64) as usize;
        file.write_all(&bytes[..part])?;
        left -= part as u64;
    }
    Ok(file.sync_all()?)
}

/// Reads every block of a file once, in an order no stream detector takes for a stream.
fn warm(file: &Path, size: u64) -> Res<()> {
    let (rw, block) = ("randread", "128k");
    fio(file, &Job { rw, block, direct: true, depth: 1, jobs: 1, size, seconds: None })?;
    Ok(())
}
