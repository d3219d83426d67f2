//! Between fuser's types and ours.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, Request, TimeOrNow};

use crate::sys::flags::{S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFSOCK};
use crate::tree::{Attr, Caller, SetTime, Timestamp};

/// Who sent a request.
pub(super) fn caller(req: &Request, umask: u32) -> Caller {
    Caller { uid: req.uid(), gid: req.gid(), umask }
}

/// The type of type bits; unknown ones count as a regular file.
pub(super) fn file_type(mode: u32) -> FileType {
    match mode & S_IFMT {
        S_IFDIR => FileType::Directory,
        S_IFLNK => FileType::Symlink,
        S_IFBLK => FileType::BlockDevice,
        S_IFCHR => FileType::CharDevice,
        S_IFIFO => FileType::NamedPipe,
        S_IFSOCK => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

/// Attributes as fuser sends them.
pub(super) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.mode),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        flags: 0,
    }
}

fn system_time(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.sec.unsigned_abs());
    let whole = if time.sec >= 0 {
        UNIX_EPOCH.checked_add(seconds)
    } else {
        UNIX_EPOCH.checked_sub(seconds)
    };
    let nanos = Duration::from_nanos(time.nsec.into());
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

/// A time to set, as the application gave it. fuser 0.18 subtracts the nanoseconds of a time before
/// 1970 instead of adding them: taken back here.
pub(super) fn set_time(time: Option<TimeOrNow>) -> SetTime {
    match time {
        None => SetTime::Omit,
        Some(TimeOrNow::Now) => SetTime::Now,
        Some(TimeOrNow::SpecificTime(time)) => SetTime::At(match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Timestamp { sec: since.as_secs() as i64, nsec: since.subsec_nanos() },
            Err(before) => {
                let before = before.duration();
                let sec = (before.as_secs() as i64).wrapping_neg();
                Timestamp { sec, nsec: before.subsec_nanos() }
            }
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_fractions() {
        // As fuser 0.18 hands over utimensat(-2 s, 300,000,000 ns).
        let handed = UNIX_EPOCH - Duration::new(2, 300_000_000);
        let time = Timestamp { sec: -2, nsec: 300_000_000 };
        assert_eq!(set_time(Some(TimeOrNow::SpecificTime(handed))), SetTime::At(time));
        let sent = system_time(time);
        assert_eq!(sent, UNIX_EPOCH - Duration::new(1, 700_000_000));
        let least = Timestamp { sec: i64::MIN, nsec: 0 };
        let handed = UNIX_EPOCH - Duration::new(1 << 63, 0);
        assert_eq!(set_time(Some(TimeOrNow::SpecificTime(handed))), SetTime::At(least));
        assert_eq!(system_time(least), handed);
    }
}
