//! A real mount of the real binary, gone when dropped.
//!
//! Dropping unmounts, waits for the daemon and checks that it ended well; a mount that does not
//! go is aborted, detached and its daemon (our own child, nobody else's) killed, and the test
//! fails.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::mount::UnmountFlags;

use crate::backing::{Backing, Prepared};
use crate::cleanup::{self, MountLine};
use crate::paths::{self, Scratch};
use crate::report;
use crate::tools::{self, wait_for};
use crate::watch::Watchdog;

const PATIENCE: Duration = Duration::from_secs(20);

/// What to mount and how.
#[derive(Debug)]
pub struct Builder {
    name: String,
    backing: Backing,
    source: Option<PathBuf>,
    mountpoint: Option<PathBuf>,
    options: Vec<String>,
    plain_mode: bool,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    limit: Duration,
    descriptors: Option<u64>,
    prepare: Option<fn(&Path)>,
    panics: bool,
    upper: bool,
}

impl Builder {
    /// The filesystem below the source (a plain directory unless said).
    pub fn backing(mut self, backing: Backing) -> Builder {
        self.backing = backing;
        self
    }

    /// Mounts this existing directory instead of a new one.
    pub fn source(mut self, source: &Path) -> Builder {
        self.source = Some(source.to_owned());
        self
    }

    /// Mounts onto this existing directory instead of a new one.
    pub fn onto(mut self, mountpoint: &Path) -> Builder {
        self.mountpoint = Some(mountpoint.to_owned());
        self
    }

    /// One -o option, "cache=16M".
    pub fn option(mut self, option: &str) -> Builder {
        self.options.push(option.to_owned());
        self
    }

    /// In the mode that nobody typed.
    pub fn default_mode(mut self) -> Self {
        self.plain_mode = true;
        self
    }

    /// One more argument before SOURCE, "--cache=16M".
    pub fn argument(mut self, argument: &str) -> Builder {
        self.arguments.push(argument.to_owned());
        self
    }

    /// One environment variable of the daemon.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The time-out of the whole test (120 s unless said).
    pub fn limit(mut self, limit: Duration) -> Builder {
        self.limit = limit;
        self
    }

    /// RLIMIT_NOFILE of the daemon, soft and hard.
    pub fn descriptors(mut self, limit: u64) -> Builder {
        self.descriptors = Some(limit);
        self
    }

    /// An overlay: the changes go into `upper` beside the source, in writeback mode.
    pub fn upper(mut self) -> Builder {
        self.upper = true;
        self.plain_mode = true;
        self
    }

    /// Handlers are made to panic: that alone is no failure of the test.
    pub fn expect_panics(mut self) -> Builder {
        self.panics = true;
        self
    }

    /// Fills the source before it is mounted.
    pub fn prepare(mut self, prepare: fn(&Path)) -> Builder {
        self.prepare = Some(prepare);
        self
    }

    /// Mounts. None: the running test was reported as skipped. Panics if the mount fails.
    pub fn start(self) -> Option<Mount> {
        if !report::have_fuse() {
            return None;
        }
        if self.backing.needs_root() && !report::have_root("a loop or tmpfs mount") {
            return None;
        }
        let watchdog = Watchdog::new(self.limit);
        let scratch = Scratch::new(&self.name);
        let prepared = match &self.source {
            Some(_) => None,
            None => Some(self.backing.prepare(&scratch)),
        };
        let source = match (&self.source, &prepared) {
            (Some(source), _) => source.clone(),
            (None, Some(prepared)) => prepared.root().to_owned(),
            (None, None) => unreachable!("a source is given or made"),
        };
        if let Some(prepare) = self.prepare {
            prepare(&source);
        }
        let mut builder = self;
        if builder.upper {
            builder.options.push(format!("upper={}", scratch.path().join("upper").display()));
        }
        let path = builder.mountpoint.clone().unwrap_or_else(|| scratch.path().join("mnt"));
        let _ = fs::create_dir(&path);
        let log = scratch.path().join("daemon.log");
        let mut mount = Mount {
            path: path.canonicalize().expect("the mountpoint exists"),
            source,
            log,
            child: None,
            line: None,
            builder,
            _prepared: prepared,
            _scratch: scratch,
            _watchdog: watchdog,
        };
        mount.spawn();
        Some(mount)
    }
}

