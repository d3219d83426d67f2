//! The setuid helper fusermount3 (layer 8): the way an ordinary user mounts and unmounts.
//!
//! It is given one end of a socket pair as its standard input (`_FUSE_COMMFD=0`) and sends the
//! mounted /dev/fuse descriptor over it.

use std::ffi::OsStr;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};

use super::mount::{How, MountError, Outcome};
use super::mountinfo;
use crate::config::MountConfig;

/// Where fusermount3 is: $PATH, then the usual directories.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(usual)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join("fusermount3"))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether the administrator lets ordinary users say allow_other.
pub fn user_allow_other() -> bool {
    let text = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    text.lines().any(|line| line.trim() == "user_allow_other")
}

/// Mounts with the words of `options`; the descriptor for the session.
pub fn mount(config: &MountConfig, options: &OsStr) -> Result<OwnedFd, MountError> {
    let helper = find().ok_or_else(MountError::no_helper)?;
    if config.allow_other && !user_allow_other() {
        let hint = "add the line user_allow_other to /etc/fuse.conf, or leave the option out";
        return Err(MountError::new("only root may use it here", "allow_other", hint));
    }
    let place = &config.mountpoint;
    let fail = |error: std::io::Error| MountError::session(place, &error);
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| fail(errno.into()))?;
    let child = Command::new(helper)
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(&config.mountpoint)
        .env("_FUSE_COMMFD", "0")
        .env("LC_ALL", "C")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    // Our copy of its end is closed by now, so a helper that dies gives an end of file.
    let received = receive(&ours);
    drop(ours);
    let output = child.wait_with_output().map_err(fail)?;
    match received {
        Some(fd) => Ok(fd),
        None => {
            let hint = format!("fusermount3 says: {}", first_line(&output.stderr));
            Err(MountError::new("cannot mount", place.display().to_string(), hint))
        }
    }
}

/// Unmounts what this user mounted on `mountpoint`.
pub fn unmount(mountpoint: &Path, how: How) -> Outcome {
    let Some(helper) = find() else {
        return Outcome::Failed(MountError::no_helper().to_string());
    };
    let output = Command::new(helper)
        .arg(if how == How::Detach { "-uz" } else { "-u" })
        .arg("--")
        .arg(mountpoint)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => Outcome::Gone,
        Ok(output) => {
            let words = first_line(&output.stderr);
            let table = mountinfo::read().unwrap_or_default();
            if mountinfo::top_at(&table, mountpoint).is_none_or(|entry| !entry.is_fuse()) {
                Outcome::Gone
            } else if words.contains("busy") {
                Outcome::Busy
            } else {
                Outcome::Failed(words)
            }
        }
        Err(error) => Outcome::Failed(format!("fusermount3: {error}")),
    }
}

fn receive(socket: &OwnedFd) -> Option<OwnedFd> {
    let mut byte = [0u8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })
    .ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })
}

fn first_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
    // It begins with its own name, as it was called.
    let words = line.split_once("fusermount3: ").map_or(line, |(_, words)| words);
    words.trim().to_owned()
}
