//! What `make bench`, `make raidz` and the slow-source tests share: mounts that clean up after
//! themselves, fio, side-by-side measuring, the report.
//!
//! Nothing here knows the daemon's insides: it is run as a user runs it, and asked over `stat`.

pub mod contender;
pub mod duel;
pub mod fio;
pub mod lines;
pub mod report;
pub mod zfs;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Any failure of a measurement, as a sentence.
pub type Res<T> = Result<T, Box<dyn Error>>;

/// The directory cargo builds into (`target/`), from where this program lies in it.
pub fn target_dir() -> Res<PathBuf> {
    let exe = std::env::current_exe()?;
    let profile = exe.parent().ok_or("this program has no directory")?;
    let profile = if profile.ends_with("deps") { profile.parent() } else { Some(profile) };
    let target = profile.and_then(Path::parent).ok_or("this program is not below target/")?;
    Ok(target.to_path_buf())
}

/// The release build of `bcachefs-fuse`, `examples/null` and our `seekdisk`, built first when cargo
/// runs us.
/// `BCACHEFS_FUSE` names another binary to measure.
pub fn build_release() -> Res<()> {
    let Some(cargo) = std::env::var_os("CARGO") else { return Ok(()) };
    let product = ["-p", "bcachefs-fuse", "--bin", "bcachefs-fuse", "--example", "null"];
    for what in [&product[..], &["-p", "fuse-tests", "--bin", "seekdisk"]] {
        let mut build = Command::new(&cargo);
        build.args(["build", "-q", "--release"]).args(what).stdin(Stdio::null());
        if !build.status()?.success() {
            return Err("cargo build --release failed".into());
        }
    }
    Ok(())
}

/// The binary under test.
pub fn product() -> Res<PathBuf> {
    let path = match std::env::var_os("BCACHEFS_FUSE") {
        Some(path) => PathBuf::from(path),
        None => target_dir()?.join("release/bcachefs-fuse"),
    };
    if path.is_file() { Ok(path) } else { Err(format!("{} is not built", path.display()).into()) }
}

/// Runs a command to its end; its output, or an error with the command and what it said.
pub fn run(command: &mut Command) -> Res<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?} failed ({}): {}{}", output.status, error.trim(), said.trim()).into())
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
