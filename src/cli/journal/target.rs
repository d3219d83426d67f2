//! What DIR of `check` and `journal` stands for: SOURCE, a state directory, or a partition.
//!
//! States: opened, with the locks a mount takes; they last as long as the `Target`.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use crate::cli::failure::{Failure, Outcome};
use crate::cli::run::registry;
use crate::cli::run::source::Source;
use crate::cli::run::state::file::{self, Content, JournalFile};
use crate::cli::run::state::home::{self, Access, Home};
use crate::cli::run::state::mark::Owner;
use crate::cli::run::state::{self, Answer, Found, Verdict};
use crate::control::proto::Refusal;
use crate::fuse::mount::words_of;
use crate::fuse::mountinfo;
use crate::journal::Recovered;
use crate::tree::host::STATE_NAME;

/// A source, its mark and its journal, as far as they are there.
#[derive(Debug)]
pub struct Target {
    /// DIR, canonical.
    pub place: PathBuf,
    /// SOURCE, locked; None where nobody knows it.
    pub source: Option<Source>,
    /// The mark in SOURCE.
    pub owner: Option<Owner>,
    /// The journal; None where there is none and none is asked for.
    pub verdict: Option<Verdict>,
}

impl Target {
    /// Opens it all and takes the locks; refused by name while a mount uses it.
    pub fn open(typed: &Path, access: Access) -> Outcome<Target> {
        let place = typed.canonicalize().map_err(|error| {
            let hint = "name a SOURCE, its state directory or its partition";
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOENT);
            Failure::new(words_of(errno), typed.display(), hint)
        })?;
        refuse_mounted(&place)?;
        if place.join(STATE_NAME).is_dir() || !is_state(&place) {
            Target::of_source(place, access)
        } else {
            Target::of_state(place, access)
        }
    }

    fn of_source(place: PathBuf, access: Access) -> Outcome<Target> {
        let source = locked(&place, access)?;
        let owner = state::owner_of(&source)?;
        let verdict = match &owner {
            Some(owner) => Some(state::find(&source, owner, None, access)?),
            None => match Home::of_source(&source, access)? {
                Some(home) => journal_of(home)?,
                None => None,
            },
        };
        Ok(Target { place, source: Some(source), owner, verdict })
    }

    fn of_state(place: PathBuf, access: Access) -> Outcome<Target> {
        let home = Home::typed(&place, access)?;
        let path = if place.file_name().is_some_and(|name| name == STATE_NAME) {
            place.parent().map(Path::to_owned)
        } else {
            home.note()
        };
        // A source that is gone does not make its journal unreadable.
        let source = match path.filter(|path| path.is_dir()) {
            Some(path) => {
                refuse_mounted(&path)?;
                Some(locked(&path, access)?)
            }
            None => None,
        };
        let owner = match &source {
            Some(source) => state::owner_of(source)?,
            None => None,
        };
        let mut target = Target { place, source, owner, verdict: journal_of(home)? };
        let fits = target.owner_fits();
        target.verdict = match (target.verdict, &target.source, &target.owner) {
            (Some(Verdict::Right(found)), Some(source), Some(owner)) if fits => {
                Some(state::judge(found, source, owner))
            }
            (verdict, ..) => verdict,
        };
        Ok(target)
    }

    /// The journal as far as it can be read.
    pub fn recovered(&self) -> Option<&Recovered> {
        match &self.verdict {
            Some(Verdict::Right(found) | Verdict::Older(found, _)) => Some(&found.recovered),
            _ => None,
        }
    }

    /// Where the journal is.
    pub fn home(&self) -> Option<&Home> {
        match &self.verdict {
            Some(Verdict::Right(found) | Verdict::Older(found, _)) => Some(&found.home),
            Some(Verdict::Unreadable(home, _)) => Some(home),
            _ => None,
        }
    }

    /// Why a mount would refuse this journal.
    pub fn refusal(&self) -> Option<&Refusal> {
        match &self.verdict {
            Some(
                Verdict::Older(_, refusal)
                | Verdict::Unreadable(_, refusal)
                | Verdict::Absent(refusal),
            ) => Some(refusal),
            _ => None,
        }
    }

    /// Whether the mark in SOURCE names the journal found.
    pub fn owner_fits(&self) -> bool {
        match (&self.owner, self.recovered()) {
            (Some(owner), Some(recovered)) => {
                owner.journal == file::hex(&recovered.superblock().uuid)
            }
            _ => false,
        }
    }
}

fn journal_of(home: Home) -> Answer<Option<Verdict>> {
    home.lock()?;
    let Some(device) = home.journal()? else { return Ok(None) };
    Ok(Some(match state::read(&home, Arc::new(device)) {
        Ok(recovered) => Verdict::Right(Found { home, recovered }),
        Err(refusal) => Verdict::Unreadable(home, refusal),
    }))
}

/// Whether DIR holds a journal itself. A directory of images may have one called "journal".
fn is_state(place: &Path) -> bool {
    let Ok(meta) = place.metadata() else { return false };
    if meta.file_type().is_block_device() {
        return true;
    }
    let named = place.file_name().is_some_and(|name| name == STATE_NAME);
    if named || home::has_note(place) {
        return true;
    }
    let Ok(journal) = File::open(place.join(file::NAME)) else { return false };
    let device = JournalFile::new(journal.into(), false);
    file::content(&device).is_ok_and(|content| content == Content::Journal)
}

fn locked(path: &Path, access: Access) -> Outcome<Source> {
    let source = Source::open(path)?;
    if !source.try_lock(access == Access::Read)? {
        let holder = match source.lock_holder() {
            Some(pid) => format!("process {pid} holds it"),
            None => "another process holds it".to_owned(),
        };
        let hint = format!("{holder}; unmount it there first");
        return Err(Failure::new("SOURCE is in use", path.display(), hint));
    }
    Ok(source)
}

/// A mount names itself; what the registry cannot show, the locks do.
fn refuse_mounted(path: &Path) -> Answer<()> {
    let refusal = |mountpoint: &Path| {
        let hint = format!("first: bcachefs-fuse umount {}", mountpoint.display());
        Refusal::new("it is mounted", path.display().to_string(), hint)
    };
    let table = mountinfo::read().unwrap_or_default();
    if let Some(entry) = mountinfo::holding(&table, path).filter(|entry| entry.is_ours()) {
        return Err(refusal(&entry.mountpoint));
    }
    let live = registry::live();
    let Some(entry) = live.iter().find(|entry| entry.source() == path && !entry.read_only) else {
        return Ok(());
    };
    let (pid, mountpoint) = (entry.pid, entry.mountpoint());
    let on = mountpoint.display();
    let hint = format!("pid {pid} shows it on {on}; first: bcachefs-fuse umount {on}");
    Err(Refusal::new("it is mounted", path.display().to_string(), hint))
}
