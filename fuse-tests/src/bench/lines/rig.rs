//! What the lines of writeback work on: an ext4 on the latency device or on a plain loop device,
//! mounts with a journal elsewhere, and counters of both.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::super::contender::Mount;
use super::super::{Res, product, run, target_dir};
use super::Env;
use crate::loopfs::LoopFs;
use crate::seekdisk::SeekDisk;
use crate::storm::Random;

/// A filesystem on a device whose queue is watched.
pub struct Rig {
    // In the order of their end.
    fs: LoopFs,
    disk: Option<SeekDisk>,
}

/// What a device did during one piece of work.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Bytes of work a second, in MiB.
    pub mib: f64,
    /// Mean number of requests in flight.
    pub depth: f64,
    /// The same of each arm of the latency device.
    pub arms: Vec<f64>,
    /// Writes merged by the elevator.
    pub merges: f64,
    /// Writes the device got.
    pub writes: f64,
    /// Part of the time spent in flushes, in percent.
    pub flush_percent: f64,
}

impl Seen {
    /// One line of details.
    pub fn line(&self, who: &str) -> String {
        let arms: Vec<String> = self.arms.iter().map(|depth| format!("{depth:.1}")).collect();
        let arms =
            if arms.is_empty() { String::new() } else { format!("  arms {}", arms.join(" ")) };
        let Seen { mib, depth, merges, writes, flush_percent, .. } = self;
        format!(
            "    {who:<10} {mib:>8.2} MiB/s  depth {depth:>5.1}  writes {writes:>6.0}  \
             merges {merges:>6.0}  flush {flush_percent:>4.1} %{arms}"
        )
    }
}

/// The program `seekdisk`, beside this one.
fn seekdisk() -> Res<PathBuf> {
    Ok(target_dir()?.join("release/seekdisk"))
}

impl Rig {
    /// An ext4 of `bytes` on the latency device.
    pub fn latency(env: &Env, bytes: u64) -> Res<Rig> {
        let disk = SeekDisk::start(&seekdisk()?, &env.dir("latency")?, bytes)?;
        let fs = LoopFs::make(&disk.disk(), &env.dir("latency-fs")?)?;
        Ok(Rig { fs, disk: Some(disk) })
    }

    /// The same on a file of the measured disk.
    pub fn plain(env: &Env, bytes: u64) -> Res<Rig> {
        let file = env.dir("plain")?.join("disk");
        // Written, so that the host's filesystem has nothing to allocate later.
        super::write_random(&file, bytes)?;
        Ok(Rig { fs: LoopFs::make(&file, &env.dir("plain-fs")?)?, disk: None })
    }

    /// Its I/O scheduler.
    pub fn scheduler(&self, name: &str) -> Res<()> {
        self.fs.device().set_scheduler(name)
    }

    /// A directory on it.
    pub fn dir(&self, name: &str) -> Res<PathBuf> {
        let path = self.fs.path().join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Does `work` on `bytes`, which says how many seconds of it count.
    pub fn watch(&self, bytes: u64, work: impl FnOnce() -> Res<f64>) -> Res<Seen> {
        let arms = |rig: &Rig| rig.disk.as_ref().map(SeekDisk::arms).transpose();
        let (stat, before) = (self.fs.device().stat()?, arms(self)?);
        let seconds = work()?.max(1e-9);
        let (stat, after) = (self.fs.device().stat()?.since(stat), arms(self)?);
        // In-flight time over the seconds of the work: what idles around it counts nothing.
        let pairs =
            before.iter().zip(&after).flat_map(|(before, after)| before.1.iter().zip(&after.1));
        let arms = pairs.map(|(b, a)| (a.depth_ns - b.depth_ns) / 1e9 / seconds).collect();
        Ok(Seen {
            mib: bytes as f64 / (1 << 20) as f64 / seconds,
            depth: stat.depth_ms / 1000.0 / seconds,
            arms,
            merges: stat.merges,
            writes: stat.writes,
            flush_percent: stat.flush_ms / 10.0 / seconds,
        })
    }
}

/// A mount of ours in writeback mode, its state in a new directory on the measured disk.
pub struct Journaled {
    mount: Option<Mount>,
    state: PathBuf,
    source: PathBuf,
    options: String,
    at: PathBuf,
}

impl Journaled {
    /// Mounts `source`; `options` begin with a comma or are empty.
    pub fn start(env: &Env, source: &Path, options: &str) -> Res<Journaled> {
        let state = env.dir("state")?;
        fs::remove_dir_all(&state)?;
        let state = env.dir("state")?;
        let options = format!("cache_mode=writeback,state={}{options}", state.display());
        let at = env.dir("journaled")?;
        let mount = Some(Mount::ours(source, &at, &options)?);
        Ok(Journaled { mount, state, source: source.to_owned(), options, at })
    }

