//! The test runner behind `make test`: runs every test binary and the doc tests one after the
//! other, counts their tests and the cases of external suites one by one, and ends with
//! "N passed, N failed[, N skipped]".
//!
//! A skip that `fuse-tests/allowed-skips.txt` does not list is a failure; so is anything left
//! behind (mounts, loop devices) below the scratch directory.

pub mod build;
pub mod execute;
pub mod interrupt;
pub mod libtest;
pub mod skips;
pub mod tally;

use std::path::PathBuf;
use std::time::Instant;
use std::{env, fs};

use crate::{cleanup, paths};
use skips::AllowedSkips;
use tally::{FileResult, Tally};

/// What to run.
#[derive(Debug, Default)]
pub struct Options {
    /// Where pjdfstest and fsx are.
    pub tools: Option<PathBuf>,
    /// Names of test files; empty: all.
    pub only: Vec<String>,
    /// Only tests whose name contains this.
    pub filter: Option<String>,
}

impl Options {
    /// From the command line.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options::default();
        let mut arguments = arguments;
        while let Some(word) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--tools" => options.tools = Some(value()?.into()),
                "--only" => options.only.push(value()?),
                "--filter" => options.filter = Some(value()?),
                _ => return Err(format!("{word}: not known (--tools, --only, --filter)")),
            }
        }
        Ok(options)
    }
}

/// Runs everything; the exit code.
pub fn main(options: Options) -> u8 {
    let start = Instant::now();
    interrupt::install();
    announce_gate();
    // What an earlier run that was killed left behind is no failure of this one.
    for leftover in sweep_dead() {
        println!("removed, left by an earlier run: {leftover}");
    }
    let allowed = match AllowedSkips::load() {
        Ok(allowed) => allowed,
        Err(error) => return give_up(&error),
    };
    let programs = match build::test_programs() {
        Ok(programs) => programs,
        Err(error) => return give_up(&error),
    };
    let mut tally = Tally::new(allowed);
    println!("{:34} {:>6} {:>6} {:>7} {:>9}", "", "passed", "failed", "skipped", "seconds");
    for program in programs.iter().filter(|program| wanted(&options, &program.name)) {
        interrupt::check();
        let result = execute::program(program, &options);
        tally.add(result);
    }
    if wanted(&options, "doc tests") && options.filter.is_none() {
        tally.add(execute::doc_tests());
    }
    let leftovers = sweep_dead();
    if !leftovers.is_empty() {
        tally.add(FileResult::broken("cleanup", "left behind", &leftovers.join("\n")));
    }
    tally.print_failures();
    println!("\n{:.1} s in all", start.elapsed().as_secs_f64());
    let closing = tally.closing_line();
    let _ = fs::write(paths::target_dir().join("tests-closing-line"), format!("{closing}\n"));
    println!("{closing}");
    u8::from(!tally.good())
}

fn wanted(options: &Options, name: &str) -> bool {
    options.only.is_empty() || options.only.iter().any(|only| name == only)
}

fn announce_gate() {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/fuse") {
        println!("NO MOUNT TESTS ON THIS MACHINE: /dev/fuse: {error}");
    }
    if !rustix::process::geteuid().is_root() {
        println!("Not root: tests that need root are skipped.");
    }
    if env::var_os("CARGO").is_none() {
        // SAFETY: no other thread exists yet.
        unsafe { env::set_var("CARGO", "cargo") };
    }
}

fn give_up(error: &str) -> u8 {
    let closing = "0 passed, 1 failed";
    let _ = fs::write(paths::target_dir().join("tests-closing-line"), format!("{closing}\n"));
    println!("{error}\n{closing}");
    1
}

/// Sweeps the scratch directories whose process is gone; what was there beside files.
pub fn sweep_dead() -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(paths::scratch_base()).into_iter().flatten().flatten() {
        if is_dead(&entry.file_name().to_string_lossy()) {
            found.extend(cleanup::sweep(&entry.path()));
        }
    }
    for entry in fs::read_dir(env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let ours = name.starts_with(paths::SHORT) && entry.path().is_symlink();
        if ours && is_dead(&name) {
            let _ = fs::remove_file(entry.path());
        }
    }
    found
}

/// Whether the process in a name NAME-PID-NUMBER is gone.
fn is_dead(name: &str) -> bool {
    let pid = name.rsplit('-').nth(1).and_then(|pid| pid.parse::<u32>().ok());
    !pid.is_some_and(|pid| fs::exists(format!("/proc/{pid}")).unwrap_or(true))
}
