//! Making and ending the kernel mount (layer 8), without fuser's help.
//!
//! Job: a /dev/fuse descriptor that is mounted, for `Session::from_fd`, and the way back.
//! As root we call mount(2) ourselves, so that the type reads "fuse.bcachefs-fuse"; everybody else
//! goes through the setuid helper fusermount3, which sends the descriptor over a socket (fuser's
//! own path gives up where /dev/fuse is 0600, and escapes no FSName).
//!
//! States: mounted -> gone, by us or by anybody (umount, fusermount3 -u, umount -l). The device
//! number tells our mount from a later one on the same directory: it is never unmounted for ours.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::fusermount;
use super::mountinfo::{self, FILESYSTEM_TYPE};
use crate::config::MountConfig;

/// The largest read the kernel may send, in bytes (256 pages; it never sends more).
const MAX_READ: u32 = 1 << 20;

/// Why there is no mount, as one line "what: where: what to do".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {place}: {hint}")]
pub struct MountError {
    /// What is wrong.
    pub what: String,
    /// The device, option, program or mountpoint.
    pub place: String,
    /// What to do next.
    pub hint: String,
}

impl MountError {
    /// From its three parts.
    pub fn new(
        what: impl Into<String>,
        place: impl Into<String>,
        hint: impl Into<String>,
    ) -> MountError {
        MountError { what: what.into(), place: place.into(), hint: hint.into() }
    }

    fn device(errno: Errno) -> MountError {
        let hint = match errno {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => {
                "modprobe fuse loads it; a container needs --device /dev/fuse"
            }
            _ => "a container needs --device /dev/fuse; otherwise check its permissions",
        };
        MountError::new(words_of(errno), "/dev/fuse", hint)
    }

    fn kernel(place: &Path, errno: Errno) -> MountError {
        let hint = match errno {
            Errno::PERM => "root needs CAP_SYS_ADMIN to mount; a container needs it added",
            Errno::NODEV => "the kernel has no FUSE; modprobe fuse loads it",
            _ => "the kernel refused; bcachefs-fuse doctor checks the system",
        };
        let what = format!("cannot mount ({})", words_of(errno));
        MountError::new(what, place.display().to_string(), hint)
    }

    /// No fusermount3 anywhere.
    pub fn no_helper() -> MountError {
        MountError::new("not found", "fusermount3", "install the package fuse3, or mount as root")
    }

    /// The kernel and we could not agree (INIT), or the system is out of threads.
    pub fn session(place: &Path, error: &std::io::Error) -> MountError {
        let hint = format!("the FUSE session did not start: {error}");
        MountError::new("cannot mount", place.display().to_string(), hint)
    }
}

/// "Permission denied", without the number.
pub fn words_of(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Whether the kernel checks permissions (DESIGN 9): always as root, else with allow_other only. A
/// user's private mount shows him everything in his own images.
pub fn default_permissions(config: &MountConfig) -> bool {
    is_root() || config.allow_other
}

/// Whether mount(2) is ours to call.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// How `unmount` goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Fails while files are open.
    Politely,
    /// Takes the mountpoint away at once (MNT_DETACH).
    Detach,
}

/// What `unmount` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is gone from the mountpoint, by us or before us.
    Gone,
    /// Somebody uses it, or another mount covers it.
    Busy,
    /// Anything else, in one line.
    Failed(String),
}

/// A mount of ours in the kernel's table.
#[derive(Clone, Debug)]
pub struct KernelMount {
    mountpoint: PathBuf,
    device: Option<(u32, u32)>,
    id: Option<u64>,
}

impl KernelMount {
    /// Mounts; the descriptor is for the session. `mountpoint` must be absolute and canonical,
    /// `root_mode` is the source's st_mode.
    pub fn make(
        config: &MountConfig,
        root_mode: u32,
    ) -> Result<(OwnedFd, KernelMount), MountError> {
        let fd = if is_root() {
            mount_as_root(config, root_mode)?
        } else {
            fusermount::mount(config, &helper_options(config))?
        };
        let table = mountinfo::read().unwrap_or_default();
        let entry = mountinfo::top_at(&table, &config.mountpoint).filter(|entry| entry.is_ours());
        let mount = KernelMount {
            mountpoint: config.mountpoint.clone(),
            device: entry.map(mountinfo::MountEntry::device),
            id: entry.map(|entry| entry.id),
        };
        Ok((fd, mount))
    }

