//! What can be typed (layer 9): subcommands and their arguments. What it means is `cli::meaning`.
//!
//! The options of `mount` come from the table in `cli::options`, as `--long` and behind `-o`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::error::Error;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Parser, Subcommand};

use crate::cli::failure::Outcome;
use crate::cli::help;
use crate::cli::options::{self, OPTIONS, OptionKind, OptionSpec};
use crate::cli::words::Words;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "bcachefs-fuse",
    version,
    about = "Mount a directory of disk images behind a device-tagged block cache",
    long_about = help::ABOUT,
    after_long_help = help::MAIN,
    propagate_version = true,
    disable_help_subcommand = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Mount a directory of images; returns once it is mounted
    #[command(after_long_help = help::MOUNT)]
    Mount(MountArgs),
    /// Write home what is in the journal, and wait for it
    #[command(after_long_help = help::FLUSH)]
    Flush(FlushArgs),
    /// Write everything home, unmount, and wait until the daemon is gone
    #[command(after_long_help = help::UMOUNT, visible_alias = "unmount")]
    Umount(UmountArgs),
    /// Show what the cache did: per device and in total
    #[command(after_long_help = help::STAT)]
    Stat(StatArgs),
    /// List a mount's options, or change them while it is mounted
    #[command(after_long_help = help::SET)]
    Set(SetArgs),
    /// Show what an overlay changed: A added, M modified, D deleted, R renamed
    #[command(after_long_help = help::DIFF)]
    Diff(DiffArgs),
    /// Drop every change of an overlay: its mount shows SOURCE again
    #[command(after_long_help = help::REVERT)]
    Revert(RevertArgs),
    /// List the mounts of this user; root sees all
    #[command(after_long_help = help::LIST)]
    List(ListArgs),
    /// Record every read request of a mount in a file
    #[command(after_long_help = help::TRACE)]
    Trace(TraceArgs),
    /// Look what is in a journal that no mount uses; exit 0 clean, 1 dirty, 4 corrupt, 8 failed
    #[command(after_long_help = help::CHECK)]
    Check(CheckArgs),
    /// Show, replay or give up a journal that no mount uses
    #[command(
        subcommand,
        after_long_help = help::JOURNAL,
        disable_help_subcommand = true,
        arg_required_else_help = true
    )]
    Journal(JournalAction),
    /// Check what this system and a source directory can do
    #[command(after_long_help = help::DOCTOR)]
    Doctor(DoctorArgs),
    /// Print shell completions
    #[command(after_long_help = help::COMPLETIONS)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, bcachefs-fuse(1)
    #[command(hide = true)]
    Man,
}

/// Arguments of `mount`.
#[derive(Debug, Args)]
pub struct MountArgs {
    /// The directory of images
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub source: PathBuf,
    /// Where to show it; may be SOURCE itself
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub mountpoint: PathBuf,
    /// Stay in the foreground; speaks sd_notify
    #[arg(short = 'f', long)]
    pub foreground: bool,
    /// Serve requests with one thread (--threads 1)
    #[arg(short = 's', long)]
    pub single_thread: bool,
    /// The options of the table, in the order typed.
    #[command(flatten)]
    pub options: TypedOptions,
}

/// Arguments of `umount`.
#[derive(Debug, Args)]
pub struct UmountArgs {
    /// The mountpoint, or any path below it
    pub path: PathBuf,
    /// Detach now, end when the last file is closed; does not wait
    #[arg(short, long)]
    pub lazy: bool,
    /// Abort requests that hang, then unmount (root only)
    #[arg(short, long)]
    pub force: bool,
    /// Leave what is dirty in the journal; the next mount writes it home
    #[arg(short, long)]
    pub no_flush: bool,
}

/// Arguments of `flush`.
#[derive(Debug, Args)]
pub struct FlushArgs {
    /// A mountpoint: all of it; files, or a mountpoint and files of it: only those
    #[arg(required = true, value_name = "MOUNTPOINT|FILE")]
    pub paths: Vec<PathBuf>,
}

