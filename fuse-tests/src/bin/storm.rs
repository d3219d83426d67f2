//! `storm DIR SEED ROUND WRITER LOG`: one writer of the crash tests (see `fuse_tests::storm`). It
//! writes until its mount dies, then leaves with 0; with 3 if it read other bytes than it wrote,
//! with 4 after an error that no dying mount answers.

use std::path::Path;
use std::process::ExitCode;

use fuse_tests::storm::{Stop, write};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [directory, seed, round, writer, log] = words.as_slice() else {
        eprintln!("usage: storm DIR SEED ROUND WRITER LOG");
        return ExitCode::from(2);
    };
    let number = |word: &String| word.parse::<u64>().expect("a number");
    let (seed, round, writer) = (number(seed), number(round), number(writer));
    match write(Path::new(directory), seed, round, writer, Path::new(log)) {
        Stop::Mismatch(what) => {
            eprintln!("writer {writer} of round {round}, seed {seed}: {what}");
            ExitCode::from(3)
        }
        Stop::Error(error) => match error.raw_os_error() {
            // EIO: the close-to-dead connection; the others: aborted, or gone.
            Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO | libc::EINTR) => {
                ExitCode::SUCCESS
            }
            _ => {
                eprintln!("writer {writer} of round {round}, seed {seed}: {error}");
                ExitCode::from(4)
            }
        },
    }
}
