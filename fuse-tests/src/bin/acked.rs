//! `acked write|check FILE COUNT`: writes COUNT different blocks of 4 KiB to scattered places of
//! FILE, each acknowledged before the next, every hundredth followed by fdatasync; or counts how
//! many of them FILE has. For `make demo`; prints "name=number" words.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::time::Instant;

const BLOCK: usize = 4096;
/// Blocks of FILE that may be written: a power of two.
const PLACES: u64 = 16 << 10;
/// Odd, so that every number below `PLACES` has a place of its own.
const STRIDE: u64 = 6007;

fn place(number: u64) -> u64 {
    (number * STRIDE % PLACES) * BLOCK as u64
}

fn block(number: u64) -> Vec<u8> {
    (0..BLOCK / 8).flat_map(|word| ((number << 16) | (word as u64 + 1)).to_le_bytes()).collect()
}

fn write(path: &str, count: u64) -> io::Result<String> {
    let file = OpenOptions::new().write(true).open(path)?;
    let (start, mut syncs) = (Instant::now(), 0);
    for number in 0..count {
        file.write_all_at(&block(number), place(number))?;
        if number % 100 == 99 {
            file.sync_data()?;
            syncs += 1;
        }
    }
    Ok(format!("acked={count} fsyncs={syncs} ms={}", start.elapsed().as_millis()))
}

fn check(path: &str, count: u64) -> io::Result<String> {
    let file = OpenOptions::new().read(true).open(path)?;
    let mut there = 0;
    for number in 0..count {
        let mut bytes = vec![0; BLOCK];
        file.read_exact_at(&mut bytes, place(number))?;
        there += u64::from(bytes == block(number));
    }
    Ok(format!("there={there} lost={}", count - there))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [action, path, count] = words.as_slice() else { return usage() };
    let Ok(count) = count.parse::<u64>() else { return usage() };
    let done = match action.as_str() {
        "write" if count <= PLACES => write(path, count),
        "check" if count <= PLACES => check(path, count),
        _ => return usage(),
    };
    match done {
        Ok(words) => {
            println!("{words}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: acked write|check FILE COUNT (at most {PLACES}; FILE of 64 MiB)");
    ExitCode::from(2)
}
