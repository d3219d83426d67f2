//! The latency device: a FUSE filesystem with one file, `disk`, that answers as eight disk arms
//! would. Stripes of 64 KiB go round the arms; each arm serves its requests first come, first
//! served, each in 2 ms + 8 ms x distance / arm size; the arms work in parallel and replies are
//! asynchronous. Under `losetup --direct-io=on` it is a disk that rewards depth and order.
//!
//! [`serve`] is the filesystem, run by the program `seekdisk`: never in a process that starts
//! others, whose children would wait for their own parent. [`SeekDisk`] starts and ends it.
//! `arms.json` beside `disk` holds the counters.
//!
//! State of a request: queued on each arm it touches -> served by all of them -> its bytes moved
//! -> replied. Locks: `said`, then an arm's `books`, for moments; none is held while an arm seeks.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, SessionACL,
    WriteFlags,
};
use parking_lot::Mutex;
use serde_json::json;

mod process;

pub use process::{Arm, SeekDisk};

/// Arms.
pub const ARMS: u64 = 8;
/// Bytes of a stripe.
pub const STRIPE: u64 = 64 << 10;
const SETTLE: Duration = Duration::from_millis(2);
const FULL_SEEK: Duration = Duration::from_millis(8);
const TTL: Duration = Duration::from_secs(3600);
const DISK: INodeNo = INodeNo(2);
const COUNTERS: INodeNo = INodeNo(3);

/// What one request asks of one arm: where it begins there and where the arm ends up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The arm's number.
    pub arm: usize,
    /// First byte, counted on the arm.
    pub from: u64,
    /// Behind the last byte, counted on the arm.
    pub to: u64,
}

/// The arms that the bytes `offset..offset + len` lie on. Consecutive stripes of one arm are
/// neighbours there, so a request visits each arm once.
pub fn visits(offset: u64, len: u64) -> Vec<Visit> {
    let mut found: Vec<Visit> = Vec::new();
    let mut at = offset;
    while at < offset + len {
        let stripe = at / STRIPE;
        let end = ((stripe + 1) * STRIPE).min(offset + len);
        let arm = (stripe % ARMS) as usize;
        let from = stripe / ARMS * STRIPE + at % STRIPE;
        let to = from + (end - at);
        match found.iter_mut().find(|visit| visit.arm == arm) {
            Some(visit) => visit.to = to,
            None => found.push(Visit { arm, from, to }),
        }
        at = end;
    }
    found
}

/// How long an arm that stands at `head` takes to serve a visit at `from`.
pub fn service(head: u64, from: u64, arm_bytes: u64) -> Duration {
    SETTLE + FULL_SEEK.mul_f64(head.abs_diff(from) as f64 / arm_bytes.max(1) as f64)
}

/// What an arm has done.
#[derive(Debug)]
struct Books {
    since: Instant,
    depth: u64,
    depth_ns: u64,
    busy_ns: u64,
    ops: u64,
}

impl Books {
    fn turn(&mut self, change: i64) {
        let now = Instant::now();
        let passed = now.duration_since(self.since).as_nanos() as u64;
        self.depth_ns += passed * self.depth;
        self.busy_ns += if self.depth > 0 { passed } else { 0 };
        self.depth = self.depth.saturating_add_signed(change);
        self.since = now;
        self.ops += u64::from(change < 0);
    }
}

enum Answer {
    Read(ReplyData, usize),
    Write(ReplyWrite, Vec<u8>),
}

/// A request on its way; whoever serves its last visit answers it.
struct Ticket {
    left: AtomicUsize,
    offset: u64,
    answer: Mutex<Option<Answer>>,
    backing: Arc<File>,
}

impl Ticket {
    fn served(&self) {
        if self.left.fetch_sub(1, AcqRel) != 1 {
            return;
        }
        match self.answer.lock().take() {
            Some(Answer::Read(reply, len)) => {
                let mut bytes = vec![0; len];
                match self.backing.read_exact_at(&mut bytes, self.offset) {
                    Ok(()) => reply.data(&bytes),
                    Err(error) => reply.error(error.into()),
                }
            }
            Some(Answer::Write(reply, data)) => {
                match self.backing.write_all_at(&data, self.offset) {
                    Ok(()) => reply.written(data.len() as u32),
                    Err(error) => reply.error(error.into()),
                }
            }
            None => {}
        }
    }
}

struct Job {
    ticket: Arc<Ticket>,
    visit: Visit,
    came: Instant,
}

/// One arm's thread. It sleeps to absolute times: a late wake-up does not slow the next visit.
fn work(jobs: &Receiver<Job>, books: &Mutex<Books>, arm_bytes: u64) {
    let mut head = 0;
    let mut free_at = Instant::now();
    while let Ok(job) = jobs.recv() {
        free_at = free_at.max(job.came) + service(head, job.visit.from, arm_bytes);
        head = job.visit.to;
        thread::sleep(free_at.saturating_duration_since(Instant::now()));
        books.lock().turn(-1);
        job.ticket.served();
    }
}

struct Arms {
    queues: Vec<Sender<Job>>,
    books: Arc<Vec<Mutex<Books>>>,
    backing: Arc<File>,
    bytes: u64,
    began: Instant,
    said: Mutex<String>,
}

