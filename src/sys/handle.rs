//! File handles: a name for an inode that outlives its paths, generation included
//! (name_to_handle_at(2)); root reopens by it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The kernel's limit of a handle's size (MAX_HANDLE_SZ).
const MAX_HANDLE_BYTES: usize = 128;

/// Looks at an inode whose number is being used again, and the time between two.
const CREATING_LOOKS: u32 = 50;
const CREATING_PAUSE: Duration = Duration::from_millis(1);

/// The opaque bytes of name_to_handle_at(2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE_BYTES],
}

impl FileHandle {
    /// The handle of an open (also O_PATH) descriptor. EOPNOTSUPP where the filesystem has none.
    pub fn of(fd: impl AsFd) -> io::Result<FileHandle> {
        let mut raw = RawHandle {
            handle_bytes: MAX_HANDLE_BYTES as u32,
            handle_type: 0,
            f_handle: [0; MAX_HANDLE_BYTES],
        };
        let mut mount_id: libc::c_int = 0;
        // SAFETY: the path is an empty C string, the handle has room for handle_bytes bytes, and
        // both out-pointers live across the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                fd.as_fd().as_raw_fd(),
                c"".as_ptr(),
                &raw mut raw,
                &raw mut mount_id,
                libc::AT_EMPTY_PATH,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let len = (raw.handle_bytes as usize).min(MAX_HANDLE_BYTES);
        let bytes = raw.f_handle.get(..len).unwrap_or_default().into();
        Ok(FileHandle { kind: raw.handle_type, bytes })
    }

    /// The handle of these parts, as `kind` and `bytes` told them; None if there can be none such.
    pub fn from_parts(kind: i32, bytes: &[u8]) -> Option<FileHandle> {
        let fits = (1..=MAX_HANDLE_BYTES).contains(&bytes.len());
        fits.then(|| FileHandle { kind, bytes: bytes.into() })
    }

    /// What the bytes mean, as the filesystem numbers it.
    pub fn kind(&self) -> i32 {
        self.kind
    }

    /// The opaque bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Opens the inode. `mount` is any real (not O_PATH) descriptor of its filesystem. ESTALE if
    /// the inode is gone, EPERM without CAP_DAC_READ_SEARCH.
    pub fn open(&self, mount: impl AsFd, flags: rustix::fs::OFlags) -> io::Result<OwnedFd> {
        for _ in 0..CREATING_LOOKS {
            match self.open_once(&mount, flags) {
                // ext4 says so, too, while the inode's number is being given to a new file.
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                    std::thread::sleep(CREATING_PAUSE);
                }
                other => return other,
            }
        }
        self.open_once(&mount, flags)
    }

    fn open_once(&self, mount: impl AsFd, flags: rustix::fs::OFlags) -> io::Result<OwnedFd> {
        let mut raw = RawHandle {
            handle_bytes: self.bytes.len() as u32,
            handle_type: self.kind,
            f_handle: [0; MAX_HANDLE_BYTES],
        };
        if let Some(room) = raw.f_handle.get_mut(..self.bytes.len()) {
            room.copy_from_slice(&self.bytes);
        }
        // SAFETY: the handle is initialised and lives across the call.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_fd().as_raw_fd(),
                &raw const raw,
                (flags | rustix::fs::OFlags::CLOEXEC).bits() as libc::c_int,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor to us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    /// A number that differs whenever the handle does: it serves as FUSE's generation, because
    /// filesystems keep theirs inside the handle (FNV-1a).
    pub fn generation(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64 ^ self.kind as u64;
        for &byte in &self.bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_handle_and_another_file_another() {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join("a")).unwrap();
        let Ok(first) = FileHandle::of(&file) else { return };
        assert_eq!(first, FileHandle::of(&file).unwrap());
        assert_eq!(FileHandle::from_parts(first.kind(), first.bytes()).unwrap(), first);
        assert!(FileHandle::from_parts(1, &[]).is_none());
        assert!(FileHandle::from_parts(1, &[0; MAX_HANDLE_BYTES + 1]).is_none());
        let other = std::fs::File::create(dir.path().join("b")).unwrap();
        assert_ne!(first.generation(), FileHandle::of(&other).unwrap().generation());
    }
}
