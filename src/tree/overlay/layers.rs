//! The lowers of an overlay: directories that are read and never changed.
//!
//! A lower file's number here is its number there, with the layer in the bits above: the same over
//! copy-up, rename and remount, and no table grows. What lies on another filesystem below a lower
//! has no such number: it is shown, but cannot be changed. No state, no locks.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use super::meta::Origin;
use super::node::{Found, LowerRef};
use crate::error::{Error, Kind, Result};
use crate::sys::flags::{S_IFDIR, S_IFMT};
use crate::tree::{Attr, DirEntry, Entry, HostTree, NodeId, ROOT, Tree};

/// Numbers of a lower that fit; the layer stands above these bits.
const NUMBER_BITS: u32 = 52;

/// The most lowers: their numbers stay below those of the upper.
pub const LOWERS_MAX: usize = 500;

/// See the module.
pub(super) struct Layers {
    hosts: Vec<HostTree>,
}

impl Layers {
    pub(super) fn new(hosts: Vec<HostTree>) -> Layers {
        Layers { hosts }
    }

    pub(super) fn host(&self, layer: usize) -> Result<&HostTree> {
        self.hosts.get(layer).ok_or_else(|| Error::new(Kind::Internal, "find", "a lower"))
    }

    /// What the root is made of.
    pub(super) fn roots(&self) -> Vec<LowerRef> {
        (0..self.hosts.len()).map(|layer| (layer, ROOT)).collect()
    }

    /// The number here of a node of a lower.
    pub(super) fn number(layer: usize, id: NodeId) -> NodeId {
        if id == ROOT { ROOT } else { id ^ ((layer as u64) << NUMBER_BITS) }
    }

    /// Whether a lower's node may be changed here: it has a number for ever.
    pub(super) fn has_number(&self, (layer, id): LowerRef) -> Result<bool> {
        let host = self.host(layer)?;
        let root = host.identity(ROOT)?;
        Ok(id >> NUMBER_BITS == 0 && host.identity(id)?.dev == root.dev)
    }

    /// What the lowers of a directory say of a name: the first that has it, and of directories
    /// those below it. Counted: `forget` gives it back.
    pub(super) fn child(&self, dir: &[LowerRef], name: &OsStr) -> Result<Option<Found>> {
        let mut found: Option<Found> = None;
        for &(layer, id) in dir {
            let entry = match self.host(layer).and_then(|host| host.lookup(id, name)) {
                Ok(entry) => entry,
                Err(error) if matches!(error.kind, Kind::NotFound | Kind::NotDir) => continue,
                Err(error) => {
                    self.forget(&found.map(|found| found.lowers).unwrap_or_default());
                    return Err(error);
                }
            };
            if !self.merge(&mut found, layer, &entry) {
                break;
            }
        }
        Ok(found)
    }

    /// Takes an entry in; false if those of further lowers are hidden by it.
    fn merge(&self, found: &mut Option<Found>, layer: usize, entry: &Entry) -> bool {
        let kind = entry.attr.mode & S_IFMT;
        match found {
            None => {
                let ino = Layers::number(layer, entry.id);
                *found = Some(Found { ino, kind, lowers: vec![(layer, entry.id)] });
            }
            Some(found) if kind == S_IFDIR => found.lowers.push((layer, entry.id)),
            Some(_) => self.forget(&[(layer, entry.id)]),
        }
        kind == S_IFDIR
    }

    /// Gives counted nodes back.
    pub(super) fn forget(&self, lowers: &[LowerRef]) {
        for &(layer, id) in lowers.iter().filter(|(_, id)| *id != ROOT) {
            if let Ok(host) = self.host(layer) {
                host.forget(id, 1);
            }
        }
    }

    /// Attributes of a lower's node, as they are there.
    pub(super) fn attr(&self, (layer, id): LowerRef) -> Result<Attr> {
        self.host(layer)?.attr(id)
    }

    /// Where a lower's node is, and what it is like.
    pub(super) fn origin(&self, lower: LowerRef) -> Result<Origin> {
        let (layer, id) = lower;
        let host = self.host(layer)?;
        if !self.has_number(lower)? {
            let place = host.path(id).display().to_string();
            return Err(Error::new(Kind::NotSupported, "copy up from another filesystem", place));
        }
        let (identity, attr) = (host.identity(id)?, host.attr(id)?);
        Ok(Origin {
            layer: layer as u32,
            path: host.path(id).into_os_string().into_vec(),
            ino: identity.ino,
            generation: identity.generation,
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
        })
    }

    /// The node an inode row came from; counted. Stale if it is another one now.
    pub(super) fn find(&self, origin: &Origin) -> Result<LowerRef> {
        let layer = origin.layer as usize;
        let host = self.host(layer)?;
        let path = PathBuf::from(OsString::from_vec(origin.path.clone()));
        let changed = |what: &str| {
            let place = format!("{} ({what} in the lower)", path.display());
            Error::new(Kind::Stale, "find", place)
        };
        let id = walk(host, &path).map_err(|error| match error.kind {
            Kind::NotFound | Kind::NotDir => changed("missing"),
            _ => error,
        })?;
        let identity = host.identity(id)?;
        if (identity.ino, identity.generation) != (origin.ino, origin.generation) {
            self.forget(&[(layer, id)]);
            return Err(changed("replaced"));
        }
        Ok((layer, id))
    }

    /// The names of a directory in its lowers, the first lower's first; each once.
    pub(super) fn names(&self, dir: &[LowerRef]) -> Result<Vec<DirEntry>> {
        let mut seen = std::collections::HashSet::new();
        let mut names = Vec::new();
        for &(layer, id) in dir {
            let mut stream = self.host(layer)?.open_dir(id)?;
            let mut cookie = 0;
            while let Some(entry) = stream.peek(cookie)? {
                cookie = entry.cookie;
                let dots = entry.name == "." || entry.name == "..";
                if !dots && (dir.len() == 1 || seen.insert(entry.name.clone())) {
                    let ino = Layers::number(layer, entry.ino);
                    names.push(DirEntry { ino, ..entry.clone() });
                }
                stream.advance();
            }
        }
        Ok(names)
    }

    /// Descriptors the lowers hold.
    pub(super) fn open(&self) -> usize {
        self.hosts.iter().map(|host| host.load().1).sum()
    }
}

/// The node at a path below a lower's root; counted.
fn walk(host: &HostTree, path: &Path) -> Result<NodeId> {
    let mut id = ROOT;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        let next = host.lookup(id, OsStr::from_bytes(name.as_bytes()));
        if id != ROOT {
            host.forget(id, 1);
        }
        id = next?.id;
    }
    Ok(id)
}
