//! The uuid of a mounted filesystem (FS_IOC_GETFSUUID, Linux 6.9).

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl, opcode};

/// The kernel's struct fsuuid2.
#[repr(C)]
struct FsUuid {
    len: u8,
    uuid: [u8; 16],
}

const GET_FS_UUID: Opcode = opcode::read::<FsUuid>(0x15, 0);

/// The uuid of the filesystem behind a real (not O_PATH) descriptor. ENOTTY where the kernel or the
/// filesystem has none.
pub fn of(fd: impl AsFd) -> rustix::io::Result<[u8; 16]> {
    // SAFETY: the opcode is made from the type that the kernel fills in for it, all of it bytes.
    let answer = unsafe { ioctl(fd, Getter::<GET_FS_UUID, FsUuid>::new()) }?;
    if usize::from(answer.len) == answer.uuid.len() { Ok(answer.uuid) } else { Err(Errno::NOTTY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_the_kernels_and_two_files_agree() {
        assert_eq!(GET_FS_UUID, 0x8011_1500);
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join("f")).unwrap();
        let Ok(uuid) = of(&file) else { return };
        assert_eq!(of(std::fs::File::open(dir.path()).unwrap()).unwrap(), uuid);
    }
}
