//! What an image may hold after a power cut: for each byte the values that are possible.

/// A change of one image.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Write { offset: usize, data: Vec<u8> },
    Zero { offset: usize, len: usize },
    Truncate(usize),
    AtLeast(usize),
}

/// A change that was acknowledged.
#[derive(Clone, Debug)]
pub(super) struct Acked {
    pub(super) image: usize,
    pub(super) change: Change,
    /// The journal's sequence that makes it count; none: made outside the journal.
    pub(super) seq: Option<u64>,
    /// The place of the log before it began.
    pub(super) begun: usize,
    /// From this place on it is durable, if it was made outside.
    pub(super) durable: Option<usize>,
}

/// A barrier that returned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Barrier {
    pub(super) seq: u64,
    pub(super) done: usize,
}

/// See the module.
#[derive(Default)]
pub(super) struct Model {
    pub(super) start: Vec<Vec<u8>>,
    pub(super) acked: Vec<Acked>,
    pub(super) barriers: Vec<Barrier>,
}

#[derive(Clone)]
struct Possible {
    bytes: Vec<Vec<u8>>,
    /// Least and greatest of each run of sizes.
    sizes: Vec<(usize, usize)>,
}

impl Possible {
    fn of(bytes: &[u8]) -> Possible {
        Possible {
            bytes: bytes.iter().map(|byte| vec![*byte]).collect(),
            sizes: vec![(bytes.len(), bytes.len())],
        }
    }

    fn reach(&mut self, end: usize) {
        if self.bytes.len() < end {
            self.bytes.resize(end, vec![0]);
        }
    }

    fn set(&mut self, at: usize, byte: u8, surely: bool) {
        let values = &mut self.bytes[at];
        if surely {
            values.clear();
        }
        if !values.contains(&byte) {
            values.push(byte);
        }
    }

    fn apply(&mut self, change: &Change, surely: bool) {
        // A write that may be lost may have come in part, too.
        let grow = |sizes: &[(usize, usize)], end: usize| {
            let grown = sizes.iter().map(|(a, b)| {
                let least = if surely { (*a).max(end) } else { *a };
                (least, (*b).max(end))
            });
            grown.collect::<Vec<_>>()
        };
        match change {
            Change::Write { offset, data } => {
                let end = offset + data.len();
                self.reach(end);
                for (i, byte) in data.iter().enumerate() {
                    self.set(offset + i, *byte, surely);
                }
                self.sizes = grow(&self.sizes, end);
            }
            Change::Zero { offset, len } => {
                let end = (offset + len).min(self.bytes.len());
                (*offset..end).for_each(|at| self.set(at, 0, surely));
            }
            Change::AtLeast(end) => {
                self.reach(*end);
                self.sizes = grow(&self.sizes, *end);
            }
            Change::Truncate(size) => {
                self.reach(*size);
                (*size..self.bytes.len()).for_each(|at| self.set(at, 0, surely));
                if surely {
                    self.sizes.clear();
                }
                self.sizes.push((*size, *size));
            }
        }
    }
}

impl Model {
    /// Whether this is what a cut may leave, if the journal's last record is `last_seq`.
    pub(super) fn check(&self, cut: usize, last_seq: u64, seen: &[Vec<u8>]) -> Result<(), String> {
        for barrier in self.barriers.iter().filter(|barrier| barrier.done <= cut) {
            if barrier.seq > last_seq {
                return Err(format!("J1: the barrier of {} is lost ({last_seq})", barrier.seq));
            }
        }
        let mut images: Vec<Possible> = self.start.iter().map(|b| Possible::of(b)).collect();
        for acked in &self.acked {
            match acked.seq {
                Some(seq) if seq <= last_seq => images[acked.image].apply(&acked.change, true),
                Some(_) => {}
                None if acked.durable.is_some_and(|durable| durable <= cut) => {
                    images[acked.image].apply(&acked.change, true);
                }
                None if acked.begun < cut => images[acked.image].apply(&acked.change, false),
                None => {}
            }
        }
        for (image, (possible, seen)) in images.iter().zip(seen).enumerate() {
            let fits = |(a, b): &(usize, usize)| (*a..=*b).contains(&seen.len());
            if !possible.sizes.iter().any(fits) {
                let sizes = &possible.sizes;
                let story = self.story(image, seen.len(), cut);
                return Err(format!(
                    "J3: image {image}, size {} of {sizes:?}, last record {last_seq}:{story}",
                    seen.len()
                ));
            }
            let wrong = |at: &usize| !possible.bytes[*at].contains(&seen[*at]);
            if let Some(at) = (0..seen.len()).find(wrong) {
                let (is, may) = (seen[at], &possible.bytes[at]);
                let story = self.story(image, at, cut);
                return Err(format!(
                    "J3: image {image}, byte {at}: {is} of {may:?}, last record {last_seq}:{story}"
                ));
            }
        }
        Ok(())
    }

    /// What was done to a byte.
    fn story(&self, image: usize, at: usize, cut: usize) -> String {
        let mut story = String::new();
        for acked in self.acked.iter().filter(|acked| acked.image == image && acked.begun < cut) {
            let what = match &acked.change {
                Change::Write { offset, data } if (*offset..offset + data.len()).contains(&at) => {
                    format!("write {offset}+{}: {}", data.len(), data[at - offset])
                }
                Change::Zero { offset, len } if (*offset..offset + len).contains(&at) => {
                    format!("zero {offset}+{len}")
                }
                Change::Truncate(size) => format!("truncate {size}"),
                Change::AtLeast(size) => format!("at least {size}"),
                _ => continue,
            };
            let (seq, begun, durable) = (acked.seq, acked.begun, acked.durable);
            story += &format!("\n    {what} (seq {seq:?}, at {begun}, durable {durable:?})");
        }
        story
    }
}
