//! What the options mean (layer 0): plain validated values. What was typed is `cli::args`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a write does to the device and the cache (the terms of Linux bcache).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Written to the device at once, and into the cache.
    Writethrough,
    /// Written to the device at once; cached copies are dropped.
    Writearound,
    /// Nothing is cached.
    None,
}

impl CacheMode {
    /// Every mode, in the order of `as u8`.
    pub const ALL: [CacheMode; 3] =
        [CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None];

    /// The word a user types.
    pub fn name(self) -> &'static str {
        match self {
            CacheMode::Writethrough => "writethrough",
            CacheMode::Writearound => "writearound",
            CacheMode::None => "none",
        }
    }

    /// The mode of a word.
    pub fn parse(text: &str) -> Option<CacheMode> {
        CacheMode::ALL.into_iter().find(|mode| mode.name() == text)
    }
}

/// Whether source files are opened O_DIRECT, so that data is not cached twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectIo {
    /// Where the source filesystem takes it.
    Auto,
    /// An open that cannot be direct fails.
    Always,
    /// Through the host's page cache.
    Never,
}

impl DirectIo {
    /// The word a user types.
    pub fn name(self) -> &'static str {
        match self {
            DirectIo::Auto => "auto",
            DirectIo::Always => "always",
            DirectIo::Never => "never",
        }
    }

    /// The value of a word.
    pub fn parse(text: &str) -> Option<DirectIo> {
        [DirectIo::Auto, DirectIo::Always, DirectIo::Never].into_iter().find(|d| d.name() == text)
    }
}

/// Options of the block store. Admission constants never depend on the cache's size (C1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Bytes of cached blocks (the index adds at most 3 %).
    pub cache_bytes: u64,
    /// Bytes of one block, a power of two, 512..1 MiB.
    pub block_size: u32,
    /// A single request of more bytes than this is served but not inserted.
    pub bypass: u64,
    /// A stream past this many bytes is not inserted.
    pub sequential_cutoff: u64,
    /// A block older than this is read again; zero: never.
    pub expire: Duration,
    /// Largest read-ahead window in bytes; zero: none.
    pub readahead: u64,
    /// What writes do.
    pub cache_mode: CacheMode,
    /// O_DIRECT on the source.
    pub direct_io: DirectIo,
    /// Test only: empty the whole cache whenever a request's device differs from the last one's,
    /// as FreeBSD's loader did before the unit tag.
    pub unit_flush: bool,
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            cache_bytes: 256 << 20,
            block_size: 4096,
            bypass: 256 << 10,
            sequential_cutoff: 64 << 20,
            expire: Duration::ZERO,
            readahead: 1 << 20,
            cache_mode: CacheMode::Writethrough,
            direct_io: DirectIo::Auto,
            unit_flush: false,
        }
    }
}

/// Options of the mount itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountConfig {
    /// The directory whose files are shown.
    pub source: PathBuf,
    /// Where they are shown.
    pub mountpoint: PathBuf,
    /// Nothing may be changed.
    pub read_only: bool,
    /// Other users may enter (always with default_permissions).
    pub allow_other: bool,
    /// How long the kernel may believe attributes and names.
    pub attr_timeout: Duration,
    /// First column of mount(8) and df(1).
    pub fsname: String,
    /// Request threads.
    pub threads: usize,
    /// Flags of mount(2) by their fstab names: nosuid, nodev, noexec, noatime, sync, ...
    pub flags: Vec<String>,
    /// Test only: looking this name up makes the handler panic.
    pub test_panic: Option<std::ffi::OsString>,
}

/// Options of the process.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DaemonConfig {
    /// Stay in the foreground (-f).
    pub foreground: bool,
    /// Log every request (-d).
    pub debug: bool,
    /// Log to this file instead of syslog or standard error.
    pub log: Option<PathBuf>,
    /// Record every read request here, from the start.
    pub trace: Option<PathBuf>,
    /// Where state lives; unused by the modes without a journal.
    pub state: Option<PathBuf>,
}

/// Everything a mount needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The mount.
    pub mount: MountConfig,
    /// The block store.
    pub store: StoreConfig,
    /// The process.
    pub daemon: DaemonConfig,
}

/// The options that `set` changes on a live mount. Each is read once per request.
#[derive(Debug)]
pub struct Tunables {
    bypass: AtomicU64,
    sequential_cutoff: AtomicU64,
    expire_ms: AtomicU64,
    readahead: AtomicU64,
    cache_mode: AtomicU8,
}

impl Tunables {
    /// The values a mount starts with.
    pub fn new(config: &StoreConfig) -> Tunables {
        Tunables {
            bypass: AtomicU64::new(config.bypass),
            sequential_cutoff: AtomicU64::new(config.sequential_cutoff),
            expire_ms: AtomicU64::new(config.expire.as_millis() as u64),
            readahead: AtomicU64::new(config.readahead),
            cache_mode: AtomicU8::new(config.cache_mode as u8),
        }
    }

    /// Bytes above which a single request is not inserted.
    pub fn bypass(&self) -> u64 {
        self.bypass.load(Relaxed)
    }

    /// Sets `bypass` in bytes.
    pub fn set_bypass(&self, bytes: u64) {
        self.bypass.store(bytes, Relaxed);
    }

    /// Bytes past which a stream is not inserted.
    pub fn sequential_cutoff(&self) -> u64 {
        self.sequential_cutoff.load(Relaxed)
    }

    /// Sets `sequential_cutoff` in bytes.
    pub fn set_sequential_cutoff(&self, bytes: u64) {
        self.sequential_cutoff.store(bytes, Relaxed);
    }

    /// Age in milliseconds from which a block is read again; zero: never.
    pub fn expire_ms(&self) -> u64 {
        self.expire_ms.load(Relaxed)
    }

    /// Sets `expire`.
    pub fn set_expire(&self, age: Duration) {
        self.expire_ms.store(age.as_millis() as u64, Relaxed);
    }

    /// Largest read-ahead window in bytes.
    pub fn readahead(&self) -> u64 {
        self.readahead.load(Relaxed)
    }

    /// Sets `readahead` in bytes.
    pub fn set_readahead(&self, bytes: u64) {
        self.readahead.store(bytes, Relaxed);
    }

    /// What writes do.
    pub fn cache_mode(&self) -> CacheMode {
        CacheMode::ALL
            .get(self.cache_mode.load(Relaxed) as usize)
            .copied()
            .unwrap_or(CacheMode::Writethrough)
    }

    /// Sets `cache_mode`; the store must be told too (blocks cached before `none` are dropped).
    pub fn set_cache_mode(&self, mode: CacheMode) {
        self.cache_mode.store(mode as u8, Relaxed);
    }
}
