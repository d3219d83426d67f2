//! A power cut, in memory: what was fsynced survives it, and goes to the image afterwards. The
//! store without FUSE, over two devices that know what a cut may take from them.
//!
//! `cargo run --example crash_replay`

use std::{error::Error, sync::Arc};

use bcachefs_fuse::config::{CacheMode, StoreConfig};
use bcachefs_fuse::device::Image;
use bcachefs_fuse::device::fault::{CrashStates, FaultDevice, FaultLog};
use bcachefs_fuse::error::Result;
use bcachefs_fuse::journal::{DeviceIdentity, Journal, Recovered};
use bcachefs_fuse::store::recovery::{Located, Opening, Resolver};
use bcachefs_fuse::store::{BlockStore, Device};
use bcachefs_fuse::units::{Identity, Stamp, Timestamp};

const DISK: Identity = Identity { dev: 1, ino: 1, generation: 1 };
const TIME: Timestamp = Timestamp { sec: 0, nsec: 0 };
const STAMP: Stamp = Stamp { size: 16, mtime: TIME, ctime: TIME };

/// Finds the one image that this journal can be of.
struct Disk(Arc<FaultDevice>);

impl Resolver for Disk {
    fn find(&self, _: &DeviceIdentity) -> Result<Option<Located>> {
        let (device, path) = (self.0.clone(), "disk.img".into());
        Ok(Some(Located { device, path, identity: DISK, stamp: STAMP, nlink: 1 }))
    }
}

/// What a mount does: recovery, then an open of the image.
fn open(journal: &Arc<FaultDevice>, disk: &Arc<FaultDevice>) -> Result<(BlockStore, Arc<Device>)> {
    let cache_mode = CacheMode::Writeback;
    let config = StoreConfig { cache_bytes: 4 << 20, cache_mode, ..StoreConfig::default() };
    let recovered = Recovered::open(journal.clone(), Default::default())?;
    let resolver = Disk(disk.clone());
    let (store, _) = BlockStore::with_journal(&config, recovered, &Opening::new(&resolver))?;
    let device = store.open(DISK, STAMP, disk.clone(), &|| "disk.img".into()).device;
    device.journal_as(DeviceIdentity { named: true, ..DeviceIdentity::default() });
    Ok((store, device))
}

/// Prints, and returns, what applications read and what the image holds.
fn show(when: &str, device: &Device, disk: &FaultDevice) -> Result<(String, String)> {
    let (mut seen, plan) = ([0; 16], device.plan_read(0, 16));
    if !device.try_cached(&plan, &mut seen) {
        device.read(&plan, &mut seen)?;
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (seen, home) = (text(&seen), text(&disk.image().to_vec()));
    println!("{when:20} applications read {seen}, the image has {home}");
    Ok((seen, home))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let log = FaultLog::new();
    let journal = log.add("journal", Image::default());
    let disk = log.add("disk", Image::from(&[b'.'; 16][..]));
    Journal::format(&*journal, 8 << 20, *b"any sixteen byte")?;
    let (store, device) = open(&journal, &disk)?;
    device.write(0, b"fsynced")?;
    device.sync(true)?;
    device.write(8, b"acked")?;
    show("before:", &device, &disk)?;
    drop((store, device)); // It was never started: no thread writes anything home.

    // The worst cut: nothing is left of what no fdatasync covered.
    let worst = CrashStates::new(&log, 1).only(log.position()).next().ok_or("no state")?;
    let (_, disks) = worst.power_on();
    let (journal, disk) = (&disks[0], &disks[1]);
    let (store, device) = open(journal, disk)?;
    let (seen, home) = show("after a power cut:", &device, disk)?;
    assert_eq!((&*seen, &*home), ("fsynced.........", "................"));

    store.start()?;
    store.flush(None, &mut |_| true)?;
    let (_, home) = show("after a flush:", &device, disk)?;
    assert_eq!(home, seen);
    store.stop()?;
    Ok(())
}
