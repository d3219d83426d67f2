//! `mount` (layer 9): from a `Config` to a mount that has ended.
//!
//! States: prepared (SOURCE open and claimed, nothing mounted) -> mounted and answering (control
//! socket open; only now the parent of a daemon returns) -> ended (socket and registry entry
//! removed). Every failure on the way undoes what came before it, in reverse.

mod claim;
mod journal;
pub mod registry;
pub mod source;
mod stale;
pub mod state;
mod target;
pub mod upper;

use std::io::IsTerminal;
use std::sync::Arc;

use sd_notify::NotifyState;

use self::claim::Prepared;
use self::journal::Held;
use crate::cli::failure::{Failure, Outcome};
use crate::config::Config;
use crate::control::errors;
use crate::control::server::{self, MountInfo, ServerHandle};
use crate::error::{Error, Kind};
use crate::fs::Fs;
use crate::fuse::adapter::Adapter;
use crate::fuse::daemon::{self, Answer, Started, Starter};
use crate::fuse::kernel::Kernel;
use crate::fuse::session::{self, End, Progress, Serving};
use crate::fuse::signals;
use crate::sys::reclaim;
use crate::units::format_size;

/// Less likely to be killed when memory runs out than what it serves.
const OOM_SCORE: i32 = -500;

/// Mounts, and returns when the mount has ended (foreground) or answers (daemon).
pub fn mount(config: Config) -> Outcome<()> {
    if config.daemon.foreground {
        return run(config, Report::Foreground);
    }
    match daemon::start().map_err(|error| unexpected(&error))? {
        Started::Parent(Answer::Failed(line)) => Err(Failure { usage: false, line }),
        Started::Parent(Answer::Ready(line)) => {
            if std::io::stdout().is_terminal() {
                println!("{line}");
            }
            Ok(())
        }
        Started::Child(starter) => {
            // The caller's process prints and decides; this one has nothing left to return to.
            let ended = run(config, Report::Daemon(Some(starter)));
            std::process::exit(i32::from(ended.is_err()))
        }
    }
}

fn unexpected(error: &Error) -> Failure {
    Failure::new(error, "mount", "bcachefs-fuse doctor checks the system")
}

/// Who hears that it is mounted.
enum Report {
    /// The terminal, and systemd if it listens.
    Foreground,
    /// The parent process; None once it was told.
    Daemon(Option<Starter>),
}

impl Report {
    fn ready(&mut self, line: &str) -> Outcome<()> {
        match self {
            Report::Foreground => {
                println!("{line}");
                notify(&[NotifyState::Ready, NotifyState::Status(line)]);
                Ok(())
            }
            Report::Daemon(starter) => match starter.take() {
                Some(starter) => starter.ready(line).map_err(|error| unexpected(&error)),
                None => Ok(()),
            },
        }
    }

