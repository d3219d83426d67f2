//! The words behind `-o` (layer 9): ours, mount(8)'s, and everything else, which is an error.
//!
//! No state. mount(8) hands its helpers the whole fstab line, and `remount` what the kernel
//! prints for a FUSE mount, so all of these must be known; a mistyped one must not be swallowed.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::cli::failure::{Failure, Outcome};
use crate::cli::options::{self, OPTIONS, OptionSpec};

const UNKNOWN: &str = "unknown option";

/// Words that say something to mount(8) or to the kernel, and nothing to us.
const IGNORED: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "nouser",
    "nousers",
    "noowner",
    "nogroup",
    "silent",
    "loud",
    "auto_unmount",
    "default_permissions",
    "seclabel",
];

/// The same with a value behind `=`.
const IGNORED_VALUES: &[&str] = &[
    "comment",
    "context",
    "fscontext",
    "defcontext",
    "rootcontext",
    "user_id",
    "group_id",
    "rootmode",
    "max_read",
    "blksize",
    "subtype",
    "helper",
    "uhelper",
];

/// One mount(2) flag word: the flags it clears, and those it sets.
type FlagWord = (&'static str, &'static [&'static str], &'static [&'static str]);

const ATIME: &[&str] = &["noatime", "relatime", "strictatime"];

const FLAGS: &[FlagWord] = &[
    ("suid", &["nosuid"], &[]),
    ("nosuid", &[], &["nosuid"]),
    ("dev", &["nodev"], &[]),
    ("nodev", &[], &["nodev"]),
    ("exec", &["noexec"], &[]),
    ("noexec", &[], &["noexec"]),
    ("sync", &[], &["sync"]),
    ("async", &["sync"], &[]),
    ("dirsync", &[], &["dirsync"]),
    ("atime", ATIME, &[]),
    ("noatime", ATIME, &["noatime"]),
    ("relatime", ATIME, &["relatime"]),
    ("norelatime", &["relatime"], &[]),
    ("strictatime", ATIME, &["strictatime"]),
    ("nostrictatime", &["strictatime"], &[]),
    ("diratime", &["nodiratime"], &[]),
    ("nodiratime", &[], &["nodiratime"]),
    ("lazytime", &[], &["lazytime"]),
    ("nolazytime", &["lazytime"], &[]),
    ("iversion", &[], &[]),
    ("noiversion", &[], &[]),
    ("mand", &[], &[]),
    ("nomand", &[], &[]),
    ("symfollow", &["nosymfollow"], &[]),
    ("nosymfollow", &[], &["nosymfollow"]),
    // What an ordinary user may mount is restricted, unless a later word says otherwise: fstab(5).
    ("user", &[], &["nosuid", "nodev", "noexec"]),
    ("users", &[], &["nosuid", "nodev", "noexec"]),
    ("owner", &[], &["nosuid", "nodev"]),
    ("group", &[], &["nosuid", "nodev"]),
];

/// What was typed, understood word by word; values are not read yet.
#[derive(Debug, Default)]
pub struct Words {
    /// Our options in the order typed; the last one of a name wins.
    pub ours: Vec<(&'static OptionSpec, Option<OsString>)>,
    /// The flags of mount(2) that are on, by their fstab names.
    pub flags: Vec<&'static str>,
    /// `remount` was among them.
    pub remount: bool,
    /// What `ro`/`rw` said last; None where neither was typed.
    pub read_only: Option<bool>,
}

impl Words {
    /// Understands one option that was typed as `--long`.
    pub fn add_option(
        &mut self,
        option: &'static OptionSpec,
        value: Option<OsString>,
    ) -> Outcome<()> {
        if option.name == "ro" {
            self.read_only = Some(options::flag("ro", value.as_deref())?);
        }
        self.ours.push((option, value));
        Ok(())
    }

    /// Understands one `-o` argument: words separated by commas.
    pub fn add_list(&mut self, list: &OsStr) -> Outcome<()> {
        split(list).into_iter().try_for_each(|word| self.add_word(&word))
    }

    /// The same, but leaves out what nobody knows: mount(8)'s -s.
    pub fn add_list_sloppily(&mut self, list: &OsStr) -> Outcome<()> {
        split(list).into_iter().try_for_each(|word| match self.add_word(&word) {
            Err(failure) if failure.line.starts_with(UNKNOWN) => Ok(()),
            other => other,
        })
    }

    fn add_word(&mut self, word: &OsStr) -> Outcome<()> {
        let bytes = word.as_bytes();
        let equals = bytes.iter().position(|&byte| byte == b'=');
        let (name, value) = match equals {
            Some(at) => (&bytes[..at], Some(OsStr::from_bytes(&bytes[at + 1..]))),
            None => (bytes, None),
        };
        let name = String::from_utf8_lossy(name);
        if name.starts_with("x-") || name.starts_with("X-") || name == "comment" {
            return Ok(());
        }
        if let Some(option) = options::find(&name) {
            return self.add_option(option, value.map(OsStr::to_owned));
        }
        match (&*name, value) {
            ("rw", None) => match options::find("ro") {
                Some(ro) => self.add_option(ro, Some("no".into())),
                None => Ok(()),
            },
            ("remount", None) => {
                self.remount = true;
                Ok(())
            }
            (word, None) if IGNORED.contains(&word) => Ok(()),
            (word, Some(_)) if IGNORED_VALUES.contains(&word) => Ok(()),
            // mount(8) tells its helpers who mounted: user=NAME.
            ("user", Some(_)) if self.add_flag("user") => Ok(()),
            (flag, None) if self.add_flag(flag) => Ok(()),
            _ => Err(unknown(word, &name)),
        }
    }

    fn add_flag(&mut self, word: &str) -> bool {
        let Some((_, clears, sets)) = FLAGS.iter().find(|(name, ..)| *name == word) else {
            return false;
        };
        self.flags.retain(|flag| !clears.contains(flag) && !sets.contains(flag));
        self.flags.extend(sets.iter());
        true
    }
}

fn unknown(word: &OsStr, name: &str) -> Failure {
    let known = OPTIONS
        .iter()
        .filter(|option| !option.hidden)
        .map(|option| option.name)
        .chain(FLAGS.iter().map(|(name, ..)| *name))
        .chain(IGNORED.iter().copied())
        .chain(IGNORED_VALUES.iter().copied())
        .chain(["rw", "remount"]);
    let nearest = options::nearest(name, known).unwrap_or("cache");
    Failure::usage(UNKNOWN, word.display(), format!("did you mean {nearest}?"))
}

/// Splits at commas; `\,` and `"a,b"` do not separate, as in mount(8) and libfuse.
fn split(list: &OsStr) -> Vec<OsString> {
    let mut words = vec![Vec::new()];
    let (mut quoted, mut escaped) = (false, false);
    for &byte in list.as_bytes() {
        let word = match words.last_mut() {
            Some(word) => word,
            None => return Vec::new(),
        };
        match byte {
            _ if escaped => {
                if byte != b',' && byte != b'\\' {
                    word.push(b'\\');
                }
                word.push(byte);
                escaped = false;
            }
            b'\\' => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => words.push(Vec::new()),
            _ => word.push(byte),
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).map(OsString::from_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &str) -> Outcome<Words> {
        let mut words = Words::default();
        words.add_list(OsStr::new(list)).map(|()| words)
    }

    #[test]
    fn commas_quotes_and_escapes() {
        let list = split(OsStr::new("a,,b=1\\,2,context=\"u:r,s\",c=\\\\x\\y,"));
        assert_eq!(list, ["a", "b=1,2", "context=u:r,s", "c=\\x\\y"]);
        assert!(split(OsStr::new("")).is_empty());
    }

    #[test]
    fn every_word_of_mount_8_is_taken() {
        let all = "defaults,rw,ro,suid,nosuid,dev,nodev,exec,noexec,atime,noatime,relatime,sync,\
                   async,auto,noauto,user,nouser,users,owner,group,nofail,_netdev,comment=a b,\
                   context=x,x-systemd.automount,X-mount.mkdir=0755,user_id=0,group_id=0,\
                   rootmode=40000,max_read=131072,blksize=4096,auto_unmount,default_permissions,\
                   subtype=bcachefs-fuse,allow_other,cache-mode=none,cache_mode=none";
        let words = words(all).unwrap();
        assert_eq!(words.ours.len(), 5);
        assert!(!words.remount);
    }

    #[test]
    fn the_last_word_wins() {
        assert_eq!(words("nosuid,suid,noexec").unwrap().flags, ["noexec"]);
        assert_eq!(words("user,exec").unwrap().flags, ["nosuid", "nodev"]);
        assert_eq!(words("user=ann,dev").unwrap().flags, ["nosuid", "noexec"]);
        assert_eq!(words("noatime,relatime").unwrap().flags, ["relatime"]);
        assert_eq!(words("ro,rw").unwrap().read_only, Some(false));
        assert!(words("remount,ro").unwrap().remount);
    }

    #[test]
    fn any_other_word_names_the_nearest() {
        for (word, nearest) in [
            ("chache=1G", "cache"),
            ("noexecc", "noexec"),
            ("cache-mod=none", "cache_mode"),
            ("defaults=1", "defaults"),
            ("allow_root", "allow_other"),
        ] {
            let failure = words(word).unwrap_err();
            assert!(failure.usage);
            assert_eq!(
                failure.line,
                format!("unknown option: {word}: did you mean {nearest}?"),
                "{word}"
            );
        }
    }
}
