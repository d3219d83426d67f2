//! Four writers of a storm on a mount, and what is done to them: started, ended by the death of
//! their daemon, their files checked.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::Mount;
use crate::storm::{self, FILES, Model};
use crate::tools::wait_for;

/// Writers of a storm.
pub const WRITERS: u64 = 4;

/// The writers of one round; ended when dropped.
#[derive(Debug)]
pub struct Writers(Vec<Child>);

impl Writers {
    /// Starts them; `program` is the binary `storm`.
    pub fn start(program: &str, mount: &Mount, seed: u64, round: u64) -> Writers {
        let start = |writer: u64| {
            let log = storm::log(mount.scratch(), round, writer);
            let mut command = Command::new(program);
            command.arg(mount.path()).args([seed, round, writer].map(|n| n.to_string()));
            command.arg(log).stdin(Stdio::null()).spawn().expect("storm")
        };
        Writers((0..WRITERS).map(start).collect())
    }

    /// Waits until all have met the death of their mount; a writer that met anything else (a
    /// refused write, wrong bytes) fails the test.
    pub fn end(&mut self) {
        for (writer, child) in self.0.iter_mut().enumerate() {
            let ended = wait_for(Duration::from_secs(20), || child.try_wait().expect("wait"));
            let status = ended.unwrap_or_else(|| panic!("writer {writer} hangs"));
            assert!(status.success(), "writer {writer} ended with {status}");
        }
    }

    /// Whether all still write.
    pub fn alive(&mut self) -> bool {
        self.0.iter_mut().all(|child| child.try_wait().expect("wait").is_none())
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The models before the first round.
pub fn nothing() -> Vec<Model> {
    vec![vec![Vec::new(); FILES]; WRITERS as usize]
}

/// Checks every file after a crash and removes the logs; the number of acknowledged operations.
pub fn check(mount: &Mount, seed: u64, round: u64, models: &mut [Model]) -> Result<u64, String> {
    let mut all = 0;
    for (writer, model) in (0..WRITERS).zip(models) {
        let log = storm::log(mount.scratch(), round, writer);
        // Without a log it was ended before it had opened its files.
        let Ok(meta) = fs::metadata(&log) else { continue };
        storm::check(mount.path(), seed, round, writer, meta.len(), model)?;
        all += meta.len();
        fs::remove_file(log).map_err(|e| e.to_string())?;
    }
    Ok(all)
}

/// Asserts that the source alone holds what the models say.
pub fn source_equals(source: &Path, models: &[Model]) {
    for (writer, model) in (0u64..).zip(models) {
        for (file, wanted) in (0..FILES).zip(model) {
            let name = storm::name(writer, file);
            let there = fs::read(source.join(&name)).unwrap_or_default();
            if let Some(wrong) = storm::same(&there, wanted) {
                panic!("{name} in the source: {wrong}");
            }
        }
    }
}
