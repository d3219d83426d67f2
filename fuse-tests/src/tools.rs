//! Small helpers: running commands, dropping the kernel's caches, filling files.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs a command without a terminal and returns what it said.
pub fn try_run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S]) -> Output {
    let mut command = Command::new(program.as_ref());
    command.args(args).stdin(Stdio::null()).env("LC_ALL", "C").env("PATH", path_with_sbin());
    let name = program.as_ref().to_string_lossy();
    command.output().unwrap_or_else(|e| panic!("{name}: {e} (make deps installs it)"))
}

/// PATH with the directories of the administrator's commands.
pub fn path_with_sbin() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

/// Runs a command that must succeed and returns its standard output.
pub fn run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S]) -> String {
    let output = try_run(program.as_ref(), args);
    let line: Vec<_> = args.iter().map(|a| a.as_ref().to_string_lossy().into_owned()).collect();
    assert!(
        output.status.success(),
        "{} {} failed ({}):\n{}{}",
        program.as_ref().to_string_lossy(),
        line.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs one shell line in `dir`; it must succeed. Returns its standard output.
pub fn sh(dir: &Path, line: &str) -> String {
    let dir = dir.to_str().expect("scratch paths are UTF-8");
    run("sh", &["-c", "cd \"$0\" && set -e && eval \"$1\"", dir, line])
}

/// Empties the kernel's page, dentry and inode caches (root only; others have to do without).
pub fn drop_caches() {
    rustix::fs::sync();
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Bytes that are different for each seed and the same in each run.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Writes a file anew and syncs it.
pub fn write_synced(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.write_all(bytes).and_then(|()| file.sync_all()).expect("write");
}

/// Waits until `ready` gives something, at most `limit`.
pub fn wait_for<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Resident memory of a process in bytes.
pub fn rss_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    kib * 1024
}

/// Open descriptors of a process.
pub fn open_descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("fd").count()
}
