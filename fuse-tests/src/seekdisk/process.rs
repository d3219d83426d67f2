//! The latency device as a process of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::mount::UnmountFlags;
use serde_json::Value;

use crate::bench::Res;
use crate::cleanup::{self, unmount_path};
use crate::tools::wait_for;

const PATIENCE: Duration = Duration::from_secs(10);

/// What one arm has done since the device began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Arm {
    /// Visits served.
    pub ops: f64,
    /// Visits waiting or under way, added up over time, in nanoseconds.
    pub depth_ns: f64,
    /// Nanoseconds with at least one of them.
    pub busy_ns: f64,
}

/// A running latency device; unmounted and ended when dropped.
#[derive(Debug)]
pub struct SeekDisk {
    at: PathBuf,
    child: Child,
}

impl SeekDisk {
    /// Starts `program` (the binary `seekdisk`) with a disk of `bytes` in `directory`.
    pub fn start(program: &Path, directory: &Path, bytes: u64) -> Res<SeekDisk> {
        let at = directory.join("seekdisk");
        fs::create_dir_all(&at)?;
        let mut command = Command::new(program);
        command.arg(&at).arg(bytes.to_string()).arg(directory.join("seekdisk.bytes"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.map_err(|e| format!("{}: {e}", program.display()))?;
        let mut disk = SeekDisk { at, child };
        let there = || match disk.child.try_wait() {
            Ok(Some(status)) => Some(Err(format!("seekdisk ended: {status}"))),
            _ => disk.disk().exists().then_some(Ok(())),
        };
        wait_for(PATIENCE, there).ok_or("seekdisk was not mounted in 10 s")??;
        Ok(disk)
    }

    /// The disk's file, for losetup.
    pub fn disk(&self) -> PathBuf {
        self.at.join("disk")
    }

    /// The counters: nanoseconds since the device began, and its arms.
    pub fn arms(&self) -> Res<(f64, Vec<Arm>)> {
        let text = fs::read_to_string(self.at.join("arms.json"))?;
        let all: Value = serde_json::from_str(&text)?;
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let arm = |arm: &Value| Arm {
            ops: number(&arm["ops"]),
            depth_ns: number(&arm["depth_ns"]),
            busy_ns: number(&arm["busy_ns"]),
        };
        let arms = all["arms"].as_array().ok_or("no arms")?.iter().map(arm).collect();
        Ok((number(&all["now_ns"]), arms))
    }

    /// The mean depth of each arm between two answers of `arms`.
    pub fn depths(before: &(f64, Vec<Arm>), after: &(f64, Vec<Arm>)) -> Vec<f64> {
        let passed = (after.0 - before.0).max(1.0);
        let pairs = before.1.iter().zip(&after.1);
        pairs.map(|(before, after)| (after.depth_ns - before.depth_ns) / passed).collect()
    }
}

impl Drop for SeekDisk {
    fn drop(&mut self) {
        let gone = || unmount_path(&self.at, UnmountFlags::empty()).ok();
        if wait_for(Duration::from_secs(3), gone).is_none() {
            if let Some(line) = cleanup::mount_at(&self.at) {
                cleanup::abort_connection(&line);
            }
            let _ = unmount_path(&self.at, UnmountFlags::DETACH);
        }
        if wait_for(PATIENCE, || self.child.try_wait().ok().flatten()).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
