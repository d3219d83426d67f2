//! What a tree holds at one moment, and how two such states differ, in words.
//!
//! Every directory is walked by descriptors, so no symbolic link leads out of the tree. Access
//! times, sizes of directories and allocated blocks are no part of the state: two filesystems
//! cannot agree on them.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fmt::{Debug, Write};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

/// Seconds and nanoseconds.
pub type Time = (i64, i64);

/// One name of a tree and what it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: FileType,
    /// Permission bits, the special ones too.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names.
    pub nlink: u64,
    /// Bytes of a file or of a link's target; 0 for the others.
    pub size: u64,
    /// Hash of a file's bytes.
    pub hash: u64,
    /// Where a symbolic link leads.
    pub target: Vec<u8>,
    /// Device number of a device.
    pub rdev: u64,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Last modification.
    pub mtime: Time,
    /// Last change.
    pub ctime: Time,
    /// Inode number.
    pub ino: u64,
    /// The first of the names of the same file (empty where only one name was looked at).
    pub first: PathBuf,
    /// What contradicts itself: a hole with bytes in it, a directory that lists another number.
    pub odd: Option<String>,
}

/// A whole tree.
#[derive(Clone, Debug)]
pub struct State {
    root: PathBuf,
    /// By path; the root's is empty.
    pub entries: BTreeMap<PathBuf, Entry>,
}

/// What must be equal beside the content.
#[derive(Clone, Copy, Debug)]
pub enum Rule<'a> {
    /// A copy made with all times.
    Copy,
    /// The very same tree: change times and inode numbers too.
    Untouched,
    /// Two trees with the same history. The times given explicitly are known by the reference's
    /// inode numbers; another time is near that of the other tree.
    Twins {
        /// The times.
        explicit: &'a HashMap<u64, Time>,
        /// Whether the links of directories are compared.
        directory_links: bool,
    },
}

/// How far two clocks may be apart at the same operation, in seconds.
const NEAR: i64 = 30;

