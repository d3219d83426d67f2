//! Memory: what the daemon holds when its cache is full.

use super::super::Res;
use super::super::fio::{Job, fio};
use super::super::report::{Need, Row};
use super::Env;

const CACHE: u64 = 256 << 20;

/// Resident memory once the cache is full and every kind of request was under way.
pub fn full(env: &Env) -> Res<Vec<Row>> {
    // More than the cache, through every path that can hold a buffer: small, deep, large.
    let size = 512 << 20;
    env.file("memory", size)?;
    let mount = env.ours("cache=256M")?;
    let file = mount.path().join("memory");
    let (rw, block) = ("randread", "128k");
    fio(&file, &Job { rw, block, direct: true, depth: 8, jobs: 1, size, seconds: None })?;
    let (rw, block, seconds) = ("randread", "4k", Some(env.seconds));
    fio(&file, &Job { rw, block, direct: true, depth: 32, jobs: 2, size, seconds })?;
    let (rw, block, seconds) = ("read", "1m", Some(env.seconds));
    fio(&file, &Job { rw, block, direct: true, depth: 16, jobs: 1, size, seconds })?;
    let stat = mount.stat()?;
    let (held, room) = (stat.number("resident_blocks")?, stat.number("capacity_blocks")?);
    // Sixteen shards fill unevenly by chance; 99 % is full.
    if held * 100 < room * 99 {
        return Err(format!("the cache is not full: {held} of {room} blocks").into());
    }
    let mib = mount.rss_kib()? as f64 / 1024.0;
    mount.unmount()?;
    let most = (CACHE >> 20) as f64 * 1.03 + 64.0;
    Ok(vec![Row::alone("resident memory, full 256M cache", "MiB", mib, Need::AtMost(most))])
}
