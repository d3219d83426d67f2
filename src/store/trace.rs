//! Records read requests, one line each: "unit first_block blocks", for replay against other
//! caches (examples/raidz_boot.rs). Off, it costs one relaxed load per request. The lock is taken
//! alone; it is held while a full buffer goes to the file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Writes a trace while switched on.
#[derive(Debug, Default)]
pub struct TraceRecorder {
    on: AtomicBool,
    file: Mutex<Option<BufWriter<File>>>,
}

impl TraceRecorder {
    /// Starts a new trace in `path` (replaced if it exists); one that is running ends. The file
    /// must not lie in a mount that this recorder watches.
    pub fn start(&self, path: &Path) -> Result<()> {
        let file = File::create(path).map_err(|e| Error::os("trace", e).at_path(path))?;
        self.stop();
        *self.file.lock() = Some(BufWriter::with_capacity(64 << 10, file));
        self.on.store(true, Relaxed);
        Ok(())
    }

    /// Whether requests should be recorded.
    pub fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Adds one request, in blocks of the cache.
    pub fn record(&self, unit: u32, first_block: u64, blocks: u64) {
        if !self.is_on() {
            return;
        }
        let mut file = self.file.lock();
        let Some(open) = file.as_mut() else { return };
        if let Err(error) = writeln!(open, "{unit} {first_block} {blocks}") {
            // Reads must not fail because the trace's disk is full.
            log::error!("trace: {error}; recording stopped");
            self.abandon(&mut file);
        }
    }

    /// Ends the trace; what was recorded is in its file when this returns.
    pub fn stop(&self) {
        let mut file = self.file.lock();
        if let Some(Err(error)) = file.as_mut().map(Write::flush) {
            log::error!("trace: {error}; its last requests are lost");
        }
        self.abandon(&mut file);
    }

    fn abandon(&self, file: &mut Option<BufWriter<File>>) {
        self.on.store(false, Relaxed);
        if let Some(writer) = file.take() {
            // Without another attempt to write what just failed.
            drop(writer.into_parts());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_in_the_file_after_stop_and_nothing_is_recorded_when_off() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let recorder = TraceRecorder::default();
        recorder.record(1, 2, 3);
        recorder.start(&first).unwrap();
        assert!(recorder.is_on());
        recorder.record(1, 2, 3);
        recorder.record(4, 5, 6);
        recorder.start(&second).unwrap();
        recorder.record(7, 8, 9);
        recorder.stop();
        recorder.record(1, 1, 1);
        assert_eq!(std::fs::read_to_string(first).unwrap(), "1 2 3\n4 5 6\n");
        assert_eq!(std::fs::read_to_string(second).unwrap(), "7 8 9\n");
        assert!(!recorder.is_on());
    }

    #[test]
    fn a_file_that_cannot_be_made_or_written_is_an_error_or_the_end() {
        let recorder = TraceRecorder::default();
        let error = recorder.start(Path::new("/proc/self/nowhere/trace")).unwrap_err();
        assert_eq!((error.op, error.errno()), ("trace", libc::ENOENT));
        recorder.start(Path::new("/dev/full")).unwrap();
        for block in 0..10_000 {
            recorder.record(1, block, 1);
        }
        assert!(!recorder.is_on());
    }
}
