//! A storm of writes that can be replayed: writers whose every operation follows from a seed, and
//! a model of what their files must hold when their daemon was killed under them.
//!
//! Writer W of round R owns [`FILES`] files. It does operation 0, 1, 2, ... and, after each that
//! was acknowledged, appends one byte to its log outside the mount: the log's length is the number
//! of acknowledged operations. [`check`] does the same operations on a model: all acknowledged
//! ones must be there; of the one after them each byte may be old or new.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

use crate::tools::pattern;

/// Files of a writer. The last one is written with O_APPEND, the others at offsets.
pub const FILES: usize = 3;
/// A file stays below this many bytes.
pub const MOST: u64 = 3 << 20;

/// Numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// The next number below `below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mixed = (self.0 ^ self.0 >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 32) % below.max(1)
    }
}

/// What an operation does to its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes at an offset (the end, for the append file).
    Write {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// What they are: `pattern(seed, len)`.
        seed: u64,
    },
    /// A new length.
    Truncate(u64),
    /// A hole.
    Punch(u64, u64),
    /// fsync.
    Sync,
    /// Bytes read and compared.
    Read(u64, u64),
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// Which of the writer's files.
    pub file: usize,
    /// What.
    pub kind: Kind,
}

/// The operations of one writer in one round.
#[derive(Clone, Debug)]
pub struct Script {
    random: Random,
    seed: u64,
    number: u64,
}

impl Script {
    /// Those of `writer` in `round`.
    pub fn new(seed: u64, round: u64, writer: u64) -> Script {
        let seed = seed ^ round << 20 ^ writer << 52;
        Script { random: Random::new(seed), seed, number: 0 }
    }

    /// The next one, of files that now have these lengths.
    pub fn next(&mut self, lens: &[u64]) -> Op {
        self.number += 1;
        let random = &mut self.random;
        let file = random.below(FILES as u64) as usize;
        let len = lens[file];
        let kind = match random.below(100) {
            0..74 => {
                let size = match random.below(100) {
                    0..25 => 1 + random.below(64),
                    25..80 => 4096 << random.below(3),
                    80..96 => 1 + random.below(64 << 10),
                    _ => 1 + random.below(1 << 20),
                };
                let append = file == FILES - 1;
                let free = MOST.saturating_sub(size);
                let aligned = random.below(2) == 0;
                let offset = if append { len } else { random.below(free) };
                let offset = if aligned && !append { offset & !4095 } else { offset };
                // A full append file begins again.
                if append && len + size > MOST {
                    return Op { file, kind: Kind::Truncate(0) };
                }
                Kind::Write { offset, len: size, seed: self.seed ^ self.number << 8 }
            }
            74..79 => Kind::Truncate(random.below(len + 4096)),
            79..83 => Kind::Punch(random.below(len.max(1)), 1 + random.below(64 << 10)),
            83..88 => Kind::Sync,
            _ => Kind::Read(random.below(len.max(1)), 1 + random.below(32 << 10)),
        };
        Op { file, kind }
    }
}

/// The files of a writer as they must be.
pub type Model = Vec<Vec<u8>>;

fn resize(bytes: &mut Vec<u8>, len: u64) {
    bytes.resize(len as usize, 0);
}

/// The part of `offset..offset + len` that lies in `bytes`.
fn inside(bytes: &[u8], offset: u64, len: u64) -> std::ops::Range<usize> {
    let end = bytes.len() as u64;
    (offset.min(end) as usize)..((offset + len).min(end) as usize)
}

/// Does `op` on the model.
pub fn apply(model: &mut [Vec<u8>], op: &Op) {
    let bytes = &mut model[op.file];
    match op.kind {
        Kind::Write { offset, len, seed } => {
            if (bytes.len() as u64) < offset + len {
                resize(bytes, offset + len);
            }
            let range = inside(bytes, offset, len);
            bytes[range].copy_from_slice(&pattern(seed, len as usize));
        }
        Kind::Truncate(len) => resize(bytes, len),
        Kind::Punch(offset, len) => {
            let range = inside(bytes, offset, len);
            bytes[range].fill(0);
        }
        Kind::Sync | Kind::Read(..) => {}
    }
}

fn lens(model: &[Vec<u8>]) -> Vec<u64> {
    model.iter().map(|bytes| bytes.len() as u64).collect()
}

/// The name of a file of a writer.
pub fn name(writer: u64, file: usize) -> String {
    format!("w{writer}-{file}")
}

/// The log of a writer's round.
pub fn log(directory: &Path, round: u64, writer: u64) -> PathBuf {
    directory.join(format!("log-{round}-{writer}"))
}

/// Why a writer stopped.
#[derive(Debug)]
pub enum Stop {
    /// The mount answered an error: what a killed daemon leaves.
    Error(io::Error),
    /// It read other bytes than it had written.
    Mismatch(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Error(error)
    }
}

/// A writer's process: operations on the files in `directory` until one fails.
pub fn write(directory: &Path, seed: u64, round: u64, writer: u64, log: &Path) -> Stop {
    match storm(directory, seed, round, writer, log) {
        Ok(never) => match never {},
        Err(stop) => stop,
    }
}

fn storm(
    directory: &Path,
    seed: u64,
    round: u64,
    writer: u64,
    log: &Path,
) -> Result<std::convert::Infallible, Stop> {
    let (mut files, mut model) = (Vec::new(), Model::new());
    for file in 0..FILES {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        let flags = if file == FILES - 1 { libc::O_APPEND } else { 0 };
        let mut opened = options.custom_flags(flags).open(directory.join(name(writer, file)))?;
        let mut bytes = Vec::new();
        opened.read_to_end(&mut bytes)?;
        files.push(opened);
        model.push(bytes);
    }
    let mut acks = OpenOptions::new().create_new(true).append(true).open(log)?;
    let mut script = Script::new(seed, round, writer);
    loop {
        let op = script.next(&lens(&model));
        perform(&files[op.file], &model[op.file], &op)?;
        apply(&mut model, &op);
        acks.write_all(b".")?;
    }
}

