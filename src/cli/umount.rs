//! `umount` (layer 9): refuses while somebody uses the mount, has everything written home,
//! unmounts, then waits until the daemon is gone, so that what follows (a new mount, fsck of an
//! image) finds nobody.
//!
//! Invariant: it succeeds without a word only if the files of SOURCE are current afterwards.

use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::cli::args::UmountArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::flush::{self, Stop};
use crate::cli::output::print;
use crate::cli::place::Place;
use crate::clock;
use crate::control::client::Flush;
use crate::control::proto::Ask;
use crate::fuse::holders::{self, Holder};
use crate::fuse::mount::{self, How, Outcome as Unmounted};
use crate::fuse::mountinfo::MountEntry;
use crate::stats::FlushProgress;
use crate::units::format_size;

/// How long a daemon may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// What becomes of what is left.
const NEXT_MOUNT: &str = "the next mount writes them home";

/// Runs it.
pub fn run(args: &UmountArgs) -> Outcome<()> {
    let place = Place::find(&args.path)?;
    if args.force {
        abort(place.mountpoint())?;
        return unmount(&place, How::Politely, Wait::ForDaemon);
    }
    if args.lazy {
        return unmount(&place, How::Detach, Wait::No);
    }
    refuse_busy(&place)?;
    let journal = Journal::of(&place);
    let left = if journal.bytes == 0 || args.no_flush || journal.failed.is_some() {
        journal.left(&place)
    } else {
        flush(&place, &Stop::by_signal()?)?
    };
    // The daemon must not go on where we stopped; what is stuck it tries no longer than it must.
    let leaving = left.bytes > 0;
    if leaving {
        leave(&place, true);
    }
    if let Err(failure) = unmount(&place, How::Politely, Wait::ForDaemon) {
        if leaving {
            leave(&place, false);
        }
        return Err(failure);
    }
    if !leaving {
        return Ok(());
    }
    let failure = left.failure(&place, NEXT_MOUNT);
    // Where nothing could be flushed nothing went wrong.
    if args.no_flush || journal.read_only {
        return print(&format!("{}\n", failure.line)).map(drop);
    }
    Err(failure)
}

/// What a live mount's journal is like; nothing where nobody answers or there is none.
#[derive(Debug, Default)]
pub struct Journal {
    /// Bytes that are not home.
    pub bytes: u64,
    /// Why nothing can be written home.
    pub failed: Option<String>,
    /// The whole mount is read-only.
    pub read_only: bool,
}

impl Journal {
    /// Asks the daemon.
    pub fn of(place: &Place) -> Journal {
        let Ok(stat) = flush::stat(place) else { return Journal::default() };
        let Some(writeback) = stat.snapshot.writeback else { return Journal::default() };
        let (bytes, read_only) = (writeback.dirty_bytes, stat.mount.read_only);
        Journal { bytes, failed: writeback.failed, read_only }
    }

    /// All of it.
    pub fn left(&self, place: &Place) -> Left {
        let why = match &self.failed {
            Some(_) if self.read_only => "it was mounted read-only".to_owned(),
            Some(why) => format!("the journal took no more writes ({why})"),
            None => String::new(),
        };
        let ask = self.failed.is_some() && self.read_only;
        let source = place.entry.source.to_string_lossy();
        let next = ask.then(|| format!("bcachefs-fuse check {source} says how they go home"));
        Left { bytes: self.bytes, why, next }
    }
}

/// What a flush did not write home.
#[derive(Debug, Default)]
pub struct Left {
    /// Bytes in the journal.
    pub bytes: u64,
    why: String,
    /// What to do where the next mount may not write it home.
    next: Option<String>,
}

impl Left {
    fn of(place: &Place, end: &FlushProgress) -> Left {
        let source = place.entry.source.to_string_lossy();
        let next = flush::way_out(&end.refused, &source);
        Left { bytes: end.left_bytes, why: flush::stuck(end), next }
    }

    /// In one line, after the unmount. `next`: what becomes of it.
    pub fn failure(&self, place: &Place, next: &str) -> Failure {
        let why = if self.why.is_empty() { String::new() } else { format!("{}; ", self.why) };
        let what = format!("unmounted, {} are left in the journal", format_size(self.bytes));
        let source = place.entry.source.to_string_lossy();
        let next = self.next.as_deref().unwrap_or(next);
        let hint = format!("{why}{next}; until then these files are not current");
        Failure::new(what, source, hint)
    }
}

/// Has everything written home until `stop`; what is left.
pub fn flush(place: &Place, stop: &Stop) -> Outcome<Left> {
    Ok(match flush::wait(place, None, stop)? {
        Flush::Done(end) | Flush::Stopped(end) => Left::of(place, &end),
    })
}

fn leave(place: &Place, leave: bool) {
    let told = place.connect().and_then(|mut client| {
        client.ask(Ask::Leave { leave }).map_err(|refusal| place.failure(refusal))
    });
    if let Err(failure) = told {
        log::debug!("{failure}");
    }
}

/// Whether to wait for the end of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Until it is gone.
    ForDaemon,
    /// It may go on.
    No,
}

/// Unmounts.
pub fn unmount(place: &Place, how: How, wait: Wait) -> Outcome<()> {
    let daemon = if wait == Wait::No { None } else { daemon(place) };
    let mountpoint = place.mountpoint();
    match mount::unmount(mountpoint, how) {
        Unmounted::Gone => {}
        Unmounted::Busy => return Err(busy(place, find(&place.entry).as_deref())),
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

fn busy(place: &Place, found: Option<&[Holder]>) -> Failure {
    let hint = format!("used by {}; or umount --lazy", holders::describe(found));
    Failure::new("busy", place.mountpoint().display(), hint)
}

/// Refuses before a long flush what would be refused after it.
pub fn refuse_busy(place: &Place) -> Outcome<()> {
    let found = find(&place.entry).unwrap_or_default();
    let sure: Vec<Holder> =
        found.into_iter().filter(|holder| is_inside(holder, &place.entry)).collect();
    if sure.is_empty() { Ok(()) } else { Err(busy(place, Some(&sure))) }
}

/// A directory is found by its path, and SOURCE below a mount over itself has the same one: only
/// the device number tells. The daemon is not asked.
fn is_inside(holder: &Holder, entry: &MountEntry) -> bool {
    let link = match holder.what {
        "working directory" => "cwd",
        "root directory" => "root",
        _ => return true,
    };
    let path = format!("/proc/{}/{link}", holder.pid);
    let stat = rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
    stat.is_ok_and(|stat| (stat.stx_dev_major, stat.stx_dev_minor) == entry.device())
}

/// Who keeps the mount busy.
fn find(entry: &MountEntry) -> Option<Vec<Holder>> {
    holders::find(Some(entry.id), Some(entry.device()), &entry.mountpoint)
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
