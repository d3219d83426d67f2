//! A file as a block device with a filesystem on it: losetup with direct I/O, ext4, mounted; its
//! scheduler, and what /proc/diskstats says of it. Root only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::mount::UnmountFlags;

use crate::bench::{Res, is_root, run};
use crate::cleanup::unmount_path;
use crate::tools::{path_with_sbin, wait_for};

/// A loop device; detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
}

/// The counters of one device in /proc/diskstats that matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskStat {
    /// Writes completed.
    pub writes: f64,
    /// Writes merged into a neighbour before that.
    pub merges: f64,
    /// Bytes written.
    pub bytes: f64,
    /// Requests in flight, added up over time, in milliseconds.
    pub depth_ms: f64,
    /// Flushes completed.
    pub flushes: f64,
    /// Milliseconds spent in them.
    pub flush_ms: f64,
}

impl DiskStat {
    /// What happened since `earlier`.
    pub fn since(self, earlier: DiskStat) -> DiskStat {
        DiskStat {
            writes: self.writes - earlier.writes,
            merges: self.merges - earlier.merges,
            bytes: self.bytes - earlier.bytes,
            depth_ms: self.depth_ms - earlier.depth_ms,
            flushes: self.flushes - earlier.flushes,
            flush_ms: self.flush_ms - earlier.flush_ms,
        }
    }

    /// The line of device `name` in the text of /proc/diskstats.
    pub fn parse(text: &str, name: &str) -> Option<DiskStat> {
        let line = text.lines().find(|line| line.split_whitespace().nth(2) == Some(name))?;
        let fields: Vec<f64> =
            line.split_whitespace().skip(3).filter_map(|field| field.parse().ok()).collect();
        let field = |number: usize| fields.get(number).copied().unwrap_or(0.0);
        Some(DiskStat {
            writes: field(4),
            merges: field(5),
            bytes: field(6) * 512.0,
            depth_ms: field(10),
            flushes: field(15),
            flush_ms: field(16),
        })
    }
}

fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", path_with_sbin()).env("LC_ALL", "C");
    command
}

impl LoopDevice {
    /// Attaches `file` with direct I/O.
    pub fn attach(file: &Path) -> Res<LoopDevice> {
        if !is_root() {
            return Err("needs root: a loop device".into());
        }
        let mut command = tool("losetup");
        let said = run(command.args(["--direct-io=on", "--find", "--show"]).arg(file))?;
        let device = LoopDevice { path: said.trim().into() };
        let direct = run(tool("losetup").args(["-n", "-O", "DIO"]).arg(&device.path))?;
        if direct.trim() != "1" {
            return Err(format!("{}: no direct I/O under a loop device", file.display()).into());
        }
        Ok(device)
    }

    /// /dev/loopN.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Chooses the I/O scheduler.
    pub fn set_scheduler(&self, scheduler: &str) -> Res<()> {
        let file = format!("/sys/block/{}/queue/scheduler", self.name());
        fs::write(&file, scheduler).map_err(|e| format!("{scheduler} > {file}: {e}"))?;
        let now = fs::read_to_string(&file)?;
        if !now.contains(&format!("[{scheduler}]")) {
            return Err(format!("{file} says {now}").into());
        }
        Ok(())
    }

    /// Its counters.
    pub fn stat(&self) -> Res<DiskStat> {
        let text = fs::read_to_string("/proc/diskstats")?;
        Ok(DiskStat::parse(&text, &self.name()).ok_or("not in /proc/diskstats")?)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = run(tool("losetup").arg("-d").arg(&self.path)) {
            eprintln!("{error}");
        }
    }
}

/// An ext4 on a loop device, mounted; unmounted when dropped.
#[derive(Debug)]
pub struct LoopFs {
    at: PathBuf,
    device: LoopDevice,
}

impl LoopFs {
    /// Makes an ext4 on `file` and mounts it on `at`. Its inode tables are written at once, so
    /// that nothing of the kernel's writes later.
    pub fn make(file: &Path, at: &Path) -> Res<LoopFs> {
        let device = LoopDevice::attach(file)?;
        let lazy = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        run(tool("mkfs.ext4").args(["-q", "-F", "-E", lazy]).arg(device.path()))?;
        fs::create_dir_all(at)?;
        run(tool("mount").args(["-t", "ext4"]).arg(device.path()).arg(at))?;
        Ok(LoopFs { at: at.to_owned(), device })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// The device below.
    pub fn device(&self) -> &LoopDevice {
        &self.device
    }
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        let gone = || unmount_path(&self.at, UnmountFlags::empty()).ok();
        if wait_for(Duration::from_secs(5), gone).is_none() {
            let _ = unmount_path(&self.at, UnmountFlags::DETACH);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diskstats_are_understood() {
        let text = "   7  0 loop0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n   7 1 loop10 1\n";
        let stat = DiskStat::parse(text, "loop0").unwrap();
        assert_eq!((stat.writes, stat.merges, stat.bytes), (5.0, 6.0, 7.0 * 512.0));
        assert_eq!((stat.depth_ms, stat.flushes, stat.flush_ms), (11.0, 16.0, 17.0));
        assert_eq!(stat.since(stat), DiskStat::default());
        assert!(DiskStat::parse(text, "loop1").is_none());
    }
}
