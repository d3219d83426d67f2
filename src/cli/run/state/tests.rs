//! A source, its journal and its mark through every state of STORE 6.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use crate::cli::failure::Failure;
use crate::cli::meaning::{self, Machine};
use crate::cli::words::Words;
use crate::journal::{Change, DeviceIdentity, Entry, Purpose};
use crate::units::{DeviceId, Timestamp};

/// A source, a mountpoint and a place for state.
pub(crate) struct Bench {
    scratch: TempDir,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::over(tempfile::tempdir().unwrap())
    }

    fn over(scratch: TempDir) -> Bench {
        for name in ["src", "mnt"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        Bench { scratch }
    }

    pub(crate) fn at(&self, below: &str) -> PathBuf {
        self.scratch.path().canonicalize().unwrap().join(below)
    }

    fn open(&self, list: &str) -> Outcome<StateOutcome> {
        self.open_as(list, None)
    }

    /// `default`: the mode of a mount that does not say one.
    fn open_as(&self, list: &str, default: Option<CacheMode>) -> Outcome<StateOutcome> {
        let mut words = Words::default();
        words.add_list(list.as_ref())?;
        let machine = Machine { root: true, memory: 8 << 30 };
        let (source, mountpoint) = (self.at("src"), self.at("mnt"));
        let mut config = meaning::config(&source, &mountpoint, &words, false, false, machine)?;
        if let Some(mode) = default {
            config.store.cache_mode = mode;
        }
        open(&config, &Source::open(&source)?, &mountpoint)
    }

    pub(crate) fn journal(&self, list: &str) -> Box<State> {
        match self.open(list).unwrap() {
            StateOutcome::Journal(state) => state,
            StateOutcome::None { why } => panic!("{list}: {why:?}"),
        }
    }

    fn refused(&self, list: &str) -> String {
        let failure: Failure = self.open(list).unwrap_err();
        failure.line.replace(self.at("").to_str().unwrap(), "T/")
    }

    fn copy(&self, from: &str, to: &str) {
        fs::copy(self.at(from), self.at(to)).unwrap();
    }
}

pub(crate) const WB: &str = "cache_mode=writeback,journal_size=8M";

fn typed(more: &str) -> String {
    format!("{WB},{more}")
}

/// What a mount does with a state: starts, marks, writes one record; then it is killed.
pub(crate) fn write_and_die(state: State) {
    let journal = state.recovered.start().unwrap();
    state.mark.dirty().unwrap();
    let identity = DeviceIdentity { path: b"a.img".to_vec(), ..DeviceIdentity::default() };
    journal.set_device(DeviceId(1), &identity, 0).unwrap();
    let change = Change::Data(&[7; 4096]);
    let mtime = Timestamp::default();
    let entry = Entry { device: DeviceId(1), offset: 0, change, size_after: 4096, mtime };
    let mut room = journal.reserve(Purpose::Frontend, journal.charge(&[change])).unwrap();
    journal.append(&mut room, &[entry]).unwrap();
}

#[test]
fn nothing_is_made_where_no_journal_is_wanted() {
    let bench = Bench::new();
    for list in ["cache_mode=writethrough", "cache_mode=none", "cache_mode=writeback,ro"] {
        let StateOutcome::None { why: None } = bench.open(list).unwrap() else { panic!("{list}") };
    }
    assert!(fs::read_dir(bench.at("src")).unwrap().next().is_none());
}

#[test]
fn a_clean_journal_is_kept_and_made_anew_in_another_size() {
    let bench = Bench::new();
    let state = bench.journal(WB);
    assert_eq!(state.dir, bench.at("src/.bcachefs-fuse"));
    assert_eq!(Path::new(&state.place), bench.at("src/.bcachefs-fuse/journal"));
    assert!(!state.dirty && !state.read_only && state.same_disk);
    let first = state.recovered.superblock().uuid;
    assert!(bench.refused(WB).starts_with("state is in use: T/src/.bcachefs-fuse: process "));
    drop(state);
    assert_eq!(bench.journal(WB).recovered.superblock().uuid, first);
    let state = bench.journal("cache_mode=writeback,journal_size=16M");
    assert_ne!(state.recovered.superblock().uuid, first);
    assert_eq!(fs::metadata(&state.place).unwrap().len(), 16 << 20);
}

#[test]
fn a_dirty_source_is_resumed_whatever_was_typed() {
    let bench = Bench::new();
    write_and_die(*bench.journal(&typed(&format!("state={}", bench.at("st").display()))));
    for list in ["", "cache_mode=none", "journal_size=64M", "ro", &typed("")] {
        let state = bench.journal(list);
        assert!(state.dirty && !state.recovered.is_empty(), "{list}");
        assert_eq!((state.dir.clone(), state.read_only), (bench.at("st"), list == "ro"));
    }
    // Moved while it was unmounted.
    fs::rename(bench.at("st"), bench.at("moved")).unwrap();
    let gone = bench.refused("");
    assert_eq!(
        gone,
        "SOURCE is dirty and its journal is not here: T/src: it was in T/st: name its place now \
         (mount --state DIR, check DIR, journal replay DIR), or give its data up: bcachefs-fuse \
         journal abandon T/src"
    );
    let moved = format!("state={}", bench.at("moved").display());
    let state = bench.journal(&moved);
    // Killed between the last checkpoint and the removal of the mark.
    drop(state);
    let other = bench.at("src/.bcachefs-fuse/owner");
    assert!(other.exists());
}

