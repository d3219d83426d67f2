//! The journal of the released format, kept as text in `fixtures/journal-v1.txt`: what it was made
//! from, what it must read as, and how the text becomes bytes again.
//!
//! The text is NEVER made anew. A journal that a released version left on somebody's disk must be
//! read by every later one; a later format gets a fixture of its own beside this one, made by
//! `cargo run -p fuse-tests --bin journal_fixture NEW-FILE`. So nothing here may change either,
//! but by adding.
//!
//! The text: `size N`, then `OFFSET: HEX` for each 32-byte row that is not zero; `#` begins a
//! comment.

use std::fmt::Write;
use std::sync::Arc;

use bcachefs_fuse::config::{CacheMode, StoreConfig, WritebackConfig};
use bcachefs_fuse::device::{BlockDevice, Image, MemoryDevice, Range};
use bcachefs_fuse::error::{Error, Result};
use bcachefs_fuse::journal::{DeviceIdentity, Journal, Recovered};
use bcachefs_fuse::store::recovery::{Located, Opening, Report, Resolver};
use bcachefs_fuse::store::{BlockStore, Device};
use bcachefs_fuse::units::{Identity, Stamp, Timestamp};

/// The journal's name.
pub const UUID: [u8; 16] = *b"fixture journal1";
/// mtime and ctime of every image, at all times.
pub const TIME: Timestamp = Timestamp { sec: 1_600_000_000, nsec: 123_456_789 };
/// The mtime that a.img was given while it was dirty.
pub const GIVEN: Timestamp = Timestamp { sec: 1_000_000_000, nsec: 5 };
/// The images. c.img has lost its name while it was dirty.
pub const NAMES: [&str; 4] = ["a.img", "b.img", "c.img", "d.img"];

const ROW: usize = 32;
const BLOCK: usize = 4096;
/// Longer than a segment and than what one record holds.
const LONG: usize = 600 << 10;

/// The text of a journal.
pub fn render(image: &Image) -> String {
    let mut text = format!("size {}\n", image.size());
    for (row, bytes) in image.to_vec().chunks(ROW).enumerate() {
        if bytes.iter().any(|byte| *byte != 0) {
            let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            });
            let _ = writeln!(text, "{}: {hex}", row * ROW);
        }
    }
    text
}

/// The bytes of a text; None if it makes no sense.
pub fn parse(text: &str) -> Option<Image> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut image = Image::zeros(lines.next()?.strip_prefix("size ")?.parse().ok()?);
    for line in lines {
        let (offset, hex) = line.split_once(": ")?;
        let digits = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(digits).collect::<Option<_>>()?;
        image.write(&bytes, offset.parse().ok()?);
    }
    Some(image)
}

/// An image: memory that has times, always the same ones.
#[derive(Debug)]
pub struct Home(MemoryDevice);

impl Home {
    /// With these bytes.
    pub fn new(bytes: &[u8]) -> Arc<Home> {
        Arc::new(Home(MemoryDevice::new(Image::from(bytes))))
    }

    /// What it holds.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.image().to_vec()
    }

    fn times(&self) -> Result<Stamp> {
        Ok(Stamp { size: self.0.size()?, mtime: TIME, ctime: TIME })
    }
}

impl BlockDevice for Home {
    fn prepare(&self, write: bool) -> Result<()> {
        self.0.prepare(write)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.0.write_at(data, offset)
    }

    fn size(&self) -> Result<u64> {
        self.0.size()
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        self.0.set_size(bytes)
    }

    fn change_range(&self, what: Range, offset: u64, len: u64) -> Result<()> {
        self.0.change_range(what, offset, len)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        self.0.sync(data_only)
    }

    fn seek(&self, offset: u64, hole: bool) -> Result<u64> {
        self.0.seek(offset, hole)
    }

    fn stamp(&self) -> Result<Option<Stamp>> {
        self.times().map(Some)
    }
}

/// The images of a source, in the order of `NAMES`; None has no name any more.
pub struct Homes(pub Vec<Option<Arc<Home>>>);

fn identity(number: usize) -> Identity {
    Identity { dev: 1, ino: 11 + number as u64, generation: 3 }
}

impl Resolver for Homes {
    fn find(&self, record: &DeviceIdentity) -> Result<Option<Located>> {
        let number = (record.inode as usize).wrapping_sub(11);
        let Some(home) = self.0.get(number).and_then(Option::as_ref) else { return Ok(None) };
        Ok(Some(Located {
            device: home.clone(),
            identity: identity(number),
            path: NAMES[number].into(),
            stamp: home.times()?,
            nlink: 1,
        }))
    }
}

/// A store over a journal and these images, and what it found.
pub fn mount(journal: Arc<MemoryDevice>, homes: &Homes) -> Result<(BlockStore, Report)> {
    let config = StoreConfig {
        cache_bytes: 4 << 20,
        sequential_cutoff: 4 * BLOCK as u64,
        cache_mode: CacheMode::Writeback,
        // What is not flushed stays in the journal.
        writeback: WritebackConfig { running: false, ..WritebackConfig::default() },
        ..StoreConfig::default()
    };
    let recovered = Recovered::open(journal, Default::default())?;
    BlockStore::with_journal(&config, recovered, &Opening::new(homes))
}

