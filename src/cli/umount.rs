//! `umount` (layer 9): unmounts, then waits until the daemon is gone, so that what follows (a new
//! mount, fsck of an image) finds nobody.

use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::cli::args::UmountArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::place::Place;
use crate::clock;
use crate::fuse::holders;
use crate::fuse::mount::{self, How, Outcome as Unmounted};
use crate::fuse::mountinfo::MountEntry;

/// How long a daemon may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs it.
pub fn run(args: &UmountArgs) -> Outcome<()> {
    let place = Place::find(&args.path)?;
    if args.force {
        abort(place.mountpoint())?;
    }
    unmount(&place, args.lazy)
}

/// Unmounts; waits for the daemon unless `lazy`.
pub fn unmount(place: &Place, lazy: bool) -> Outcome<()> {
    let daemon = if lazy { None } else { daemon(place) };
    let mountpoint = place.mountpoint();
    let how = if lazy { How::Detach } else { How::Politely };
    match mount::unmount(mountpoint, how) {
        Unmounted::Gone => {}
        Unmounted::Busy => {
            let hint = format!("used by {}; or umount --lazy", users(&place.entry));
            return Err(Failure::new("busy", mountpoint.display(), hint));
        }
        Unmounted::Failed(words) => {
            let hint = format!("{words}; unmount as the user who mounted it, or as root");
            return Err(Failure::new("cannot unmount", mountpoint.display(), hint));
        }
    }
    match daemon {
        Some(process) if !ended(&process) => Err(Failure::new(
            format!("unmounted, but the daemon runs on after {} s", PATIENCE.as_secs()),
            mountpoint.display(),
            "see the system log",
        )),
        _ => Ok(()),
    }
}

/// Who keeps the mount busy.
fn users(entry: &MountEntry) -> String {
    let found = holders::find(Some(entry.id), Some(entry.device()), &entry.mountpoint);
    holders::describe(found.as_deref())
}

/// Ends requests that hang, with an error; what umount -f does.
pub fn abort(mountpoint: &Path) -> Outcome<()> {
    match rustix::mount::unmount(mountpoint, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
        Err(rustix::io::Errno::PERM) => {
            Err(Failure::new("not permitted", mountpoint.display(), "umount --force as root"))
        }
        // Unmounted, or busy although aborted; unmount() finds out and says it.
        _ => Ok(()),
    }
}

/// The daemon's process; None where nobody answers (it is dead, or of another namespace).
fn daemon(place: &Place) -> Option<OwnedFd> {
    let mut client = place.connect().ok()?;
    client.set_timeout(Some(Duration::from_secs(5)));
    let pid = client.hello().ok()?.pid;
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn ended(process: &OwnedFd) -> bool {
    let start = clock::now();
    loop {
        let left = PATIENCE.saturating_sub(clock::now() - start);
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], timeout.as_ref()) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
