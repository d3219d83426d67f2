//! Writes: a large copy against the source, small buffered writes against bindfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use super::super::duel::duel;
use super::super::fio::{Job, fio};
use super::super::report::Row;
use super::super::{Res, run};
use super::Env;

/// `cp from to; sync to`, in MB/s; the copy is checked for its length and removed.
fn timed_copy(from: &Path, to: &Path, size: u64) -> Res<f64> {
    let start = Instant::now();
    run(Command::new("cp").arg(from).arg(to))?;
    run(Command::new("sync").arg(to))?;
    let speed = size as f64 / 1e6 / start.elapsed().as_secs_f64();
    if fs::metadata(to)?.len() != size {
        return Err(format!("{} is short", to.display()).into());
    }
    fs::remove_file(to)?;
    Ok(speed)
}

/// A large copy, synced, against the same copy on the source.
pub fn copy(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(2 << 30);
    // Outside the source: what is copied is read from the kernel's page cache by both.
    let from: PathBuf = env.dir("elsewhere")?.join("big");
    super::write_random(&from, size)?;
    let mount = env.ours("")?;
    let source = env.dir("source")?;
    let result = duel(
        env.rounds,
        || timed_copy(&from, &mount.path().join("copy"), size),
        || timed_copy(&from, &source.join("copy-straight"), size),
    )?;
    mount.unmount()?;
    fs::remove_file(&from)?;
    Ok(vec![Row::of("cp of 2 GiB + sync", "MB/s", "source", result, 0.7)])
}

/// Buffered 4 KiB writes against bindfs.
pub fn small(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(256 << 20);
    env.file("w-ours", size)?;
    env.file("w-bindfs", size)?;
    let (ours, bindfs) = (env.ours("")?, env.bindfs()?);
    let seconds = Some(env.seconds);
    let (rw, block) = ("write", "4k");
    let job = Job { rw, block, direct: false, depth: 1, jobs: 1, size, seconds };
    let result = duel(
        env.rounds,
        || Ok(fio(&ours.path().join("w-ours"), &job)?.iops),
        || Ok(fio(&bindfs.path().join("w-bindfs"), &job)?.iops),
    )?;
    ours.unmount()?;
    bindfs.unmount()?;
    Ok(vec![Row::of("4 KiB buffered writes", "1/s", "bindfs", result, 0.5)])
}
