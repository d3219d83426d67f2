//! `interleave MOUNT BYTES FILE...`: the reader of `make demo`. It reads the first BYTES of every
//! FILE in MOUNT in 4 KiB O_DIRECT requests, one of each file in turn, as a raidz reads its disks,
//! and prints what the mount's counters say of it: `requests=N hits=N disk=N ms=N`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use fuse_tests::bench::contender::Stat;
use fuse_tests::bench::{Res, product, run};

const REQUEST: usize = 4096;

fn stat(mount: &Path) -> Res<Stat> {
    Stat::parse(&run(Command::new(product()?).args(["stat", "--json"]).arg(mount))?)
}

fn interleave() -> Res<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [mount, bytes, names @ ..] = args.as_slice() else {
        return Err("usage: interleave MOUNT BYTES FILE...".into());
    };
    let (mount, bytes) = (Path::new(mount), bytes.parse::<u64>()?);
    let open = |name: &String| {
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(mount.join(name))
    };
    let files: Vec<File> = names.iter().map(open).collect::<io::Result<_>>()?;
    let before = stat(mount)?;
    let mut buffer = [0; REQUEST];
    let mut requests = 0u64;
    let start = Instant::now();
    for offset in (0..bytes).step_by(REQUEST) {
        for file in &files {
            file.read_exact_at(&mut buffer, offset)?;
            requests += 1;
        }
    }
    let ms = start.elapsed().as_millis();
    let after = stat(mount)?;
    let change = |name: &str| -> Res<u64> { Ok(after.total(name)? - before.total(name)?) };
    let (hits, disk) = (change("hits")?, change("backing_blocks")?);
    println!("requests={requests} hits={hits} disk={disk} ms={ms}");
    Ok(())
}

fn main() -> ExitCode {
    match interleave() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interleave: {error}");
            ExitCode::FAILURE
        }
    }
}
