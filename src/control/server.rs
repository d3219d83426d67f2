//! The daemon's end of the control socket (layer 8).
//!
//! One thread accepts, one serves each connection; both end with the process, the first also when
//! the handle is dropped, which removes the socket. Who may ask what is decided here, from the
//! peer's uid as the kernel tells it: the mounter and root everything, others `Stat` and its kin
//! where allow_other lets them enter the mount. Locks: none; counters and one flag are atomics.
//! Invariants: at most one recording at a time; it ends with the connection that began it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::clock;
use crate::config::Config;
use crate::control::proto::{
    Ask, MAX_REQUEST, MountFacts, Name, Refusal, Reply, Request, Response, SCHEMA, StatReply,
};
use crate::control::{Mounted, errors, live, socket};
use crate::error::{Error, Kind, OpContext, Result};
use crate::stats::FlushProgress;

/// What the server must know about its mount beside the filesystem.
pub struct MountInfo {
    /// The configuration it was mounted with.
    pub config: Config,
    /// Its device number, as in mountinfo.
    pub device: (u32, u32),
    /// Asks the daemon to end; returns at once.
    pub shutdown: Box<dyn Fn() + Send + Sync>,
}

/// Listening until it is dropped.
pub struct ServerHandle {
    shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    path: PathBuf,
    /// (device, inode) of the socket, so that a successor's is not removed.
    identity: (u64, u64),
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    mounted: Arc<dyn Mounted>,
    info: MountInfo,
    uid: u32,
    started: Duration,
    stopping: AtomicBool,
    tracing: AtomicBool,
    /// Connections of the mounter and root, and of everybody else: guests cannot lock them out.
    owners: AtomicUsize,
    guests: AtomicUsize,
}

const MOST_OWNERS: usize = 64;
const MOST_GUESTS: usize = 8;
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts to listen; call it after the process has become a daemon.
pub fn spawn(mounted: Arc<dyn Mounted>, info: MountInfo) -> Result<ServerHandle> {
    let uid = rustix::process::geteuid().as_raw();
    let dir = socket::server_dir(uid, info.config.mount.allow_other)?;
    spawn_in(&dir, mounted, info)
}

fn spawn_in(dir: &Path, mounted: Arc<dyn Mounted>, info: MountInfo) -> Result<ServerHandle> {
    let path = dir.join(socket::file_name(info.device));
    // The kernel gave us this device number: a socket of that name is a dead mount's.
    if let Err(error) = fs::remove_file(&path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(Error::os("remove old socket", error).at_path(&path));
    }
    let mode = if info.config.mount.allow_other { 0o666 } else { 0o600 };
    let at = |error: Error| error.at_path(&path);
    let listener = UnixListener::bind(&path).op("bind control socket").map_err(at)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).op("chmod").map_err(at)?;
    let meta = fs::symlink_metadata(&path).op("stat").map_err(at)?;
    let shared = Arc::new(Shared::new(mounted, info));
    let listener = Arc::new(listener);
    let thread = {
        let (shared, listener) = (shared.clone(), listener.clone());
        thread::Builder::new().name("control".into()).spawn(move || accept(&shared, &listener))
    };
    let thread = Some(thread.op("start thread")?);
    Ok(ServerHandle { shared, listener, path, identity: (meta.dev(), meta.ino()), thread })
}

impl ServerHandle {
    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.shared.stopping.store(true, SeqCst);
        if fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
        // Wakes accept(2).
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    while !shared.stopping.load(SeqCst) {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors, or shut down; the loop's condition tells.
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
        let uid = peer.uid.as_raw();
        let owner = shared.is_owner(uid);
        let (used, most) =
            if owner { (&shared.owners, MOST_OWNERS) } else { (&shared.guests, MOST_GUESTS) };
        if used.load(SeqCst) >= most {
            continue;
        }
        used.fetch_add(1, SeqCst);
        let connection = Connection { shared: shared.clone(), uid, tracing: false };
        let spawned = thread::Builder::new().name("control-peer".into()).spawn(move || {
            let mut connection = connection;
            connection.serve(&stream);
        });
        if spawned.is_err() {
            log::warn!("control: no thread for a connection");
        }
    }
}

impl Shared {
    fn new(mounted: Arc<dyn Mounted>, info: MountInfo) -> Shared {
        Shared {
            mounted,
            info,
            uid: rustix::process::geteuid().as_raw(),
            started: clock::now(),
            stopping: AtomicBool::new(false),
            tracing: AtomicBool::new(false),
            owners: AtomicUsize::new(0),
            guests: AtomicUsize::new(0),
        }
    }