    /// Where it was mounted.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Device number (major, minor) of its files; None where /proc shows other mounts than ours.
    pub fn device(&self) -> Option<(u32, u32)> {
        self.device
    }

    /// Its number in the table of mounts.
    pub fn id(&self) -> Option<u64> {
        self.id
    }

    /// Whether the kernel still shows it. A device number is reused as soon as its filesystem is
    /// gone, so the mountpoint must be the same, too.
    pub fn is_mounted(&self) -> bool {
        match (self.device, mountinfo::read()) {
            (Some(device), Ok(table)) => {
                mountinfo::find_ours(&table, &self.mountpoint, device).is_some()
            }
            _ => true,
        }
    }

    /// Takes it off the mountpoint. Never touches a mount of another device there.
    pub fn unmount(&self, how: How) -> Outcome {
        if let (Some(device), Ok(table)) = (self.device, mountinfo::read()) {
            let Some(entry) = mountinfo::find_ours(&table, &self.mountpoint, device) else {
                return Outcome::Gone;
            };
            if mountinfo::top_at(&table, &self.mountpoint) != Some(entry) {
                return Outcome::Busy;
            }
        }
        unmount(&self.mountpoint, how)
    }
}

/// Whether the daemon behind `path` is gone. The kernel must ask it: attributes it still believes
/// outlive a daemon by `attr_timeout`.
pub fn is_dead(path: &Path) -> bool {
    let flags = AtFlags::STATX_FORCE_SYNC;
    let stat = rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::BASIC_STATS);
    matches!(stat, Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Takes whatever is mounted on `mountpoint` off it.
pub fn unmount(mountpoint: &Path, how: How) -> Outcome {
    if !is_root() {
        return fusermount::unmount(mountpoint, how);
    }
    let flags = match how {
        How::Politely => UnmountFlags::NOFOLLOW,
        How::Detach => UnmountFlags::NOFOLLOW | UnmountFlags::DETACH,
    };
    match rustix::mount::unmount(mountpoint, flags) {
        // EINVAL: nothing is mounted there any more.
        Ok(()) | Err(Errno::INVAL) => Outcome::Gone,
        Err(Errno::BUSY) => Outcome::Busy,
        Err(errno) => Outcome::Failed(words_of(errno)),
    }
}

/// Changes the flags of a live mount: `mount -o remount,ro`. Root only (the kernel's rule).
pub fn remount(mountpoint: &Path, flags: &[String]) -> Result<(), MountError> {
    // The kernel ignores a FUSE mount's own words at a remount through mount(2).
    rustix::mount::mount_remount(mountpoint, flags_of(flags.iter().map(String::as_str)), c"")
        .map_err(|errno| MountError::kernel(mountpoint, errno))
}

fn mount_as_root(config: &MountConfig, root_mode: u32) -> Result<OwnedFd, MountError> {
    let fd = open_device()?;
    let data = kernel_data(config, fd.as_raw_fd(), root_mode);
    let mut flags = flags_of(config.flags.iter().map(String::as_str));
    flags.set(MountFlags::RDONLY, config.read_only || flags.contains(MountFlags::RDONLY));
    let name = OsString::from_vec(config.fsname.as_bytes().to_vec());
    rustix::mount::mount(&name, &config.mountpoint, FILESYSTEM_TYPE, flags, data.as_c_str())
        .map_err(|errno| MountError::kernel(&config.mountpoint, errno))?;
    Ok(fd)
}

fn open_device() -> Result<OwnedFd, MountError> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(MountError::device)
}

/// The option string of mount(2). Every value is a number, so nothing needs escaping.
fn kernel_data(config: &MountConfig, fd: i32, root_mode: u32) -> CString {
    let user = rustix::process::getuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    let mut data = format!(
        "fd={fd},rootmode={root_mode:o},user_id={user},group_id={group},max_read={MAX_READ}"
    );
    if default_permissions(config) {
        data.push_str(",default_permissions");
    }
    if config.allow_other {
        data.push_str(",allow_other");
    }
    // No NUL can be in it.
    CString::new(data).unwrap_or_default()
}