impl Arms {
    fn new(backing: File, bytes: u64) -> Arms {
        let began = Instant::now();
        let empty = || Books { since: began, depth: 0, depth_ns: 0, busy_ns: 0, ops: 0 };
        let books: Vec<_> = (0..ARMS).map(|_| Mutex::new(empty())).collect();
        let books = Arc::new(books);
        let start = |arm: u64| {
            let (queue, jobs) = channel();
            let books = books.clone();
            thread::spawn(move || work(&jobs, &books[arm as usize], bytes / ARMS));
            queue
        };
        let queues = (0..ARMS).map(start).collect();
        let (backing, said) = (Arc::new(backing), Mutex::default());
        Arms { queues, books, backing, bytes, began, said }
    }

    fn submit(&self, offset: u64, len: u64, answer: Answer) {
        let visits = visits(offset, len);
        let left = AtomicUsize::new(visits.len());
        let answer = Mutex::new(Some(answer));
        let backing = self.backing.clone();
        let ticket = Arc::new(Ticket { left, offset, answer, backing });
        let came = Instant::now();
        for visit in visits {
            // Counted before it can be served: the depth never goes below zero.
            self.books[visit.arm].lock().turn(1);
            let _ = self.queues[visit.arm].send(Job { ticket: ticket.clone(), visit, came });
        }
    }

    fn counters(&self) -> String {
        let arm = |books: &Mutex<Books>| {
            let mut books = books.lock();
            books.turn(0);
            json!({"ops": books.ops, "depth_ns": books.depth_ns, "busy_ns": books.busy_ns})
        };
        let arms: Vec<_> = self.books.iter().map(arm).collect();
        json!({"now_ns": self.began.elapsed().as_nanos() as u64, "arms": arms}).to_string()
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            DISK => (FileType::RegularFile, 0o600, self.bytes),
            COUNTERS => (FileType::RegularFile, 0o400, 0),
            _ => return None,
        };
        let epoch = SystemTime::UNIX_EPOCH;
        Some(FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            crtime: epoch,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

/// Serves a disk of `bytes`, kept in `backing` (as long as that), until it is unmounted.
pub fn serve(backing: File, bytes: u64, mountpoint: &Path) -> io::Result<()> {
    backing.set_len(bytes)?;
    let mut config = Config::default();
    let name = |name: &str| MountOption::FSName(name.into());
    config.mount_options = vec![name("seekdisk"), MountOption::Subtype("seekdisk".into())];
    let root = rustix::process::geteuid().is_root();
    config.acl = if root { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(4);
    config.clone_fd = true;
    Session::new(Arms::new(backing, bytes), mountpoint, &config)?.run()
}

impl Filesystem for Arms {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_BIG_WRITES;
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(1 << 20);
        // Asynchronous direct I/O counts as background: this bounds the depth.
        let _ = config.set_max_background(512);
        let _ = config.set_congestion_threshold(512);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let ino = match name.to_str() {
            Some("disk") => DISK,
            Some("arms.json") => COUNTERS,
            _ => return reply.error(Errno::ENOENT),
        };
        match self.attr(ino) {
            Some(attr) if parent == INodeNo::ROOT => reply.entry(&TTL, &attr, Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
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
        if ino == COUNTERS {
            // The parts of one reader are of one moment: that of the first.
            let mut text = self.said.lock();
            if offset == 0 {
                *text = self.counters();
            }
            let from = (offset as usize).min(text.len());
            let to = (from + size as usize).min(text.len());
            return reply.data(&text.as_bytes()[from..to]);
        }
        let len = u64::from(size).min(self.bytes.saturating_sub(offset));
        if len == 0 {
            return reply.data(&[]);
        }
        self.submit(offset, len, Answer::Read(reply, len as usize));
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
        let len = data.len() as u64;
        if ino != DISK || len == 0 || offset + len > self.bytes {
            return reply.error(Errno::EINVAL);
        }
        self.submit(offset, len, Answer::Write(reply, data.to_vec()));
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        // A disk without a write cache: what was answered is there.
        reply.ok();
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
        let files = [(DISK, "disk"), (COUNTERS, "arms.json")];
        for (number, (ino, name)) in (1u64..).zip(files).skip(offset as usize) {
            if reply.add(ino, number, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_visits_each_of_its_arms_once() {
        let one = visits(3 * STRIPE + 512, 4096);
        assert_eq!(one, [Visit { arm: 3, from: 512, to: 4608 }]);
        let split = visits(STRIPE - 4096, 8192);
        assert_eq!(split[0], Visit { arm: 0, from: STRIPE - 4096, to: STRIPE });
        assert_eq!(split[1], Visit { arm: 1, from: 0, to: 4096 });
        let long = visits(0, 1 << 20);
        assert_eq!(long.len(), 8);
        assert!(long.iter().all(|visit| (visit.from, visit.to) == (0, 2 * STRIPE)));
        let round = visits(8 * STRIPE, 512);
        assert_eq!(round, [Visit { arm: 0, from: STRIPE, to: STRIPE + 512 }]);
    }

    #[test]
    fn near_is_quick_and_far_is_slow() {
        let arm = 1 << 30;
        assert_eq!(service(0, 0, arm), Duration::from_millis(2));
        assert_eq!(service(arm, 0, arm), Duration::from_millis(10));
        assert_eq!(service(0, arm / 2, arm), Duration::from_millis(6));
    }
}
