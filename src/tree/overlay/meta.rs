//! `meta.redb`: inodes, names, extended attributes and block maps of an upper layer.
//!
//! A change is a batch of rows, applied in one transaction: all of it or nothing. `note` makes it
//! survive kill -9 (a record in `names.log`, a commit that is not durable: no wait for a disk),
//! `apply` and `checkpoint` make it and all before it durable. After a crash the database is as the
//! last durable commit left it, and what the log has behind that is applied again. Rows are logical
//! (what a row is afterwards), so that applying a batch again changes nothing.
//!
//! redb has one writer at a time, readers see the last commit.
//!
//! States: open -> closed by an error of its file (redb uses it no more after one) -> opened again,
//! as the last commit left it, for the next call. Locks: `log`, then `db`, held for one call.

use std::path::{Path, PathBuf};

use parking_lot::{Mutex, RwLock};
use redb::{
    Database, Durability, ReadableTable, Table, TableDefinition, TableError, WriteTransaction,
};
use serde::{Deserialize, Serialize};

use super::batches::BatchLog;
use crate::device::overlay::{BlockState, MapExtent};
use crate::error::{Error, Kind, Result};
use crate::tree::{NodeId, Timestamp};

/// Its name in the upper directory.
pub const NAME: &str = "meta.redb";

/// The form of all of this; another one is refused.
const VERSION: u32 = 1;

/// The number behind every number of a lower file: what is born in the upper counts from here.
pub const FIRST_UPPER: NodeId = 1 << 62;

const SUPER: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("super");
pub(super) const INODES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("inodes");
pub(super) const NAMES: TableDefinition<'_, (u64, &[u8]), u64> = TableDefinition::new("names");
pub(super) const XATTRS: TableDefinition<'_, (u64, &[u8]), &[u8]> = TableDefinition::new("xattrs");
pub(super) const MAPS: TableDefinition<'_, (u64, u64), (u64, u8)> = TableDefinition::new("maps");
const ORPHANS: TableDefinition<'_, u64, ()> = TableDefinition::new("orphans");

/// A log of so many bytes is made needless by a durable commit.
const LOG_MAX: u64 = 1 << 20;

/// What a name row without an inode says: the lower's name is gone.
pub(super) const WHITEOUT: u64 = 0;

/// What stands for the whole upper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Super {
    /// The form of the rows.
    pub version: u32,
    /// Told apart by this.
    pub uuid: [u8; 16],
    /// Bytes of an overlay block.
    pub block_bytes: u32,
    /// When it was made.
    pub created: Timestamp,
    /// The lowers it was made over, first one first.
    pub lowers: Vec<LowerId>,
}

/// Which directory a lower is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerId {
    /// Its path when the upper was made, for people.
    pub path: Vec<u8>,
    /// The root's inode number.
    pub ino: u64,
    /// The root's generation, where a file handle tells it.
    pub generation: u64,
}

/// Where an inode was in a lower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Which lower, counted from the first.
    pub layer: u32,
    /// The path below its root.
    pub path: Vec<u8>,
    /// Inode number there.
    pub ino: u64,
    /// Generation there, where a file handle tells it.
    pub generation: u64,
    /// Size when it was first changed here.
    pub size: u64,
    /// The same of the last change of bytes.
    pub mtime: Timestamp,
    /// The same of the last change of attributes.
    pub ctime: Timestamp,
}

/// An inode that differs from its lower, or has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// Type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Names; of a directory 2 + subdirectories; 0 once it has none.
    pub nlink: u32,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of bytes.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
    /// Size in bytes, as last written home.
    pub size: u64,
    /// A regular file's lower bytes are visible below this.
    pub lower_end: u64,
    /// A symlink's target.
    pub target: Vec<u8>,
    /// What it is made of: one lower of a file, one or more of a directory.
    pub origins: Vec<Origin>,
    /// Its attributes are rows; else the lower's count.
    pub own_xattrs: bool,
}

