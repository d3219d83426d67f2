//! The map against a model of bytes: whatever is written, cut, zeroed, failed and synced in any
//! order, lookups say the newest bytes, and home gets there (J6, J10, J11, W3).

use super::super::writeback::view::Pick;
use super::*;
use crate::device::fault::Random;

const WORLD: u64 = 6000;
const UNIT: u64 = 512;

/// Every byte is a number of its own: where it was written in the journal.
#[derive(Default)]
struct World {
    map: DirtyMap,
    /// What applications wrote; zero where nothing.
    model: Vec<u64>,
    home: Vec<u64>,
    durable_home: Vec<u64>,
    in_flight: Vec<HomeOp>,
    seq: u64,
    next_at: u64,
}

impl World {
    fn size(&self) -> u64 {
        self.model.len() as u64
    }

    fn record(&mut self, extent: Extent, body: Body) {
        self.seq += 1;
        let (seq, write_seq) = (self.seq, self.seq);
        self.map.insert(Fresh { extent, seq, write_seq, now_ms: 0, body });
    }

    fn write(&mut self, offset: u64, len: u64) {
        let at = self.next_at;
        self.next_at += len;
        let (length, crc, skip) = (len as u32, 0, 0);
        self.record(Extent { offset, len }, Body::Data { at, length, crc, skip });
        let end = offset + len;
        if end > self.size() {
            self.model.resize(end as usize, 0);
            self.map.set_size(end, self.seq, self.seq, 0);
        }
        for i in 0..len {
            self.model[(offset + i) as usize] = at + i + 1;
        }
        self.map.note_change(Timestamp { sec: self.seq as i64, nsec: 0 });
    }

    fn zero(&mut self, offset: u64, len: u64) {
        let len = len.min(self.size().saturating_sub(offset));
        self.record(Extent { offset, len }, Body::Zero);
        self.model.iter_mut().skip(offset as usize).take(len as usize).for_each(|b| *b = 0);
    }

    fn truncate(&mut self, size: u64) {
        self.record(Extent { offset: size, len: u64::MAX - size }, Body::Zero);
        self.map.set_size(size, self.seq, self.seq, 0);
        self.model.resize(size as usize, 0);
    }

    fn seen(&self) -> Vec<u64> {
        let mut bytes = self.home.clone();
        bytes.resize(self.map.size().unwrap_or(self.home.len() as u64) as usize, 0);
        for known in self.map.lookup(Extent { offset: 0, len: self.size() }) {
            for i in 0..known.extent.len {
                bytes[(known.extent.offset + i) as usize] = match known.body {
                    Body::Zero => 0,
                    Body::Data { at, skip, .. } => at + u64::from(skip) + i + 1,
                };
            }
        }
        bytes
    }

    fn limits(&self, random: &mut Random) -> Limits {
        Limits {
            ops: 1 + random.below(4) as usize,
            bytes: 1 + random.below(4000),
            pick: match random.below(8) {
                0 | 1 => Pick::TailFirst(random.below(self.seq + 1)),
                2 => Pick::DirtySince(0),
                _ => Pick::Any,
            },
            contiguous: random.one_in(5),
            durable: self.seq - random.below(4).min(self.seq),
            unit: UNIT,
            skip_wal: false,
        }
    }

    fn plan(&mut self, limits: &Limits) {
        let planned = self.map.plan(limits);
        for op in planned.ops {
            let unit = |e: &Extent| (e.offset / UNIT, e.end().div_ceil(UNIT));
            for other in &self.in_flight {
                let (a, b) = (unit(&op.extent), unit(&other.extent));
                assert!(a.1 <= b.0 || b.1 <= a.0, "J6: {op:?} beside {other:?}");
            }
            if let OpKind::Write(parts) = &op.kind {
                assert!(op.extent.end() <= self.home.len() as u64, "past the end: {op:?}");
                assert_eq!(parts.iter().map(|part| part.len).sum::<u64>(), op.extent.len);
                assert!(parts.iter().all(|part| part.placed.seq <= limits.durable), "J13");
            }
            self.in_flight.push(op);
        }
    }

    fn finish(&mut self, at: usize, ok: bool) {
        let op = self.in_flight.swap_remove(at);
        if ok {
            match &op.kind {
                OpKind::SetSize(size) => self.home.resize(*size as usize, 0),
                OpKind::Zero => {
                    let (at, len) = (op.extent.offset as usize, op.extent.len as usize);
                    self.home.iter_mut().skip(at).take(len).for_each(|byte| *byte = 0);
                }
                OpKind::Write(parts) => {
                    let mut to = op.extent.offset as usize;
                    for part in parts {
                        for i in 0..part.len {
                            self.home[to] = part.placed.at + part.skip + i + 1;
                            to += 1;
                        }
                    }
                }
            }
        }
        self.map.complete(&op, ok, 0);
    }

