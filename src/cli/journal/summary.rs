//! What a journal holds, in numbers: for `check` and `journal dump`. No state.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::target::Target;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::run::state::file;
use crate::control::format::table;
use crate::control::proto::{Name, SCHEMA};
use crate::error::Error;
use crate::journal::{Record, RecordKind};
use crate::units::{Extent, format_size};

/// Extents kept before they are merged.
const BATCH: usize = 1 << 16;

/// The answer of `check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// The files of SOURCE are current.
    Clean,
    /// They are not, without the journal.
    Dirty,
    /// The journal cannot be used as it is.
    Corrupt,
}

/// One device of a journal.
#[derive(Debug, Serialize)]
pub struct DeviceSummary {
    /// Its tag.
    pub unit: u32,
    /// Where it was, below SOURCE.
    pub path: Name,
    /// Its inode number.
    pub inode: u64,
    /// Its records.
    pub records: u64,
    /// Bytes that replay would write or zero, each counted once. Some may be home already: the
    /// journal learns that when its segments are freed.
    pub bytes: u64,
}

/// A journal in numbers.
#[derive(Debug, Serialize)]
pub struct Summary {
    schema: u32,
    /// The whole verdict.
    pub state: Condition,
    /// The journal's file or partition.
    journal: Option<Name>,
    source: Option<Name>,
    uuid: String,
    generation: u64,
    journal_bytes: u64,
    segment_bytes: u64,
    segments: u32,
    used_bytes: u64,
    used_segments: u32,
    record_count: u64,
    /// Records of writes that are not whole.
    dropped: u64,
    durable_seq: u64,
    last_seq: u64,
    /// Those with records, in the order of their tags.
    pub devices: Vec<DeviceSummary>,
    corruption: Option<CorruptionSummary>,
    /// "none", "this journal", "another journal", "unknown" (no source).
    owner: &'static str,
    /// Why a mount would refuse.
    refused: Option<String>,
}

#[derive(Debug, Serialize)]
struct CorruptionSummary {
    seq: u64,
    at: u64,
    durable_seq: u64,
}

#[derive(Default)]
struct Tally {
    path: Vec<u8>,
    inode: u64,
    records: u64,
    extents: Vec<(u64, u64)>,
}

impl Tally {
    fn add(&mut self, live: &[Extent]) {
        self.extents.extend(live.iter().map(|extent| (extent.offset, extent.end())));
        if self.extents.len() >= BATCH {
            self.merge();
        }
    }

