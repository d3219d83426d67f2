//! A store over fault devices, run by hand: no threads, so a seed is a workload.
#![cfg(test)]

use std::sync::Arc;

use rustix::io::Errno;

use super::model::{Acked, Barrier, Change, Model};
use crate::config::{CacheMode, StoreConfig, WritebackConfig};
use crate::device::fault::{Call, Fault, FaultDevice, FaultLog, Random};
use crate::device::{BlockDevice, Image, Range};
use crate::error::Result as Outcome;
use crate::journal::{DeviceIdentity, Geometry, Journal, Recovered};
use crate::store::recovery::{Fate, Located, Opening, Resolver};
use crate::store::{BlockStore, Device, Mutants, Stamp};
use crate::units::{Identity, Timestamp};

const UUID: [u8; 16] = *b"crash test store";
const IMAGE_BYTES: u64 = 40 << 10;

/// What a workload is made of.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) ops: usize,
    pub(super) segments: u32,
    pub(super) segment_bytes: u64,
    pub(super) switches: bool,
    pub(super) streams: bool,
    /// Syncs of images fail now and then.
    pub(super) faults: bool,
    pub(super) mutants: Mutants,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            ops: 200,
            segments: 8,
            segment_bytes: 24 << 10,
            switches: false,
            streams: false,
            faults: false,
            mutants: Mutants::default(),
        }
    }
}

/// See the module.
pub(super) struct Rig {
    pub(super) log: FaultLog,
    pub(super) images: Vec<Arc<FaultDevice>>,
    store: BlockStore,
    devices: Vec<Arc<Device>>,
    pub(super) model: Model,
    pub(super) recovered_seq: u64,
    /// Crashes before this place are not of the workload.
    pub(super) begins_at: usize,
    /// Where a stream of each image is.
    streams: Vec<u64>,
}

fn config(streams: bool) -> StoreConfig {
    StoreConfig {
        cache_bytes: 64 << 10,
        block_size: 4096,
        bypass: 16 << 10,
        sequential_cutoff: if streams { 12 << 10 } else { 1 << 30 },
        readahead: 0,
        cache_mode: CacheMode::Writeback,
        writeback: WritebackConfig {
            percent: 0,
            delay: std::time::Duration::ZERO,
            ..WritebackConfig::default()
        },
        ..StoreConfig::default()
    }
}

fn identity(number: usize) -> Identity {
    Identity { dev: 1, ino: 10 + number as u64, generation: 1 }
}

fn record(number: usize) -> DeviceIdentity {
    let path = format!("{number}.img").into_bytes();
    DeviceIdentity { named: true, inode: 10 + number as u64, path, ..DeviceIdentity::default() }
}

fn stamp(size: u64) -> Stamp {
    let time = Timestamp { sec: 1, nsec: 0 };
    Stamp { size, mtime: time, ctime: time }
}

/// Images by inode.
struct Images<'a>(&'a [Arc<FaultDevice>]);

impl Resolver for Images<'_> {
    fn find(&self, record: &DeviceIdentity) -> Outcome<Option<Located>> {
        let number = record.inode as usize - 10;
        let Some(device) = self.0.get(number) else { return Ok(None) };
        Ok(Some(Located {
            identity: identity(number),
            path: format!("{number}.img").into(),
            stamp: stamp(device.size()?),
            nlink: 1,
            device: device.clone(),
        }))
    }
}

impl Rig {
    /// Runs a workload.
    pub(super) fn run(seed: u64, plan: &Plan) -> Rig {
        let mut random = Random::new(seed);
        let log = FaultLog::new();
        let journal = log.add("journal", Image::default());
        let geometry = Geometry { segment_bytes: plan.segment_bytes, count: plan.segments };
        journal.set_size(geometry.device_bytes()).unwrap();
        Journal::format_as(&*journal, geometry, UUID).unwrap();
        let fill = |number: u64| (0..IMAGE_BYTES).map(|i| (i / 512 + number) as u8 | 1).collect();
        let start: Vec<Vec<u8>> = vec![fill(1), fill(100)[..10_001].to_vec()];
        let add = |(i, bytes): (usize, &Vec<u8>)| log.add(&format!("{i}"), Image::from(&bytes[..]));
        let images: Vec<_> = start.iter().enumerate().map(add).collect();
        let mut devices = vec![journal];
        devices.extend(images);
        let mut rig = Rig::open(&log, &devices, plan.mutants, plan.streams).unwrap();
        rig.model.start = start;
        rig.begins_at = log.position();
        for _ in 0..plan.ops {
            rig.op(&mut random, plan);
            rig.work_if(&mut random);
        }
        rig
    }

    /// Recovery over the devices of a log: the journal, then the images.
    pub(super) fn recover(log: &FaultLog, devices: &[Arc<FaultDevice>]) -> Result<Rig, String> {
        Rig::open(log, devices, Mutants::default(), false)
    }