    fn is_owner(&self, uid: u32) -> bool {
        uid == 0 || uid == self.uid
    }

    fn facts(&self) -> MountFacts {
        let mount = &self.info.config.mount;
        MountFacts {
            mountpoint: Name::from(mount.mountpoint.as_path()),
            source: Name::from(mount.source.as_path()),
            device: format!("{}:{}", self.info.device.0, self.info.device.1),
            pid: std::process::id(),
            uid: self.uid,
            read_only: mount.read_only,
            allow_other: mount.allow_other,
            version: env!("CARGO_PKG_VERSION").to_string(),
            uptime_ms: clock::now().saturating_sub(self.started).as_millis() as u64,
        }
    }

    fn stat(&self, unit: Option<u32>) -> StatReply {
        let tunables = self.mounted.tunables();
        StatReply {
            mount: self.facts(),
            unit,
            open_files: self.mounted.open_files() as u64,
            cache_mode: tunables.cache_mode().name().to_string(),
            bypass: tunables.bypass(),
            sequential_cutoff: tunables.sequential_cutoff(),
            expire_ms: tunables.expire_ms(),
            errors_logged: errors::logged(),
            snapshot: self.mounted.snapshot(unit),
        }
    }
}

/// Who hears how far a flush is; false: he does not listen any more.
type Tell<'a> = &'a mut dyn FnMut(&FlushProgress) -> bool;

/// Sends one line; false: the peer is gone, or does not read.
fn say(mut stream: &UnixStream, reply: Reply) -> bool {
    let Ok(mut text) = serde_json::to_vec(&Response { schema: SCHEMA, reply }) else {
        return false;
    };
    text.push(b'\n');
    stream.write_all(&text).is_ok()
}

fn path_of(below: Option<Name>) -> std::result::Result<Option<PathBuf>, Refusal> {
    let Some(below) = below.map(|name| PathBuf::from(&name)) else { return Ok(None) };
    if below.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(Some(below));
    }
    let place = below.display().to_string();
    Err(Refusal::new("not a path below the mountpoint", place, "check the name"))
}

/// One client; ends its recording and gives back its place when dropped.
struct Connection {
    shared: Arc<Shared>,
    uid: u32,
    tracing: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end_trace();
        let owner = self.shared.is_owner(self.uid);
        let used = if owner { &self.shared.owners } else { &self.shared.guests };
        used.fetch_sub(1, SeqCst);
    }
}