/// A live mount.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    source: PathBuf,
    log: PathBuf,
    child: Option<Child>,
    line: Option<MountLine>,
    builder: Builder,
    // Dropped in this order, after the mount is gone.
    _prepared: Option<Prepared>,
    _scratch: Scratch,
    _watchdog: Watchdog,
}

impl Mount {
    /// Begins the description of a mount; `name` appears in its scratch directory's name.
    pub fn builder(name: &str) -> Builder {
        Builder {
            name: name.to_owned(),
            backing: Backing::Plain,
            source: None,
            mountpoint: None,
            options: Vec::new(),
            plain_mode: false,
            arguments: Vec::new(),
            environment: Vec::new(),
            limit: Duration::from_secs(120),
            descriptors: None,
            prepare: None,
            panics: false,
            upper: false,
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path on the mount.
    pub fn at(&self, below: impl AsRef<Path>) -> PathBuf {
        self.path.join(below)
    }

    /// The source directory.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// A path on the source.
    pub fn source_at(&self, below: impl AsRef<Path>) -> PathBuf {
        self.source.join(below)
    }

    /// The upper directory of an overlay.
    pub fn upper(&self) -> PathBuf {
        self.scratch().join("upper")
    }

    /// A directory beside source and mountpoint, for whatever else the test needs.
    pub fn scratch(&self) -> &Path {
        self._scratch.path()
    }

    /// Its line in mountinfo when it was mounted.
    pub fn line(&self) -> &MountLine {
        self.line.as_ref().expect("mounted")
    }

    /// Process id of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running daemon").id()
    }

    /// What the daemon has written to standard error.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// `bcachefs-fuse stat --json` of the mount, or of a path below it.
    pub fn stat_json(&self, below: &str) -> serde_json::Value {
        let path = if below.is_empty() { self.path.clone() } else { self.at(below) };
        let text =
            tools::run(paths::binary(), &["stat".as_ref(), "--json".as_ref(), path.as_os_str()]);
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("stat --json: {e}\n{text}"))
    }

    fn command(&self) -> Command {
        let log = fs::File::options().create(true).append(true).open(&self.log).expect("log");
        let mut command = match self.builder.descriptors {
            Some(limit) => {
                let mut prlimit = Command::new("prlimit");
                prlimit.arg(format!("--nofile={limit}:{limit}")).arg(paths::binary());
                prlimit
            }
            None => Command::new(paths::binary()),
        };
        command.args(["mount", "-f"]);
        let mut options = self.builder.options.clone();
        // Most tests look at the source while it is mounted; those of writeback say so, and
        // `default_mode` is for who wants neither.
        if !options.iter().any(|option| option.contains("cache_mode")) && !self.builder.plain_mode {
            options.push("cache_mode=writethrough".to_owned());
        }
        if !options.is_empty() {
            command.arg("-o").arg(options.join(","));
        }
        command.args(&self.builder.arguments).arg(&self.source).arg(&self.path);
        command.env("PATH", tools::path_with_sbin()).env_remove("NOTIFY_SOCKET");
        command.envs(self.builder.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(log));
        command
    }

    fn spawn(&mut self) {
        if let Err(said) = self.try_spawn() {
            panic!("{} was not mounted {said}", self.path.display());
        }
    }

    /// Starts the daemon and waits until it is mounted; else how it ended and what it said.
    fn try_spawn(&mut self) -> Result<(), String> {
        let before = cleanup::mount_at(&self.path).map(|line| line.minor);
        // The kernel may give the number of a dead mount to the one that replaces it.
        // (Its attributes may still be cached: only a request tells.)
        let answers = || fs::read_dir(&self.path).is_ok();
        let dead = before.is_some() && !answers();
        let mut child = self.command().spawn().expect("the binary under test starts");
        let mut ended: Option<ExitStatus> = None;
        let line = wait_for(PATIENCE, || {
            ended = child.try_wait().expect("wait");
            // In this order: between the two mounts the bare directory answers.
            let replaced = dead && answers();
            match cleanup::mount_at(&self.path) {
                Some(line) if ended.is_none() && (Some(line.minor) != before || replaced) => {
                    Some(Some(line))
                }
                _ if ended.is_some() => Some(None),
                _ => None,
            }
        });
        let Some(line) = line.flatten() else {
            let _ = child.kill();
            let _ = child.wait();
            let how = ended.map_or("within 20 s".to_owned(), |status| format!("({status})"));
            return Err(format!("{how}:\n{}", self.log()));
        };
        self.line = Some(line);
        self.child = Some(child);
        // The handshake is over once the root answers.
        fs::metadata(&self.path).map_err(|e| format!("stat of the new mount: {e}"))?;
        Ok(())
    }

