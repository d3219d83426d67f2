//! `doctor [SOURCE]` (layer 9): what this system and a source directory can do, and what to do
//! about what is missing.
//!
//! No state. Every check is one line of the same form; only a `missing` one makes the exit 1.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::fuse::{fusermount, mount};
use crate::sys::AlignedBuf;
use crate::sys::handle::FileHandle;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// There.
    Ok,
    /// Not there, but mounting works without it.
    Note,
    /// Not there, and needed.
    Missing,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What to do; empty if nothing.
    advice: String,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    ok: bool,
    checks: Vec<Check>,
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, state: State::Ok, found: found.into(), advice: String::new() }
}

fn missing(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name, state: State::Missing, found: found.into(), advice: advice.into() }
}

fn note(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { state: State::Note, ..missing(name, found, advice) }
}

/// Prints the checks; 0 if nothing that is needed is missing.
pub fn doctor(source: Option<&Path>, json: bool) -> ExitCode {
    let mut checks = system_checks();
    if let Some(source) = source {
        checks.extend(source_checks(source));
    }
    let ok = checks.iter().all(|check| check.state != State::Missing);
    let report = Report { schema: 1, ok, checks };
    let text = if json { as_json(&report) } else { as_lines(&report) };
    let written = std::io::stdout().write_all(text.as_bytes());
    if ok && written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn as_json(report: &Report) -> String {
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    text
}

fn as_lines(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        let state = match check.state {
            State::Ok => "ok",
            State::Note => "note",
            State::Missing => "missing",
        };
        let advice = match check.advice.as_str() {
            "" => String::new(),
            advice => format!("; {advice}"),
        };
        text.push_str(&format!("{state:<7}  {:<width$}  {}{advice}\n", check.name, check.found));
    }
    text
}

fn system_checks() -> Vec<Check> {
    let mut checks = vec![kernel(), device(), helper(), allow_other()];
    for (name, used_by) in [
        ("mount.fuse.bcachefs-fuse", "fstab and mount -t fuse.bcachefs-fuse"),
        ("umount.fuse.bcachefs-fuse", "umount, to end the daemon in order"),
    ] {
        let path = Path::new("/sbin").join(name);
        checks.push(if path.exists() {
            ok(name, path.display().to_string())
        } else {
            let found = format!("not in /sbin (needed by {used_by})");
            note(name, found, "install it: make install")
        });
    }
    checks
}

/// 5.4 has every FUSE operation we use; older ones were never tried.
fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 4) {
        ok("kernel", release)
    } else {
        missing("kernel", format!("{release} is older than 5.4"), "boot a newer kernel")
    }
}

fn device() -> Check {
    let name = "/dev/fuse";
    match rustix::fs::open(name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => ok(name, "can be opened"),
        Err(errno @ rustix::io::Errno::ACCESS) => missing(
            name,
            mount::words_of(errno),
            "chmod 666 /dev/fuse as root (udev does), or mount as root",
        ),
        Err(errno) => missing(
            name,
            mount::words_of(errno),
            "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN",
        ),
    }
}

fn helper() -> Check {
    let name = "fusermount3";
    let advice = "ordinary users need it: install the package fuse3";
    match fusermount::find() {
        Some(path) if is_setuid(&path) => ok(name, path.display().to_string()),
        Some(path) => {
            let found = format!("{} is not setuid root", path.display());
            needed_by_users(name, found, "reinstall the package fuse3")
        }
        None => needed_by_users(name, "not found", advice),
    }
}

fn needed_by_users(name: &'static str, found: impl Into<String>, advice: &str) -> Check {
    if mount::is_root() { note(name, found, advice) } else { missing(name, found, advice) }
}

fn is_setuid(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    path.metadata().is_ok_and(|meta| meta.uid() == 0 && meta.mode() & 0o4000 != 0)
}

fn allow_other() -> Check {
    let name = "user_allow_other";
    if fusermount::user_allow_other() {
        ok(name, "set in /etc/fuse.conf")
    } else {
        let advice = "for allow_other as an ordinary user: add the line user_allow_other there";
        note(name, "not set in /etc/fuse.conf", advice)
    }
}

