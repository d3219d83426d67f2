//! Adding up results and printing them.

use std::collections::BTreeMap;

use super::skips::AllowedSkips;
use crate::report::{Case, Outcome};

/// The results of one test file.
#[derive(Debug, Default)]
pub struct FileResult {
    /// The file.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
    /// How many tests and cases passed.
    pub passed: usize,
    /// Failed ones by name.
    pub failed: Vec<String>,
    /// Skipped ones: name, note.
    pub skipped: Vec<(String, String)>,
    /// The text of the failures.
    pub details: String,
}

impl FileResult {
    /// A file in which something outside of a test failed.
    pub fn broken(file: &str, what: &str, details: &str) -> FileResult {
        let failed = vec![format!("{file}::{what}")];
        FileResult { name: file.into(), failed, details: details.into(), ..FileResult::default() }
    }

    /// Adds the lines that the file's tests reported. `tests` are the names of its own tests: a
    /// skip of one of them was counted as passed by libtest.
    pub fn add_cases(&mut self, cases: Vec<Case>, tests: &[String]) {
        for case in cases {
            let name = format!("{}::{}", self.name, case.name);
            match case.outcome {
                Outcome::Pass => self.passed += 1,
                Outcome::Fail => {
                    self.details.push_str(&format!("{name}: {}\n", case.note));
                    self.failed.push(name);
                }
                Outcome::Skip => {
                    if tests.contains(&case.name) {
                        self.passed = self.passed.saturating_sub(1);
                    }
                    self.skipped.push((name, case.note));
                }
            }
        }
    }
}

/// The sum.
#[derive(Debug)]
pub struct Tally {
    allowed: AllowedSkips,
    files: Vec<FileResult>,
}

impl Tally {
    /// Nothing yet.
    pub fn new(allowed: AllowedSkips) -> Tally {
        Tally { allowed, files: Vec::new() }
    }

    /// Adds a file and prints its line; a skip that is not listed becomes a failure.
    pub fn add(&mut self, mut file: FileResult) {
        let (listed, unlisted) = std::mem::take(&mut file.skipped)
            .into_iter()
            .partition(|(name, note)| self.allowed.allow(name, note));
        file.skipped = listed;
        for (name, note) in unlisted {
            file.details.push_str(&format!("{name}: skipped, not in allowed-skips.txt: {note}\n"));
            file.failed.push(name);
        }
        let empty = file.passed + file.failed.len() + file.skipped.len() == 0;
        if empty {
            return;
        }
        println!(
            "{:34} {:>6} {:>6} {:>7} {:>9.1}",
            file.name,
            file.passed,
            file.failed.len(),
            file.skipped.len(),
            file.seconds
        );
        self.files.push(file);
    }

    /// Prints what went wrong, and what was skipped.
    pub fn print_failures(&self) {
        for file in self.files.iter().filter(|file| !file.failed.is_empty()) {
            println!("\n=== {} ===\n{}", file.name, file.details.trim_end());
        }
        let mut notes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, note) in self.files.iter().flat_map(|file| &file.skipped) {
            notes.entry(note).or_default().push(name);
        }
        for (note, names) in notes {
            println!("\nskipped, since: {note}\n  {}", names.join("\n  "));
        }
        for name in self.files.iter().flat_map(|file| &file.failed) {
            println!("FAILED {name}");
        }
    }

    /// Whether something ran and nothing failed.
    pub fn good(&self) -> bool {
        let ran: usize = self.files.iter().map(|file| file.passed).sum();
        ran > 0 && self.files.iter().all(|file| file.failed.is_empty())
    }

    /// "N passed, N failed", with ", N skipped" if there are any.
    pub fn closing_line(&self) -> String {
        let passed: usize = self.files.iter().map(|file| file.passed).sum();
        let failed: usize = self.files.iter().map(|file| file.failed.len()).sum();
        let skipped: usize = self.files.iter().map(|file| file.skipped.len()).sum();
        match skipped {
            0 => format!("{passed} passed, {failed} failed"),
            _ => format!("{passed} passed, {failed} failed, {skipped} skipped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(outcome: Outcome, name: &str) -> Case {
        Case { outcome, name: name.into(), note: "note".into() }
    }

    #[test]
    fn cases_are_counted_one_by_one_and_an_unlisted_skip_fails() {
        let mut tally = Tally::new(AllowedSkips::parse("posix::s::listed | * | why").unwrap());
        let mut file = FileResult { name: "posix".into(), passed: 2, ..FileResult::default() };
        let cases = vec![
            case(Outcome::Pass, "s::a"),
            case(Outcome::Skip, "s::listed"),
            case(Outcome::Skip, "own_test"),
        ];
        file.add_cases(cases, &["own_test".into()]);
        tally.add(file);
        assert_eq!(tally.closing_line(), "2 passed, 1 failed, 1 skipped");
        assert!(!tally.good());
    }

    #[test]
    fn nothing_run_is_not_good() {
        assert!(!Tally::new(AllowedSkips::default()).good());
    }
}
