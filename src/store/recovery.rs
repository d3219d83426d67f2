//! Opening a store over a journal that may hold data: the records become dirty maps again, and the
//! files they are of are found by identity (J12).
//!
//! States of a device found in the journal: resumed (its file is the one the records are of: it is
//! dirty, and goes home in the background) | dropped (its file is gone, and so it should: counted)
//! | missing, replaced, changed (its records are kept, its file is not touched, and opening it is
//! refused; the user decides). Nothing is written to any file here. One thread, no locks.
//!
//! Invariants: J5 (it only reads, so it may be cut anywhere), J9 (behind a corrupt record nothing
//! is written any more), J10 (replay makes and unlinks no file), J12.

mod absent;
pub(super) mod replay;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use self::absent::Absent;
use self::replay::{Log, Replayed};
use super::device::Device;
use super::mark::OwnerMark;
use super::writeback::{Mutants, Writeback};
use super::{BlockStore, Stamp};
use crate::config::StoreConfig;
use crate::device::BlockDevice;
use crate::error::{Kind, Result};
use crate::journal::{Corruption, DeviceIdentity, Recovered};
use crate::units::{DeviceId, Identity};

/// Between a heartbeat and a change of ctime that our own writes explain, in seconds (J12).
const HEARTBEAT_SLACK: i64 = 2;

/// A file that recovery asked for.
pub struct Located {
    /// Its bytes.
    pub device: Arc<dyn BlockDevice>,
    /// Which inode it is.
    pub identity: Identity,
    /// Where it was found, below the source.
    pub path: PathBuf,
    /// Its size and times now.
    pub stamp: Stamp,
    /// Its names.
    pub nlink: u32,
}

/// Finds files by what the journal knows them by. An implementation accepts equal identities only.
pub trait Resolver {
    /// The file; None if it is not there any more (or another one is in its place).
    fn find(&self, record: &DeviceIdentity) -> Result<Option<Located>>;
}

/// What became of a device of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is dirty and goes home.
    Resumed,
    /// Its file is gone, by an unlink or because it never had a durable name.
    Dropped,
    /// Its file is not there, and nothing says why.
    Missing,
    /// Its file has no name any more, and nothing says why.
    Replaced,
    /// Its file was changed by somebody else; why it is thought so.
    Changed(String),
    /// The user gave it up.
    Skipped,
}

impl std::fmt::Display for Fate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fate::Resumed => f.write_str("resumed"),
            Fate::Dropped => f.write_str("dropped"),
            Fate::Missing => f.write_str("missing"),
            Fate::Replaced => f.write_str("replaced"),
            Fate::Changed(why) => write!(f, "changed behind the journal: {why}"),
            Fate::Skipped => f.write_str("given up"),
        }
    }
}

/// A device of the journal that had something live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its tag.
    pub unit: u32,
    /// Where it was last seen.
    pub path: PathBuf,
    /// Bytes of it in the journal.
    pub dirty_bytes: u64,
    /// What became of it.
    pub fate: Fate,
}

/// What recovery found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Devices that had something live.
    pub devices: Vec<Found>,
    /// Records read.
    pub records: u64,
    /// Where the log is broken: nothing is written then.
    pub corruption: Option<Corruption>,
    /// The generation of this mount.
    pub generation: u64,
}

/// How a journal is opened.
pub struct Opening<'a> {
    /// Finds the files.
    pub resolver: &'a dyn Resolver,
    /// Told before the first append; None where nothing marks the source.
    pub mark: Option<Arc<dyn OwnerMark>>,
    /// Nothing is written, to the journal neither: its data is shown.
    pub read_only: bool,
    /// Go on behind a corrupt record: the user has accepted what is lost.
    pub past_corruption: bool,
    /// Paths of devices that are given up.
    pub skip: &'a [PathBuf],
    /// So many files are opened and locked at once; what is dirty beyond that, when it goes home.
    pub claims_max: usize,
    /// Tests: rules switched off.
    pub mutants: Mutants,
    /// Tests: no threads; tasks are run one by one.
    pub by_hand: bool,
}

impl<'a> Opening<'a> {
    /// As a mount does.
    pub fn new(resolver: &'a dyn Resolver) -> Opening<'a> {
        Opening {
            resolver,
            mark: None,
            read_only: false,
            past_corruption: false,
            skip: &[],
            claims_max: usize::MAX,
            mutants: Mutants::default(),
            by_hand: false,
        }
    }
}

impl BlockStore {
    /// A store with a journal; what it holds is dirty again. Call `start` for it to go home.
    pub fn with_journal(
        config: &StoreConfig,
        recovered: Recovered,
        opening: &Opening<'_>,
    ) -> Result<(BlockStore, Report)> {
        let store = BlockStore::new(config);
        let log = Log::read(&recovered)?;
        let mut report = Report {
            records: log.records,
            corruption: recovered.corruption(),
            ..Report::default()
        };
        let broken = report.corruption.is_some() && !opening.past_corruption;
        let journal = if opening.read_only || broken {
            recovered.read_only()
        } else if opening.past_corruption {
            recovered.start_past_corruption()?
        } else {
            recovered.start()?
        };
        report.generation = journal.generation();
        let writeback = Writeback::new(
            journal,
            config,
            store.shared.tunables.clone(),
            opening.mark.clone(),
            opening.mutants,
            opening.by_hand,
        );
        writeback.found_records(log.records);
        store.next_id.store(log.last_tag + 1, Relaxed);
        let attached = store.shared.writeback.set(writeback.clone()).is_ok();
        debug_assert!(attached, "a new store has none");
        let mut devices: Vec<(DeviceId, Replayed)> = log.devices.into_iter().collect();
        devices.sort_by_key(|(id, _)| *id);
        let taken = &mut HashMap::new();
        for (id, replayed) in devices.into_iter().filter(|(_, replayed)| replayed.is_live()) {
            report.devices.push(store.take_up(&writeback, opening, id, replayed, taken)?);
        }
        Ok((store, report))
    }

