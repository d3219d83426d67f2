//! From what was typed to what it means (layer 9): `Words` -> `Config`. Wrong values are errors,
//! never repaired. Reads the machine only through [`Machine`].

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::failure::{Failure, Outcome};
use crate::cli::memory;
use crate::cli::options::{self, OptionSpec, bad_value};
use crate::cli::words::Words;
use crate::config::{
    CacheMode, Config, DaemonConfig, DirectIo, MountConfig, StoreConfig, WritebackConfig,
    WritebackOrder,
};
use crate::control::live;
use crate::journal::Geometry;
use crate::units::format_size;

/// The mode of a mount that did not say one; writethrough where there can be no journal.
pub const DEFAULT_MODE: CacheMode = CacheMode::Writeback;

/// What defaults depend on.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// The effective user is root.
    pub root: bool,
    /// Memory this process may use, in bytes.
    pub memory: u64,
}

impl Machine {
    /// This one.
    pub fn this() -> Machine {
        Machine { root: rustix::process::geteuid().is_root(), memory: memory::available() }
    }
}

/// The configuration of `mount SOURCE MOUNTPOINT` with the options of `words`.
pub fn config(
    source: &Path,
    mountpoint: &Path,
    words: &Words,
    foreground: bool,
    single_thread: bool,
    machine: Machine,
) -> Outcome<Config> {
    let typed = source;
    let source = absolute(typed)?;
    let mut config = Config {
        mount: MountConfig {
            fsname: source.to_string_lossy().into_owned(),
            source,
            upper: None,
            lowers: Vec::new(),
            mountpoint: absolute(mountpoint)?,
            read_only: false,
            allow_other: machine.root,
            attr_timeout: Duration::from_secs(1),
            threads: 16,
            flags: words.flags.iter().map(|flag| flag.to_string()).collect(),
            test_panic: None,
        },
        store: StoreConfig {
            cache_bytes: memory::default_cache(machine.memory),
            cache_mode: DEFAULT_MODE,
            ..StoreConfig::default()
        },
        daemon: DaemonConfig { foreground, ..DaemonConfig::default() },
    };
    for (option, value) in &words.ours {
        apply(&mut config, option, value.as_deref())?;
    }
    if single_thread {
        config.mount.threads = 1;
    }
    if config.mount.upper.is_some() {
        let mut lowers = split_lowers(typed).map(|path| absolute(&path));
        config.mount.source = lowers.next().unwrap_or_else(|| absolute(typed))?;
        config.mount.lowers = lowers.collect::<Outcome<_>>()?;
    }
    config.daemon.foreground |= config.daemon.debug;
    check(&config)?;
    Ok(config)
}

fn apply(config: &mut Config, option: &OptionSpec, value: Option<&OsStr>) -> Outcome<()> {
    let name = option.name;
    let (mount, store, daemon) = (&mut config.mount, &mut config.store, &mut config.daemon);
    match name {
        "ro" => mount.read_only = options::flag(name, value)?,
        "allow_other" => mount.allow_other = options::flag(name, value)?,
        "debug" => daemon.debug = options::flag(name, value)?,
        "unit_flush" => store.unit_flush = options::flag(name, value)?,
        "writeback_running" => store.writeback.running = options::flag(name, value)?,
        "no_uring" => store.writeback.no_uring = options::flag(name, value)?,
        _ => {
            let value = needed(option, value)?;
            if apply_writeback(&mut store.writeback, name, value)? {
                return Ok(());
            }
            match name {
                "cache" => store.cache_bytes = options::size(name, value)?,
                "block_size" => store.block_size = block_size(value)?,
                "bypass" => store.bypass = options::size(name, value)?,
                "sequential_cutoff" => store.sequential_cutoff = options::size(name, value)?,
                "expire" => store.expire = options::duration(name, value)?,
                "readahead" => store.readahead = options::size(name, value)?,
                "cache_mode" => {
                    store.cache_mode = cache_mode(value)?;
                    store.mode_typed = true;
                }
                "direct_io" => store.direct_io = direct_io(value)?,
                "threads" => mount.threads = options::count(name, value, 1, 256)?,
                "attr_timeout" => mount.attr_timeout = options::duration(name, value)?,
                "fsname" => mount.fsname = value.to_string_lossy().into_owned(),
                "test_panic" => mount.test_panic = Some(value.to_os_string()),
                "upper" => mount.upper = Some(absolute(Path::new(value))?),
                "state" => daemon.state = Some(absolute(Path::new(value))?),
                "log" => daemon.log = Some(absolute(Path::new(value))?),
                "trace" => daemon.trace = Some(absolute(Path::new(value))?),
                _ => return Err(Failure::usage("unknown option", name, "see --help")),
            }
        }
    }
    Ok(())
}

