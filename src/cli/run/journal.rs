//! The journal's part in a mount's life (layer 9): taken up before the mount, written home after.
//!
//! States: opened (recovery has read it; nothing of it is written yet) -> mounted -> flushing (the
//! mount is gone, its locks are held) -> left (clean, or with what could not or should not be
//! written). A second signal, or a new mount that asks, ends the flushing: the rest stays in the
//! journal, and the next mount resumes it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use sd_notify::NotifyState;

use super::source::Source;
use super::state::{self, StateOutcome};
use super::{notify, unexpected, upper};
use crate::cli::failure::{Failure, Outcome};
use crate::clock;
use crate::config::{CacheMode, Config};
use crate::fs::{Fs, JournalParts};
use crate::fuse::session::Serving;
use crate::stats::{DeviceSnapshot, FlushProgress};
use crate::store::recovery::{Fate, Report};
use crate::units::format_size;

/// Between two words to systemd.
const STATUS_MS: u64 = 1000;

/// What systemd is to wait longer each time, in microseconds.
const EXTEND_US: u32 = 30_000_000;

/// What a mount says of its journal, and what it holds as long as it uses it.
#[derive(Debug, Default)]
pub struct Held {
    /// For the mount's one line.
    pub words: String,
    /// Those of SOURCE, of an overlay's layers, and of the state.
    _locks: Vec<OwnedFd>,
}

/// Opens the filesystem, with its journal if it has one.
pub fn open_fs(
    config: &mut Config,
    source: Source,
    layers: Option<upper::Layers>,
) -> Outcome<(Arc<Fs>, Held)> {
    let owner = layers.as_ref().map_or(&source, |layers| &layers.upper);
    let place = owner.path.clone();
    let fails = |error: crate::error::Error| Failure::of(&error, &place);
    let outcome = state::open(config, owner, &config.mount.mountpoint)?;
    let (tree, mut locks) = match layers {
        Some(layers) => upper::tree(source, layers, config)?,
        None => {
            let tree = crate::fs::host_tree(source.root, config).map_err(fails)?;
            (tree, vec![source.lock])
        }
    };
    match outcome {
        StateOutcome::None { why } => {
            if config.store.cache_mode == CacheMode::Writeback {
                config.store.cache_mode = CacheMode::Writethrough;
            }
            if let Some(why) = &why {
                log::warn!("writethrough: {why}");
            }
            let words = why.map(|why| format!(" ({why})")).unwrap_or_default();
            let fs = Fs::without_journal(tree, config);
            Ok((fs, Held { words, _locks: locks }))
        }
        StateOutcome::Journal(state) => {
            let read_only = state.read_only;
            // For `set`: where it is, also if nobody typed it.
            config.daemon.state.get_or_insert(state.dir);
            let parts = JournalParts { recovered: state.recovered, mark: state.mark, read_only };
            let (fs, report) = Fs::with_journal(tree, config, parts).map_err(fails)?;
            config.mount.read_only |= read_only || report.corruption.is_some();
            let bytes = fs.store().snapshot(None).writeback.map_or(0, |stat| stat.journal_bytes);
            let own = if state.same_disk { ", on the images' own filesystem" } else { "" };
            let mut words = format!(", journal {} of {}{own}", state.place, format_size(bytes));
            words += &tell_report(&report, &place.display().to_string());
            locks.push(state.lock);
            Ok((fs, Held { words, _locks: locks }))
        }
    }
}

/// What recovery found, in the log; the short form of it.
fn tell_report(report: &Report, place: &str) -> String {
    let mut words = String::new();
    let of = |wanted: fn(&Fate) -> bool| report.devices.iter().filter(move |d| wanted(&d.fate));
    let resumed = of(|fate| *fate == Fate::Resumed);
    let (count, bytes) = resumed.fold((0, 0), |(n, b), device| (n + 1, b + device.dirty_bytes));
    if count > 0 {
        words += &format!("; resumes {} of {count} images", format_size(bytes));
    }
    let refused = |fate: &Fate| matches!(fate, Fate::Missing | Fate::Replaced | Fate::Changed(_));
    for device in of(refused) {
        let why = device.fate.to_string();
        let (path, bytes) = (device.path.display(), format_size(device.dirty_bytes));
        words += &format!("; refused: {path}: {why}");
        log::error!(
            "{path}: {why}: {bytes} of it stay in the journal; put the file itself back (a copy is \
             another one), or give them up: bcachefs-fuse journal replay --skip {path} {place}"
        );
    }
    if let Some(corruption) = report.corruption {
        words += &format!("; the journal is corrupt at {}", corruption.at);
        log::error!(
            "the journal is corrupt at byte {} (record {}): read-only; accept the loss of what \
             follows: bcachefs-fuse journal replay {place}",
            corruption.at,
            corruption.seq
        );
    }
    words
}

/// After the mount: writes home what is dirty, unless it is to be left. What is left, in words.
pub fn flush_rest(fs: &Fs, serving: &Serving) -> Option<String> {
    let failed = fs.store().snapshot(None).writeback.and_then(|stat| stat.failed);
    if !fs.store().is_dirty() || fs.leaves_rest() || failed.is_some() {
        return left(fs, &failed.unwrap_or_default());
    }
    notify(&[NotifyState::Stopping, NotifyState::Status("flushing")]);
    let mut told = 0;
    let mut why = String::new();
    let end = fs.flush(None, &mut |progress| {
        let now = clock::now_ms();
        if now.saturating_sub(told) >= STATUS_MS || told == 0 {
            told = now;
            tell(progress);
        }
        let stop = serving.asked_to_stop();
        if stop {
            why = "told to stop".to_owned();
        }
        !stop
    });
    match end {
        Ok(end) => {
            for (path, reason) in &end.stuck {
                log::error!("{path}: not written home: {reason}");
            }
        }
        Err(error) => why = error.to_string(),
    }
    left(fs, &why)
}

fn tell(progress: &FlushProgress) {
    let line = format!(
        "flushing: {} to go, {} written home",
        format_size(progress.left_bytes),
        format_size(progress.done_bytes)
    );
    notify(&[NotifyState::Status(&line), NotifyState::ExtendTimeoutUsec(EXTEND_US)]);
    log::debug!("{line}");
}

fn left(fs: &Fs, why: &str) -> Option<String> {
    let snapshot = fs.store().snapshot(None);
    let stat = snapshot.writeback?;
    if stat.dirty_devices == 0 {
        return None;
    }
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    let bytes = format_size(stat.dirty_bytes);
    let images = stat.dirty_devices;
    let mut words = format!("{bytes} of {images} images are left in the journal{why}");
    let failed = |device: &&DeviceSnapshot| {
        device.writeback.as_ref().is_some_and(|device| device.state == "failed")
    };
    let refused: Vec<&str> =
        snapshot.devices.iter().filter(failed).map(|device| device.path.as_str()).collect();
    if stat.failed.is_some() {
        return Some(words);
    }
    if !refused.is_empty() {
        words += &format!("; refused: {}", refused.join(", "));
    }
    if (refused.len() as u64) < images {
        words += "; the next mount resumes";
    }
    Some(words)
}

/// Ends the filesystem; what is dirty stays in the journal.
pub fn stop(fs: &Fs, place: &Path) -> Outcome<()> {
    fs.stop().map_err(|error| {
        log::error!("{}: {error}", place.display());
        unexpected(&error)
    })
}
