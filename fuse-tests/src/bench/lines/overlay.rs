//! Overlays: what the first write into a lower image costs, and what the upper costs afterwards.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use rustix::mount::UnmountFlags;

use super::super::contender::Mount;
use super::super::duel::{Duel, duel, median};
use super::super::fio::{Job, fio, more};
use super::super::report::{Need, Row};
use super::super::{Res, run};
use super::Env;
use super::names::{PHASES, phases};
use super::rig::{blocks, scatter};

/// What the others copy as a whole.
const IMAGE: u64 = 2 << 30;
const SMALL: u64 = 256 << 20;

/// An overlay of ours over `lower`, its upper new.
struct Ours {
    mount: Option<Mount>,
    upper: PathBuf,
}

impl Ours {
    fn new(env: &Env, lower: &Path) -> Res<Ours> {
        let upper = env.dir("ov-upper")?;
        fs::remove_dir_all(&upper)?;
        let upper = env.dir("ov-upper")?;
        let options = format!("upper={},cache=16M", upper.display());
        let mount = Some(Mount::ours(lower, &env.dir("ov-mnt")?, &options)?);
        Ok(Ours { mount, upper })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.mount.as_ref().map(|mount| mount.path().join(name)).unwrap_or_default()
    }

    /// Bytes of data/ and of meta.redb.
    fn grown(&self) -> Res<(u64, u64)> {
        let mut data = 0;
        for entry in fs::read_dir(self.upper.join("data"))? {
            data += entry?.metadata()?.blocks() * 512;
        }
        Ok((data, fs::metadata(self.upper.join("meta.redb"))?.blocks() * 512))
    }

    fn flush(&self) -> Res<()> {
        run(Command::new(super::super::product()?).arg("flush").arg(self.at("")))?;
        Ok(())
    }

    fn end(mut self) -> Res<()> {
        self.mount.take().map_or(Ok(()), Mount::unmount)
    }
}

/// Milliseconds of open, one write of 4 KiB in the middle, and close.
fn first_write(path: &Path) -> Res<f64> {
    let start = Instant::now();
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(&[7; 4096], fs::metadata(path)?.len() / 2)?;
    drop(file);
    Ok(start.elapsed().as_secs_f64() * 1000.0)
}

/// The kernel's overlay on the same filesystem; gone when dropped.
struct KernelOverlay(PathBuf);

impl KernelOverlay {
    fn new(env: &Env, lower: &Path) -> Res<KernelOverlay> {
        let (upper, work, at) = (env.dir("k-upper")?, env.dir("k-work")?, env.dir("k-mnt")?);
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &layers]).arg(&at))?;
        Ok(KernelOverlay(at))
    }
}

