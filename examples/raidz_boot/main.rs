//! Replays the read requests of a boot loader through three caches: FreeBSD's loader before the
//! patch of 2011 (flush on unit change), the same with unit tags, and ours; prints hits and
//! misses beside the published table and draws the three miss curves.
//!
//! `cargo run --release --example raidz_boot [TRACE]`: one request a line, "unit first_block
//! blocks", as `-o trace=FILE` records them. The seed's own trace is checked against the table.

mod loader;
mod plot;

use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use bcachefs_fuse::cache::{Cache, SHARDS};
use bcachefs_fuse::config::{StoreConfig, Tunables};
use bcachefs_fuse::units::DeviceId;
use loader::Loader;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BLOCK_BYTES: u64 = 512;
/// Ours bypasses by a fixed size; the loader by half of its cache.
const BYPASS_BLOCKS: u64 = 16;
const SIZES: [u64; 10] = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/// One read request in blocks.
#[derive(Clone, Copy)]
struct Request {
    unit: u32,
    first: u64,
    blocks: u64,
}

/// What a cache of some size made of the trace.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Outcome {
    bypasses: u64,
    hits: u64,
    misses: u64,
}

fn parse(text: &str) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [] => (),
            [word, ..] if word.starts_with('#') => (),
            [unit, first, blocks] => requests.push(Request {
                unit: unit.parse()?,
                first: first.parse()?,
                blocks: blocks.parse()?,
            }),
            _ => return Err(format!("line {}: not \"unit first_block blocks\"", number + 1).into()),
        }
    }
    Ok(requests)
}

fn loader(trace: &[Request], blocks: u64, tags: bool) -> Outcome {
    let mut loader = Loader::new(blocks, tags);
    for &request in trace {
        loader.read(request);
    }
    loader.outcome
}

/// The cache of a mount, with `shards` shards.
fn ours(trace: &[Request], blocks: u64, shards: usize) -> Result<Outcome> {
    let cache = Cache::with_shards(blocks * BLOCK_BYTES, BLOCK_BYTES as u32, false, shards);
    let tunables = Tunables::new(&StoreConfig {
        bypass: BYPASS_BLOCKS * BLOCK_BYTES,
        readahead: 0,
        ..StoreConfig::default()
    });
    let disk = |_: u64, buf: &mut [u8]| Ok(buf.len());
    let mut devices = HashMap::new();
    for request in trace {
        let unit = DeviceId(request.unit);
        let dev = devices.entry(unit).or_insert_with(|| cache.register(unit));
        let (offset, len) = (request.first * BLOCK_BYTES, request.blocks * BLOCK_BYTES);
        let plan = cache.plan(dev, offset, len, offset + len, &tunables);
        let mut out = vec![0; len as usize];
        if !cache.try_read(dev, &plan, offset, &mut out, 0) {
            cache.read(dev, &plan, offset, &mut out, 0, &disk)?;
        }
    }
    let mut sum = Outcome::default();
    for counters in devices.values().map(|dev| dev.stats.counters()) {
        sum.bypasses += counters.bypasses;
        sum.hits += counters.hits;
        sum.misses += counters.misses;
    }
    Ok(sum)
}

fn check(condition: bool, promise: &str) -> Result<()> {
    println!("{} {promise}", if condition { "ok    " } else { "FAILED" });
    if condition { Ok(()) } else { Err(promise.into()) }
}

fn never_rises(outcomes: &[Outcome]) -> bool {
    outcomes.windows(2).all(|pair| pair[1].misses <= pair[0].misses)
}

/// blocks -> "bypasses hits misses", as published (rounded numbers and all).
fn published(text: &str) -> HashMap<u64, [&str; 3]> {
    let rows =
        text.lines().filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [blocks, _ops, bypasses, hits, misses] => {
                Some((blocks.parse().ok()?, [bypasses, hits, misses]))
            }
            _ => None,
        });
    rows.collect()
}

fn print(table: &HashMap<u64, [&str; 3]>, rows: &[[Outcome; 4]]) {
    let heads = ["(a) before the patch", "(b) with unit tags", "(c) ours, 1 shard"];
    println!("          {:>22} {:>22} {:>22}", heads[0], heads[1], heads[2]);
    let head = format!("{:>6} {:>7} {:>7}", "bypass", "hits", "misses");
    println!("{:>6}    {head} {head} {head}  16 shards  published (b)", "blocks");
    for (blocks, row) in SIZES.iter().zip(rows) {
        print!("{blocks:>6}   ");
        for outcome in &row[..3] {
            let Outcome { bypasses, hits, misses } = outcome;
            print!(" {bypasses:>6} {hits:>7} {misses:>7}");
        }
        let known = table.get(blocks).map_or(String::new(), |row| row.join(" "));
        println!("  {:>9}   {known}", row[3].misses);
    }
}

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = root.join("examples/traces/raidz3_boot.trace");
    let given = std::env::args_os().nth(1).map(PathBuf::from);
    let trace = parse(&std::fs::read_to_string(given.as_ref().unwrap_or(&own))?)?;
    let text = match given {
        None => std::fs::read_to_string(root.join("examples/traces/table-2011.txt"))?,
        Some(_) => String::new(),
    };
    let mut rows = Vec::new();
    for size in SIZES {
        rows.push([
            loader(&trace, size, false),
            loader(&trace, size, true),
            ours(&trace, size, 1)?,
            ours(&trace, size, SHARDS)?,
        ]);
    }
    println!("{} requests; {BYPASS_BLOCKS} blocks are our bypass at every size", trace.len());
    print(&published(&text), &rows);
    println!(
        "16 shards, as in a mount, are meant for thousands of blocks: misses of (c) with them."
    );
    let column = |i: usize| rows.iter().map(|row| row[i]).collect::<Vec<Outcome>>();
    let (flush, tags) = (column(0), column(1));
    if given.is_none() {
        let at = |blocks| SIZES.iter().position(|&size| size == blocks).map(|i| tags[i]);
        let bypasses = [32, 128, 192, 256].map(|blocks| at(blocks).map(|row| row.bypasses));
        check(flush.iter().all(|row| row.hits == 0), "(a) hits nothing at any size")?;
        check(
            bypasses == [287, 281, 281, 15].map(Some),
            "(b) bypasses 287/281/281/15 requests at 32/128/192/256 blocks",
        )?;
        check(
            at(256).map(|row| row.misses) > at(192).map(|row| row.misses),
            "(b) misses more at 256 blocks than at 192",
        )?;
    }
    check(never_rises(&column(2)), "(c) never misses more at a larger size")?;
    check(never_rises(&column(3)), "(c) nor in the 16 shards of a mount")?;
    let svg = root.join("target/bench/raidz_boot.svg");
    plot::draw(
        &svg,
        [("flush on unit change", &flush), ("unit tags", &tags), ("ours", &column(2))],
    )?;
    println!("curves: {}", svg.display());
    if given.is_none() {
        println!("This trace is synthetic, rebuilt from the table: by construction it fixes the");
        println!(
            "bypass column and the 192 hot blocks. The proof that counts is the recordings of"
        );
        println!("`make raidz`.");
    }
    Ok(())
}
