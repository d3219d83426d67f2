//! Random directory trees from a seed: what an overlay may find in its lower directory.
//!
//! Names come from a small pool, so that what is removed is often made again under the same name,
//! and some of them are odd. What needs root or a certain filesystem is asked of [`Can`].

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags,
};

use crate::storm::Random;
use crate::tools::pattern;
use crate::users::{ALICE, BOB};

/// What may be asked of the trees of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Can {
    /// Root: owners, devices, trusted attributes, any mode.
    pub root: bool,
    /// Some operations are those of another user than root.
    pub users: bool,
    /// POSIX ACLs.
    pub acls: bool,
    /// fallocate at all.
    pub allocate: bool,
    /// fallocate with FALLOC_FL_ZERO_RANGE.
    pub zero_range: bool,
    /// RENAME_EXCHANGE and RENAME_NOREPLACE.
    pub exchange: bool,
    /// Names, attributes and devices that mean something to other overlay filesystems.
    pub marks: bool,
    /// Inode numbers stay the same as long as the file lives.
    pub inodes: bool,
    /// What is not changed keeps its modification time.
    pub times: bool,
    /// A directory has two links and one for each directory in it.
    pub directory_links: bool,
}

impl Can {
    /// What the filesystem of `scratch` can do (it holds the reference).
    pub fn probe(scratch: &Path) -> io::Result<Can> {
        let at = scratch.join("probe");
        fs::create_dir_all(at.join("d"))?;
        let file = File::create(at.join("f"))?;
        file.set_len(8192)?;
        let works = |flags| rustix::fs::fallocate(&file, flags, 0, 4096).is_ok();
        let keep = FallocateFlags::KEEP_SIZE;
        let allocate = works(keep) && works(FallocateFlags::PUNCH_HOLE | keep);
        let zero_range = allocate && works(FallocateFlags::ZERO_RANGE);
        let (from, to) = (at.join("f"), at.join("d"));
        let swap = rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE);
        let root = rustix::process::geteuid().is_root();
        let acl = acl(&mut Random::new(1));
        let flags = XattrFlags::empty();
        let acls = rustix::fs::lsetxattr(&at, "system.posix_acl_default", &acl, flags).is_ok();
        let links = std::os::unix::fs::MetadataExt::nlink(&fs::metadata(&at)?);
        fs::remove_dir_all(&at)?;
        Ok(Can {
            root,
            users: root,
            acls: root && acls,
            allocate,
            zero_range,
            exchange: swap.is_ok(),
            marks: true,
            inodes: true,
            times: true,
            directory_links: links == 3,
        })
    }

    /// A mode that this user may set without losing the way back to the file.
    pub fn mode(&self, random: &mut Random, directory: bool) -> u32 {
        let odd = [0, 0o4755, 0o2755, 0o2745, 0o1777, 0o6711, 0o7777, 0o444, 0o200, 0o111];
        let mode = match random.below(3) {
            0 => *pick(random, &[0o644, 0o755, 0o700, 0o600, 0o666, 0o777]),
            1 => *pick(random, &odd),
            _ => random.below(0o10000) as u32,
        };
        match (self.root, directory) {
            (true, _) => mode,
            (false, true) => mode | 0o700,
            // A user's daemon writes with a user's rights, and a mount without default_permissions
            // has the kernel forget the sticky bit: special bits of files are for root.
            (false, false) => mode & 0o777 | 0o600,
        }
    }
}

/// One of them.
pub fn pick<'a, T>(random: &mut Random, of: &'a [T]) -> &'a T {
    &of[random.below(of.len() as u64) as usize]
}

/// A name of the pool.
pub fn name(random: &mut Random, can: &Can) -> OsString {
    let odd: [&[u8]; 9] = [
        b"sp ace",
        b"new\nline",
        b"\xff\xfe bad utf-8",
        &[b'n'; 255],
        b"...",
        b"-rf",
        b" ",
        "\u{fc}ml\u{e4}ut".as_bytes(),
        b"back\\slash\t*?",
    ];
    let marks: [&[u8]; 3] = [b".wh.a", b".wh..wh..opq", b"#1"];
    let name = match random.below(10) {
        0 => pick(random, &odd).to_vec(),
        1 if can.marks => pick(random, &marks).to_vec(),
        _ => vec![b'a' + random.below(9) as u8],
    };
    OsString::from_vec(name)
}