/// Whether it was an option of writeback.
fn apply_writeback(writeback: &mut WritebackConfig, name: &str, value: &OsStr) -> Outcome<bool> {
    match name {
        "journal_size" => writeback.journal_bytes = journal_size(value)?,
        "journal_delay" => {
            let text = value.to_str().unwrap_or_default();
            writeback.journal_delay =
                live::parse_journal_delay(text).map_err(|wanted| bad_value(name, value, wanted))?;
        }
        "journal_delay_ms" => {
            let ms = options::count(name, value, 1, 60_000)?;
            writeback.journal_delay = Duration::from_millis(ms as u64);
        }
        "writeback_percent" => {
            writeback.percent = options::count(name, value, 0, 100)? as u64;
        }
        "writeback_delay" => writeback.delay = options::duration(name, value)?,
        "writeback_order" => {
            let order = value.to_str().and_then(WritebackOrder::parse);
            let order = order.ok_or_else(|| bad_value(name, value, "give unordered or lba"))?;
            writeback.order = order;
        }
        "flush_timeout" => writeback.flush_timeout = options::duration(name, value)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn journal_size(value: &OsStr) -> Outcome<u64> {
    let bytes = options::size("journal_size", value)?;
    match Geometry::for_size(bytes) {
        Ok(_) => Ok(bytes),
        Err(_) => Err(bad_value("journal_size", value, "8M is the least")),
    }
}

fn needed<'a>(option: &OptionSpec, value: Option<&'a OsStr>) -> Outcome<&'a OsStr> {
    value.filter(|value| !value.is_empty()).ok_or_else(|| {
        let form = format!("give {}={}", option.name, option.kind.placeholder());
        Failure::usage("missing value", option.name, form)
    })
}

fn block_size(value: &OsStr) -> Outcome<u32> {
    let bytes = options::size("block_size", value)?;
    match u32::try_from(bytes) {
        Ok(bytes) if bytes.is_power_of_two() && (512..=1 << 20).contains(&bytes) => Ok(bytes),
        _ => Err(bad_value("block_size", value, "give a power of two from 512 to 1M")),
    }
}

/// The mode a user typed.
pub fn cache_mode(value: &OsStr) -> Outcome<CacheMode> {
    let text = value.to_str().unwrap_or_default();
    live::parse_cache_mode(text)
        .map_err(|wanted| Failure::usage("bad value", format!("cache_mode={text}"), wanted))
}

fn direct_io(value: &OsStr) -> Outcome<DirectIo> {
    let mode = value.to_str().and_then(DirectIo::parse);
    mode.ok_or_else(|| bad_value("direct_io", value, "give auto, always or never"))
}

/// `LOWER1:LOWER2`; a colon in a name is typed `\:`.
fn split_lowers(typed: &Path) -> impl Iterator<Item = PathBuf> {
    let (mut paths, mut escaped) = (vec![Vec::new()], false);
    for byte in typed.as_os_str().as_bytes() {
        match (byte, paths.last_mut()) {
            (b'\\', _) if !escaped => {
                escaped = true;
                continue;
            }
            (b':', _) if !escaped => paths.push(Vec::new()),
            (byte, Some(path)) => {
                if escaped && *byte != b':' {
                    path.push(b'\\');
                }
                path.push(*byte);
            }
            (_, None) => {}
        }
        escaped = false;
    }
    paths.into_iter().filter(|path| !path.is_empty()).map(|path| OsString::from_vec(path).into())
}

/// Rules that tie several options together.
fn check(config: &Config) -> Outcome<()> {
    let store = &config.store;
    let cache = || format!("cache={}", format_size(store.cache_bytes));
    live::check_bypass(store, store.bypass)
        .map_err(|refusal| Failure::usage(refusal.what, refusal.place, refusal.hint))?;
    // Each of the cache's 16 shards needs a few blocks to be an LRU at all.
    let least = 64 * u64::from(store.block_size);
    if store.cache_bytes < least {
        let hint = format!("64 blocks ({}) are the least", format_size(least));
        return Err(Failure::usage("cache too small", cache(), hint));
    }
    // Block numbers inside one cache are 32 bits.
    if store.cache_bytes / u64::from(store.block_size) > u64::from(u32::MAX) {
        return Err(Failure::usage("cache too large", cache(), "use fewer or larger blocks"));
    }
    Ok(())
}

