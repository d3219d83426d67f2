//! The state of a mount with a journal (layer 9): where it is, whose it is, and what it holds.
//!
//! States: a source is clean (no owner mark; its journal, if any, is empty) or dirty (the mark
//! names the journal). Invariants (STORE 6): a dirty source is mounted with that journal, at the
//! mark's generation or a later one, or not at all, whatever was typed; a journal that holds
//! records is never made anew. Locks: the flock of [`home::Home`], for as long as the mount.

pub mod file;
pub mod home;
pub mod mark;
pub mod suits;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::home::{Access, Home, cannot};
use self::mark::{Owner, SourceMark};
use super::source::Source;
use crate::cli::failure::Outcome;
use crate::config::{CacheMode, Config};
use crate::control::proto::Refusal;
use crate::device::BlockDevice;
use crate::error::{Error, Kind};
use crate::journal::{Geometry, Mutants, Recovered};
use crate::store::mark::OwnerMark;

/// The result of what may be refused in one line.
pub type Answer<T> = Result<T, Refusal>;

/// A journal that was read, and what the store needs beside it.
pub struct State {
    /// The state directory, or the partition.
    pub dir: PathBuf,
    /// What the mount's line calls the journal.
    pub place: String,
    /// The journal.
    pub recovered: Recovered,
    /// The owner mark in the source.
    pub mark: Arc<dyn OwnerMark>,
    /// The source was dirty: the journal is to be resumed whatever `cache_mode` says.
    pub dirty: bool,
    /// Nothing may be written: show what the journal holds.
    pub read_only: bool,
    /// The journal lies on the images' own filesystem.
    pub same_disk: bool,
    /// Held as long as the journal is used.
    pub lock: OwnedFd,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("State");
        out.field("place", &self.place).field("recovered", &self.recovered);
        out.finish_non_exhaustive()
    }
}

/// Whether a mount has a journal.
#[derive(Debug)]
pub enum StateOutcome {
    /// It has.
    Journal(Box<State>),
    /// It has not.
    None {
        /// Why not, where the mode would have been writeback: to be said once.
        why: Option<String>,
    },
}

/// A journal found or made.
#[derive(Debug)]
pub struct Found {
    /// Where; locked.
    pub home: Home,
    /// What it holds.
    pub recovered: Recovered,
}

/// Opens the journal of a mount, or says why there is none. An error where the source is dirty and
/// its journal cannot be used, or where `cache_mode=writeback` was typed and there can be none.
pub fn open(config: &Config, source: &Source, mountpoint: &Path) -> Outcome<StateOutcome> {
    let typed = config.daemon.state.as_deref();
    let read_only = config.mount.read_only || suits::is_read_only(&source.lock);
    let wanted = config.store.cache_mode == CacheMode::Writeback && !config.mount.read_only;
    if let Some(owner) = owner_of(source)? {
        let access = if read_only { Access::Read } else { Access::Write };
        let found = find(source, &owner, typed, access)?.usable()?;
        let empty = found.recovered.is_empty() && found.recovered.corruption().is_none();
        if !empty || read_only {
            return state(found, source, true).map(StateOutcome::Journal);
        }
        // Killed between the last checkpoint and the removal of the mark.
        remove_mark(source)?;
    }
    if !wanted {
        return Ok(StateOutcome::None { why: None });
    }
    let first = mark::directory(&source.lock).is_err();
    match fresh(config, source, mountpoint) {
        Ok(found) => state(found, source, false).map(StateOutcome::Journal),
        Err(Without { refusal, state }) => {
            if first {
                mark::remove_directory(&source.lock);
            }
            let typed = config.store.mode_typed || (state && config.daemon.state.is_some());
            if typed {
                return Err(refusal.into());
            }
            let why = Some(format!("{}: {}", refusal.what, refusal.place));
            Ok(StateOutcome::None { why })
        }
    }
}

/// Why there is no journal, and whether that is because of the state's place (not the source's).
struct Without {
    refusal: Refusal,
    state: bool,
}

impl From<Refusal> for Without {
    fn from(refusal: Refusal) -> Without {
        Without { refusal, state: true }
    }
}

/// The mark of a source. One that this user may not look at counts as none.
pub fn owner_of(source: &Source) -> Answer<Option<Owner>> {
    match mark::read(&source.lock) {
        Ok(owner) => Ok(owner),
        Err(error) if error.kind == Kind::Denied => {
            log::warn!("{}: its state directory cannot be read", source.path.display());
            Ok(None)
        }
        Err(error) if error.kind == Kind::Corrupt => {
            let place = format!("{}/owner", own(source));
            let hint = "nobody knows which journal it meant: move it away, then look with check";
            Err(Refusal::new("an owner mark without sense", place, hint))
        }
        Err(error) => Err(cannot("read the owner mark", own(source).as_ref(), &error)),
    }
}