    fn open(
        log: &FaultLog,
        devices: &[Arc<FaultDevice>],
        mutants: Mutants,
        streams: bool,
    ) -> Result<Rig, String> {
        let (journal, images) = devices.split_first().unwrap();
        let recovered = Recovered::open(journal.clone(), mutants.journal);
        let recovered = recovered.map_err(|error| format!("the journal: {error}"))?;
        if let Some(corruption) = recovered.corruption() {
            return Err(format!("J9: taken for corrupt: {corruption:?}"));
        }
        let recovered_seq = recovered.last_seq() - recovered.dropped();
        let resolver = Images(images);
        let opening = Opening { mutants, by_hand: true, ..Opening::new(&resolver) };
        let store = BlockStore::with_journal(&config(streams), recovered, &opening);
        let (store, report) = store.map_err(|error| format!("recovery: {error}"))?;
        if let Some(found) = report.devices.iter().find(|found| found.fate != Fate::Resumed) {
            return Err(format!("J12: {found:?}"));
        }
        let open = |(number, image): (usize, &Arc<FaultDevice>)| {
            let size = image.size().unwrap();
            let path = || format!("{number}.img").into();
            let device = store.open(identity(number), stamp(size), image.clone(), &path).device;
            device.journal_as(record(number));
            device
        };
        let devices: Vec<_> = images.iter().enumerate().map(open).collect();
        Ok(Rig {
            log: log.clone(),
            images: images.to_vec(),
            streams: vec![0; images.len()],
            store,
            devices,
            model: Model::default(),
            recovered_seq,
            begins_at: 0,
        })
    }

    /// Everything, as applications see it.
    pub(super) fn contents(&self) -> Vec<Vec<u8>> {
        self.devices.iter().map(|device| read(device)).collect()
    }

    /// What the images themselves hold.
    pub(super) fn homes(&self) -> Vec<Vec<u8>> {
        self.images.iter().map(|image| image.image().to_vec()).collect()
    }

    /// Some steps and tasks of writeback, in random order.
    pub(super) fn work(&self, random: &mut Random, times: usize) {
        for _ in 0..times {
            self.store.run_by_hand(random.one_in(3), random.bits());
        }
    }

    fn work_if(&self, random: &mut Random) {
        if !random.one_in(3) {
            self.work(random, 1 + random.clone().below(6) as usize);
        }
        // The images as their applications know them, before and after.
        if random.one_in(8) {
            for (number, seen) in self.contents().iter().enumerate() {
                assert_eq!(*seen, self.expected(number), "image {number} while it runs");
            }
        }
    }

    /// Until nothing is dirty.
    pub(super) fn drain(&self) {
        for round in 0..10_000 {
            if !self.store.is_dirty() {
                return;
            }
            self.store.run_by_hand(true, round);
        }
        panic!("it does not become clean: {:?}", self.store.snapshot(None));
    }

    fn expected(&self, number: usize) -> Vec<u8> {
        let mut bytes = self.model.start[number].clone();
        for acked in self.model.acked.iter().filter(|acked| acked.image == number) {
            match &acked.change {
                Change::Write { offset, data } => {
                    let end = offset + data.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[*offset..end].copy_from_slice(data);
                }
                Change::Zero { offset, len } => {
                    let end = (offset + len).min(bytes.len());
                    bytes[(*offset).min(end)..end].fill(0);
                }
                Change::Truncate(size) => bytes.resize(*size, 0),
                Change::AtLeast(size) => bytes.resize(bytes.len().max(*size), 0),
            }
        }
        bytes
    }

    fn op(&mut self, random: &mut Random, plan: &Plan) {
        while self.store.would_wait(16 << 10) {
            self.store.run_by_hand(true, random.bits());
        }
        let image = random.below(self.devices.len() as u64) as usize;
        match random.below(20) {
            // Ragged ends of a stream are journaled apart: not one change.
            0..=8 if plan.streams => self.write_blocks(random, image),
            0..=8 => self.write(random, image),
            9 => self.truncate(random, image),
            10 | 11 => self.zero(random, image),
            12..=15 => self.fsync(image),
            16 if plan.switches => self.switch(random),
            16 | 17 if plan.faults => self.fail_a_sync(random, image),
            17 | 18 if plan.streams => self.stream(random, image),
            _ => self.fsync(image),
        }
    }

    /// Does a change, and notes what it was.
    fn change(&mut self, image: usize, change: Change, doing: impl FnOnce(&Device)) {
        let device = self.devices[image].clone();
        if self.store.tunables().cache_mode() != CacheMode::Writeback {
            // Nobody else would take it to its clean point.
            self.drain();
        }
        let begun = self.log.position();
        let before = device.last_seq();
        doing(&device);
        let journaled = device.last_seq() > before && device.is_dirty();
        let seq = journaled.then(|| device.last_seq());
        self.model.acked.push(Acked { image, change, seq, begun, durable: None });
    }

