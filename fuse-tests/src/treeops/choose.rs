//! Picking the next operation: mostly something that works on what is there, sometimes something
//! that must be refused, and often something about the path that was just removed or opened.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FileType, RenameFlags, XattrFlags};

use super::{HELD, Op, allocate_mode};
use crate::storm::Random;
use crate::treegen::{self, Can, pick};
use crate::treestate::Octal;
use crate::users::{ALICE, BOB};

/// A file stays below this many bytes.
const MOST: u64 = 512 << 10;
/// A tree stays about below this many entries.
const ENTRIES: usize = 120;

/// The stream of operations of a seed.
#[derive(Debug)]
pub struct Chooser {
    random: Random,
    can: Can,
    /// A path that was removed or renamed: it is made again soon.
    gone: Option<PathBuf>,
    /// A path that was opened: it is renamed or unlinked soon.
    opened: Option<PathBuf>,
}

/// What is there: paths and what they name.
pub type Seen = [(PathBuf, FileType)];

impl Chooser {
    /// Those of `seed`.
    pub fn new(seed: u64, can: &Can) -> Chooser {
        let random = Random::new(seed ^ 0x0b5);
        Chooser { random, can: can.clone(), gone: None, opened: None }
    }

    /// A number below `below`, for decisions beside the operations.
    pub fn below(&mut self, below: u64) -> u64 {
        self.random.below(below)
    }

    /// A path of one of these kinds; now and then any other, or one that is not there.
    fn some(&mut self, seen: &Seen, wanted: &[FileType]) -> PathBuf {
        let random = &mut self.random;
        if random.below(25) == 0 {
            return self.fresh(seen);
        }
        let all: Vec<_> = match random.below(20) {
            0 => seen.iter().collect(),
            _ => seen.iter().filter(|(_, kind)| wanted.contains(kind)).collect(),
        };
        if all.is_empty() { self.fresh(seen) } else { pick(random, &all).0.clone() }
    }

    fn file(&mut self, seen: &Seen) -> PathBuf {
        // Through a link to a file, too.
        let links = self.random.below(15) == 0;
        let kind = if links { FileType::Symlink } else { FileType::RegularFile };
        self.some(seen, &[kind])
    }

    fn directory(&mut self, seen: &Seen) -> PathBuf {
        self.some(seen, &[FileType::Directory])
    }

    fn any(&mut self, seen: &Seen) -> PathBuf {
        if seen.is_empty() || self.random.below(20) == 0 {
            return PathBuf::new();
        }
        pick(&mut self.random, seen).0.clone()
    }

    /// A path for a new name (it may be taken): in the root, in some directory, rarely below
    /// something that is no directory.
    fn fresh(&mut self, seen: &Seen) -> PathBuf {
        let random = &mut self.random;
        if random.below(3) == 0
            && let Some(gone) = self.gone.take()
        {
            return gone;
        }
        let wanted = match random.below(40) {
            0 => FileType::RegularFile,
            1 | 2 => FileType::Symlink,
            _ => FileType::Directory,
        };
        let all: Vec<_> = seen.iter().filter(|(_, kind)| *kind == wanted).collect();
        let above = match random.below(4) {
            0 => Path::new(""),
            _ if all.is_empty() => Path::new(""),
            _ => &pick(random, &all).0,
        };
        let long = random.below(100) == 0;
        let name =
            if long { OsString::from("x".repeat(256)) } else { treegen::name(random, &self.can) };
        above.join(name)
    }

    fn len(&mut self) -> usize {
        let random = &mut self.random;
        let len = match random.below(4) {
            0 => 1 + random.below(64),
            1 => *pick(random, &[1, 4095, 4096, 4097, 8192, 65536]),
            _ => 1 + random.below(64 << 10),
        };
        len as usize
    }

    fn offset(&mut self) -> u64 {
        let random = &mut self.random;
        match random.below(5) {
            0 => 0,
            1 => random.below(64) * 4096,
            2 => random.below(8192),
            3 => random.below(110 << 10),
            _ => random.below(MOST - (64 << 10)),
        }
    }

