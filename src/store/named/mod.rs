//! The invariants of STORE 2 by name, on the whole store over devices that fail on demand. The
//! power-cut campaigns are in `crash`; here each rule has its own small story.
#![cfg(test)]

mod home;
mod mutants;
mod order;
mod overlay;
mod refused;
mod replay;
mod room;
mod threads;

use std::sync::Arc;

use parking_lot::Mutex;

use super::mark::OwnerMark;
use super::recovery::{Located, Opening, Report, Resolver};
use super::{BlockStore, Device, Stamp};
use crate::config::{CacheMode, StoreConfig, WritebackConfig};
use crate::device::fault::{FaultDevice, FaultLog, Random};
use crate::device::{BlockDevice, Image};
use crate::error::Result as Outcome;
use crate::journal::{DeviceIdentity, Geometry, Journal, Mutants, Recovered};
use crate::units::{Identity, Timestamp};

const BLOCK: u64 = 4096;

/// A small journal: eight segments of 24 KiB.
const SMALL: Geometry = Geometry { segment_bytes: 24 << 10, count: 8 };

/// A file of the source.
#[derive(Clone)]
struct File {
    device: Arc<dyn BlockDevice>,
    ctime: i64,
    nlink: u32,
}

/// Owner marks that were set, in order.
#[derive(Default)]
struct Mark(Mutex<Vec<&'static str>>);

impl OwnerMark for Mark {
    fn dirty(&self) -> Outcome<()> {
        self.0.lock().push("dirty");
        Ok(())
    }

    fn clean(&self) -> Outcome<()> {
        self.0.lock().push("clean");
        Ok(())
    }
}

/// Files by number; None: it is not there.
struct Source(Vec<Option<File>>);

impl Resolver for Source {
    fn find(&self, record: &DeviceIdentity) -> Outcome<Option<Located>> {
        let number = record.inode as usize - 10;
        let Some(file) = self.0.get(number).cloned().flatten() else { return Ok(None) };
        Ok(Some(Located {
            identity: identity(number),
            path: format!("{number}.img").into(),
            stamp: stamp(file.device.size()?, file.ctime),
            nlink: file.nlink,
            device: file.device,
        }))
    }
}

fn identity(number: usize) -> Identity {
    Identity { dev: 1, ino: 10 + number as u64, generation: 1 }
}

fn record(number: usize) -> DeviceIdentity {
    let path = format!("{number}.img").into_bytes();
    DeviceIdentity { named: true, inode: 10 + number as u64, path, ..DeviceIdentity::default() }
}

fn stamp(size: u64, ctime: i64) -> Stamp {
    let time = |sec| Timestamp { sec, nsec: 0 };
    Stamp { size, mtime: time(1), ctime: time(ctime) }
}

fn config() -> StoreConfig {
    StoreConfig {
        cache_bytes: 256 << 10,
        bypass: 64 << 10,
        readahead: 0,
        cache_mode: CacheMode::Writeback,
        writeback: WritebackConfig {
            percent: 0,
            delay: std::time::Duration::ZERO,
            journal_delay: std::time::Duration::from_millis(5),
            ..WritebackConfig::default()
        },
        ..StoreConfig::default()
    }
}

/// How a store is opened.
struct Setup {
    config: StoreConfig,
    by_hand: bool,
    read_only: bool,
    mark: Option<Arc<Mark>>,
    mutants: crate::store::Mutants,
}

impl Default for Setup {
    fn default() -> Setup {
        let mutants = crate::store::Mutants::default();
        Setup { config: config(), by_hand: true, read_only: false, mark: None, mutants }
    }
}

/// A store over a journal and some files.
struct Kit {
    log: FaultLog,
    journal: Arc<FaultDevice>,
    files: Vec<Option<File>>,
    /// Those that `new` made.
    images: Vec<Arc<FaultDevice>>,
    store: BlockStore,
    devices: Vec<Option<Arc<Device>>>,
    report: Report,
}

impl Kit {
    /// New files of these contents, and an empty journal.
    fn new(geometry: Geometry, contents: &[&[u8]], setup: &Setup) -> Kit {
        let log = FaultLog::new();
        let journal = log.add("journal", Image::default());
        journal.set_size(geometry.device_bytes()).unwrap();
        Journal::format_as(&*journal, geometry, *b"named test store").unwrap();
        let named = contents.iter().enumerate();
        let images = named.map(|(i, bytes)| log.add(&format!("{i}"), Image::from(*bytes)));
        let images: Vec<_> = images.collect();
        let files = images.iter().cloned().map(file).collect();
        Kit { images, ..Kit::open(log, journal, files, setup) }
    }

    fn small(contents: &[&[u8]]) -> Kit {
        Kit::new(SMALL, contents, &Setup::default())
    }

    fn open(
        log: FaultLog,
        journal: Arc<FaultDevice>,
        files: Vec<Option<File>>,
        setup: &Setup,
    ) -> Kit {
        let source = Source(files.clone());
        let recovered = Recovered::open(journal.clone(), setup.mutants.journal).unwrap();
        let mark = setup.mark.clone().map(|mark| mark as Arc<dyn OwnerMark>);
        let opening = Opening {
            by_hand: setup.by_hand,
            read_only: setup.read_only,
            mark,
            mutants: setup.mutants,
            ..Opening::new(&source)
        };
        let (store, report) = BlockStore::with_journal(&setup.config, recovered, &opening).unwrap();
        let mut kit =
            Kit { log, journal, files, images: Vec::new(), store, devices: Vec::new(), report };
        for number in 0..kit.files.len() {
            let device = kit.open_file(number);
            kit.devices.push(device);
        }
        if !setup.by_hand {
            kit.store.start().unwrap();
        }
        kit
    }

    fn open_file(&self, number: usize) -> Option<Arc<Device>> {
        let file = self.files[number].as_ref()?;
        let stamp = stamp(file.device.size().unwrap(), file.ctime);
        let path = || format!("{number}.img").into();
        let device = self.store.open(identity(number), stamp, file.device.clone(), &path).device;
        device.journal_as(record(number));
        Some(device)
    }

    fn device(&self, number: usize) -> &Arc<Device> {
        self.devices[number].as_ref().unwrap()
    }

    /// The same after a kill -9: a new store over what reads see of the devices now.
    fn killed(&self, setup: &Setup) -> Kit {
        let log = FaultLog::new();
        let journal = log.add("journal", self.journal.image());
        let copies = self.images.iter().map(|image| log.add("image", image.image()));
        let images: Vec<_> = copies.collect();
        let files = images.iter().cloned().map(file).collect();
        Kit { images, ..Kit::open(log, journal, files, setup) }
    }

    fn write(&self, number: usize, offset: u64, bytes: &[u8]) {
        while self.store.would_wait(bytes.len() as u64) {
            self.store.run_by_hand(true, 0);
        }
        self.device(number).write(offset, bytes).unwrap();
    }

    fn read(&self, number: usize) -> Vec<u8> {
        read(self.device(number)).unwrap()
    }

    fn work(&self, random: &mut Random, times: u64) {
        for _ in 0..times {
            self.store.run_by_hand(random.one_in(3), random.bits());
        }
    }

    /// Until nothing is dirty.
    fn drain(&self) {
        for round in 0..11_000 {
            if !self.store.is_dirty() {
                return;
            }
            self.store.run_by_hand(true, round);
            if round > 10_000 {
                // After an error it waits: that is real time.
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        panic!("it does not become clean: {:?}", self.store.snapshot(None));
    }
}

fn file(device: Arc<FaultDevice>) -> Option<File> {
    Some(File { device, ctime: 1, nlink: 1 })
}

/// A device's bytes, as applications see them.
fn read(device: &Device) -> Outcome<Vec<u8>> {
    let plan = device.plan_read(0, device.size() as usize);
    let mut out = vec![0xee; plan.len()];
    if !plan.is_empty() && !device.try_cached(&plan, &mut out) {
        device.read(&plan, &mut out)?;
    }
    Ok(out)
}

/// Bytes that tell where they are and when they were written.
fn bytes(random: &mut Random, len: usize) -> Vec<u8> {
    let first = random.bits() as u8;
    (0..len).map(|i| first.wrapping_add((i / 512) as u8)).collect()
}

/// The same change of plain bytes.
fn put(model: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (from, to) = (offset as usize, offset as usize + bytes.len());
    model.resize(model.len().max(to), 0);
    model[from..to].copy_from_slice(bytes);
}
