//! The one table of mount options (layer 9): what `--long`, `-o name=value`, `set`, `--help`, the
//! man page and "did you mean" know about an option they know from here. Constant.
//!
//! Names are stored and printed with `_`; a user may type `-` or `_`.

use std::ffi::OsStr;
use std::time::Duration;

use crate::cli::failure::{Failure, Outcome};
use crate::units::{parse_duration, parse_size};

/// What values an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// Present or not; `=yes` and `=no` say it outright.
    Flag,
    /// "64M".
    Size,
    /// "30s".
    Duration,
    /// A whole number.
    Count,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A path; made absolute.
    Path,
    /// Any text.
    Text,
}

impl OptionKind {
    /// The unit column of `set`.
    pub fn unit(self) -> &'static str {
        match self {
            OptionKind::Flag => "yes|no",
            OptionKind::Size => "bytes (64M)",
            OptionKind::Duration => "time (30s)",
            OptionKind::Count => "number",
            OptionKind::Word(_) => "word",
            OptionKind::Path => "path",
            OptionKind::Text => "text",
        }
    }

    /// What stands behind `=` in the help.
    pub fn placeholder(self) -> &'static str {
        match self {
            OptionKind::Flag => "yes|no",
            OptionKind::Size => "SIZE",
            OptionKind::Duration => "TIME",
            OptionKind::Count => "N",
            OptionKind::Word(_) => "WORD",
            OptionKind::Path => "PATH",
            OptionKind::Text => "TEXT",
        }
    }
}

/// One option of a mount.
#[derive(Debug)]
pub struct OptionSpec {
    /// Its name, with `_`.
    pub name: &'static str,
    /// Its one-letter form.
    pub short: Option<char>,
    /// What it takes.
    pub kind: OptionKind,
    /// Its default, as a user would type it or read it.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// `set` changes it on a live mount.
    pub live: bool,
    /// Not shown to users (test-only).
    pub hidden: bool,
}

impl OptionSpec {
    /// The name as `--long` shows it.
    pub fn long(&self) -> String {
        self.name.replace('_', "-")
    }
}

const fn spec(
    name: &'static str,
    kind: OptionKind,
    default: &'static str,
    help: &'static str,
) -> OptionSpec {
    OptionSpec { name, short: None, kind, default, help, live: false, hidden: false }
}

const fn live(option: OptionSpec) -> OptionSpec {
    OptionSpec { live: true, ..option }
}

const fn hidden(option: OptionSpec) -> OptionSpec {
    OptionSpec { hidden: true, ..option }
}

const MODES: &[&str] = &["writeback", "writethrough", "writearound", "none"];
const ORDERS: &[&str] = &["unordered", "lba"];
const DIRECT: &[&str] = &["auto", "always", "never"];

/// Every option, in the order of the help.
pub const OPTIONS: &[OptionSpec] = &[
    spec(
        "cache",
        OptionKind::Size,
        "the smaller of 256M and 1/8 of memory",
        "Bytes of cached blocks, at least 4 x bypass; the index takes at most 3 % on top",
    ),
    spec(
        "block_size",
        OptionKind::Size,
        "4K",
        "Bytes of one cache block: a power of two from 512 to 1M",
    ),
    live(spec(
        "bypass",
        OptionKind::Size,
        "256K",
        "A single read larger than this is served but not kept in the cache",
    )),
    live(spec(
        "sequential_cutoff",
        OptionKind::Size,
        "64M",
        "A sequential stream is not kept in the cache past this many bytes",
    )),
    live(spec(
        "expire",
        OptionKind::Duration,
        "0",
        "Read a cached block again when it is older than this (for sources that another host \
         writes); 0: never",
    )),
    live(spec(
        "readahead",
        OptionKind::Size,
        "1M",
        "Largest read-ahead window of a stream; 0: none",
    )),
    live(spec(
        "cache_mode",
        OptionKind::Word(MODES),
        "writeback where it can be, else writethrough",
        "What a write does: writeback (into the journal, and into the file later), writethrough \
         (into the file and the cache), writearound (into the file, cached copies are dropped), \
         none (nothing is cached)",
    )),
    spec(
        "journal_size",
        OptionKind::Size,
        "256M",
        "Bytes of the writeback journal, at least 8M; an empty journal of another size is made \
         anew",
    ),
    live(spec(
        "journal_delay",
        OptionKind::Duration,
        "100ms",
        "What was written is safe from a power cut after this long even without fsync, 1ms to 60s",
    )),
    live(hidden(spec(
        "journal_delay_ms",
        OptionKind::Count,
        "100",
        "The same as journal_delay, in milliseconds",
    ))),
    live(spec(
        "writeback_percent",
        OptionKind::Count,
        "10",
        "Part of the journal, 0 to 100 percent, that may stay dirty while applications are busy; \
         0: no limit on the rate of writing home",
    )),
    live(spec(
        "writeback_delay",
        OptionKind::Duration,
        "1s",
        "How long the first dirty bytes of a busy image wait before they are written home",
    )),
    live(spec(
        "writeback_running",
        OptionKind::Flag,
        "yes",
        "Write home at all; overruled while the journal is more than 70 % full",
    )),
    spec(
        "writeback_order",
        OptionKind::Word(ORDERS),
        "unordered",
        "In which order: unordered (the host's elevator sorts), lba (as Linux bcache before 2025; \
         for measuring)",
    ),
    spec(
        "flush_timeout",
        OptionKind::Duration,
        "60s",
        "How long umount(8) waits until all is written home",
    ),
    spec(
        "direct_io",
        OptionKind::Word(DIRECT),
        "auto",
        "Open source files O_DIRECT, so that data is not cached twice: auto (where the source \
         takes it), always, never",
    ),
    spec("threads", OptionKind::Count, "16", "Request threads, 1 to 256"),
    spec("ro", OptionKind::Flag, "no", "Mount read-only"),
    spec(
        "upper",
        OptionKind::Path,
        "none: changes go into SOURCE",
        "Keep every change in this directory, block by block, and never touch SOURCE; an empty \
         directory becomes one",
    ),
    spec(
        "state",
        OptionKind::Path,
        "SOURCE/.bcachefs-fuse",
        "Directory (or partition) of the writeback journal; best on a fast disk of its own",
    ),
    spec(
        "allow_other",
        OptionKind::Flag,
        "yes as root, else no",
        "Let other users in, as far as file permissions let them; a user other than root needs \
         user_allow_other in /etc/fuse.conf",
    ),
    spec(
        "attr_timeout",
        OptionKind::Duration,
        "1s",
        "How long the kernel may believe names, sizes and times without asking",
    ),
    spec("fsname", OptionKind::Text, "SOURCE", "First column of findmnt(8) and df(1)"),
    spec(
        "log",
        OptionKind::Path,
        "syslog; standard error with -f",
        "Append messages to this file instead of syslog (or standard error)",
    ),
    OptionSpec {
        short: Some('d'),
        ..spec(
            "debug",
            OptionKind::Flag,
            "no",
            "Log every request; stays in the foreground as -f does",
        )
    },
    spec(
        "trace",
        OptionKind::Path,
        "none",
        "Record every read request in this file, from the start",
    ),
    hidden(spec(
        "unit_flush",
        OptionKind::Flag,
        "no",
        "Test only: empty the cache whenever the device changes",
    )),
    hidden(spec(
        "no_uring",
        OptionKind::Flag,
        "no",
        "Test only: write home by pwrite(2) even where io_uring works",
    )),
    hidden(spec("test_panic", OptionKind::Text, "none", "Test only: a lookup of this name panics")),
];

