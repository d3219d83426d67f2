//! The rules of the sources that no compiler checks; `fuse-tests/tests/tidy.rs` runs them.

pub mod layers;
pub mod rules;
pub mod source;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

pub use source::Source;

/// A broken rule: "src/a.rs:12: what is wrong".
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file, relative to the repository.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// Every finding in one file.
pub fn check(file: &Path, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |line: usize, what: String| {
        found.push(Finding { file: file.to_owned(), line, what });
    };
    rules::any_text(file, text, &mut add);
    if file.extension().is_some_and(|ext| ext == "rs") {
        let mut source = Source::new(text);
        if file.file_stem().is_some_and(is_test_file) {
            source = source.all_test();
        }
        rules::rust(file, &source, &mut add);
        layers::check(file, &source, &mut add);
    }
    if file.file_name().is_some_and(|name| name == "Cargo.toml") {
        rules::manifest(text, &mut add);
    }
    found.sort();
    found
}

/// tests.rs and *_tests.rs: included by `#[cfg(test)] mod tests;` only.
fn is_test_file(stem: &OsStr) -> bool {
    let stem = stem.to_string_lossy();
    stem == "tests" || stem.ends_with("_tests")
}

/// The text files of the repository that the rules are about, relative to `root`.
pub fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(root.join(&dir)).into_iter().flatten().flatten() {
            let path = dir.join(entry.file_name());
            let kind = entry.file_type().expect("file type");
            let name = entry.file_name().to_string_lossy().into_owned();
            if kind.is_dir() && !["target", ".git", "traces"].contains(&name.as_str()) {
                open.push(path);
            } else if kind.is_file() && is_ours(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn is_ours(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let endings = [".rs", ".toml", ".md", ".sh", ".txt", ".service"];
    endings.iter().any(|ending| name.ends_with(ending))
        || name == "Makefile"
        || path == Path::new(".ci/run")
}
