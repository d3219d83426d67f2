//! Running one test executable in a process group of its own, with a time limit.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::build::{Program, cargo};
use super::tally::FileResult;
use super::{Options, interrupt, libtest};
use crate::report::{self, Case};
use crate::{cleanup, paths};

fn limit() -> Duration {
    let seconds = std::env::var("FUSE_TESTS_FILE_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(if report::full() { 3600 } else { 600 }))
}

/// The names of the tests in an executable.
fn list(program: &Program, options: &Options) -> Vec<String> {
    let mut command = Command::new(&program.executable);
    command.args(["--list", "--format", "terse"]).args(&options.filter);
    let output = command.current_dir(&program.directory).stdin(Stdio::null()).output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter_map(|line| Some(line.strip_suffix(": test")?.to_owned())).collect()
}

/// Runs one executable.
pub fn program(program: &Program, options: &Options) -> FileResult {
    let tests = list(program, options);
    let report = paths::target_dir().join("tmp/reports").join(program.name.replace(' ', "-"));
    let _ = fs::remove_dir_all(&report);
    fs::create_dir_all(&report).expect("the target directory is writable");
    let threads = thread::available_parallelism().map_or(2, |n| n.get()).clamp(2, 4);
    let mut command = Command::new(&program.executable);
    command.arg(format!("--test-threads={threads}")).args(&options.filter);
    command.current_dir(&program.directory);
    command.env("CARGO_MANIFEST_DIR", &program.directory);
    command.env("FUSE_TESTS_REPORT", &report).env("RUST_BACKTRACE", "0");
    command.env("BCACHEFS_FUSE", paths::profile_dir().join("bcachefs-fuse"));
    if let Some(tools) = &options.tools {
        let tools = tools.canonicalize().unwrap_or_else(|_| tools.clone());
        command.env("FUSE_TESTS_TOOLS", tools);
    }
    let mut result = run(command, &program.name);
    result.add_cases(read_report(&report), &tests);
    let _ = fs::remove_dir_all(&report);
    result
}

/// Runs the doc tests of the workspace.
pub fn doc_tests() -> FileResult {
    let mut command = cargo();
    command.args(["test", "-q", "--doc", "--workspace"]);
    let mut result = run(command, "doc tests");
    // No library of the workspace may have doc tests at all: that is no crash.
    if result.details.starts_with("no test result") {
        result = FileResult { name: result.name, seconds: result.seconds, ..Default::default() };
    }
    result
}

fn read_report(dir: &Path) -> Vec<Case> {
    let mut cases = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        cases.extend(text.lines().filter_map(Case::parse));
    }
    cases
}

fn collect(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn run(mut command: Command, name: &str) -> FileResult {
    let start = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return FileResult::broken(name, "start", &error.to_string()),
    };
    let group = interrupt::running(child.id());
    let (out, err) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let status = wait(&mut child);
    interrupt::check();
    // A process of the test that lives on holds the pipes open: it goes with the group.
    interrupt::end_group(child.id());
    drop(group);
    let out = out.join().unwrap_or_default();
    let err = err.join().unwrap_or_default();
    let printed = libtest::parse(&out);
    let mut result = FileResult { name: name.into(), ..FileResult::default() };
    result.seconds = start.elapsed().as_secs_f64();
    let sum = printed.summary.unwrap_or_default();
    result.passed = sum.passed;
    result.failed = printed.failed.iter().map(|test| format!("{name}::{test}")).collect();
    result.skipped =
        printed.ignored.iter().map(|test| (format!("{name}::{test}"), "ignored".into())).collect();
    result.details = printed.details;
    if sum.failed > result.failed.len() {
        result.failed.resize(sum.failed, format!("{name}::(see above)"));
    }
    let ended_well = matches!(status, Some(0));
    if printed.summary.is_none() || (!ended_well && sum.failed == 0) {
        let how = status.map_or("was ended (signal or time-out)".into(), |c| format!("exit {c}"));
        let suspects = printed.begun.iter().rev().take(2).cloned().collect::<Vec<_>>().join(", ");
        result.failed.push(format!("{name}::(the whole file)"));
        result.details.push_str(&format!("no test result, {how}; last: {suspects}\n"));
    }
    if !result.failed.is_empty() {
        let tail: Vec<&str> = err.lines().rev().take(60).collect();
        result.details.extend(tail.iter().rev().map(|line| format!("| {line}\n")));
    }
    result
}

/// Waits; at the time limit aborts the mounts below scratch and ends the group.
fn wait(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return status.code();
        }
        if start.elapsed() > limit() {
            for mount in cleanup::mounts_below(&paths::scratch_base()) {
                cleanup::abort_connection(&mount);
            }
            interrupt::end_group(child.id());
            let _ = child.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
