//! `trace` (layer 9): has the daemon record read requests while this command runs.
//!
//! The recording belongs to the connection: if this process is killed, it ends too.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::args::TraceArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::meaning::absolute;
use crate::cli::options::duration;
use crate::cli::output::print;
use crate::cli::place::Place;
use crate::clock;
use crate::control::client::Client;
use crate::control::proto::{Ask, Name, Reply};
use crate::fuse::signals;

/// Runs it.
pub fn run(args: &TraceArgs) -> Outcome<()> {
    let length = args.seconds.as_deref().map(|text| duration("seconds", text.as_ref()));
    let length = length.transpose()?;
    let file = absolute(&args.file)?;
    // Where the file's directory really is: a link must not lead the daemon onto its own mount.
    let file = match (file.parent().map(std::path::Path::canonicalize), file.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => return Err(Failure::new("no such directory", file.display(), "make it first")),
    };
    let place = Place::find(&args.path)?;
    let mut client = place.connect()?;
    let unexpected = |error| Failure::of(&error, place.mountpoint());
    signals::block().map_err(unexpected)?;
    let (sender, stop) = mpsc::channel();
    signals::spawn(move |_| sender.send(()).is_ok()).map_err(unexpected)?;
    let first = requests(&place, &mut client)?;
    let begun = client.ask(Ask::Trace { file: Name::from(file.as_path()) });
    begun.map_err(|refusal| place.failure(refusal))?;
    let recorded = record(&place, &mut client, length, &stop, first)?;
    client.ask(Ask::Untrace).map_err(|refusal| place.failure(refusal))?;
    print(&format!("{recorded} read requests recorded in {}\n", file.display())).map(drop)
}

fn record(
    place: &Place,
    client: &mut Client,
    length: Option<Duration>,
    stop: &mpsc::Receiver<()>,
    first: u64,
) -> Outcome<u64> {
    let bar = progress(length);
    let start = clock::now();
    loop {
        let passed = clock::now() - start;
        let left = length.map_or(Duration::MAX, |length| length.saturating_sub(passed));
        let end = left.is_zero()
            || stop.recv_timeout(left.min(Duration::from_millis(500)))
                != Err(RecvTimeoutError::Timeout);
        let recorded = requests(place, client)?.saturating_sub(first);
        bar.set_position((clock::now() - start).as_secs());
        bar.set_message(format!("{recorded} read requests"));
        if end {
            bar.finish_and_clear();
            return Ok(recorded);
        }
    }
}

/// Hidden where standard error is no terminal.
fn progress(length: Option<Duration>) -> ProgressBar {
    let (bar, template) = match length {
        Some(length) => (
            ProgressBar::new(length.as_secs().max(1)),
            "{bar:30} {pos} of {len} s, {msg} (Ctrl-C ends it)",
        ),
        None => (ProgressBar::new_spinner(), "{spinner} {pos} s, {msg} (Ctrl-C ends it)"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn requests(place: &Place, client: &mut Client) -> Outcome<u64> {
    match client.ask(Ask::Stat { below: None }) {
        Ok(Reply::Stat(stat)) => Ok(stat.snapshot.total.ops),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}
