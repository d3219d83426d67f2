//! What an upper changes: found from its rows, without a walk of the lowers.
//!
//! No state. A name row says what was added, removed or moved; an inode row of what was not moved
//! says what was modified. What a removed directory had in it is not told.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use super::meta::{Inode, NameRow};
use super::node::{Found, LowerRef};
use super::view::View;
use super::{OverlayTree, S_IFDIR, S_IFMT, S_IFREG};
use crate::device::BlockDevice;
use crate::device::overlay::{BlockState, MapExtent};
use crate::error::Result;
use crate::tree::{NodeId, ROOT};

/// How something differs from the lowers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It is new.
    Added,
    /// Its bytes or attributes are others.
    Modified,
    /// It is gone.
    Deleted,
    /// It was moved.
    Renamed,
}

impl Kind {
    /// The letter for it.
    pub fn letter(self) -> char {
        match self {
            Kind::Added => 'A',
            Kind::Modified => 'M',
            Kind::Deleted => 'D',
            Kind::Renamed => 'R',
        }
    }
}

/// One path that differs from the lowers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// How.
    pub kind: Kind,
    /// Where it is now (was, if it is gone).
    pub path: PathBuf,
    /// Where it was, if it was moved.
    pub from: Option<PathBuf>,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Bytes of it that the upper holds, in whole blocks.
    pub bytes: u64,
    /// Which: offset and length in bytes. Of regular files only.
    pub extents: Vec<(u64, u64)>,
}

/// What `diff` looks at.
struct Looking<'a> {
    tree: &'a OverlayTree,
    view: View,
    inodes: HashMap<NodeId, Inode>,
    /// Where the name rows put an inode.
    places: HashMap<NodeId, Vec<(NodeId, OsString)>>,
    paths: HashMap<NodeId, Option<PathBuf>>,
}

impl OverlayTree {
    /// What differs from the lowers, by path. What is dirty in a store is not in it: flush first.
    pub fn diff(&self) -> Result<Vec<Difference>> {
        let view = self.view()?;
        let names = view.all_names()?;
        let mut places: HashMap<NodeId, Vec<(NodeId, OsString)>> = HashMap::new();
        for (dir, name, row) in &names {
            if let NameRow::Inode(ino) = row {
                places.entry(*ino).or_default().push((*dir, OsString::from_vec(name.clone())));
            }
        }
        let inodes = view.inodes()?.into_iter().collect();
        let mut looking = Looking { tree: self, view, inodes, places, paths: HashMap::new() };
        let mut found = Vec::new();
        for (dir, name, row) in &names {
            looking.name(*dir, OsStr::from_bytes(name), *row, &mut found)?;
        }
        let told: HashSet<NodeId> = looking.places.keys().copied().collect();
        let rows: Vec<NodeId> = looking.inodes.keys().copied().collect();
        for ino in rows.into_iter().filter(|ino| !told.contains(ino)) {
            looking.inode(ino, &mut found)?;
        }
        found.sort_by(|a, b| (&a.path, a.kind).cmp(&(&b.path, b.kind)));
        Ok(found)
    }
}

