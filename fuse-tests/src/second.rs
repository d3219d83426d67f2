//! Starting the helper program `second` and hearing what it says.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A running helper; ended and waited for when dropped.
#[derive(Debug)]
pub struct Second {
    child: Child,
    said: String,
}

impl Second {
    /// Starts `program` (`env!("CARGO_BIN_EXE_second")`) and waits for its line.
    pub fn start(program: &str, what: &str, file: &Path, more: &[&str]) -> Second {
        let mut command = Command::new(program);
        command.arg(what).arg(file).args(more).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("second");
        let mut said = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout).read_line(&mut said).expect("a line");
        Second { child, said: said.trim_end_matches('\n').to_owned() }
    }

    /// What it said.
    pub fn said(&self) -> &str {
        &self.said
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
