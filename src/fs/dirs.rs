//! Reading directories.

use parking_lot::Mutex;

use super::Fs;
use super::handles::DirHandle;
use crate::error::{Kind, Result};
use crate::sys::flags::{S_IFDIR, S_IFMT, S_IFREG};
use crate::tree::{DirEntry, DirStream, Entry, NodeId, ROOT};

/// What takes the entries: false if this one did not fit.
pub type Sink<'a> = dyn FnMut(&DirEntry, Option<&Entry>) -> bool + 'a;

impl Fs {
    /// Opens a directory: its handle number.
    pub fn open_dir(&self, node: NodeId) -> Result<u64> {
        let stream = Mutex::new(self.tree.open_dir(node)?);
        Ok(self.handles.add_dir(DirHandle { node, stream }))
    }

    /// The kernel's last use of a directory handle.
    pub fn release_dir(&self, fh: u64) {
        self.handles.take_dir(fh);
    }

    /// Entries from a position on, until `sink` is full. With `plus` each comes with its node,
    /// counted as a lookup (but `.` and `..`, which the kernel does not count).
    pub fn read_dir(
        &self,
        node: NodeId,
        fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        match self.handles.dir(fh, node) {
            Some(handle) => {
                let mut stream = handle.stream.lock();
                self.list(node, &mut **stream, cookie, plus, sink)
            }
            None => self.list(node, &mut *self.tree.open_dir(node)?, cookie, plus, sink),
        }
    }

    fn list(
        &self,
        node: NodeId,
        stream: &mut dyn DirStream,
        mut cookie: u64,
        plus: bool,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        while let Some(entry) = stream.peek(cookie)? {
            let fits = if entry.name == "." || entry.name == ".." {
                self.list_dots(node, entry, plus, sink)
            } else if plus || entry.kind == 0 {
                self.list_looked_up(node, entry, plus, sink)?
            } else {
                sink(entry, None)
            };
            if !fits {
                return Ok(());
            }
            cookie = entry.cookie;
            stream.advance();
        }
        Ok(())
    }

    fn list_dots(&self, node: NodeId, entry: &DirEntry, plus: bool, sink: &mut Sink<'_>) -> bool {
        let ino = if node == ROOT || entry.name == "." { node } else { entry.ino };
        let entry = DirEntry { ino, kind: S_IFDIR, ..entry.clone() };
        // The kernel ignores what readdirplus says of these beyond their number.
        let attr = if plus { self.tree.attr(node).ok() } else { None };
        match attr {
            Some(mut attr) => {
                attr.ino = ino;
                sink(&entry, Some(&Entry { id: ino, generation: 0, attr }))
            }
            None => sink(&entry, None),
        }
    }

    fn list_looked_up(
        &self,
        node: NodeId,
        entry: &DirEntry,
        plus: bool,
        sink: &mut Sink<'_>,
    ) -> Result<bool> {
        let found = match self.lookup(node, &entry.name) {
            Ok(found) => found,
            // Gone since the batch was read: not an entry any more.
            Err(error) if matches!(error.kind, Kind::NotFound | Kind::Stale) => return Ok(true),
            Err(error) if plus => return Err(error),
            Err(_) => {
                let entry = DirEntry { kind: S_IFREG, ..entry.clone() };
                return Ok(sink(&entry, None));
            }
        };
        let entry = DirEntry {
            ino: found.id,
            kind: found.attr.mode & S_IFMT,
            name: entry.name.clone(),
            cookie: entry.cookie,
        };
        let fits = sink(&entry, plus.then_some(&found));
        if !fits || !plus {
            self.tree.forget(found.id, 1);
        }
        Ok(fits)
    }

    /// Makes a directory's names durable.
    pub fn sync_dir(&self, node: NodeId, data_only: bool) -> Result<()> {
        self.tree.sync_dir(node, data_only)
    }
}
