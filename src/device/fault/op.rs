//! What is done to a device, and what a crash may leave of it.

use std::fmt;
use std::sync::Arc;

use super::Left;
use super::random::Random;
use crate::device::Range;
use crate::device::memory::Image;

/// What the medium writes as a whole.
pub(super) const SECTOR: u64 = 512;

/// Of a longer operation this many parts are told apart, so that a hole of a terabyte can tear.
const PARTS: u64 = 2048;

/// A change of a device's bytes or size.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Op {
    Write { offset: u64, data: Arc<[u8]> },
    Zero { offset: u64, len: u64, grow: bool },
    Grow { end: u64 },
    SetSize { bytes: u64 },
}

/// What a crash left of an operation that was not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Nothing.
    Lost,
    /// All of it.
    Kept,
    /// A part.
    Torn(Part),
}

/// The part of a torn operation that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Only its first sector.
    First,
    /// Only its last sector.
    Last,
    /// All but its first sector.
    ButFirst,
    /// All but its last sector.
    ButLast,
    /// A random set of its sectors, from this seed.
    Some(u64),
    /// The size, but not the bytes: they are zeros behind the old end, and old before it.
    Size,
    /// The bytes before the old end of the device, but not the new size.
    Inside,
}

impl Op {
    /// The operation of `change_range`; None if it changes neither bytes nor size.
    pub(super) fn of_range(what: Range, offset: u64, len: u64) -> Option<Op> {
        match what {
            Range::Allocate => None,
            Range::AllocateGrow => Some(Op::Grow { end: offset + len }),
            Range::Punch | Range::ZeroKeep => Some(Op::Zero { offset, len, grow: false }),
            Range::ZeroGrow => Some(Op::Zero { offset, len, grow: true }),
        }
    }

    /// Whether a crash can leave a part of it.
    pub(super) fn can_tear(&self) -> bool {
        matches!(self, Op::Write { .. } | Op::Zero { .. })
    }

    /// Bytes it writes.
    pub(super) fn len(&self) -> usize {
        if let Op::Write { data, .. } = self { data.len() } else { 0 }
    }

    /// The change that is really there once it is done.
    pub(super) fn left(&self, left: Left) -> Option<Op> {
        match (left, self) {
            (Left::All, _) => Some(self.clone()),
            (Left::Head(len), Op::Write { offset, data }) if len > 0 => {
                Some(Op::Write { offset: *offset, data: data.get(..len)?.into() })
            }
            (Left::Head(_), _) => None,
        }
    }

    /// Whether nothing of `earlier` can be seen once this is there.
    pub(super) fn hides(&self, earlier: &Op) -> bool {
        let Op::Write { offset, data } = self else { return false };
        let end = offset + data.len() as u64;
        match earlier {
            Op::Write { offset: start, data } => {
                offset <= start && start + data.len() as u64 <= end
            }
            Op::Zero { offset: start, len, .. } => offset <= start && start + len <= end,
            Op::Grow { end: grown } => *grown <= end,
            Op::SetSize { .. } => false,
        }
    }

    /// Does to `image` what `fate` left of this.
    pub(super) fn apply(&self, image: &mut Image, fate: Fate) {
        let part = match fate {
            Fate::Lost => return,
            Fate::Kept => return self.apply_all(image),
            Fate::Torn(part) => part,
        };
        let (offset, len, grow) = match self {
            Op::Write { offset, data } => (*offset, data.len() as u64, true),
            Op::Zero { offset, len, grow } => (*offset, *len, *grow),
            Op::Grow { .. } | Op::SetSize { .. } => return,
        };
        let size = image.size();
        match part {
            Part::Size if grow => image.set_size(size.max(offset + len)),
            Part::Size => {}
            Part::Inside => self.apply_run(image, offset, (offset + len).min(size)),
            _ => {
                for (start, end) in kept_runs(offset, offset + len, part) {
                    self.apply_run(image, start, end);
                }
            }
        }
    }

    fn apply_all(&self, image: &mut Image) {
        match self {
            Op::Write { offset, data } => image.write(data, *offset),
            Op::Zero { offset, len, grow } => {
                image.zero(*offset, *len);
                if *grow {
                    image.set_size(image.size().max(offset + len));
                }
            }
            Op::Grow { end } => image.set_size(image.size().max(*end)),
            Op::SetSize { bytes } => image.set_size(*bytes),
        }
    }

    /// The bytes from `start` to `end` of a write or a zeroing.
    fn apply_run(&self, image: &mut Image, start: u64, end: u64) {
        match self {
            Op::Write { offset, data } => {
                let within = start.saturating_sub(*offset) as usize
                    ..end.saturating_sub(*offset).min(data.len() as u64) as usize;
                image.write(data.get(within).unwrap_or_default(), start);
            }
            Op::Zero { grow, .. } => {
                image.zero(start, end.saturating_sub(start));
                if *grow && end > image.size() {
                    image.set_size(end);
                }
            }
            Op::Grow { .. } | Op::SetSize { .. } => {}
        }
    }
}

