//! Building the binary under test and all test programs with cargo.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::paths;

/// One test executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The file's name ("names"), or the package's with " (unit)".
    pub name: String,
    /// What to run.
    pub executable: PathBuf,
    /// The directory cargo would run it in.
    pub directory: PathBuf,
    /// Runs early: unit tests, then tidy.
    pub rank: u8,
}

/// cargo with the runner's target directory, in the repository.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(paths::repository()).stdin(Stdio::null());
    cargo.env("CARGO_TARGET_DIR", paths::target_dir());
    cargo
}

/// Builds everything; the programs in the order they are run.
pub fn test_programs() -> Result<Vec<Program>, String> {
    let mut build = cargo();
    build.args(["build", "-q", "-p", "bcachefs-fuse", "--bin", "bcachefs-fuse"]);
    let status = build.status().map_err(|e| format!("cargo: {e}"))?;
    if !status.success() {
        return Err("the binary under test does not build".into());
    }
    let mut build = cargo();
    build.args(["test", "-q", "--workspace", "--no-run"]);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().map_err(|e| format!("cargo: {e}"))?;
    if !output.status.success() {
        return Err("the tests do not build".into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut programs: Vec<Program> = text.lines().filter_map(parse_artifact).collect();
    programs.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
    Ok(programs)
}

/// The program of one line of cargo's JSON messages.
fn parse_artifact(line: &str) -> Option<Program> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let executable = PathBuf::from(message["executable"].as_str()?);
    let directory = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let (name, rank) = match (kind, target) {
        ("test", "tidy") => (target.to_owned(), 1),
        ("test", _) => (target.to_owned(), 2),
        (_, _) => (format!("{target} ({kind})"), 0),
    };
    Some(Program { name, executable, directory, rank })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_executables_are_taken() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/r/fuse-tests/Cargo.toml",
            "target":{"kind":["test"],"name":"names"},"profile":{"test":true},
            "executable":"/t/names-1"}"#
            .replace('\n', "");
        let program = parse_artifact(&line).unwrap();
        assert_eq!((program.name.as_str(), program.rank), ("names", 2));
        assert_eq!(program.directory.to_str(), Some("/r/fuse-tests"));
        assert_eq!(parse_artifact(&line.replace("\"test\":true", "\"test\":false")), None);
    }
}
