//! Byte-range locks of open file descriptions (OFD locks, fcntl(2)).
//!
//! Such a lock belongs to the open file description: duplicates and children share it, a second
//! open of the same file by the same process conflicts with it, and it ends with the last
//! descriptor of that description, not (as with POSIX locks) with the first close of any
//! descriptor of the file. So it is held exactly as long as its descriptor. Advisory.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Who holds a lock that is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A process, by a POSIX lock.
    Process(u32),
    /// An open file description: the kernel does not tell whose.
    Description,
}

fn flock(kind: libc::c_int, start: u64, len: u64) -> io::Result<libc::flock> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    // SAFETY: the struct is plain numbers, for which zero is a value; some targets pad it.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start.try_into().map_err(invalid)?;
    lock.l_len = len.try_into().map_err(invalid)?;
    Ok(lock)
}

fn kind(exclusive: bool) -> libc::c_int {
    if exclusive { libc::F_WRLCK } else { libc::F_RDLCK }
}

fn fcntl(fd: impl AsFd, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: the commands used here read, and F_OFD_GETLK writes, the one struct behind the
        // pointer, which lives across the call.
        let result = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), command, &raw mut *lock) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Locks `len` bytes at `start` (0: to the end of any file) without waiting; false if somebody
/// holds a lock in the way. Shared needs a readable descriptor, exclusive a writable one (EBADF).
pub fn try_lock(fd: impl AsFd, start: u64, len: u64, exclusive: bool) -> io::Result<bool> {
    match fcntl(fd, libc::F_OFD_SETLK, &mut flock(kind(exclusive), start, len)?) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Gives up what this description holds of a range.
pub fn unlock(fd: impl AsFd, start: u64, len: u64) -> io::Result<()> {
    fcntl(fd, libc::F_OFD_SETLK, &mut flock(libc::F_UNLCK, start, len)?)
}

/// Who holds a lock that `try_lock` with the same arguments would meet; None if nobody.
pub fn holder(fd: impl AsFd, start: u64, len: u64, exclusive: bool) -> io::Result<Option<Holder>> {
    let mut lock = flock(kind(exclusive), start, len)?;
    fcntl(fd, libc::F_OFD_GETLK, &mut lock)?;
    if libc::c_int::from(lock.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    // -1 for an OFD lock, 0 for a process outside this pid namespace.
    Ok(Some(match u32::try_from(lock.l_pid) {
        Ok(pid) if pid > 0 => Holder::Process(pid),
        _ => Holder::Description,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

    fn open(path: &std::path::Path) -> File {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn a_lock_belongs_to_the_description_and_ends_with_it() {
        const FAR: u64 = (1 << 63) - 3;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (a, b) = (open(&path), open(&path));
        assert!(try_lock(&a, FAR, 1, true).unwrap());
        assert!(!try_lock(&b, FAR, 1, true).unwrap());
        assert!(!try_lock(&b, FAR, 1, false).unwrap());
        assert!(try_lock(&b, FAR - 1, 1, true).unwrap());
        assert_eq!(holder(&b, FAR, 1, false).unwrap(), Some(Holder::Description));
        assert_eq!(holder(&a, FAR, 1, true).unwrap(), None);
        // Closing another descriptor of the file does not end it, nor does one of two duplicates.
        drop(open(&path));
        let duplicate = a.try_clone().unwrap();
        drop(a);
        assert!(!try_lock(&b, FAR, 1, true).unwrap());
        drop(duplicate);
        assert!(try_lock(&b, FAR, 1, true).unwrap());
    }

    #[test]
    fn shared_locks_share_and_unlock_gives_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (a, b) = (open(&path), open(&path));
        assert!(try_lock(&a, 101, 1, false).unwrap());
        assert!(try_lock(&b, 101, 1, false).unwrap());
        assert!(!try_lock(&b, 101, 1, true).unwrap());
        unlock(&a, 101, 1).unwrap();
        assert!(try_lock(&b, 101, 1, true).unwrap());
        assert!(try_lock(&b, u64::MAX, 1, true).is_err());
        let read_only = File::open(&path).unwrap();
        assert_eq!(try_lock(&read_only, 0, 1, true).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_process_with_a_posix_lock_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (a, b) = (open(&path), open(&path));
        let mut lock = flock(libc::F_WRLCK, 5, 1).unwrap();
        fcntl(&a, libc::F_SETLK, &mut lock).unwrap();
        assert_eq!(holder(&b, 0, 10, true).unwrap(), Some(Holder::Process(std::process::id())));
        assert!(!try_lock(&b, 0, 10, true).unwrap());
    }
}