    fn seed(&mut self) -> u64 {
        self.random.below(1 << 32)
    }

    /// The next operation on a tree that holds what was `seen`, with these descriptors held.
    pub fn next(&mut self, seen: &Seen, held: [bool; HELD]) -> Op {
        if let Some(path) = self.opened.take()
            && self.random.below(2) == 0
        {
            return self.under_the_feet(path, seen);
        }
        let full = seen.len() > ENTRIES && self.random.below(2) == 0;
        let bare = seen.len() < 8 && self.random.below(2) == 0;
        let op = match self.random.below(100) {
            _ if full => self.remove(seen),
            _ if bare => self.make(seen),
            0..30 => self.bytes(seen),
            30..42 => self.held(seen, held),
            42..60 => self.make(seen),
            60..70 => self.rename(seen),
            70..78 => self.remove(seen),
            _ => self.attributes(seen),
        };
        match &op {
            Op::Unlink { path } | Op::Rmdir { path } | Op::RemoveTree { path } => {
                self.gone = Some(path.clone());
            }
            Op::Rename { path, .. } => self.gone = Some(path.clone()),
            Op::Hold { path, .. } => self.opened = Some(path.clone()),
            _ => {}
        }
        op
    }

    /// What makes a held descriptor interesting.
    fn under_the_feet(&mut self, path: PathBuf, seen: &Seen) -> Op {
        match self.random.below(4) {
            0 | 1 => Op::Unlink { path },
            2 => Op::Rename { to: self.fresh(seen), path, flags: 0 },
            _ => Op::Rename { path: self.file(seen), to: path, flags: 0 },
        }
    }

    fn bytes(&mut self, seen: &Seen) -> Op {
        let (path, offset) = (self.file(seen), self.offset());
        let (len, seed) = (self.len(), self.seed());
        match self.random.below(100) {
            0..35 => Op::Write { path, offset, len, seed },
            35..42 => Op::Append { path, len: len.min(9000), seed },
            42..47 => Op::OpenTruncate { path },
            47..59 => Op::Truncate { path, len: offset },
            59..73 if self.can.allocate => {
                let mode = self.allocation();
                Op::Allocate { path, mode, offset, len: len as u64 }
            }
            73..81 => {
                let (to, to_offset) = (self.file(seen), self.offset());
                Op::Copy { path, offset, to, to_offset, len }
            }
            81..88 => Op::Map { path, offset, len, seed },
            88..92 => Op::Sync { path: self.any(seen) },
            _ => Op::Read { path, offset, len },
        }
    }

    fn allocation(&mut self) -> u32 {
        let keep = FallocateFlags::KEEP_SIZE;
        let zero = FallocateFlags::ZERO_RANGE;
        let flags = match self.random.below(8) {
            0 => FallocateFlags::empty(),
            1 => keep,
            2 if self.can.zero_range => zero | keep,
            3 | 4 if self.can.zero_range => zero,
            _ => FallocateFlags::PUNCH_HOLE | keep,
        };
        allocate_mode(flags)
    }

    fn held(&mut self, seen: &Seen, held: [bool; HELD]) -> Op {
        let slot = self.random.below(HELD as u64) as usize;
        if !held[slot] {
            return Op::Hold { path: self.file(seen), slot };
        }
        let (offset, len, seed) = (self.offset(), self.len(), self.seed());
        match self.random.below(12) {
            0..7 => Op::HeldWrite { slot, offset, len, seed },
            7 | 8 => Op::HeldTruncate { slot, len: offset },
            9 => Op::HeldMode { slot, mode: Octal(self.can.mode(&mut self.random, false)) },
            _ => Op::Release { slot },
        }
    }