/// A time that no clock gives: before 1970 or long ago, with nanoseconds.
pub fn time(random: &mut Random) -> Timespec {
    let nanoseconds = [0, 1, 999_999_999, random.below(1_000_000_000)];
    let seconds = match random.below(4) {
        0 => -1 - random.below(1 << 31).min((1 << 31) - 2) as i64,
        1 => *pick(random, &[0, 1, -1, 1_000_000_000]),
        _ => random.below(1_500_000_000) as i64,
    };
    Timespec { tv_sec: seconds, tv_nsec: *pick(random, &nanoseconds) as _ }
}

/// The name of an extended attribute.
pub fn attribute(random: &mut Random, can: &Can) -> String {
    let user = ["user.a", "user.b", "user.with space.\u{fc}", "user.overlay.opaque"];
    let trusted = ["trusted.t", "trusted.overlay.opaque", "trusted.overlay.redirect"];
    let marked = if can.marks { 3 } else { 1 };
    let users = if can.marks { 4 } else { 3 };
    if can.root && random.below(3) == 0 {
        (*pick(random, &trusted[..marked])).to_owned()
    } else {
        (*pick(random, &user[..users])).to_owned()
    }
}

/// A value of an extended attribute. A few of them fit into a block of any filesystem.
pub fn value(random: &mut Random) -> Vec<u8> {
    let len = *pick(random, &[0, 1, 1, 20, 120]);
    // What an overlay filesystem writes for "opaque".
    if len == 1 { b"y".to_vec() } else { pattern(random.below(1 << 40), len) }
}

/// A valid POSIX ACL as the kernel takes it.
pub fn acl(random: &mut Random) -> Vec<u8> {
    let mut entries = vec![(0x01u16, u32::MAX)];
    if random.below(2) == 0 {
        entries.push((0x02, ALICE));
    }
    entries.push((0x04, u32::MAX));
    if random.below(2) == 0 {
        entries.push((0x08, BOB));
    }
    if entries.len() > 2 {
        entries.push((0x10, u32::MAX));
    }
    entries.push((0x20, u32::MAX));
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&(random.below(8) as u16).to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

/// What a symbolic link says; `near` is a name beside it.
pub fn target(random: &mut Random, near: &OsStr) -> OsString {
    match random.below(6) {
        0 => "no such thing".into(),
        1 => "/nonexistent/outside".into(),
        2 => OsString::from_vec([b"../", near.as_bytes()].concat()),
        3 => "x/".repeat(1 + random.below(900) as usize).into(),
        _ => near.to_owned(),
    }
}

/// A device number that is safe to make: null, zero, and the one overlay filesystems use as a
/// whiteout.
pub fn device(random: &mut Random, can: &Can) -> u64 {
    let last = if can.marks { 3 } else { 2 };
    let (major, minor) = *pick(random, &[(1, 3), (1, 5), (0, 0)][..last]);
    rustix::fs::makedev(major, minor)
}

/// Length of a new file's content.
fn length(random: &mut Random) -> usize {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => *pick(random, &[4095, 4096, 4097, 65536]),
        3..6 => random.below(5000) as usize,
        _ => random.below(110 << 10) as usize,
    }
}

#[derive(Debug)]
struct Gardener<'a> {
    root: &'a Path,
    random: Random,
    can: &'a Can,
    directories: Vec<PathBuf>,
    others: Vec<PathBuf>,
}

