//! The command line without and with mount(8): help, errors, the helpers, fstab lines.
//!
//! mount(8) looks for helpers in /sbin only, and users' lines are read from /etc/fstab only. The
//! tests show both to it inside a mount namespace of their own; the machine's stay untouched.

#[path = "cli/flush.rs"]
mod flush;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use fuse_tests::paths::{self, Scratch};
use fuse_tests::users::{ALICE, BOB};
use fuse_tests::watch::Watchdog;
use fuse_tests::{report, try_run};

fn ask(args: &[&str]) -> Output {
    try_run(paths::binary(), args)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn every_command_has_help_with_examples() {
    let commands = [
        "mount",
        "flush",
        "umount",
        "stat",
        "set",
        "list",
        "trace",
        "check",
        "journal",
        "doctor",
        "completions",
    ];
    for command in commands {
        let output = ask(&[command, "--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success() && output.stderr.is_empty(), "{command}");
        assert!(help.contains("Examples:") && help.is_ascii(), "{help}");
        assert!(help.contains(&format!("bcachefs-fuse {command}")), "{help}");
    }
    for command in ["dump", "replay", "abandon"] {
        let help = text(&ask(&["journal", command, "--help"]).stdout);
        assert!(help.contains("Exit codes:") && help.is_ascii(), "{help}");
        assert!(help.contains(&format!("bcachefs-fuse journal {command} ")), "{help}");
    }
    let help = text(&ask(&["--help"]).stdout);
    assert!(commands.iter().all(|command| help.contains(&format!("\n  {command} "))), "{help}");
    let version = format!("bcachefs-fuse {}\n", env!("CARGO_PKG_VERSION"));
    for args in [&["--version"][..], &["-V"], &["mount", "-V"]] {
        assert_eq!(text(&ask(args).stdout), version);
    }
}

#[test]
fn a_wrong_command_line_is_one_line_and_exit_2() {
    for (args, line) in [
        (
            &["mount", "-o", "chache=1M", "/a", "/b"][..],
            "unknown option: chache=1M: did you mean cache?",
        ),
        (
            &["mount", "--block_size=3000", "/a", "/b"],
            "bad value: block_size=3000: give a power of two from 512 to 1M",
        ),
        (
            &["mount", "--cache", "512K", "/a", "/b"],
            "cache too small: cache=512K: 4 x bypass (1M) is the least; raise cache or lower \
             bypass",
        ),
        (
            &["mount", "-o", "cache-mode=fast", "/a", "/b"],
            "bad value: cache_mode=fast: give writeback, writethrough, writearound or none",
        ),
        (
            &["mount", "/a"],
            "command line: the following required arguments were not provided: <MOUNTPOINT>: \
             see bcachefs-fuse mount --help",
        ),
        (&["stat", "--watch=0", "/"], "bad value: watch=0: give a time such as 2 or 500ms"),
    ] {
        let output = ask(args);
        assert_eq!(text(&output.stderr), format!("bcachefs-fuse: {line}\n"));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
    for args in [
        &["stat", "/"][..],
        &["umount", "/"],
        &["flush", "/"],
        &["set", "/proc"],
        &["trace", "/", "/t"],
    ] {
        let output = ask(args);
        let line = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(line.contains("not on a mount of bcachefs-fuse") && line.lines().count() == 1);
    }
}

#[test]
fn the_manual_page_and_completions_are_printed() {
    let page = text(&ask(&["man"]).stdout);
    assert!(page.contains(".TH BCACHEFS-FUSE 1") && page.contains(".SH MOUNT OPTIONS"));
    for shell in ["bash", "zsh", "fish"] {
        let output = ask(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("cache-mode"));
    }
}

/// A namespace where mount(8) finds our helpers and an fstab of the test's.
struct Namespace {
    scratch: Scratch,
    _watchdog: Watchdog,
}

/// What every script of a test begins with. /run and /dev/fuse are the namespace's own: sockets
/// of other mounts are out of sight, and users may open the device as on any ordinary system.
const SETUP: &str = "
    set -eu
    mount -t overlay overlay -o \"lowerdir=$T/sbin:/usr/sbin\" /usr/sbin
    mount --bind \"$T/fstab\" /etc/fstab
    mount --bind \"$T/passwd\" /etc/passwd
    mount -t tmpfs run /run
    mkdir -p -m 755 /run/user && mkdir -m 700 \"/run/user/$ALICE\"
    chown \"$ALICE:$ALICE\" \"/run/user/$ALICE\"
    mknod \"$T/private/fuse\" c 10 229 && chmod 666 \"$T/private/fuse\"
    mount --bind \"$T/private/fuse\" /dev/fuse
    cd /
    export LC_ALL=C
    unset XDG_RUNTIME_DIR
    as() { uid=$1; shift; setpriv --reuid $uid --regid $uid --clear-groups \"$@\"; }
    fails() { code=$1; shift; set +e; said=$(\"$@\" 2>&1); got=$?; set -e; echo \"$said\";
              [ $got = $code ] || { echo \"exit $got, not $code: $*\" >&2; exit 1; }; }
    gone() { ! findmnt \"$1\" && [ -z \"$(ls /run/bcachefs-fuse/*.sock 2>/dev/null)\" ]; }
    trap 'umount -l \"$T/m\" \"$T/home/m\" 2>/dev/null || :' EXIT
";

impl Namespace {
    /// None: the running test was reported as skipped.
    fn new(name: &str) -> Option<Namespace> {
        if !report::have_fuse() || !report::have_root("mount(8) in a namespace of its own") {
            return None;
        }
        let scratch = Scratch::new(name);
        let at = |below: &str| scratch.path().join(below);
        for dir in ["s", "m", "sbin", "home", "home/m", "private"] {
            fs::create_dir(at(dir)).unwrap();
            fs::set_permissions(at(dir), fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::set_permissions(at("private"), fs::Permissions::from_mode(0o700)).unwrap();
        chown(at("home/m"), Some(ALICE), Some(ALICE)).unwrap();
        fs::write(at("s/a.img"), "image").unwrap();
        for helper in ["mount.fuse.bcachefs-fuse", "umount.fuse.bcachefs-fuse"] {
            symlink(paths::binary(), at("sbin").join(helper)).unwrap();
        }
        let root = scratch.path().display();
        let lines = format!(
            "{root}/s {root}/m fuse.bcachefs-fuse cache=64M,nofail,noexec,x-a.b=c 0 0\n\
             {root}/s {root}/home/m fuse.bcachefs-fuse user,noauto,ro 0 0\n"
        );
        fs::write(at("fstab"), lines).unwrap();
        let users = fs::read_to_string("/etc/passwd").unwrap();
        fs::write(at("passwd"), format!("{users}alice:x:{ALICE}:{ALICE}::/:/bin/sh\n")).unwrap();
        Some(Namespace { scratch, _watchdog: Watchdog::new(std::time::Duration::from_secs(120)) })
    }

    /// Runs a script in a new namespace; it must succeed. Returns what it printed.
    fn run(&self, script: &str) -> String {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("{SETUP}{script}")]);
        command.env("T", self.scratch.path()).env("B", paths::binary());
        command.env("ALICE", ALICE.to_string()).env("BOB", BOB.to_string());
        command.env("PATH", fuse_tests::tools::path_with_sbin()).stdin(Stdio::null());
        let output = command.output().expect("unshare (util-linux)");
        let said = text(&output.stdout);
        assert!(output.status.success(), "{script}\nsaid:\n{said}{}", text(&output.stderr));
        said
    }

    fn path(&self, below: &str) -> PathBuf {
        self.scratch.path().join(below)
    }
}

#[test]
fn mount_8_mounts_remounts_and_unmounts() {
    let Some(namespace) = Namespace::new("mount8") else { return };
    let source = namespace.path("s").display().to_string();
    let said = namespace.run(
        "
        mount -t fuse.bcachefs-fuse -o cache=64M,nosuid,noatime $T/s $T/m
        findmnt -no SOURCE,FSTYPE,OPTIONS $T/m
        df --output=source $T/m | tail -1
        cat $T/m/a.img; echo
        mount -o remount,ro $T/m
        fails 1 touch $T/m/new
        findmnt -no OPTIONS $T/m
        mount -o remount,rw $T/m
        touch $T/m/new; rm $T/m/new
        fails 32 mount -o remount,cache=128M $T/m
        fails 32 mount -o remount,expire=2s $T/m
        mount -o remount,cache=64M $T/m
        umount $T/m
        gone $T/m",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with(&format!("{source} fuse.bcachefs-fuse rw,nosuid,noatime")));
    assert_eq!((lines[1], lines[2]), (source.as_str(), "image"), "{said}");
    assert!(lines[3].contains("Read-only file system"), "{said}");
    assert!(lines[4].starts_with("ro,"), "{said}");
    assert!(lines[5].contains("not changeable by remount: cache=128M: unmount and mount with it"));
    assert!(lines[5].contains("bcachefs-fuse set "), "{said}");
    assert!(lines[6].ends_with("expire=..."), "{said}");
    assert_eq!(lines.len(), 7, "{said}");
}

#[test]
fn fstab_lines_of_root_and_of_users() {
    let Some(namespace) = Namespace::new("fstab") else { return };
    let said = namespace.run(
        "
        mount -a -T $T/fstab
        mount -a -T $T/fstab
        findmnt -no OPTIONS $T/m
        [ $(findmnt -no TARGET $T/m | wc -l) = 1 ]
        mount -o remount,ro $T/m; mount -o remount,rw $T/m
        exec 3< $T/m/a.img
        fails 32 umount $T/m
        exec 3<&-
        umount $T/m
        gone $T/m",
    );
    assert!(said.starts_with("rw,noexec,"), "{said}");
    // Root's plain umount(8) takes the type from statfs(2), "fuse", and finds no helper; the x-
    // word of this line makes it read its own table, and then it calls ours.
    assert!(said.contains("bcachefs-fuse: busy: "), "{said}");
    let said = namespace.run(
        "
        as $ALICE mount $T/home/m
        findmnt -no OPTIONS $T/home/m
        as $ALICE cat $T/home/m/a.img; echo
        as $ALICE $B stat $T/home/m/a.img > /dev/null
        $B list
        $B stat --check $T/home/m
        as $ALICE $B set $T/home/m expire=1s
        fails 1 as $BOB $B stat $T/home/m
        fails 32 as $BOB umount $T/home/m
        as $ALICE umount $T/home/m
        gone $T/home/m",
    );
    let lines: Vec<&str> = said.lines().collect();
    let options = format!("user_id={ALICE},group_id={ALICE}");
    assert!(lines[0].starts_with("ro,nosuid,nodev,noexec,") && lines[0].contains(&options));
    assert!(!lines[0].contains("default_permissions"), "{said}");
    assert_eq!(lines[1], "image");
    assert!(said.contains(&namespace.path("home/m").display().to_string()));
    assert!(said.contains("ask as the user who mounted it, or as root"), "{said}");
}

#[test]
fn umount_knows_who_is_inside_and_who_is_below() {
    let Some(namespace) = Namespace::new("inside") else { return };
    let said = namespace.run(
        "
        cd $T/s; sleep 60 > /dev/null & below=$!; cd /
        mount -t fuse.bcachefs-fuse $T/s $T/s
        cd $T/s; sleep 60 > /dev/null & inside=$!; cd /
        fails 1 $B umount $T/s
        fails 32 umount $T/s
        kill $inside
        wait $inside || :
        $B umount $T/s
        kill $below
        gone $T/s",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("busy: ") && lines[0].contains(", working directory /"), "{said}");
    assert_eq!(lines[0].matches("(pid ").count(), 1, "{said}");
    assert_eq!(lines.len(), 2, "{said}");
}

#[test]
fn a_helper_fails_with_32_and_leaves_nothing() {
    let Some(namespace) = Namespace::new("helper") else { return };
    let said = namespace.run(
        "
        H=/sbin/mount.fuse.bcachefs-fuse
        fails 32 mount -t fuse.bcachefs-fuse -o chache=1M $T/s $T/m
        fails 32 mount -t fuse.bcachefs-fuse $T/missing $T/m
        fails 32 $H $T/s
        fails 32 $H $T/s $T/m -x
        fails 32 /sbin/umount.fuse.bcachefs-fuse $T/m
        mount -f -t fuse.bcachefs-fuse $T/s $T/m
        gone $T/m
        mount -s -t fuse.bcachefs-fuse -o chache=1M,cache=64M $T/s $T/m
        $B set $T/m | grep '^cache '
        exec 3< $T/m/a.img
        fails 32 /sbin/umount.fuse.bcachefs-fuse $T/m
        umount -l $T/m
        exec 3<&-
        for i in 1 2 3 4 5 6 7 8 9 10; do gone $T/m && exit 0; sleep 0.3; done; exit 1",
    );
    let lines: Vec<&str> = said.lines().collect();
    for line in [&lines[..5], &lines[6..7]].concat() {
        assert!(line.starts_with("bcachefs-fuse: "), "{said}");
    }
    assert!(lines[0].ends_with("unknown option: chache=1M: did you mean cache?"), "{said}");
    assert!(lines[5].contains("64M") && lines[6].contains(": busy: "), "{said}");
}