impl Looking<'_> {
    /// What a name row says.
    fn name(
        &mut self,
        dir: NodeId,
        name: &OsStr,
        row: NameRow,
        out: &mut Vec<Difference>,
    ) -> Result<()> {
        let Some(path) = self.path(dir, 0)?.map(|path| path.join(name)) else { return Ok(()) };
        let below = self.below(dir, name)?;
        if let Some(found) = &below
            && !self.places.contains_key(&found.ino)
            && row != NameRow::Inode(found.ino)
            && !self.is_replaced(found, row)
        {
            out.push(Difference {
                kind: Kind::Deleted,
                path: path.clone(),
                from: None,
                is_dir: found.kind == S_IFDIR,
                bytes: 0,
                extents: Vec::new(),
            });
        }
        let NameRow::Inode(ino) = row else { return Ok(()) };
        let Some(inode) = self.inodes.get(&ino).cloned() else { return Ok(()) };
        let mut difference = self.difference(ino, &inode, path)?;
        if let Some(origin) = inode.origins.first() {
            let from = PathBuf::from(OsString::from_vec(origin.path.clone()));
            if below.as_ref().is_some_and(|found| found.ino == ino) {
                // It came back to its old place.
                if self.is_as_below(ino, &inode)? {
                    return Ok(());
                }
                difference.kind = Kind::Modified;
            } else if !self.is_shown(&from)? {
                difference.kind = Kind::Renamed;
                difference.from = Some(from);
            }
        } else if below.is_some_and(|found| self.is_replaced(&found, row)) {
            difference.kind = Kind::Modified;
        }
        out.push(difference);
        Ok(())
    }

    /// What the row of an inode says that has its names from a lower.
    fn inode(&mut self, ino: NodeId, out: &mut Vec<Difference>) -> Result<()> {
        let Some(inode) = self.inodes.get(&ino).cloned() else { return Ok(()) };
        if inode.nlink == 0 || self.is_as_below(ino, &inode)? {
            return Ok(());
        }
        let Some(path) = self.path(ino, 0)? else { return Ok(()) };
        let difference = self.difference(ino, &inode, path)?;
        out.push(Difference { kind: Kind::Modified, ..difference });
        Ok(())
    }

    fn difference(&self, ino: NodeId, inode: &Inode, path: PathBuf) -> Result<Difference> {
        let is_dir = inode.mode & S_IFMT == S_IFDIR;
        let unit = u64::from(self.tree.block_bytes);
        let size = inode.size;
        let rows = self.rows(ino)?;
        let upper = rows.iter().filter(|run| run.state == BlockState::Upper);
        let bytes = upper.map(|run| run.blocks * unit).sum();
        let end = |run: &MapExtent| ((run.first + run.blocks) * unit).min(size);
        let extents = rows.iter().map(|run| (run.first * unit, end(run)));
        let extents = extents.filter(|(start, end)| start < end).map(|(a, b)| (a, b - a));
        let (kind, from) = (Kind::Added, None);
        Ok(Difference { kind, path, from, is_dir, bytes, extents: extents.collect() })
    }

    /// The map as it is: a file in use may know more than was saved.
    fn rows(&self, ino: NodeId) -> Result<Vec<MapExtent>> {
        match self.tree.live(ino) {
            Some(device) => Ok(device.map().extents),
            None => self.view.map(ino),
        }
    }

    /// A new file in the place of an old one is a modified one.
    fn is_replaced(&self, below: &Found, row: NameRow) -> bool {
        let NameRow::Inode(ino) = row else { return false };
        let is_file = |mode: u32| mode & S_IFMT == S_IFREG;
        below.kind == S_IFREG && self.inodes.get(&ino).is_some_and(|row| is_file(row.mode))
    }

    /// Whether an inode's row says what its lower says. A directory's times and links do not
    /// count: its names are told.
    fn is_as_below(&self, ino: NodeId, inode: &Inode) -> Result<bool> {
        let Some(origin) = inode.origins.first() else { return Ok(false) };
        if inode.own_xattrs || !self.rows(ino)?.is_empty() {
            return Ok(false);
        }
        let lower = self.tree.layers.find(origin)?;
        let attr = self.tree.layers.attr(lower);
        self.tree.layers.forget(&[lower]);
        let attr = attr?;
        let owner = (inode.mode, inode.uid, inode.gid) == (attr.mode, attr.uid, attr.gid);
        if inode.mode & S_IFMT == S_IFDIR {
            return Ok(owner);
        }
        let size = match self.tree.live(ino) {
            Some(device) => device.size()?,
            None => inode.size,
        };
        Ok(owner && (size, inode.mtime) == (attr.size, attr.mtime))
    }

    /// Whether a path of a lower is still where it was.
    fn is_shown(&self, path: &Path) -> Result<bool> {
        let (mut dir, mut lowers) = (ROOT, self.tree.layers.roots());
        for component in path.components() {
            let Component::Normal(name) = component else { continue };
            let row = self.view.name(dir, name.as_bytes())?;
            let found = self.tree.layers.child(&lowers, name)?;
            self.tree.layers.forget(&lowers);
            let Some(found) = found else { return Ok(false) };
            (dir, lowers) = (found.ino, found.lowers);
            if row.is_some_and(|row| row != NameRow::Inode(dir)) {
                self.tree.layers.forget(&lowers);
                return Ok(false);
            }
        }
        self.tree.layers.forget(&lowers);
        Ok(true)
    }

    /// What the lowers of a directory have under a name; counted no longer.
    fn below(&self, dir: NodeId, name: &OsStr) -> Result<Option<Found>> {
        let lowers = self.lowers(dir)?;
        let found = self.tree.layers.child(&lowers, name);
        self.tree.layers.forget(&lowers);
        let found = found?;
        if let Some(found) = &found {
            self.tree.layers.forget(&found.lowers);
        }
        Ok(found)
    }

    /// What a directory is made of; counted.
    fn lowers(&self, dir: NodeId) -> Result<Vec<LowerRef>> {
        if dir == ROOT {
            return Ok(self.tree.layers.roots());
        }
        let origins = self.inodes.get(&dir).map(|inode| inode.origins.as_slice());
        origins.unwrap_or_default().iter().map(|origin| self.tree.layers.find(origin)).collect()
    }

    /// Where an inode is now; None if it is in something that is gone.
    fn path(&mut self, ino: NodeId, depth: usize) -> Result<Option<PathBuf>> {
        if ino == ROOT {
            return Ok(Some(PathBuf::new()));
        }
        if let Some(known) = self.paths.get(&ino) {
            return Ok(known.clone());
        }
        if depth > super::MAX_DEPTH {
            return Ok(None);
        }
        let place = self.places.get(&ino).and_then(|places| places.first()).cloned();
        let path = match place {
            Some((dir, name)) => self.path(dir, depth + 1)?.map(|path| path.join(name)),
            None => self.path_below(ino, depth + 1)?,
        };
        self.paths.insert(ino, path.clone());
        Ok(path)
    }

    /// Where what was not moved itself is now: its directories may have been.
    fn path_below(&mut self, ino: NodeId, depth: usize) -> Result<Option<PathBuf>> {
        let origin = self.inodes.get(&ino).and_then(|inode| inode.origins.first()).cloned();
        let Some(origin) = origin else { return Ok(None) };
        let from = PathBuf::from(OsString::from_vec(origin.path));
        let (mut dir, mut lowers) = (ROOT, self.tree.layers.roots());
        let mut path = Some(PathBuf::new());
        for component in from.components() {
            let Component::Normal(name) = component else { continue };
            let row = self.view.name(dir, name.as_bytes())?;
            let found = self.tree.layers.child(&lowers, name)?;
            self.tree.layers.forget(&lowers);
            let Some(found) = found else { return Ok(None) };
            (dir, lowers) = (found.ino, found.lowers);
            let moved = self.places.contains_key(&dir);
            path = match (row, moved) {
                (_, true) => self.path(dir, depth + 1)?,
                (Some(_), false) => None,
                (None, false) => path.map(|path| path.join(name)),
            };
            if path.is_none() {
                break;
            }
        }
        self.tree.layers.forget(&lowers);
        Ok(path)
    }
}