/// The option of a name typed with `-` or `_`.
pub fn find(name: &str) -> Option<&'static OptionSpec> {
    let name = name.replace('-', "_");
    OPTIONS.iter().find(|option| option.name == name)
}

/// The candidate a mistyped word probably meant.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.replace('-', "_");
    candidates
        .map(|candidate| (strsim::jaro_winkler(&word, candidate), candidate))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// "name=value: what is wanted" of a wrong value.
pub fn bad_value(name: &str, value: &OsStr, wanted: &str) -> Failure {
    Failure::usage("bad value", format!("{name}={}", value.display()), wanted)
}

fn text<'a>(name: &str, value: &'a OsStr, wanted: &str) -> Outcome<&'a str> {
    value.to_str().ok_or_else(|| bad_value(name, value, wanted))
}

/// The value of a size option in bytes.
pub fn size(name: &str, value: &OsStr) -> Outcome<u64> {
    let wanted = "give a size such as 64M";
    parse_size(text(name, value, wanted)?).ok_or_else(|| bad_value(name, value, wanted))
}

/// The value of a duration option.
pub fn duration(name: &str, value: &OsStr) -> Outcome<Duration> {
    let wanted = "give a time such as 30s or 500ms";
    parse_duration(text(name, value, wanted)?).ok_or_else(|| bad_value(name, value, wanted))
}

/// The value of a counting option within its limits.
pub fn count(name: &str, value: &OsStr, least: usize, most: usize) -> Outcome<usize> {
    let wanted = format!("give a whole number from {least} to {most}");
    match text(name, value, &wanted)?.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(bad_value(name, value, &wanted)),
    }
}

/// The value of a flag: without a value it is on.
pub fn flag(name: &str, value: Option<&OsStr>) -> Outcome<bool> {
    let Some(value) = value else { return Ok(true) };
    match value.to_str() {
        Some("yes" | "1") => Ok(true),
        Some("no" | "0") => Ok(false),
        _ => Err(bad_value(name, value, "give no value, yes or no")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_with_either_separator() {
        for name in ["cache_mode", "cache-mode"] {
            assert_eq!(find(name).map(|o| o.name), Some("cache_mode"));
        }
        assert!(find("cachemode").is_none());
        let names = || OPTIONS.iter().map(|o| o.name);
        assert_eq!(nearest("chache", names()), Some("cache"));
        assert_eq!(nearest("sequential-cutof", names()), Some("sequential_cutoff"));
    }

    #[test]
    fn wrong_values_are_errors() {
        let os = OsStr::new;
        assert_eq!(size("cache", os("64M")), Ok(64 << 20));
        let failure = size("cache", os("64X")).unwrap_err();
        assert!(failure.usage);
        assert_eq!(failure.line, "bad value: cache=64X: give a size such as 64M");
        assert!(duration("expire", os("soon")).is_err());
        assert!(count("threads", os("0"), 1, 256).is_err());
        assert_eq!(count("threads", os("16"), 1, 256), Ok(16));
        assert_eq!(flag("ro", None), Ok(true));
        assert_eq!(flag("ro", Some(os("no"))), Ok(false));
        assert_eq!(flag("writeback_running", Some(os("0"))), Ok(false));
        assert!(flag("ro", Some(os("maybe"))).is_err());
    }

    #[test]
    fn the_table_is_well_formed() {
        for option in OPTIONS {
            assert!(!option.name.contains('-') && !option.help.ends_with('.'), "{}", option.name);
            assert_eq!(OPTIONS.iter().filter(|o| o.name == option.name).count(), 1);
        }
    }
}
