//! The asking end of the control socket (layer 8). No state beyond one connection.
//!
//! Invariant: a socket whose listener is not the mounter (or root) is never believed.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::clock;
use crate::control::proto::{Ask, MountFacts, Refusal, Reply, Request, Response, SCHEMA};
use crate::control::socket;

const TIMEOUT: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(20);

/// A connection to one daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

impl Client {
    /// Connects to the daemon of the mount with this device number, made by `owner`. A daemon
    /// opens its socket just after its mount: a missing one is waited for, up to `patience`, and
    /// so is one that nobody listens at (a killed daemon's, whose device number came again).
    pub fn connect(device: (u32, u32), owner: u32, patience: Duration) -> Result<Client, Refusal> {
        let start = clock::now();
        loop {
            match Client::connect_once(device, owner) {
                Err((true, _)) if clock::now() - start < patience => thread::sleep(STEP),
                Err((_, None)) => {
                    let what = "no control socket";
                    let hint = "its daemon is gone, or has another XDG_RUNTIME_DIR";
                    return Err(Refusal::new(what, socket::file_name(device), hint));
                }
                Err((_, Some(refusal))) => return Err(refusal),
                Ok(client) => return Ok(client),
            }
        }
    }

    /// The error: whether a daemon that is about to listen would look so, and the refusal if there
    /// is a socket.
    fn connect_once(device: (u32, u32), owner: u32) -> Result<Client, (bool, Option<Refusal>)> {
        let name = socket::file_name(device);
        let (mut soon, mut refusal) = (true, None);
        for dir in socket::client_dirs(owner) {
            match Client::open(&dir.join(&name), owner) {
                Ok(client) => return Ok(client),
                Err((ErrorKind::NotFound, _)) => {}
                Err((kind, why)) => {
                    soon &= kind == ErrorKind::ConnectionRefused;
                    refusal = Some(why);
                }
            }
        }
        Err((soon, refusal))
    }

    fn open(path: &Path, owner: u32) -> Result<Client, (ErrorKind, Refusal)> {
        let place = || path.display().to_string();
        let stream = UnixStream::connect(path).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::PermissionDenied => "ask as the user who mounted it, or as root",
                ErrorKind::ConnectionRefused => {
                    "the daemon is gone: umount the mountpoint and mount again"
                }
                _ => "remove what lies there and mount again",
            };
            let refusal = Refusal::new(format!("cannot connect: {}", error.kind()), place(), hint);
            (error.kind(), refusal)
        })?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).map(|peer| peer.uid.as_raw());
        if !peer.is_ok_and(|uid| uid == owner || uid == 0) {
            let what = format!("not a control socket of uid {owner}");
            return Err((ErrorKind::Other, Refusal::new(what, place(), "remove it")));
        }
        let _ = stream.set_read_timeout(Some(TIMEOUT));
        let _ = stream.set_write_timeout(Some(TIMEOUT));
        Ok(Client { stream: BufReader::new(stream), path: path.to_path_buf() })
    }

    /// How long an answer may take; none: for ever.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        let _ = self.stream.get_ref().set_read_timeout(timeout);
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, ask: Ask) -> Result<Reply, Refusal> {
        let mut line = serde_json::to_vec(&Request { schema: SCHEMA, ask })
            .map_err(|error| self.strange(&error.to_string()))?;
        line.push(b'\n');
        let mut writer = self.stream.get_ref();
        writer.write_all(&line).map_err(|error| self.broken(&error))?;
        line.clear();
        match self.stream.read_until(b'\n', &mut line) {
            Ok(0) => return Err(self.strange("it closed the connection")),
            Ok(_) => {}
            Err(error) => return Err(self.broken(&error)),
        }
        match serde_json::from_slice::<Response>(&line) {
            Ok(Response { schema: SCHEMA, reply: Reply::Error(refusal) }) => Err(refusal),
            Ok(Response { schema: SCHEMA, reply }) => Ok(reply),
            Ok(Response { schema, .. }) => {
                Err(self.strange(&format!("it speaks schema {schema}, not {SCHEMA}")))
            }
            Err(_) => Err(self.strange("its answer is not understood")),
        }
    }

    /// Which mount answers.
    pub fn hello(&mut self) -> Result<MountFacts, Refusal> {
        match self.ask(Ask::Hello)? {
            Reply::Hello(facts) => Ok(facts),
            _ => Err(self.strange("its answer is not understood")),
        }
    }

    /// An answer of the wrong kind.
    pub fn strange(&self, why: &str) -> Refusal {
        let place = self.path.display().to_string();
        let hint = "use bcachefs-fuse of the daemon's version";
        Refusal::new(format!("not a control socket of ours: {why}"), place, hint)
    }

    fn broken(&self, error: &std::io::Error) -> Refusal {
        let place = self.path.display().to_string();
        if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
            let hint = "see the system log; umount -f the mountpoint if it hangs";
            return Refusal::new("the daemon does not answer", place, hint);
        }
        let hint = "the daemon ended; mount again";
        Refusal::new(format!("connection lost: {}", error.kind()), place, hint)
    }
}

/// Asks the daemon of a mount to end, also one that is detached.
pub fn shutdown(device: (u32, u32), owner: u32) -> Result<(), Refusal> {
    Client::connect(device, owner, Duration::ZERO)?.ask(Ask::Shutdown).map(|_| ())
}

/// Every daemon this user can reach, with its device number. Sockets that nobody listens on are
/// removed where this user may.
pub fn daemons() -> Vec<((u32, u32), Client)> {
    let uid = rustix::process::geteuid().as_raw();
    let mut found = Vec::new();
    for dir in socket::all_dirs(uid) {
        let Ok(owner) = fs::symlink_metadata(&dir).map(|meta| meta.uid()) else { continue };
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(device) = name.to_str().and_then(socket::parse_file_name) else { continue };
            match Client::open(&entry.path(), owner) {
                Ok(client) => found.push((device, client)),
                Err((ErrorKind::ConnectionRefused, _)) => {
                    let _ = fs::remove_file(entry.path());
                }
                Err(_) => {}
            }
        }
    }
    found.sort_by_key(|(device, _)| *device);
    found
}

#[cfg(test)]
pub(crate) fn open_for_tests(path: &Path) -> Result<Client, Refusal> {
    Client::open(path, rustix::process::geteuid().as_raw()).map_err(|(_, refusal)| refusal)
}
