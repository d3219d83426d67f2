//! Inodes of a host tree and the table of live ones.
//!
//! A node holds an O_PATH descriptor while it can; past the limit (half of RLIMIT_NOFILE) the least
//! recently used are closed (a clock: one second chance), and a closed node is reopened by file
//! handle (root) or by walking from its parent. Its identity is compared after every reopen, so a
//! path that now means another inode is ESTALE, never the wrong file.
//!
//! Invariants: a node is in `by_identity` and in `by_id` together or in neither; `lookups` counts
//! the kernel's references and a node is dropped when it reaches zero; two live nodes never share
//! a number. Locks: `Table.clock`, then `Table.maps` or a `Node.fd`; the rest are leaves.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use crate::sys::handle::FileHandle;
use crate::tree::{Identity, NodeId, ROOT, Timestamp};

/// Numbers from here up belong to other filesystems than the root's, and to its inode 1.
pub const FOREIGN: u64 = 1 << 63;

/// Bits of a foreign number that hold the source's own number.
const INO_BITS: u32 = 48;

/// The filesystem index of numbers that did not fit.
const LONG_INDEX: u64 = 0x7fff;

/// What is known of a file's security.capability: the kernel asks for it before every write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Not asked yet.
    Unknown,
    /// The file has none.
    Absent,
}

/// An inode the kernel knows.
#[derive(Debug)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Which inode of the source it is.
    pub identity: Identity,
    /// Type bits (S_IFMT).
    pub kind: u32,
    handle: Option<FileHandle>,
    fd: Mutex<Option<Arc<OwnedFd>>>,
    place: Mutex<(NodeId, OsString)>,
    lookups: AtomicU64,
    /// Used since the clock's hand last came by.
    used: AtomicBool,
    /// The table's epoch when its descriptor was last opened.
    opened: AtomicU64,
    capability: AtomicU8,
    /// The birth time, once it was asked for.
    birth: OnceLock<Timestamp>,
    /// Subdirectories counted, and the mtime at which that was true.
    subdirs: Mutex<Option<(Timestamp, u32)>>,
}

impl Node {
    /// The descriptor if it is open; notes the use.
    pub fn fd(&self) -> Option<Arc<OwnedFd>> {
        self.used.store(true, Relaxed);
        self.fd.lock().clone()
    }

    /// The file handle, where the filesystem has them.
    pub fn handle(&self) -> Option<&FileHandle> {
        self.handle.as_ref()
    }

    /// Parent and name it was last seen under.
    pub fn place(&self) -> (NodeId, OsString) {
        self.place.lock().clone()
    }

    /// It is called `name` in `parent` now.
    pub fn set_place(&self, parent: NodeId, name: &OsStr) {
        let mut place = self.place.lock();
        if place.0 != parent || place.1 != name {
            *place = (parent, name.to_os_string());
        }
    }

    /// The number of subdirectories, if it was counted at this mtime.
    pub fn subdirs(&self, mtime: Timestamp) -> Option<u32> {
        self.subdirs.lock().filter(|(at, _)| *at == mtime).map(|(_, count)| count)
    }

    /// Notes the number of subdirectories at an mtime.
    pub fn set_subdirs(&self, mtime: Timestamp, count: u32) {
        *self.subdirs.lock() = Some((mtime, count));
    }

    /// The birth time, if it was asked for: it never changes.
    pub fn birth(&self) -> Option<Timestamp> {
        self.birth.get().copied()
    }

    /// Notes the birth time.
    pub fn set_birth(&self, birth: Timestamp) {
        self.birth.get_or_init(|| birth);
    }

    /// What is known of security.capability.
    pub fn capability(&self) -> Capability {
        match self.capability.load(Relaxed) {
            1 => Capability::Absent,
            _ => Capability::Unknown,
        }
    }

    /// Notes what is known of security.capability.
    pub fn set_capability(&self, known: Capability) {
        self.capability.store(u8::from(known == Capability::Absent), Relaxed);
    }
}

