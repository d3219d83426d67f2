//! Where a daemon's socket lies (layer 8): `MAJ-MIN.sock`, named after the mount's device number,
//! so that a client finds it from /proc/self/mountinfo without touching the mount.
//!
//! Root's daemons use /run/bcachefs-fuse (0755). A user's use $XDG_RUNTIME_DIR/bcachefs-fuse, else
//! /run/user/UID/bcachefs-fuse, else /tmp/bcachefs-fuse-UID (0700). With allow_other a user's
//! daemon always uses the last, with mode 0711: whoever may enter the mount must reach it.
//! Invariant: a directory that is not ours, or that others may write, is never used.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, OpContext, Result};

const NAME: &str = "bcachefs-fuse";

/// The file name of a mount's socket.
pub fn file_name(device: (u32, u32)) -> String {
    format!("{}-{}.sock", device.0, device.1)
}

/// The device number in a socket's file name.
pub fn parse_file_name(name: &str) -> Option<(u32, u32)> {
    let (major, minor) = name.strip_suffix(".sock")?.split_once('-')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The directory for the socket of a daemon that runs as `uid`; made if it is missing.
pub fn server_dir(uid: u32, allow_other: bool) -> Result<PathBuf> {
    if uid == 0 {
        return make(Path::new("/run").join(NAME), 0o755, uid);
    }
    let shared = PathBuf::from(format!("/tmp/{NAME}-{uid}"));
    if allow_other {
        return make(shared, 0o711, uid);
    }
    let runtime = runtime_dirs(uid).into_iter().find(|dir| owned(dir, uid));
    match runtime {
        Some(dir) => make(dir.join(NAME), 0o700, uid),
        None => make(shared, 0o700, uid),
    }
}

/// Where the socket of a mount made by `uid` may lie, the likeliest first.
pub fn client_dirs(uid: u32) -> Vec<PathBuf> {
    if uid == 0 {
        return vec![Path::new("/run").join(NAME)];
    }
    let mut dirs: Vec<PathBuf> = runtime_dirs(uid).into_iter().map(|dir| dir.join(NAME)).collect();
    dirs.push(PathBuf::from(format!("/tmp/{NAME}-{uid}")));
    dirs
}

/// Where this user's own mounts have theirs; root also looks at every user's.
pub fn all_dirs(uid: u32) -> Vec<PathBuf> {
    let mut dirs = client_dirs(uid);
    if uid != 0 {
        dirs.extend(client_dirs(0));
        return dirs;
    }
    let users = fs::read_dir("/run/user").into_iter().flatten().flatten();
    dirs.extend(users.map(|user| user.path().join(NAME)));
    let temporary = fs::read_dir("/tmp").into_iter().flatten().flatten();
    let prefix = format!("{NAME}-");
    dirs.extend(
        temporary
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .map(|entry| entry.path()),
    );
    dirs
}

fn runtime_dirs(uid: u32) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    if rustix::process::geteuid().as_raw() == uid
        && let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && dir.is_absolute()
    {
        dirs.push(dir);
    }
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    if !dirs.contains(&usual) {
        dirs.push(usual);
    }
    dirs
}

fn owned(dir: &Path, uid: u32) -> bool {
    fs::symlink_metadata(dir)
        .is_ok_and(|meta| meta.is_dir() && meta.uid() == uid && meta.mode() & 0o022 == 0)
}

fn make(dir: PathBuf, mode: u32, uid: u32) -> Result<PathBuf> {
    let made = DirBuilder::new().mode(mode).recursive(dir.starts_with("/run")).create(&dir);
    match made {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other.op("create directory").map_err(|error| error.at_path(&dir))?,
    }
    if !owned(&dir, uid) {
        // Somebody else made it first: in /tmp anybody can.
        return Err(Error::new(Kind::NotPermitted, "use directory", dir.display().to_string()));
    }
    // The umask took bits away, or an earlier mount had other needs.
    let wanted = fs::Permissions::from_mode(mode);
    let now = fs::symlink_metadata(&dir).op("stat").map_err(|error| error.at_path(&dir))?;
    if now.mode() & mode != mode {
        fs::set_permissions(&dir, wanted).op("chmod").map_err(|error| error.at_path(&dir))?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_the_device_number() {
        assert_eq!(file_name((0, 45)), "0-45.sock");
        assert_eq!(parse_file_name("0-45.sock"), Some((0, 45)));
        for bad in ["0-45", "45.sock", "a-b.sock", "0-45.sock.old"] {
            assert_eq!(parse_file_name(bad), None);
        }
    }

    #[test]
    fn a_directory_others_may_write_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let dir = scratch.path().join("sockets");
        assert_eq!(make(dir.clone(), 0o700, uid).unwrap(), dir);
        assert_eq!(make(dir.clone(), 0o711, uid).unwrap(), dir);
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o711);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(make(dir.clone(), 0o700, uid).unwrap_err().kind, Kind::NotPermitted);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(make(dir, 0o700, uid + 1).unwrap_err().kind, Kind::NotPermitted);
    }
}
