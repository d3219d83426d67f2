//! Mounts to measure: ours, `examples/null`, bindfs, fuse-overlayfs. Each is a child of this
//! process in the foreground; dropping the guard unmounts and waits, whatever happened in between.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Res, is_root, product, run, target_dir};

const PATIENCE: Duration = Duration::from_secs(20);

/// A mounted filesystem served by a child process.
pub struct Mount {
    name: &'static str,
    mountpoint: PathBuf,
    child: Child,
    ended: bool,
}

impl Mount {
    /// `bcachefs-fuse mount -f [-o options] source mountpoint`.
    pub fn ours(source: &Path, mountpoint: &Path, options: &str) -> Res<Mount> {
        let mut command = Command::new(product()?);
        command.args(["mount", "-f"]);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        command.arg(source).arg(mountpoint);
        Mount::start("bcachefs-fuse", command, mountpoint)
    }

    /// `examples/null mountpoint`: its one file is `big`.
    pub fn null(mountpoint: &Path) -> Res<Mount> {
        let mut command = Command::new(target_dir()?.join("release/examples/null"));
        command.arg(mountpoint);
        Mount::start("null", command, mountpoint)
    }

    /// `bindfs -f source mountpoint`.
    pub fn bindfs(source: &Path, mountpoint: &Path) -> Res<Mount> {
        let mut command = Command::new("bindfs");
        command.arg("-f").arg(source).arg(mountpoint);
        Mount::start("bindfs", command, mountpoint)
    }

    /// `fuse-overlayfs -f` with these layers.
    pub fn fuse_overlayfs(lower: &Path, upper: &Path, work: &Path, at: &Path) -> Res<Mount> {
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let mut command = Command::new("fuse-overlayfs");
        command.args(["-f", "-o", &layers]).arg(at);
        Mount::start("fuse-overlayfs", command, at)
    }

    fn start(name: &'static str, mut command: Command, mountpoint: &Path) -> Res<Mount> {
        fs::create_dir_all(mountpoint)?;
        let parent = mountpoint.parent().ok_or("a mountpoint has a parent")?;
        let outside = fs::metadata(parent)?.dev();
        // What a daemon says is shown if it does not come up, and else goes with the scratch.
        let log = mountpoint.with_extension("log");
        let said = File::options().create(true).append(true).open(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said)
            .spawn()
            .map_err(|e| format!("{}: {e}", command.get_program().display()))?;
        let mountpoint = mountpoint.to_path_buf();
        let mut mount = Mount { name, mountpoint, child, ended: false };
        let start = Instant::now();
        loop {
            if let Some(status) = mount.child.try_wait()? {
                mount.ended = true;
                let said = fs::read_to_string(&log).unwrap_or_default();
                let said = said.trim_end();
                return Err(format!("{command:?} was not mounted: {status}: {said}").into());
            }
            if fs::metadata(&mount.mountpoint).is_ok_and(|m| m.dev() != outside) {
                return Ok(mount);
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("{command:?} was not mounted in {PATIENCE:?}").into());
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// The daemon's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What `stat --json` says (ours only).
    pub fn stat(&self) -> Res<Stat> {
        let said = run(Command::new(product()?).args(["stat", "--json"]).arg(&self.mountpoint))?;
        Stat::parse(&said)
    }

    /// Kilobytes of the daemon's memory that are resident.
    pub fn rss_kib(&self) -> Res<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.ok_or("no VmRSS in /proc/PID/status")?.parse()?)
    }

    /// Unmounts as a user would and waits for the daemon.
    pub fn unmount(mut self) -> Res<()> {
        if self.name == "bcachefs-fuse" {
            run(Command::new(product()?).arg("umount").arg(&self.mountpoint))?;
        } else {
            unmount_command(&self.mountpoint, false)?;
        }
        if self.wait() {
            return Ok(());
        }
        Err(format!("{} did not end after its unmount", self.name).into())
    }

    fn wait(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                self.ended = true;
                return true;
            }
            sleep(Duration::from_millis(5));
        }
        false
    }
}

fn unmount_command(mountpoint: &Path, lazy: bool) -> Res<String> {
    let (program, arg) = match (is_root(), lazy) {
        (true, false) => ("umount", "-i"),
        (true, true) => ("umount", "-il"),
        (false, false) => ("fusermount3", "-u"),
        (false, true) => ("fusermount3", "-uz"),
    };
    run(Command::new(program).arg(arg).arg(mountpoint))
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // The way of an error: nobody is left to report to, and nothing may stay behind.
        if unmount_command(&self.mountpoint, true).is_err() || !self.wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = unmount_command(&self.mountpoint, true);
        }
    }
}

/// The counters in one answer of `stat --json`.
pub struct Stat(Value);

impl Stat {
    /// Of the text that was printed.
    pub fn parse(said: &str) -> Res<Stat> {
        let mut all: Value =
            serde_json::from_str(said).map_err(|e| format!("stat --json: {e}: {said}"))?;
        let snapshot = all["snapshot"].take();
        Ok(Stat(if snapshot.is_null() { all } else { snapshot }))
    }

    /// A counter of the whole mount.
    pub fn total(&self, name: &str) -> Res<u64> {
        let total = &self.0["total"];
        counter(total, name)
    }

    /// A number beside the counters, such as `resident_blocks`.
    pub fn number(&self, name: &str) -> Res<u64> {
        self.0[name].as_u64().ok_or_else(|| format!("stat --json has no {name}").into())
    }

    /// A number of `writeback`.
    pub fn writeback(&self, name: &str) -> Res<u64> {
        let number = self.0["writeback"][name].as_u64();
        number.ok_or_else(|| format!("stat --json has no writeback.{name}").into())
    }

    /// A counter of every device, by the device's path.
    pub fn devices(&self, name: &str) -> Res<Vec<(String, u64)>> {
        let devices = self.0["devices"].as_array().ok_or("stat --json has no devices")?;
        let mut all = Vec::new();
        for device in devices {
            let path = device["path"].as_str().unwrap_or("?").to_owned();
            all.push((path, counter(device, name)?));
        }
        all.sort();
        Ok(all)
    }
}

fn counter(object: &Value, name: &str) -> Res<u64> {
    let nested = object["counters"][name].as_u64();
    nested
        .or_else(|| object[name].as_u64())
        .ok_or_else(|| format!("stat --json has no counter {name}").into())
}
