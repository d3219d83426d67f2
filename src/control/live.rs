//! The options of a live mount (layer 8): their present values, and changing some of them, all
//! or none. No state of its own: the values live in `Tunables`, each read once per request.

use std::time::Duration;

use crate::config::{CacheMode, Config, StoreConfig, Tunables};
use crate::control::Mounted;
use crate::control::proto::Refusal;
use crate::units::{format_duration, format_size, parse_duration, parse_size};

/// The options `set` changes.
pub const NAMES: [&str; 10] = [
    "bypass",
    "sequential_cutoff",
    "expire",
    "readahead",
    "cache_mode",
    "journal_delay",
    "journal_delay_ms",
    "writeback_percent",
    "writeback_delay",
    "writeback_running",
];

/// The mode of a word, or what to give instead.
pub fn parse_cache_mode(text: &str) -> Result<CacheMode, &'static str> {
    CacheMode::parse(text).ok_or("give writeback, writethrough, writearound or none")
}

/// How long an append may wait for the disk, or what to give instead.
pub fn parse_journal_delay(text: &str) -> Result<Duration, &'static str> {
    let range = Duration::from_millis(1)..=Duration::from_secs(60);
    let delay = parse_duration(text).filter(|delay| range.contains(delay));
    delay.ok_or("give a time from 1ms to 60s")
}

/// Whether `bypass` suits the cache: a block must fit into it, four of it into the cache.
pub fn check_bypass(store: &StoreConfig, bypass: u64) -> Result<(), Refusal> {
    let block = u64::from(store.block_size);
    if bypass < block {
        let hint = format!(
            "one block ({}) is the least; cache_mode=none turns the cache off",
            format_size(block)
        );
        let place = format!("bypass={}", format_size(bypass));
        return Err(Refusal::new("bad value", place, hint));
    }
    let least = bypass.saturating_mul(4);
    if store.cache_bytes < least {
        let hint = format!(
            "4 x bypass ({}) is the least; raise cache or lower bypass",
            format_size(least)
        );
        let place = format!("cache={}", format_size(store.cache_bytes));
        return Err(Refusal::new("cache too small", place, hint));
    }
    Ok(())
}

/// A change that was checked and cannot fail any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Bypass(u64),
    SequentialCutoff(u64),
    Expire(Duration),
    Readahead(u64),
    CacheMode(CacheMode),
    JournalDelay(Duration),
    WritebackPercent(u64),
    WritebackDelay(Duration),
    WritebackRunning(bool),
}

/// Changes live options, all or none.
pub fn set(
    mounted: &dyn Mounted,
    config: &Config,
    assignments: &[(String, String)],
) -> Result<(), Refusal> {
    let changes: Vec<Change> = assignments
        .iter()
        .map(|(name, value)| check(config, name, value))
        .collect::<Result<_, _>>()?;
    if changes.contains(&Change::CacheMode(CacheMode::Writeback)) {
        check_journal(mounted, config)?;
    }
    for change in changes {
        let tunables = mounted.tunables();
        match change {
            Change::Bypass(bytes) => tunables.set_bypass(bytes),
            Change::SequentialCutoff(bytes) => tunables.set_sequential_cutoff(bytes),
            Change::Expire(age) => tunables.set_expire(age),
            Change::Readahead(bytes) => tunables.set_readahead(bytes),
            Change::CacheMode(mode) => mounted.set_cache_mode(mode),
            Change::JournalDelay(delay) => tunables.set_journal_delay(delay),
            Change::WritebackPercent(percent) => tunables.set_writeback_percent(percent),
            Change::WritebackDelay(delay) => tunables.set_writeback_delay(delay),
            Change::WritebackRunning(running) => tunables.set_writeback_running(running),
        }
    }
    Ok(())
}

/// Writeback needs a journal from the start.
fn check_journal(mounted: &dyn Mounted, config: &Config) -> Result<(), Refusal> {
    if mounted.snapshot(None).writeback.is_some() {
        return Ok(());
    }
    let place = config.mount.mountpoint.display().to_string();
    let hint = format!(
        "bcachefs-fuse umount {place}, then bcachefs-fuse mount --cache-mode writeback {} {place}",
        config.mount.source.display()
    );
    Err(Refusal::new("mounted without a journal", place, hint))
}