/// Arguments of `stat`.
#[derive(Debug, Args)]
pub struct StatArgs {
    /// The mountpoint, or any path below it; a file narrows the answer to that device
    pub path: PathBuf,
    /// Show every device, not only the ten busiest
    #[arg(long)]
    pub all: bool,
    /// Print one JSON object
    #[arg(long, group = "form")]
    pub json: bool,
    /// Print rates every SECS seconds (1) until Ctrl-C
    #[arg(
        long,
        value_name = "SECS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1"
    )]
    pub watch: Option<String>,
    /// Print the counters in the Prometheus text format
    #[arg(long, group = "form", conflicts_with = "watch")]
    pub prometheus: bool,
    /// Print the last 64 errors
    #[arg(long, group = "form", conflicts_with = "watch")]
    pub errors: bool,
    /// Print nothing and exit 0 if the daemon answers and logged no error: for cron
    #[arg(long, group = "form", conflicts_with = "watch")]
    pub check: bool,
    /// With --check: errors older than this do not count
    #[arg(long, value_name = "TIME", requires = "check")]
    pub max_age: Option<String>,
    /// List the cached blocks, four a row: unit:block age count
    #[arg(long, group = "form", conflicts_with = "watch")]
    pub blocks: bool,
}

/// Arguments of `set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The mountpoint, or any path below it
    pub path: PathBuf,
    /// What to change; nothing lists every option
    #[arg(value_name = "NAME=VALUE")]
    pub assignments: Vec<String>,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The mountpoint, or any path below it; or an upper directory that is not mounted
    pub path: PathBuf,
    /// Print which bytes, too: offset and length
    #[arg(long)]
    pub blocks: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "blocks")]
    pub json: bool,
}

/// Arguments of `revert`.
#[derive(Debug, Args)]
pub struct RevertArgs {
    /// The mountpoint, or an upper directory that is not mounted
    pub path: PathBuf,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Also while files are open: they change under their users
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// The mountpoint, or any path below it
    pub path: PathBuf,
    /// The file to write; it must not lie on the mount
    pub file: PathBuf,
    /// How long (60, 5m); until Ctrl-C if not given
    pub seconds: Option<String>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// A SOURCE, its state directory or its partition
    pub dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What `journal` can do.
#[derive(Debug, Subcommand)]
pub enum JournalAction {
    /// Print what it holds, by image or record by record
    #[command(after_long_help = help::DUMP)]
    Dump(DumpArgs),
    /// Write home what it holds, without a mount
    #[command(after_long_help = help::REPLAY)]
    Replay(ReplayArgs),
    /// Give up what it holds: removes the mark, moves the records aside
    #[command(after_long_help = help::ABANDON)]
    Abandon(AbandonArgs),
}

/// Arguments of `journal dump`.
#[derive(Debug, Args)]
pub struct DumpArgs {
    /// A SOURCE, its state directory or its partition
    pub dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print every record
    #[arg(long)]
    pub records: bool,
}

/// Arguments of `journal replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A SOURCE, its state directory or its partition
    pub dir: PathBuf,
    /// Give up what the journal holds of this file (a path below SOURCE), and keep a copy of the
    /// journal
    #[arg(long, value_name = "FILE")]
    pub skip: Vec<PathBuf>,
}

