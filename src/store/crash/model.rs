//! What an image may hold after a power cut: for each byte the values that are possible.
#![cfg(test)]

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

/// A change that a power cut may have lost, in part too: where it begins, and its bytes as far as
/// nothing certain came over them.
type Layer = (usize, Vec<Option<u8>>);

/// What an image may be. Certain bytes, and layers over them that may be missing: most images have
/// none, and are compared at once.
struct Possible {
    bytes: Vec<u8>,
    layers: Vec<Layer>,
    /// Least and greatest of each run of sizes.
    sizes: Vec<(usize, usize)>,
}

impl Possible {
    fn of(bytes: &[u8]) -> Possible {
        let sizes = vec![(bytes.len(), bytes.len())];
        Possible { bytes: bytes.to_vec(), layers: Vec::new(), sizes }
    }

    fn reach(&mut self, end: usize) {
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
    }

    fn set(&mut self, at: usize, bytes: &[u8], surely: bool) {
        let end = at + bytes.len();
        self.reach(end);
        if !surely {
            self.layers.push((at, bytes.iter().map(|byte| Some(*byte)).collect()));
            return;
        }
        self.bytes[at..end].copy_from_slice(bytes);
        for (start, layer) in &mut self.layers {
            let to = end.saturating_sub(*start).min(layer.len());
            let from = at.saturating_sub(*start).min(to);
            layer[from..to].fill(None);
        }
        self.layers.retain(|(_, layer)| layer.iter().any(Option::is_some));
    }

    /// Whether a byte may have this value.
    fn may(&self, at: usize, byte: u8) -> bool {
        let of = |(start, layer): &Layer| at.checked_sub(*start).and_then(|i| *layer.get(i)?);
        self.bytes[at] == byte || self.layers.iter().any(|layer| of(layer) == Some(byte))
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
                self.set(*offset, data, surely);
                self.sizes = grow(&self.sizes, offset + data.len());
            }
            Change::Zero { offset, len } => {
                let end = (offset + len).min(self.bytes.len());
                self.set(*offset, &vec![0; end.saturating_sub(*offset)], surely);
            }
            Change::AtLeast(end) => {
                self.reach(*end);
                self.sizes = grow(&self.sizes, *end);
            }
            Change::Truncate(size) => {
                self.reach(*size);
                self.set(*size, &vec![0; self.bytes.len() - size], surely);
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
            if possible.bytes[..seen.len()] == seen[..] {
                continue;
            }
            let wrong = |at: &usize| !possible.may(*at, seen[*at]);
            if let Some(at) = (0..seen.len()).find(wrong) {
                let (is, may) = (seen[at], possible.bytes[at]);
                let story = self.story(image, at, cut);
                return Err(format!(
                    "J3: image {image}, byte {at}: {is}, surely {may}, at record {last_seq}:{story}"
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
