//! Where things are: the target directory, the binary under test, scratch space.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The name below which every scratch directory lies; the runner removes what is left there.
pub const SCRATCH: &str = "bcachefs-fuse-tests";

/// The root of the repository.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The directory of the running profile, target/debug or target/release.
pub fn profile_dir() -> PathBuf {
    let exe = env::current_exe().expect("current_exe");
    let dir = exe.parent().expect("an executable lies in a directory");
    let up = dir.ends_with("deps") || dir.ends_with("examples");
    if up { dir.parent().expect("deps lies below the profile").to_owned() } else { dir.to_owned() }
}

/// The target directory.
pub fn target_dir() -> PathBuf {
    let profile = profile_dir();
    profile.parent().unwrap_or(&profile).to_owned()
}

/// The binary under test: `$BCACHEFS_FUSE`, else the one of this profile, built if need be.
pub fn binary() -> PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(find_binary).clone()
}

fn find_binary() -> PathBuf {
    if let Some(path) = env::var_os("BCACHEFS_FUSE") {
        return path.into();
    }
    let profile = profile_dir();
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "-q", "-p", "bcachefs-fuse", "--bin", "bcachefs-fuse", "--target-dir"]);
    cargo.arg(target_dir()).current_dir(repository());
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "cargo build of the binary under test failed");
    profile.join("bcachefs-fuse")
}

/// A tool that `make deps` installed (pjdfstest, fsx), or the one in PATH.
pub fn tool(name: &str) -> PathBuf {
    let tools = env::var_os("FUSE_TESTS_TOOLS").map(PathBuf::from);
    let tools = tools.unwrap_or_else(|| target_dir().join("tools"));
    let path = tools.join("bin").join(name);
    if path.exists() { path } else { name.into() }
}

/// The directory of all scratch directories: target/tmp/..., or the system's where other users
/// cannot come to target (a checkout below /root).
pub fn scratch_base() -> PathBuf {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    let choose = || {
        let target = target_dir();
        let open_to_all = target
            .ancestors()
            .all(|dir| fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0));
        let base = if open_to_all { target.join("tmp") } else { env::temp_dir() };
        let uid = rustix::process::getuid().as_raw();
        let name = if open_to_all { SCRATCH.to_owned() } else { format!("{SCRATCH}-{uid}") };
        base.join(name)
    };
    BASE.get_or_init(choose).clone()
}

/// A scratch directory that is removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new empty directory, mode 0755, with `name` in its name.
    pub fn new(name: &str) -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let path = scratch_base().join(format!("{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap_or_else(|e| panic!("mkdir {}: {e}", path.display()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        let path = path.canonicalize().expect("canonicalize");
        Scratch { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let left = crate::cleanup::sweep(&self.path);
        if !left.is_empty() && !std::thread::panicking() {
            panic!("left behind: {}", left.join(", "));
        }
    }
}

/// A short name for a long path, where a socket's address (108 bytes) must hold it: a symbolic
/// link in the system's temporary directory, removed when dropped.
#[derive(Debug)]
pub struct ShortPath {
    link: PathBuf,
}

/// Beginning of the names of such links; the process id follows.
pub const SHORT: &str = "bft-";

impl ShortPath {
    /// A link to `path`.
    pub fn new(path: &Path) -> ShortPath {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let link = env::temp_dir().join(format!("{SHORT}{}-{number}", std::process::id()));
        std::os::unix::fs::symlink(path, &link).expect("symlink");
        ShortPath { link }
    }

    /// The short name.
    pub fn path(&self) -> &Path {
        &self.link
    }
}

impl Drop for ShortPath {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
    }
}
