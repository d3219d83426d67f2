//! How fast dirty blocks go home: random 4 KiB blocks, an idle frontend, each I/O scheduler,
//! against the old order (`writeback_order=lba`) and against fio's io_uring at depth 64.

use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use super::super::duel::{Duel, median};
use super::super::report::{Need, Row};
use super::super::{Res, run};
use super::Env;
use super::rig::{Journaled, Rig, Seen, blocks, image, scatter};

const SCHEDULERS: [&str; 4] = ["mq-deadline", "bfq", "kyber", "none"];

/// What is flushed.
struct Work {
    image_bytes: u64,
    offsets: Vec<u64>,
    written: bool,
}

impl Work {
    fn bytes(&self) -> u64 {
        self.offsets.len() as u64 * 4096
    }
}

/// Our flush of the blocks, in this order ("unordered", "lba").
fn ours(env: &Env, rig: &Rig, work: &Work, order: &str) -> Res<Seen> {
    let source = rig.dir("images")?;
    image(&source.join("image"), work.image_bytes, work.written)?;
    // Room for the blocks below the 70 % at which they would go home unasked, and for their index.
    let options = format!(",journal_size=512M,cache=1G,writeback_order={order}");
    let journaled = Journaled::start(env, &source, &options)?;
    journaled.set("writeback_running=0")?;
    scatter(&journaled.at("image"), &work.offsets)?;
    let dirty = journaled.number("dirty_bytes")?;
    if dirty < work.bytes() {
        return Err(format!("{dirty} of {} bytes are dirty", work.bytes()).into());
    }
    let seen = rig.watch(work.bytes(), || {
        let start = Instant::now();
        journaled.set("writeback_running=1")?;
        run(&mut journaled.flush()?)?;
        Ok(start.elapsed().as_secs_f64())
    })?;
    journaled.unmount()?;
    verify(&source.join("image"), &work.offsets)?;
    Ok(seen)
}

/// A few of the blocks are home.
fn verify(path: &Path, offsets: &[u64]) -> Res<()> {
    let file = File::open(path)?;
    for offset in offsets.iter().step_by((offsets.len() / 16).max(1)) {
        let mut there = [0; 8];
        file.read_exact_at(&mut there, *offset)?;
        if there != offset.to_le_bytes() {
            return Err(format!("the block at {offset} is not home").into());
        }
    }
    Ok(())
}

/// fio on the same blocks, and one fdatasync.
fn fio(env: &Env, rig: &Rig, work: &Work) -> Res<Seen> {
    let path = rig.dir("images")?.join("image");
    image(&path, work.image_bytes, work.written)?;
    let log = env.dir("iolog")?.join("blocks");
    let name = path.display();
    let mut text = format!("fio version 2 iolog\n{name} add\n{name} open\n");
    work.offsets.iter().for_each(|at| text.push_str(&format!("{name} write {at} 4096\n")));
    text.push_str(&format!("{name} close\n"));
    fs::write(&log, text)?;
    rig.watch(work.bytes(), || {
        let mut command = Command::new("fio");
        command.args(["--name=replay", "--ioengine=io_uring", "--iodepth=64", "--direct=1"]);
        command.args(["--output-format=json", "--thread", "--fallocate=none"]);
        let said = run(command.arg(format!("--read_iolog={}", log.display())))?;
        let start = said.find('{').ok_or("fio printed no JSON")?;
        let parsed: Value = serde_json::from_str(&said[start..])?;
        let write = &parsed["jobs"][0]["write"];
        // Its count of bytes leaves out what was in flight at the log's end.
        if write["total_ios"].as_u64() != Some(work.offsets.len() as u64) {
            return Err(format!("fio wrote {} blocks", write["total_ios"]).into());
        }
        let milliseconds = write["runtime"].as_f64().ok_or("fio printed no runtime")?;
        let sync = Instant::now();
        File::open(&path)?.sync_data()?;
        Ok(milliseconds / 1000.0 + sync.elapsed().as_secs_f64())
    })
}

/// The samples of one scheduler and image.
#[derive(Default)]
struct Samples {
    ours: Vec<Seen>,
    lba: Vec<Seen>,
    fio: Vec<Seen>,
}

