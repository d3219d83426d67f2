//! Reads: hot in our cache against a daemon that only answers, cold against the source itself.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Instant;

use super::super::Res;
use super::super::duel::{Duel, duel};
use super::super::fio::{Job, fio};
use super::super::report::{Need, Row};
use super::{Env, warm};

const HOT_BYTES: u64 = 128 << 20;

fn random(env: &Env, jobs: u32, depth: u32, size: u64) -> Job {
    let seconds = Some(env.seconds);
    Job { rw: "randread", block: "4k", direct: true, depth, jobs, size, seconds }
}

/// The yardstick itself against a libfuse filesystem.
pub fn null_itself(env: &Env) -> Res<Vec<Row>> {
    let size = HOT_BYTES;
    let file = env.file("hot", size)?;
    io::copy(&mut File::open(&file)?, &mut io::sink())?;
    let (null, bindfs) = (env.null()?, env.bindfs()?);
    let job = random(env, 1, 1, size);
    let result = duel(
        env.rounds,
        || Ok(fio(&null.path().join("big"), &job)?.iops),
        || Ok(fio(&bindfs.path().join("hot"), &job)?.iops),
    )?;
    null.unmount()?;
    bindfs.unmount()?;
    Ok(vec![Row::of("null: 4 KiB random reads", "1/s", "bindfs", result, 1.3)])
}

/// One job, one request at a time.
pub fn hot_one(env: &Env) -> Res<Vec<Row>> {
    hot(env, "hot 4 KiB random reads, 1 job", 1, 1, 0.9)
}

/// Two jobs.
pub fn hot_two(env: &Env) -> Res<Vec<Row>> {
    hot(env, "hot 4 KiB random reads, 2 jobs", 2, 1, 0.85)
}

/// One job, 32 requests in flight.
pub fn hot_deep(env: &Env) -> Res<Vec<Row>> {
    hot(env, "hot 4 KiB random reads, depth 32", 1, 32, 0.75)
}

fn hot(env: &Env, name: &str, jobs: u32, depth: u32, need: f64) -> Res<Vec<Row>> {
    env.file("hot", HOT_BYTES)?;
    let (ours, null) = (env.ours("cache=256M")?, env.null()?);
    let file = ours.path().join("hot");
    warm(&file, HOT_BYTES)?;
    let before = ours.stat()?;
    let job = random(env, jobs, depth, HOT_BYTES);
    let result = duel(
        env.rounds,
        || Ok(fio(&file, &job)?.iops),
        || Ok(fio(&null.path().join("big"), &job)?.iops),
    )?;
    let after = ours.stat()?;
    let read = after.total("backing_blocks")? - before.total("backing_blocks")?;
    if read > 0 || after.total("hits")? <= before.total("hits")? {
        return Err(format!("{name}: not hot, {read} blocks came from the disk").into());
    }
    ours.unmount()?;
    null.unmount()?;
    Ok(vec![Row::of(name, "1/s", "null", result, need)])
}

/// Our mount is new for each sample and fio visits no block twice: nothing can hit.
fn cold(env: &Env, name: &str, unit: &'static str, job: &Job, need: f64) -> Res<Vec<Row>> {
    let file = env.file("cold", job.size)?;
    let sequential = job.rw == "read";
    let speed = |at: &Path| -> Res<f64> {
        let done = fio(at, job)?;
        Ok(if sequential { done.bytes / 1e6 } else { done.iops })
    };
    let ours = || {
        let mount = env.ours("cache=256M")?;
        let speed = speed(&mount.path().join("cold"))?;
        let hits = mount.stat()?.total("hits")?;
        let ops = mount.stat()?.total("ops")?;
        if hits * 10 > ops && !sequential {
            return Err(format!("{name}: not cold, {hits} hits in {ops} requests").into());
        }
        mount.unmount()?;
        Ok(speed)
    };
    let result = duel(env.rounds, ours, || speed(&file))?;
    Ok(vec![Row::of(name, unit, "source", result, need)])
}

/// 4 KiB, 32 in flight, against the source.
pub fn cold_random(env: &Env) -> Res<Vec<Row>> {
    let job = random(env, 1, 32, env.scaled(2 << 30));
    cold(env, "cold 4 KiB random reads, depth 32", "1/s", &job, 0.85)
}

/// 1 MiB, 4 in flight, against the source.
pub fn cold_sequential(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(2 << 30);
    let (rw, block, seconds) = ("read", "1m", Some(env.seconds));
    let job = Job { rw, block, direct: true, depth: 4, jobs: 1, size, seconds };
    cold(env, "cold 1 MiB sequential reads, depth 4", "MB/s", &job, 0.85)
}

/// Hits of a second pass over a file that a stream may fill.
pub fn again(env: &Env) -> Res<Vec<Row>> {
    let size = 48 << 20;
    env.file("again", size)?;
    let mount = env.ours("")?;
    let (rw, block) = ("read", "128k");
    let job = Job { rw, block, direct: true, depth: 1, jobs: 1, size, seconds: None };
    let file = mount.path().join("again");
    fio(&file, &job)?;
    let before = mount.stat()?;
    fio(&file, &job)?;
    let after = mount.stat()?;
    let change = |name: &str| -> Res<f64> { Ok((after.total(name)? - before.total(name)?) as f64) };
    let all = change("hits")? + change("misses")? + change("bypassed")?;
    let percent = 100.0 * change("hits")? / all.max(1.0);
    mount.unmount()?;
    Ok(vec![Row::alone("48 MiB read again: hits", "%", percent, Need::AtLeast(95.0))])
}

/// Requests that buffered re-reads cost, and their speed.
pub fn buffered(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(64 << 20);
    env.file("buffered", size)?;
    let mount = env.ours("")?;
    let file = mount.path().join("buffered");
    let read = || -> Res<f64> {
        let start = Instant::now();
        let mut whole = Vec::with_capacity(size as usize);
        File::open(&file)?.read_to_end(&mut whole)?;
        if whole.len() as u64 != size {
            return Err("a short file".into());
        }
        Ok(start.elapsed().as_secs_f64())
    };
    let first = read()?;
    let before = mount.stat()?.total("ops")?;
    let second = read()?;
    let requests = mount.stat()?.total("ops")? - before;
    mount.unmount()?;
    let again = Duel { ours: 1.0 / second, other: 1.0 / first, ratio: first / second };
    Ok(vec![
        Row::alone("buffered re-read: requests", "ops", requests as f64, Need::AtMost(0.0)),
        Row::of("buffered re-read: speed", "1/s", "first", again, 1.0),
    ])
}