/// A row as it is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// An inode.
    Inode(NodeId, Box<Inode>),
    /// A name of a directory stands for an inode.
    Name(NodeId, Vec<u8>, NodeId),
    /// A name of the lower is gone.
    Whiteout(NodeId, Vec<u8>),
    /// Nothing is said of a name.
    NoName(NodeId, Vec<u8>),
    /// An extended attribute.
    Xattr(NodeId, Vec<u8>, Vec<u8>),
    /// None of that name.
    NoXattr(NodeId, Vec<u8>),
    /// A run of blocks.
    Map(NodeId, MapExtent),
    /// No run begins there.
    NoMap(NodeId, u64),
    /// An inode without a name that may still be open.
    Orphan(NodeId),
    /// Nothing of an inode is left.
    Purge(NodeId),
    /// The next number of an inode that is born here.
    Next(NodeId),
}

/// What a name row says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRow {
    /// It stands for this inode.
    Inode(NodeId),
    /// The lower's is gone.
    Whiteout,
}

/// The open database.
pub struct Meta {
    path: PathBuf,
    db: RwLock<Option<Database>>,
    log: Mutex<BatchLog>,
}

/// Turns an error of the database into ours.
pub(super) fn failed<E: Into<redb::Error>>(error: E) -> Error {
    match error.into() {
        redb::Error::Io(error) if is_damage(&error) => {
            Error::new(Kind::Corrupt, "meta.redb", "no database")
        }
        redb::Error::Io(error) => Error::os("meta.redb", error),
        redb::Error::PreviousIo => Error::os("meta.redb", rustix::io::Errno::IO),
        redb::Error::DatabaseAlreadyOpen => Error::new(Kind::Busy, "open", NAME),
        other => Error::new(Kind::Corrupt, "meta.redb", other.to_string()),
    }
}

fn is_damage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, UnexpectedEof};
    matches!(error.kind(), InvalidData | UnexpectedEof)
}

pub(super) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    postcard::from_bytes(bytes)
        .map_err(|error| Error::new(Kind::Corrupt, "meta.redb", error.to_string()))
}

fn encode<T: Serialize>(row: &T) -> Result<Vec<u8>> {
    postcard::to_allocvec(row)
        .map_err(|error| Error::new(Kind::Internal, "meta.redb", error.to_string()))
}

pub(super) fn state_of(code: u8) -> Result<BlockState> {
    match code {
        1 => Ok(BlockState::Upper),
        2 => Ok(BlockState::Zero),
        _ => Err(Error::new(Kind::Corrupt, "meta.redb", "a block map")),
    }
}

fn code_of(state: BlockState) -> u8 {
    match state {
        BlockState::Lower => 0,
        BlockState::Upper => 1,
        BlockState::Zero => 2,
    }
}

impl Meta {
    /// Makes a new one. `fresh` says what it is.
    pub fn create(path: &Path, fresh: &Super) -> Result<()> {
        let db = Database::create(path).map_err(failed)?;
        let txn = db.begin_write().map_err(failed)?;
        {
            let mut tables = Tables::open(&txn)?;
            tables.head.insert("super", encode(fresh)?.as_slice()).map_err(failed)?;
            tables.set_number("next", FIRST_UPPER)?;
            tables.set_number("applied", 0)?;
        }
        txn.commit().map_err(failed)
    }

    /// Opens what is there. Busy if another process has it open.
    pub fn open(path: &Path) -> Result<Meta> {
        // The database first: its lock keeps others from the log, and nothing is made beside none.
        let db = Database::open(path).map_err(failed)?;
        let mut log = BatchLog::open(path)?;
        recover(&db, &mut log)?;
        let (path, db) = (path.to_owned(), RwLock::new(Some(db)));
        Ok(Meta { path, db, log: Mutex::new(log) })
    }

    pub(super) fn with<T>(&self, act: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        if let Some(db) = &*self.db.read() {
            return act(db);
        }
        self.open_again(&mut self.log.lock())?;
        let db = self.db.read();
        db.as_ref().map_or_else(|| Err(Error::new(Kind::Internal, "open", NAME)), act)
    }

    fn open_again(&self, log: &mut BatchLog) -> Result<()> {
        if self.db.read().is_some() {
            return Ok(());
        }
        let mut place = self.db.write();
        if place.is_none() {
            let db = Database::open(&self.path).map_err(failed)?;
            recover(&db, log)?;
            *place = Some(db);
        }
        Ok(())
    }

