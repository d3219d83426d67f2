//! A small simulated world: devices with latencies and faults, a ring of segments, writers. It does
//! what the controller says, in ticks of 10 ms unless a test says otherwise.
#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::controller::{Controller, RESERVE, SLOTS};
use super::super::view::*;
use crate::config::WritebackOrder;
use crate::journal::Tail;
use crate::units::DeviceId;

pub const TICK_MS: u64 = 10;
pub const MIB: u64 = 1 << 20;
const SEGMENTS: u64 = 16;
const HEADER: u64 = 88;

/// A small generator; its seed is printed by who uses it.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// Writes and syncs fail.
    Dead,
    /// Nothing ends.
    Hung,
    /// Writes succeed, syncs fail.
    NoSync,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Dirty,
    Writing,
    Written,
}

#[derive(Debug)]
struct Extent {
    seq: u64,
    offset: u64,
    since: u64,
    state: State,
    superseded: bool,
}

struct Io {
    extent: u64,
    start: u64,
    done: u64,
}

pub struct SimDevice {
    pub id: DeviceId,
    pub fault: Fault,
    pub latency_ms: u64,
    pub sync_ms: u64,
    /// Frontend writes, in bytes a second, of one length, to so many places.
    pub load: u64,
    pub len: u64,
    pub places: u64,
    pub flushing: bool,
    pub frontend_ms: Option<u64>,
    credit: u64,
    waiting_since: Option<u64>,
    pub longest_wait: u64,
    pub acked: u64,
    pub refused: u64,
    pub home: u64,
    pub issued: u64,
    pub oldest_age: u64,
    pub share_most: u64,
    extents: BTreeMap<u64, Extent>,
    seqs: BTreeSet<(u64, u64)>,
    dirty: BTreeMap<u64, u64>,
    ages: BTreeSet<(u64, u64)>,
    newest: BTreeMap<u64, u64>,
    cursor: u64,
    ios: Vec<Io>,
    written: BTreeSet<u64>,
    written_since: u64,
    sync: Option<(u64, Vec<u64>)>,
}

impl SimDevice {
    pub fn new(id: u32, latency_ms: u64, len: u64) -> SimDevice {
        SimDevice {
            id: DeviceId(id),
            fault: Fault::None,
            latency_ms,
            sync_ms: 20,
            load: 0,
            len,
            places: 1 << 20,
            flushing: false,
            frontend_ms: None,
            credit: 0,
            waiting_since: None,
            longest_wait: 0,
            acked: 0,
            refused: 0,
            home: 0,
            issued: 0,
            oldest_age: 0,
            share_most: 0,
            extents: BTreeMap::new(),
            seqs: BTreeSet::new(),
            dirty: BTreeMap::new(),
            ages: BTreeSet::new(),
            newest: BTreeMap::new(),
            cursor: 0,
            ios: Vec::new(),
            written: BTreeSet::new(),
            written_since: 0,
            sync: None,
        }
    }

    pub fn live(&self) -> usize {
        self.extents.len()
    }

    pub fn dirty_extents(&self) -> u64 {
        self.dirty.len() as u64
    }

    pub fn in_flight(&self) -> usize {
        self.ios.len()
    }

    pub fn share(&self) -> u64 {
        self.extents.len() as u64 * (self.len + HEADER)
    }

    pub fn view(&self) -> DeviceView {
        DeviceView {
            id: self.id,
            dirty_bytes: self.dirty_extents() * self.len,
            dirty_extents: self.dirty_extents(),
            dirty_since_ms: self.ages.first().map_or(0, |(since, _)| *since),
            live_seq: self.seqs.first().map(|(seq, _)| *seq),
            in_flight: self.ios.len(),
            oldest_io_ms: self.ios.iter().map(|io| io.start).min(),
            written_extents: self.written.len() as u64,
            written_since_ms: self.written_since,
            syncing: self.sync.is_some(),
            frontend_ms: self.frontend_ms,
            flushing: self.flushing,
            journal_share: self.share(),
        }
    }