    fn make(&mut self, seen: &Seen) -> Op {
        let path = self.fresh(seen);
        let random = &mut self.random;
        match random.below(100) {
            0..30 => {
                let mode = Octal(self.can.mode(random, false));
                Op::Create { path, mode, exclusive: random.below(2) == 0 }
            }
            30..55 => Op::Mkdir { path, mode: Octal(self.can.mode(random, true) & 0o1777) },
            55..67 => {
                let near = treegen::name(random, &self.can);
                Op::Symlink { path, target: treegen::target(random, &near) }
            }
            67..75 => {
                let mode = Octal(self.can.mode(random, false));
                let devices = self.can.root && random.below(2) == 0;
                let kind = if devices { FileType::CharacterDevice } else { FileType::Fifo };
                let device = if devices { treegen::device(random, &self.can) } else { 0 };
                Op::Mknod { path, kind: Octal(kind.as_raw_mode()), mode, device }
            }
            75..90 => Op::Link { path: self.file(seen), to: path },
            90..94 => Op::Link { path: self.any(seen), to: path },
            _ => Op::List { path: self.directory(seen) },
        }
    }

    fn rename(&mut self, seen: &Seen) -> Op {
        let directory = self.random.below(2) == 0;
        let path = if directory { self.directory(seen) } else { self.any(seen) };
        let over = self.random.below(3) == 0;
        let to = if over { self.any(seen) } else { self.fresh(seen) };
        let flags = match self.random.below(10) {
            _ if !self.can.exchange => RenameFlags::empty(),
            0 | 1 => RenameFlags::EXCHANGE,
            2 => RenameFlags::NOREPLACE,
            _ => RenameFlags::empty(),
        };
        // An exchange with nothing is refused: that is tried often enough.
        let to = if flags == RenameFlags::EXCHANGE { self.any(seen) } else { to };
        Op::Rename { path, to, flags: flags.bits() }
    }

    fn remove(&mut self, seen: &Seen) -> Op {
        match self.random.below(10) {
            0..5 => Op::Unlink { path: self.any(seen) },
            5..8 => Op::Rmdir { path: self.directory(seen) },
            _ => {
                let path = self.directory(seen);
                let below = seen.iter().filter(|(other, _)| other.starts_with(&path)).count();
                // The whole tree at once would leave nothing to look at.
                let small = !path.as_os_str().is_empty() && below <= 1 + seen.len() / 4;
                if small { Op::RemoveTree { path } } else { Op::Rmdir { path } }
            }
        }
    }

    fn attributes(&mut self, seen: &Seen) -> Op {
        let path = self.any(seen);
        let directory =
            seen.iter().any(|(other, kind)| *other == path && *kind == FileType::Directory);
        let root = path.as_os_str().is_empty();
        let random = &mut self.random;
        match random.below(100) {
            // The other users of the test must come in.
            0..25 if root => {
                Op::Chmod { path, mode: Octal(*pick(random, &[0o755, 0o1777, 0o2777])) }
            }
            0..25 => Op::Chmod { path, mode: Octal(self.can.mode(random, directory)) },
            25..45 => {
                let ids = [None, Some(0), Some(ALICE), Some(BOB)];
                Op::Chown { path, uid: *pick(random, &ids), gid: *pick(random, &ids) }
            }
            45..65 => {
                let mut time = || {
                    let time = treegen::time(random);
                    (random.below(6) > 0).then_some((time.tv_sec, time.tv_nsec))
                };
                Op::Times { path, access: time(), modification: time() }
            }
            65..72 if self.can.acls => {
                let default = directory && random.below(2) == 0;
                let which = if default { "default" } else { "access" };
                let name = format!("system.posix_acl_{which}");
                if random.below(4) == 0 {
                    return Op::RemoveXattr { path, name };
                }
                Op::SetXattr {
                    path,
                    name,
                    value: OsString::from_vec(treegen::acl(random)),
                    flags: 0,
                }
            }
            72..80 => Op::RemoveXattr { path, name: treegen::attribute(random, &self.can) },
            _ => {
                let flags = match random.below(6) {
                    0 => XattrFlags::CREATE,
                    1 => XattrFlags::REPLACE,
                    _ => XattrFlags::empty(),
                };
                let name = treegen::attribute(random, &self.can);
                let value = OsString::from_vec(treegen::value(random));
                Op::SetXattr { path, name, value, flags: flags.bits() }
            }
        }
    }
}
