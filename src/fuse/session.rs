//! One mounted session (layer 8): from the kernel mount to its last request.
//!
//! States: mounted (INIT answered) -> answering (request threads run) -> ended (the kernel closed
//! the connection: unmounted by us, by umount(8), by fusermount3 -u) or forced (second signal:
//! detached, and open files are given up).
//! The main thread waits in `run_to_end` for events from the session's thread and from the signals'
//! thread; unmounting happens only there, never in a request thread.

use std::io;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use fuser::{Config as SessionConfig, Filesystem, Notifier, Session, SessionACL};

use super::holders;
use super::mount::{self, How, KernelMount, MountError, Outcome};
use super::signals::{self, Signal};
use crate::config::MountConfig;
use crate::error::Result;

/// How long a detached session may take to notice.
const FORCED_END: Duration = Duration::from_secs(2);

#[derive(Debug)]
enum Event {
    Ended(io::Result<()>),
    Signal(Signal),
    Shutdown,
}

/// How a session ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The last request is answered; nothing is open.
    Unmounted,
    /// Files were still open and are lost to their users.
    Forced,
    /// The connection broke.
    Failed(String),
}

/// What `run_to_end` tells the caller on the way.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// A signal came, but the mount is busy and goes on; one line.
    Busy(String),
    /// It is unmounted; only the end of the session is awaited.
    Stopping,
}

/// A session whose requests are being answered.
#[derive(Debug)]
pub struct Serving {
    mount: KernelMount,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

/// Mounts `filesystem` and starts its request threads. `with_notifier` gets the way to tell the
/// kernel of changes, before the first request. Nothing stays mounted on an error.
pub fn serve<F: Filesystem + 'static>(
    filesystem: F,
    config: &MountConfig,
    root_mode: u32,
    with_notifier: impl FnOnce(Notifier),
) -> std::result::Result<Serving, MountError> {
    let (fd, mount) = KernelMount::make(config, root_mode)?;
    let fail = |source: io::Error| {
        mount.unmount(How::Detach);
        MountError::session(&config.mountpoint, &source)
    };
    let acl = if config.allow_other { SessionACL::All } else { SessionACL::Owner };
    let mut options = SessionConfig::default();
    options.acl = acl;
    options.n_threads = Some(config.threads.max(1));
    options.clone_fd = config.threads > 1;
    let session = Session::from_fd(filesystem, fd, acl, options).map_err(fail)?;
    with_notifier(session.notifier());
    let (sender, events) = unbounded();
    let to_main = sender.clone();
    let run = move || {
        // The main thread may be gone already (forced end): nobody to tell then.
        let _ = to_main.send(Event::Ended(session.run()));
    };
    std::thread::Builder::new().name("session".into()).spawn(run).map_err(fail)?;
    let serving = Serving { mount, events, sender };
    if let Err(source) = serving.check_answers() {
        serving.abandon();
        return Err(MountError::session(&config.mountpoint, &source));
    }
    Ok(serving)
}

impl Serving {
    /// The kernel's side of it.
    pub fn mount(&self) -> &KernelMount {
        &self.mount
    }

    /// Makes the signals of `signals::block` unmount this session.
    pub fn listen_to_signals(&self) -> Result<()> {
        let sender = self.sender.clone();
        signals::spawn(move |signal| sender.send(Event::Signal(signal)).is_ok())
    }

    /// What the control socket calls to end the mount: polite while it is mounted; once it is
    /// detached, files that are still open are given up. Returns at once.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        let sender = self.sender.clone();
        move || {
            // The main thread may have ended already.
            let _ = sender.send(Event::Shutdown);
        }
    }

    /// Takes the mount away after a failure during start-up.
    pub fn abandon(&self) {
        self.mount.unmount(How::Detach);
        while let Ok(event) = self.events.recv_timeout(FORCED_END) {
            if matches!(event, Event::Ended(_)) {
                return;
            }
        }
    }

    /// One request through the kernel and our threads: "mounted" means that it answers.
    fn check_answers(&self) -> io::Result<()> {
        rustix::fs::stat(self.mount.mountpoint())?;
        Ok(())
    }

    /// Waits for the end. `progress` is called from this thread.
    pub fn run_to_end(&self, mut progress: impl FnMut(Progress)) -> End {
        let mut asked = false;
        // `self` holds a sender, so the channel never closes.
        while let Ok(event) = self.events.recv() {
            let (reason, forced) = match event {
                Event::Ended(result) => return self.ended(result),
                Event::Signal(signal) => (signal.name(), std::mem::replace(&mut asked, true)),
                Event::Shutdown => ("asked to stop", !self.mount.is_mounted()),
            };
            if forced {
                log::warn!("{reason}: giving up the files that are still open");
                progress(Progress::Stopping);
                return self.force();
            }
            match self.mount.unmount(How::Politely) {
                Outcome::Gone => progress(Progress::Stopping),
                outcome => progress(Progress::Busy(self.busy_line(reason, &outcome))),
            }
        }
        End::Failed("the event channel closed".into())
    }

    /// After the end: whether a signal, or a new mount of the source, wants it to be quick.
    pub fn asked_to_stop(&self) -> bool {
        let asked = |event: &Event| matches!(event, Event::Signal(_) | Event::Shutdown);
        self.events.try_iter().any(|event| asked(&event))
    }

    fn ended(&self, result: io::Result<()>) -> End {
        // An aborted connection (umount -f, a broken session) leaves a dead mount: nobody wants it.
        // A live one there is a successor's, which may have our old device number by now.
        let mounted = self.mount.is_mounted();
        if mounted && mount::is_dead(self.mount.mountpoint()) {
            self.mount.unmount(How::Detach);
        }
        match result {
            Ok(()) => End::Unmounted,
            // A request thread may meet an unmount as ECONNABORTED instead of ENODEV. Only where
            // the mount was still there was the connection really aborted.
            Err(error) if is_abort(&error) && !mounted => End::Unmounted,
            Err(error) => End::Failed(error.to_string()),
        }
    }

    fn force(&self) -> End {
        if let Outcome::Failed(words) = self.mount.unmount(How::Detach) {
            return End::Failed(words);
        }
        loop {
            match self.events.recv_timeout(FORCED_END) {
                Ok(Event::Ended(_)) => return End::Unmounted,
                Ok(Event::Signal(_) | Event::Shutdown) => continue,
                Err(_) => return End::Forced,
            }
        }
    }

    fn busy_line(&self, reason: &str, outcome: &Outcome) -> String {
        let place = self.mount.mountpoint().display();
        if let Outcome::Failed(words) = outcome {
            return format!("{reason}: {place} cannot be unmounted: {words}; serving on");
        }
        let users = holders::find(self.mount.id(), self.mount.device(), self.mount.mountpoint());
        format!(
            "{reason}: {place} is busy, held by {}; serving on (a second signal detaches it)",
            holders::describe(users.as_deref())
        )
    }
}

fn is_abort(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionAborted
}
