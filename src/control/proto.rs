//! What client and server say (layer 8): one JSON object a line, schema 1; it only grows.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::stats::{BlockInfo, FlushProgress, Snapshot};

/// The version of the protocol and of every --json output.
pub const SCHEMA: u32 = 1;

/// The longest request line in bytes.
pub const MAX_REQUEST: u64 = 64 << 10;

/// A line from the client.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// `SCHEMA`.
    pub schema: u32,
    /// What is wanted.
    #[serde(flatten)]
    pub ask: Ask,
}

/// What a client may want. `below` is a path relative to the mount's root.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Ask {
    /// Who is there?
    Hello,
    /// Counters.
    Stat {
        /// The device wanted; all if none.
        below: Option<Name>,
    },
    /// Resident blocks.
    Blocks {
        /// The device wanted; all if none.
        below: Option<Name>,
    },
    /// The last errors.
    Errors,
    /// Every option's value.
    Settings,
    /// Changes live options, all or none.
    Set {
        /// (name, value) as typed.
        assignments: Vec<(String, String)>,
    },
    /// Records requests until `Untrace` or until the connection ends.
    Trace {
        /// An absolute path.
        file: Name,
    },
    /// Ends the recording this connection began.
    Untrace,
    /// Writes home what is dirty, answered by any number of `Progress` and one `Flushed`. Ends
    /// when the client closes the connection.
    Flush {
        /// The file wanted; all if none.
        below: Option<Name>,
    },
    /// Whether what is dirty when the mount ends stays in the journal instead of being flushed.
    Leave {
        /// It does.
        leave: bool,
    },
    /// What differs from the lowers of an overlay.
    Diff,
    /// Drops every change of an overlay.
    Revert {
        /// Also while files are open.
        force: bool,
    },
    /// The daemon should end.
    Shutdown,
}

/// A line from the server.
#[derive(Debug, Serialize, Deserialize)]
pub struct Response {
    /// `SCHEMA`.
    pub schema: u32,
    /// The answer.
    #[serde(flatten)]
    pub reply: Reply,
}

/// What a server may answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "lowercase")]
pub enum Reply {
    /// To `Hello`.
    Hello(MountFacts),
    /// To `Stat`.
    Stat(Box<StatReply>),
    /// To `Blocks`.
    Blocks {
        /// The blocks, by unit and number.
        blocks: Vec<BlockInfo>,
    },
    /// To `Errors`.
    Errors {
        /// Oldest first.
        errors: Vec<LoggedError>,
    },
    /// To `Settings`.
    Settings {
        /// (name, value) in the order of the option table.
        values: Vec<(String, String)>,
    },
    /// To `Flush`, again and again.
    Progress(FlushProgress),
    /// To `Flush`: nothing is left but what is stuck.
    Flushed(FlushProgress),
    /// To `Diff`.
    Diff {
        /// By path.
        differences: Vec<PathChange>,
    },
    /// It was done.
    Done,
    /// It was not.
    Error(Refusal),
}

/// One path that differs from the lowers of an overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathChange {
    /// "A" added, "M" modified, "D" deleted, "R" renamed.
    pub change: String,
    /// Where it is now, below the mountpoint; where it was, if it is gone.
    pub path: Name,
    /// Where it was, if it was renamed.
    pub from: Option<Name>,
    /// Whether it is a directory.
    pub directory: bool,
    /// Bytes of it that the upper holds, in whole blocks.
    pub bytes: u64,
    /// Which: offset and length in bytes.
    pub extents: Vec<(u64, u64)>,
}

/// Why something was not done: the three parts of the line a user reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What is wrong.
    pub what: String,
    /// Where.
    pub place: String,
    /// What to do.
    pub hint: String,
}

impl Refusal {
    /// From its parts.
    pub fn new(what: impl Into<String>, place: impl Into<String>, hint: impl Into<String>) -> Self {
        Refusal { what: what.into(), place: place.into(), hint: hint.into() }
    }
}

/// Which mount this is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountFacts {
    /// Where it is mounted.
    pub mountpoint: Name,
    /// What is shown there.
    pub source: Name,
    /// "MAJOR:MINOR" as in mountinfo.
    pub device: String,
    /// The daemon.
    pub pid: u32,
    /// Who mounted.
    pub uid: u32,
    /// Mounted read-only.
    pub read_only: bool,
    /// Others may enter.
    pub allow_other: bool,
    /// Version of the daemon.
    pub version: String,
    /// Milliseconds since the mount.
    pub uptime_ms: u64,
}

/// The answer to `Stat`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatReply {
    /// Which mount.
    pub mount: MountFacts,
    /// The one device asked for.
    pub unit: Option<u32>,
    /// Open file handles.
    pub open_files: u64,
    /// What writes do.
    pub cache_mode: String,
    /// Bytes above which a read is not kept.
    pub bypass: u64,
    /// Bytes past which a stream is not kept.
    pub sequential_cutoff: u64,
    /// Milliseconds after which a block is read again; 0: never.
    pub expire_ms: u64,
    /// Errors logged since the mount.
    pub errors_logged: u64,
    /// The counters.
    pub snapshot: Snapshot,
}

/// One logged error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedError {
    /// Milliseconds since 1970, UTC.
    pub time_ms: u64,
    /// Its line.
    pub text: String,
}

/// A path: a string, or an array of bytes where it is not UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Name {
    /// As nearly always.
    Text(String),
    /// Not UTF-8.
    Bytes(Vec<u8>),
}

impl From<&Path> for Name {
    fn from(path: &Path) -> Name {
        match path.to_str() {
            Some(text) => Name::Text(text.to_string()),
            None => Name::Bytes(path.as_os_str().as_bytes().to_vec()),
        }
    }
}

impl From<&Name> for PathBuf {
    fn from(name: &Name) -> PathBuf {
        match name {
            Name::Text(text) => text.into(),
            Name::Bytes(bytes) => OsString::from_vec(bytes.clone()).into(),
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Name::Text(text) => f.write_str(text),
            Name::Bytes(bytes) => f.write_str(&String::from_utf8_lossy(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn the_lines_are_as_documented() {
        let request = Request { schema: SCHEMA, ask: Ask::Stat { below: None } };
        let line = serde_json::to_string(&request).unwrap();
        assert_eq!(line, r#"{"schema":1,"op":"stat","below":null}"#);
        let request: Request = serde_json::from_str(r#"{"schema":1,"op":"hello"}"#).unwrap();
        assert!(matches!(request.ask, Ask::Hello));
        let response = Response { schema: SCHEMA, reply: Reply::Done };
        assert_eq!(serde_json::to_string(&response).unwrap(), r#"{"schema":1,"reply":"done"}"#);
    }

    #[test]
    fn names_that_are_not_utf8_survive() {
        for bytes in [&b"a/b.img"[..], &b"a\xff"[..]] {
            let path = Path::new(OsStr::from_bytes(bytes));
            let text = serde_json::to_string(&Name::from(path)).unwrap();
            let name: Name = serde_json::from_str(&text).unwrap();
            assert_eq!(PathBuf::from(&name), path);
        }
    }
}