fn own(source: &Source) -> String {
    source.path.join(crate::tree::host::STATE_NAME).display().to_string()
}

/// Removes the mark of a source.
pub fn remove_mark(source: &Source) -> Answer<()> {
    let removed = mark::directory(&source.lock).and_then(mark::remove);
    match removed {
        Err(error) if error.kind != Kind::NotFound => {
            Err(cannot("remove the owner mark", own(source).as_ref(), &error))
        }
        _ => Ok(()),
    }
}

/// What was found where a mark sends one.
#[derive(Debug)]
pub enum Verdict {
    /// The journal.
    Right(Found),
    /// A copy of it that is older than the mark.
    Older(Found, Refusal),
    /// Something that is no journal (any more).
    Unreadable(Home, Refusal),
    /// Nothing, or another journal.
    Absent(Refusal),
}

impl Verdict {
    /// The journal, or why it cannot be used.
    pub fn usable(self) -> Answer<Found> {
        match self {
            Verdict::Right(found) => Ok(found),
            Verdict::Older(_, refusal)
            | Verdict::Unreadable(_, refusal)
            | Verdict::Absent(refusal) => Err(refusal),
        }
    }
}

/// Looks for the journal that the mark of a source names: where it was typed, else at its place in
/// SOURCE, else where it was. An error: the place is held by somebody, or cannot be looked at.
pub fn find(
    source: &Source,
    owner: &Owner,
    typed: Option<&Path>,
    access: Access,
) -> Answer<Verdict> {
    let mut candidates = Vec::new();
    if let Some(path) = typed {
        candidates.push(Home::typed(path, access)?);
    } else {
        candidates.extend(Home::of_source(source, access)?);
        let elsewhere = owner.state();
        if elsewhere.exists() {
            let home = Home::typed(&elsewhere, access)?;
            candidates.extend(Some(home).filter(|home| !home.is_of(source)));
        }
    }
    let mut unreadable = None;
    for home in candidates {
        home.lock()?;
        let Some(device) = home.journal()? else { continue };
        let recovered = match read(&home, Arc::new(device)) {
            Ok(recovered) => recovered,
            Err(refusal) => {
                unreadable.get_or_insert((home, refusal));
                continue;
            }
        };
        if file::hex(&recovered.superblock().uuid) == owner.journal {
            return Ok(judge(Found { home, recovered }, source, owner));
        }
    }
    if let Some((home, refusal)) = unreadable {
        return Ok(Verdict::Unreadable(home, refusal));
    }
    let place = source.path.display().to_string();
    let what = "SOURCE is dirty and its journal is not here";
    Ok(Verdict::Absent(Refusal::new(what, place, ways_out(source, owner))))
}

/// The journal of this mark, or an older copy of it.
pub fn judge(found: Found, source: &Source, owner: &Owner) -> Verdict {
    let generation = found.recovered.superblock().generation;
    if generation >= owner.generation {
        return Verdict::Right(found);
    }
    let wanted = owner.generation;
    let what = format!("an older copy of the journal (generation {generation}, not {wanted})");
    let place = found.home.journal_path().display().to_string();
    Verdict::Older(found, Refusal::new(what, place, ways_out(source, owner)))
}

fn ways_out(source: &Source, owner: &Owner) -> String {
    format!(
        "it was in {}: name its place now (mount --state DIR, check DIR, journal replay DIR), or \
         give its data up: bcachefs-fuse journal abandon {}",
        owner.state().display(),
        source.path.display()
    )
}

/// Reads a journal.
pub fn read(home: &Home, device: Arc<dyn BlockDevice>) -> Answer<Recovered> {
    Recovered::open(device, Mutants::default()).map_err(|error: Error| {
        let path = home.journal_path();
        let place = path.display().to_string();
        match error.kind {
            Kind::Corrupt => {
                let at = home.path.display();
                let hint = format!("move it away: bcachefs-fuse journal abandon {at}");
                Refusal::new(format!("not a journal ({})", error.place), place, hint)
            }
            Kind::NotSupported => {
                let hint = "use the version of bcachefs-fuse that wrote it";
                Refusal::new(format!("a journal of a later version ({})", error.place), place, hint)
            }
            _ => cannot("read the journal", &path, &error),
        }
    })
}

