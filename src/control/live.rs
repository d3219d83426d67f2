//! The options of a live mount (layer 8): their present values, and changing five of them, all
//! or none. No state of its own: the values live in `Tunables`, each read once per request.

use std::time::Duration;

use crate::config::{CacheMode, Config, StoreConfig, Tunables};
use crate::control::Mounted;
use crate::control::proto::Refusal;
use crate::units::{format_duration, format_size, parse_duration, parse_size};

/// The options `set` changes.
pub const NAMES: [&str; 5] = ["bypass", "sequential_cutoff", "expire", "readahead", "cache_mode"];

/// The mode of a word, or what to give instead.
pub fn parse_cache_mode(text: &str) -> Result<CacheMode, &'static str> {
    match text {
        "writeback" => Err("it comes in a later version; give writethrough, writearound or none"),
        _ => CacheMode::parse(text).ok_or("give writethrough, writearound or none"),
    }
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
    for change in changes {
        let tunables = mounted.tunables();
        match change {
            Change::Bypass(bytes) => tunables.set_bypass(bytes),
            Change::SequentialCutoff(bytes) => tunables.set_sequential_cutoff(bytes),
            Change::Expire(age) => tunables.set_expire(age),
            Change::Readahead(bytes) => tunables.set_readahead(bytes),
            Change::CacheMode(mode) => mounted.set_cache_mode(mode),
        }
    }
    Ok(())
}

fn check(config: &Config, name: &str, value: &str) -> Result<Change, Refusal> {
    let name = name.replace('-', "_");
    let bad = |hint: &str| Refusal::new("bad value", format!("{name}={value}"), hint);
    let size = || parse_size(value).ok_or_else(|| bad("give a size such as 64M"));
    match name.as_str() {
        "bypass" => {
            let bytes = size()?;
            check_bypass(&config.store, bytes).map(|()| Change::Bypass(bytes))
        }
        "sequential_cutoff" => size().map(Change::SequentialCutoff),
        "readahead" => size().map(Change::Readahead),
        "expire" => parse_duration(value)
            .map(Change::Expire)
            .ok_or_else(|| bad("give a time such as 30s or 500ms")),
        "cache_mode" => parse_cache_mode(value).map(Change::CacheMode).map_err(bad),
        _ => Err(Refusal::new(
            "not changeable on a live mount",
            name,
            format!("unmount and mount with it; live options: {}", NAMES.join(", ")),
        )),
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
    let yes = |on: bool| if on { "yes" } else { "no" }.to_string();
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or_else(|| "none".to_string(), |path| path.display().to_string())
    };
    [
        ("cache", exact(store.cache_bytes)),
        ("block_size", exact(u64::from(store.block_size))),
        ("bypass", exact(tunables.bypass())),
        ("sequential_cutoff", exact(tunables.sequential_cutoff())),
        ("expire", format_duration(Duration::from_millis(tunables.expire_ms()))),
        ("readahead", exact(tunables.readahead())),
        ("cache_mode", tunables.cache_mode().name().to_string()),
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
    ]
    .into_iter()
    .map(|(name, value)| (name.to_string(), value))
    .collect()
}