    /// What the upper is.
    pub fn superblock(&self) -> Result<Super> {
        let bytes = self.super_row("super")?;
        let version: u32 = decode(bytes.get(..1).unwrap_or_default())?;
        if version != VERSION {
            let what = format!("version {version}, made by another bcachefs-fuse");
            return Err(Error::new(Kind::NotSupported, "open", what));
        }
        decode(&bytes)
    }

    /// The next number of an inode that is born here.
    pub fn next(&self) -> Result<NodeId> {
        number(Some(self.super_row("next")?))
    }

    fn super_row(&self, name: &str) -> Result<Vec<u8>> {
        let txn = self.with(|db| db.begin_read().map_err(failed))?;
        let table = match txn.open_table(SUPER) {
            Err(TableError::TableDoesNotExist(_)) => {
                return Err(Error::new(Kind::Corrupt, "open", NAME));
            }
            other => other.map_err(failed)?,
        };
        let row = table.get(name).map_err(failed)?;
        let row = row.ok_or_else(|| Error::new(Kind::Corrupt, "open", NAME))?;
        Ok(row.value().to_vec())
    }

    /// Inodes without a name that a crash left.
    pub fn orphans(&self) -> Result<Vec<NodeId>> {
        let txn = self.with(|db| db.begin_read().map_err(failed))?;
        let table = txn.open_table(ORPHANS).map_err(failed)?;
        let rows = table.iter().map_err(failed)?;
        rows.map(|row| row.map(|(ino, _)| ino.value()).map_err(failed)).collect()
    }

    /// Makes all of these rows so: they survive kill -9.
    pub fn note(&self, batch: &[Change]) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut log = self.log.lock();
        self.open_again(&mut log)?;
        let mark = log.mark();
        let noted = log.append(batch).and_then(|seq| self.commit(batch, seq, Durability::None));
        if noted.is_err() {
            log.back_to(mark)?;
            return noted;
        }
        if log.len() < LOG_MAX {
            return Ok(());
        }
        // Done already: what fails here is tried again by the next.
        if let Err(error) = self.make_durable(&mut log, &[]) {
            log::warn!("{error}");
        }
        Ok(())
    }

    /// Makes all of these rows so, durable on return, with all before them.
    pub fn apply(&self, batch: &[Change]) -> Result<()> {
        let mut log = self.log.lock();
        self.open_again(&mut log)?;
        self.make_durable(&mut log, batch)
    }

    /// Makes all rows durable that are not.
    pub fn checkpoint(&self) -> Result<()> {
        let mut log = self.log.lock();
        if log.len() == 0 { Ok(()) } else { self.make_durable(&mut log, &[]) }
    }

    fn make_durable(&self, log: &mut BatchLog, batch: &[Change]) -> Result<()> {
        self.commit(batch, log.seq(), Durability::Immediate)?;
        log.clear();
        Ok(())
    }

    fn commit(&self, batch: &[Change], seq: u64, durability: Durability) -> Result<()> {
        let db = self.db.read();
        let missing = || Error::new(Kind::Internal, "open", NAME);
        let done = db.as_ref().ok_or_else(missing).and_then(|db| write(db, batch, seq, durability));
        drop(db);
        if done.is_err() {
            // A full disk, most likely. It is opened again, whatever it was.
            *self.db.write() = None;
        }
        done
    }
}

/// Applies what the log has and the database has not.
fn recover(db: &Database, log: &mut BatchLog) -> Result<()> {
    let applied = {
        let txn = db.begin_read().map_err(failed)?;
        let table = match txn.open_table(SUPER) {
            Err(TableError::TableDoesNotExist(_)) => {
                return Err(Error::new(Kind::Corrupt, "open", NAME));
            }
            other => other.map_err(failed)?,
        };
        number(table.get("applied").map_err(failed)?.map(|row| row.value().to_vec()))?
    };
    let batches = log.read_behind(applied)?;
    if !batches.is_empty() {
        write(db, &batches.concat(), log.seq(), Durability::Immediate)?;
        log.clear();
    }
    Ok(())
}

