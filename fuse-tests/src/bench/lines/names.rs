//! Operations on names: 20,000 small files created, looked at, listed and removed.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::super::Res;
use super::super::duel::Duel;
use super::super::report::Row;
use super::Env;

pub(super) const PHASES: [&str; 4] = ["create + 5 bytes + close", "stat", "ls -l", "unlink"];

/// Both sides let the kernel believe a name for 1 s; each phase begins when that is over, so a
/// faster contender is not punished with names that expired less.
const EXPIRY: Duration = Duration::from_millis(1100);

pub(super) fn phases(directory: &Path, count: usize) -> Res<[f64; 4]> {
    fs::create_dir(directory)?;
    let names: Vec<_> = (0..count).map(|n| directory.join(format!("file-{n:05}"))).collect();
    let timed = |work: &dyn Fn() -> Res<()>| -> Res<f64> {
        sleep(EXPIRY);
        let start = Instant::now();
        work()?;
        Ok(count as f64 / start.elapsed().as_secs_f64())
    };
    let create =
        timed(&|| names.iter().try_for_each(|name| Ok(File::create(name)?.write_all(b"5byte")?)))?;
    let stat = timed(&|| {
        for name in &names {
            if fs::symlink_metadata(name)?.len() != 5 {
                return Err(format!("{} has a wrong size", name.display()).into());
            }
        }
        Ok(())
    })?;
    let list = timed(&|| {
        let mut ls = Command::new("ls");
        let status = ls.arg("-l").arg(directory).stdout(Stdio::null()).status()?;
        if status.success() { Ok(()) } else { Err("ls -l failed".into()) }
    })?;
    let unlink = timed(&|| names.iter().try_for_each(|name| Ok(fs::remove_file(name)?)))?;
    fs::remove_dir(directory)?;
    Ok([create, stat, list, unlink])
}

/// Files a second of each phase, against bindfs.
pub fn files(env: &Env) -> Res<Vec<Row>> {
    let count = if env.quick { 2000 } else { 20_000 };
    let mut pairs: [Vec<(f64, f64)>; 4] = Default::default();
    for round in 0..env.rounds {
        let one = |ours: bool| -> Res<[f64; 4]> {
            // A mount each: neither carries nodes of an earlier round.
            let mount = if ours { env.ours("")? } else { env.bindfs()? };
            let speeds = phases(&mount.path().join("many"), count)?;
            mount.unmount()?;
            Ok(speeds)
        };
        let first = one(round % 2 == 0)?;
        let second = one(round % 2 != 0)?;
        let (ours, other) = if round % 2 == 0 { (first, second) } else { (second, first) };
        for (phase, pair) in pairs.iter_mut().zip(ours.into_iter().zip(other)) {
            phase.push(pair);
        }
    }
    let row = |(name, pairs): (&str, &Vec<(f64, f64)>)| {
        let name = format!("{count} files: {name}");
        Row::of(&name, "1/s", "bindfs", Duel::of(pairs), 0.95)
    };
    Ok(PHASES.into_iter().zip(&pairs).map(row).collect())
}
