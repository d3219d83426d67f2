//! `list` (layer 9): the mounts this user may ask; root sees all. Sockets of dead daemons are
//! removed on the way.

use std::time::Duration;

use serde::Serialize;

use crate::cli::args::ListArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::{print, print_json};
use crate::cli::place::owner;
use crate::control::client;
use crate::control::format;
use crate::control::proto::{MountFacts, Name, SCHEMA};
use crate::fuse::mountinfo::{self, MountEntry};

#[derive(Serialize)]
struct Json {
    schema: u32,
    mounts: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    facts: MountFacts,
    /// rw, ro, detached (served, but not in this namespace's table), or unanswered (no daemon, or
    /// its socket is out of reach).
    state: &'static str,
}

/// Runs it.
pub fn run(args: &ListArgs) -> Outcome<()> {
    let mounts = mounts()?;
    if args.json {
        return print_json(&Json { schema: SCHEMA, mounts }).map(drop);
    }
    if mounts.is_empty() {
        return print("no mounts\n").map(drop);
    }
    let rows = mounts
        .iter()
        .map(|Listed { facts, state }| {
            let known = |text: String| if *state == "unanswered" { "-".to_string() } else { text };
            vec![
                facts.mountpoint.to_string(),
                facts.source.to_string(),
                facts.device.clone(),
                known(facts.pid.to_string()),
                facts.uid.to_string(),
                known(format::span(facts.uptime_ms / 1000)),
                state.to_string(),
            ]
        })
        .collect();
    let header = ["mountpoint", "source", "device", "pid", "uid", "age", "state"];
    print(&format::table(&header, rows, 3..6)).map(drop)
}

fn mounts() -> Outcome<Vec<Listed>> {
    let table = mountinfo::read().map_err(|error| Failure::of(&error, "/proc".as_ref()))?;
    let mut mounts = Vec::new();
    let mut answered = Vec::new();
    for (device, mut daemon) in client::daemons() {
        daemon.set_timeout(Some(Duration::from_secs(5)));
        let Ok(facts) = daemon.hello() else { continue };
        answered.push(device);
        let attached = table.iter().find(|entry| entry.device() == device);
        let state = match attached {
            None => "detached",
            // The kernel's flag: it may have been remounted.
            Some(entry) if facts.read_only || has_word(&entry.super_options, "ro") => "ro",
            Some(_) => "rw",
        };
        mounts.push(Listed { facts, state });
    }
    let me = rustix::process::geteuid().as_raw();
    for entry in table.iter().filter(|entry| entry.is_ours()) {
        let uid = owner(entry);
        if !answered.contains(&entry.device()) && (me == 0 || me == uid) {
            mounts.push(Listed { facts: unanswered(entry, uid), state: "unanswered" });
        }
    }
    Ok(mounts)
}

fn has_word(options: &str, word: &str) -> bool {
    options.split(',').any(|option| option == word)
}

fn unanswered(entry: &MountEntry, uid: u32) -> MountFacts {
    let (major, minor) = entry.device();
    MountFacts {
        mountpoint: Name::from(entry.mountpoint.as_path()),
        source: Name::from(std::path::Path::new(&entry.source)),
        device: format!("{major}:{minor}"),
        pid: 0,
        uid,
        read_only: has_word(&entry.super_options, "ro"),
        allow_other: has_word(&entry.super_options, "allow_other"),
        version: String::new(),
        uptime_ms: 0,
    }
}
