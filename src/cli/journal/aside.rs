//! Keeping what is given up: a journal, or a copy of it, under the first free name beside it.
//!
//! No state. Invariant: what is kept is durable before this returns.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    Access as Mode, AtFlags, Mode as Permissions, OFlags, accessat, fsync, ftruncate, openat,
    renameat, unlinkat,
};

use crate::cli::failure::Outcome;
use crate::cli::run::source::Source;
use crate::cli::run::state::home::{Home, cannot};
use crate::cli::run::state::{file, mark};
use crate::device::BlockDevice;
use crate::error::{Error, OpContext, Result};
use crate::tree::host::STATE_NAME;

/// Bytes copied at once; where all of them are zero a hole is left.
const CHUNK: usize = 64 << 10;

/// The first free `journal.WORD.N`.
fn free_name(directory: impl AsFd, word: &str) -> PathBuf {
    let name = |number: u32| PathBuf::from(format!("{}.{word}.{number}", file::NAME));
    let directory = directory.as_fd();
    let free =
        |number: &u32| accessat(directory, name(*number), Mode::EXISTS, AtFlags::empty()).is_err();
    name((1..u32::MAX).find(free).unwrap_or(u32::MAX))
}

/// Renames the journal of a state directory to `journal.abandoned.N`; its new path.
pub fn rename(home: &Home) -> Outcome<PathBuf> {
    let directory = home.fd();
    let name = free_name(directory, "abandoned");
    let moved = renameat(directory, file::NAME, directory, &name).and_then(|()| fsync(directory));
    moved.map_err(|errno| cannot("move", &home.journal_path(), &Error::os("rename", errno)))?;
    Ok(home.path.join(name))
}

/// Copies the journal to `journal.skipped.N`, beside it or, of a partition, in SOURCE's own state
/// directory; the copy's path.
pub fn copy(home: &Home, source: &Source) -> Outcome<PathBuf> {
    let failed = |path: &Path, error: Error| cannot("keep a copy of the journal", path, &error);
    let (directory, place) = if home.is_partition() {
        let place = source.path.join(STATE_NAME);
        let made = mark::make_directory(&source.lock).map_err(|error| failed(&place, error))?;
        (made, place)
    } else {
        let same = home.fd().try_clone_to_owned().op("dup");
        (same.map_err(|error| failed(&home.path, error))?, home.path.clone())
    };
    let name = free_name(&directory, "skipped");
    let path = place.join(&name);
    let Some(journal) = home.journal()? else { return Ok(path) };
    if let Err(error) = copy_to(&journal, &directory, &name) {
        let _ = unlinkat(&directory, &name, AtFlags::empty());
        return Err(failed(&path, error).into());
    }
    Ok(path)
}

fn copy_to(journal: &dyn BlockDevice, directory: impl AsFd, name: &Path) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Permissions::RUSR | Permissions::WUSR;
    let file = File::from(openat(&directory, name, flags, mode).op("create")?);
    let size = journal.size()?;
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        let read = journal.read_at(&mut chunk, at)?;
        let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { break };
        if bytes.iter().any(|&byte| byte != 0) {
            file.write_all_at(bytes, at).op("write")?;
        }
        at += read as u64;
    }
    ftruncate(&file, size).op("truncate")?;
    file.sync_all().op("fsync")?;
    fsync(&directory).op("fsync")
}
