//! Operations on O_PATH descriptors that need a path: through a descriptor of /proc/self/fd.
//!
//! A magic link resolves to the descriptor's own inode, symlinks included, without following it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{CWD, Mode, OFlags, openat};

/// The path of a descriptor's magic link, NUL-terminated on the stack.
struct MagicLink {
    bytes: [u8; 32],
}

impl MagicLink {
    fn of(fd: impl AsFd) -> MagicLink {
        let mut link = MagicLink { bytes: [0; 32] };
        let mut cursor = io::Cursor::new(&mut link.bytes[..]);
        // 14 characters, at most 10 digits and the NUL fit into 32 bytes.
        let _ = io::Write::write_fmt(
            &mut cursor,
            format_args!("/proc/self/fd/{}\0", fd.as_fd().as_raw_fd()),
        );
        link
    }

    fn path(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

/// Opens the inode of an O_PATH descriptor for real. ELOOP on a symlink.
pub fn reopen(fd: impl AsFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let link = MagicLink::of(fd);
    openat(CWD, link.path(), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
}

/// chmod(2) of an O_PATH descriptor; EOPNOTSUPP on a symlink.
pub fn chmod(fd: impl AsFd, mode: u32) -> rustix::io::Result<()> {
    rustix::fs::chmod(MagicLink::of(fd).path(), Mode::from_raw_mode(mode))
}

/// link(2) of an O_PATH descriptor into `dir` under `name`, without CAP_DAC_READ_SEARCH.
pub fn link(fd: impl AsFd, dir: impl AsFd, name: &std::ffi::OsStr) -> rustix::io::Result<()> {
    let link = MagicLink::of(fd);
    rustix::fs::linkat(CWD, link.path(), dir, name, rustix::fs::AtFlags::SYMLINK_FOLLOW)
}

/// getxattr(2); an empty `value` asks for the size.
pub fn getxattr(
    fd: impl AsFd,
    name: &std::ffi::OsStr,
    value: &mut [u8],
) -> rustix::io::Result<usize> {
    let link = MagicLink::of(fd);
    if value.is_empty() {
        // rustix answers an empty buffer itself, with 0.
        return rustix::fs::getxattr_query(link.path(), name);
    }
    rustix::fs::getxattr(link.path(), name, value)
}

/// setxattr(2); `flags` as the application gave them (XATTR_CREATE, XATTR_REPLACE).
pub fn setxattr(
    fd: impl AsFd,
    name: &std::ffi::OsStr,
    value: &[u8],
    flags: u32,
) -> rustix::io::Result<()> {
    let flags = rustix::fs::XattrFlags::from_bits_retain(flags);
    rustix::fs::setxattr(MagicLink::of(fd).path(), name, value, flags)
}

/// listxattr(2); an empty `list` asks for the size.
pub fn listxattr(fd: impl AsFd, list: &mut [u8]) -> rustix::io::Result<usize> {
    let link = MagicLink::of(fd);
    if list.is_empty() {
        return rustix::fs::listxattr_query(link.path());
    }
    rustix::fs::listxattr(link.path(), list)
}

/// removexattr(2).
pub fn removexattr(fd: impl AsFd, name: &std::ffi::OsStr) -> rustix::io::Result<()> {
    rustix::fs::removexattr(MagicLink::of(fd).path(), name)
}

/// Whether /proc/self/fd is there: without it nothing above works.
pub fn proc_is_mounted() -> bool {
    static MOUNTED: OnceLock<bool> = OnceLock::new();
    *MOUNTED.get_or_init(|| rustix::fs::stat("/proc/self/fd").is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symlink_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("l")).unwrap();
        let fd = rustix::fs::open(
            dir.path().join("l"),
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .unwrap();
        assert_eq!(reopen(&fd, OFlags::RDONLY).unwrap_err(), rustix::io::Errno::LOOP);
        // ENODATA or ENOTSUP: the question reached the link itself, not "nowhere".
        let error = getxattr(&fd, "trusted.x".as_ref(), &mut []).unwrap_err();
        assert_ne!(error, rustix::io::Errno::NOENT);
        link(&fd, rustix::fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap(), "m".as_ref())
            .unwrap();
        assert_eq!(std::fs::read_link(dir.path().join("m")).unwrap().as_os_str(), "nowhere");
    }
}
