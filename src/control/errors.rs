//! Where messages go (layer 8), and the last 64 errors for `stat --errors`.
//!
//! One logger a process, installed once by [`init_logging`]: standard error in the foreground,
//! syslog (with the mountpoint in the text) for a daemon, or a file. Locks: the ring's mutex and
//! the sink's, each held only while it is used. Invariant: logging never waits for a stuck log
//! daemon, because that daemon may be waiting for our mount.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use env_logger::Target;
use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use syslog::{Facility, Formatter3164, LoggerBackend};

use crate::config::DaemonConfig;
use crate::control::proto::LoggedError;
use crate::error::{Error, Kind, OpContext, Result};

const KEPT: usize = 64;

struct Ring {
    errors: VecDeque<LoggedError>,
    logged: u64,
}

static RING: Mutex<Ring> = Mutex::new(Ring { errors: VecDeque::new(), logged: 0 });

/// The last errors, oldest first.
pub fn recent() -> Vec<LoggedError> {
    RING.lock().errors.iter().cloned().collect()
}

/// How many errors were logged since the start.
pub fn logged() -> u64 {
    RING.lock().logged
}

/// Milliseconds since 1970, UTC.
pub fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_millis() as u64)
}

fn remember(text: String) {
    let mut ring = RING.lock();
    if ring.errors.len() == KEPT {
        ring.errors.pop_front();
    }
    ring.errors.push_back(LoggedError { time_ms: wall_ms(), text });
    ring.logged += 1;
}

type Syslog = syslog::Logger<LoggerBackend, Formatter3164>;

enum Sink {
    Stream(env_logger::Logger),
    Syslog { logger: Mutex<Option<Syslog>>, prefix: String },
}

struct Logger {
    sink: Sink,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        match &self.sink {
            Sink::Stream(logger) => logger.enabled(metadata),
            Sink::Syslog { .. } => metadata.level() <= log::max_level(),
        }
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if is_noise(record) {
            return;
        }
        if record.level() == Level::Error {
            remember(record.args().to_string());
        }
        match &self.sink {
            Sink::Stream(logger) => logger.log(record),
            Sink::Syslog { logger, prefix } => {
                send(&mut logger.lock(), record.level(), &format!("{prefix}: {}", record.args()));
            }
        }
    }

    fn flush(&self) {
        if let Sink::Stream(logger) = &self.sink {
            logger.flush();
        }
    }
}

/// Sends one line; connects again once, for a log daemon that was restarted. What cannot be sent
/// at once is lost: the ring still has it.
fn send(logger: &mut Option<Syslog>, level: Level, line: &str) {
    for _ in 0..2 {
        if logger.is_none() {
            *logger = connect();
        }
        let Some(open) = logger else { return };
        let sent = match level {
            Level::Error => open.err(line),
            Level::Warn => open.warning(line),
            Level::Info => open.info(line),
            Level::Debug | Level::Trace => open.debug(line),
        };
        if sent.is_ok() {
            return;
        }
        *logger = None;
    }
}

fn connect() -> Option<Syslog> {
    let formatter = Formatter3164 {
        facility: Facility::LOG_DAEMON,
        hostname: None,
        process: "bcachefs-fuse".to_string(),
        pid: std::process::id(),
    };
    let logger = syslog::unix(formatter).ok()?;
    match &logger.backend {
        LoggerBackend::Unix(socket) => socket.set_nonblocking(true).ok()?,
        LoggerBackend::UnixStream(stream) => stream.get_ref().set_nonblocking(true).ok()?,
        _ => {}
    }
    Some(logger)
}

/// Installs the logger; once, after the process has become a daemon. RUST_LOG is heard in the
/// foreground. A system without syslog is no error: the last errors are still kept.
pub fn init_logging(config: &DaemonConfig, mountpoint: &Path) -> Result<()> {
    let level = if config.debug { LevelFilter::Debug } else { LevelFilter::Info };
    let sink = if let Some(path) = &config.log {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.op("open log").map_err(|error| error.at_path(path))?;
        stream(env_logger::Builder::new().filter_level(level).target(Target::Pipe(Box::new(file))))
    } else if config.foreground {
        let environment = env_logger::Env::default().default_filter_or(level.as_str());
        stream(&mut env_logger::Builder::from_env(environment))
    } else {
        log::set_max_level(level);
        let prefix = mountpoint.display().to_string();
        Sink::Syslog { logger: Mutex::new(connect()), prefix }
    };
    log::set_boxed_logger(Box::new(Logger { sink }))
        .map_err(|_| Error::new(Kind::Exists, "set up logging", ""))
}

/// fuser calls it an error that the kernel had given a request up (its caller was interrupted)
/// before the answer came.
fn is_noise(record: &Record<'_>) -> bool {
    record.target().starts_with("fuser") && record.args().to_string().contains("(os error 2)")
}

fn stream(builder: &mut env_logger::Builder) -> Sink {
    let logger = builder.format_target(false).build();
    log::set_max_level(logger.filter());
    Sink::Stream(logger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_go_to_the_file_and_into_the_ring() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("log");
        let config = DaemonConfig { log: Some(file.clone()), ..DaemonConfig::default() };
        init_logging(&config, Path::new("/mnt")).unwrap();
        for number in 0..70 {
            log::error!("read disk.img: Input/output error {number}");
        }
        log::info!("mounted");
        log::debug!("not at this level");
        // Other tests of this process may log, too.
        let kept = recent();
        assert_eq!(kept.len(), KEPT);
        assert!(kept.iter().any(|error| error.text.ends_with("error 69")));
        assert!(!kept.iter().any(|error| error.text.ends_with("error 1")));
        assert!(logged() >= 70 && kept[0].time_ms > 1_600_000_000_000);
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("ERROR") && text.contains("mounted") && !text.contains("level"));
        assert!(init_logging(&config, Path::new("/mnt")).is_err());
    }
}