impl Connection {
    fn serve(&mut self, stream: &UnixStream) {
        let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            // While recording, the client may be silent (stopped, say) as long as it lives.
            let _ = stream.set_read_timeout((!self.tracing).then_some(READ_TIMEOUT));
            line.clear();
            match reader.by_ref().take(MAX_REQUEST).read_until(b'\n', &mut line) {
                Ok(_) if line.last() == Some(&b'\n') => {}
                _ => return,
            }
            let tell =
                &mut |progress: &FlushProgress| say(stream, Reply::Progress(progress.clone()));
            let reply = self.answer(&line, tell);
            if !say(stream, reply) {
                return;
            }
        }
    }

    fn answer(&mut self, line: &[u8], tell: Tell<'_>) -> Reply {
        match serde_json::from_slice::<Request>(line) {
            Ok(Request { schema: SCHEMA, ask: Ask::Flush { below } }) => {
                self.flush(below, tell).unwrap_or_else(Reply::Error)
            }
            Ok(request) if request.schema == SCHEMA => {
                self.handle(request.ask).unwrap_or_else(Reply::Error)
            }
            _ => Reply::Error(Refusal::new(
                "request not understood",
                self.shared.facts().mountpoint.to_string(),
                format!("use bcachefs-fuse of the daemon's version {}", env!("CARGO_PKG_VERSION")),
            )),
        }
    }

    fn handle(&mut self, ask: Ask) -> std::result::Result<Reply, Refusal> {
        let mounted = self.shared.mounted.clone();
        self.permit(&ask)?;
        Ok(match ask {
            Ask::Hello => Reply::Hello(self.shared.facts()),
            Ask::Stat { below } => {
                let unit = self.unit(below)?;
                Reply::Stat(Box::new(self.shared.stat(unit)))
            }
            Ask::Blocks { below } => {
                let mut blocks = mounted.blocks(self.unit(below)?);
                blocks.sort_unstable_by_key(|block| (block.unit, block.block));
                Reply::Blocks { blocks }
            }
            Ask::Errors => Reply::Errors { errors: errors::recent() },
            Ask::Settings => {
                let values = live::values(&self.shared.info.config, mounted.tunables());
                Reply::Settings { values }
            }
            Ask::Set { assignments } => {
                live::set(&*mounted, &self.shared.info.config, &assignments)?;
                for (name, value) in &assignments {
                    log::info!("set {name}={value} by uid {}", self.uid);
                }
                Reply::Done
            }
            Ask::Trace { file } => {
                self.begin_trace(&PathBuf::from(&file))?;
                Reply::Done
            }
            Ask::Untrace => {
                self.end_trace();
                Reply::Done
            }
            Ask::Leave { leave } => {
                mounted.leave_rest(leave);
                Reply::Done
            }
            Ask::Flush { below } => self.flush(below, &mut |_| true)?,
            Ask::Diff => {
                let differences = mounted.diff().map_err(|error| self.refused(error))?;
                Reply::Diff { differences }
            }
            Ask::Revert { force } => {
                mounted.revert(force).map_err(|error| self.refused(error))?;
                log::info!("reverted by uid {}", self.uid);
                Reply::Done
            }
            Ask::Shutdown => {
                log::info!("asked to end by uid {}", self.uid);
                (self.shared.info.shutdown)();
                Reply::Done
            }
        })
    }

    fn permit(&self, ask: &Ask) -> std::result::Result<(), Refusal> {
        let open = matches!(ask, Ask::Hello | Ask::Stat { .. } | Ask::Blocks { .. } | Ask::Errors);
        let guest_may = open && self.shared.info.config.mount.allow_other;
        if guest_may || self.shared.is_owner(self.uid) {
            return Ok(());
        }
        Err(Refusal::new(
            "not permitted",
            self.shared.facts().mountpoint.to_string(),
            format!("ask as uid {}, who mounted it, or as root", self.shared.uid),
        ))
    }

    fn refused(&self, error: Error) -> Refusal {
        let mountpoint = self.shared.facts().mountpoint.to_string();
        match error.kind {
            Kind::NotSupported => {
                Refusal::new("not an overlay", mountpoint, "mount with --upper DIR to have one")
            }
            Kind::Busy => {
                let what = format!("{} is open", error.place);
                Refusal::new(what, mountpoint, "close it, or give --force")
            }
            _ => Refusal::new(error.to_string(), mountpoint, "bcachefs-fuse stat --errors"),
        }
    }

    fn unit(&self, below: Option<Name>) -> std::result::Result<Option<u32>, Refusal> {
        let Some(below) = path_of(below)? else { return Ok(None) };
        self.shared.mounted.resolve(&below).map_err(|error| {
            let place = below.display().to_string();
            Refusal::new(error.to_string(), place, "name a file or directory of the mount")
        })
    }

    fn flush(&self, below: Option<Name>, tell: Tell<'_>) -> std::result::Result<Reply, Refusal> {
        self.permit(&Ask::Flush { below: None })?;
        let below = path_of(below)?;
        self.shared.mounted.flush(below.as_deref(), tell).map(Reply::Flushed).map_err(|error| {
            let place = match below {
                Some(below) => below.display().to_string(),
                None => self.shared.facts().mountpoint.to_string(),
            };
            Refusal::new(error.to_string(), place, "bcachefs-fuse stat shows how it stands")
        })
    }

    fn begin_trace(&mut self, file: &Path) -> std::result::Result<(), Refusal> {
        let place = || file.display().to_string();
        let mountpoint = &self.shared.info.config.mount.mountpoint;
        if !file.is_absolute() || file.starts_with(mountpoint) {
            let hint = "give a file outside of the mount: recording there would wait for itself";
            return Err(Refusal::new("cannot record", place(), hint));
        }
        if self.shared.tracing.swap(true, SeqCst) {
            return Err(Refusal::new("a recording runs", place(), "wait until it has ended"));
        }
        if let Err(error) = self.shared.mounted.start_trace(file) {
            self.shared.tracing.store(false, SeqCst);
            let hint = "give a file the daemon may create";
            return Err(Refusal::new(format!("cannot record: {error}"), place(), hint));
        }
        self.tracing = true;
        Ok(())
    }

    fn end_trace(&mut self) {
        if std::mem::take(&mut self.tracing) {
            self.shared.mounted.stop_trace();
            self.shared.tracing.store(false, SeqCst);
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