impl Samples {
    fn take(env: &Env, rig: &Rig, work: &Work) -> Res<Samples> {
        let mut samples = Samples::default();
        for round in 0..env.rounds.min(3) {
            // Each is first, second and last once.
            for turn in 0..3 {
                match (round + turn) % 3 {
                    0 => samples.ours.push(ours(env, rig, work, "unordered")?),
                    1 => samples.lba.push(ours(env, rig, work, "lba")?),
                    _ => samples.fio.push(fio(env, rig, work)?),
                }
            }
        }
        Ok(samples)
    }

    fn rows(&self, name: &str, deep: bool) -> Vec<Row> {
        let against = |other: &[Seen]| {
            let pairs: Vec<_> = self.ours.iter().zip(other).map(|(a, b)| (a.mib, b.mib)).collect();
            Duel::of(&pairs)
        };
        let mut rows = vec![
            Row::of(name, "MiB/s", "fio", against(&self.fio), 0.9),
            Row::of(name, "MiB/s", "lba", against(&self.lba), 1.0),
        ];
        if deep {
            let depth = median(self.ours.iter().map(|seen| seen.depth).collect());
            rows.push(Row::alone(&format!("{name}: depth"), "", depth, Need::AtLeast(55.0)));
        }
        rows
    }

    fn print(&self, name: &str) {
        println!("  {name}");
        let middle = |samples: &[Seen], who: &str| {
            let mut samples: Vec<&Seen> = samples.iter().collect();
            samples.sort_by(|a, b| a.mib.total_cmp(&b.mib));
            if let Some(seen) = samples.get(samples.len() / 2) {
                println!("{}", seen.line(who));
            }
        };
        middle(&self.ours, "unordered");
        middle(&self.lba, "lba");
        middle(&self.fio, "fio");
    }
}

/// Some seconds of work: the plain loop device is faster.
fn work(env: &Env, device: &str, written: bool) -> Work {
    let image_bytes = env.scaled(1 << 30);
    let count = if device == "latency" { 8192 } else { 32_768 };
    let count = if env.quick { count / 16 } else { count };
    Work { image_bytes, offsets: blocks(image_bytes, count, 42), written }
}

fn device_bytes(env: &Env) -> u64 {
    // An image that nearly fills it, so that seeks are long.
    env.scaled(1 << 30) + (192 << 20)
}

fn table(env: &Env, rig: &Rig, device: &str) -> Res<Vec<Row>> {
    let mut rows = Vec::new();
    for scheduler in SCHEDULERS {
        rig.scheduler(scheduler)?;
        for (kind, written) in [("written", true), ("sparse", false)] {
            let samples = Samples::take(env, rig, &work(env, device, written))?;
            let name = format!("{device} {scheduler} {kind}");
            samples.print(&name);
            rows.extend(samples.rows(&name, device == "latency"));
        }
    }
    Ok(rows)
}

/// The table of the latency device.
pub fn latency(env: &Env) -> Res<Vec<Row>> {
    let rig = Rig::latency(env, device_bytes(env))?;
    println!("  the seed saw 4 (lba) -> 8 MiB/s (unordered), depth 21 -> 55, per disk 1.5 -> 4.5:");
    table(env, &rig, "latency")
}

/// The table of a plain loop device.
pub fn plain(env: &Env) -> Res<Vec<Row>> {
    let rig = Rig::plain(env, device_bytes(env))?;
    table(env, &rig, "loop")
}

/// The part of a flush that the device spends in flushes of its own: the fdatasync of epochs.
pub fn epoch(env: &Env) -> Res<Vec<Row>> {
    let mut rows = Vec::new();
    for (device, rig) in [
        ("latency", Rig::latency(env, device_bytes(env))?),
        ("loop", Rig::plain(env, device_bytes(env))?),
    ] {
        rig.scheduler("mq-deadline")?;
        let work = work(env, device, true);
        let mut percents = Vec::new();
        for _ in 0..env.rounds.min(3) {
            let seen = ours(env, &rig, &work, "unordered")?;
            println!("{}", seen.line(device));
            percents.push(seen.flush_percent);
        }
        let name = format!("{device}: time in epoch syncs");
        rows.push(Row::alone(&name, "%", median(percents), Need::AtMost(5.0)));
    }
    Ok(rows)
}
