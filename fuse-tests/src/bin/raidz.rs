//! `make raidz`: the two machines this cache was first written for, for real. A raidz1 pool of
//! three and a raidz2 pool of eight image files on our mount, by zfs-fuse: a kernel-sized tree is
//! written and exported, then imported, read and exported twice, with the unit tags, and again
//! with the cache emptied on each change of the unit, as the loader did before 2011.
//!
//! `--record` writes the traces of the tagged runs to examples/traces/.
//!
//! It runs in mount and process namespaces of its own: whatever happens, no mount, no zfs-fuse
//! and no pool is left when it ends.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fuse_tests::bench::contender::{Mount, Stat};
use fuse_tests::bench::zfs::{Loops, MODULES, Pool, Zfs, hide_the_system, read_tree, write_tree};
use fuse_tests::bench::{Res, build_release, is_root, run, target_dir};

const CACHE: &str = "cache=256M";
const IMAGE_BYTES: u64 = 96 << 20;
/// What a recorded trace may take in the repository.
const TRACE_BYTES: usize = 300_000;
/// Of the second read of a tree that fits into the cache, in percent of the blocks.
const TAGGED_AT_LEAST: f64 = 95.0;

/// Blocks of one read of the tree, per member.
struct Read {
    hits: Vec<(String, u64)>,
    disk: Vec<(String, u64)>,
    requested: Vec<(String, u64)>,
    time: Duration,
}

impl Read {
    fn percent(&self) -> f64 {
        let sum = |all: &[(String, u64)]| all.iter().map(|one| one.1).sum::<u64>() as f64;
        100.0 * sum(&self.hits) / sum(&self.requested).max(1.0)
    }
}

fn difference(after: &Stat, before: &Stat, name: &str) -> Res<Vec<(String, u64)>> {
    let old = before.devices(name)?;
    let earlier = |path: &str| old.iter().find(|one| one.0 == path).map_or(0, |one| one.1);
    let new = after.devices(name)?;
    Ok(new.into_iter().map(|(path, value)| (path.clone(), value - earlier(&path))).collect())
}

/// Imports, reads the tree, exports, and says what came to the members meanwhile. Only an export
/// empties what zfs-fuse keeps itself: its limit of 16 MiB is enforced a second too late.
fn boot(mount: &Mount, pool: &Pool, devices: &Path) -> Res<Read> {
    let before = mount.stat()?;
    pool.import(devices)?;
    let time = read_tree(&pool.mountpoint)?;
    pool.export()?;
    let after = mount.stat()?;
    let hits = difference(&after, &before, "hits")?;
    let mut requested = hits.clone();
    for name in ["misses", "bypassed"] {
        let more = difference(&after, &before, name)?;
        requested.iter_mut().zip(more).for_each(|(sum, one)| sum.1 += one.1);
    }
    Ok(Read { hits, disk: difference(&after, &before, "backing_blocks")?, requested, time })
}

/// Mounts ours, lets `work` use the pool's devices on it, unmounts.
fn mounted<T>(
    directory: &Path,
    pool: &Pool,
    options: &str,
    work: impl FnOnce(&Mount, &Path) -> Res<T>,
) -> Res<T> {
    let (images, at) = (directory.join("images"), directory.join("mnt"));
    let devices = directory.join("devices");
    let mount = Mount::ours(&images, &at, options)?;
    let loops = Loops::attach(&at, &pool.images(), &devices)?;
    let done = work(&mount, &devices)?;
    loops.detach()?;
    mount.unmount()?;
    Ok(done)
}

/// Two boots of the machine on one mount of ours.
fn boot_twice(directory: &Path, pool: &Pool, options: &str) -> Res<[Read; 2]> {
    mounted(directory, pool, options, |mount, devices| {
        Ok([boot(mount, pool, devices)?, boot(mount, pool, devices)?])
    })
}

fn print(pool: &Pool, bytes: u64, tagged: &[Read; 2], flushed: &[Read; 2]) {
    let (level, members, mib) = (pool.level, pool.members, bytes >> 20);
    println!(
        "\n{level} of {members} image files, a tree of {mib} MiB booted from twice, in 4 KiB blocks"
    );
    println!("{:<12}{:^42}{:^42}", "", "unit tags", "flush on unit change");
    let half = format!("{:>14}{:>7}{:>14}{:>7}", "boot 1: hits", "disk", "boot 2: hits", "disk");
    println!("{:<12}{half}{half}", "member");
    for (row, image) in pool.images().iter().enumerate() {
        let cells: String = [tagged, flushed]
            .iter()
            .flat_map(|reads| reads.iter())
            .map(|read| {
                let of = |all: &[(String, u64)]| all.get(row).map_or(0, |one| one.1);
                format!("{:>14}{:>7}", of(&read.hits), of(&read.disk))
            })
            .collect();
        println!("{image:<12}{cells}");
    }
    for (what, reads) in [("unit tags", tagged), ("flush on unit change", flushed)] {
        let [first, second] = reads;
        println!(
            "{what}: {:.1} % of the blocks hit, then {:.1} % ({:.1} s, then {:.1} s)",
            first.percent(),
            second.percent(),
            first.time.as_secs_f64(),
            second.time.as_secs_f64()
        );
    }
}