    fn failed(&mut self, failure: &Failure) {
        if let Report::Daemon(starter) = self {
            match starter.take() {
                Some(starter) => starter.failed(&failure.line),
                None => log::error!("{}", failure.line),
            }
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        log::debug!("sd_notify: {error}");
    }
}

fn run(config: Config, mut report: Report) -> Outcome<()> {
    let result = serve(config, &mut report);
    if let Err(failure) = &result {
        report.failed(failure);
    }
    result
}

fn serve(mut config: Config, report: &mut Report) -> Outcome<()> {
    signals::block().map_err(|error| unexpected(&error))?;
    let Prepared { source, upper, mountpoint, mut claim } = claim::prepare(&config)?;
    config.mount.mountpoint = mountpoint;
    config.mount.source = source.path.clone();
    errors::init_logging(&config.daemon, &config.mount.mountpoint).map_err(|error| {
        let place = config.daemon.log.clone().unwrap_or_default();
        Failure::of(&error, &place)
    })?;
    if matches!(report, Report::Daemon(_)) {
        // Before the first thread: request threads have a file-system context of their own, and
        // must not keep the caller's directory busy.
        let _ = rustix::process::chdir("/");
    }
    if !reclaim::set_io_flusher() | !reclaim::protect_from_oom(OOM_SCORE) {
        log::debug!("not privileged: memory may run out for the daemon like for any other");
    }
    let mode = source.mode;
    let (fs, held) = journal::open_fs(&mut config, source, upper)?;
    fs.start().map_err(|error| unexpected(&error))?;
    if let Some(file) = &config.daemon.trace {
        fs.store().start_trace(file).map_err(|error| Failure::of(&error, file))?;
    }
    let adapter = Adapter::new(Arc::clone(&fs), &config.mount);
    let kernel = |notifier| fs.set_kernel_cache(Box::new(Kernel::new(notifier)));
    let serving = session::serve(adapter, &config.mount, mode, kernel)
        .map_err(|error| Failure::new(error.what, error.place, error.hint))?;
    let started = open_up(&config, &fs, &serving, &mut |device| claim.mounted(device))
        .and_then(|server| report.ready(&ready_line(&config, &held)).map(|()| server));
    let server = started.inspect_err(|_| serving.abandon())?;
    let end = serving.run_to_end(tell);
    let result = finish(&config, &fs, &serving, end);
    // Only now may somebody else have the source.
    drop((server, claim, held));
    result
}

/// Everything that needs the mount's device number.
fn open_up(
    config: &Config,
    fs: &Arc<Fs>,
    serving: &Serving,
    claim: &mut dyn FnMut(Option<(u32, u32)>) -> Outcome<()>,
) -> Outcome<ServerHandle> {
    let mountpoint = &config.mount.mountpoint;
    serving.listen_to_signals().map_err(|error| unexpected(&error))?;
    let device = serving.mount().device().ok_or_else(|| {
        let error = Error::new(Kind::NotFound, "find the mount in /proc/self/mountinfo", "");
        Failure::of(&error, mountpoint)
    })?;
    claim(Some(device))?;
    let shutdown = Box::new(serving.stopper());
    let info = MountInfo { config: config.clone(), device, shutdown };
    server::spawn(fs.clone(), info).map_err(|error| {
        let why = error.source.as_ref().map_or_else(|| format!("{:?}", error.kind), bare);
        let what = format!("a control socket that is not ours ({why})");
        Failure::new(what, &error.place, "remove it, then mount again")
    })
}

/// "Is a directory", without the number.
fn bare(error: &std::io::Error) -> String {
    error.to_string().split(" (os error").next().unwrap_or_default().to_owned()
}

fn tell(progress: Progress) {
    match progress {
        Progress::Busy(line) => {
            log::warn!("{line}");
            notify(&[NotifyState::Status(&line)]);
        }
        Progress::Stopping => notify(&[NotifyState::Stopping, NotifyState::Status("unmounting")]),
    }
}

fn finish(config: &Config, fs: &Fs, serving: &Serving, end: End) -> Outcome<()> {
    notify(&[NotifyState::Stopping]);
    let place = config.mount.mountpoint.display();
    match end {
        End::Unmounted => {
            let left = journal::flush_rest(fs, serving);
            journal::stop(fs, &config.mount.source)?;
            match left {
                None => log::info!("{place}: unmounted"),
                Some(left) => log::warn!("{place}: unmounted; {left}"),
            }
            Ok(())
        }
        // Request threads may still be inside the filesystem: no orderly end for it. The journal
        // has what is dirty.
        End::Forced => {
            let hint = "they get errors from now on";
            Err(Failure::new("detached while files were open", place, hint))
        }
        End::Failed(words) => {
            Err(Failure::new("the FUSE session broke", place, format!("{words}; mount it again")))
        }
    }
}

/// "/srv/images on /mnt/images: 256M cache of 4K blocks, writethrough"
fn ready_line(config: &Config, held: &Held) -> String {
    let (mount, store) = (&config.mount, &config.store);
    let read_only = if mount.read_only { ", read-only" } else { "" };
    format!(
        "{} on {}: {} cache of {} blocks, {}{read_only}{}",
        mount.source.display(),
        mount.mountpoint.display(),
        format_size(store.cache_bytes),
        format_size(u64::from(store.block_size)),
        store.cache_mode.name(),
        held.words,
    )
}
