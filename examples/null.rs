//! `null MOUNTPOINT`: a filesystem that does nothing but answer: the yardstick of `make bench`.
//!
//! The session is set up as `bcachefs-fuse mount` sets up its own (threads, cloned descriptors,
//! INIT flags, request sizes, no FOPEN_DIRECT_IO); one file, `big`, whose reads are copied from a
//! 128 MiB buffer at the request's offset, as a cache that always hits would. What a mount of
//! ours costs beyond this is ours; what this costs is the kernel's and fuser's.

use std::error::Error;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEntry, ReplyOpen, Request, Session, SessionACL,
};

const TTL: Duration = Duration::from_secs(1);
const BUFFER: usize = 128 << 20;
const FILE_SIZE: u64 = 64 << 30;
const MAX_REQUEST: u32 = 1 << 20;
const THREADS: usize = 16;
const BACKGROUND: u16 = 128;

/// Those of the mount's INIT flags that a read-only answerer can feel.
const FLAGS: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_CACHE_SYMLINKS);

struct Null {
    buffer: Vec<u8>,
    reads: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

fn attr(ino: INodeNo) -> FileAttr {
    let root = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: if root { 0 } else { FILE_SIZE },
        blocks: if root { 0 } else { FILE_SIZE / 512 },
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if root { FileType::Directory } else { FileType::RegularFile },
        perm: if root { 0o755 } else { 0o444 },
        nlink: if root { 2 } else { 1 },
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Null {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let unsupported = |what: &str| io::Error::other(format!("the kernel refuses {what}"));
        let wanted = FLAGS & config.capabilities();
        config.add_capabilities(wanted).map_err(|_| unsupported("the INIT flags"))?;
        config.set_max_write(MAX_REQUEST).map_err(|_| unsupported("1 MiB requests"))?;
        config.set_max_background(BACKGROUND).map_err(|_| unsupported("128 in background"))?;
        config
            .set_congestion_threshold(BACKGROUND)
            .map_err(|_| unsupported("a congestion threshold of 128"))?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == "big" {
            reply.entry(&TTL, &attr(INodeNo(2)), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(1), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // A request that would run over the buffer's end is answered from its start.
        let length = (size as usize).min(MAX_REQUEST as usize);
        let mut start = (offset % BUFFER as u64) as usize;
        if start + length > BUFFER {
            start = 0;
        }
        self.reads.fetch_add(1, Relaxed);
        self.bytes.fetch_add(length as u64, Relaxed);
        // One copy, the kernel's, out of the buffer: the strictest yardstick.
        reply.data(&self.buffer[start..start + length]);
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, at: u64, mut reply: ReplyDirectory) {
        let entries = [
            (1, FileType::Directory, "."),
            (1, FileType::Directory, ".."),
            (2, FileType::RegularFile, "big"),
        ];
        for (number, (ino, kind, name)) in (1u64..).zip(entries).skip(at as usize) {
            if reply.add(INodeNo(ino), number, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mountpoint = std::env::args_os().nth(1).ok_or("usage: null MOUNTPOINT")?;
    // Written once, so that no answer is copied from the kernel's shared zero page.
    let buffer: Vec<u8> = (0..BUFFER).map(|at| (at >> 12) as u8 | 1).collect();
    let (reads, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let null = Null { buffer, reads: reads.clone(), bytes: bytes.clone() };
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("null".into()), MountOption::DefaultPermissions, MountOption::RO];
    config.acl = SessionACL::Owner;
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = Session::new(null, &mountpoint, &config)?;
    println!("null: {} threads, {BACKGROUND} in background, `big` is 64 GiB", THREADS);
    session.run()?;
    let (reads, bytes) = (reads.load(Relaxed), bytes.load(Relaxed));
    println!("null: {reads} reads, {bytes} bytes");
    assert!(bytes <= reads * u64::from(MAX_REQUEST), "an answer was longer than a request");
    Ok(())
}