/// One machine, start to end; false if its figures are not what the cache is for.
fn machine(pool: &Pool, directory: &Path, record: bool) -> Res<bool> {
    let images = directory.join("images");
    fs::create_dir_all(&images)?;
    for image in pool.images() {
        File::create(images.join(image))?.set_len(IMAGE_BYTES)?;
    }
    let bytes = mounted(directory, pool, CACHE, |_, devices| {
        pool.create(devices)?;
        let bytes = write_tree(&pool.mountpoint)?;
        pool.export()?;
        Ok(bytes)
    })?;
    let trace = directory.join("trace");
    let options = format!("{CACHE},trace={}", trace.display());
    let tagged = boot_twice(directory, pool, &options)?;
    let flushed = boot_twice(directory, pool, &format!("{CACHE},unit_flush"))?;
    print(pool, bytes, &tagged, &flushed);
    if record {
        keep_trace(pool, &trace)?;
    }
    let good = tagged[1].percent() >= TAGGED_AT_LEAST && flushed[1].percent() < tagged[1].percent();
    let word = if good { "ok" } else { "FAILED" };
    println!("second boot with tags: >= {TAGGED_AT_LEAST} %, and more than with the flush: {word}");
    Ok(good)
}

/// Units renumbered from 0, a head that says what it is, cut at `TRACE_BYTES`.
fn keep_trace(pool: &Pool, recorded: &Path) -> Res<()> {
    let text = fs::read_to_string(recorded)?;
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let unit = |line: &str| line.split(' ').next().and_then(|unit| unit.parse::<u32>().ok());
    let units: BTreeSet<u32> = lines.iter().filter_map(|line| unit(line)).collect();
    let (level, members) = (pool.level, pool.members);
    let all = lines.len();
    let mut kept = format!(
        "# Read trace of zfs-fuse on our mount: {level} of {members}; twice: imported, a tree of \
         one kernel and\n# {MODULES} modules read, exported ({all} requests, 4096-byte \
         blocks; the first \
         ones if cut). \
         Columns: unit first_block blocks\n"
    );
    for line in lines {
        let Some(number) = unit(line) else { continue };
        let position = units.range(..number).count();
        let rest = line.split_once(' ').map_or("", |parts| parts.1);
        let line = format!("{position} {rest}\n");
        if kept.len() + line.len() > TRACE_BYTES {
            break;
        }
        kept.push_str(&line);
    }
    let name = if members == 3 { "raidz1_3.trace" } else { "raidz2_8.trace" };
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/traces");
    fs::create_dir_all(&traces)?;
    let kept_lines = kept.lines().count() - 2;
    fs::write(traces.join(name), kept)?;
    println!("examples/traces/{name}: {kept_lines} of {all} requests");
    Ok(())
}

fn inside(directory: &Path, record: bool) -> Res<ExitCode> {
    hide_the_system()?;
    let zfs = Zfs::start(&directory.join("zfs-fuse.log"))?;
    let mut good = true;
    for (name, level, members) in [("three", "raidz1", 3), ("eight", "raidz2", 8)] {
        let directory = directory.join(name);
        let pool = Pool { name, level, members, mountpoint: directory.join("pool") };
        good &= machine(&pool, &directory, record)?;
        fs::remove_dir_all(directory.join("images"))?;
    }
    drop(zfs);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Directories of runs that were killed: their mounts died with their namespaces.
fn remove_old(target: &Path) -> Res<()> {
    for entry in fs::read_dir(target)? {
        let entry = entry?;
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("raidz-")?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn outside(args: &[String]) -> Res<ExitCode> {
    if !is_root() {
        return Err("needs root: it mounts in namespaces of its own".into());
    }
    if run(Command::new("zfs-fuse").arg("--help")).is_err() && !Path::new("/sbin/zpool").exists() {
        return Err("zfs-fuse is missing (Debian: apt-get install zfs-fuse)".into());
    }
    build_release()?;
    let target = target_dir()?;
    remove_old(&target)?;
    let directory = target.join(format!("raidz-{}", std::process::id()));
    fs::create_dir(&directory)?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(std::env::current_exe()?).arg("--inside").arg(&directory).args(args);
    // cargo must not be run again from within.
    let status = command.env_remove("CARGO").status();
    fs::remove_dir_all(&directory)?;
    Ok(if status?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn raidz() -> Res<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let record = args.iter().any(|arg| arg == "--record");
    match args.first().map(String::as_str) {
        Some("--inside") => {
            let directory = args.get(1).map(PathBuf::from).ok_or("--inside DIRECTORY")?;
            inside(&directory, record)
        }
        None | Some("--record") => outside(&args),
        Some(_) => Err("usage: raidz [--record]".into()),
    }
}

fn main() -> ExitCode {
    raidz().unwrap_or_else(|error| {
        eprintln!("raidz: {error}");
        ExitCode::FAILURE
    })
}