impl Drop for KernelOverlay {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// The first write, beside the overlays that copy the file.
pub fn first(env: &Env) -> Res<Vec<Row>> {
    let lower = env.dir("ov-lower")?;
    let image = lower.join("image");
    super::write_random(&image, env.scaled(IMAGE))?;
    let (mut times, mut grown) = (Vec::new(), Vec::new());
    for _ in 0..env.rounds {
        let ours = Ours::new(env, &lower)?;
        let before = ours.grown()?;
        times.push(first_write(&ours.at("image"))?);
        ours.flush()?;
        let after = ours.grown()?;
        grown.push((after.0 + after.1).saturating_sub(before.0 + before.1) as f64 / 1024.0);
        ours.end()?;
    }
    let kernel = {
        let mount = KernelOverlay::new(env, &lower)?;
        first_write(&mount.0.join("image"))?
    };
    let dirs = (env.dir("f-upper")?, env.dir("f-work")?, env.dir("f-mnt")?);
    let other = Mount::fuse_overlayfs(&lower, &dirs.0, &dirs.1, &dirs.2)?;
    let fuse = first_write(&dirs.2.join("image"))?;
    other.unmount()?;
    println!("    the same by kernel overlayfs {kernel:.0} ms, by fuse-overlayfs {fuse:.0} ms");
    fs::remove_dir_all(&lower)?;
    Ok(vec![
        Row::alone("first 4 KiB write into a lower image", "ms", median(times), Need::AtMost(5.0)),
        Row::alone("growth of the upper by it", "KiB", median(grown), Need::AtMost(64.0)),
    ])
}

/// 10,000 random writes of 4 KiB.
pub fn random(env: &Env) -> Res<Vec<Row>> {
    let lower = env.dir("ov-lower")?;
    let size = env.scaled(1 << 30);
    super::write_random(&lower.join("image"), size)?;
    let count = if env.quick { 1000 } else { 10_000 };
    let ours = Ours::new(env, &lower)?;
    scatter(&ours.at("image"), &blocks(size, count, 5))?;
    ours.flush()?;
    let cost = ours.grown()?.0 as f64 / (count * 4096) as f64;
    ours.end()?;
    fs::remove_dir_all(&lower)?;
    Ok(vec![Row::alone("data/ per byte written at random", "", cost, Need::AtMost(1.1))])
}

/// Small files, against fuse-overlayfs.
pub fn names(env: &Env) -> Res<Vec<Row>> {
    let count = if env.quick { 500 } else { 20_000 };
    let lower = env.dir("ov-empty")?;
    let mut pairs: [Vec<(f64, f64)>; 4] = Default::default();
    for _ in 0..env.rounds.min(3) {
        let ours = Ours::new(env, &lower)?;
        let speeds = phases(&ours.at("many"), count)?;
        ours.end()?;
        let dirs = (env.dir("f-upper")?, env.dir("f-work")?, env.dir("f-mnt")?);
        let other = Mount::fuse_overlayfs(&lower, &dirs.0, &dirs.1, &dirs.2)?;
        let others = phases(&dirs.2.join("many"), count)?;
        other.unmount()?;
        for (phase, pair) in pairs.iter_mut().zip(speeds.into_iter().zip(others)) {
            phase.push(pair);
        }
    }
    let row = |(name, pairs): (&str, &Vec<(f64, f64)>)| {
        let need = if name.starts_with("create") || name == "unlink" { 2.0 } else { 1.0 };
        let name = format!("overlay, {count} files: {name}");
        Row::of(&name, "1/s", "fuse-overlayfs", Duel::of(pairs), need)
    };
    Ok(PHASES.into_iter().zip(&pairs).map(row).collect())
}

/// 4 KiB O_DIRECT reads of what nobody changed, against a plain mount.
pub fn reads(env: &Env) -> Res<Vec<Row>> {
    let source = env.file("ov-read", SMALL)?;
    let lower = source.parent().ok_or("a file has a directory")?.to_owned();
    // Read-only: both use the same directory.
    let plain = env.ours("ro,cache=16M")?;
    let ours = Ours::new(env, &lower)?;
    let (rw, block, size) = ("randread", "4k", SMALL);
    let seconds = Some(env.seconds);
    let job = Job { rw, block, direct: true, depth: 8, jobs: 1, size, seconds };
    let rate = |path: &Path| -> Res<f64> { Ok(fio(path, &job)?.iops) };
    let result =
        duel(env.rounds, || rate(&ours.at("ov-read")), || rate(&plain.path().join("ov-read")))?;
    ours.end()?;
    plain.unmount()?;
    Ok(vec![Row::of("4 KiB reads of the lower", "1/s", "plain mount", result, 0.9)])
}

/// 4 KiB writes, each with fdatasync, against a plain mount in writeback mode.
pub fn durable(env: &Env) -> Res<Vec<Row>> {
    let source = env.file("ov-durable", 64 << 20)?;
    let lower = source.parent().ok_or("a file has a directory")?.to_owned();
    let ours = Ours::new(env, &lower)?;
    let plain_source = env.dir("ov-plain")?;
    fs::copy(&source, plain_source.join("ov-durable"))?;
    let plain = Mount::ours(&plain_source, &env.dir("ov-plain-mnt")?, "")?;
    let (rw, block, size) = ("randwrite", "4k", 64 << 20);
    let seconds = Some(env.seconds);
    let job = Job { rw, block, direct: false, depth: 1, jobs: 1, size, seconds };
    let rate = |path: PathBuf| -> Res<f64> {
        let options = [format!("--filename={}", path.display()), "--fdatasync=1".into()];
        Ok(more(&options, &job)?["iops"].as_f64().ok_or("fio printed no iops")?)
    };
    let result =
        duel(env.rounds, || rate(ours.at("ov-durable")), || rate(plain.path().join("ov-durable")))?;
    ours.end()?;
    plain.unmount()?;
    Ok(vec![Row::of("4 KiB write + fdatasync, overlay", "1/s", "plain mount", result, 0.7)])
}
