//! A device in memory that can lose what was not synced.
#![cfg(test)]

use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{BlockDevice, Range};
use crate::error::{Error, Kind, Result};

/// A seeded generator (xorshift).
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

    pub fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }
}

type Hook = Arc<dyn Fn() -> Result<()> + Send + Sync>;

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<(u64, Vec<u8>)>,
    syncs: u64,
    /// Writes and syncs that still succeed.
    budget: Option<u64>,
    hook: Option<Hook>,
    panics: bool,
}

#[derive(Default)]
pub struct Memory(Mutex<State>);

/// What a crash does to the writes that were not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// kill -9: nothing is lost.
    KeepAll,
    LoseAll,
    /// Each write is kept or lost.
    Some,
    /// Each 512-byte sector of each write is kept or lost.
    Torn,
}

impl Memory {
    pub fn new(size: u64) -> Arc<Memory> {
        Memory::of(vec![0; size as usize])
    }

    fn of(bytes: Vec<u8>) -> Arc<Memory> {
        let durable = bytes.clone();
        Arc::new(Memory(Mutex::new(State { bytes, durable, ..State::default() })))
    }

    pub fn syncs(&self) -> u64 {
        self.0.lock().syncs
    }

    /// Fails every write and sync after this many.
    pub fn fail_after(&self, budget: u64) {
        self.0.lock().budget = Some(budget);
    }

    /// Panics at the next write.
    pub fn panic_at_write(&self) {
        self.0.lock().panics = true;
    }

    /// Runs inside every sync, without a lock.
    pub fn on_sync(&self, hook: impl Fn() -> Result<()> + Send + Sync + 'static) {
        self.0.lock().hook = Some(Arc::new(hook));
    }

    /// Harms a byte, on the medium too.
    pub fn flip(&self, at: u64) {
        let mut state = self.0.lock();
        state.bytes[at as usize] ^= 0x40;
        state.durable[at as usize] ^= 0x40;
    }

    pub fn unsynced(&self) -> Vec<u64> {
        self.0.lock().unsynced.iter().map(|(at, _)| *at).collect()
    }

    /// What a power cut leaves if `keep` decides on each write not synced.
    pub fn cut(&self, mut keep: impl FnMut(usize) -> bool) -> Arc<Memory> {
        let state = self.0.lock();
        let mut bytes = state.durable.clone();
        for (index, (at, data)) in state.unsynced.iter().enumerate() {
            if keep(index) {
                bytes[*at as usize..*at as usize + data.len()].copy_from_slice(data);
            }
        }
        Memory::of(bytes)
    }

    pub fn crash(&self, how: Crash, random: &mut Random) -> Arc<Memory> {
        match how {
            Crash::KeepAll => self.killed(),
            Crash::LoseAll => self.cut(|_| false),
            Crash::Some => self.cut(|_| random.one_in(2)),
            Crash::Torn => self.torn(random),
        }
    }

    /// The page cache survives: what is not synced stays not synced.
    fn killed(&self) -> Arc<Memory> {
        let state = self.0.lock();
        Arc::new(Memory(Mutex::new(State {
            bytes: state.bytes.clone(),
            durable: state.durable.clone(),
            unsynced: state.unsynced.clone(),
            ..State::default()
        })))
    }

    fn torn(&self, random: &mut Random) -> Arc<Memory> {
        let state = self.0.lock();
        let mut bytes = state.durable.clone();
        for (at, data) in &state.unsynced {
            let whole = random.one_in(2);
            let end = at + data.len() as u64;
            let mut from = *at;
            while from < end {
                let to = ((from / 512 + 1) * 512).min(end);
                if whole || random.one_in(2) {
                    let part = &data[(from - at) as usize..(to - at) as usize];
                    bytes[from as usize..to as usize].copy_from_slice(part);
                }
                from = to;
            }
        }
        Memory::of(bytes)
    }
}

fn spend(state: &mut State) -> Result<()> {
    match &mut state.budget {
        Some(0) => Err(Error::new(Kind::Io, "test device", "budget")),
        Some(budget) => {
            *budget -= 1;
            Ok(())
        }
        None => Ok(()),
    }
}

impl BlockDevice for Memory {
    fn prepare(&self, _write: bool) -> Result<()> {
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let state = self.0.lock();
        let rest = state.bytes.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(buf.len());
        buf[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut state = self.0.lock();
        let from = offset as usize;
        assert!(from + data.len() <= state.bytes.len(), "write past the journal");
        assert!(!state.panics, "a test's own panic");
        let allowed = spend(&mut state);
        // A failed write may have come through: what a crash in the middle leaves.
        state.bytes[from..from + data.len()].copy_from_slice(data);
        state.unsynced.push((offset, data.to_vec()));
        allowed
    }

    fn size(&self) -> Result<u64> {
        Ok(self.0.lock().bytes.len() as u64)
    }

    fn set_size(&self, bytes: u64) -> Result<()> {
        let mut state = self.0.lock();
        state.bytes.resize(bytes as usize, 0);
        state.durable.resize(bytes as usize, 0);
        Ok(())
    }

    fn change_range(&self, _what: Range, _offset: u64, _len: u64) -> Result<()> {
        Err(Error::new(Kind::NotSupported, "fallocate", ""))
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        let (covered, hook) = {
            let mut state = self.0.lock();
            spend(&mut state)?;
            state.syncs += 1;
            (state.unsynced.len(), state.hook.clone())
        };
        if let Some(hook) = hook {
            hook()?;
        }
        let mut state = self.0.lock();
        let covered = covered.min(state.unsynced.len());
        let synced: Vec<_> = state.unsynced.drain(..covered).collect();
        for (at, data) in synced {
            state.durable[at as usize..at as usize + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }

    fn seek(&self, _offset: u64, _hole: bool) -> Result<u64> {
        Err(Error::new(Kind::NotSupported, "seek", ""))
    }
}
