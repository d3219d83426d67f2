//! Whether a place can take part in writeback (layer 9). No state.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatVfsMountFlags, StatxFlags};

use super::Answer;
use crate::cli::run::source::Source;
use crate::control::proto::Refusal;
use crate::sys::handle::FileHandle;

/// f_type of FUSE filesystems.
const FUSE: u64 = 0x6573_5546;
/// f_type of tmpfs and ramfs.
const MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

fn kind(fd: impl AsFd) -> Option<u64> {
    rustix::fs::fstatfs(fd).ok().map(|stat| stat.f_type as u64 & 0xffff_ffff)
}

/// Whether what lies there is gone after a power cut.
pub fn in_memory(fd: impl AsFd) -> bool {
    kind(fd).is_some_and(|kind| MEMORY.contains(&kind))
}

/// Whether nothing can be written below this descriptor.
pub fn is_read_only(fd: impl AsFd) -> bool {
    rustix::fs::fstatvfs(fd).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// Whether the files of a source can be told apart for good (J12), and written.
pub fn check(source: &Source) -> Answer<()> {
    let place = || source.path.display().to_string();
    if kind(&source.lock) == Some(FUSE) {
        let hint = "its file handles end with its daemon: give cache_mode=writethrough";
        return Err(Refusal::new("no writeback on a FUSE filesystem", place(), hint));
    }
    if is_read_only(&source.lock) {
        let hint = "remount it rw, or give cache_mode=writethrough";
        return Err(Refusal::new("no writeback on a read-only filesystem", place(), hint));
    }
    if FileHandle::of(&source.lock).is_err() && !has_birth_time(&source.lock) {
        let hint = "an image put in place of another could not be noticed: give \
                    cache_mode=writethrough";
        let what = "no writeback without file handles or birth times";
        return Err(Refusal::new(what, place(), hint));
    }
    Ok(())
}

fn has_birth_time(fd: impl AsFd) -> bool {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)
        .is_ok_and(|stat| StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME))
}
