//! A source that is slow and breaks on demand: one flat directory passed through FUSE, each read
//! delayed, byte ranges that answer EIO. For tests that need a disk worth caching, and one whose
//! errors can be told where to happen.
//!
//! The session runs in threads of this process; the daemon under test is another process, so
//! neither can wait for itself. Locks: `nodes`, then nothing; `faults` on its own; none is held
//! during I/O or a delay.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, Session, SessionACL, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;

const TTL: Duration = Duration::ZERO;

/// What the test turns while the source is mounted.
#[derive(Debug, Default)]
struct Knobs {
    delay_ns: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    read_faults: Faults,
    write_faults: Faults,
}

/// A mounted slow source; unmounts when dropped.
#[derive(Debug)]
pub struct SlowSource {
    knobs: Arc<Knobs>,
    session: Option<BackgroundSession>,
}

impl SlowSource {
    /// Shows the files of `directory` (no subdirectories) on `mountpoint`; every read takes
    /// `delay` longer. Up to 16 requests at a time.
    pub fn mount(directory: &Path, mountpoint: &Path, delay: Duration) -> io::Result<SlowSource> {
        let knobs = Arc::new(Knobs::default());
        let slow = Slow {
            directory: directory.to_path_buf(),
            knobs: knobs.clone(),
            nodes: Mutex::default(),
        };
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("slow".into()),
            MountOption::Subtype("slow".into()),
            MountOption::DefaultPermissions,
        ];
        let root = rustix::process::geteuid().is_root();
        config.acl = if root { SessionACL::All } else { SessionACL::Owner };
        config.n_threads = Some(16);
        config.clone_fd = true;
        let session = Some(Session::new(slow, mountpoint, &config)?.spawn()?);
        let source = SlowSource { knobs, session };
        source.set_delay(delay);
        Ok(source)
    }

    /// Changes the delay of a read.
    pub fn set_delay(&self, delay: Duration) {
        self.knobs.delay_ns.store(delay.as_nanos() as u64, Relaxed);
    }

    /// Reads of file `name` that touch `bytes` answer EIO from now on.
    pub fn fail_reads(&self, name: &str, bytes: Range<u64>) {
        self.knobs.read_faults.lock().push((name.into(), bytes));
    }

    /// Writes of file `name` that touch `bytes` answer EIO from now on.
    pub fn fail_writes(&self, name: &str, bytes: Range<u64>) {
        self.knobs.write_faults.lock().push((name.into(), bytes));
    }

    /// Nothing fails any more.
    pub fn heal(&self) {
        self.knobs.read_faults.lock().clear();
        self.knobs.write_faults.lock().clear();
    }

    /// Read requests that came so far.
    pub fn reads(&self) -> u64 {
        self.knobs.reads.load(Relaxed)
    }

    /// Write requests that came so far.
    pub fn writes(&self) -> u64 {
        self.knobs.writes.load(Relaxed)
    }
}

impl Drop for SlowSource {
    fn drop(&mut self) {
        if let Some(session) = self.session.take()
            && let Err(error) = session.umount_and_join()
        {
            eprintln!("slow source: {error}");
        }
    }
}

/// Byte ranges of files, by name.
type Faults = Mutex<Vec<(String, Range<u64>)>>;

fn hit(faults: &Faults, name: &str, at: Range<u64>) -> bool {
    faults.lock().iter().any(|(n, f)| n == name && f.start < at.end && at.start < f.end)
}

struct Slow {
    directory: PathBuf,
    knobs: Arc<Knobs>,
    nodes: Mutex<HashMap<u64, String>>,
}

impl Slow {
    fn name(&self, ino: INodeNo) -> Result<String, Errno> {
        self.nodes.lock().get(&ino.0).cloned().ok_or(Errno::ESTALE)
    }