fn perform(file: &File, model: &[u8], op: &Op) -> Result<(), Stop> {
    match op.kind {
        Kind::Write { offset, len, seed } => {
            file.write_all_at(&pattern(seed, len as usize), offset)?;
        }
        Kind::Truncate(len) => file.set_len(len)?,
        Kind::Punch(offset, len) => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, offset, len).map_err(io::Error::from)?;
        }
        Kind::Sync => file.sync_data()?,
        Kind::Read(offset, len) => {
            let range = inside(model, offset, len);
            let mut bytes = vec![0; range.len()];
            file.read_exact_at(&mut bytes, offset)?;
            if let Some(at) = difference(&bytes, &model[range]) {
                return Err(Stop::Mismatch(format!("{op:?}: byte {}", offset + at as u64)));
            }
        }
    }
    Ok(())
}

fn difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    let pairs = one.iter().zip(other);
    Some(pairs.take_while(|(a, b)| a == b).count())
}

/// Looks at the files of a writer after a crash. The model becomes what is there; the answer is
/// how many operations were acknowledged, or what is wrong.
pub fn check(
    directory: &Path,
    seed: u64,
    round: u64,
    writer: u64,
    acks: u64,
    model: &mut Model,
) -> Result<(), String> {
    let mut script = Script::new(seed, round, writer);
    for _ in 0..acks {
        let op = script.next(&lens(model));
        apply(model, &op);
    }
    let unacked = script.next(&lens(model));
    let mut after = model.clone();
    apply(&mut after, &unacked);
    for file in 0..FILES {
        let name = name(writer, file);
        let there = std::fs::read(directory.join(&name)).map_err(|e| format!("{name}: {e}"))?;
        let wrong = match file == unacked.file {
            true => between(&there, &model[file], &after[file], &unacked.kind),
            false => same(&there, &model[file]),
        };
        if let Some(wrong) = wrong {
            return Err(format!("{name} after {acks} operations, then {unacked:?}: {wrong}"));
        }
        model[file] = there;
    }
    Ok(())
}

/// What differs.
pub fn same(there: &[u8], wanted: &[u8]) -> Option<String> {
    if there.len() != wanted.len() {
        return Some(format!("{} bytes, not {}", there.len(), wanted.len()));
    }
    Some(format!("byte {} is wrong", difference(there, wanted)?))
}

/// What is neither as before the operation nor as after it: a request of the kernel's may be there
/// without the next one, so bytes and length of a write may lie between the two.
fn between(there: &[u8], before: &[u8], after: &[u8], kind: &Kind) -> Option<String> {
    let whole = same(there, before).is_none() || same(there, after).is_none();
    if whole || !matches!(kind, Kind::Write { .. } | Kind::Punch(..)) {
        return if whole { None } else { Some("neither as before nor as after it".into()) };
    }
    if there.len() < before.len() || there.len() > after.len() {
        return Some(format!("{} bytes, not {}..={}", there.len(), before.len(), after.len()));
    }
    let old = |at: usize| before.get(at).copied().unwrap_or(0);
    let odd = (0..there.len()).find(|at| there[*at] != old(*at) && there[*at] != after[*at]);
    odd.map(|at| format!("byte {at} is neither old nor new"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the operations without a mount, then looks at the files as after a crash.
    fn rehearse(acks: u64, spoil: impl FnOnce(&Path)) -> Result<(), String> {
        let directory = tempfile::tempdir().unwrap();
        let mut files = Vec::new();
        for file in 0..FILES {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            files.push(options.open(directory.path().join(name(2, file))).unwrap());
        }
        let mut script = Script::new(5, 1, 2);
        let mut model = vec![Vec::new(); FILES];
        for _ in 0..acks {
            let op = script.next(&lens(&model));
            perform(&files[op.file], &model[op.file], &op).unwrap();
            apply(&mut model, &op);
        }
        spoil(directory.path());
        check(directory.path(), 5, 1, 2, acks, &mut vec![Vec::new(); FILES])
    }

    #[test]
    fn what_was_acknowledged_is_found_and_what_is_lost_is_missed() {
        rehearse(400, |_| ()).unwrap();
        let one_byte = |directory: &Path| {
            let path = directory.join(name(2, 0));
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.iter().rposition(|byte| *byte != 0).unwrap();
            bytes[at] ^= 0x55;
            std::fs::write(&path, bytes).unwrap();
        };
        rehearse(400, one_byte).unwrap_err();
        let short = |directory: &Path| {
            let file = OpenOptions::new().write(true).open(directory.join(name(2, 1))).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        };
        rehearse(400, short).unwrap_err();
    }

    #[test]
    fn an_unacknowledged_write_may_be_there_in_part() {
        let kind = Kind::Write { offset: 2, len: 4, seed: 1 };
        let (before, after) = (vec![1, 2, 3], vec![1, 2, 9, 9, 9, 9]);
        for there in [&[1, 2, 3][..], &[1, 2, 9, 9], &[1, 2, 9, 0, 9, 9], &[1, 2, 9, 9, 9, 9]] {
            assert_eq!(between(there, &before, &after, &kind), None, "{there:?}");
        }
        for there in [&[1, 2][..], &[1, 0, 3], &[1, 2, 8, 9], &[1, 2, 9, 9, 9, 9, 0]] {
            assert!(between(there, &before, &after, &kind).is_some(), "{there:?}");
        }
        assert!(between(&[1, 2], &before, &[1], &Kind::Truncate(1)).is_some());
    }
}
