//! fuser's trait over `Fs` (layer 8): decode, call, reply. No decisions.
//!
//! Every handler runs inside a fence: a panic answers EIO (fuser's reply says so when it is
//! dropped) and the request thread lives on. Handlers never wait for a device while fewer than four
//! threads are left: such work is parked in the pool with its reply.

use std::ffi::{OsStr, OsString};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::convert::{caller, file_attr, set_time};
use super::listing;
use super::reply::{self, empty, entry, errno, opened, xattr};
use crate::config::MountConfig;
use crate::fs::{Changes, Fs, ReadPlace};
use crate::tree::NewNode;

/// The largest request we let the kernel send.
const MAX_REQUEST: u32 = 1 << 20;

/// Requests the kernel may have under way; fuser's 16 throttles asynchronous reads.
const MAX_BACKGROUND: u16 = 128;

/// The protocol side of a mounted filesystem.
pub struct Adapter {
    fs: Arc<Fs>,
    /// default_permissions is on: the kernel enforces ACLs and leaves the umask to us.
    kernel_checks: bool,
    debug: bool,
    /// Test only: the handler's fence is tried by looking this name up.
    test_panic: Option<OsString>,
}

impl Adapter {
    /// An adapter for one mount.
    pub fn new(fs: Arc<Fs>, config: &MountConfig) -> Adapter {
        Adapter {
            fs,
            kernel_checks: config.allow_other,
            debug: log::log_enabled!(log::Level::Debug),
            test_panic: config.test_panic.clone(),
        }
    }