/// The journal of a clean source: empty, of the wanted size, made if it is missing.
fn fresh(config: &Config, source: &Source, mountpoint: &Path) -> Result<Found, Without> {
    suits::check(source).map_err(|refusal| Without { refusal, state: false })?;
    let home = match &config.daemon.state {
        Some(path) => typed_home(path, source, mountpoint)?,
        None => of_source(source)?,
    };
    home.lock()?;
    let bytes = config.store.writeback.journal_bytes;
    if let Some(device) = home.journal()? {
        let recovered = read(&home, Arc::new(device))?;
        if !recovered.is_empty() || recovered.corruption().is_some() {
            return Err(unowned(&home, source).into());
        }
        let superblock = recovered.superblock();
        let present = (superblock.segment_bytes, superblock.segment_count);
        let wanted = Geometry::for_size(bytes).map(|wanted| (wanted.segment_bytes, wanted.count));
        if home.is_partition() || wanted.is_ok_and(|wanted| wanted == present) {
            place_for_mark(source)?;
            home.note_source(&source.path);
            return Ok(Found { home, recovered });
        }
    }
    place_for_mark(source)?;
    home.make_journal(bytes)?;
    home.note_source(&source.path);
    let device = home.journal()?.ok_or_else(|| {
        let error = Error::new(Kind::NotFound, "open", "it is gone again");
        cannot("open the journal", &home.journal_path(), &error)
    })?;
    let recovered = read(&home, Arc::new(device))?;
    Ok(Found { home, recovered })
}

/// Whether the mark can be written is seen before anything depends on it.
fn place_for_mark(source: &Source) -> Answer<()> {
    let made = mark::make_directory(&source.lock);
    made.map(drop).map_err(|error| cannot("make a state directory", own(source).as_ref(), &error))
}

fn of_source(source: &Source) -> Answer<Home> {
    let home = Home::of_source(source, Access::Make)?;
    let error = || Error::new(Kind::NotFound, "open", "it is gone again");
    home.ok_or_else(|| cannot("use the state directory", own(source).as_ref(), &error()))
}

fn typed_home(path: &Path, source: &Source, mountpoint: &Path) -> Answer<Home> {
    let home = Home::typed(path, Access::Make)?;
    if home.path.starts_with(mountpoint) && !home.is_of(source) {
        let hint = "give a path outside of the mount";
        let place = home.path.display().to_string();
        return Err(Refusal::new("state lies below MOUNTPOINT", place, hint));
    }
    Ok(home)
}

/// A journal with records that no mark of this source asks for.
fn unowned(home: &Home, source: &Source) -> Refusal {
    let path = home.path.display();
    let place = home.journal_path().display().to_string();
    let give_up = format!("bcachefs-fuse journal abandon {path}");
    let noted = home.note();
    if noted.as_ref() == Some(&source.path) {
        // Its own state directory, moved with the mark in it, or its mark was removed.
        let what = "a journal with records that SOURCE does not name";
        let hint = if home.is_of(source) {
            format!("its owner mark is gone; move them away: {give_up}")
        } else {
            format!("move it back to where its owner mark belongs, {}, or: {give_up}", own(source))
        };
        return Refusal::new(what, place, hint);
    }
    let whose = match noted {
        Some(noted) => format!("they are of {}: mount that, or ", noted.display()),
        None => String::new(),
    };
    let hint = format!("{whose}move them away: {give_up}");
    Refusal::new("a journal with records of another source", place, hint)
}

/// What a mount goes on with.
pub fn state(found: Found, source: &Source, dirty: bool) -> Outcome<Box<State>> {
    let Found { home, recovered } = found;
    let superblock = recovered.superblock();
    let read_only = home.is_read_only();
    // The mark is written by a mount that has started its generation, which is this one or later.
    let generation = superblock.generation + 1;
    let uuid = file::hex(&superblock.uuid);
    let directory = if read_only {
        None
    } else {
        let made = mark::make_directory(&source.lock);
        Some(made.map_err(|error| cannot("use the state directory", own(source).as_ref(), &error))?)
    };
    let mark = Arc::new(SourceMark::new(directory, uuid, generation, &home.path));
    let same_disk = home.filesystem() == Some(source.device);
    Ok(Box::new(State {
        dir: home.path.clone(),
        place: home.journal_path().display().to_string(),
        recovered,
        mark,
        dirty,
        read_only,
        same_disk,
        lock: home.into_lock(),
    }))
}

#[cfg(test)]
pub(crate) mod tests;
