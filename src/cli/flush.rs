//! `flush` (layer 9), and what `umount` shares with it: waiting until all is written home, with
//! progress on a terminal. Ctrl-C ends the waiting; the daemon writes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::args::FlushArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::print;
use crate::cli::place::Place;
use crate::clock;
use crate::control::client::Flush;
use crate::control::proto::{Ask, Name, Reply, StatReply};
use crate::fuse::signals;
use crate::stats::FlushProgress;
use crate::units::format_size;

/// Exit code after a second Ctrl-C, as a shell has it.
const INTERRUPTED: i32 = 130;

/// Runs it.
pub fn run(args: &FlushArgs) -> Outcome<()> {
    let stop = Stop::by_signal()?;
    for path in &chosen(&args.paths)? {
        let place = Place::find(path)?;
        // Whether the daemon lives, before the path is looked at.
        let stat = stat(&place)?;
        let Some(writeback) = &stat.snapshot.writeback else {
            print(&format!("{}: nothing to flush, it has no journal\n", path.display()))?;
            continue;
        };
        if let Some(why) = &writeback.failed {
            let bytes = format_size(writeback.dirty_bytes);
            let what = format!("nothing is written home, {bytes} stay in the journal");
            let hint = unwritable(&stat, why);
            return Err(Failure::new(what, path.display(), hint));
        }
        match wait(&place, place.below()?, &stop)? {
            Flush::Done(end) => {
                print(&format!("{}: {}\n", path.display(), said(&end)))?;
                refuse_stuck(&place, &end)?;
            }
            Flush::Stopped(end) => {
                let what = format!("stopped, {} still to go", format_size(end.left_bytes));
                let hint = "the daemon writes on at its own rate";
                return Err(Failure::new(what, path.display(), hint));
            }
        }
    }
    Ok(())
}

/// What to flush: a mountpoint alone is all of it; before files it says where they are, which may
/// then be named from there.
fn chosen(paths: &[PathBuf]) -> Outcome<Vec<PathBuf>> {
    let Some((first, files)) = paths.split_first().filter(|(_, files)| !files.is_empty()) else {
        return Ok(paths.to_vec());
    };
    let place = Place::find(first)?;
    if place.below()?.is_some() {
        return Ok(paths.to_vec());
    }
    let of_mount = |file: &PathBuf| {
        let inside = place.mountpoint().join(file);
        if file.is_relative() && inside.exists() { inside } else { file.clone() }
    };
    Ok(files.iter().map(of_mount).collect())
}

/// "1.5G home in 12.3 s (125.0 MiB/s), depth 64"
pub fn said(end: &FlushProgress) -> String {
    let seconds = end.elapsed_ms as f64 / 1000.0;
    let rate = end.done_bytes as f64 / f64::from(1 << 20) / seconds.max(0.001);
    let done = format_size(end.done_bytes);
    format!("{done} home in {seconds:.1} s ({rate:.1} MiB/s), depth {}", end.depth)
}

fn refuse_stuck(place: &Place, end: &FlushProgress) -> Outcome<()> {
    if end.stuck.is_empty() {
        return Ok(());
    }
    let what = format!("not written home: {}", stuck(end));
    let source = place.entry.source.to_string_lossy();
    let hint = match way_out(&end.refused, &source) {
        Some(way_out) => format!("its data stays in the journal; umount it, then {way_out}"),
        None => "its data stays in the journal and is tried again; bcachefs-fuse stat shows it"
            .to_owned(),
    };
    Err(Failure::new(what, place.mountpoint().display(), hint))
}

/// What to do about images that no mount writes home as they are; None if there are none.
pub fn way_out(refused: &[String], source: &str) -> Option<String> {
    if refused.is_empty() {
        return None;
    }
    let skip: Vec<String> = refused.iter().map(|path| format!("--skip {path}")).collect();
    let skip = skip.join(" ");
    Some(format!("restore it, or give it up: bcachefs-fuse journal replay {skip} {source}"))
}

/// "a.img (No space left on device), ..."
pub fn stuck(end: &FlushProgress) -> String {
    let words: Vec<String> =
        end.stuck.iter().map(|(path, why)| format!("{path} ({why})")).collect();
    words.join(", ")
}

/// Why a journal's data does not go home, and what to do.
fn unwritable(stat: &StatReply, why: &str) -> String {
    if stat.mount.read_only {
        let source = &stat.mount.source;
        return format!(
            "the mount is read-only (ro, or a corrupt journal): umount it, then bcachefs-fuse \
             check {source} says how they go home"
        );
    }
    format!("the journal takes no more writes ({why}); umount it and mount it again")
}

/// The counters of the whole mount.
pub fn stat(place: &Place) -> Outcome<StatReply> {
    let mut client = place.connect()?;
    match client.ask(Ask::Stat { below: None }) {
        Ok(Reply::Stat(stat)) => Ok(*stat),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

/// When to stop waiting: a signal, or a time.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    until: Option<Duration>,
}

impl Stop {
    /// By Ctrl-C and its like. To be called once, before the first thread.
    pub fn by_signal() -> Outcome<Stop> {
        let unexpected = |error| Failure::of(&error, "signals".as_ref());
        signals::block().map_err(unexpected)?;
        let stop = Stop::default();
        let asked = stop.asked.clone();
        signals::spawn(move |_| {
            // The second one is meant for whatever this process waits for now.
            if asked.swap(true, SeqCst) {
                std::process::exit(INTERRUPTED);
            }
            true
        })
        .map_err(unexpected)?;
        Ok(stop)
    }

    /// After this long.
    pub fn after(time: Duration) -> Stop {
        Stop { until: clock::now().checked_add(time), ..Stop::default() }
    }

    /// Whether it is time.
    pub fn now(&self) -> bool {
        self.asked.load(SeqCst) || self.until.is_some_and(|until| clock::now() >= until)
    }
}

/// Has everything (or one file) written home and waits for it.
pub fn wait(place: &Place, below: Option<Name>, stop: &Stop) -> Outcome<Flush> {
    let bar = progress();
    let end = place.connect()?.flush(below, &mut |progress| {
        bar.set_length(progress.done_bytes + progress.left_bytes);
        bar.set_position(progress.done_bytes);
        bar.set_message(format!("depth {}", progress.in_flight));
        !stop.now()
    });
    bar.finish_and_clear();
    end.map_err(|refusal| place.failure(refusal))
}

/// Hidden where standard error is no terminal.
fn progress() -> ProgressBar {
    let template = "{bar:30} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, \
                    {msg}, {eta} left (Ctrl-C stops waiting)";
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_has_bytes_seconds_and_depth() {
        let end = FlushProgress {
            done_bytes: 3 << 29,
            depth: 64,
            elapsed_ms: 12_288,
            stuck: vec![("a.img".into(), "EIO".into()), ("b.img".into(), "ENOSPC".into())],
            ..FlushProgress::default()
        };
        assert_eq!(said(&end), "1.5G home in 12.3 s (125.0 MiB/s), depth 64");
        assert_eq!(said(&FlushProgress::default()), "0 home in 0.0 s (0.0 MiB/s), depth 0");
        assert_eq!(stuck(&end), "a.img (EIO), b.img (ENOSPC)");
    }

    #[test]
    fn waiting_ends_by_time() {
        assert!(Stop::after(Duration::ZERO).now());
        assert!(!Stop::after(Duration::from_secs(3600)).now() && !Stop::default().now());
    }
}
