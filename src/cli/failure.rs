//! What goes wrong for a user (layer 9): exactly one line, "what: where: what to do".
//!
//! No state. Every command returns a `Failure`; only `cli::main` prints it and picks the code.

use std::fmt;
use std::path::Path;

use crate::control::proto::Refusal;
use crate::error::{Error, Kind};

/// One line for the user, and whether the command line itself was wrong (exit 2, else 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The command line was wrong.
    pub usage: bool,
    /// "what: where: what to do".
    pub line: String,
}

impl Failure {
    /// Something in the world is wrong: exit 1.
    pub fn new(what: impl fmt::Display, place: impl fmt::Display, hint: impl fmt::Display) -> Self {
        Failure { usage: false, line: one_line(&format!("{what}: {place}: {hint}")) }
    }

    /// The command line is wrong: exit 2.
    pub fn usage(
        what: impl fmt::Display,
        place: impl fmt::Display,
        hint: impl fmt::Display,
    ) -> Self {
        Failure { usage: true, ..Failure::new(what, place, hint) }
    }

    /// An error of the library at `place`, with what to do about it where its kind says so.
    pub fn of(error: &Error, place: &Path) -> Self {
        let why = match &error.source {
            Some(source) => bare(&source.to_string()),
            None => format!("{:?}", error.kind),
        };
        let place = if error.place.is_empty() {
            place.display().to_string()
        } else {
            error.place.to_string()
        };
        let hint = match error.kind {
            Kind::Denied | Kind::NotPermitted => "ask as the user who mounted it, or as root",
            Kind::NotFound => "check the name",
            _ => "bcachefs-fuse doctor checks the system",
        };
        Failure::new(format!("{}: {why}", error.op), place, hint)
    }
}

/// "Permission denied (os error 13)" without the number.
fn bare(text: &str) -> String {
    text.split(" (os error").next().unwrap_or(text).to_string()
}

/// Control characters (a newline in a file name) must not break the one line.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::new(refusal.what, refusal.place, refusal.hint)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bcachefs-fuse: {}", self.line)
    }
}

/// The result of every command.
pub type Outcome<T> = Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::new("no such mount", "a\nb", "mount it");
        assert_eq!(failure.to_string(), "bcachefs-fuse: no such mount: a\\nb: mount it");
        let error = Error::os("open", std::io::Error::from_raw_os_error(libc::EACCES));
        let line = Failure::of(&error, Path::new("/x")).line;
        assert!(line.starts_with("open: Permission denied: /x: ask as"), "{line}");
    }
}
