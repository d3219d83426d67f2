//! What the options mean (layer 0): plain validated values. What was typed is `cli::args`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a write does to the device and the cache (the terms of Linux bcache).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Written to the journal, and to the device later; needs a store with a journal.
    Writeback,
    /// Written to the device at once, and into the cache.
    Writethrough,
    /// Written to the device at once; cached copies are dropped.
    Writearound,
    /// Nothing is cached.
    None,
}

impl CacheMode {
    /// Every mode, in the order of `as u8`.
    pub const ALL: [CacheMode; 4] =
        [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None];

    /// The word a user types.
    pub const fn name(self) -> &'static str {
        match self {
            CacheMode::Writeback => "writeback",
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

/// In which order dirty extents go home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WritebackOrder {
    /// Any: the host's elevator sorts.
    Unordered,
    /// By offset, each waited for in turn: Linux bcache before the patch of 2025, as a measured
    /// baseline.
    Lba,
}

impl WritebackOrder {
    /// The word a user types.
    pub fn name(self) -> &'static str {
        match self {
            WritebackOrder::Unordered => "unordered",
            WritebackOrder::Lba => "lba",
        }
    }

    /// The value of a word.
    pub fn parse(text: &str) -> Option<WritebackOrder> {
        match text {
            "unordered" => Some(WritebackOrder::Unordered),
            "lba" => Some(WritebackOrder::Lba),
            _ => None,
        }
    }
}

/// Options of writeback; names and meaning as in Linux bcache where it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritebackConfig {
    /// Bytes of the journal when it is made (at least 8M).
    pub journal_bytes: u64,
    /// An append is durable after this long even without fsync.
    pub journal_delay: Duration,
    /// Part of the journal, in percent, that may be dirty while the frontend is busy (0: no rate
    /// control, as fast as passes go).
    pub percent: u64,
    /// How long the first dirty bytes of a busy device wait.
    pub delay: Duration,
    /// Whether anything is written home; overruled when the journal is more than 70 % full.
    pub running: bool,
    /// The order of home writes.
    pub order: WritebackOrder,
    /// How long an unmount may flush.
    pub flush_timeout: Duration,
    /// Test only: plain pwrite threads even where io_uring works.
    pub no_uring: bool,
}

impl Default for WritebackConfig {
    fn default() -> WritebackConfig {
        WritebackConfig {
            journal_bytes: 256 << 20,
            journal_delay: Duration::from_millis(100),
            percent: 10,
            delay: Duration::from_secs(1),
            running: true,
            order: WritebackOrder::Unordered,
            flush_timeout: Duration::from_secs(60),
            no_uring: false,
        }
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
    /// `cache_mode` was typed: where it is impossible the mount is refused, not changed.
    pub mode_typed: bool,
    /// O_DIRECT on the source.
    pub direct_io: DirectIo,
    /// Writeback.
    pub writeback: WritebackConfig,
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
            mode_typed: false,
            direct_io: DirectIo::Auto,
            writeback: WritebackConfig::default(),
            unit_flush: false,
        }
    }
}

/// Options of the mount itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountConfig {
    /// The directory whose files are shown.
    pub source: PathBuf,
    /// The directory that keeps every change of an overlay; SOURCE is then never touched.
    pub upper: Option<PathBuf>,
    /// Further lowers of an overlay, below SOURCE.
    pub lowers: Vec<PathBuf>,
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
    writeback_percent: AtomicU64,
    writeback_delay_ms: AtomicU64,
    writeback_running: AtomicBool,
    journal_delay_ms: AtomicU64,
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
            writeback_percent: AtomicU64::new(config.writeback.percent),
            writeback_delay_ms: AtomicU64::new(config.writeback.delay.as_millis() as u64),
            writeback_running: AtomicBool::new(config.writeback.running),
            journal_delay_ms: AtomicU64::new(config.writeback.journal_delay.as_millis() as u64),
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

    /// Part of the journal, in percent, that may be dirty while the frontend is busy.
    pub fn writeback_percent(&self) -> u64 {
        self.writeback_percent.load(Relaxed)
    }

    /// Sets `writeback_percent`.
    pub fn set_writeback_percent(&self, percent: u64) {
        self.writeback_percent.store(percent, Relaxed);
    }

    /// Milliseconds the first dirty bytes of a busy device wait.
    pub fn writeback_delay_ms(&self) -> u64 {
        self.writeback_delay_ms.load(Relaxed)
    }

    /// Sets `writeback_delay`.
    pub fn set_writeback_delay(&self, delay: Duration) {
        self.writeback_delay_ms.store(delay.as_millis() as u64, Relaxed);
    }

    /// Whether anything is written home.
    pub fn writeback_running(&self) -> bool {
        self.writeback_running.load(Relaxed)
    }

    /// Sets `writeback_running`.
    pub fn set_writeback_running(&self, running: bool) {
        self.writeback_running.store(running, Relaxed);
    }

    /// Milliseconds after which an append is durable without fsync.
    pub fn journal_delay_ms(&self) -> u64 {
        self.journal_delay_ms.load(Relaxed)
    }

    /// Sets `journal_delay`.
    pub fn set_journal_delay(&self, delay: Duration) {
        self.journal_delay_ms.store(delay.as_millis() as u64, Relaxed);
    }
}