    fn path(&self, ino: INodeNo) -> Result<PathBuf, Errno> {
        if ino == INodeNo::ROOT {
            return Ok(self.directory.clone());
        }
        Ok(self.directory.join(self.name(ino)?))
    }

    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        Ok(attr_of(ino, &std::fs::metadata(self.path(ino)?)?))
    }

    fn entry(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let name = name.to_str().ok_or(Errno::EINVAL)?;
        let meta = std::fs::symlink_metadata(self.directory.join(name))?;
        if parent != INodeNo::ROOT || !meta.is_file() {
            return Err(Errno::ENOENT);
        }
        // The root is 1; no file of a host filesystem has that number.
        let ino = INodeNo(meta.ino());
        self.nodes.lock().insert(ino.0, name.into());
        Ok(attr_of(ino, &meta))
    }

    fn file(&self, ino: INodeNo, write: bool) -> Result<File, Errno> {
        Ok(OpenOptions::new().read(true).write(write).open(self.path(ino)?)?)
    }

    fn slow_read(&self, ino: INodeNo, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        self.knobs.reads.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_nanos(self.knobs.delay_ns.load(Relaxed)));
        let range = offset..offset + u64::from(size);
        if hit(&self.knobs.read_faults, &self.name(ino)?, range) {
            return Err(Errno::EIO);
        }
        let file = self.file(ino, false)?;
        let mut bytes = vec![0; size as usize];
        let mut done = 0;
        while done < bytes.len() {
            match file.read_at(&mut bytes[done..], offset + done as u64)? {
                0 => break,
                more => done += more,
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    fn store(&self, ino: INodeNo, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.knobs.writes.fetch_add(1, Relaxed);
        let range = offset..offset + data.len() as u64;
        if hit(&self.knobs.write_faults, &self.name(ino)?, range) {
            return Err(Errno::EIO);
        }
        self.file(ino, true)?.write_all_at(data, offset)?;
        Ok(data.len() as u32)
    }

    fn list(&self, at: u64, reply: &mut ReplyDirectory) -> Result<(), Errno> {
        let mut names =
            vec![(1, FileType::Directory, ".".into()), (1, FileType::Directory, "..".into())];
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_file() {
                names.push((meta.ino(), FileType::RegularFile, entry.file_name()));
            }
        }
        for (number, (ino, kind, name)) in (1u64..).zip(names).skip(at as usize) {
            if reply.add(INodeNo(ino), number, kind, name) {
                break;
            }
        }
        Ok(())
    }
}

fn attr_of(ino: INodeNo, meta: &Metadata) -> FileAttr {
    let time = |secs: i64, nsec: i64| {
        SystemTime::UNIX_EPOCH + Duration::new(secs.max(0) as u64, nsec.max(0) as u32)
    };
    FileAttr {
        ino,
        size: meta.len(),
        blocks: meta.blocks(),
        atime: time(meta.atime(), meta.atime_nsec()),
        mtime: time(meta.mtime(), meta.mtime_nsec()),
        ctime: time(meta.ctime(), meta.ctime_nsec()),
        crtime: SystemTime::UNIX_EPOCH,
        kind: if meta.is_dir() { FileType::Directory } else { FileType::RegularFile },
        perm: (meta.mode() & 0o7777) as u16,
        nlink: meta.nlink() as u32,
        uid: meta.uid(),
        gid: meta.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Slow {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_PARALLEL_DIROPS;
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.entry(parent, name) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let resized = size.map_or(Ok(()), |size| Ok(self.file(ino, true)?.set_len(size)?));
        match resized.and_then(|()| self.attr(ino)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let made = File::create(self.directory.join(name)).map_err(Errno::from);
        match made.and_then(|_| self.entry(parent, name)) {
            Ok(attr) => {
                let flags = FopenFlags::FOPEN_DIRECT_IO;
                reply.created(&TTL, &attr, Generation(0), FileHandle(0), flags);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match std::fs::remove_file(self.directory.join(name)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page cache: every read of the daemon is to be felt.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.slow_read(ino, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.store(ino, offset, data) {
            Ok(size) => reply.written(size),
            Err(errno) => reply.error(errno),
        }
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.file(ino, true).and_then(|file| Ok(file.sync_all()?)) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        match self.list(offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match rustix::fs::statvfs(&self.directory) {
            Ok(s) => reply.statfs(
                s.f_blocks,
                s.f_bfree,
                s.f_bavail,
                s.f_files,
                s.f_ffree,
                s.f_bsize as u32,
                255,
                s.f_frsize as u32,
            ),
            Err(error) => reply.error(io::Error::from(error).into()),
        }
    }
}
