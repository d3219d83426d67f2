//! Where the refusals are produced.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fuse_tests::cleanup::{mounts_below, unmount_path};
use fuse_tests::paths::{Scratch, binary};
use fuse_tests::tools::{path_with_sbin, wait_for};
use fuse_tests::users::run_as;
use fuse_tests::watch::Watchdog;
use fuse_tests::{report, run};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal, kill_process};

/// fusermount3 wants a user with a name.
pub const NOBODY: u32 = 65534;

/// T/src with one file, T/mnt, T/other; a copy of the binary that every user may run.
pub struct Place {
    pub scratch: Scratch,
    _watchdog: Watchdog,
}

impl Place {
    pub fn new(name: &str) -> Option<Place> {
        if !report::have_fuse() || !report::have_root("every refusal, also those of users") {
            return None;
        }
        let scratch = Scratch::new(name);
        for directory in ["src", "src/inner", "mnt", "other", "run"] {
            fs::create_dir(scratch.path().join(directory)).unwrap();
        }
        fs::write(scratch.path().join("src/file"), vec![0; 16384]).unwrap();
        // Not fs::copy: a fork of another test would hold the file open for writing (ETXTBSY).
        run("cp", &[binary(), scratch.path().join("bcachefs-fuse")]);
        Some(Place { scratch, _watchdog: Watchdog::new(Duration::from_secs(60)) })
    }

    pub fn at(&self, below: &str) -> PathBuf {
        self.scratch.path().join(below)
    }

    /// `bcachefs-fuse mount ARGUMENTS` in T.
    pub fn mount(&self, arguments: &str) -> Output {
        self.sh(&format!("./bcachefs-fuse mount {arguments}"))
    }

    pub fn sh(&self, line: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.scratch.path());
        command.env("LC_ALL", "C").env("PATH", path_with_sbin()).stdin(Stdio::null());
        command.output().unwrap()
    }

    /// In a mount namespace of its own, after `prepare`.
    pub fn apart(&self, prepare: &str, line: &str) -> Output {
        self.sh(&format!("exec unshare -m --propagation private sh -c '{prepare} && {line}'"))
    }

    /// The same as nobody, with T/run as his runtime directory.
    pub fn mount_as_nobody(&self, arguments: &str) -> Output {
        let mode = fs::metadata("/dev/fuse").unwrap().permissions().mode();
        fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(mode | 0o666)).unwrap();
        self.give("run");
        let t = self.scratch.path().display();
        run_as(
            NOBODY,
            &format!("cd {t} && XDG_RUNTIME_DIR={t}/run ./bcachefs-fuse mount {arguments}"),
        )
    }

    pub fn give(&self, below: &str) {
        chown(self.at(below), Some(NOBODY), Some(NOBODY)).unwrap();
    }

    /// Writes bytes into T/src/file.
    pub fn poke(&self, offset: usize, bytes: &[u8]) {
        let mut content = fs::read(self.at("src/file")).unwrap();
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        fs::write(self.at("src/file"), content).unwrap();
    }

    /// A FUSE mount whose daemon is dead.
    pub fn dead_mount(&self, kind: &str, below: &str) {
        let fd = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let fd = fd.unwrap();
        let data = format!("fd={},rootmode=40755,user_id=0,group_id=0,allow_other", fd.as_raw_fd());
        let data = std::ffi::CString::new(data).unwrap();
        let flags = MountFlags::empty();
        rustix::mount::mount("x", self.at(below), kind, flags, data.as_c_str()).unwrap();
    }

    /// Mounts T/src on T/mnt, without a journal; the daemon's process.
    pub fn live(&self) -> Pid {
        let output = self.mount("-o cache_mode=writethrough src mnt");
        assert!(output.status.success(), "{output:?}");
        let (_, entry) = self.entries().pop().unwrap();
        Pid::from_raw(entry["pid"].as_i64().unwrap() as i32).unwrap()
    }

    /// Entries of live mounts below T.
    pub fn entries(&self) -> Vec<(PathBuf, serde_json::Value)> {
        let below = self.scratch.path().to_str().unwrap();
        let directories = [PathBuf::from("/run/bcachefs-fuse"), self.at("run/bcachefs-fuse")];
        let files = directories.iter().flat_map(|path| fs::read_dir(path).into_iter().flatten());
        files
            .flatten()
            .filter_map(|file| {
                let text = fs::read_to_string(file.path()).ok()?;
                let entry: serde_json::Value = serde_json::from_str(&text).ok()?;
                let inside = entry["mountpoint"].as_str()?.starts_with(below);
                inside.then(|| (file.path(), entry))
            })
            .collect()
    }

    /// Ends what a case mounted itself.
    pub fn clean(&self) {
        for line in mounts_below(self.scratch.path()).into_iter().rev() {
            let _ = unmount_path(&line.path, UnmountFlags::DETACH);
        }
        let gone = || self.entries().is_empty().then_some(());
        assert!(wait_for(Duration::from_secs(10), gone).is_some(), "{:?}", self.entries());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for line in mounts_below(self.scratch.path()).into_iter().rev() {
            let _ = unmount_path(&line.path, UnmountFlags::DETACH);
        }
    }
}

/// A daemon that is killed whatever happens.
pub struct Stopped(pub Pid);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}