/// The path from the root, symbolic links left alone: a daemon's working directory is `/`.
pub fn absolute(path: &Path) -> Outcome<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Failure::usage("bad path", OsString::from(path).display(), format!("{error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(list: &str) -> Outcome<Config> {
        let mut words = Words::default();
        words.add_list(OsStr::new(list))?;
        let machine = Machine { root: true, memory: 8 << 30 };
        config(Path::new("/srv/images"), Path::new("/mnt"), &words, false, false, machine)
    }

    #[test]
    fn defaults() {
        let config = typed("").unwrap();
        assert_eq!(
            config.store,
            StoreConfig { cache_mode: DEFAULT_MODE, ..StoreConfig::default() }
        );
        assert!(config.mount.allow_other && !config.mount.read_only);
        assert_eq!((config.mount.fsname.as_str(), config.mount.threads), ("/srv/images", 16));
        assert_eq!(config.mount.attr_timeout, Duration::from_secs(1));
    }

    #[test]
    fn lowers_stand_between_colons() {
        let split = |text: &str| split_lowers(Path::new(text)).collect::<Vec<_>>();
        assert_eq!(split("/a:/b/c:d"), ["/a", "/b/c", "d"].map(PathBuf::from));
        assert_eq!(split(r"/a\:b:/c\d"), ["/a:b", r"/c\d"].map(PathBuf::from));
        assert_eq!(split("/a"), [PathBuf::from("/a")]);
    }

    #[test]
    fn every_option_arrives() {
        let config = typed(
            "cache=1G,block-size=64K,bypass=1M,sequential-cutoff=8M,expire=2s,readahead=0,\
             cache-mode=writearound,direct-io=never,threads=3,ro,state=s,allow-other=no,\
             attr-timeout=0,fsname=a,log=/l,debug,trace=/t,unit_flush,noexec,journal_size=8M,\
             journal-delay=50ms,writeback_percent=40,writeback-delay=5s,writeback_running=no,\
             writeback_order=lba,flush_timeout=2m,no_uring",
        )
        .unwrap();
        let store = &config.store;
        assert_eq!((store.cache_bytes, store.block_size, store.bypass), (1 << 30, 65536, 1 << 20));
        assert_eq!((store.sequential_cutoff, store.readahead), (8 << 20, 0));
        assert_eq!((store.expire, store.unit_flush), (Duration::from_secs(2), true));
        assert_eq!((store.cache_mode, store.direct_io), (CacheMode::Writearound, DirectIo::Never));
        assert!(store.mode_typed);
        let writeback = WritebackConfig {
            journal_bytes: 8 << 20,
            journal_delay: Duration::from_millis(50),
            percent: 40,
            delay: Duration::from_secs(5),
            running: false,
            order: WritebackOrder::Lba,
            flush_timeout: Duration::from_secs(120),
            no_uring: true,
        };
        assert_eq!(store.writeback, writeback);
        let mount = &config.mount;
        assert!(mount.read_only && !mount.allow_other && mount.attr_timeout.is_zero());
        assert_eq!((mount.threads, mount.fsname.as_str()), (3, "a"));
        assert_eq!(mount.flags, ["noexec"]);
        let daemon = &config.daemon;
        assert!(daemon.debug && daemon.foreground);
        assert!(daemon.state.as_ref().unwrap().is_absolute());
        assert_eq!(daemon.log.as_deref(), Some(Path::new("/l")));
        assert_eq!(daemon.trace.as_deref(), Some(Path::new("/t")));
    }

    #[test]
    fn wrong_values_are_named() {
        for (list, line) in [
            (
                "cache=1M,bypass=512K",
                "cache too small: cache=1M: 4 x bypass (2M) is the least; \
                 raise cache or lower bypass",
            ),
            ("block-size=3000", "bad value: block_size=3000: give a power of two from 512 to 1M"),
            ("block-size=2M", "bad value: block_size=2M: give a power of two from 512 to 1M"),
            ("cache=lots", "bad value: cache=lots: give a size such as 64M"),
            ("cache", "missing value: cache: give cache=SIZE"),
            ("expire=", "missing value: expire: give expire=TIME"),
            ("threads=0", "bad value: threads=0: give a whole number from 1 to 256"),
            (
                "bypass=0",
                "bad value: bypass=0: one block (4K) is the least; \
                 cache_mode=none turns the cache off",
            ),
            (
                "cache=16M,block-size=1M,bypass=1M",
                "cache too small: cache=16M: 64 blocks (64M) are the least",
            ),
            (
                "cache-mode=fast",
                "bad value: cache_mode=fast: give writeback, writethrough, writearound or none",
            ),
            ("journal_size=4M", "bad value: journal_size=4M: 8M is the least"),
            ("journal_delay=2m", "bad value: journal_delay=2m: give a time from 1ms to 60s"),
            (
                "journal_delay_ms=0",
                "bad value: journal_delay_ms=0: give a whole number from 1 to 60000",
            ),
            (
                "writeback_percent=101",
                "bad value: writeback_percent=101: give a whole number from 0 to 100",
            ),
            ("writeback_order=up", "bad value: writeback_order=up: give unordered or lba"),
            (
                "flush_timeout=soon",
                "bad value: flush_timeout=soon: give a time such as 30s or 500ms",
            ),
            ("direct-io=perhaps", "bad value: direct_io=perhaps: give auto, always or never"),
            ("ro=perhaps", "bad value: ro=perhaps: give no value, yes or no"),
        ] {
            let failure = typed(list).unwrap_err();
            assert_eq!((failure.line.as_str(), failure.usage), (line, true));
        }
    }

    #[test]
    fn every_option_of_the_table_is_applied() {
        for option in options::OPTIONS {
            let line = typed(&format!("{}=?", option.name)).err().map(|failure| failure.line);
            assert!(!line.unwrap_or_default().contains("unknown"), "{}", option.name);
        }
    }
}
