//! mount(8)'s helpers (layer 9): this program under the names `mount.fuse.bcachefs-fuse` and
//! `umount.fuse.bcachefs-fuse` in /sbin. Exit 32 on any failure, as mount(8) expects.
//!
//! mount(8) gives up its set-uid rights before it runs a helper: for a `user` line of fstab we run
//! as that user, and the mount goes through fusermount3, as for any ordinary user.
//! umount(8) waits for us: everything is written home first, for at most `flush_timeout`; then the
//! daemon goes on alone, and we say so.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::failure::{Failure, Outcome};
use crate::cli::flush::Stop;
use crate::cli::meaning::{self, Machine, absolute};
use crate::cli::options;
use crate::cli::place::Place;
use crate::cli::umount::Wait;
use crate::cli::words::Words;
use crate::cli::{run, set, umount};
use crate::config::{Tunables, WritebackConfig};
use crate::control::live;
use crate::fuse::mount::{self, How};

/// Which helper this process was started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Helper {
    /// mount.fuse.bcachefs-fuse
    Mount,
    /// umount.fuse.bcachefs-fuse
    Umount,
}

impl Helper {
    /// By the name in the first argument.
    pub fn of(program: &OsStr) -> Option<Helper> {
        let name = Path::new(program).file_name()?.to_str()?;
        match name {
            _ if name.starts_with("mount.") => Some(Helper::Mount),
            _ if name.starts_with("umount.") => Some(Helper::Umount),
            _ => None,
        }
    }

    /// Does its work. `args` are those behind the first argument.
    pub fn run(self, args: impl Iterator<Item = OsString>) -> Outcome<()> {
        let typed = Typed::parse(args, self)?;
        match self {
            Helper::Mount => run_mount(&typed),
            Helper::Umount => run_umount(&typed),
        }
    }
}

/// What mount(8) typed.
#[derive(Debug, Default)]
struct Typed {
    paths: Vec<PathBuf>,
    options: Vec<OsString>,
    /// The one-letter flags, in order.
    flags: Vec<u8>,
}

impl Typed {
    fn parse(args: impl Iterator<Item = OsString>, helper: Helper) -> Outcome<Typed> {
        let (flags, valued) = match helper {
            Helper::Mount => (&b"sfnvrw"[..], &b"oNt"[..]),
            Helper::Umount => (&b"flnrvi"[..], &b"oNt"[..]),
        };
        let mut typed = Typed::default();
        let mut args = args;
        let mut literal = false;
        while let Some(arg) = args.next() {
            let bytes = arg.as_bytes();
            if literal || bytes.first() != Some(&b'-') || bytes.len() < 2 {
                typed.paths.push(arg.into());
                continue;
            }
            if bytes == b"--" {
                literal = true;
                continue;
            }
            for (at, &letter) in bytes.iter().enumerate().skip(1) {
                if flags.contains(&letter) {
                    typed.flags.push(letter);
                } else if valued.contains(&letter) {
                    let rest = OsStr::from_bytes(&bytes[at + 1..]).to_owned();
                    let value = if rest.is_empty() { args.next() } else { Some(rest) };
                    typed.take(letter, value)?;
                    break;
                } else {
                    return Err(Failure::usage("unknown option", arg.display(), USAGE));
                }
            }
        }
        Ok(typed)
    }

    fn take(&mut self, letter: u8, value: Option<OsString>) -> Outcome<()> {
        let option = format!("-{}", letter as char);
        let value = value.ok_or_else(|| Failure::usage("missing value", &option, USAGE))?;
        match letter {
            b'o' => self.options.push(value),
            b'N' => {
                let hint = "run it inside: nsenter --mount=NAMESPACE mount ...";
                return Err(Failure::usage("not supported", "-N", hint));
            }
            // -t: the type by which mount(8) found us.
            _ => {}
        }
        Ok(())
    }

    fn has(&self, flag: u8) -> bool {
        self.flags.contains(&flag)
    }
}

const USAGE: &str = "usage: mount.fuse.bcachefs-fuse SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]; \
                     umount.fuse.bcachefs-fuse MOUNTPOINT [-flnrv]";

fn run_mount(typed: &Typed) -> Outcome<()> {
    let [source, mountpoint] = &typed.paths[..] else {
        return Err(Failure::usage("SOURCE and MOUNTPOINT are needed", "command line", USAGE));
    };
    let mut words = Words::default();
    if typed.has(b'r') {
        words.add_list(OsStr::new("ro"))?;
    }
    for list in &typed.options {
        if typed.has(b's') { words.add_list_sloppily(list)? } else { words.add_list(list)? }
    }
    if words.remount {
        return remount(source, mountpoint, &words, typed.has(b'f'));
    }
    let config = meaning::config(source, mountpoint, &words, false, false, Machine::this())?;
    // -f: a rehearsal; everything but the mount itself.
    if typed.has(b'f') { Ok(()) } else { run::mount(config) }
}

