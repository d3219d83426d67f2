//! Getting SOURCE for oneself (layer 9): no two mounts share a file's blocks.
//!
//! The registry tells who is there and says it in words; the flock on SOURCE also keeps out those
//! the registry cannot show (other users). Invariant: `Prepared` was opened after the last
//! conflict had gone, so its descriptors are never those of a dying mount.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;

use super::registry::{self, Claim, Entry, Turn};
use super::source::Source;
use super::{target, upper};
use crate::cli::failure::{Failure, Outcome};
use crate::clock;
use crate::config::Config;
use crate::control::client::Client;
use crate::control::proto::Ask;
use crate::fuse::{mount, mountinfo};

/// A daemon that was killed needs a moment to be gone.
const DYING: Duration = Duration::from_millis(500);
/// One whose mount was taken away from outside may have to finish its last requests.
const LINGERING: Duration = Duration::from_secs(5);
/// How long a daemon may take to hear that it should stop.
const ANSWER: Duration = Duration::from_secs(2);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Everything that is settled before the mount.
#[derive(Debug)]
pub struct Prepared {
    /// The open source.
    pub source: Source,
    /// The open upper directory of an overlay.
    pub upper: Option<upper::Layers>,
    /// The canonical mountpoint.
    pub mountpoint: PathBuf,
    /// Our entry among the live mounts.
    pub claim: Claim,
}

struct Conflict {
    failure: Failure,
    patience: Duration,
    /// A daemon whose mount was taken away from outside, but that still serves open files.
    lingering: Option<Box<Entry>>,
}

impl From<Failure> for Conflict {
    fn from(failure: Failure) -> Conflict {
        Conflict { failure, patience: Duration::ZERO, lingering: None }
    }
}