    /// The mount.
    pub fn mount(&self) -> Res<&Mount> {
        Ok(self.mount.as_ref().ok_or("not mounted")?)
    }

    /// A path on the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// The file of the journal: the largest of its state.
    pub fn journal(&self) -> Res<PathBuf> {
        let mut open = vec![self.state.clone()];
        let mut files = Vec::new();
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory)? {
                let (path, meta) = {
                    let entry = entry?;
                    (entry.path(), entry.metadata()?)
                };
                if meta.is_dir() { open.push(path) } else { files.push((meta.len(), path)) }
            }
        }
        Ok(files.into_iter().max().ok_or("no journal in the state directory")?.1)
    }

    /// `bcachefs-fuse set MNT PAIR`.
    pub fn set(&self, pair: &str) -> Res<()> {
        run(Command::new(product()?).arg("set").arg(&self.at).arg(pair))?;
        Ok(())
    }

    /// The command `bcachefs-fuse flush MNT`.
    pub fn flush(&self) -> Res<Command> {
        let mut flush = Command::new(product()?);
        flush.arg("flush").arg(&self.at);
        Ok(flush)
    }

    /// A number of `stat`.
    pub fn number(&self, name: &str) -> Res<u64> {
        self.mount()?.stat()?.writeback(name)
    }

    /// kill -9; mount again with `start_again`.
    pub fn kill(&mut self) -> Res<()> {
        let mount = self.mount.take().ok_or("not mounted")?;
        let pid = rustix::process::Pid::from_raw(mount.pid() as i32).ok_or("no pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        // Detaches what is left of it.
        drop(mount);
        Ok(())
    }

    /// Mounts again.
    pub fn start_again(&mut self) -> Res<()> {
        self.mount = Some(Mount::ours(&self.source, &self.at, &self.options)?);
        Ok(())
    }

    /// Unmounts; what is dirty goes home.
    pub fn unmount(mut self) -> Res<()> {
        self.mount.take().ok_or("not mounted")?.unmount()
    }

    /// Ends it at once and forgets the journal; the source's mark goes with the source.
    pub fn abandon(mut self) -> Res<()> {
        self.kill()?;
        fs::remove_dir_all(&self.source)?;
        Ok(())
    }
}

/// A file of `size` bytes, written or one hole.
pub fn image(path: &Path, size: u64, written: bool) -> Res<()> {
    let there = fs::metadata(path).is_ok_and(|meta| meta.len() == size);
    if written && there {
        return Ok(());
    }
    if written {
        return super::write_random(path, size);
    }
    let _ = fs::remove_file(path);
    let file = File::create(path)?;
    file.set_len(size)?;
    Ok(file.sync_all()?)
}

/// `count` different 4 KiB blocks of `size` bytes, in random order.
pub fn blocks(size: u64, count: u64, seed: u64) -> Vec<u64> {
    let all = size / 4096;
    let mut random = Random::new(seed);
    // One block of each of `count` equal parts, then shuffled: no two are neighbours for long.
    let part = (all / count).max(1);
    let mut chosen: Vec<u64> = (0..count).map(|n| (n * part + random.below(part)) * 4096).collect();
    for at in (1..chosen.len()).rev() {
        chosen.swap(at, random.below(at as u64 + 1) as usize);
    }
    chosen
}

/// Writes 4 KiB at each offset.
pub fn scatter(path: &Path, offsets: &[u64]) -> Res<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let mut block = crate::tools::pattern(1, 4096);
    for offset in offsets {
        block[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_all_at(&block, *offset)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_distinct_and_all_over() {
        let mut chosen = blocks(64 << 20, 1000, 3);
        assert!(chosen.windows(2).filter(|pair| pair[0] < pair[1]).count() < 600, "sorted");
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 1000);
        assert!(chosen[0] < 1 << 20 && chosen[999] > 60 << 20 && chosen[999] < 64 << 20);
    }
}