    fn merge(&mut self) {
        self.extents.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for &(start, end) in &self.extents {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        self.extents = merged;
    }

    fn summary(mut self, unit: u32) -> DeviceSummary {
        self.merge();
        let bytes = self.extents.iter().map(|(start, end)| end - start).sum();
        let path = Name::from(bytes_as_path(&self.path));
        DeviceSummary { unit, path, inode: self.inode, records: self.records, bytes }
    }
}

fn bytes_as_path(bytes: &[u8]) -> &std::path::Path {
    use std::os::unix::ffi::OsStrExt;
    std::path::Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// One record for `dump --records`.
pub struct Line<'a, 'b>(&'a Record<'b>);

impl Line<'_, '_> {
    /// As JSON, or "seq kind unit offset+length size".
    pub fn line(&self, json: bool) -> Outcome<String> {
        let header = &self.0.header;
        let kind = match header.kind {
            RecordKind::Opaque(code) => format!("opaque{code}"),
            kind => format!("{kind:?}").to_lowercase(),
        };
        let live: u64 = self.0.live.iter().map(|extent| extent.len).sum();
        if !json {
            return Ok(format!(
                "{:>10} {kind:<10} unit {} {}+{} size {} generation {}",
                header.seq,
                header.device,
                header.offset,
                header.length,
                header.size_after,
                header.generation
            ));
        }
        let value = serde_json::json!({
            "seq": header.seq,
            "generation": header.generation,
            "durable_seq": header.durable_seq,
            "kind": kind,
            "unit": header.device.0,
            "offset": header.offset,
            "length": header.length,
            "size_after": header.size_after,
            "live_bytes": live,
        });
        Ok(value.to_string())
    }
}

impl Summary {
    /// Reads every record; `each` sees them in order.
    pub fn of(
        target: &Target,
        each: &mut dyn FnMut(&Line<'_, '_>) -> Outcome<()>,
    ) -> Outcome<Summary> {
        let mut summary = Summary::without_records(target);
        let Some(recovered) = target.recovered() else { return Ok(summary) };
        let mut tallies: BTreeMap<u32, Tally> = BTreeMap::new();
        let mut failed = None;
        let visited = recovered.visit(&mut |record| {
            summary.record_count += 1;
            let header = &record.header;
            if let Some(identity) = record.identity() {
                let tally = tallies.entry(header.device.0).or_default();
                (tally.path, tally.inode) = (identity.path, identity.inode);
            } else if header.kind.of_device() {
                let tally = tallies.entry(header.device.0).or_default();
                tally.records += 1;
                if matches!(header.kind, RecordKind::Data | RecordKind::Zero) {
                    tally.add(&record.live);
                }
            }
            each(&Line(record)).map_err(|failure| {
                failed = Some(failure);
                Error::new(crate::error::Kind::Io, "write", "")
            })
        });
        if let Some(failure) = failed {
            return Err(failure);
        }
        visited.map_err(|error| Failure::of(&error, &target.place))?;
        let devices = tallies.into_iter().filter(|(_, tally)| tally.records > 0);
        summary.devices = devices.map(|(unit, tally)| tally.summary(unit)).collect();
        Ok(summary)
    }

    fn without_records(target: &Target) -> Summary {
        let recovered = target.recovered();
        let usage = recovered.map(|recovered| recovered.usage());
        let superblock = recovered.map(|recovered| *recovered.superblock());
        let corruption = recovered.and_then(|recovered| recovered.corruption());
        let full = recovered.is_some_and(|recovered| !recovered.is_empty());
        let unowned = full && target.source.is_some() && !target.owner_fits();
        let state = match full {
            _ if target.refusal().is_some() || corruption.is_some() || unowned => {
                Condition::Corrupt
            }
            true => Condition::Dirty,
            false => Condition::Clean,
        };
        let owner = match &target.owner {
            None if target.source.is_none() => "unknown",
            None => "none",
            Some(_) if target.owner_fits() => "this journal",
            Some(_) => "another journal",
        };
        let name = |path: &std::path::Path| Name::from(path);
        Summary {
            schema: SCHEMA,
            state,
            journal: target.home().map(|home| name(&home.journal_path())),
            source: target.source.as_ref().map(|source| name(&source.path)),
            uuid: superblock.map(|superblock| file::hex(&superblock.uuid)).unwrap_or_default(),
            generation: superblock.map_or(0, |superblock| superblock.generation),
            journal_bytes: usage.map_or(0, |usage| usage.capacity_bytes),
            segment_bytes: superblock.map_or(0, |superblock| superblock.segment_bytes),
            segments: superblock.map_or(0, |superblock| superblock.segment_count),
            used_bytes: usage.map_or(0, |usage| usage.used_bytes),
            used_segments: usage.map_or(0, |usage| usage.segments),
            record_count: 0,
            dropped: recovered.map_or(0, |recovered| recovered.dropped()),
            durable_seq: superblock.map_or(0, |superblock| superblock.durable_seq),
            last_seq: recovered.map_or(0, |recovered| recovered.last_seq()),
            devices: Vec::new(),
            corruption: corruption.map(|corruption| CorruptionSummary {
                seq: corruption.seq,
                at: corruption.at,
                durable_seq: corruption.durable_seq,
            }),
            owner,
            refused: target.refusal().map(|r| format!("{}: {}: {}", r.what, r.place, r.hint)),
        }
    }

    /// Bytes of all devices.
    pub fn bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.bytes).sum()
    }

    /// The devices as a table.
    pub fn device_table(&self) -> String {
        let rows = self.devices.iter().map(|device| {
            let numbers = [device.unit.to_string(), format_size(device.bytes)];
            let path = device.path.to_string();
            let path = if path.is_empty() { format!("(inode {})", device.inode) } else { path };
            numbers.into_iter().chain([device.records.to_string(), path]).collect()
        });
        table(&["unit", "bytes", "records", "device"], rows.collect(), 0..3)
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if let (Some(journal), false) = (&self.journal, self.uuid.is_empty()) {
            let _ = writeln!(
                text,
                "journal {journal}: {} in {} segments of {}, uuid {}, generation {}",
                format_size(self.journal_bytes),
                self.segments,
                format_size(self.segment_bytes),
                self.uuid,
                self.generation
            );
            let _ = writeln!(
                text,
                "{} records in {} segments ({} used), {} dropped; last {}, durable {} at least",
                self.record_count,
                self.used_segments,
                format_size(self.used_bytes),
                self.dropped,
                self.last_seq,
                self.durable_seq
            );
        }
        if !self.devices.is_empty() {
            text.push_str(&self.device_table());
        }
        let _ = writeln!(text, "owner mark: {}", self.owner);
        if let Some(bad) = &self.corruption {
            let _ = writeln!(
                text,
                "corrupt: record {} at byte {} cannot be read, but {} was durable; journal replay \
                 writes home what lies before it",
                bad.seq, bad.at, bad.durable_seq
            );
        }
        if let Some(refused) = &self.refused {
            let _ = writeln!(text, "{refused}");
        } else if self.state == Condition::Corrupt && self.corruption.is_none() {
            let _ = writeln!(
                text,
                "SOURCE does not ask for these records, a mount refuses them: journal abandon \
                 moves them away"
            );
        }
        let _ = match self.state {
            Condition::Clean => writeln!(text, "clean"),
            Condition::Corrupt => writeln!(text, "corrupt"),
            Condition::Dirty => writeln!(
                text,
                "dirty: {} of {} images are in the journal (some of it may be home already); the \
                 next mount writes it home",
                format_size(self.bytes()),
                self.devices.len()
            ),
        };
        text
    }
}