/// Opens, checks and claims SOURCE and MOUNTPOINT.
pub fn prepare(config: &Config) -> Outcome<Prepared> {
    let start = clock::now();
    let mut asked = false;
    loop {
        match attempt(config) {
            Ok(prepared) => return Ok(prepared),
            Err(conflict) if clock::now().saturating_sub(start) >= conflict.patience => {
                return Err(conflict.failure);
            }
            Err(conflict) => {
                if let Some(entry) = conflict.lingering.filter(|_| !asked) {
                    asked = true;
                    ask_to_stop(&entry);
                }
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// The mount is gone for everybody but those who had files open: the daemon gives them up.
fn ask_to_stop(entry: &Entry) {
    let Some(device) = entry.device else { return };
    let asked = Client::connect(device, entry.uid, Duration::ZERO).and_then(|mut client| {
        client.set_timeout(Some(ANSWER));
        client.ask(Ask::Shutdown)
    });
    if asked.is_err() {
        log::debug!("pid {}: does not answer", entry.pid);
    }
}

fn attempt(config: &Config) -> Result<Prepared, Conflict> {
    let source = Source::open(&config.mount.source)
        .map_err(|failure| dying(failure, &config.mount.source))?;
    let mountpoint = target::check(&config.mount.mountpoint, &source)
        .map_err(|failure| dying(failure, &config.mount.mountpoint))?;
    target::check_own_files(&config.daemon, &mountpoint, &source.path)?;
    upper::refuse_as_source(&source)?;
    let upper = match &config.mount.upper {
        Some(typed) => Some(upper::open(typed, &source, &config.mount.lowers, &mountpoint)?),
        None => None,
    };
    // A lower is only read: any number of overlays may share it.
    let read_only = config.mount.read_only || upper.is_some();
    let turn = Turn::take(config.mount.allow_other)?;
    let locked = source.try_lock(read_only)?;
    let result = conflict(&source, &mountpoint, read_only, locked);
    if let Some(conflict) = result {
        if locked {
            let _ = rustix::fs::flock(&source.lock, FlockOperation::Unlock);
        }
        return Err(conflict);
    }
    if let Some(upper) = &upper {
        upper::lock(&upper.upper, config.mount.read_only).map_err(|failure| Conflict {
            failure,
            patience: DYING,
            lingering: None,
        })?;
    }
    let claim = turn.claim(Entry {
        schema: 1,
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        source: source.path.as_path().into(),
        source_device: source.device,
        source_inode: source.inode,
        origin: origin(&source.path).map(|(device, path)| (device, path.as_path().into())),
        mountpoint: mountpoint.as_path().into(),
        device: None,
        read_only,
    })?;
    Ok(Prepared { source, upper, mountpoint, claim })
}

/// The daemon of a mount on `path` may have died while we looked at it.
fn dying(failure: Failure, path: &Path) -> Conflict {
    let patience = if mount::is_dead(path) { DYING } else { Duration::ZERO };
    Conflict { failure, patience, lingering: None }
}

fn conflict(source: &Source, mountpoint: &Path, read_only: bool, locked: bool) -> Option<Conflict> {
    let found = registry::live().into_iter().find_map(|entry| {
        let failure = overlap(&entry, source, read_only)
            .or_else(|| taken(&entry, mountpoint))
            .map(|words| words.into_failure(&entry))?;
        Some(with_patience(&entry, failure))
    });
    if found.is_some() {
        return found;
    }
    let place = source.path.display();
    if !locked {
        let holder = match source.lock_holder() {
            Some(pid) => format!("process {pid} holds it ({})", command(pid)),
            None => "another process holds it".to_owned(),
        };
        let hint = format!("{holder}; unmount it there first");
        return Some(Conflict {
            failure: Failure::new("SOURCE is in use", place, hint),
            patience: DYING,
            lingering: None,
        });
    }
    let table = mountinfo::read().unwrap_or_default();
    let entry = mountinfo::holding(&table, &source.path).filter(|entry| entry.is_ours())?;
    let hint = format!(
        "mount {} itself, or unmount: bcachefs-fuse umount {}",
        entry.source.to_string_lossy(),
        entry.mountpoint.display()
    );
    let failure = Failure::new("SOURCE lies in a mount of bcachefs-fuse", place, hint);
    Some(Conflict { failure, patience: DYING, lingering: None })
}

/// What is wrong, and where; the hint follows from the other mount.
struct Words {
    what: &'static str,
    place: PathBuf,
}

impl Words {
    fn into_failure(self, entry: &Entry) -> Failure {
        let mountpoint = entry.mountpoint();
        let hint = format!(
            "pid {} shows {} on {}; first: bcachefs-fuse umount {}",
            entry.pid,
            entry.source().display(),
            mountpoint.display(),
            mountpoint.display()
        );
        Failure::new(self.what, self.place.display(), hint)
    }
}

fn overlap(entry: &Entry, source: &Source, read_only: bool) -> Option<Words> {
    let (theirs, shown_on) = (entry.source(), entry.mountpoint());
    let words = |what| Some(Words { what, place: source.path.clone() });
    if source.path == shown_on {
        return words("SOURCE is a mount of bcachefs-fuse");
    }
    if source.path.starts_with(&shown_on) {
        return words("SOURCE lies in a mount of bcachefs-fuse");
    }
    if read_only && entry.read_only {
        return None;
    }
    let ours = origin(&source.path);
    let origin = entry.origin.as_ref().map(|(device, path)| (*device, PathBuf::from(path)));
    let identity = (entry.source_device, entry.source_inode);
    if theirs == source.path || identity == (source.device, source.inode) {
        return words("SOURCE is mounted already");
    }
    if source.path.starts_with(&theirs) || is_below(&ours, &origin) {
        return words("SOURCE lies inside a mounted source");
    }
    if theirs.starts_with(&source.path) || is_below(&origin, &ours) {
        return words("SOURCE lies around a mounted source");
    }
    None
}

/// A directory by the device number and the path inside its filesystem.
type Origin = Option<((u32, u32), PathBuf)>;

fn is_below(inner: &Origin, outer: &Origin) -> bool {
    let (Some((device, inner)), Some((other, outer))) = (inner, outer) else { return false };
    device == other && inner.starts_with(outer)
}

fn origin(path: &Path) -> Origin {
    mountinfo::origin(&mountinfo::read().ok()?, path)
}

fn taken(entry: &Entry, mountpoint: &Path) -> Option<Words> {
    let shown_on = entry.mountpoint();
    (shown_on == mountpoint && entry.is_mounted())
        .then_some(Words { what: "MOUNTPOINT is a mount of bcachefs-fuse", place: shown_on })
}

fn with_patience(entry: &Entry, failure: Failure) -> Conflict {
    if entry.is_mounted() {
        return Conflict { failure, patience: DYING, lingering: None };
    }
    let hint = format!(
        "pid {} still serves files that were open when {} was unmounted; close them",
        entry.pid,
        entry.mountpoint().display()
    );
    let failure = Failure::new("SOURCE is still in use", entry.source().display(), hint);
    Conflict { failure, patience: LINGERING, lingering: Some(Box::new(entry.clone())) }
}

fn command(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}