fn number(row: Option<Vec<u8>>) -> Result<u64> {
    let bad = || Error::new(Kind::Corrupt, "meta.redb", "a number");
    let bytes: [u8; 8] = row.ok_or_else(bad)?.try_into().map_err(|_| bad())?;
    Ok(u64::from_le_bytes(bytes))
}

fn write(db: &Database, batch: &[Change], seq: u64, durability: Durability) -> Result<()> {
    let mut txn = db.begin_write().map_err(failed)?;
    txn.set_durability(durability);
    {
        let mut tables = Tables::open(&txn)?;
        batch.iter().try_for_each(|change| tables.apply(change))?;
        tables.set_number("applied", seq)?;
    }
    txn.commit().map_err(failed)
}

struct Tables<'a> {
    head: Table<'a, &'static str, &'static [u8]>,
    inodes: Table<'a, u64, &'static [u8]>,
    names: Table<'a, (u64, &'static [u8]), u64>,
    xattrs: Table<'a, (u64, &'static [u8]), &'static [u8]>,
    maps: Table<'a, (u64, u64), (u64, u8)>,
    orphans: Table<'a, u64, ()>,
}

impl<'a> Tables<'a> {
    fn open(txn: &'a WriteTransaction) -> Result<Tables<'a>> {
        Ok(Tables {
            head: txn.open_table(SUPER).map_err(failed)?,
            inodes: txn.open_table(INODES).map_err(failed)?,
            names: txn.open_table(NAMES).map_err(failed)?,
            xattrs: txn.open_table(XATTRS).map_err(failed)?,
            maps: txn.open_table(MAPS).map_err(failed)?,
            orphans: txn.open_table(ORPHANS).map_err(failed)?,
        })
    }

    fn apply(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::Inode(ino, inode) => {
                self.inodes.insert(*ino, encode(inode)?.as_slice()).map_err(failed)?;
            }
            Change::Name(dir, name, ino) => {
                self.names.insert((*dir, name.as_slice()), *ino).map_err(failed)?;
            }
            Change::Whiteout(dir, name) => {
                self.names.insert((*dir, name.as_slice()), WHITEOUT).map_err(failed)?;
            }
            Change::NoName(dir, name) => {
                self.names.remove((*dir, name.as_slice())).map_err(failed)?;
            }
            Change::Xattr(ino, name, value) => {
                self.xattrs.insert((*ino, name.as_slice()), value.as_slice()).map_err(failed)?;
            }
            Change::NoXattr(ino, name) => {
                self.xattrs.remove((*ino, name.as_slice())).map_err(failed)?;
            }
            Change::Map(ino, run) => {
                let row = (run.blocks, code_of(run.state));
                self.maps.insert((*ino, run.first), row).map_err(failed)?;
            }
            Change::NoMap(ino, first) => {
                self.maps.remove((*ino, *first)).map_err(failed)?;
            }
            Change::Orphan(ino) => {
                self.orphans.insert(*ino, ()).map_err(failed)?;
            }
            Change::Next(next) => {
                self.set_number("next", *next)?;
            }
            Change::Purge(ino) => self.purge(*ino)?,
        }
        Ok(())
    }

    fn set_number(&mut self, name: &str, number: u64) -> Result<()> {
        self.head.insert(name, number.to_le_bytes().as_slice()).map_err(failed)?;
        Ok(())
    }

    fn purge(&mut self, ino: NodeId) -> Result<()> {
        let (first, end) = (key(ino), key(ino + 1));
        self.inodes.remove(ino).map_err(failed)?;
        self.orphans.remove(ino).map_err(failed)?;
        self.names.retain_in(first..end, |_, _| false).map_err(failed)?;
        self.xattrs.retain_in(first..end, |_, _| false).map_err(failed)?;
        self.maps.retain_in((ino, 0)..(ino + 1, 0), |_, _| false).map_err(failed)
    }
}

/// The least key of an inode.
pub(super) fn key(ino: NodeId) -> (u64, &'static [u8]) {
    (ino, &[])
}

impl Super {
    /// What a new upper over these lowers is.
    pub fn new(
        uuid: [u8; 16],
        block_bytes: u32,
        created: Timestamp,
        lowers: Vec<LowerId>,
    ) -> Super {
        Super { version: VERSION, uuid, block_bytes, created, lowers }
    }
}
