//! The external suites: pjdfstest and fsx on our mount, their cases reported one by one.
//!
//! `FUSE_TESTS_POSIX=ext4` chooses the filesystems below the source (ext4,xfs,btrfs),
//! `FUSE_TESTS_FSX=100000` the operations of fsx (`make fsx`).

use std::env;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fuse_tests::mount::Builder;
use fuse_tests::paths::ShortPath;
use fuse_tests::report::{self, Outcome};
use fuse_tests::tools::{run, try_run};
use fuse_tests::{Backing, Mount, paths, writeback};

const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.02

[dummy_auth]
entries = [["tests", "tests"], ["pjdfstest", "pjdfstest"]]
"#;

const FSX: &str = "
flen = 1048576

[weights]
close_open = 1
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 1
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 5
sendfile = 2
posix_fadvise = 1
copy_file_range = 3
";

/// One case as pjdfstest prints it: name, result, and the indented lines that follow it.
#[derive(Debug, PartialEq, Eq)]
struct Printed {
    name: String,
    outcome: Outcome,
    note: String,
}

fn parse(text: &str) -> Vec<Printed> {
    let mut cases: Vec<Printed> = Vec::new();
    for line in text.lines() {
        let outcome = match line.rsplit(' ').next() {
            Some("ok") => Some(Outcome::Pass),
            Some("skipped") => Some(Outcome::Skip),
            Some("FAILED") => Some(Outcome::Fail),
            _ => None,
        };
        let name = line.split(' ').next().unwrap_or_default();
        match (outcome, cases.last_mut()) {
            (Some(outcome), _) if name.contains("::") => {
                cases.push(Printed { name: name.into(), outcome, note: String::new() });
            }
            (_, Some(last)) if line.starts_with('\t') => {
                last.note.push_str(line.trim());
                last.note.push(' ');
            }
            _ => {}
        }
    }
    cases
}

#[test]
fn the_output_of_pjdfstest_is_understood() {
    let text = "a::b        ok\nc::d   skipped\n\tnot here\ne::f   FAILED\n\tassert\nBacktrace:\n\
                \nSummary: 1 failed, 1 skipped, 1 passed, 0 expected failures, 3 total\n";
    let cases = parse(text);
    let outcomes: Vec<_> = cases.iter().map(|case| case.outcome).collect();
    assert_eq!(outcomes, [Outcome::Pass, Outcome::Skip, Outcome::Fail]);
    assert_eq!((cases[1].note.trim(), cases[2].name.as_str()), ("not here", "e::f"));
}

#[test]
fn pjdfstest() {
    if !report::have_fuse() || !report::have_root("pjdfstest changes users") {
        return;
    }
    let chosen = env::var("FUSE_TESTS_POSIX").unwrap_or_else(|_| "ext4,xfs,btrfs".into());
    let mut failed = 0;
    for word in chosen.split(',') {
        let backing = Backing::parse(word).unwrap_or_else(|| panic!("FUSE_TESTS_POSIX: {word}"));
        failed += pjdfstest_over(Mount::builder("pjdfstest").backing(backing), "", backing.name());
    }
    assert_eq!(failed, 0, "cases of pjdfstest failed");
}

#[test]
fn pjdfstest_in_writeback_mode() {
    if !report::have_fuse() || !report::have_root("pjdfstest changes users") {
        return;
    }
    let Some(builder) = writeback::on_ext4("pjdfstest-wb", 512) else { return };
    let failed = pjdfstest_over(builder, "", "ext4-writeback");
    assert_eq!(failed, 0, "cases of pjdfstest failed");
}

#[test]
fn pjdfstest_on_an_overlay() {
    if !report::have_fuse() || !report::have_root("pjdfstest changes users") {
        return;
    }
    let failed = pjdfstest_over(Mount::builder("pjdfstest-over").upper(), "", "overlay");
    assert_eq!(failed, 0, "cases of pjdfstest failed");
}

/// A tree in the lower, files of other owners all over it.
fn full_lower(lower: &Path) {
    for directory in ["deep", "deep/er", "deep/er/still"] {
        let directory = lower.join(directory);
        fs::create_dir(&directory).unwrap();
        for n in 0..100_u32 {
            let file = directory.join(format!("file-{n}"));
            fs::write(&file, format!("{n}")).unwrap();
            std::os::unix::fs::chown(&file, Some(1000 + n), Some(2000 + n)).unwrap();
        }
        fs::create_dir(directory.join("empty")).unwrap();
    }
}

#[test]
fn pjdfstest_on_an_overlay_over_a_full_lower() {
    if !report::have_fuse() || !report::have_root("pjdfstest changes users") {
        return;
    }
    let builder = Mount::builder("pjdfstest-full").upper().prepare(full_lower);
    let failed = pjdfstest_over(builder, "deep/er/still", "overlay-full");
    assert_eq!(failed, 0, "cases of pjdfstest failed");
}

#[test]
fn fsx_finds_no_mismatch_on_an_overlay() {
    let builder = Mount::builder("fsx-over").upper().limit(Duration::from_secs(1800));
    // A file that begins in the lower.
    let builder = builder.prepare(|lower| {
        let bytes = fuse_tests::tools::pattern(31, 700_000);
        fs::write(lower.join("fsx-31"), bytes).unwrap();
    });
    let Some(mount) = builder.start() else { return };
    let before = fs::read(mount.source_at("fsx-31")).unwrap();
    fsx(&mount, 31, operations());
    assert!(fs::read(mount.source_at("fsx-31")).unwrap() == before, "the lower was changed");
}