/// The runs of sectors of `start..end` that `part` keeps.
fn kept_runs(start: u64, end: u64, part: Part) -> Vec<(u64, u64)> {
    let first_end = (start / SECTOR + 1) * SECTOR;
    let last_start = end.saturating_sub(1) / SECTOR * SECTOR;
    let runs = match part {
        Part::First => vec![(start, first_end.min(end))],
        Part::Last => vec![(last_start.max(start), end)],
        Part::ButFirst => vec![(first_end, end)],
        Part::ButLast => vec![(start, last_start)],
        Part::Some(seed) => {
            let mut random = Random::new(seed);
            let step = ((end - start) / PARTS).next_multiple_of(SECTOR).max(SECTOR);
            let mut runs = Vec::new();
            let mut at = start;
            while at < end {
                let next = ((at / SECTOR) * SECTOR + step).min(end);
                if random.below(2) == 0 {
                    runs.push((at, next));
                }
                at = next;
            }
            runs
        }
        Part::Size | Part::Inside => Vec::new(),
    };
    runs.into_iter().filter(|(start, end)| start < end).collect()
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Write { offset, data } => write!(f, "write {offset}+{}", data.len()),
            Op::Zero { offset, len, .. } => write!(f, "zero {offset}+{len}"),
            Op::Grow { end } => write!(f, "grow {end}"),
            Op::SetSize { bytes } => write!(f, "truncate {bytes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(fate: Fate, size: u64, offset: u64, len: usize) -> String {
        let mut image = Image::zeros(size);
        Op::Write { offset, data: vec![1; len].into() }.apply(&mut image, fate);
        let bytes = image.to_vec();
        let runs = bytes.chunk_by(|a, b| a == b).map(|run| format!("{}x{}", run[0], run.len()));
        runs.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_torn_write_leaves_whole_sectors() {
        let torn = |part| left(Fate::Torn(part), 3000, 100, 2000);
        assert_eq!(torn(Part::First), "0x100 1x412 0x2488");
        assert_eq!(torn(Part::ButFirst), "0x512 1x1588 0x900");
        assert_eq!(torn(Part::Last), "0x2048 1x52 0x900");
        assert_eq!(torn(Part::ButLast), "0x100 1x1948 0x952");
        assert_eq!(torn(Part::Size), "0x3000");
        assert_eq!(left(Fate::Torn(Part::Size), 1000, 100, 2000), "0x2100");
        assert_eq!(left(Fate::Torn(Part::Inside), 1000, 100, 2000), "0x100 1x900");
        assert_eq!(left(Fate::Torn(Part::Inside), 50, 100, 2000), "0x50");
        assert_eq!(left(Fate::Torn(Part::First), 10, 3, 5), "0x3 1x5 0x2");
        assert_eq!(left(Fate::Torn(Part::ButFirst), 10, 3, 5), "0x10");
        let some: Vec<_> = (0..20).map(|seed| torn(Part::Some(seed))).collect();
        assert!(some.iter().any(|left| left.split(' ').count() > 4), "{some:?}");
        assert_eq!(torn(Part::Some(3)), torn(Part::Some(3)));
    }

    #[test]
    fn a_hole_of_a_terabyte_tears_in_bounded_time() {
        let mut image = Image::from(&[1; 4096][..]);
        image.set_size(1 << 40);
        let zero = Op::Zero { offset: 0, len: 1 << 40, grow: false };
        zero.apply(&mut image, Fate::Torn(Part::Some(1)));
        zero.apply(&mut image, Fate::Torn(Part::ButFirst));
        assert_eq!(image.size(), 1 << 40);
    }

    fn any_op(random: &mut Random) -> Op {
        let (offset, len) = (random.below(4000), 1 + random.below(3000));
        match random.below(5) {
            0 => Op::Zero { offset, len, grow: random.below(2) == 0 },
            1 => Op::Grow { end: offset },
            2 => Op::SetSize { bytes: offset },
            _ => Op::Write { offset, data: vec![random.bits() as u8; len as usize].into() },
        }
    }

    #[test]
    fn what_is_hidden_makes_no_difference_whatever_became_of_it_and_of_what_came_between() {
        let (mut random, mut hidden) = (Random::new(0x5eed), 0);
        while hidden < 500 {
            let ops: Vec<Op> = (0..4).map(|_| any_op(&mut random)).collect();
            if !ops[3].hides(&ops[0]) {
                continue;
            }
            hidden += 1;
            let between = [random.below(2), random.below(2)].map(|kept| kept == 0);
            let parts = [Part::First, Part::ButFirst, Part::Size, Part::Inside, Part::Some(hidden)];
            let torn = parts.map(Fate::Torn);
            let fates = [Fate::Lost, Fate::Kept].into_iter().chain(torn);
            let images = fates.map(|fate| {
                let mut image = Image::from(&[1; 2000][..]);
                ops[0].apply(&mut image, fate);
                for (op, kept) in ops[1..3].iter().zip(between) {
                    op.apply(&mut image, if kept { Fate::Kept } else { Fate::Lost });
                }
                ops[3].apply(&mut image, Fate::Kept);
                image
            });
            let images: Vec<Image> = images.collect();
            assert!(images.windows(2).all(|pair| pair[0] == pair[1]), "{}", ops[0]);
        }
    }
}