    /// Runs a handler behind the fence.
    fn fenced(&self, op: &'static str, node: INodeNo, handler: impl FnOnce(&Fs)) {
        if self.debug {
            log::debug!("{op} inode {}", node.0);
        }
        if catch_unwind(AssertUnwindSafe(|| handler(&self.fs))).is_err() {
            log::error!("{op} inode {}: the handler failed in a way that must not happen", node.0);
        }
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS;
        if self.kernel_checks {
            wanted |= InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK;
        }
        // What an older kernel lacks is left out; each is an optimisation but ACLs, which it then
        // does not enforce either.
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(MAX_REQUEST);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.fenced("lookup", parent, |fs| {
            assert_ne!(self.test_panic.as_deref(), Some(name), "test_panic was typed");
            entry(reply, fs, fs.lookup(parent.0, name));
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        self.fenced("forget", ino, |fs| fs.forget(ino.0, nlookup));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.fenced("getattr", ino, |fs| match fs.attr(ino.0) {
            Ok(attr) => reply.attr(&fs.attr_timeout(), &file_attr(&attr)),
            Err(error) => reply.error(errno("getattr", &error)),
        });
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (atime, mtime) = (set_time(atime), set_time(mtime));
        let changes = Changes { mode, uid, gid, size, atime, mtime };
        self.fenced("setattr", ino, |fs| match fs.set_attr(ino.0, fh.map(|fh| fh.0), &changes) {
            Ok(attr) => reply.attr(&fs.attr_timeout(), &file_attr(&attr)),
            Err(error) => reply.error(errno("setattr", &error)),
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        self.fenced("readlink", ino, |fs| match fs.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno("readlink", &error)),
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let caller = caller(req, umask);
        self.fenced("mknod", parent, |fs| {
            let what = NewNode::Special { rdev };
            entry(reply, fs, fs.make(parent.0, name, what, mode, caller));
        });
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let caller = caller(req, umask);
        self.fenced("mkdir", parent, |fs| {
            entry(reply, fs, fs.make(parent.0, name, NewNode::Dir, mode, caller));
        });
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fenced("unlink", parent, |fs| empty("unlink", reply, fs.unlink(parent.0, name)));
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fenced("rmdir", parent, |fs| empty("rmdir", reply, fs.rmdir(parent.0, name)));
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let caller = caller(req, 0);
        self.fenced("symlink", parent, |fs| {
            let what = NewNode::Symlink(target.as_os_str());
            entry(reply, fs, fs.make(parent.0, link_name, what, 0o777, caller));
        });
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.fenced("rename", parent, |fs| {
            let result = fs.rename((parent.0, name), (newparent.0, newname), flags.bits());
            empty("rename", reply, result);
        });
    }

    fn link(
        &self,
        _req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        self.fenced("link", ino, |fs| entry(reply, fs, fs.link(ino.0, newparent.0, newname)));
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.fenced("open", ino, |fs| opened(reply, fs.open(ino.0, flags.0)));
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let place = ReadPlace { node: ino.0, fh: fh.0, offset, len: size as usize };
        self.fenced("read", ino, |fs| listing::read(fs, place, reply));
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let place = (ino.0, fh.0, offset);
        self.fenced("write", ino, |_| listing::write(&self.fs, place, data, reply));
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Nothing is held back: every write has reached the device or its error the writer.
        reply.ok();
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.fenced("release", ino, |fs| {
            fs.release(fh.0);
            reply.ok();
        });
    }

    fn fsync(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let fs = self.fs.clone();
        self.fenced("fsync", ino, |pool| {
            pool.pool().run(move || empty("fsync", reply, fs.sync(ino.0, fh.0, datasync)));
        });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.fenced("opendir", ino, |fs| match fs.open_dir(ino.0) {
            Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::empty()),
            Err(error) => reply.error(errno("opendir", &error)),
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let place = (ino.0, fh.0, offset);
        self.fenced("readdir", ino, |fs| listing::readdir(fs, place, reply));
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let place = (ino.0, fh.0, offset);
        self.fenced("readdirplus", ino, |fs| listing::readdirplus(fs, place, reply));
    }

    fn releasedir(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.fenced("releasedir", ino, |fs| {
            fs.release_dir(fh.0);
            reply.ok();
        });
    }

    fn fsyncdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let fs = self.fs.clone();
        self.fenced("fsyncdir", ino, |pool| {
            pool.pool().run(move || empty("fsyncdir", reply, fs.sync_dir(ino.0, datasync)));
        });
    }

    fn statfs(&self, _req: &Request, ino: INodeNo, answer: ReplyStatfs) {
        self.fenced("statfs", ino, |fs| reply::statfs(answer, fs.statfs(ino.0)));
    }

    fn setxattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.fenced("setxattr", ino, |fs| {
            empty("setxattr", reply, fs.setxattr(ino.0, name, value, flags as u32));
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.fenced("getxattr", ino, |fs| {
            xattr(reply, size, |value| fs.getxattr(ino.0, name, value));
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.fenced("listxattr", ino, |fs| xattr(reply, size, |list| fs.listxattr(ino.0, list)));
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fenced("removexattr", ino, |fs| {
            empty("removexattr", reply, fs.removexattr(ino.0, name));
        });
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // Asked only without default_permissions, where nobody but the mounter gets in.
        reply.ok();
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        answer: ReplyCreate,
    ) {
        let caller = caller(req, umask);
        self.fenced("create", parent, |fs| {
            let ttl = fs.attr_timeout();
            reply::created(answer, ttl, fs.create(parent.0, name, mode, flags, caller));
        });
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        // Always ready, says the kernel itself after this, for the whole mount: as on a disk.
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.fenced("fallocate", ino, |fs| {
            empty("fallocate", reply, fs.fallocate(ino.0, fh.0, offset, length, mode));
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.fenced("lseek", ino, |fs| match fs.seek(ino.0, fh.0, offset.max(0) as u64, whence) {
            Ok(at) => reply.offset(at as i64),
            Err(error) => reply.error(errno("lseek", &error)),
        });
    }

    fn copy_file_range(
        &self,
        _req: &Request,
        ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The answer is 32 bits wide; the application asks again for the rest.
        let len = len.min(1 << 30);
        let (from, to) = ((ino_in.0, fh_in.0, offset_in), (ino_out.0, fh_out.0, offset_out));
        let fs = self.fs.clone();
        self.fenced("copy_file_range", ino_in, |pool| {
            pool.pool().run(move || match fs.copy_range(from, to, len) {
                Ok(copied) => reply.written(copied as u32),
                Err(error) => reply.error(errno("copy_file_range", &error)),
            });
        });
    }
}