/// The -o words for fusermount3, which itself adds nosuid and nodev and parses flags by name.
fn helper_options(config: &MountConfig) -> OsString {
    const KNOWN: [&str; 7] =
        ["nosuid", "nodev", "noexec", "noatime", "nodiratime", "sync", "dirsync"];
    let mut words = vec![format!("subtype=bcachefs-fuse,max_read={MAX_READ}")];
    if config.read_only {
        words.push("ro".into());
    }
    if config.allow_other {
        words.push("allow_other".into());
    }
    if default_permissions(config) {
        words.push("default_permissions".into());
    }
    words.extend(config.flags.iter().filter(|flag| KNOWN.contains(&flag.as_str())).cloned());
    let mut options = OsString::from("fsname=");
    options.push(escape(OsStr::new(&config.fsname)));
    options.push(",");
    options.push(words.join(","));
    options
}

/// Escapes a value among comma-separated options, as libfuse does.
pub fn escape(value: &OsStr) -> OsString {
    let mut bytes = Vec::with_capacity(value.len());
    for &byte in value.as_bytes() {
        if byte == b',' || byte == b'\\' {
            bytes.push(b'\\');
        }
        bytes.push(byte);
    }
    OsString::from_vec(bytes)
}

/// The bits of mount(2) for their fstab names; later words win, words that set no bit are passed
/// over (the option parser has refused unknown ones).
fn flags_of<'a>(names: impl Iterator<Item = &'a str>) -> MountFlags {
    let mut flags = MountFlags::empty();
    for name in names {
        let (bits, on) = match name {
            "ro" => (MountFlags::RDONLY, true),
            "rw" => (MountFlags::RDONLY, false),
            "nosuid" => (MountFlags::NOSUID, true),
            "suid" => (MountFlags::NOSUID, false),
            "nodev" => (MountFlags::NODEV, true),
            "dev" => (MountFlags::NODEV, false),
            "noexec" => (MountFlags::NOEXEC, true),
            "exec" => (MountFlags::NOEXEC, false),
            "noatime" => (MountFlags::NOATIME, true),
            "atime" => (MountFlags::NOATIME, false),
            "nodiratime" => (MountFlags::NODIRATIME, true),
            "diratime" => (MountFlags::NODIRATIME, false),
            "relatime" => (MountFlags::RELATIME, true),
            "norelatime" => (MountFlags::RELATIME, false),
            "strictatime" => (MountFlags::STRICTATIME, true),
            "nostrictatime" => (MountFlags::STRICTATIME, false),
            "lazytime" => (MountFlags::LAZYTIME, true),
            "nolazytime" => (MountFlags::LAZYTIME, false),
            "sync" => (MountFlags::SYNCHRONOUS, true),
            "async" => (MountFlags::SYNCHRONOUS, false),
            "dirsync" => (MountFlags::DIRSYNC, true),
            "nosymfollow" => (MountFlags::NOSYMFOLLOW, true),
            "symfollow" => (MountFlags::NOSYMFOLLOW, false),
            // What the words imply in mount(8).
            "user" | "users" => (MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, true),
            "owner" | "group" => (MountFlags::NOSUID | MountFlags::NODEV, true),
            _ => continue,
        };
        flags.set(bits, on);
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> MountConfig {
        MountConfig {
            source: "/srv/a,b".into(),
            upper: None,
            lowers: Vec::new(),
            mountpoint: "/mnt".into(),
            read_only: true,
            allow_other: false,
            attr_timeout: std::time::Duration::from_secs(1),
            fsname: "/srv/a,b\\c".into(),
            threads: 1,
            flags: vec!["noatime".into(), "lazytime".into()],
            test_panic: None,
        }
    }

    #[test]
    fn names_are_escaped_as_libfuse_does() {
        let options = helper_options(&config()).to_string_lossy().into_owned();
        assert!(options.starts_with("fsname=/srv/a\\,b\\\\c,subtype=bcachefs-fuse,"), "{options}");
        assert!(options.contains(",ro,") && options.ends_with(",noatime"), "{options}");
    }

    #[test]
    fn later_words_win() {
        let words = ["user", "exec", "ro", "rw", "sync"];
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::SYNCHRONOUS;
        assert_eq!(flags_of(words.into_iter()), flags);
    }

    #[test]
    fn the_kernel_gets_numbers_only() {
        let data = kernel_data(&config(), 7, 0o040755);
        let text = data.to_string_lossy().into_owned();
        assert!(text.starts_with("fd=7,rootmode=40755,user_id="), "{text}");
        assert!(!text.contains("allow_other"), "{text}");
    }
}
