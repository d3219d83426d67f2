//! `flush`, `umount` and umount(8)'s helper against a daemon that only pretends: a mount that
//! answers nothing, and a control socket that flushes as its script says. So every way a flush can
//! end is seen by the real commands, the slow ones too.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bcachefs_fuse::config::{CacheMode, Config, Tunables};
use bcachefs_fuse::control::Mounted;
use bcachefs_fuse::control::server::{self, MountInfo};
use bcachefs_fuse::error::Result;
use bcachefs_fuse::fuse::mount::KernelMount;
use bcachefs_fuse::stats::{BlockInfo, FlushProgress, Snapshot, WritebackStat};
use fuse_tests::cleanup::{mount_at, unmount_path};
use fuse_tests::paths::{self, Scratch};
use fuse_tests::report;
use fuse_tests::tools::wait_for;
use fuse_tests::watch::Watchdog;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

const DIRTY: u64 = 3 << 20;
const STEP: Duration = Duration::from_millis(20);

/// How a flush goes: "well", "stuck", "endless".
struct Fake {
    script: String,
    tunables: Tunables,
}

impl Mounted for Fake {
    fn snapshot(&self, _unit: Option<u32>) -> Snapshot {
        let dirty_bytes = if self.script == "clean" { 0 } else { DIRTY };
        let writeback = (self.script != "none").then(|| WritebackStat {
            dirty_bytes,
            dirty_devices: 1,
            ..WritebackStat::default()
        });
        Snapshot { writeback, ..Snapshot::default() }
    }

    fn resolve(&self, _below: &Path) -> Result<Option<u32>> {
        Ok(None)
    }

    fn blocks(&self, _unit: Option<u32>) -> Vec<BlockInfo> {
        Vec::new()
    }

    fn tunables(&self) -> &Tunables {
        &self.tunables
    }

    fn set_cache_mode(&self, _mode: CacheMode) {}

    fn start_trace(&self, _file: &Path) -> Result<()> {
        Ok(())
    }

    fn stop_trace(&self) {}

    fn open_files(&self) -> usize {
        0
    }

    fn flush(
        &self,
        below: Option<&Path>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        println!("flush {below:?}");
        let mut progress = FlushProgress { left_bytes: DIRTY, ..FlushProgress::default() };
        let mut step = 0;
        while self.script == "endless" || step < 3 {
            if !tell(&progress) {
                println!("given up");
                return Ok(progress);
            }
            step += 1;
            std::thread::sleep(STEP);
        }
        (progress.done_bytes, progress.left_bytes) = (DIRTY, 0);
        (progress.elapsed_ms, progress.depth) = (1500, 64);
        if self.script == "stuck" {
            (progress.done_bytes, progress.left_bytes) = (DIRTY - 4096, 4096);
            progress.stuck = vec![("a.img".into(), "No space left on device".into())];
        }
        Ok(progress)
    }

    fn leave_rest(&self, leave: bool) {
        println!("leave {leave}");
    }
}

fn config(scratch: &Path) -> Config {
    use bcachefs_fuse::cli::meaning::{self, Machine};
    let mut words = bcachefs_fuse::cli::words::Words::default();
    words.add_list("flush_timeout=300ms".as_ref()).unwrap();
    let machine = Machine { root: true, memory: 1 << 30 };
    let (source, mountpoint) = (scratch.join("src"), scratch.join("mnt"));
    meaning::config(&source, &mountpoint, &words, true, false, machine).unwrap()
}

/// Not a test: the process that pretends, until its mount is gone.
#[test]
fn pretending_daemon() {
    let Some(place) = std::env::var_os("PRETEND_AT").map(PathBuf::from) else { return };
    let config = config(&place);
    let (_device, mount) = KernelMount::make(&config.mount, 0o40755).unwrap();
    let script = std::env::var("PRETEND_HOW").unwrap();
    let fake = Fake { script, tunables: Tunables::new(&config.store) };
    let device = mount.device().unwrap();
    let info = MountInfo { config, device, shutdown: Box::new(|| ()) };
    let server = server::spawn(Arc::new(fake), info).unwrap();
    println!("ready");
    let gone = || (!mount.is_mounted()).then_some(());
    wait_for(Duration::from_secs(50), gone).expect("nobody unmounts");
    drop(server);
}

struct Pretended {
    scratch: Scratch,
    daemon: Child,
    said: BufReader<std::process::ChildStdout>,
    _watchdog: Watchdog,
}