/// In the directory `below` of the mount; `over` names the filesystem and the mode in the report.
fn pjdfstest_over(builder: Builder, below: &str, over: &str) -> usize {
    let builder = builder.limit(Duration::from_secs(300));
    let mount = builder.start().expect("fuse and root were asked for");
    let config = mount.scratch().join("pjdfstest.toml");
    fs::write(&config, PJDFSTEST).unwrap();
    // Links and renames into another filesystem must say EXDEV.
    let other = mount.scratch().join("other");
    fs::create_dir(&other).unwrap();
    let other = other.to_str().unwrap();
    // Its sockets have names of 108 bytes at most.
    let short = ShortPath::new(&mount.at(below));
    let args = ["-c", config.to_str().unwrap(), "-s", other, "-p", short.path().to_str().unwrap()];
    let output = try_run(paths::tool("pjdfstest"), &args);
    let text = String::from_utf8_lossy(&output.stdout);
    let cases = parse(&text);
    let mut failed = 0;
    for case in &cases {
        let name = format!("pjdfstest-{over}::{}", case.name);
        report::case(case.outcome, &name, case.note.trim());
        failed += usize::from(case.outcome == Outcome::Fail);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(cases.len() > 380, "only {} cases: {text}{error}", cases.len());
    assert_eq!(output.status.success(), failed == 0, "{text}{error}");
    failed
}

/// fsx checks every byte it reads against what it wrote; one run is one case.
fn fsx(mount: &Mount, seed: u32, operations: u32) {
    let config = mount.scratch().join("fsx.toml");
    fs::write(&config, FSX).unwrap();
    let file = mount.at(format!("fsx-{seed}"));
    let (seed, count) = (seed.to_string(), operations.to_string());
    let artifacts = mount.scratch().to_str().unwrap();
    let words = ["-N", &count, "-S", &seed, "-P", artifacts, "-f", config.to_str().unwrap()];
    let args = [&words[..], &[file.to_str().unwrap()]].concat();
    let output = try_run(paths::tool("fsx"), &args);
    let name = format!("fsx-{}::seed-{seed}-{count}", mount.line().fstype);
    let good = output.status.success();
    let tail = last_lines(&output.stderr) + &last_lines(&output.stdout);
    report::case(if good { Outcome::Pass } else { Outcome::Fail }, &name, &tail);
    assert!(good, "fsx -S {seed} -N {count}:\n{tail}");
}

fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

fn operations() -> u32 {
    let asked = env::var("FUSE_TESTS_FSX").ok().map(|n| n.parse().expect("FUSE_TESTS_FSX"));
    asked.unwrap_or(4000)
}

#[test]
fn fsx_finds_no_mismatch() {
    let builder = Mount::builder("fsx").limit(Duration::from_secs(1800));
    let Some(mount) = builder.start() else { return };
    fsx(&mount, 7, operations());
}

#[test]
fn fsx_finds_no_mismatch_with_a_tiny_cache_and_small_blocks() {
    let builder = Mount::builder("fsx-small").limit(Duration::from_secs(1800));
    let builder = builder.option("cache=64K").option("bypass=16K").option("block-size=512");
    let Some(mount) = builder.start() else { return };
    fsx(&mount, 13, operations() / 2);
}

#[test]
fn fsx_finds_no_mismatch_around_the_cache() {
    let builder = Mount::builder("fsx-around").limit(Duration::from_secs(1800));
    let Some(mount) = builder.option("cache-mode=writearound").start() else { return };
    fsx(&mount, 17, operations() / 4);
}

/// fsx in writeback mode on ext4; then what is home must be what fsx left.
fn fsx_in_writeback_mode(name: &str, seed: u32, options: &[&str]) {
    let Some(mut builder) = writeback::on_ext4(name, 640) else { return };
    for option in options {
        builder = builder.journal_option(option);
    }
    let Some(mount) = builder.limit(Duration::from_secs(1800)).start() else { return };
    fsx(&mount, seed, operations());
    let left = format!("fsx-{seed}");
    let through = fs::read(mount.at(&left)).unwrap();
    writeback::flush(&mount);
    assert!(fs::read(mount.source_at(&left)).unwrap() == through, "other bytes went home");
}

#[test]
fn fsx_finds_no_mismatch_in_writeback_mode() {
    fsx_in_writeback_mode("fsx-wb", 19, &[]);
}

#[test]
fn fsx_finds_no_mismatch_with_a_journal_that_wraps_and_blocks() {
    fsx_in_writeback_mode("fsx-wb-8m", 23, &["journal_size=8M"]);
}

#[test]
fn fsx_finds_no_mismatch_in_writeback_mode_without_io_uring() {
    fsx_in_writeback_mode("fsx-wb-threads", 29, &["journal_size=8M", "no_uring"]);
}

#[test]
fn a_program_runs_from_the_mount() {
    let Some(mount) = Mount::builder("exec").start() else { return };
    let program = mount.at("true");
    // Not by this process: another test's child could inherit the descriptor for a moment.
    run("cp", &["/bin/true", program.to_str().unwrap()]);
    run(&program, &[] as &[&str]);
    let open = fs::File::options().write(true).open(Path::new(&program)).unwrap();
    let busy = std::process::Command::new(&program).status().unwrap_err();
    assert_eq!(busy.raw_os_error(), Some(libc::ETXTBSY));
    drop(open);
}
