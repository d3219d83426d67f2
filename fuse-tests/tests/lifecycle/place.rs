//! What the tests of a mount's life share: two directories, a daemon in the foreground, and the
//! registry of live mounts.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use fuse_tests::cleanup::unmount_path;
use fuse_tests::paths::{Scratch, binary};
use fuse_tests::report;
use fuse_tests::tools::wait_for;
use fuse_tests::watch::Watchdog;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

/// fusermount3 wants a user with a name: nobody.
pub const NOBODY: u32 = 65534;
pub const SOON: Duration = Duration::from_secs(10);

/// A root directory and nothing in it.
pub struct Empty;

impl fuser::Filesystem for Empty {
    fn getattr(
        &self,
        _request: &fuser::Request,
        ino: fuser::INodeNo,
        _fh: Option<fuser::FileHandle>,
        reply: fuser::ReplyAttr,
    ) {
        let epoch = std::time::UNIX_EPOCH;
        let attr = fuser::FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            crtime: epoch,
            kind: fuser::FileType::Directory,
            perm: 0o755,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&Duration::from_secs(1), &attr);
    }
}

/// Two directories and a watchdog; whatever is mounted there goes with it.
pub struct Place {
    pub source: PathBuf,
    pub mountpoint: PathBuf,
    pub scratch: Scratch,
    _watchdog: Watchdog,
}

impl Place {
    pub fn new(name: &str) -> Option<Place> {
        if !report::have_fuse() {
            return None;
        }
        let scratch = Scratch::new(name);
        let (source, mountpoint) = (scratch.path().join("src"), scratch.path().join("mnt"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&mountpoint).unwrap();
        fs::write(source.join("file"), "content").unwrap();
        Some(Place {
            source,
            mountpoint,
            scratch,
            _watchdog: Watchdog::new(Duration::from_secs(60)),
        })
    }

    pub fn root(name: &str) -> Option<Place> {
        if report::have_root("mount(2)") { Place::new(name) } else { None }
    }

    /// `bcachefs-fuse mount`, as a daemon.
    pub fn mount(&self, options: &[&str], onto: &Path) -> Output {
        mount(options, &self.source, onto)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for line in fuse_tests::cleanup::mounts_below(self.scratch.path()).into_iter().rev() {
            let _ = unmount_path(&line.path, UnmountFlags::DETACH);
        }
    }
}

pub fn mount(options: &[&str], source: &Path, onto: &Path) -> Output {
    let mut command = Command::new(binary());
    command.arg("mount").args(options).arg(source).arg(onto).stdin(Stdio::null());
    command.output().unwrap()
}

pub fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The entry of the mount on this directory in the registry of live mounts.
pub fn entry_of(mountpoint: &Path) -> Option<serde_json::Value> {
    entries()
        .into_iter()
        .map(|(_, entry)| entry)
        .find(|entry| entry["mountpoint"].as_str() == mountpoint.to_str())
}

pub fn entries() -> Vec<(PathBuf, serde_json::Value)> {
    let files = fs::read_dir("/run/bcachefs-fuse").into_iter().flatten().flatten();
    files
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| {
            let text = fs::read_to_string(&path).ok()?;
            Some((path, serde_json::from_str(&text).ok()?))
        })
        .collect()
}

pub fn pid_of(mountpoint: &Path) -> Pid {
    let entry = entry_of(mountpoint).expect("a registered mount");
    Pid::from_raw(entry["pid"].as_i64().unwrap() as i32).unwrap()
}

pub fn socket_of(mountpoint: &Path) -> PathBuf {
    let device = entry_of(mountpoint).expect("a registered mount")["device"].clone();
    format!("/run/bcachefs-fuse/{}-{}.sock", device[0], device[1]).into()
}

/// Waits until a process that is not our child is gone.
pub fn gone(pid: Pid) -> bool {
    let path = PathBuf::from(format!("/proc/{}/exe", pid.as_raw_pid()));
    wait_for(SOON, || fs::read_link(&path).err()).is_some()
}

/// `bcachefs-fuse mount -f`, our own child; killed if a test forgets it.
pub struct Foreground {
    pub child: Child,
    pub log: PathBuf,
}

impl Foreground {
    pub fn start(place: &Place) -> Foreground {
        let log = place.scratch.path().join("log");
        let child = Command::new(binary())
            .args(["mount", "-f"])
            .args([&place.source, &place.mountpoint])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let ready = || fs::metadata(place.mountpoint.join("file")).ok();
        assert!(wait_for(SOON, ready).is_some(), "{}", fs::read_to_string(&log).unwrap());
        Foreground { child, log }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub fn end(&mut self) -> Option<i32> {
        let ended = wait_for(SOON, || self.child.try_wait().unwrap());
        ended.unwrap_or_else(|| panic!("still there:\n{}", self.log())).code()
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As udev sets it everywhere; a bare devtmpfs has 0600, and fusermount3 opens it as its user.
pub fn open_fuse_to_users() {
    let mode = fs::metadata("/dev/fuse").unwrap().permissions().mode();
    fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(mode | 0o666)).unwrap();
}