    fn sync(&mut self, ok: bool) {
        let last = self.map.begin_sync();
        if last.is_some() && ok {
            assert_eq!(self.home, self.model, "said to be the last sync");
        }
        if ok {
            self.durable_home = self.home.clone();
        }
        self.map.end_sync(ok);
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(12) {
            0..=3 => self.write(random.below(WORLD), 1 + random.below(900)),
            4 => self.zero(random.below(WORLD), 1 + random.below(2000)),
            5 => self.truncate(random.below(WORLD)),
            6..=8 => {
                let limits = self.limits(random);
                self.plan(&limits);
            }
            9 | 10 if !self.in_flight.is_empty() => {
                let at = random.below(self.in_flight.len() as u64) as usize;
                self.finish(at, !random.one_in(6));
            }
            _ => {
                let ok = !random.one_in(5);
                self.sync(ok);
            }
        }
        assert_eq!(self.map.size().unwrap_or(self.home.len() as u64), self.size());
        assert_eq!(self.seen(), self.model);
        self.check_indexes();
    }

    fn check_indexes(&self) {
        let map = &self.map;
        assert_eq!(map.waiting.len() + map.busy.len(), map.pieces.len());
        assert_eq!(map.places.len(), map.waiting.len());
        let data = map.pieces.iter().filter(|(_, piece)| piece.body != Body::Zero);
        assert_eq!(map.data_bytes, data.map(|(start, piece)| piece.end - start).sum::<u64>());
        let written = map.pieces.values().filter(|piece| piece.state == State::Written);
        assert_eq!(map.written, written.count() as u64);
        let live = map.pieces.values().map(|piece| piece.seq);
        let live = live.chain(map.size.map(|size| size.seq));
        assert_eq!(map.live_seq(), live.min());
    }

    fn drain(&mut self) {
        let limits = Limits {
            ops: 1000,
            bytes: u64::MAX,
            pick: Pick::Any,
            contiguous: false,
            durable: self.seq,
            unit: UNIT,
            skip_wal: false,
        };
        for _ in 0..20 {
            self.plan(&limits);
            while !self.in_flight.is_empty() {
                self.finish(0, true);
            }
            self.sync(true);
        }
    }
}

#[test]
fn w3_home_becomes_what_was_written_in_any_order() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut world = World::default();
        if random.one_in(2) {
            world.home = (0..3000).map(|i| 1_000_000 + i).collect();
            world.model = world.home.clone();
            world.map = DirtyMap::new(3000);
        }
        for step in 0..150 {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                world.step(&mut random);
            }));
            assert!(result.is_ok(), "seed {seed}, step {step}");
        }
        world.drain();
        assert!(world.map.is_clean(), "seed {seed}: {:?}", world.map);
        assert_eq!(world.durable_home, world.model, "seed {seed}");
        assert_eq!(world.map.load(), Load { waiting_since_ms: u64::MAX, ..Load::default() });
    }
}

#[test]
fn j11_a_failed_sync_makes_the_whole_epoch_dirty_again() {
    let mut world = World { home: vec![0; 4096], model: vec![0; 4096], ..World::default() };
    world.map = DirtyMap::new(4096);
    world.write(0, 100);
    world.write(1000, 100);
    let limits = Limits {
        ops: 1,
        bytes: 4096,
        pick: Pick::Any,
        contiguous: false,
        durable: 9,
        unit: 512,
        skip_wal: false,
    };
    world.plan(&limits);
    world.finish(0, true);
    world.map.begin_sync();
    // Written home after that sync began: a failure may be its.
    world.plan(&limits);
    world.finish(0, true);
    world.map.end_sync(false);
    assert_eq!((world.map.load().waiting, world.map.load().written), (2, 0));
    assert!(world.map.begin_sync().is_none(), "not the last one");
}

#[test]
fn j4_what_is_written_after_a_sync_began_is_not_clean_by_it() {
    let mut world = World { home: vec![0; 4096], model: vec![0; 4096], ..World::default() };
    world.map = DirtyMap::new(4096);
    world.write(0, 100);
    world.write(1000, 100);
    let one = Limits {
        ops: 1,
        bytes: 4096,
        pick: Pick::Any,
        contiguous: false,
        durable: 9,
        unit: 512,
        skip_wal: false,
    };
    world.plan(&one);
    world.finish(0, true);
    world.map.begin_sync();
    world.plan(&one);
    world.finish(0, true);
    world.map.end_sync(true);
    let load = world.map.load();
    assert_eq!((load.live, load.written, load.waiting), (1, 1, 0));
}

#[test]
fn a_copied_record_moves_only_its_own_piece() {
    let mut map = DirtyMap::new(0);
    let data = |at| Body::Data { at, length: 10, crc: 0, skip: 0 };
    let fresh = |offset, seq, at| Fresh {
        extent: Extent { offset, len: 10 },
        seq,
        write_seq: seq,
        now_ms: 0,
        body: data(at),
    };
    map.insert(fresh(0, 1, 100));
    map.insert(fresh(20, 2, 200));
    map.insert(fresh(20, 3, 300));
    let all = map.lookup(Extent { offset: 0, len: 100 });
    map.moved(&all[0], &[fresh(0, 4, 400)]);
    map.moved(&Known { seq: 2, ..all[1] }, &[fresh(20, 5, 500)]);
    let known = map.lookup(Extent { offset: 0, len: 100 });
    assert_eq!(known.iter().map(|known| known.seq).collect::<Vec<_>>(), [4, 3]);
    assert_eq!(map.live_seq(), Some(3));
}
