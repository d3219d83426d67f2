//! Becoming a daemon (layer 8): the parent stays until the mount answers, and ends with what the
//! child tells it.
//!
//! States of the child: starting (terminal, directory and standard streams of the caller: relative
//! paths work and Ctrl-C ends it) -> ready (its own session, "/", /dev/null). One message crosses
//! the pipe, '+' or '-' and a line; an end of file without one means the child died.
//! Invariant: `start` runs before the first thread exists.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;

use crate::error::{OpContext, Result};
use crate::sys::process::{self, Forked};

/// Which process this is after `start`.
#[derive(Debug)]
pub enum Started {
    /// The caller's process: the daemon's answer, to be printed before exiting.
    Parent(Answer),
    /// The process that mounts and serves.
    Child(Starter),
}

/// What the daemon said.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is mounted; one line for a terminal.
    Ready(String),
    /// It is not, and why, in one line.
    Failed(String),
}

/// The child's end of the pipe.
#[derive(Debug)]
pub struct Starter {
    pipe: File,
}

/// Forks. In the parent this returns when the child is ready or has failed.
pub fn start() -> Result<Started> {
    let (read_end, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).op("make a pipe")?;
    match process::fork()? {
        Forked::Child => Ok(Started::Child(Starter { pipe: File::from(write_end) })),
        Forked::Parent(child) => {
            drop(write_end);
            Ok(Started::Parent(wait_for(child, read_end)))
        }
    }
}

fn wait_for(child: u32, pipe: OwnedFd) -> Answer {
    let mut message = Vec::new();
    let read = File::from(pipe).read_to_end(&mut message);
    let text = String::from_utf8_lossy(message.get(1..).unwrap_or_default()).into_owned();
    match (read, message.first()) {
        (Ok(_), Some(b'+')) => Answer::Ready(text),
        (Ok(_), Some(b'-')) => Answer::Failed(text),
        _ => {
            let code = process::wait_child(child).unwrap_or(-1);
            Answer::Failed(format!("the daemon died before the mount answered (code {code})"))
        }
    }
}

impl Starter {
    /// Leaves the caller's terminal, directory and streams, and lets the parent go with `line`.
    pub fn ready(mut self, line: &str) -> Result<()> {
        rustix::process::setsid().op("leave the terminal")?;
        rustix::process::chdir("/").op("chdir /")?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .op("open /dev/null")?;
        rustix::stdio::dup2_stdin(&null).op("close standard input")?;
        rustix::stdio::dup2_stdout(&null).op("close standard output")?;
        rustix::stdio::dup2_stderr(&null).op("close standard error")?;
        // A parent that was killed is no reason to give up the mount.
        let _ = self.pipe.write_all(format!("+{line}").as_bytes());
        Ok(())
    }

    /// Lets the parent go with an error.
    pub fn failed(mut self, line: &str) {
        let _ = self.pipe.write_all(format!("-{line}").as_bytes());
    }
}