    fn insert(&mut self, uid: u64, seq: u64, offset: u64, now: u64) {
        if let Some(old) = self.newest.insert(offset, uid) {
            let writing = self.extents.get_mut(&old).filter(|e| e.state == State::Writing);
            match writing {
                Some(extent) => extent.superseded = true,
                None => self.forget(old),
            }
        }
        let extent = Extent { seq, offset, since: now, state: State::Dirty, superseded: false };
        self.extents.insert(uid, extent);
        self.seqs.insert((seq, uid));
        self.dirty.insert(offset, uid);
        self.ages.insert((now, uid));
    }

    fn forget(&mut self, uid: u64) {
        let Some(extent) = self.extents.remove(&uid) else { return };
        self.seqs.remove(&(extent.seq, uid));
        self.ages.remove(&(extent.since, uid));
        self.written.remove(&uid);
        if self.dirty.get(&extent.offset) == Some(&uid) {
            self.dirty.remove(&extent.offset);
        }
        if self.newest.get(&extent.offset) == Some(&uid) {
            self.newest.remove(&extent.offset);
        }
    }

    fn dirty_again(&mut self, uid: u64) {
        let Some(extent) = self.extents.get_mut(&uid) else { return };
        if extent.superseded {
            self.forget(uid);
            return;
        }
        extent.state = State::Dirty;
        self.dirty.insert(extent.offset, uid);
        self.ages.insert((extent.since, uid));
        self.written.remove(&uid);
    }

    /// The extents a pass takes, in LBA order from the cursor, and begins their writes.
    fn take(&mut self, now: u64, extents: usize, bytes: u64, pick: Pick) -> u64 {
        let busy: BTreeSet<u64> =
            self.ios.iter().filter_map(|io| Some(self.extents.get(&io.extent)?.offset)).collect();
        let (from, all) = (self.cursor, &self.extents);
        let sweep = || self.dirty.range(from..).chain(self.dirty.range(..from)).map(|(_, uid)| uid);
        let old = |limit| {
            self.ages.iter().take_while(move |(since, _)| *since <= limit).map(|age| &age.1)
        };
        let tail = |limit| sweep().filter(move |uid| all[uid].seq <= limit);
        let order: Box<dyn Iterator<Item = &u64>> = match pick {
            Pick::DirtySince(since) => Box::new(old(since)),
            Pick::TailFirst(seq) => Box::new(tail(seq).chain(sweep())),
            Pick::Any => Box::new(sweep()),
        };
        let mut chosen: Vec<u64> = Vec::new();
        for uid in order {
            let more = (chosen.len() as u64 + 1).saturating_mul(self.len);
            if chosen.len() >= extents || (!chosen.is_empty() && more > bytes) {
                break;
            }
            if !busy.contains(&self.extents[uid].offset) && !chosen.contains(uid) {
                chosen.push(*uid);
            }
        }
        for uid in &chosen {
            let extent = self.extents.get_mut(uid).unwrap();
            extent.state = State::Writing;
            self.cursor = extent.offset + 1;
            self.dirty.remove(&extent.offset);
            self.ages.remove(&(extent.since, *uid));
            self.ios.push(Io { extent: *uid, start: now, done: now + self.latency_ms });
        }
        self.issued += chosen.len() as u64;
        chosen.len() as u64
    }

    /// Ends what is due; failures where the device is dead.
    fn complete(&mut self, now: u64, events: &mut Vec<Event>) {
        if self.fault == Fault::Hung {
            return;
        }
        let ok = self.fault != Fault::Dead;
        let (due, rest) = std::mem::take(&mut self.ios).into_iter().partition(|io| io.done <= now);
        self.ios = rest;
        let due: Vec<Io> = due;
        for io in due {
            events.push(Event::Wrote { device: self.id, ok });
            let extent = self.extents.get_mut(&io.extent).unwrap();
            if !ok {
                self.dirty_again(io.extent);
            } else if extent.superseded {
                self.forget(io.extent);
            } else {
                extent.state = State::Written;
                self.home += self.len;
                if self.written.is_empty() {
                    self.written_since = now;
                }
                self.written.insert(io.extent);
            }
        }
        if let Some((_, epoch)) = self.sync.take_if(|(done, _)| *done <= now) {
            let ok = self.fault == Fault::None;
            events.push(Event::Synced { device: self.id, ok });
            for uid in epoch {
                if !self.extents.get(&uid).is_some_and(|e| e.state == State::Written) {
                    continue;
                }
                if ok { self.forget(uid) } else { self.dirty_again(uid) }
            }
        }
    }
}

