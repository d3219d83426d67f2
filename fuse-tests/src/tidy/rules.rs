//! Rules about single lines, functions, files and manifests.

use std::path::Path;

use super::layers::module_of;
use super::source::{Source, has_word};

/// Longest line, in characters.
pub const LINE: usize = 100;
/// Longest file, in lines.
pub const FILE: usize = 500;
/// Longest function, in lines.
pub const FUNCTION: usize = 70;

// Written in two halves, so that this file keeps its own rules.
const UNFINISHED: [&str; 5] =
    [concat!("FIX", "ME"), concat!("XX", "X"), concat!("todo", "!("), concat!("dbg", "!("), UNIMP];
const UNIMP: &str = concat!("unimpl", "emented!(");
const MACHINE: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/fa", "rm/"), concat!("/tmp/", "wt"), concat!("/root/", ".")];
const PANICS: [&str; 6] =
    [".unwrap()", ".expect(", ".unwrap_err()", "panic!(", "unreachable!(", UNIMP];

/// Rules for every text file.
pub fn any_text(file: &Path, text: &str, add: &mut impl FnMut(usize, String)) {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let narrow = name.ends_with(".rs") || name.ends_with(".sh") || name == "Makefile";
    for (at, line) in text.lines().enumerate() {
        let number = at + 1;
        if let Some(odd) = line.chars().find(|c| !c.is_ascii()) {
            add(number, format!("not ASCII: {odd:?}"));
        }
        if narrow && line.chars().count() > LINE {
            add(number, format!("{} characters (at most {LINE})", line.chars().count()));
        }
        if let Some(word) = UNFINISHED.iter().find(|word| has_word(line, word)) {
            add(number, format!("unfinished: {word}"));
        }
        if let Some(path) = MACHINE.iter().find(|path| names_path(line, path)) {
            add(number, format!("a path of one machine: {path}"));
        }
    }
}

/// Whether `path` begins a path in `line` (not in the middle of a longer name).
fn names_path(line: &str, path: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || "_.-/".contains(c);
    line.match_indices(path).any(|(at, _)| !line[..at].chars().next_back().is_some_and(inside))
}

/// Rules for Rust sources. Those about panics, unsafe code and clocks are for src/ only.
pub fn rust(file: &Path, source: &Source, add: &mut impl FnMut(usize, String)) {
    if source.lines.len() > FILE {
        add(source.lines.len(), format!("{} lines (at most {FILE})", source.lines.len()));
    }
    for (name, first, last) in &source.functions {
        let lines = last - first + 1;
        if lines > FUNCTION {
            add(first + 1, format!("fn {name} has {lines} lines (at most {FUNCTION})"));
        }
    }
    if file.starts_with("src") || file.starts_with("fuse-tests/src") {
        documented(source, add);
    }
    if file.starts_with("src") {
        shipped(file, source, add);
    }
}

fn shipped(file: &Path, source: &Source, add: &mut impl FnMut(usize, String)) {
    let module = module_of(file).unwrap_or_default();
    for (line, code) in source.shipped() {
        if module != "sys" && has_word(code, "unsafe") {
            add(line, "unsafe outside of sys".into());
        }
        if module != "sys" && has_word(code, "libc::") {
            add(line, "libc outside of sys".into());
        }
        if module != "fuse" && has_word(code, "fuser::") {
            add(line, "fuser outside of fuse".into());
        }
        if module != "clock" && has_word(code, "Instant::now") {
            add(line, "Instant::now outside of clock".into());
        }
        // The compiler evaluates a constant: a panic there is an error of the build.
        let constant = code.starts_with("const ") || code.starts_with("pub const ");
        if module != "main"
            && !constant
            && let Some(word) = PANICS.iter().find(|word| has_word(code, word))
        {
            add(line, format!("{word} in code that must not panic"));
        }
    }
}

/// Every public item has a doc line.
fn documented(source: &Source, add: &mut impl FnMut(usize, String)) {
    let kinds =
        ["fn ", "unsafe fn ", "const ", "static ", "struct ", "enum ", "trait ", "type ", "union "];
    for (at, code) in source.code.iter().enumerate() {
        let Some(item) = code.trim_start().strip_prefix("pub ") else { continue };
        if source.test[at] || !kinds.iter().any(|kind| item.starts_with(kind)) {
            continue;
        }
        let above = (0..at).rev().map(|above| source.lines[above].trim());
        // Attributes may stand between, also over several lines.
        let first = above.take_while(|line| !line.is_empty()).find(|line| {
            line.starts_with("//") || line.ends_with([';', '}', '{']) && !line.starts_with("#[")
        });
        if !first.is_some_and(|line| line.starts_with("///") || line.starts_with("//!")) {
            add(at + 1, format!("no doc line: pub {}", item.trim_end_matches(" {")));
        }
    }
}

/// Every dependency stands below a comment that says why it is there; one comment serves three.
pub fn manifest(text: &str, add: &mut impl FnMut(usize, String)) {
    let mut dependencies = false;
    let mut since_comment = usize::MAX;
    for (at, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            dependencies = line.trim_end_matches(']').ends_with("dependencies");
            since_comment = usize::MAX;
        } else if line.starts_with('#') {
            since_comment = 0;
        } else if line.is_empty() {
            since_comment = usize::MAX;
        } else if dependencies && line.contains('=') && !line.starts_with(' ') {
            since_comment = since_comment.saturating_add(1);
            if since_comment > 3 {
                let name = line.split(['=', '.']).next().unwrap_or(line).trim();
                add(at + 1, format!("dependency {name} without a reason above it"));
            }
        }
    }
}