/// `mount -o remount`: the kernel's flags change; options of ours must be what they are, because
/// mount(8) repeats the whole fstab line here.
pub fn remount(source: &Path, mountpoint: &Path, words: &Words, rehearsal: bool) -> Outcome<()> {
    let place = Place::find(mountpoint)?;
    if place.mountpoint() != absolute(mountpoint)?.canonicalize().unwrap_or_default() {
        return Err(Failure::new("not a mountpoint", mountpoint.display(), "name its mountpoint"));
    }
    let config = meaning::config(source, mountpoint, words, false, false, Machine::this())?;
    let wanted = live::values(&config, &Tunables::new(&config.store));
    let present = set::settings(&place)?;
    let value = |values: &[(String, String)], name: &str| {
        values.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    };
    for (option, _) in &words.ours {
        let name = option.name;
        if name != "ro" && value(&wanted, name) != value(&present, name) {
            let at = place.mountpoint().display();
            let hint = if option.live {
                format!("use bcachefs-fuse set {at} {name}=...")
            } else {
                format!("unmount and mount with it; bcachefs-fuse set {at} lists what is live")
            };
            let typed = format!("{name}={}", value(&wanted, name).unwrap_or_default());
            return Err(Failure::new("not changeable by remount", typed, hint));
        }
    }
    let read_only = words.read_only == Some(true);
    if !read_only && value(&present, "ro").as_deref() == Some("yes") {
        let hint = "unmount it and mount it rw";
        return Err(Failure::new("mounted read-only", place.mountpoint().display(), hint));
    }
    if rehearsal {
        return Ok(());
    }
    let mut flags: Vec<String> = words.flags.iter().map(|flag| flag.to_string()).collect();
    flags.push(if read_only { "ro" } else { "rw" }.to_string());
    mount::remount(place.mountpoint(), &flags)
        .map_err(|error| Failure::new(error.what, error.place, error.hint))
}

fn run_umount(typed: &Typed) -> Outcome<()> {
    let [mountpoint] = &typed.paths[..] else {
        return Err(Failure::usage("MOUNTPOINT is needed", "command line", USAGE));
    };
    let place = Place::find(mountpoint)?;
    let result = flush_and_unmount(typed, &place);
    // -r: what is busy becomes read-only instead.
    let busy = result.as_ref().is_err_and(|failure| failure.line.starts_with("busy"));
    if busy && typed.has(b'r') {
        return mount::remount(place.mountpoint(), &["ro".to_string()])
            .map_err(|error| Failure::new(error.what, error.place, error.hint));
    }
    if typed.has(b'v') && result.is_ok() {
        println!("{} unmounted", place.mountpoint().display());
    }
    result
}

fn flush_and_unmount(typed: &Typed, place: &Place) -> Outcome<()> {
    if typed.has(b'f') {
        umount::abort(place.mountpoint())?;
        return umount::unmount(place, How::Politely, Wait::ForDaemon);
    }
    if typed.has(b'l') {
        return umount::unmount(place, How::Detach, Wait::No);
    }
    umount::refuse_busy(place)?;
    let journal = umount::Journal::of(place);
    if journal.bytes == 0 {
        return umount::unmount(place, How::Politely, Wait::ForDaemon);
    }
    // It is unmounted: no failure for umount(8), whatever is left.
    if journal.failed.is_some() {
        umount::unmount(place, How::Politely, Wait::ForDaemon)?;
        eprintln!("{}", journal.left(place).failure(place, "the next mount writes them home"));
        return Ok(());
    }
    let left = umount::flush(place, &Stop::after(flush_timeout(place)))?;
    if left.bytes == 0 {
        return umount::unmount(place, How::Politely, Wait::ForDaemon);
    }
    umount::unmount(place, How::Politely, Wait::No)?;
    // The daemon holds its locks and goes on.
    eprintln!("{}", left.failure(place, "its daemon writes them home, or the next mount"));
    Ok(())
}

/// As the mount has it.
fn flush_timeout(place: &Place) -> Duration {
    let values = set::settings(place).unwrap_or_default();
    let value = values.into_iter().find(|(name, _)| name == "flush_timeout");
    let typed = value.and_then(|(name, value)| options::duration(&name, value.as_ref()).ok());
    typed.unwrap_or(WritebackConfig::default().flush_timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(helper: Helper, line: &str) -> Outcome<Typed> {
        Typed::parse(line.split(' ').map(OsString::from), helper)
    }

    #[test]
    fn the_name_tells_the_helper() {
        for (name, helper) in [
            ("/sbin/mount.fuse.bcachefs-fuse", Some(Helper::Mount)),
            ("umount.fuse.bcachefs-fuse", Some(Helper::Umount)),
            ("/usr/bin/bcachefs-fuse", None),
        ] {
            assert_eq!(Helper::of(OsStr::new(name)), helper);
        }
    }

    #[test]
    fn the_command_lines_of_mount_8_are_understood() {
        let typed =
            parse(Helper::Mount, "/src /mnt -sn -o rw,nosuid -o cache=1G -t fuse.x").unwrap();
        assert_eq!(typed.paths, [PathBuf::from("/src"), PathBuf::from("/mnt")]);
        assert_eq!(typed.options, ["rw,nosuid", "cache=1G"]);
        assert!(typed.has(b's') && typed.has(b'n') && !typed.has(b'f'));
        let typed = parse(Helper::Mount, "-orw -- -src /mnt").unwrap();
        assert_eq!((typed.options, typed.paths.len()), (vec![OsString::from("rw")], 2));
        let typed = parse(Helper::Umount, "/mnt -flnrv").unwrap();
        assert!(b"flnrv".iter().all(|flag| typed.has(*flag)));
        assert!(parse(Helper::Mount, "/src /mnt -x").unwrap_err().usage);
        assert!(parse(Helper::Mount, "/src /mnt -o").is_err());
        assert!(parse(Helper::Umount, "/mnt -N 5").unwrap_err().line.contains("nsenter"));
    }
}