pub struct Sim {
    pub now: u64,
    pub tick_ms: u64,
    pub controller: Controller,
    pub settings: Settings,
    pub flushing_all: bool,
    pub devices: Vec<SimDevice>,
    pub random: Random,
    segment_bytes: u64,
    segments: VecDeque<(u64, u64, u64)>,
    seq: u64,
    uid: u64,
    events: Vec<Event>,
    pub copied: u64,
    pub syncs: u64,
    pub most_in_flight: usize,
    /// What the last tick did.
    pub log: Vec<Action>,
}

impl Sim {
    pub fn new(seed: u64, journal_bytes: u64, devices: Vec<SimDevice>) -> Sim {
        let order = WritebackOrder::Unordered;
        Sim {
            now: 1_000_000,
            tick_ms: TICK_MS,
            controller: Controller::new(),
            settings: Settings { percent: 10, delay_ms: 1000, running: true, order },
            flushing_all: false,
            devices,
            random: Random::new(seed),
            segment_bytes: journal_bytes / SEGMENTS,
            segments: VecDeque::new(),
            seq: 0,
            uid: 0,
            events: Vec::new(),
            copied: 0,
            syncs: 0,
            most_in_flight: 0,
            log: Vec::new(),
        }
    }

    pub fn journal_bytes(&self) -> u64 {
        self.segment_bytes * SEGMENTS
    }

    pub fn used(&self) -> u64 {
        let sealed = self.segments.len().saturating_sub(1) as u64 * self.segment_bytes;
        sealed + self.segments.back().map_or(0, |segment| segment.2)
    }

    fn append(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes + HEADER;
        if self.segments.back().is_none_or(|head| head.2 + bytes > self.segment_bytes) {
            if self.segments.len() as u64 == SEGMENTS {
                return None;
            }
            self.segments.push_back((self.seq + 1, self.seq, 0));
        }
        self.seq += 1;
        let head = self.segments.back_mut().unwrap();
        head.1 = self.seq;
        head.2 += bytes;
        Some(self.seq)
    }

    /// A frontend write; whether there was room.
    pub fn write(&mut self, device: usize, place: u64) -> bool {
        let len = self.devices[device].len;
        if self.used() + len + HEADER > self.journal_bytes() / 10 * 9 {
            return false;
        }
        let Some(seq) = self.append(len) else { return false };
        self.uid += 1;
        let device = &mut self.devices[device];
        device.insert(self.uid, seq, place * device.len, self.now);
        device.frontend_ms = Some(self.now);
        device.acked += len;
        true
    }

    fn frontends(&mut self) {
        let tick_ms = self.tick_ms;
        // Room is given in the order of waiting, as the journal does.
        let mut order: Vec<usize> = (0..self.devices.len()).collect();
        order.sort_by_key(|index| self.devices[*index].waiting_since.unwrap_or(self.now));
        for index in order {
            let device = &mut self.devices[index];
            device.credit += device.load * tick_ms / 1000;
            let most = device.len + device.load * tick_ms / 1000;
            device.credit = device.credit.min(most);
            while self.devices[index].credit >= self.devices[index].len {
                let device = &self.devices[index];
                let (id, len, share) = (device.id, device.len, device.share());
                let admission = self.controller.admit(id, share, len);
                let place = self.random.below(device.places);
                let done = admission == Admission::Yes && self.write(index, place);
                let now = self.now;
                let device = &mut self.devices[index];
                if admission == Admission::Refused {
                    device.refused += 1;
                } else if !done {
                    let since = *device.waiting_since.get_or_insert(now);
                    device.longest_wait = device.longest_wait.max(now - since);
                    break;
                }
                device.waiting_since = None;
                device.credit -= len;
            }
        }
    }