#[test]
fn a_mark_over_an_empty_journal_is_a_clean_source() {
    let bench = Bench::new();
    let state = *bench.journal(WB);
    drop(state.recovered.start().unwrap());
    state.mark.dirty().unwrap();
    drop(state.lock);
    let owner = bench.at("src/.bcachefs-fuse/owner");
    assert!(owner.exists() && bench.journal("ro").dirty);
    assert!(matches!(
        bench.open("cache_mode=writethrough").unwrap(),
        StateOutcome::None { why: None }
    ));
    assert!(!owner.exists());
}

#[test]
fn another_journal_or_an_older_copy_is_refused() {
    let bench = Bench::new();
    let here = "src/.bcachefs-fuse/journal";
    drop(bench.journal(WB));
    bench.copy(here, "generation-0");
    write_and_die(*bench.journal(WB));
    bench.copy(here, "generation-1");
    bench.copy("generation-0", here);
    let line = bench.refused("");
    let what = "an older copy of the journal (generation 0, not 1): T/src/.bcachefs-fuse/journal: ";
    assert!(line.starts_with(what), "{line}");
    fs::remove_file(bench.at(here)).unwrap();
    assert!(bench.refused(WB).starts_with("SOURCE is dirty and its journal is not here: T/src: "));
    let other = Bench::new();
    drop(other.journal(WB));
    fs::copy(other.at(here), bench.at(here)).unwrap();
    assert!(bench.refused("").starts_with("SOURCE is dirty and its journal is not here: T/src: "));
    bench.copy("generation-1", here);
    assert!(bench.journal("").dirty);
}

#[test]
fn records_without_a_mark_are_never_made_anew() {
    let bench = Bench::new();
    write_and_die(*bench.journal(WB));
    fs::remove_file(bench.at("src/.bcachefs-fuse/owner")).unwrap();
    let line = bench.refused(WB);
    let expected = "a journal with records that SOURCE does not name: \
                    T/src/.bcachefs-fuse/journal: its owner mark is gone; move them away: \
                    bcachefs-fuse journal abandon T/src/.bcachefs-fuse";
    assert_eq!(line, expected);
    fs::rename(bench.at("src/.bcachefs-fuse"), bench.at("moved")).unwrap();
    let line = bench.refused(&format!("{WB},state={}", bench.at("moved").display()));
    let expected = "a journal with records that SOURCE does not name: T/moved/journal: move it \
                    back to where its owner mark belongs, T/src/.bcachefs-fuse, or: bcachefs-fuse \
                    journal abandon T/moved";
    assert_eq!(line, expected);
    fs::rename(bench.at("moved"), bench.at("src/.bcachefs-fuse")).unwrap();
    fs::write(bench.at("src/.bcachefs-fuse/journal"), vec![0; 8 << 20]).unwrap();
    let line = bench.refused(WB);
    assert!(
        line.starts_with("not a journal (no superblock): T/src/.bcachefs-fuse/journal"),
        "{line}"
    );
}

#[test]
fn a_default_that_cannot_be_is_said_and_not_refused() {
    let default = Some(CacheMode::Writeback);
    let bench = Bench::new();
    let outcome = bench.open_as("journal_size=8M", default).unwrap();
    assert!(matches!(outcome, StateOutcome::Journal(_)));
    drop(outcome);
    let StateOutcome::None { why: Some(why) } =
        bench.open_as("journal_size=900T", default).unwrap()
    else {
        panic!("a journal of 900T");
    };
    assert!(why.starts_with("no space for a journal of 900T: "), "{why}");
    // The one that was there is still there.
    let journal = bench.at("src/.bcachefs-fuse/journal");
    assert_eq!(fs::metadata(journal).unwrap().len(), 8 << 20);
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let bench = Bench::over(memory);
    let StateOutcome::None { why: Some(why) } = bench.open_as("", default).unwrap() else {
        panic!("a journal in memory");
    };
    let place = bench.at("src/.bcachefs-fuse");
    assert_eq!(why, format!("no writeback with the state on tmpfs: {}", place.display()));
    assert!(!place.exists());
    let list = format!("state={}", bench.at("mnt").display());
    assert!(bench.open_as(&list, default).unwrap_err().line.starts_with("state on tmpfs: "));
    assert!(bench.refused(WB).starts_with("no writeback with the state on tmpfs: "));
}

#[test]
fn the_place_of_the_state_is_judged() {
    let bench = Bench::new();
    let state = |below: &str| typed(&format!("state={}", bench.at(below).display()));
    let line = bench.refused(&state("mnt/st"));
    assert!(line.starts_with("state lies below MOUNTPOINT: T/mnt/st: "), "{line}");
    // The default place may be typed out.
    drop(bench.journal(&state("src/.bcachefs-fuse")));
    fs::write(bench.at("src/.bcachefs-fuse/owner"), "{}").unwrap();
    assert!(
        bench.refused("").starts_with("an owner mark without sense: T/src/.bcachefs-fuse/owner: ")
    );
}