impl Gardener<'_> {
    /// A path that is not there yet.
    fn free(&mut self) -> PathBuf {
        let directory = pick(&mut self.random, &self.directories).clone();
        let mut path = directory.join(name(&mut self.random, self.can));
        while self.root.join(&path).symlink_metadata().is_ok() {
            path = directory.join(format!("more-{}", self.random.below(1 << 20)));
        }
        path
    }

    fn file(&mut self, at: &Path) -> io::Result<()> {
        let len = length(&mut self.random);
        fs::write(at, pattern(self.random.below(1 << 40), len))
    }

    /// Some data, much nothing.
    fn sparse(&mut self, at: &Path) -> io::Result<()> {
        let file = File::create(at)?;
        let len = 1 + self.random.below(400 << 10);
        file.set_len(len)?;
        for _ in 0..self.random.below(4) {
            let size = 1 + self.random.below(8 << 10).min(len - 1) as usize;
            let offset = self.random.below(len - size as u64 + 1);
            file.write_all_at(&pattern(offset ^ len, size), offset)?;
        }
        Ok(())
    }

    fn plant(&mut self) -> io::Result<()> {
        let path = self.free();
        let at = self.root.join(&path);
        let make = |kind, device| rustix::fs::mknodat(CWD, &at, kind, Mode::RUSR, device);
        match self.random.below(100) {
            0..26 => {
                fs::create_dir(&at)?;
                self.directories.push(path);
                return Ok(());
            }
            26..34 if !self.others.is_empty() => {
                let from = pick(&mut self.random, &self.others);
                fs::hard_link(self.root.join(from), &at)?;
            }
            34..44 => {
                let near = name(&mut self.random, self.can);
                symlink(target(&mut self.random, &near), &at)?;
            }
            44..49 => make(FileType::Fifo, 0)?,
            49..53 if self.can.root => {
                make(FileType::CharacterDevice, device(&mut self.random, self.can))?;
            }
            53..64 => self.sparse(&at)?,
            _ => self.file(&at)?,
        }
        self.others.push(path);
        Ok(())
    }

    /// Owner, mode, attributes and times; of a directory after all that is in it.
    fn dress(&mut self, path: &Path) -> io::Result<()> {
        let at = self.root.join(path);
        let meta = at.symlink_metadata()?;
        let random = &mut self.random;
        let none = XattrFlags::empty();
        if self.can.root && random.below(3) == 0 {
            let id = |random: &mut Random| *pick(random, &[0, 1, ALICE, BOB, 4_000_000_000]);
            lchown(&at, Some(id(random)), Some(id(random)))?;
        }
        if !meta.is_symlink() && random.below(2) == 0 {
            // The root stays open to the other users of the test.
            let mode = self.can.mode(random, meta.is_dir());
            let mode = if path.as_os_str().is_empty() { 0o755 } else { mode };
            fs::set_permissions(&at, fs::Permissions::from_mode(mode))?;
        }
        for _ in 0..random.below(3) {
            let attribute = attribute(random, self.can);
            let plain = meta.is_file() || meta.is_dir();
            if plain || attribute.starts_with("trusted.") {
                rustix::fs::lsetxattr(&at, attribute, &value(random), none)?;
            }
        }
        if self.can.acls && !meta.is_symlink() && random.below(10) == 0 {
            rustix::fs::lsetxattr(&at, "system.posix_acl_access", &acl(random), none)?;
        }
        if self.can.acls && meta.is_dir() && random.below(10) == 0 {
            rustix::fs::lsetxattr(&at, "system.posix_acl_default", &acl(random), none)?;
        }
        if random.below(4) > 0 {
            let (last_access, last_modification) = (time(random), time(random));
            let times = Timestamps { last_access, last_modification };
            rustix::fs::utimensat(CWD, &at, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

/// Grows the tree of `seed` in the empty directory `root`: 20 to 60 entries.
pub fn grow(root: &Path, seed: u64, can: &Can) -> io::Result<()> {
    let (directories, others) = (vec![PathBuf::new()], Vec::new());
    let random = Random::new(seed ^ 0x7ee);
    let mut gardener = Gardener { root, random, can, directories, others };
    for _ in 0..20 + gardener.random.below(41) {
        gardener.plant()?;
    }
    let mut all = [gardener.directories.clone(), gardener.others.clone()].concat();
    all.sort();
    for path in all.iter().rev() {
        gardener.dress(path).map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?;
    }
    Ok(())
}
