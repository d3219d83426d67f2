//! `names.log`: batches of rows that the database has, but not durably.
//!
//! A batch is appended before its change is answered, so it survives kill -9 in the host's page
//! cache; the database's next durable commit makes the log needless. A record is its length, the
//! CRC32C of what follows, its sequence and the batch (all little-endian). Sequences follow one
//! another: what a power cut left of an older log behind newer records is seen by them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::meta::Change;
use crate::error::{Error, Kind, OpContext, Result};

/// Its name in the upper directory.
const NAME: &str = "names.log";

const HEAD_BYTES: usize = 16;

/// The open log.
pub(super) struct BatchLog {
    file: File,
    len: u64,
    /// The sequence of the last record.
    seq: u64,
}

/// A place in the log, to return to.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    len: u64,
    seq: u64,
}

impl BatchLog {
    /// Opens the log beside a database, or makes it.
    pub(super) fn open(database: &Path) -> Result<BatchLog> {
        let path = database.with_file_name(NAME);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        Ok(BatchLog { file: file.op("open names.log")?, len: 0, seq: 0 })
    }

    /// The batches behind `applied`, oldest first; what is appended comes after them.
    pub(super) fn read_behind(&mut self, applied: u64) -> Result<Vec<Vec<Change>>> {
        let size = self.file.metadata().op("stat names.log")?.len();
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, 0).op("read names.log")?;
        let (mut batches, mut rest) = (Vec::new(), bytes.as_slice());
        (self.len, self.seq) = (0, applied);
        let mut last = None;
        while let Some((seq, payload, behind)) = record(rest) {
            if last.is_some_and(|last| seq != last + 1) {
                break;
            }
            last = Some(seq);
            if seq > applied {
                if seq != self.seq + 1 {
                    break;
                }
                let batch = postcard::from_bytes(payload)
                    .map_err(|error| Error::new(Kind::Corrupt, "names.log", error.to_string()))?;
                batches.push(batch);
                self.seq = seq;
            }
            self.len += (HEAD_BYTES + payload.len()) as u64;
            rest = behind;
        }
        Ok(batches)
    }

    /// Appends a batch; its sequence.
    pub(super) fn append(&mut self, batch: &[Change]) -> Result<u64> {
        let payload = postcard::to_allocvec(batch)
            .map_err(|error| Error::new(Kind::Internal, "names.log", error.to_string()))?;
        let seq = self.seq + 1;
        let mut bytes = (payload.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&seq.to_le_bytes());
        bytes.extend_from_slice(&payload);
        let sum = crc32c::crc32c(bytes.get(8..).unwrap_or_default());
        if let Some(place) = bytes.get_mut(4..8) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
        self.file.write_all_at(&bytes, self.len).op("write names.log")?;
        self.len += bytes.len() as u64;
        self.seq = seq;
        Ok(seq)
    }

    pub(super) fn mark(&self) -> Mark {
        Mark { len: self.len, seq: self.seq }
    }

    /// What was appended since then never was.
    pub(super) fn back_to(&mut self, mark: Mark) -> Result<()> {
        (self.len, self.seq) = (mark.len, mark.seq);
        self.file.set_len(mark.len).op("truncate names.log")
    }

    /// The last sequence.
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    /// Bytes of batches that no durable commit covers.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The database has all of it durably. An error costs nothing but space.
    pub(super) fn clear(&mut self) {
        if self.len > 0 && self.file.set_len(0).is_ok() {
            self.len = 0;
        }
    }
}

/// The first record of some bytes, and what follows it.
fn record(bytes: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let end = 8usize.checked_add(u32::from_le_bytes(*len) as usize)?;
    let (body, behind) = rest.split_at_checked(end)?;
    if crc32c::crc32c(body) != u32::from_le_bytes(*sum) {
        return None;
    }
    let (seq, payload) = body.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*seq), payload, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(n: u64) -> Vec<Change> {
        vec![Change::Orphan(n), Change::Whiteout(n, vec![b'x'; n as usize])]
    }

    #[test]
    fn batches_come_again_up_to_the_first_that_is_not_whole() {
        let scratch = tempfile::tempdir().unwrap();
        let database = scratch.path().join("meta.redb");
        let mut log = BatchLog::open(&database).unwrap();
        assert!(log.read_behind(5).unwrap().is_empty());
        for n in 0..4 {
            assert_eq!(log.append(&batch(n)).unwrap(), 6 + n);
        }
        let mark = log.mark();
        log.append(&batch(9)).unwrap();
        log.back_to(mark).unwrap();
        let mut again = BatchLog::open(&database).unwrap();
        let wanted: Vec<_> = (0..4).map(batch).collect();
        assert_eq!(again.read_behind(5).unwrap(), wanted);
        assert_eq!(again.read_behind(7).unwrap(), wanted[2..]);
        assert!(again.read_behind(9).unwrap().is_empty());
        assert_eq!(again.append(&batch(1)).unwrap(), 10);
        // Every torn tail is a prefix.
        let bytes = std::fs::read(scratch.path().join(NAME)).unwrap();
        for cut in 0..bytes.len() {
            std::fs::write(scratch.path().join(NAME), &bytes[..cut]).unwrap();
            let found = BatchLog::open(&database).unwrap().read_behind(5).unwrap();
            assert_eq!(found, wanted[..found.len()], "cut at {cut}");
        }
        // Nothing of a gap is taken.
        std::fs::write(scratch.path().join(NAME), &bytes).unwrap();
        assert!(BatchLog::open(&database).unwrap().read_behind(3).unwrap().is_empty());
    }

    #[test]
    fn an_older_log_behind_newer_records_is_not_read() {
        let scratch = tempfile::tempdir().unwrap();
        let database = scratch.path().join("meta.redb");
        let mut log = BatchLog::open(&database).unwrap();
        log.read_behind(0).unwrap();
        (0..3).for_each(|n| assert_eq!(log.append(&batch(n)).unwrap(), n + 1));
        let old = std::fs::read(scratch.path().join(NAME)).unwrap();
        log.clear();
        log.append(&batch(0)).unwrap();
        let mut new = std::fs::read(scratch.path().join(NAME)).unwrap();
        // The truncation was lost, the record was not.
        new.extend_from_slice(&old[new.len()..]);
        std::fs::write(scratch.path().join(NAME), &new).unwrap();
        let found = BatchLog::open(&database).unwrap().read_behind(3).unwrap();
        assert_eq!(found, [batch(0)]);
    }
}