    fn write(&mut self, random: &mut Random, image: usize) {
        let offset = random.below(IMAGE_BYTES);
        let longest = [700, 5000, 14_000][random.below(3) as usize];
        let len = 1 + random.below(longest) as usize;
        let data = bytes(random, len);
        let change = Change::Write { offset: offset as usize, data: data.clone() };
        self.change(image, change, |device| device.write(offset, &data).unwrap());
    }

    /// Whole blocks one after the other, until they are written around the journal.
    fn stream(&mut self, random: &mut Random, image: usize) {
        for _ in 0..2 + random.below(4) {
            let at = self.streams[image];
            self.streams[image] = if at >= IMAGE_BYTES { 0 } else { at + 4096 };
            self.write_at(image, at, bytes(random, 4096));
        }
    }

    fn write_blocks(&mut self, random: &mut Random, image: usize) {
        let at = random.below(IMAGE_BYTES / 4096) * 4096;
        let len = 4096 * (1 + random.below(3)) as usize;
        self.write_at(image, at, bytes(random, len));
    }

    /// Whole blocks, which may go around the journal.
    fn write_at(&mut self, image: usize, at: u64, data: Vec<u8>) {
        let device = self.devices[image].clone();
        if self.store.tunables().cache_mode() != CacheMode::Writeback {
            self.drain();
        }
        let (begun, before, size) = (self.log.position(), device.last_seq(), device.size());
        device.write(at, &data).unwrap();
        let end = at as usize + data.len();
        let last = device.last_seq();
        let around = !device.knows_of(at, data.len() as u64);
        let journaling = self.store.tunables().cache_mode() == CacheMode::Writeback;
        if around && journaling && last > before && device.size() > size {
            let (change, seq) = (Change::AtLeast(end), Some(last));
            self.model.acked.push(Acked { image, change, seq, begun, durable: None });
        }
        let change = Change::Write { offset: at as usize, data };
        let seq = (!around).then_some(last);
        self.model.acked.push(Acked { image, change, seq, begun, durable: None });
    }

    fn truncate(&mut self, random: &mut Random, image: usize) {
        let size = random.below(IMAGE_BYTES + 5000);
        let change = Change::Truncate(size as usize);
        self.change(image, change, |device| device.set_size(size).unwrap());
    }

    fn zero(&mut self, random: &mut Random, image: usize) {
        let (offset, len) = (random.below(IMAGE_BYTES), 1 + random.below(9000));
        // Past the end it changes nothing, also if what made the end is lost later.
        let inside = len.min(self.devices[image].size().saturating_sub(offset));
        let change = Change::Zero { offset: offset as usize, len: inside as usize };
        let what = if random.one_in(2) { Range::Punch } else { Range::ZeroKeep };
        self.change(image, change, |device| device.change_range(what, offset, len).unwrap());
    }

    fn fsync(&mut self, image: usize) {
        let device = &self.devices[image];
        if device.sync(true).is_err() {
            // Only a fault that was asked for does that; nobody was promised anything.
            assert!(self.images[image].calls(Call::Sync) > 0);
            return;
        }
        let done = self.log.position();
        self.model.barriers.push(Barrier { seq: device.last_seq(), done });
        let of_image = self.model.acked.iter_mut().filter(|acked| acked.image == image);
        for acked in of_image.filter(|acked| acked.seq.is_none()) {
            acked.durable.get_or_insert(done);
        }
    }

    /// A sync of an image fails, most likely writeback's; then the backoff passes.
    fn fail_a_sync(&mut self, random: &mut Random, image: usize) {
        let fault = Fault::fail(Call::Sync, Errno::IO);
        let fault = if random.one_in(2) { fault.dropping() } else { fault };
        let before = self.images[image].calls(Call::Sync);
        self.images[image].inject(fault);
        for _ in 0..40 {
            self.work(random, 1);
            if self.images[image].calls(Call::Sync) > before {
                std::thread::sleep(std::time::Duration::from_millis(101));
                return;
            }
        }
        self.images[image].heal();
    }

    fn switch(&mut self, random: &mut Random) {
        let modes = [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::None];
        self.store.set_cache_mode(modes[random.below(3) as usize]);
    }
}

fn bytes(random: &mut Random, len: usize) -> Vec<u8> {
    let first = random.bits() as u8;
    (0..len).map(|i| first.wrapping_add((i / 512) as u8)).collect()
}

/// A device's bytes, as applications see them.
pub(super) fn read(device: &Device) -> Vec<u8> {
    let size = device.size() as usize;
    let mut out = vec![0xee; size];
    let mut at = 0;
    while at < size {
        let plan = device.plan_read(at as u64, 6000);
        let end = at + plan.len();
        if !device.try_cached(&plan, &mut out[at..end]) {
            device.read(&plan, &mut out[at..end]).unwrap();
        }
        at = end;
    }
    out
}