    pub fn waiting(&self) -> usize {
        self.devices.iter().filter(|device| device.waiting_since.is_some()).count()
    }

    pub fn tail(&self) -> Option<Tail> {
        let is_head = self.segments.len() == 1;
        self.segments.front().map(|s| Tail { first_seq: s.0, last_seq: s.1, is_head })
    }

    fn step(&mut self) -> bool {
        let views: Vec<DeviceView> = self.devices.iter().map(SimDevice::view).collect();
        let world = World {
            now_ms: self.now,
            journal_bytes: self.journal_bytes(),
            journal_used: self.used(),
            waiting_writers: self.waiting(),
            in_flight: views.iter().map(|view| view.in_flight).sum(),
            flushing_all: self.flushing_all,
            settings: self.settings,
            devices: &views,
        };
        let events = std::mem::take(&mut self.events);
        let actions = self.controller.step(&world, self.tail(), &events);
        let again = actions.iter().filter(|action| self.act(action)).count() > 0;
        self.log.extend(actions);
        let in_flight = self.devices.iter().map(SimDevice::in_flight).sum();
        self.most_in_flight = self.most_in_flight.max(in_flight);
        assert!(in_flight <= SLOTS + RESERVE, "{in_flight} in flight");
        again
    }

    fn device(&mut self, id: DeviceId) -> &mut SimDevice {
        self.devices.iter_mut().find(|device| device.id == id).unwrap()
    }

    fn act(&mut self, action: &Action) -> bool {
        let now = self.now;
        match *action {
            Action::FreeTail { last_seq } => {
                let held = |device: &SimDevice| {
                    device.seqs.first().is_some_and(|(seq, _)| *seq <= last_seq)
                };
                assert!(!self.devices.iter().any(held), "a live tail was freed");
                assert_eq!(self.tail().unwrap().last_seq, last_seq);
                self.segments.pop_front();
                true
            }
            Action::CopyForward { device, up_to } => {
                let len = self.device(device).len;
                while let Some((seq, uid)) = self.device(device).seqs.first().copied()
                    && seq <= up_to
                {
                    let Some(new) = self.append(len) else { break };
                    let device = self.device(device);
                    device.seqs.remove(&(seq, uid));
                    device.seqs.insert((new, uid));
                    device.extents.get_mut(&uid).unwrap().seq = new;
                    self.copied += len;
                }
                true
            }
            Action::Sync { device } => {
                self.syncs += 1;
                let device = self.device(device);
                assert!(device.sync.is_none(), "two syncs at once");
                let epoch = std::mem::take(&mut device.written).into_iter().collect();
                device.sync = Some((now + device.sync_ms, epoch));
                false
            }
            Action::Pass { device, extents, bytes, pick, .. } => {
                let device = self.device(device);
                let taken = device.take(now, extents, bytes, pick);
                let event = Event::Issued { device: device.id, bytes: taken * device.len };
                self.events.push(event);
                taken > 0 && taken < extents as u64
            }
        }
    }

    /// One tick goes by.
    pub fn tick(&mut self) {
        self.now += self.tick_ms;
        self.log.clear();
        for device in &mut self.devices {
            device.complete(self.now, &mut self.events);
        }
        self.frontends();
        let due = !self.events.is_empty() || self.waiting() > 0;
        if due || self.now.is_multiple_of(100) {
            let mut rounds = 0;
            while self.step() {
                rounds += 1;
                assert!(rounds < 1000, "never satisfied: {:?}", self.log.last());
            }
        }
        for device in &mut self.devices {
            let since = device.ages.first().map_or(self.now, |(since, _)| *since);
            device.oldest_age = device.oldest_age.max(self.now - since);
            device.share_most = device.share_most.max(device.share());
        }
    }

    pub fn run(&mut self, ms: u64) {
        (0..ms / self.tick_ms).for_each(|_| self.tick());
    }
}