    /// Unmounts in the ordinary way and returns the daemon's exit; the test may mount again.
    pub fn unmount(&mut self) -> ExitStatus {
        let busy = || match cleanup::unmount_path(&self.path, UnmountFlags::empty()) {
            Ok(()) => Some(()),
            Err(_) => None,
        };
        if wait_for(Duration::from_secs(3), busy).is_none() {
            let users = users_of(&self.path);
            self.force();
            panic!("{} stayed busy: {users}", self.path.display());
        }
        self.ended()
    }

    /// The exit of a daemon whose mount the test took away by other means.
    pub fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("a running daemon");
        let ended = wait_for(PATIENCE, || child.try_wait().expect("wait"));
        ended.unwrap_or_else(|| {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the daemon lived on after the unmount:\n{}", self.log());
        })
    }

    /// Unmounts and mounts again.
    pub fn remount(&mut self) {
        let status = self.unmount();
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
        self.spawn();
    }

    /// Mounts again after `unmount` or `kill`.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "still mounted");
        self.spawn();
    }

    /// Mounts again after `unmount` or `kill`; what the daemon said if it did not come up.
    pub fn try_again(&mut self) -> Result<(), String> {
        assert!(self.child.is_none(), "still mounted");
        self.try_spawn()
    }

    /// Changes how the next start mounts: `change` gets the options typed so far.
    pub fn change_options(&mut self, change: impl FnOnce(&mut Vec<String>)) {
        change(&mut self.builder.options);
    }

    /// Hands out the daemon of a mount that the test took away by other means: it may go on, and
    /// the test may mount again.
    pub fn part(&mut self) -> Child {
        self.child.take().expect("a running daemon")
    }

    /// kill -9 of the daemon; the dead mount stays.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("a running daemon");
        child.kill().expect("kill");
        let status = child.wait().expect("wait");
        assert_eq!(status.signal(), Some(9));
    }

    /// Gets rid of the mount whatever it takes.
    fn force(&mut self) {
        for _ in 0..4 {
            let line = cleanup::mount_at(&self.path).filter(|line| line.fstype.contains("fuse"));
            let Some(line) = line else { break };
            // A mountpoint that is a mount of its own (over itself) is not ours to take.
            if self.line.as_ref().is_some_and(|ours| ours.minor != line.minor) {
                break;
            }
            cleanup::abort_connection(&line);
            let _ = cleanup::unmount_path(&self.path, UnmountFlags::DETACH);
        }
        if let Some(mut child) = self.child.take() {
            let ended = wait_for(Duration::from_secs(2), || child.try_wait().ok().flatten());
            if ended.is_none() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Processes that stand in or have open something below `path`.
fn users_of(path: &Path) -> String {
    let mut users = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let links = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let links = links.map(|fd| fd.path()).chain([entry.path().join("cwd")]);
        let uses = |link: PathBuf| fs::read_link(link).is_ok_and(|to| to.starts_with(path));
        if links.into_iter().any(uses) {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            users.push(format!("{} {}", entry.file_name().to_string_lossy(), name.trim()));
        }
    }
    if users.is_empty() { "no process seen".into() } else { users.join(", ") }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if std::thread::panicking() || self.child.is_none() {
            if std::thread::panicking() {
                eprintln!("--- daemon said:\n{}---", self.log());
            }
            self.force();
            return;
        }
        let status = self.unmount();
        let log = self.log();
        assert!(status.success(), "the daemon ended with {status}:\n{log}");
        let panicked = log.contains("panicked at") && !self.builder.panics;
        assert!(!panicked, "a handler panicked:\n{log}");
    }
}
