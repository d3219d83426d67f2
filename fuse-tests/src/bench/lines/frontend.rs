//! What applications feel of writeback: the p99 of a write while dirty data goes home, and one
//! large sequential write.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use super::super::Res;
use super::super::duel::{duel, median};
use super::super::fio::{Job, more};
use super::super::report::{Need, Row};
use super::Env;
use super::rig::{Journaled, Rig, blocks, image, scatter};

/// Writes a second of the measured job: enough for a p99, too few to fill the journal.
const RATE: u32 = 500;

/// The p99 in microseconds of 4 KiB random writes.
fn percentile(file: &Path, size: u64, seconds: f64) -> Res<f64> {
    let (rw, block) = ("randwrite", "4k");
    let job = Job { rw, block, direct: false, depth: 1, jobs: 1, size, seconds: Some(seconds) };
    let options = [format!("--filename={}", file.display()), format!("--rate_iops={RATE}")];
    let side = more(&options, &job)?;
    let nanoseconds = side["clat_ns"]["percentile"]["99.000000"].as_f64();
    Ok(nanoseconds.ok_or("fio printed no p99")? / 1000.0)
}

/// Quiet and flushing, in microseconds.
fn both(env: &Env, rig: &Rig, seconds: f64) -> Res<(f64, f64)> {
    let source = rig.dir("p99")?;
    let size = env.scaled(1 << 30);
    image(&source.join("image"), size, true)?;
    let journaled = Journaled::start(env, &source, ",journal_size=1G,cache=1G")?;
    journaled.set("writeback_running=0")?;
    let quiet = percentile(&journaled.at("image"), size, seconds)?;
    // More than the device takes in that time.
    let count = if env.quick { 4096 } else { 65_536 };
    scatter(&journaled.at("image"), &blocks(size, count.min(size / 8192), 11))?;
    journaled.set("writeback_running=1")?;
    let mut flush = journaled.flush()?.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let busy = percentile(&journaled.at("image"), size, seconds);
    let left = journaled.number("dirty_bytes");
    let _ = flush.kill();
    flush.wait()?;
    if left? < 4096 * 64 {
        eprintln!("wb-p99: the flush ended before the measurement did");
    }
    journaled.abandon()?;
    Ok((quiet, busy?))
}

/// 4 KiB random writes, journal on one device, image on the latency device.
pub fn p99(env: &Env) -> Res<Vec<Row>> {
    let rig = Rig::latency(env, env.scaled(1 << 30) + (256 << 20))?;
    let seconds = if env.quick { 1.0 } else { 30.0 };
    let (mut quiet, mut busy) = (Vec::new(), Vec::new());
    for _ in 0..env.rounds.min(3) {
        let (one, other) = both(env, &rig, seconds)?;
        println!("    4 KiB write p99: quiet {one:.0} us, flushing {other:.0} us");
        quiet.push(one);
        busy.push(other);
    }
    let quiet = median(quiet);
    let most = (quiet * 1.3).max(quiet + 200.0);
    Ok(vec![Row::alone("write p99 while flushing", "us", median(busy), Need::AtMost(most))])
}

/// MB/s of a new file written in steps of 1 MiB and synced.
fn write_whole(path: &Path, size: u64) -> Res<f64> {
    let bytes = crate::tools::pattern(3, 1 << 20);
    let start = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..size >> 20 {
        file.write_all(&bytes)?;
    }
    file.sync_all()?;
    let speed = size as f64 / 1e6 / start.elapsed().as_secs_f64();
    drop(file);
    fs::remove_file(path)?;
    Ok(speed)
}

/// A stream, so written around the journal, against straight ext4.
pub fn sequential(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(1 << 30);
    let (source, straight) = (env.dir("seq-source")?, env.dir("seq-straight")?);
    let journaled = Journaled::start(env, &source, "")?;
    let result = duel(
        env.rounds,
        || write_whole(&journaled.at("stream"), size),
        || write_whole(&straight.join("stream"), size),
    )?;
    journaled.unmount()?;
    Ok(vec![Row::of("1 GiB sequential write + fsync", "MB/s", "source", result, 0.6)])
}