fn source_checks(source: &Path) -> Vec<Check> {
    let open = |flags| rustix::fs::open(source, flags | OFlags::CLOEXEC, Mode::empty());
    let directory = match open(OFlags::RDONLY | OFlags::DIRECTORY) {
        Ok(directory) => directory,
        Err(errno) => {
            let found = format!("{}: {}", source.display(), mount::words_of(errno));
            return vec![missing("SOURCE", found, "give a directory that you may read")];
        }
    };
    vec![
        ok("SOURCE", format!("{} ({})", source.display(), filesystem_name(&directory))),
        writable(&directory),
        direct_io(source, &directory),
        handles(&directory),
    ]
}

fn filesystem_name(directory: impl AsFd) -> String {
    let Ok(stat) = rustix::fs::fstatfs(directory) else { return "unknown filesystem".into() };
    let name = match stat.f_type as u64 & 0xffff_ffff {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x0102_1994 => "tmpfs",
        0x7371_7368 => "squashfs",
        0x6573_5546 => "fuse",
        0x794c_7630 => "overlayfs",
        0x2fc1_2fc1 => "zfs",
        0xca45_1a4e => "bcachefs",
        0xf2f5_2010 => "f2fs",
        0x6969 => "nfs",
        0x4d44 => "vfat",
        0x2011_bab0 => "exfat",
        0x0102_1997 => "9p",
        0xff53_4d42 | 0xfe53_4d42 => "cifs",
        other => return format!("filesystem type {other:#x}"),
    };
    name.into()
}

fn writable(directory: impl AsFd) -> Check {
    let read_only = rustix::fs::fstatvfs(&directory)
        .is_ok_and(|stat| stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    let denied = || {
        rustix::fs::accessat(
            &directory,
            ".",
            rustix::fs::Access::WRITE_OK,
            rustix::fs::AtFlags::EACCESS,
        )
        .is_err()
    };
    if read_only {
        note("writing", "the filesystem is read-only", "what is mounted will be, too")
    } else if denied() {
        note("writing", "not allowed to this user", "mount as its owner, or as root")
    } else {
        ok("writing", "allowed")
    }
}

/// Tries it on a file that is there already; an empty directory gets an unnamed file.
fn direct_io(source: &Path, directory: impl AsFd) -> Check {
    let name = "O_DIRECT";
    match try_direct_io(source, directory) {
        None => note(name, "no file to try it on", "--direct-io auto finds out at each open"),
        Some(true) => ok(name, "works: data is not cached twice"),
        Some(false) => note(
            name,
            "not supported here",
            "data is cached by the kernel, too: give less memory with --cache",
        ),
    }
}

fn try_direct_io(source: &Path, directory: impl AsFd) -> Option<bool> {
    let direct = OFlags::DIRECT | OFlags::CLOEXEC;
    let unnamed = rustix::fs::openat(
        &directory,
        ".",
        OFlags::TMPFILE | OFlags::RDWR | direct,
        Mode::RUSR | Mode::WUSR,
    );
    match unnamed {
        Ok(file) => {
            let block = AlignedBuf::new(4096);
            return Some(rustix::io::pwrite(&file, &block, 0).is_ok());
        }
        Err(rustix::io::Errno::INVAL) => return Some(false),
        Err(_) => {}
    }
    let mut entries = std::fs::read_dir(source).ok()?.flatten();
    let regular = entries.find(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))?;
    let flags = (direct | OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
    let opened = std::fs::File::options().read(true).custom_flags(flags).open(regular.path());
    let mut block = AlignedBuf::new(4096);
    Some(opened.is_ok_and(|file| rustix::io::pread(&file, &mut *block, 0).is_ok()))
}

fn handles(directory: impl AsFd) -> Check {
    let name = "file handles";
    let advice = "files are reopened by path when descriptors run short; nothing to do";
    match FileHandle::of(&directory) {
        Err(error) => note(name, format!("none here ({})", bare(&error)), advice),
        Ok(handle) => match handle.open(&directory, OFlags::PATH | OFlags::CLOEXEC) {
            Ok(_) => ok(name, "can be made and opened"),
            Err(error) if !mount::is_root() => {
                note(name, format!("can be made, not opened ({}; root only)", bare(&error)), advice)
            }
            Err(error) => note(name, format!("can be made, not opened ({})", bare(&error)), advice),
        },
    }
}

fn bare(error: &std::io::Error) -> String {
    error.to_string().split(" (os error").next().unwrap_or_default().to_owned()
}