fn list(directory: BorrowedFd<'_>) -> Result<Vec<(OsString, u64, FileType)>, Errno> {
    let mut space = [MaybeUninit::uninit(); 8192];
    let mut raw = RawDir::new(directory, &mut space);
    let mut found = Vec::new();
    while let Some(entry) = raw.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push((OsStr::from_bytes(name).to_owned(), entry.ino(), entry.file_type()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The names in a directory and what they are, sorted.
pub fn names(directory: BorrowedFd<'_>) -> Result<Vec<(OsString, FileType)>, Errno> {
    Ok(list(directory)?.into_iter().map(|(name, _, kind)| (name, kind)).collect())
}

/// Opens a directory for listing, never through a symbolic link.
pub fn directory(at: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let name = if name.is_empty() { OsStr::new(".") } else { name };
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// All paths of a tree but its root, and what they are.
pub fn paths(root: &Path) -> Result<Vec<(PathBuf, FileType)>, String> {
    let said = |path: &Path| {
        let path = path.to_owned();
        move |e: Errno| format!("{path:?}: {e}")
    };
    let top = File::open(root).map_err(|e| format!("{}: {e}", root.display()))?;
    let mut found = Vec::new();
    let mut waiting = vec![(PathBuf::new(), OwnedFd::from(top))];
    while let Some((path, open)) = waiting.pop() {
        for (name, kind) in names(open.as_fd()).map_err(said(&path))? {
            let below = path.join(&name);
            if kind == FileType::Directory {
                let inner = directory(open.as_fd(), &name).map_err(said(&below))?;
                waiting.push((below.clone(), inner));
            }
            found.push((below, kind));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

fn xattrs(at: BorrowedFd<'_>, name: &OsStr) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Errno> {
    // The descriptor's own name leads into the directory; the last name is not followed.
    let path = Path::new("/proc/self/fd").join(at.as_raw_fd().to_string()).join(name);
    let mut names = vec![0; 8192];
    let len = rustix::fs::llistxattr(&path, &mut names)?;
    let mut found = BTreeMap::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        // Labels of the machine's security module are not the filesystem's.
        if name.starts_with(b"security.") {
            continue;
        }
        let mut value = vec![0; 8192];
        let len = rustix::fs::lgetxattr(&path, name, &mut value)?;
        value.truncate(len);
        found.insert(name.to_vec(), value);
    }
    Ok(found)
}

/// Where a hole is reported although there are bytes.
fn false_hole(file: &File, bytes: &[u8]) -> Result<Option<u64>, Errno> {
    let len = bytes.len() as u64;
    let mut at = 0;
    while at < len {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(len),
            Err(Errno::NXIO) => len,
            Err(error) => return Err(error),
        };
        if let Some(wrong) = bytes[at as usize..data as usize].iter().position(|byte| *byte != 0) {
            return Ok(Some(at + wrong as u64));
        }
        if data == len {
            break;
        }
        at = rustix::fs::seek(file, SeekFrom::Hole(data))?;
        if at <= data {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

fn content(at: BorrowedFd<'_>, name: &OsStr) -> Result<(Vec<u8>, File), Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let mut file = File::from(rustix::fs::openat(at, name, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    Ok((bytes, file))
}

/// Hash of bytes, the same in every run.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The permission bits that are compared. Set-group-id on a file that its group may not execute is
/// left out: a write of another user takes it away, which the FUSE protocol cannot say (it clears
/// the bit of executable files only).
pub fn mode(raw: u32) -> u32 {
    let file = FileType::from_raw_mode(raw) == FileType::RegularFile;
    let left_out = file && raw & 0o2010 == 0o2000;
    raw & if left_out { 0o5777 } else { 0o7777 }
}

impl Entry {
    /// What `name` in the directory `at` is; the directory itself for an empty name.
    pub fn read(at: BorrowedFd<'_>, name: &OsStr) -> Result<Entry, Errno> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        let stat = rustix::fs::statat(at, name, flags)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let mut entry = Entry {
            kind,
            mode: mode(stat.st_mode),
            uid: stat.st_uid,
            gid: stat.st_gid,
            nlink: stat.st_nlink as u64,
            size: 0,
            hash: 0,
            target: Vec::new(),
            rdev: 0,
            xattrs: xattrs(at, name)?,
            mtime: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            ctime: (stat.st_ctime as i64, stat.st_ctime_nsec as i64),
            ino: stat.st_ino,
            first: PathBuf::new(),
            odd: None,
        };
        match kind {
            FileType::RegularFile => {
                let (bytes, file) = content(at, name)?;
                (entry.size, entry.hash) = (stat.st_size as u64, hash(&bytes));
                if bytes.len() as u64 != entry.size {
                    entry.odd = Some(format!("{} bytes can be read", bytes.len()));
                } else if let Some(wrong) = false_hole(&file, &bytes)? {
                    entry.odd = Some(format!("SEEK_DATA and SEEK_HOLE are wrong at {wrong}"));
                }
            }
            FileType::Symlink => {
                entry.size = stat.st_size as u64;
                entry.target = rustix::fs::readlinkat(at, name, Vec::new())?.into_bytes();
            }
            FileType::BlockDevice | FileType::CharacterDevice => entry.rdev = stat.st_rdev,
            _ => {}
        }
        Ok(entry)
    }

    /// How `there` differs from this one, each difference in words.
    pub fn differences(&self, there: &Entry, rule: Rule<'_>) -> Vec<String> {
        let mut found = Vec::new();
        let mut note = |what: &str, wanted: &dyn Debug, got: &dyn Debug| {
            let (wanted, got) = (format!("{wanted:?}"), format!("{got:?}"));
            if wanted != got {
                found.push(format!("{what} is {got}, not {wanted}"));
            }
        };
        note("the type", &self.kind, &there.kind);
        note("the mode", &Octal(self.mode), &Octal(there.mode));
        note("the owner", &(self.uid, self.gid), &(there.uid, there.gid));
        let links = !matches!(rule, Rule::Twins { directory_links: false, .. });
        if links || self.kind != FileType::Directory {
            note("the link count", &self.nlink, &there.nlink);
        }
        note("the size", &self.size, &there.size);
        if self.size == there.size && self.hash != there.hash {
            note("the content", &"that of the reference", &"another");
        }
        let shown = |bytes: &Vec<u8>| OsStr::from_bytes(bytes).to_owned();
        note("the target", &shown(&self.target), &shown(&there.target));
        note("the device", &self.rdev, &there.rdev);
        for name in self.xattrs.keys().chain(there.xattrs.keys()) {
            let value = |entry: &Entry| entry.xattrs.get(name).map(shown);
            let what = format!("attribute {}", String::from_utf8_lossy(name));
            note(&what, &value(self), &value(there));
        }
        note("the first of its names", &self.first, &there.first);
        for (entry, which) in [(self, "in the reference"), (there, "here")] {
            note(&format!("what contradicts itself {which}"), &None::<String>, &entry.odd);
        }
        match rule {
            Rule::Copy => note("mtime", &self.mtime, &there.mtime),
            Rule::Untouched => {
                note("mtime", &self.mtime, &there.mtime);
                note("ctime", &self.ctime, &there.ctime);
                note("the inode number", &self.ino, &there.ino);
            }
            Rule::Twins { explicit, .. } => {
                let given = explicit.get(&self.ino);
                let near = (self.mtime.0 - there.mtime.0).abs() <= NEAR;
                if given == Some(&self.mtime) {
                    note("mtime (given explicitly)", &self.mtime, &there.mtime);
                } else if !explicit.is_empty() && (!near || given == Some(&there.mtime)) {
                    note("mtime (of the last change)", &self.mtime, &there.mtime);
                }
            }
        }
        found.dedup();
        found
    }
}

/// Bits that are printed in octal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Octal(pub u32);

impl Debug for Octal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl State {
    /// Reads the tree below `root`.
    pub fn read(root: &Path) -> Result<State, String> {
        let top = File::open(root).map_err(|e| format!("{}: {e}", root.display()))?;
        let mut state = State { root: root.to_owned(), entries: BTreeMap::new() };
        let entry = Entry::read(top.as_fd(), OsStr::new(""));
        state.entries.insert(PathBuf::new(), entry.map_err(|e| format!("the root: {e}"))?);
        let mut waiting = vec![(PathBuf::new(), OwnedFd::from(top))];
        while let Some((path, open)) = waiting.pop() {
            state.read_directory(&path, open.as_fd(), &mut waiting)?;
        }
        // Only now all names are known.
        let mut firsts = HashMap::new();
        for (path, entry) in &mut state.entries {
            entry.first = firsts.entry(entry.ino).or_insert_with(|| path.clone()).clone();
        }
        Ok(state)
    }

    fn read_directory(
        &mut self,
        path: &Path,
        open: BorrowedFd<'_>,
        waiting: &mut Vec<(PathBuf, OwnedFd)>,
    ) -> Result<(), String> {
        let listed = list(open).map_err(|e| format!("readdir of {path:?}: {e}"))?;
        for (name, ino, kind) in listed {
            let below = path.join(&name);
            let said = |e: Errno| format!("{below:?} is listed, but: {e}");
            let mut entry = Entry::read(open, &name).map_err(said)?;
            if (ino, kind) != (entry.ino, entry.kind) {
                let (is, not) = (entry.ino, entry.kind);
                entry.odd = Some(format!("listed as {kind:?} {ino}, but {not:?} {is}"));
            }
            if entry.kind == FileType::Directory {
                let inner = directory(open, &name).map_err(said)?;
                waiting.push((below.clone(), inner));
            }
            if self.entries.insert(below.clone(), entry).is_some() {
                return Err(format!("{below:?} is listed twice"));
            }
        }
        Ok(())
    }

    /// The modification times, by inode number.
    pub fn times(&self) -> HashMap<u64, Time> {
        self.entries.values().map(|entry| (entry.ino, entry.mtime)).collect()
    }

    /// One number for all that [`Rule::Untouched`] compares.
    pub fn fingerprint(&self) -> u64 {
        hash(format!("{:?}", self.entries).as_bytes())
    }

    /// How `there` differs from this state, by path.
    pub fn differences(&self, there: &State, rule: Rule<'_>) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for (path, entry) in &self.entries {
            let Some(other) = there.entries.get(path) else {
                found.push((path.clone(), "is missing".to_owned()));
                continue;
            };
            let mut words = entry.differences(other, rule).join("; ");
            if entry.size == other.size && entry.hash != other.hash {
                let at = first_difference(&self.root.join(path), &there.root.join(path));
                let _ = write!(words, " ({at})");
            }
            if !words.is_empty() {
                found.push((path.clone(), words));
            }
        }
        let more = there.entries.keys().filter(|path| !self.entries.contains_key(*path));
        found.extend(more.map(|path| (path.clone(), "should not be there".to_owned())));
        found
    }
}

/// Where the bytes of two files begin to differ, in words.
fn first_difference(wanted: &Path, there: &Path) -> String {
    let (Ok(wanted), Ok(there)) = (std::fs::read(wanted), std::fs::read(there)) else {
        return "it cannot be read again".into();
    };
    let differs = |at: &usize| wanted[*at] != there[*at];
    let mut all = (0..wanted.len().min(there.len())).filter(differs);
    match all.next() {
        None => "the same when read again".into(),
        Some(at) => {
            let (count, last) = (all.clone().count() + 1, all.next_back().unwrap_or(at));
            let (new, old) = (there[at], wanted[at]);
            format!("byte {at} is {new:#04x}, not {old:#04x}; {count} differ, the last is {last}")
        }
    }
}

/// Differences as lines, the first few of them.
pub fn readable(differences: &[(PathBuf, String)]) -> String {
    const SHOWN: usize = 8;
    let mut text = String::new();
    for (path, words) in differences.iter().take(SHOWN) {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let _ = writeln!(text, "  {path:?}: {words}");
    }
    if differences.len() > SHOWN {
        let _ = writeln!(text, "  and {} more", differences.len() - SHOWN);
    }
    text
}
