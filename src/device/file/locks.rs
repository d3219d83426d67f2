//! Locks on the source file, so that others who ask keep their hands off it.
//!
//! States: nobody's -> claimed (one byte, by another mount of ours to be met), which ends with the
//! device; while it is dirty, qemu's lock bytes as well. All of them are on the description of
//! buffered writes, which stays open as long as the device (see `FileDevice`). Lock: `claimed`,
//! held while a predecessor is waited for, which nobody else needs meanwhile: what is not claimed
//! is neither written nor dirty.
//!
//! qemu's protocol: whoever uses permission N holds byte 100 + N, whoever does not share it byte
//! 200 + N, all by shared locks; a newcomer asks whether an exclusive one would be possible there.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};
use crate::sys::locks::{try_lock, unlock};

/// The byte that tells two mounts apart: past the end of any file, and of what others lock.
const OUR_BYTE: u64 = (1 << 63) - 3;

/// qemu's "I write" and "nobody else may write" (permission 1 is BLK_PERM_WRITE).
const QEMU_BYTES: [u64; 2] = [101, 201];

/// A device that is being closed may still hold its lock while its successor is opened.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Default)]
pub(super) struct Locks {
    claimed: Mutex<bool>,
}

impl Locks {
    /// Locks the file for this device, once. Busy if another mount holds it; a filesystem without
    /// locks claims nothing.
    pub(super) fn claim(&self, fd: impl AsFd) -> Result<()> {
        let mut claimed = self.claimed.lock();
        if *claimed {
            return Ok(());
        }
        for turn in 0..TRIES {
            if turn > 0 {
                std::thread::sleep(PAUSE);
            }
            match try_lock(&fd, OUR_BYTE, 1, true) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) => log::debug!("a source file cannot be locked: {error}"),
            }
            *claimed = true;
            return Ok(());
        }
        Err(Error {
            kind: Kind::Busy,
            op: "open",
            place: "".into(),
            source: Some(io::Error::other("locked by another bcachefs-fuse")),
        })
    }

    /// Takes or gives up qemu's bytes. What qemu itself holds stays its own: shared locks.
    pub(super) fn mark_dirty(&self, fd: impl AsFd, dirty: bool) {
        for byte in QEMU_BYTES {
            let done = if dirty {
                try_lock(&fd, byte, 1, false).map(|_| ())
            } else {
                unlock(&fd, byte, 1)
            };
            if let Err(error) = done {
                log::debug!("qemu's lock byte {byte}: {error}");
            }
        }
    }
}