impl Pretended {
    fn new(script: &str) -> Option<Pretended> {
        if !report::have_fuse() || !report::have_root("mount(2) without a filesystem behind it") {
            return None;
        }
        let scratch = Scratch::new("pretend");
        for directory in ["src", "mnt"] {
            fs::create_dir(scratch.path().join(directory)).unwrap();
        }
        let mut daemon = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "flush::pretending_daemon", "--nocapture"])
            .env("PRETEND_AT", scratch.path())
            .env("PRETEND_HOW", script)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(daemon.stdout.take().unwrap());
        let mut line = String::new();
        while !line.ends_with("ready\n") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "the daemon ended");
        }
        let _watchdog = Watchdog::new(Duration::from_secs(60));
        Some(Pretended { scratch, daemon, said, _watchdog })
    }

    fn command(&self, line: &str) -> Command {
        let mut words = line.split(' ');
        let mut command = match words.next() {
            Some("helper") => {
                let helper = self.scratch.path().join("umount.fuse.bcachefs-fuse");
                let _ = symlink(paths::binary(), &helper);
                Command::new(helper)
            }
            first => {
                let mut command = Command::new(paths::binary());
                command.args(first);
                command
            }
        };
        command.args(words).arg(self.scratch.path().join("mnt")).stdin(Stdio::null());
        command
    }

    /// Exit code, standard output and standard error, without the place.
    fn run(&self, line: &str) -> (i32, String, String) {
        self.plain(self.command(line).output().unwrap())
    }

    /// The same with a Ctrl-C once the flush has begun.
    fn interrupted(&mut self, line: &str) -> (i32, String, String) {
        let mut command = self.command(line);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        self.until("flush None\n");
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        self.plain(child.wait_with_output().unwrap())
    }

    fn plain(&self, output: Output) -> (i32, String, String) {
        let plain = |bytes: &[u8]| {
            let place = self.scratch.path().display().to_string();
            String::from_utf8_lossy(bytes).replace(&place, "T")
        };
        (output.status.code().unwrap_or(-1), plain(&output.stdout), plain(&output.stderr))
    }

    fn until(&mut self, wanted: &str) {
        let mut line = String::new();
        while line != wanted {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "no {wanted:?}");
        }
    }

    fn is_mounted(&self) -> bool {
        mount_at(&self.scratch.path().join("mnt")).is_some()
    }

    /// What the daemon heard, until its end.
    fn end(&mut self) -> String {
        if self.is_mounted() {
            unmount_path(&self.scratch.path().join("mnt"), UnmountFlags::empty()).unwrap();
        }
        let mut said = String::new();
        self.said.read_to_string(&mut said).unwrap();
        assert!(self.daemon.wait().unwrap().success());
        said
    }
}

impl Drop for Pretended {
    fn drop(&mut self) {
        let _ = unmount_path(&self.scratch.path().join("mnt"), UnmountFlags::DETACH);
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

const LEFT: &str = "T/src: the next mount writes them home; until then these files are not current";

#[test]
fn flush_waits_and_tells() {
    let Some(mut well) = Pretended::new("well") else { return };
    let line = "T/mnt: 3M home in 1.5 s (2.0 MiB/s), depth 64\n";
    assert_eq!(well.run("flush"), (0, line.into(), String::new()));
    assert!(well.is_mounted() && well.end().contains("flush None\n"));
    let Some(stuck) = Pretended::new("stuck") else { return };
    let (code, _, line) = stuck.run("flush");
    let expected = "bcachefs-fuse: not written home: a.img (No space left on device): T/mnt: its \
                    data stays in the journal and is tried again; bcachefs-fuse stat shows it\n";
    assert_eq!((code, line.as_str()), (1, expected));
    let Some(without) = Pretended::new("none") else { return };
    let line = "T/mnt: nothing to flush, it has no journal\n";
    assert_eq!(without.run("flush"), (0, line.into(), String::new()));
    let Some(mut endless) = Pretended::new("endless") else { return };
    let line =
        "bcachefs-fuse: stopped, 3M still to go: T/mnt: the daemon writes on at its own rate\n";
    assert_eq!(endless.interrupted("flush"), (1, String::new(), line.into()));
    endless.until("given up\n");
    assert!(endless.is_mounted() && !endless.end().contains("leave"));
}

#[test]
fn umount_flushes_first_and_says_what_is_left() {
    let Some(mut well) = Pretended::new("well") else { return };
    assert_eq!(well.run("umount"), (0, String::new(), String::new()));
    assert!(!well.is_mounted());
    let said = well.end();
    assert!(said.contains("flush None\n") && !said.contains("leave"), "{said}");
    let Some(mut clean) = Pretended::new("clean") else { return };
    assert_eq!(clean.run("umount"), (0, String::new(), String::new()));
    assert!(!clean.end().contains("flush None"));
    let Some(mut stuck) = Pretended::new("stuck") else { return };
    let line = "bcachefs-fuse: unmounted, 4K are left in the journal: T/src: a.img (No space left \
                on device); the next mount writes them home; until then these files are not \
                current\n";
    assert_eq!(stuck.run("umount"), (1, String::new(), line.into()));
    assert!(!stuck.is_mounted() && stuck.end().contains("leave true\n"));
}

#[test]
fn umount_leaves_the_rest_when_asked_to() {
    let left = format!("unmounted, 3M are left in the journal: {LEFT}\n");
    let Some(mut asked) = Pretended::new("endless") else { return };
    assert_eq!(asked.run("umount -n"), (0, left.clone(), String::new()));
    let said = asked.end();
    assert!(said.contains("leave true\n") && !said.contains("flush None"), "{said}");
    let Some(mut endless) = Pretended::new("endless") else { return };
    let line = format!("bcachefs-fuse: {left}");
    assert_eq!(endless.interrupted("umount"), (1, String::new(), line));
    assert!(!endless.is_mounted());
    let said = endless.end();
    assert!(said.contains("given up\n") && said.contains("leave true\n"), "{said}");
    let Some(mut lazy) = Pretended::new("endless") else { return };
    assert_eq!(lazy.run("umount -l"), (0, String::new(), String::new()));
    assert!(!lazy.end().contains("flush None"));
}

#[test]
fn the_helper_of_umount_8_waits_for_flush_timeout() {
    let Some(mut endless) = Pretended::new("endless") else { return };
    let line = "bcachefs-fuse: unmounted, 3M are left in the journal: T/src: its daemon writes \
                them home, or the next mount; until then these files are not current\n";
    assert_eq!(endless.run("helper"), (0, String::new(), line.into()));
    assert!(!endless.is_mounted());
    let said = endless.end();
    assert!(said.contains("given up\n") && !said.contains("leave"), "{said}");
    let Some(mut well) = Pretended::new("well") else { return };
    assert_eq!(well.run("helper"), (0, String::new(), String::new()));
    assert!(well.end().contains("flush None\n"));
}