fn check(config: &Config, name: &str, value: &str) -> Result<Change, Refusal> {
    let name = name.replace('-', "_");
    let bad = |hint: &str| Refusal::new("bad value", format!("{name}={value}"), hint);
    let size = || parse_size(value).ok_or_else(|| bad("give a size such as 64M"));
    let time = || parse_duration(value).ok_or_else(|| bad("give a time such as 30s or 500ms"));
    match name.as_str() {
        "bypass" => {
            let bytes = size()?;
            check_bypass(&config.store, bytes).map(|()| Change::Bypass(bytes))
        }
        "sequential_cutoff" => size().map(Change::SequentialCutoff),
        "readahead" => size().map(Change::Readahead),
        "expire" => time().map(Change::Expire),
        "journal_delay" => parse_journal_delay(value).map(Change::JournalDelay).map_err(bad),
        "journal_delay_ms" => parse_journal_delay(&format!("{value}ms"))
            .map(Change::JournalDelay)
            .map_err(|_| bad("give a whole number from 1 to 60000")),
        "writeback_percent" => match value.parse() {
            Ok(percent) if percent <= 100 => Ok(Change::WritebackPercent(percent)),
            _ => Err(bad("give a whole number from 0 to 100")),
        },
        "writeback_delay" => time().map(Change::WritebackDelay),
        "writeback_running" => match value {
            "yes" | "1" => Ok(Change::WritebackRunning(true)),
            "no" | "0" => Ok(Change::WritebackRunning(false)),
            _ => Err(bad("give yes or no")),
        },
        "cache_mode" => parse_cache_mode(value).map(Change::CacheMode).map_err(bad),
        _ => {
            let shown: Vec<&str> =
                NAMES.into_iter().filter(|name| *name != "journal_delay_ms").collect();
            let hint = format!("unmount and mount with it; live options: {}", shown.join(", "));
            Err(Refusal::new("not changeable on a live mount", name, hint))
        }
    }
}

/// A size that reads back to the same number of bytes.
fn exact(bytes: u64) -> String {
    let short = format_size(bytes);
    if parse_size(&short) == Some(bytes) { short } else { bytes.to_string() }
}

/// Every option's present value by name, as a user would type it.
pub fn values(config: &Config, tunables: &Tunables) -> Vec<(String, String)> {
    let (mount, store, daemon) = (&config.mount, &config.store, &config.daemon);
    let writeback = &store.writeback;
    let ms = |ms: u64| format_duration(Duration::from_millis(ms));
    let yes = |on: bool| if on { "yes" } else { "no" }.to_string();
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or_else(|| "none".to_string(), |path| path.display().to_string())
    };
    [
        ("cache", exact(store.cache_bytes)),
        ("block_size", exact(u64::from(store.block_size))),
        ("bypass", exact(tunables.bypass())),
        ("sequential_cutoff", exact(tunables.sequential_cutoff())),
        ("expire", ms(tunables.expire_ms())),
        ("readahead", exact(tunables.readahead())),
        ("cache_mode", tunables.cache_mode().name().to_string()),
        ("journal_size", exact(writeback.journal_bytes)),
        ("journal_delay", ms(tunables.journal_delay_ms())),
        ("journal_delay_ms", tunables.journal_delay_ms().to_string()),
        ("writeback_percent", tunables.writeback_percent().to_string()),
        ("writeback_delay", ms(tunables.writeback_delay_ms())),
        ("writeback_running", yes(tunables.writeback_running())),
        ("writeback_order", writeback.order.name().to_string()),
        ("flush_timeout", format_duration(writeback.flush_timeout)),
        ("direct_io", store.direct_io.name().to_string()),
        ("threads", mount.threads.to_string()),
        ("ro", yes(mount.read_only)),
        ("state", path(&daemon.state)),
        ("allow_other", yes(mount.allow_other)),
        ("attr_timeout", format_duration(mount.attr_timeout)),
        ("fsname", mount.fsname.clone()),
        ("log", path(&daemon.log)),
        ("debug", yes(daemon.debug)),
        ("trace", path(&daemon.trace)),
        ("unit_flush", yes(store.unit_flush)),
        ("no_uring", yes(writeback.no_uring)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_string(), value))
    .collect()
}