/// Arguments of `journal abandon`.
#[derive(Debug, Args)]
pub struct AbandonArgs {
    /// A SOURCE, its state directory or its partition
    pub dir: PathBuf,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A directory one would like to mount
    pub source: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The options of the table as they were typed, `--long` and `-o` in one order.
#[derive(Clone, Debug, Default)]
pub struct TypedOptions {
    /// Each with its place on the command line.
    items: Vec<(usize, Item)>,
}

#[derive(Clone, Debug)]
enum Item {
    Long(&'static OptionSpec, OsString),
    List(OsString),
}

impl TypedOptions {
    /// Understands them word by word.
    pub fn words(&self) -> Outcome<Words> {
        let mut words = Words::default();
        for (_, item) in &self.items {
            match item {
                Item::Long(option, value) => {
                    let value =
                        (option.kind != OptionKind::Flag || value != "yes").then(|| value.clone());
                    words.add_option(option, value)?;
                }
                Item::List(list) => words.add_list(list)?,
            }
        }
        Ok(words)
    }
}

const LIST: &str = "mount_options";

impl Args for TypedOptions {
    fn augment_args(command: Command) -> Command {
        let list = Arg::new(LIST)
            .short('o')
            .value_name("NAME[=VALUE],...")
            .help("Options as in fstab(5): those below, and mount(8)'s own words")
            .action(ArgAction::Append)
            .value_parser(clap::value_parser!(OsString));
        let command = command.arg(list).next_help_heading("Options, also as -o name[=value]");
        OPTIONS.iter().fold(command, |command, option| command.arg(argument(option)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn argument(option: &'static OptionSpec) -> Arg {
    let arg = Arg::new(option.name)
        .long(option.long())
        .action(ArgAction::Append)
        .value_parser(clap::value_parser!(OsString))
        .value_name(option.kind.placeholder())
        .help(format!("{} [default: {}]", option.help, option.default))
        .hide(option.hidden);
    let arg = match option.short {
        Some(short) => arg.short(short),
        None => arg,
    };
    match option.kind {
        OptionKind::Flag => arg.num_args(0..=1).require_equals(true).default_missing_value("yes"),
        OptionKind::Path => arg.value_hint(clap::ValueHint::AnyPath),
        _ => arg,
    }
}

impl FromArgMatches for TypedOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut typed = TypedOptions::default();
        typed.update_from_arg_matches(matches)?;
        Ok(typed)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        let mut take = |name: &str, item: &dyn Fn(&OsString) -> Item| {
            let places = matches.indices_of(name).into_iter().flatten();
            let values = matches.get_many::<OsString>(name).into_iter().flatten();
            self.items.extend(places.zip(values).map(|(place, value)| (place, item(value))));
        };
        take(LIST, &|value| Item::List(value.clone()));
        for option in OPTIONS {
            take(option.name, &|value| Item::Long(option, value.clone()));
        }
        self.items.sort_by_key(|(place, _)| *place);
        Ok(())
    }
}

/// The command line as clap should see it: `--cache_mode` is `--cache-mode`, and the optional
/// value of `--watch 2` is tied to it.
pub fn normalize(typed: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    let mut literal = false;
    for arg in typed {
        let bytes = arg.as_bytes();
        let after_watch = args.last().is_some_and(|last| last == "--watch");
        if literal || arg == "--" {
            literal = true;
            args.push(arg);
        } else if after_watch && bytes.first().is_some_and(u8::is_ascii_digit) && is_time(&arg) {
            args.pop();
            let mut tied = OsString::from("--watch=");
            tied.push(arg);
            args.push(tied);
        } else if bytes.starts_with(b"--") {
            let name = bytes.iter().position(|&byte| byte == b'=').unwrap_or(bytes.len());
            let mut fixed = bytes.to_vec();
            fixed[..name].iter_mut().filter(|byte| **byte == b'_').for_each(|byte| *byte = b'-');
            args.push(OsString::from_vec(fixed));
        } else {
            args.push(arg);
        }
    }
    args
}

fn is_time(arg: &OsStr) -> bool {
    options::duration("watch", arg).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Cli {
        let args = line.split_whitespace().map(OsString::from);
        Cli::try_parse_from(normalize(args)).unwrap()
    }

    fn mount_words(line: &str) -> Words {
        match parse(line).action {
            Action::Mount(args) => args.options.words().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn clap_is_content() {
        Cli::command().debug_assert();
    }

    #[test]
    fn long_and_listed_options_keep_their_order() {
        let words = mount_words(
            "bcachefs-fuse mount a b -o cache=1M,ro --cache_mode none -o cache_mode=writearound -d",
        );
        let ours: Vec<_> = words
            .ours
            .iter()
            .map(|(option, value)| (option.name, value.as_ref().and_then(|v| v.to_str())))
            .collect();
        let expected = [
            ("cache", Some("1M")),
            ("ro", None),
            ("cache_mode", Some("none")),
            ("cache_mode", Some("writearound")),
            ("debug", None),
        ];
        assert_eq!(ours, expected);
    }

    #[test]
    fn flags_take_an_outright_value() {
        let words = mount_words("bcachefs-fuse mount --allow-other=no --ro a b");
        assert_eq!(words.ours[0].1.as_deref(), Some(OsStr::new("no")));
        assert_eq!((words.ours[1].0.name, words.read_only), ("ro", Some(true)));
    }

    #[test]
    fn watch_takes_its_seconds_with_or_without_equals() {
        for (line, watch) in [
            ("bcachefs-fuse stat --watch /mnt", "1"),
            ("bcachefs-fuse stat --watch 2 /mnt", "2"),
            ("bcachefs-fuse stat --watch=500ms /mnt", "500ms"),
        ] {
            match parse(line).action {
                Action::Stat(args) => {
                    assert_eq!(args.watch.as_deref(), Some(watch));
                    assert_eq!(args.path, PathBuf::from("/mnt"));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
