//! What the tests of writeback share: the gate, mounts with a journal, commands and counters.
//!
//! `FUSE_TESTS_CACHE_MODE=writethrough` runs the same tests in another mode, without a journal:
//! what they ask of the data holds there too (what they ask of counters is left out).

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::mount::Builder;
use crate::report;
use crate::tools::{path_with_sbin, wait_for};
use crate::{Backing, Mount, paths};

/// The directory of the state below SOURCE.
pub const STATE: &str = ".bcachefs-fuse";

/// The mode these tests run in.
pub fn mode() -> &'static str {
    static MODE: OnceLock<String> = OnceLock::new();
    let asked = || env::var("FUSE_TESTS_CACHE_MODE").unwrap_or_else(|_| "writeback".into());
    MODE.get_or_init(asked)
}

/// Whether the mounts of these tests have a journal.
pub fn journaled() -> bool {
    mode() == "writeback"
}

/// Whether the binary under test knows writeback; if not the running test is reported as skipped.
pub fn writeback_is_there() -> bool {
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    let ask = || {
        let mut command = Command::new(paths::binary());
        // Options are looked at first: nothing can come of these directories.
        command.args(["mount", "-o", "cache_mode=writeback", "/nonexistent/a", "/nonexistent/b"]);
        let said = command.stdin(Stdio::null()).output().expect("the binary under test starts");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        said.contains("later version").then_some(said)
    };
    match REFUSED.get_or_init(ask) {
        Some(said) if journaled() => {
            report::skip(&format!("no writeback in this binary: {}", said.trim()));
            false
        }
        _ => true,
    }
}

/// A mount in writeback mode over a plain directory; None if the test was skipped.
pub fn builder(name: &str) -> Option<Builder> {
    if !writeback_is_there() {
        return None;
    }
    Some(Mount::builder(name).option(&format!("cache_mode={}", mode())))
}

/// The same over an ext4 of its own.
pub fn on_ext4(name: &str, mib: u32) -> Option<Builder> {
    Some(builder(name)?.backing(Backing::Ext4(mib)))
}

impl Builder {
    /// An option that means something with a journal only, "journal_size=8M".
    pub fn journal_option(self, option: &str) -> Builder {
        if journaled() { self.option(option) } else { self }
    }
}

/// Runs the binary under test; its exit and output.
pub fn try_product<S: AsRef<OsStr>>(args: &[S]) -> Output {
    let mut command = Command::new(paths::binary());
    command.args(args).stdin(Stdio::null()).env("PATH", path_with_sbin());
    command.output().expect("the binary under test starts")
}

fn product(args: &[&OsStr]) -> String {
    let output = try_product(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {}\n{error}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `bcachefs-fuse set MNT KEY=VALUE...`.
pub fn set(mount: &Mount, pairs: &[&str]) {
    let mut args: Vec<&OsStr> = vec!["set".as_ref(), mount.path().as_os_str()];
    args.extend(pairs.iter().map(|pair| OsStr::new(*pair)));
    product(&args);
}

/// Nothing goes home from now on (until the journal is 70 % full).
pub fn hold(mount: &Mount) {
    if journaled() {
        set(mount, &["writeback_running=0"]);
    }
}

/// Dirty data goes home again.
pub fn release(mount: &Mount) {
    if journaled() {
        set(mount, &["writeback_running=1"]);
    }
}

/// `bcachefs-fuse flush MNT`, which must succeed and leave nothing dirty.
pub fn flush(mount: &Mount) {
    if journaled() {
        product(&["flush".as_ref(), mount.path().as_os_str()]);
        assert_eq!(number(mount, "dirty_bytes"), 0, "dirty after a flush");
    }
}

/// `snapshot.writeback` of `stat --json`.
pub fn stat(mount: &Mount) -> Value {
    let stat = mount.stat_json("")["snapshot"]["writeback"].clone();
    assert!(stat.is_object() || !journaled(), "stat --json has no snapshot.writeback");
    stat
}

/// One number of it.
pub fn number(mount: &Mount, name: &str) -> u64 {
    let stat = stat(mount);
    stat[name].as_u64().unwrap_or_else(|| panic!("snapshot.writeback.{name}: {stat}"))
}

/// `writeback` of the device last seen at `path`.
pub fn device(mount: &Mount, path: &str) -> Option<Value> {
    let all = mount.stat_json("")["snapshot"]["devices"].clone();
    let devices = all.as_array().cloned().unwrap_or_default();
    let is = |device: &Value| {
        device["path"].as_str().is_some_and(|at| at.trim_start_matches('/') == path)
    };
    devices.into_iter().find(is).map(|device| device["writeback"].clone())
}

/// Asserts that the journal holds dirty bytes: the test would show nothing otherwise.
pub fn is_dirty(mount: &Mount) {
    if journaled() {
        assert!(number(mount, "dirty_bytes") > 0, "nothing is dirty: {}", stat(mount));
    }
}

/// Waits until nothing is dirty.
pub fn wait_clean(mount: &Mount, limit: Duration) {
    if journaled() {
        let clean = || (number(mount, "dirty_bytes") == 0).then_some(());
        assert!(wait_for(limit, clean).is_some(), "dirty after {limit:?}: {}", stat(mount));
    }
}

/// kill -9 of the daemon and the mount made again, resuming its journal.
pub fn crash(mount: &mut Mount) {
    mount.kill();
    mount.start_again();
}

/// The names in a source directory, without that of the state.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("readdir").flatten();
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<_> = entries.map(name).filter(|name| name != STATE).collect();
    names.sort();
    names
}
