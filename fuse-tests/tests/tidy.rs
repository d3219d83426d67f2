//! The rules of the sources, and a bad snippet for each of them.

use std::fs;
use std::path::Path;

use fuse_tests::paths::repository;
use fuse_tests::tidy::{check, files};

#[test]
fn the_sources_keep_the_rules() {
    let root = repository();
    let mut found = Vec::new();
    let files = files(&root);
    assert!(files.len() > 20, "only {} files seen below {}", files.len(), root.display());
    for file in files {
        let bytes = fs::read(root.join(&file)).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        found.extend(check(&file, &text).iter().map(ToString::to_string));
    }
    assert!(found.is_empty(), "{} findings:\n{}", found.len(), found.join("\n"));
}

/// The findings in a file of this name and text, as "LINE: WHAT".
fn findings(file: &str, text: &str) -> Vec<String> {
    let found = check(Path::new(file), text);
    found.iter().map(|finding| format!("{}: {}", finding.line, finding.what)).collect()
}

fn caught(file: &str, text: &str, expected: &str) {
    let found = findings(file, text);
    assert!(found.iter().any(|found| found.starts_with(expected)), "{file}: {found:?}");
}

fn clean(file: &str, text: &str) {
    assert_eq!(findings(file, text), Vec::<String>::new(), "{file}: {text}");
}

#[test]
fn an_upward_use_is_caught() {
    caught("src/cache/lru.rs", "\nuse crate::store::Store;\n", "2: cache (layer 3) uses store");
    caught("src/cache/lru.rs", "use crate::journal::Seq;\n", "1: cache (layer 3) uses journal");
    caught("src/store/a.rs", "use crate::{\n  units::A,\n  fs::B,\n};\n", "3: store (layer 4)");
    caught("src/error.rs", "fn f() { crate::sys::g() }\n", "1: error (layer 0) uses sys");
    caught("src/odd/mod.rs", "\n", "1: module odd stands in no layer");
    caught("src/cache/lru.rs", "use super::super::store::A;\n", "1: super::super::");
    caught("src/cache/mod.rs", "use super::store::A;\n", "1: super::");
    clean("src/cache/lru.rs", "use super::Shard;\nuse crate::units::Extent;\n// crate::fs\n");
    clean("src/cache/a/b.rs", "use super::super::Shard;\n");
    clean("src/store/mod.rs", "use crate::cache::Cache;\nuse crate::store::dirty::Map;\n");
    clean("src/stats.rs", "use crate::units::DeviceId;\n");
}

#[test]
fn long_things_are_caught() {
    caught("src/fs/a.rs", &"\n".repeat(501), "501: 501 lines");
    clean("src/fs/a.rs", &"\n".repeat(500));
    let function = |lines: usize| format!("fn long() {{\n{}}}\n", "    f();\n".repeat(lines - 2));
    caught("fuse-tests/tests/a.rs", &function(71), "1: fn long has 71 lines");
    clean("fuse-tests/tests/a.rs", &function(70));
    caught("src/fs/a.rs", &format!("// {}\n", "x".repeat(98)), "1: 101 characters");
    caught("Makefile", &format!("# {}\n", "x".repeat(99)), "1: 101 characters");
}

#[test]
fn unsafe_code_and_foreign_layers_are_caught() {
    caught("src/fs/a.rs", "fn f() {\n    unsafe { g() }\n}\n", "2: unsafe outside");
    caught("src/fs/a.rs", "fn f() -> i32 {\n    libc::EIO\n}\n", "2: libc outside");
    caught("src/fs/a.rs", "use fuser::Errno;\n", "1: fuser outside");
    caught("src/fs/a.rs", "fn f() {\n    std::time::Instant::now();\n}\n", "2: Instant::now");
    clean("src/sys/a.rs", "fn f() {\n    unsafe { libc::sync() }\n}\n");
    clean("src/fuse/adapter.rs", "use fuser::Errno;\n");
    clean("src/fs/a.rs", "// unsafe, libc:: and fuser:: in words\nconst A: &str = \"unsafe\";\n");
    clean("src/fs/a.rs", "#[cfg(test)]\nmod tests {\n    const A: i32 = libc::EIO;\n}\n");
    clean("fuse-tests/tests/a.rs", "use fuser::Errno;\n");
}

#[test]
fn panics_are_caught() {
    caught("src/fs/a.rs", "fn f() {\n    g().unwrap();\n}\n", "2: .unwrap()");
    caught("src/fs/a.rs", "fn f() {\n    g().expect(\"x\");\n}\n", "2: .expect(");
    caught("src/fs/a.rs", "fn f() {\n    panic!(\"x\");\n}\n", "2: panic!(");
    caught("src/fs/a.rs", "fn f() {\n    unreachable!();\n}\n", "2: unreachable!(");
    clean("src/fs/a.rs", "fn f() {\n    g().unwrap_or(1);\n    h().unwrap_or_default();\n}\n");
    clean(
        "src/fs/a.rs",
        "#[cfg(test)]\nmod tests {\n    fn f() {\n        g().unwrap();\n    }\n}\n",
    );
    clean("src/main.rs", "fn main() {\n    g().unwrap();\n}\n");
    clean("src/fs/a.rs", "const A: NonZeroU8 = NonZeroU8::new(1).unwrap();\n");
    clean("src/fs/tests.rs", "fn f() {\n    g().unwrap();\n}\n");
    clean("fuse-tests/tests/a.rs", "fn f() {\n    g().unwrap();\n}\n");
}

#[test]
fn unfinished_and_foreign_text_is_caught() {
    caught("src/fs/a.rs", concat!("// FIX", "ME later\n"), "1: unfinished");
    caught("src/fs/a.rs", concat!("// XX", "X\n"), "1: unfinished");
    caught("src/fs/a.rs", concat!("fn f() {\n    todo", "!()\n}\n"), "2: unfinished");
    clean("fuse-tests/demo.sh", concat!("mktemp -d x.XX", "XXXX\n"));
    caught("README.md", "an m\u{2014}dash\n", "1: not ASCII");
    caught("Makefile", concat!("cp /wo", "rk/main/x .\n"), "1: a path of one machine");
    clean("README.md", concat!("Frame/wo", "rk/things\n"));
}

#[test]
fn a_public_item_without_doc_is_caught() {
    caught("src/fs/a.rs", "pub fn f() {}\n", "1: no doc line: pub fn f()");
    caught("src/fs/a.rs", "//! m\n\n#[derive(Debug)]\npub struct A;\n", "4: no doc line");
    caught("src/fs/a.rs", "impl A {\n    pub fn f() {}\n}\n", "2: no doc line");
    caught("src/fs/a.rs", "// plain\npub const A: u8 = 1;\n", "2: no doc line");
    clean("src/fs/a.rs", "/// D.\n#[derive(Debug)]\n#[serde(\n    x\n)]\npub struct A;\n");
    clean("src/fs/a.rs", "pub mod b;\npub use b::C;\nfn private() {}\npub(crate) fn g() {}\n");
}

#[test]
fn a_dependency_without_reason_is_caught() {
    let text = "[dependencies]\n# Why.\nlog = \"1\"\nenv_logger = \"1\"\n\nlibc = \"1\"\n";
    caught("Cargo.toml", text, "6: dependency libc without a reason");
    caught("Cargo.toml", "[dev-dependencies]\ntempfile = \"3\"\n", "2: dependency tempfile");
    clean("Cargo.toml", "[package]\nname = \"x\"\n\n[dependencies]\n# Why.\nlog = \"1\"\n");
}
