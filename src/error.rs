//! The one error type and the one errno table (layer 0).
//!
//! `Error { kind, op, place, source }`: what was tried, where, and why it failed. Callers match on
//! `kind` only. An OS error number in `source` wins over the table, so that the application sees
//! what the source filesystem said. Logged once, where it leaves the program.

use std::io;
use std::path::Path;

/// The result of nearly everything here.
pub type Result<T> = std::result::Result<T, Error>;

/// The small stable set of reasons callers may match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No such file, device or mount.
    NotFound,
    /// It is there already.
    Exists,
    /// A directory was needed.
    NotDir,
    /// A directory where none is allowed.
    IsDir,
    /// A directory that still has entries.
    NotEmpty,
    /// Wrong argument.
    Invalid,
    /// The operation, or this form of it, does not exist here.
    NotSupported,
    /// The operation is not permitted to this user.
    NotPermitted,
    /// Permission bits forbid it.
    Denied,
    /// Written to something read-only.
    ReadOnly,
    /// No space, or a quota.
    NoSpace,
    /// In use by somebody else.
    Busy,
    /// The inode is gone.
    Stale,
    /// The attribute does not exist.
    NoAttr,
    /// The answer does not fit the caller's buffer.
    Range,
    /// Bytes that must not be trusted.
    Corrupt,
    /// A name is too long.
    NameTooLong,
    /// A handler failed in a way that must not happen.
    Internal,
    /// Everything else the device said.
    Io,
}

impl Kind {
    /// The errno of this kind where the operating system gave none.
    pub fn errno(self) -> i32 {
        use rustix::io::Errno;
        let errno = match self {
            Kind::NotFound => Errno::NOENT,
            Kind::Exists => Errno::EXIST,
            Kind::NotDir => Errno::NOTDIR,
            Kind::IsDir => Errno::ISDIR,
            Kind::NotEmpty => Errno::NOTEMPTY,
            Kind::Invalid => Errno::INVAL,
            Kind::NotSupported => Errno::OPNOTSUPP,
            Kind::NotPermitted => Errno::PERM,
            Kind::Denied => Errno::ACCESS,
            Kind::ReadOnly => Errno::ROFS,
            Kind::NoSpace => Errno::NOSPC,
            Kind::Busy => Errno::BUSY,
            Kind::Stale => Errno::STALE,
            Kind::NoAttr => Errno::NODATA,
            Kind::Range => Errno::RANGE,
            Kind::NameTooLong => Errno::NAMETOOLONG,
            // A checksum mismatch or a bug is an I/O error to an application.
            Kind::Corrupt | Kind::Internal | Kind::Io => Errno::IO,
        };
        errno.raw_os_error()
    }

    fn of(error: &io::Error) -> Kind {
        use rustix::io::Errno;
        match Errno::from_io_error(error) {
            Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Kind::NotFound,
            Some(Errno::EXIST) => Kind::Exists,
            Some(Errno::NOTDIR) => Kind::NotDir,
            Some(Errno::ISDIR) => Kind::IsDir,
            Some(Errno::NOTEMPTY) => Kind::NotEmpty,
            Some(Errno::INVAL) => Kind::Invalid,
            Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY) => Kind::NotSupported,
            Some(Errno::PERM) => Kind::NotPermitted,
            Some(Errno::ACCESS) => Kind::Denied,
            Some(Errno::ROFS) => Kind::ReadOnly,
            Some(Errno::NOSPC | Errno::DQUOT) => Kind::NoSpace,
            Some(Errno::BUSY | Errno::TXTBSY | Errno::AGAIN) => Kind::Busy,
            Some(Errno::STALE) => Kind::Stale,
            Some(Errno::NODATA) => Kind::NoAttr,
            Some(Errno::RANGE) => Kind::Range,
            Some(Errno::NAMETOOLONG) => Kind::NameTooLong,
            _ => Kind::Io,
        }
    }
}

/// An operation that failed: what, where, why.
#[derive(Debug, thiserror::Error)]
#[error("{op}{}{place}{}", if place.is_empty() { "" } else { " " }, reason(kind, source))]
pub struct Error {
    /// What callers may match on.
    pub kind: Kind,
    /// The operation, as a user would call it ("open", "read").
    pub op: &'static str,
    /// Where: a path, a device, an offset; empty where the caller knows it.
    pub place: Box<str>,
    /// What the operating system said.
    pub source: Option<io::Error>,
}

fn reason(kind: &Kind, source: &Option<io::Error>) -> String {
    match source {
        Some(source) => format!(": {source}"),
        None => format!(": {kind:?}"),
    }
}

impl Error {
    /// An error of our own making.
    pub fn new(kind: Kind, op: &'static str, place: impl Into<String>) -> Error {
        Error { kind, op, place: place.into().into_boxed_str(), source: None }
    }

    /// An error the operating system gave; `kind` follows from it.
    pub fn os(op: &'static str, error: impl Into<io::Error>) -> Error {
        let source = error.into();
        Error { kind: Kind::of(&source), op, place: "".into(), source: Some(source) }
    }

    /// The same error with its place filled in.
    pub fn at(mut self, place: impl Into<String>) -> Error {
        self.place = place.into().into_boxed_str();
        self
    }

    /// The same error with a path as its place.
    pub fn at_path(self, path: &Path) -> Error {
        self.at(path.display().to_string())
    }

    /// The errno an application sees: the OS's own if there is one, else the table's.
    pub fn errno(&self) -> i32 {
        self.source.as_ref().and_then(io::Error::raw_os_error).unwrap_or_else(|| self.kind.errno())
    }
}

/// Gives an OS result its operation: `read(..).op("read")?`.
pub trait OpContext<T> {
    /// Names the operation that failed.
    fn op(self, op: &'static str) -> Result<T>;
}

impl<T, E: Into<io::Error>> OpContext<T> for std::result::Result<T, E> {
    fn op(self, op: &'static str) -> Result<T> {
        self.map_err(|error| Error::os(op, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_os_errno_wins_over_the_table() {
        let error = Error::os("open", io::Error::from_raw_os_error(libc::ETXTBSY)).at("a.img");
        assert_eq!((error.kind, error.errno()), (Kind::Busy, libc::ETXTBSY));
        assert_eq!(error.to_string(), "open a.img: Text file busy (os error 26)");
        assert_eq!(Error::new(Kind::NoAttr, "getxattr", "").errno(), libc::ENODATA);
    }

    #[test]
    fn an_error_without_a_number_is_eio() {
        let error = Error::os("read", io::Error::other("weird"));
        assert_eq!((error.kind, error.errno()), (Kind::Io, libc::EIO));
    }
}
