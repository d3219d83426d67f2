//! MOUNTPOINT (layer 9): what it may be, and what must not lie below it.

use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::source::Source;
use super::stale;
use crate::cli::failure::{Failure, Outcome};
use crate::config::DaemonConfig;
use crate::fuse::mount::words_of;
use crate::tree::host::STATE_NAME;

/// The canonical mountpoint, or in one line why it cannot be one. SOURCE itself is allowed.
pub fn check(typed: &Path, source: &Source) -> Outcome<PathBuf> {
    stale::clear(typed)?;
    let path = typed.canonicalize().map_err(|error| refuse(typed, &error))?;
    let meta = path.metadata().map_err(|error| refuse(&path, &error))?;
    let place = path.display();
    if !meta.is_dir() {
        return Err(Failure::new("not a directory", place, "give a directory as MOUNTPOINT"));
    }
    if path == source.path {
        return Ok(path);
    }
    let shown = source.path.display();
    let hint = format!("give a directory elsewhere, or {shown} itself");
    if path.starts_with(&source.path) {
        return Err(Failure::new("MOUNTPOINT lies inside SOURCE", place, hint));
    }
    if source.path.starts_with(&path) {
        return Err(Failure::new("MOUNTPOINT lies around SOURCE", place, hint));
    }
    Ok(path)
}

/// Files of the daemon's own must not lie below its mount: it would wait for itself. The default
/// place of the state may be typed out: it is reached through SOURCE's descriptor all the same.
pub fn check_own_files(daemon: &DaemonConfig, mountpoint: &Path, source: &Path) -> Outcome<()> {
    let files = [("log", &daemon.log), ("trace", &daemon.trace), ("state", &daemon.state)];
    for (option, file) in files {
        let Some(file) = file else { continue };
        let parent = file.parent().unwrap_or(Path::new("/"));
        let directory = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
        let path = directory.join(file.file_name().unwrap_or_default());
        let own = option == "state" && path == source.join(STATE_NAME);
        if path.starts_with(mountpoint) && !own {
            let what = format!("{option} lies below MOUNTPOINT");
            return Err(Failure::new(what, file.display(), "give a path outside of the mount"));
        }
    }
    Ok(())
}

fn refuse(path: &Path, error: &std::io::Error) -> Failure {
    let place = path.display();
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => {
            Failure::new("no such directory", &place, format!("make it: mkdir -p {place}"))
        }
        Some(Errno::ACCESS | Errno::PERM) => Failure::new(
            "cannot reach MOUNTPOINT (permission denied)",
            place,
            "give a directory of your own",
        ),
        Some(errno) => Failure::new(words_of(errno), place, "check MOUNTPOINT"),
        None => Failure::new(error, place, "check MOUNTPOINT"),
    }
}
