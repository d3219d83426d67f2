//! Recovery: how long a mount with a dirty journal takes until it answers.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use super::super::Res;
use super::super::duel::median;
use super::super::report::{Need, Row};
use super::Env;
use super::rig::{Journaled, image};
use crate::tools::{drop_caches, pattern};

/// What fills the journal.
struct Fill {
    options: String,
    writes: u64,
    len: usize,
    /// Distance of the writes: neighbours must not become one extent.
    stride: u64,
}

/// Seconds of one plain sequential read.
fn read_through(file: &Path) -> Res<f64> {
    drop_caches();
    let start = Instant::now();
    let mut file = File::open(file)?;
    let mut bytes = vec![0; 1 << 20];
    while file.read(&mut bytes)? > 0 {}
    Ok(start.elapsed().as_secs_f64())
}

fn fill(path: &Path, fill: &Fill) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    let bytes = pattern(7, fill.len);
    // Never a stream: back and forth.
    let half = fill.writes / 2;
    for n in 0..fill.writes {
        let at = if n % 2 == 0 { n / 2 } else { half + n / 2 };
        file.write_all_at(&bytes, at * fill.stride)?;
    }
    file.sync_all()
}

/// Seconds until ready, seconds of the plain read, records found.
fn once(env: &Env, what: &Fill) -> Res<(f64, f64, u64)> {
    let source = env.dir("recovery-source")?;
    image(&source.join("image"), (what.writes + 2) * what.stride, false)?;
    let mut journaled = Journaled::start(env, &source, &what.options)?;
    journaled.set("writeback_running=0")?;
    fill(&journaled.at("image"), what)?;
    let dirty = journaled.number("dirty_bytes")?;
    journaled.kill()?;
    let read = read_through(&journaled.journal()?)?;
    drop_caches();
    let start = Instant::now();
    journaled.start_again()?;
    fs::metadata(journaled.at("image"))?;
    let ready = start.elapsed().as_secs_f64();
    let found = journaled.number("replayed")?;
    println!("    {dirty} bytes dirty, {found} records: ready in {ready:.2} s, read {read:.2} s");
    journaled.abandon()?;
    if found < what.writes * 9 / 10 {
        return Err(format!("only {found} of {} records were found", what.writes).into());
    }
    Ok((ready, read, found))
}

fn samples(env: &Env, what: &Fill) -> Res<Vec<(f64, f64, u64)>> {
    (0..env.rounds.min(3)).map(|_| once(env, what)).collect()
}

/// A journal of 1 GiB with records of 4 KiB, as full as it gets before its data goes home unasked.
pub fn large(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(1 << 30);
    let options = format!(",journal_size={size},cache=1G");
    let writes = size * 62 / 100 / 4096;
    let samples = samples(env, &Fill { options, writes, len: 4096, stride: 8192 })?;
    let beyond = median(samples.iter().map(|(ready, read, _)| ready - read).collect());
    Ok(vec![Row::alone("recovery 1 GiB: ready minus read", "s", beyond, Need::AtMost(1.0))])
}

/// 64 MiB of log, in records of 64 bytes.
pub fn tiny(env: &Env) -> Res<Vec<Row>> {
    let size = env.scaled(64 << 20);
    let options = format!(",journal_size={},cache=1G", size * 2);
    // A header has 88 bytes.
    let writes = size / (64 + 88);
    let samples = samples(env, &Fill { options, writes, len: 64, stride: 192 })?;
    let ready = median(samples.iter().map(|(ready, _, _)| *ready).collect());
    Ok(vec![Row::alone("recovery 64 MiB of 64-byte records", "s", ready, Need::AtMost(3.0))])
}
