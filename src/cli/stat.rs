//! `stat` (layer 9): one answer of a daemon, in the form that was asked for; or its rates.

use std::io::IsTerminal;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Serialize;

use crate::cli::args::StatArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::options::duration;
use crate::cli::output::{print, print_json};
use crate::cli::place::Place;
use crate::clock;
use crate::control::client::Client;
use crate::control::proto::{Ask, LoggedError, Name, Reply, SCHEMA, StatReply};
use crate::control::{errors, explain, format, prometheus, writeback};
use crate::stats::BlockInfo;

/// How many devices are shown without --all.
const TOP: usize = 10;

/// How long --check waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs it.
pub fn run(args: &StatArgs) -> Outcome<()> {
    let watch = args.watch.as_deref().map(|text| duration("watch", text.as_ref())).transpose()?;
    if watch.is_some_and(|period| period.is_zero()) {
        return Err(Failure::usage("bad value", "watch=0", "give a time such as 2 or 500ms"));
    }
    if args.check {
        return check(args);
    }
    let place = Place::find(&args.path)?;
    let mut client = place.connect()?;
    client.hello().map_err(|refusal| place.failure(refusal))?;
    let below = place.below()?;
    if let Some(period) = watch {
        return watch_rates(args, &place, &mut client, &below, period);
    }
    if args.blocks {
        let blocks = ask_blocks(&place, &mut client, below)?;
        return print(&format::blocks(&blocks)).map(drop);
    }
    if args.errors {
        let list = ask_errors(&place, &mut client)?;
        return print(&format::errors(&list, errors::wall_ms())).map(drop);
    }
    let stat = ask_stat(&place, &mut client, &below)?;
    if args.json {
        return print_json(&Json { schema: SCHEMA, stat: &stat }).map(drop);
    }
    if args.prometheus {
        return print(&prometheus::exposition(&stat)).map(drop);
    }
    print(&format::stat(&stat, top(args))).map(drop)
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    #[serde(flatten)]
    stat: &'a StatReply,
}

fn top(args: &StatArgs) -> usize {
    if args.all { usize::MAX } else { TOP }
}

fn ask_stat(place: &Place, client: &mut Client, below: &Option<Name>) -> Outcome<StatReply> {
    match client.ask(Ask::Stat { below: below.clone() }) {
        Ok(Reply::Stat(stat)) => Ok(*stat),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

fn ask_blocks(place: &Place, client: &mut Client, below: Option<Name>) -> Outcome<Vec<BlockInfo>> {
    match client.ask(Ask::Blocks { below }) {
        Ok(Reply::Blocks { blocks }) => Ok(blocks),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

fn ask_errors(place: &Place, client: &mut Client) -> Outcome<Vec<LoggedError>> {
    match client.ask(Ask::Errors) {
        Ok(Reply::Errors { errors }) => Ok(errors),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

fn watch_rates(
    args: &StatArgs,
    place: &Place,
    client: &mut Client,
    below: &Option<Name>,
    period: Duration,
) -> Outcome<()> {
    let redraw = std::io::stdout().is_terminal() && !args.json;
    let mut before = ask_stat(place, client, below)?;
    let mut time = clock::now();
    loop {
        thread::sleep(period);
        let stat = ask_stat(place, client, below)?;
        let now = clock::now();
        let seconds = (now - time).as_secs_f64();
        let change = explain::counters(&stat).since(&explain::counters(&before));
        let going_on = if args.json {
            print_json(&Json { schema: SCHEMA, stat: &stat })?
        } else {
            let mut text = format::rates(&change, seconds, stat.snapshot.block_size);
            text.push_str(&writeback::rates(&before, &stat, seconds));
            text.push('\n');
            if redraw {
                // Home, the table of the interval, then clear what an older one left below.
                let interval = since(&stat, &before);
                text = format!("\x1b[H\x1b[2J{}\n{text}", format::stat(&interval, top(args)));
            }
            print(&text)?
        };
        if !going_on {
            return Ok(());
        }
        (before, time) = (stat, now);
    }
}

/// The same answer, its counters those of the interval.
fn since(stat: &StatReply, before: &StatReply) -> StatReply {
    let mut interval = stat.clone();
    interval.snapshot.total = stat.snapshot.total.since(&before.snapshot.total);
    for device in &mut interval.snapshot.devices {
        let old = before.snapshot.devices.iter().find(|old| old.unit == device.unit);
        if let Some(old) = old {
            device.counters = device.counters.since(&old.counters);
        }
    }
    interval.snapshot.devices.sort_by_key(|device| std::cmp::Reverse(device.counters.ops));
    interval
}

/// Silent when the daemon and the kernel's side of the mount answer, and no error was logged.
fn check(args: &StatArgs) -> Outcome<()> {
    let max_age = match &args.max_age {
        Some(text) => Some(duration("max_age", text.as_ref())?),
        None => None,
    };
    let place = Place::find(&args.path)?;
    let mountpoint = place.mountpoint().to_path_buf();
    let (sender, answer) = mpsc::channel();
    // A thread, because neither a full socket nor a hung mount lets go of its caller.
    let asked = thread::Builder::new().spawn(move || {
        let result = place.connect().and_then(|mut client| {
            client.set_timeout(Some(PATIENCE));
            let list = ask_errors(&place, &mut client)?;
            rustix::fs::statvfs(place.mountpoint()).map_err(|error| {
                let hint = "unmount it and mount again";
                let what = std::io::Error::from(error).kind();
                Failure::new(what, place.mountpoint().display(), hint)
            })?;
            Ok(list)
        });
        let _ = sender.send(result);
    });
    let hint = "see the system log; umount -f it if it hangs";
    let silent = || Failure::new("the daemon does not answer", mountpoint.display(), hint);
    asked.map_err(|_| silent())?;
    let list = answer.recv_timeout(PATIENCE).map_err(|_| silent())??;
    match last_error(&list, max_age, errors::wall_ms()) {
        None => Ok(()),
        Some((count, error)) => Err(Failure::new(
            format!("{count} errors, the last: {}", error.text),
            mountpoint.display(),
            "bcachefs-fuse stat --errors lists them",
        )),
    }
}

/// How many of the errors are young enough to count, and the youngest.
fn last_error(
    list: &[LoggedError],
    max_age: Option<Duration>,
    now_ms: u64,
) -> Option<(usize, &LoggedError)> {
    let limit = max_age.map_or(u64::MAX, |age| age.as_millis() as u64);
    let young = |error: &&LoggedError| now_ms.saturating_sub(error.time_ms) <= limit;
    let count = list.iter().filter(young).count();
    list.iter().rfind(young).map(|last| (count, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_young_errors_count() {
        let error = |time_ms, text: &str| LoggedError { time_ms, text: text.into() };
        let list = [error(1000, "a"), error(9000, "b")];
        assert_eq!(last_error(&list, None, 10_000), Some((2, &list[1])));
        let seconds = |s| Some(Duration::from_secs(s));
        assert_eq!(last_error(&list, seconds(2), 10_000), Some((1, &list[1])));
        assert_eq!(last_error(&list, seconds(0), 10_000), None);
        assert_eq!(last_error(&[], None, 10_000), None);
    }
}
