//! System calls that rustix lacks (layer 1): the only module with `unsafe` and `libc`.
//!
//! Everything here is a thin, safe wrapper: no policy, no state beyond a thread's own.

#![allow(unsafe_code)]

pub mod aligned;
pub mod fs_uuid;
pub mod handle;
pub mod huge;
pub mod locks;
pub mod path_fd;
pub mod process;
pub mod reclaim;
pub mod umask;
pub mod uring;
pub mod write_out;

pub use aligned::AlignedBuf;

/// Open and file flags by their Linux names, for modules that decode what an application asked.
pub mod flags {
    pub use libc::{
        FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE, O_ACCMODE, O_APPEND,
        O_CREAT, O_DIRECT, O_DSYNC, O_EXCL, O_NOATIME, O_RDONLY, O_RDWR, O_SYNC, O_TRUNC, O_WRONLY,
        S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, S_ISGID, S_ISUID,
        S_ISVTX, SEEK_DATA, SEEK_HOLE,
    };
}