/// What a lookup found in the source.
#[derive(Debug)]
pub struct Found {
    /// Which inode it is.
    pub identity: Identity,
    /// Type bits.
    pub kind: u32,
    /// Its handle, where the filesystem has them.
    pub handle: Option<FileHandle>,
    /// Its O_PATH descriptor.
    pub fd: OwnedFd,
    /// Parent and name it was found under.
    pub place: (NodeId, OsString),
}

#[derive(Debug, Default)]
struct Maps {
    by_id: HashMap<NodeId, Arc<Node>>,
    by_identity: HashMap<Identity, NodeId>,
}

/// Numbers of inodes that cannot keep their own: stable for the life of the mount, and the same
/// in readdir as in stat.
#[derive(Debug, Default)]
struct Foreign {
    /// A small index for each filesystem.
    filesystems: HashMap<u64, u64>,
    /// Inode numbers of more than 48 bits, in order of sight.
    long: HashMap<(u64, u64), u64>,
}

/// The live inodes.
#[derive(Debug)]
pub struct Table {
    root_dev: u64,
    root_ino: u64,
    /// Descriptors above which the least used are closed.
    max_open: usize,
    maps: RwLock<Maps>,
    open: AtomicUsize,
    /// The clock: numbers of nodes in the order they were opened; some are closed or gone since.
    clock: Mutex<VecDeque<NodeId>>,
    /// Descriptors opened so far.
    epoch: AtomicU64,
    foreign: Mutex<Foreign>,
}

impl Table {
    /// A table with nothing but the root, which is never forgotten.
    pub fn new(root: Found, max_open: usize) -> Table {
        let table = Table {
            root_dev: root.identity.dev,
            root_ino: root.identity.ino,
            max_open: max_open.max(16),
            maps: RwLock::default(),
            open: AtomicUsize::new(0),
            clock: Mutex::default(),
            epoch: AtomicU64::new(0),
            foreign: Mutex::default(),
        };
        table.insert_as(ROOT, root);
        table
    }

    /// The node of a number.
    pub fn get(&self, id: NodeId) -> Option<Arc<Node>> {
        self.maps.read().by_id.get(&id).cloned()
    }

    /// The node of an identity, if the kernel knows it.
    pub fn find(&self, identity: &Identity) -> Option<Arc<Node>> {
        let maps = self.maps.read();
        maps.by_id.get(maps.by_identity.get(identity)?).cloned()
    }

    /// The number of an inode: the source's own on the root's filesystem, else one from FOREIGN
    /// up that holds the filesystem's index and the source's number.
    pub fn number(&self, dev: u64, ino: u64) -> NodeId {
        if dev == self.root_dev && ino == self.root_ino {
            return ROOT;
        }
        if dev == self.root_dev && ino != ROOT && ino < FOREIGN {
            return ino;
        }
        let mut foreign = self.foreign.lock();
        if ino >> INO_BITS != 0 {
            let next = foreign.long.len() as u64;
            let ordinal = *foreign.long.entry((dev, ino)).or_insert(next);
            return FOREIGN | LONG_INDEX << INO_BITS | ordinal;
        }
        let next = foreign.filesystems.len() as u64 % LONG_INDEX;
        let index = *foreign.filesystems.entry(dev).or_insert(next);
        FOREIGN | index << INO_BITS | ino
    }

    /// The node of what a lookup found, counted once more; `found.fd` is dropped if the node is
    /// known and open.
    pub fn intern(&self, found: Found) -> Arc<Node> {
        if let Some(node) = self.count_known(&found) {
            return self.refresh(node, found);
        }
        let id = self.number(found.identity.dev, found.identity.ino);
        self.insert_as(id, found)
    }

