//! Durable writes: 4 KiB random write + fdatasync, in writeback mode against straight ext4.

use std::path::Path;

use super::super::Res;
use super::super::duel::duel;
use super::super::fio::{Job, more};
use super::super::report::{Need, Row};
use super::Env;
use super::rig::{Journaled, Rig};

const SIZE: u64 = 64 << 20;

/// Writes a second; the files are `durable.0`, `durable.1`, ... of `directory`.
fn rate(env: &Env, directory: &Path, jobs: u32, one_file: bool) -> Res<f64> {
    let (rw, block, size) = ("randwrite", "4k", SIZE);
    let seconds = Some(env.seconds * 2.0);
    let job = Job { rw, block, direct: false, depth: 1, jobs, size, seconds };
    let name = if one_file { "durable.0" } else { "durable.$jobnum" };
    let options = [
        format!("--directory={}", directory.display()),
        format!("--filename_format={name}"),
        "--fdatasync=1".into(),
    ];
    let side = more(&options, &job)?;
    Ok(side["iops"].as_f64().ok_or("fio printed no iops")?)
}

fn files(directory: &Path, count: u32) -> Res<()> {
    (0..count).try_for_each(|n| super::write_random(&directory.join(format!("durable.{n}")), SIZE))
}

/// A source and a plain directory with the same files, on the same disk.
struct Pair {
    journaled: Journaled,
    straight: std::path::PathBuf,
}

impl Pair {
    fn new(env: &Env, count: u32) -> Res<Pair> {
        let (source, straight) = (env.dir("durable-source")?, env.dir("durable-straight")?);
        files(&source, count)?;
        files(&straight, count)?;
        let journaled = Journaled::start(env, &source, "")?;
        let pair = Pair { journaled, straight };
        // The first fsyncs of a mount sync the source, too.
        rate(env, pair.at(), count, false)?;
        Ok(pair)
    }

    fn at(&self) -> &Path {
        self.journaled.mount().map_or(Path::new("/nonexistent"), |mount| mount.path())
    }
}

/// One job; nothing of it reaches the image's own sync.
pub fn one(env: &Env) -> Res<Vec<Row>> {
    let pair = Pair::new(env, 1)?;
    let counters = || -> Res<(u64, u64)> {
        let stat = pair.journaled.mount()?.stat()?;
        Ok((stat.total("syncs")?, stat.writeback("barrier_waiters")?))
    };
    let result = duel(
        env.rounds,
        || rate(env, pair.at(), 1, false),
        || rate(env, &pair.straight, 1, false),
    )?;
    // The steady state: a file that was not used for a while is synced once more.
    rate(env, pair.at(), 1, false)?;
    let before = counters()?;
    rate(env, pair.at(), 1, false)?;
    let after = counters()?;
    let per_fsync = (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64;
    pair.journaled.unmount()?;
    Ok(vec![
        Row::of("durable 4 KiB writes, 1 job", "1/s", "source", result, 0.6),
        Row::alone("image syncs per fsync", "", per_fsync, Need::AtMost(0.0)),
    ])
}

/// Eight jobs on eight files share the journal's syncs.
pub fn eight(env: &Env) -> Res<Vec<Row>> {
    let pair = Pair::new(env, 8)?;
    let counters = || -> Res<(u64, u64)> {
        let stat = pair.journaled.mount()?.stat()?;
        Ok((stat.writeback("barriers")?, stat.writeback("barrier_waiters")?))
    };
    let before = counters()?;
    let result = duel(
        env.rounds,
        || rate(env, pair.at(), 8, false),
        || rate(env, &pair.straight, 8, false),
    )?;
    let after = counters()?;
    let per_fsync = (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64;
    pair.journaled.unmount()?;
    Ok(vec![
        Row::of("durable 4 KiB writes, 8 jobs 8 files", "1/s", "source", result, 0.6),
        Row::alone("journal syncs per fsync, 8 jobs", "", per_fsync, Need::AtMost(0.5)),
    ])
}

/// Eight jobs on one file: the kernel serialises FSYNC per inode, so our own one job is asked.
pub fn shared(env: &Env) -> Res<Vec<Row>> {
    let pair = Pair::new(env, 1)?;
    let result =
        duel(env.rounds, || rate(env, pair.at(), 8, true), || rate(env, pair.at(), 1, true))?;
    pair.journaled.unmount()?;
    Ok(vec![Row::of("durable 4 KiB writes, 8 jobs 1 file", "1/s", "1 job", result, 0.85)])
}

/// The image on the latency device, the journal on the measured disk.
pub fn slow(env: &Env) -> Res<Vec<Row>> {
    let rig = Rig::latency(env, 512 << 20)?;
    let (source, straight) = (rig.dir("source")?, rig.dir("straight")?);
    files(&source, 1)?;
    files(&straight, 1)?;
    let journaled = Journaled::start(env, &source, "")?;
    let at = journaled.mount()?.path().to_owned();
    rate(env, &at, 1, false)?;
    let result = duel(env.rounds, || rate(env, &at, 1, false), || rate(env, &straight, 1, false))?;
    journaled.unmount()?;
    Ok(vec![Row::of("durable writes, fast journal", "1/s", "source", result, 5.0)])
}
