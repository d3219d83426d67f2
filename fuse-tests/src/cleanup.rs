//! Mounts, FUSE connections and loop devices below a directory: finding them and making them go.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};

use crate::tools::wait_for;

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    /// Minor device number; the number of a FUSE connection.
    pub minor: u32,
    /// Where it is mounted.
    pub path: PathBuf,
    /// Per-mount options ("rw,nosuid").
    pub options: String,
    /// Filesystem type, "fuse.bcachefs-fuse".
    pub fstype: String,
    /// What is mounted.
    pub source: OsString,
    /// Options of the superblock ("rw,user_id=0").
    pub super_options: String,
}

/// Undoes the octal escapes of mountinfo.
fn unescape(text: &str) -> OsString {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).and_then(|d| std::str::from_utf8(d).ok());
        let value = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match value {
            Some(byte) if bytes[at] == b'\\' => {
                out.push(byte);
                at += 4;
            }
            _ => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    OsString::from_vec(out)
}

fn parse_line(line: &str) -> Option<MountLine> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<&str> = front.split(' ').collect();
    let back: Vec<&str> = back.split(' ').collect();
    Some(MountLine {
        minor: front.get(2)?.split_once(':')?.1.parse().ok()?,
        path: unescape(front.get(4)?).into(),
        options: (*front.get(5)?).to_owned(),
        fstype: (*back.first()?).to_owned(),
        source: unescape(back.get(1)?),
        super_options: (*back.get(2)?).to_owned(),
    })
}

/// All mounts, oldest first.
pub fn mounts() -> Vec<MountLine> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    String::from_utf8_lossy(&text).lines().filter_map(parse_line).collect()
}

/// The top mount exactly at `path`.
pub fn mount_at(path: &Path) -> Option<MountLine> {
    mounts().into_iter().rfind(|mount| mount.path == path)
}

/// The mounts at and below `dir`, oldest first.
pub fn mounts_below(dir: &Path) -> Vec<MountLine> {
    mounts().into_iter().filter(|mount| mount.path.starts_with(dir)).collect()
}

/// Makes every request of a FUSE connection fail, so that nobody hangs in it. By its control file,
/// or where the control filesystem is not mounted by a forced unmount (root only), which aborts the
/// connection and may take the mount away too.
pub fn abort_connection(mount: &MountLine) {
    // The kernel gives a minor number to the next mount as soon as this one is gone: look again,
    // or it may be somebody else's connection.
    if !mounts().iter().any(|now| now.path == mount.path && now.minor == mount.minor) {
        return;
    }
    let control = format!("/sys/fs/fuse/connections/{}/abort", mount.minor);
    if fs::write(control, "1").is_err() && mount.fstype.starts_with("fuse") {
        let _ = unmount(&mount.path, UnmountFlags::FORCE);
    }
}

/// Unmounts what is at `path`: by system call as root, by fusermount3 as a user.
pub fn unmount_path(path: &Path, flags: UnmountFlags) -> std::io::Result<()> {
    match unmount(path, flags) {
        Err(rustix::io::Errno::PERM) => {
            let mut command = Command::new("fusermount3");
            command.arg("-u").stdin(Stdio::null()).stderr(Stdio::null());
            if flags.contains(UnmountFlags::DETACH) {
                command.arg("-z");
            }
            let status = command.arg("--").arg(path).status()?;
            if status.success() {
                return Ok(());
            }
            Err(std::io::Error::other(format!("fusermount3 -u {}", path.display())))
        }
        other => Ok(other?),
    }
}

/// The loop devices whose file lies below `dir`.
pub fn loops_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let Ok(file) = fs::read(entry.path().join("loop/backing_file")) else { continue };
        let file = file.strip_suffix(b"\n").unwrap_or(&file);
        if Path::new(std::ffi::OsStr::from_bytes(file)).starts_with(dir) {
            found.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    found
}

/// Removes every mount, loop device and file below `dir`; says what was there.
pub fn sweep(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for mount in mounts_below(dir).into_iter().rev() {
        found.push(format!("mount {} ({})", mount.path.display(), mount.fstype));
        if mount.fstype.starts_with("fuse") {
            abort_connection(&mount);
        }
        if unmount_path(&mount.path, UnmountFlags::empty()).is_err() {
            let _ = unmount_path(&mount.path, UnmountFlags::DETACH);
        }
    }
    // The loop device of `mount -o loop` goes by itself, a moment after its mount.
    wait_for(Duration::from_secs(2), || loops_below(dir).is_empty().then_some(()));
    for device in loops_below(dir) {
        found.push(format!("loop device {}", device.display()));
        let _ = Command::new("losetup").arg("-d").arg(&device).status();
    }
    if mounts_below(dir).is_empty() {
        let _ = fs::remove_dir_all(dir);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_understood() {
        let line = "36 35 0:98 / /mnt/a\\040b rw,noatime shared:1 - fuse.x src\\134y rw,user_id=0";
        let mount = parse_line(line).unwrap();
        assert_eq!((mount.minor, mount.path.to_str()), (98, Some("/mnt/a b")));
        assert_eq!((mount.fstype.as_str(), mount.source.to_str()), ("fuse.x", Some("src\\y")));
        assert!(!mounts().is_empty());
    }
}