    /// The moment to take before an inode's number is read, for `revalidate`.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(SeqCst)
    }

    /// The node of an inode number that was read after `epoch`, counted once more, if its
    /// descriptor has been open since before: then the number cannot have been reused, and nothing
    /// else needs to be asked of the source.
    pub fn revalidate(&self, dev: u64, ino: u64, epoch: u64) -> Option<Arc<Node>> {
        let id = self.number(dev, ino);
        let maps = self.maps.read();
        let node = maps.by_id.get(&id)?;
        if node.identity.dev != dev || node.identity.ino != ino {
            return None;
        }
        let fd = node.fd.lock();
        if fd.is_none() || node.opened.load(SeqCst) > epoch {
            return None;
        }
        node.used.store(true, Relaxed);
        node.lookups.fetch_add(1, Relaxed);
        Some(node.clone())
    }

    /// Counts a lookup of a known identity, under the lock that `forget` removes under.
    fn count_known(&self, found: &Found) -> Option<Arc<Node>> {
        let maps = self.maps.read();
        let node = maps.by_id.get(maps.by_identity.get(&found.identity)?)?;
        node.lookups.fetch_add(1, Relaxed);
        Some(node.clone())
    }

    fn refresh(&self, node: Arc<Node>, found: Found) -> Arc<Node> {
        if node.id != ROOT {
            *node.place.lock() = found.place;
        }
        self.set_fd(&node, found.fd);
        node
    }

    /// Gives a node a descriptor (the first of two racing ones stays), and closes others if there
    /// are too many now.
    pub fn set_fd(&self, node: &Node, fd: OwnedFd) -> Arc<OwnedFd> {
        let mut slot = node.fd.lock();
        if let Some(fd) = &*slot {
            return fd.clone();
        }
        let fd = slot.insert(Arc::new(fd)).clone();
        drop(slot);
        self.count_opened(node);
        fd
    }

    fn count_opened(&self, node: &Node) {
        node.opened.store(self.epoch.fetch_add(1, SeqCst) + 1, SeqCst);
        let open = self.open.fetch_add(1, Relaxed) + 1;
        let mut clock = self.clock.lock();
        if node.id != ROOT {
            clock.push_back(node.id);
        }
        if open > self.max_open || clock.len() > 2 * self.max_open {
            self.close_least_used(&mut clock);
        }
    }

    fn insert_as(&self, id: NodeId, found: Found) -> Arc<Node> {
        let node = Arc::new(Node {
            id,
            identity: found.identity,
            kind: found.kind,
            handle: found.handle,
            fd: Mutex::new(Some(Arc::new(found.fd))),
            place: Mutex::new(found.place),
            lookups: AtomicU64::new(1),
            used: AtomicBool::new(true),
            opened: AtomicU64::new(u64::MAX),
            capability: AtomicU8::new(0),
            birth: OnceLock::new(),
            subdirs: Mutex::new(None),
        });
        let mut maps = self.maps.write();
        // Somebody else may have been faster.
        if let Some(known) =
            maps.by_identity.get(&node.identity).and_then(|known| maps.by_id.get(known)).cloned()
        {
            known.lookups.fetch_add(1, Relaxed);
            return known;
        }
        if let Some(old) = maps.by_id.remove(&id) {
            // The source reused an inode number while the kernel still holds the old inode: it
            // sees the new generation, and its references to the number add up.
            node.lookups.fetch_add(old.lookups.load(Relaxed), Relaxed);
            maps.by_identity.remove(&old.identity);
            self.count_closed(&old);
        }
        maps.by_identity.insert(node.identity, id);
        maps.by_id.insert(id, node.clone());
        drop(maps);
        self.count_opened(&node);
        node
    }

    fn count_closed(&self, node: &Node) {
        if node.fd.lock().take().is_some() {
            self.open.fetch_sub(1, Relaxed);
        }
    }

    /// Drops kernel references; the node itself with the last one.
    pub fn forget(&self, id: NodeId, count: u64) {
        if id == ROOT {
            return;
        }
        let Some(node) = self.get(id) else { return };
        if node.lookups.fetch_sub(count, Relaxed) > count {
            return;
        }
        let mut maps = self.maps.write();
        // A lookup may have come in between.
        if node.lookups.load(Relaxed) == 0
            && maps.by_id.get(&id).is_some_and(|known| Arc::ptr_eq(known, &node))
        {
            maps.by_id.remove(&id);
            maps.by_identity.remove(&node.identity);
            drop(maps);
            self.count_closed(&node);
        }
    }

    /// Closes descriptors until a quarter of the limit is free: those not used since the hand last
    /// came by, except what a device holds as well (an open file, maybe unlinked).
    fn close_least_used(&self, clock: &mut VecDeque<NodeId>) {
        let enough = self.max_open - self.max_open / 4;
        // Twice around: the first time may only take second chances away.
        for _ in 0..2 * clock.len() {
            if self.open.load(Relaxed) <= enough && clock.len() <= self.max_open {
                return;
            }
            let Some(id) = clock.pop_front() else { return };
            let Some(node) = self.get(id) else { continue };
            let mut fd = node.fd.lock();
            match &*fd {
                None => continue,
                Some(held) if Arc::strong_count(held) > 1 => clock.push_back(id),
                Some(_) if node.used.swap(false, Relaxed) => clock.push_back(id),
                Some(_) if self.open.load(Relaxed) <= enough => clock.push_back(id),
                Some(_) => {
                    *fd = None;
                    self.open.fetch_sub(1, Relaxed);
                }
            }
        }
    }

    /// Live inodes and open descriptors.
    pub fn load(&self) -> (usize, usize) {
        (self.maps.read().by_id.len(), self.open.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(dev: u64, ino: u64, generation: u64) -> Found {
        Found {
            identity: Identity { dev, ino, generation },
            kind: 0,
            handle: None,
            fd: std::fs::File::open("/dev/null").unwrap().into(),
            place: (ROOT, "n".into()),
        }
    }

    #[test]
    fn numbers_follow_the_source_and_forget_gives_back() {
        let table = Table::new(found(1, 2, 0), 100);
        let node = table.intern(found(1, 50, 7));
        assert_eq!((node.id, table.intern(found(1, 50, 7)).id), (50, 50));
        assert!(table.intern(found(9, 50, 7)).id >= FOREIGN);
        assert!(table.intern(found(1, ROOT, 7)).id >= FOREIGN);
        assert_eq!(table.number(9, 50), table.intern(found(9, 50, 7)).id);
        assert_ne!(table.number(9, 50), table.number(8, 50));
        assert_ne!(table.number(9, 1 << 60), table.number(9, 1 << 61));
        table.forget(table.number(9, 50), 1);
        table.forget(50, 1);
        assert!(table.get(50).is_some());
        table.forget(50, 1);
        assert!(table.get(50).is_none());
        assert_eq!(table.load(), (3, 3));
    }

    #[test]
    fn a_reused_inode_number_is_a_new_node() {
        let table = Table::new(found(1, 2, 0), 100);
        let old = table.intern(found(1, 50, 7));
        let new = table.intern(found(1, 50, 8));
        assert_eq!((old.id, new.id), (50, 50));
        assert_eq!(table.get(50).unwrap().identity.generation, 8);
        table.forget(50, 1);
        assert!(table.get(50).is_some(), "one reference is the new inode's");
        table.forget(50, 1);
        assert_eq!(table.load(), (1, 1));
    }

    #[test]
    fn only_a_descriptor_held_since_before_vouches_for_a_number() {
        let table = Table::new(found(1, 2, 0), 100);
        let before = table.epoch();
        table.intern(found(1, 50, 7));
        assert!(table.revalidate(1, 50, before).is_none(), "opened after the number was read");
        let now = table.epoch();
        assert_eq!(table.revalidate(1, 50, now).unwrap().identity.generation, 7);
        assert!(table.revalidate(1, 51, now).is_none());
        table.forget(50, 1);
        assert!(table.get(50).is_some(), "both lookups were counted");
        table.forget(50, 1);
        assert!(table.revalidate(1, 50, table.epoch()).is_none());
    }

    #[test]
    fn descriptors_stay_below_the_limit() {
        let table = Table::new(found(1, 2, 0), 100);
        for ino in 3..1000 {
            table.intern(found(1, ino, 1));
        }
        let (nodes, open) = table.load();
        assert_eq!(nodes, 998);
        assert!(open <= 101, "{open}");
    }
}
