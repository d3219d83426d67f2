//! An upper directory: what is made of an empty one, and what is checked of one that is there.
//!
//! No state after `open`. Whoever opens it holds its lock (the journal's, of `.bcachefs-fuse`).

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fsync, mkdirat, openat};
use rustix::io::Errno;

use super::layers::LOWERS_MAX;
use super::meta::{self, LowerId, Meta, Super};
use crate::clock;
use crate::config::DirectIo;
use crate::error::{Error, Kind, OpContext, Result};
use crate::sys::handle::FileHandle;
use crate::tree::HostTree;

/// The directory of blocks.
const DATA: &str = "data";

/// A log of names without a database: of an upper that was being made.
const LOG: &str = "names.log";

/// While a new database is made.
const ASIDE: &str = "meta.redb.new";

/// The default size of an overlay block, in bytes.
pub const BLOCK_BYTES: u32 = 4096;

/// A lower that was opened: an O_PATH descriptor, and its path for people.
pub struct Lower {
    /// O_PATH | O_DIRECTORY.
    pub root: OwnedFd,
    /// Where it is.
    pub path: PathBuf,
}

/// An open upper with its lowers.
pub struct Upper {
    pub(super) meta: Meta,
    pub(super) head: Super,
    pub(super) data: OwnedFd,
    pub(super) hosts: Vec<HostTree>,
}

impl Upper {
    /// Opens the upper at `path` over `lowers`, first one first; an empty directory becomes one.
    /// NotSupported: another version, or other lowers; Busy: in use; Exists: not an upper.
    pub fn open(
        path: &Path,
        lowers: Vec<Lower>,
        direct_io: DirectIo,
        max_open: usize,
    ) -> Result<Upper> {
        if lowers.is_empty() || lowers.len() > LOWERS_MAX {
            let place = format!("{} lowers", lowers.len());
            return Err(Error::new(Kind::Invalid, "open", place));
        }
        let ids = lowers.iter().map(id_of).collect::<Result<Vec<_>>>()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).op("open")?;
        let database = path.join(meta::NAME);
        let meta = match Meta::open(&database) {
            Err(error) if error.kind == Kind::NotFound => make(path, &fd, ids.clone())?,
            other => other?,
        };
        let head = meta.superblock()?;
        check(&head, &ids)?;
        let data = openat(&fd, DATA, flags, Mode::empty()).op("open data/")?;
        let host = |lower: Lower| HostTree::new(lower.root, direct_io, true, max_open);
        let hosts = lowers.into_iter().map(host).collect::<Result<Vec<_>>>()?;
        Ok(Upper { meta, head, data, hosts })
    }
}

/// Where the lowers of an upper were when it was made.
pub fn lowers_of(path: &Path) -> Result<Vec<PathBuf>> {
    let head = Meta::open(&path.join(meta::NAME))?.superblock()?;
    let path = |lower: LowerId| PathBuf::from(OsString::from_vec(lower.path));
    Ok(head.lowers.into_iter().map(path).collect())
}

fn id_of(lower: &Lower) -> Result<LowerId> {
    let stat = rustix::fs::fstat(&lower.root).op("stat")?;
    let generation = FileHandle::of(&lower.root).map_or(0, |handle| handle.generation());
    let path = lower.path.as_os_str().as_bytes().to_vec();
    Ok(LowerId { path, ino: stat.st_ino, generation })
}

/// An upper belongs to the lowers it was made over, wherever they are now.
fn check(head: &Super, ids: &[LowerId]) -> Result<()> {
    let same = |(known, now): (&LowerId, &LowerId)| {
        (known.ino, known.generation) == (now.ino, now.generation)
    };
    if head.lowers.len() == ids.len() && head.lowers.iter().zip(ids).all(same) {
        return Ok(());
    }
    let known: Vec<String> = head
        .lowers
        .iter()
        .map(|lower| Path::new(std::ffi::OsStr::from_bytes(&lower.path)).display().to_string())
        .collect();
    Err(Error::new(Kind::NotSupported, "open", format!("made over {}", known.join(":"))))
}

fn make(path: &Path, fd: &OwnedFd, lowers: Vec<LowerId>) -> Result<Meta> {
    let mut entries = path.read_dir().op("readdir")?;
    let foreign = entries.find_map(|entry| {
        let name = entry.ok()?.file_name();
        let ours = [crate::tree::host::STATE_NAME, DATA, ASIDE, LOG].iter().any(|own| name == *own);
        (!ours).then_some(name)
    });
    if let Some(name) = foreign {
        let place = format!("{} is in it", Path::new(&name).display());
        return Err(Error::new(Kind::Exists, "make an upper", place));
    }
    match mkdirat(fd, DATA, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(Error::os("mkdir data/", errno)),
    }
    let mut uuid = [0; 16];
    rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty()).op("getrandom")?;
    // Under its own name only once it is whole.
    let aside = path.join(ASIDE);
    let _ = std::fs::remove_file(&aside);
    Meta::create(&aside, &Super::new(uuid, BLOCK_BYTES, clock::wall(), lowers))?;
    File::open(&aside).and_then(|file| file.sync_all()).op("fsync")?;
    std::fs::rename(&aside, path.join(meta::NAME)).op("rename")?;
    fsync(fd.as_fd()).op("fsync")?;
    Meta::open(&path.join(meta::NAME))
}
