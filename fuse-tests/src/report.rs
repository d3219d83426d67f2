//! The line protocol between tests and the runner, and the gate of tests that need FUSE or root.
//!
//! Where `$FUSE_TESTS_REPORT` names a directory, each line "pass|fail|skip TAB case TAB note" in
//! a file there is one result: the cases of an external suite, or a test that skipped itself (its
//! case is the test's own name; the runner then counts it as skipped and not as passed).
//! Without it (ordinary `cargo test`) the lines go to standard error.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Pass,
    /// Not as it should.
    Fail,
    /// Not run.
    Skip,
}

impl Outcome {
    /// The word in the report.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Pass => "pass",
            Outcome::Fail => "fail",
            Outcome::Skip => "skip",
        }
    }

    /// The outcome of a word.
    pub fn parse(word: &str) -> Option<Outcome> {
        [Outcome::Pass, Outcome::Fail, Outcome::Skip].into_iter().find(|o| o.word() == word)
    }
}

/// One reported line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// How it ended.
    pub outcome: Outcome,
    /// Its name: "pjdfstest::chmod::etxtbsy", or the name of a test that skipped itself.
    pub name: String,
    /// Why, on one line.
    pub note: String,
}

impl Case {
    /// The line in the report file.
    pub fn line(&self) -> String {
        let flat = |text: &str| text.replace(['\t', '\n', '\r'], " ");
        format!("{}\t{}\t{}\n", self.outcome.word(), flat(&self.name), flat(&self.note))
    }

    /// The case of a line.
    pub fn parse(line: &str) -> Option<Case> {
        let mut fields = line.trim_end_matches('\n').splitn(3, '\t');
        let outcome = Outcome::parse(fields.next()?)?;
        let name = fields.next()?.to_owned();
        Some(Case { outcome, name, note: fields.next().unwrap_or("").to_owned() })
    }
}

/// Reports one case of an external suite.
pub fn case(outcome: Outcome, name: &str, note: &str) {
    static LOCK: Mutex<()> = Mutex::new(());
    let _one_line_at_a_time = LOCK.lock();
    let case = Case { outcome, name: name.to_owned(), note: note.to_owned() };
    let Some(dir) = env::var_os("FUSE_TESTS_REPORT").map(PathBuf::from) else {
        if outcome != Outcome::Pass {
            eprint!("{}", case.line());
        }
        return;
    };
    let path = dir.join(format!("{}.tsv", std::process::id()));
    let file = OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(case.line().as_bytes()));
    written.unwrap_or_else(|e| panic!("report to {}: {e}", path.display()));
}

/// The name of the running test.
pub fn test_name() -> String {
    std::thread::current().name().unwrap_or("unnamed").to_owned()
}

/// Reports the running test as skipped; the caller returns then.
pub fn skip(reason: &str) {
    let name = test_name();
    if env::var_os("FUSE_TESTS_REPORT").is_none() {
        // The hook of libtest captures print macros only.
        let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {reason}");
    }
    case(Outcome::Skip, &name, reason);
}

/// Whether a mount is possible here; if not the running test is reported as skipped, or fails
/// where `FUSE_TESTS=require`.
pub fn have_fuse() -> bool {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let Err(error) = opened else { return true };
    assert!(!required(), "FUSE_TESTS=require, but /dev/fuse: {error}");
    skip(&format!("NO MOUNT TESTS: /dev/fuse: {error}"));
    false
}

/// Whether nothing may be skipped for want of FUSE.
pub fn required() -> bool {
    env::var("FUSE_TESTS").is_ok_and(|value| value == "require")
}

/// Whether this is root; if not the running test is reported as skipped.
pub fn have_root(what_for: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(&format!("needs root: {what_for}"));
    }
    root
}

/// Whether the full sizes are asked for (`FUSE_TESTS_FULL=1`, `make full`).
pub fn full() -> bool {
    env::var("FUSE_TESTS_FULL").is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_survives_the_way_to_the_runner() {
        let case = Case { outcome: Outcome::Skip, name: "a::b".into(), note: "why\tnot\n".into() };
        let read = Case::parse(&case.line()).unwrap();
        assert_eq!((read.name.as_str(), read.note.as_str()), ("a::b", "why not "));
        assert_eq!(Case::parse("maybe\ta\tb"), None);
        assert_eq!(Case::parse("pass\ta").unwrap().note, "");
    }
}