/// Opens an image as a mount does.
pub fn open(store: &BlockStore, homes: &Homes, number: usize) -> Result<Arc<Device>> {
    let gone = || Error::new(bcachefs_fuse::error::Kind::NotFound, "open", NAMES[number]);
    let home = homes.0[number].clone().ok_or_else(gone)?;
    let stamp = home.times()?;
    let device = store.open(identity(number), stamp, home, &|| NAMES[number].into()).device;
    if !device.has_record() {
        device.journal_as(DeviceIdentity {
            // d.img is new: its name becomes durable with its first fsync.
            named: number != 3,
            filesystem: *b"of the fixture..",
            inode: identity(number).ino,
            birth: TIME,
            handle_type: 1,
            handle: vec![1, 2, 3, number as u8],
            path: NAMES[number].into(),
        });
    }
    Ok(device)
}

/// All bytes, as applications read them.
pub fn read(device: &Device) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; device.size() as usize];
    for (at, piece) in bytes.chunks_mut(3 * BLOCK).enumerate() {
        let plan = device.plan_read((at * 3 * BLOCK) as u64, piece.len());
        if !device.try_cached(&plan, piece) {
            device.read(&plan, piece)?;
        }
    }
    Ok(bytes)
}

/// Zeros with a word at either end.
fn words(word: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..word.len()].copy_from_slice(word.as_bytes());
    bytes[len - word.len()..].copy_from_slice(word.as_bytes());
    bytes
}

/// The images before the first mount.
fn before() -> Vec<Vec<u8>> {
    vec![vec![b'a'; 32 << 10], vec![b'b'; 64 << 10], vec![b'c'; BLOCK], Vec::new()]
}

/// The images themselves at the end of the last mount: of all that was written only what was
/// flushed, and what went around the journal.
pub fn homes() -> Homes {
    let mut images = before();
    images[1][40_000..40_005].copy_from_slice(b"clean");
    images[1][20_480..20_487].copy_from_slice(b"revoked");
    (4..8).for_each(|at| images[1][at * BLOCK..(at + 1) * BLOCK].copy_from_slice(&stream(at)));
    let named = |(number, bytes): (usize, &Vec<u8>)| (number != 2).then(|| Home::new(bytes));
    Homes(images.iter().enumerate().map(named).collect())
}

fn stream(at: usize) -> Vec<u8> {
    words(&format!("stream{at}"), BLOCK)
}

/// What applications read of an image.
pub fn expected(number: usize) -> Vec<u8> {
    let mut bytes = before().swap_remove(number);
    match number {
        0 => {
            bytes[100..105].copy_from_slice(b"first");
            bytes[BLOCK..2 * BLOCK].copy_from_slice(&words("block", BLOCK));
            bytes.truncate(20_000);
            bytes[1000..1500].fill(0);
            bytes.truncate(19_990);
            bytes.extend_from_slice(b"the second generation");
        }
        1 => {
            bytes[40_000..40_005].copy_from_slice(b"clean");
            (0..8).for_each(|at| bytes[at * BLOCK..(at + 1) * BLOCK].copy_from_slice(&stream(at)));
        }
        2 => bytes[..4].copy_from_slice(b"gone"),
        _ => {
            bytes = words("long", LONG);
            bytes[1000..1005].copy_from_slice(b"named");
        }
    }
    bytes
}

/// Makes such a journal: two mounts, the first one killed, the second one stopped while dirty.
pub fn make() -> Result<Image> {
    let journal = Arc::new(MemoryDevice::new(Image::default()));
    Journal::format(&*journal, 8 << 20, UUID)?;
    let mut homes = Homes(before().iter().map(|bytes| Some(Home::new(bytes))).collect());
    let (store, _) = mount(journal.clone(), &homes)?;
    store.start()?;
    first(&store, &homes)?;
    // kill -9: what comes after this is on another copy.
    let killed = Arc::new(MemoryDevice::new(journal.image()));
    store.stop()?;
    homes.0[2] = None;
    let (store, _) = mount(killed.clone(), &homes)?;
    second(&store, &homes)?;
    store.stop()?;
    Ok(killed.image())
}

fn first(store: &BlockStore, homes: &Homes) -> Result<()> {
    let [a, b, c] = [open(store, homes, 0)?, open(store, homes, 1)?, open(store, homes, 2)?];
    a.write(100, b"first")?;
    a.write(BLOCK as u64, &words("block", BLOCK))?;
    a.set_size(20_000)?;
    a.change_range(Range::Punch, 1000, 500)?;
    a.set_mtime(GIVEN)?;
    a.sync(true)?;
    b.write(40_000, b"clean")?;
    b.write(20_480, b"revoked")?;
    b.flush()?;
    // The last four go around the journal, over what is clean but still in it.
    (0..8).try_for_each(|at| b.write((at * BLOCK) as u64, &stream(at)))?;
    b.sync(true)?;
    c.write(0, b"gone")?;
    c.note_unlink(NAMES[2].as_ref())?;
    c.sync(true)
}

fn second(store: &BlockStore, homes: &Homes) -> Result<()> {
    let [a, d] = [open(store, homes, 0)?, open(store, homes, 3)?];
    store.tunables().set_sequential_cutoff(1 << 30);
    a.write(19_990, b"the second generation")?;
    d.write(0, &words("long", LONG))?;
    d.sync(true)?;
    // The journal hears that the name is durable.
    d.write(1000, b"named")?;
    a.sync(true)
}