    fn take_up(
        &self,
        writeback: &Writeback,
        opening: &Opening<'_>,
        id: DeviceId,
        replayed: Replayed,
        taken: &mut HashMap<Identity, DeviceId>,
    ) -> Result<Found> {
        let record = replayed.record.clone().unwrap_or_default();
        let path = PathBuf::from(OsStr::from_bytes(&record.path));
        let mut found =
            Found { unit: id.0, path, dirty_bytes: replayed.bytes(), fate: Fate::Resumed };
        if opening.skip.contains(&found.path) {
            found.fate = Fate::Skipped;
            if writeback.check_writable().is_ok() {
                // Its file may be changed by anybody from now on.
                writeback.journal.set_device(id, &record, 0)?;
                writeback.journal.note_recovered(id);
                writeback.void(id)?;
            }
            return Ok(found);
        }
        let located = opening.resolver.find(&record)?;
        found.fate = judge(&replayed, &record, located.as_ref());
        let claims = writeback.takes_writes() && taken.len() < opening.claims_max;
        if found.fate == Fate::Resumed
            && claims
            && let Some(located) = &located
        {
            found.fate = claim(&*located.device, &found.path);
        }
        let nowhere = Identity { dev: 0, ino: u64::from(id.0), generation: 0 };
        let (file, identity, stamp) = match (&found.fate, located) {
            (Fate::Dropped | Fate::Skipped, _) => {
                writeback.dropped_with_name();
                return Ok(found);
            }
            (Fate::Resumed, Some(located)) => {
                found.path = located.path;
                (located.device, located.identity, located.stamp)
            }
            (fate, located) => {
                let (why, size) = (fate.to_string(), replayed.size_over(0));
                let time = record.birth;
                let nothing = Stamp { size, mtime: time, ctime: time };
                let absent: Arc<dyn BlockDevice> = Arc::new(Absent::new(why, &found.path));
                match located {
                    Some(located) => (absent, located.identity, Stamp { size, ..located.stamp }),
                    None => (absent, nowhere, nothing),
                }
            }
        };
        let (mut file, mut identity) = (file, identity);
        if taken.insert(identity, id).is_some() {
            // Two tags of one inode: a mount never does that. The first one has the file; the data
            // of this one is kept, and goes nowhere.
            found.fate = Fate::Changed("two devices of the journal are this file".into());
            (file, identity) =
                (Arc::new(Absent::new(found.fate.to_string(), &found.path)), nowhere);
        }
        let cached = self.shared.cache.register(id);
        let device = Device::new(self.shared.clone(), cached, file, identity, stamp.size);
        device.resume(writeback, replayed, stamp.size, record)?;
        if claims {
            device.tell_file();
        }
        let mut registry = self.shared.registry.lock();
        registry.insert_closed(identity, device, stamp, found.path.clone());
        Ok(found)
    }
}

/// Whether a file is the one that the records are of, unchanged by others (J12).
fn judge(replayed: &Replayed, record: &DeviceIdentity, located: Option<&Located>) -> Fate {
    let expected = replayed.unlinked || !record.named;
    let Some(located) = located else {
        return if expected { Fate::Dropped } else { Fate::Missing };
    };
    if located.nlink == 0 {
        return if expected { Fate::Dropped } else { Fate::Replaced };
    }
    let stamp = located.stamp;
    if !replayed.explains(stamp.size) {
        return Fate::Changed(format!("its size is {} bytes", stamp.size));
    }
    if let Some(stopped) = replayed.stopped {
        if stopped != stamp {
            return Fate::Changed("it is not as the last mount left it".into());
        }
    } else if replayed.heartbeat.is_some_and(|beat| stamp.ctime.sec > beat.sec + HEARTBEAT_SLACK) {
        return Fate::Changed("it was changed after the last mount had ended".into());
    }
    Fate::Resumed
}

/// Opens a file for writing home, and locks it: its descriptor must be older than the first write to
/// hear of its errors. One that cannot be opened now is tried again with each home write.
fn claim(device: &dyn BlockDevice, path: &Path) -> Fate {
    match device.prepare(true) {
        Err(error) if error.kind == Kind::Busy => Fate::Changed(error.to_string()),
        Err(error) => {
            log::warn!("{}: {error}", path.display());
            Fate::Resumed
        }
        Ok(()) => Fate::Resumed,
    }
}
