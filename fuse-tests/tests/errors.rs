//! Every refusal of `mount` and of the commands over a journal, word by word as in
//! golden/errors.txt: one line that says what, where and what to do, exit 1 (2 for a wrong command
//! line, 8 for a `check` that could not look), and nothing left behind.
//!
//! A line of the file is "name: text"; {T} stands for the scratch directory, {PID} for a process.
//! A test without a line, a line without a test, and a message in the sources without a line fail.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fuse_tests::cleanup::unmount_path;
use fuse_tests::paths::repository;
use fuse_tests::tools::wait_for;
use fuse_tests::writeback::STATE;
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

use self::place::{Place, Stopped};

#[path = "errors/place.rs"]
mod place;

/// The golden file: name -> text.
fn golden() -> BTreeMap<String, String> {
    let path = repository().join("fuse-tests/golden/errors.txt");
    let text = fs::read_to_string(&path).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, text) = line.split_once(": ").unwrap_or_else(|| panic!("{line:?}"));
            (name.to_owned(), text.to_owned())
        })
        .collect()
}

/// Puts placeholders where a run differs from the next.
fn general(text: &str, scratch: &Path) -> String {
    let text = text.replace(scratch.to_str().unwrap(), "{T}");
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(at) =
        ["pid ", "process "].iter().filter_map(|w| rest.find(w).map(|i| i + w.len())).min()
    {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let digits = rest.chars().take_while(char::is_ascii_digit).count();
        if digits > 0 {
            out.push_str("{PID}");
            rest = &rest[digits..];
        }
    }
    out.push_str(rest);
    out
}

fn check(name: &str, code: i32, case: fn(&Place) -> Output) {
    let Some(place) = Place::new(&format!("error-{name}")) else { return };
    let before = tree(&place.at("src"));
    let output = case(&place);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    place.clean();
    let said = general(said.trim_end_matches('\n'), place.scratch.path());
    if std::env::var_os("GOLDEN").is_some() {
        println!("GOLDEN {name}: {said}");
        return;
    }
    let expected = golden().remove(name);
    assert_eq!(Some(said.as_str()), expected.as_deref(), "golden/errors.txt, {name}");
    assert_eq!(said.lines().count(), 1);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(output.stdout, b"", "{said}");
    assert_eq!(tree(&place.at("src")), before, "the source was changed");
}

fn tree(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        // A mount that fails late leaves the empty journal it made for the next one.
        .filter(|name| name != STATE)
        .collect();
    names.sort();
    names
}

/// The number of a loop device is not ours to choose.
fn nameless_loop(mut output: Output) -> Output {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let words: Vec<&str> = said.split("/dev/loop").collect();
    let digit = |c: char| c.is_ascii_digit();
    let rest = words[1..].iter().map(|word| word.trim_start_matches(digit));
    let words: Vec<&str> = [words[0]].into_iter().chain(rest).collect();
    output.stderr = words.join("{LOOP}").into();
    output
}

/// The holder of a lock is this process; libtest names its threads.
fn nameless_holder(mut output: Output) -> Output {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if let (Some(front), Some(back)) = (said.find(" ("), said.find(");")) {
        output.stderr = format!("{} (NAME{}", &said[..front], &said[back..]).into();
    }
    output
}

macro_rules! refusals {
    ($($name:ident $code:literal |$place:ident| $case:expr;)*) => {
        /// Every case of this file.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                check(stringify!($name), $code, |$place| $case);
            }
        )*
    };
}

#[path = "errors/damage.rs"]
mod damage;
#[path = "errors/layers.rs"]
mod layers;
#[path = "errors/state.rs"]
mod state;

refusals! {
    source_missing 1 |t| t.mount("absent mnt");
    source_is_a_file 1 |t| t.mount("src/file mnt");
    source_below_a_file 1 |t| t.mount("src/file/x mnt");
    source_is_a_fifo 1 |t| t.sh("mkfifo pipe && ./bcachefs-fuse mount pipe mnt");
    source_is_a_block_device 1 |t| {
        t.sh("mknod disk b 7 250 && ./bcachefs-fuse mount disk mnt")
    };
    source_is_a_symlink_loop 1 |t| {
        symlink("loop", t.at("loop")).unwrap();
        t.mount("loop mnt")
    };
    source_has_a_bcachefs_superblock 1 |t| {
        t.poke(4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef");
        t.mount("src/file mnt")
    };
    source_is_a_bcachefs_block_device 1 |t| {
        t.poke(4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef");
        let line = "L=$(losetup -f --show src/file) && ln -s $L disk && \
                    ./bcachefs-fuse mount disk mnt; C=$?; losetup -d $L; exit $C";
        nameless_loop(t.sh(line))
    };
    source_unreadable 1 |t| {
        t.give("mnt");
        fs::set_permissions(t.at("src"), fs::Permissions::from_mode(0o711)).unwrap();
        t.mount_as_nobody("src mnt")
    };
    source_under_a_dead_foreign_mount 1 |t| {
        t.dead_mount("fuse.other", "other");
        t.mount("other mnt")
    };
    source_inside_a_dead_mount 1 |t| {
        t.dead_mount("fuse.bcachefs-fuse", "other");
        t.mount("other/x mnt")
    };
    dead_mount_of_another_user 1 |t| {
        t.dead_mount("fuse.bcachefs-fuse", "mnt");
        t.mount_as_nobody("src mnt")
    };
    mountpoint_missing 1 |t| t.mount("src absent");
    mountpoint_is_a_file 1 |t| t.sh("touch file && ./bcachefs-fuse mount src file");
    mountpoint_below_a_file 1 |t| t.sh("touch file && ./bcachefs-fuse mount src file/x");
    mountpoint_inside_the_source 1 |t| t.mount("src src/inner");
    mountpoint_around_the_source 1 |t| t.mount("src .");
    mountpoint_out_of_reach 1 |t| {
        fs::set_permissions(t.at("other"), fs::Permissions::from_mode(0o700)).unwrap();
        t.mount_as_nobody("src other/x")
    };
    mountpoint_of_another_user 1 |t| t.mount_as_nobody("src mnt");
    mountpoint_in_use 1 |t| {
        t.live();
        t.mount("other mnt")
    };
    source_mounted_already 1 |t| {
        t.live();
        t.mount("src other")
    };
    source_is_a_mount 1 |t| {
        t.live();
        t.mount("mnt other")
    };
    source_in_a_mount 1 |t| {
        t.live();
        t.mount("mnt/inner other")
    };
    source_inside_a_mounted_source 1 |t| {
        t.live();
        t.mount("src/inner other")
    };
    source_around_a_mounted_source 1 |t| {
        t.live();
        t.sh("M=/run/bcachefs-fuse-errors; mkdir $M && ./bcachefs-fuse mount . $M; \
              C=$?; rmdir $M; exit $C")
    };
    source_in_a_mount_nobody_knows 1 |t| {
        t.live();
        for (file, _) in t.entries() {
            fs::remove_file(file).unwrap();
        }
        t.mount("mnt/inner other")
    };
    source_locked_by_somebody 1 |t| {
        let source = File::open(t.at("src")).unwrap();
        rustix::fs::flock(&source, FlockOperation::NonBlockingLockExclusive).unwrap();
        nameless_holder(t.mount("src mnt"))
    };
    source_still_in_use 1 |t| {
        let daemon = Stopped(t.live());
        // In a process of its own: a file open here would be flushed by every other test's fork,
        // which would wait for the stopped daemon.
        let mut user = Command::new("sh")
            .args(["-c", "exec 3<mnt/file; echo open; exec sleep 50"])
            .current_dir(t.scratch.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut word = [0; 4];
        user.stdout.take().unwrap().read_exact(&mut word).unwrap();
        unmount_path(&t.at("mnt"), UnmountFlags::DETACH).unwrap();
        // It cannot hear that it should stop.
        kill_process(daemon.0, Signal::STOP).unwrap();
        let output = t.mount("src mnt");
        drop(daemon);
        // The next mount would remove it.
        t.entries().into_iter().for_each(|(file, _)| fs::remove_file(file).unwrap());
        user.kill().unwrap();
        user.wait().unwrap();
        output
    };
    log_below_the_mountpoint 1 |t| t.mount("-o log=mnt/log src mnt");
    trace_below_the_mountpoint 1 |t| t.mount("-o trace=src/trace src src");
    state_below_the_mountpoint 1 |t| t.mount("-o state=mnt/state src mnt");
    log_without_a_directory 1 |t| t.mount("-o log=absent/log src mnt");
    no_dev_fuse 1 |t| {
        t.apart("mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3",
            "./bcachefs-fuse mount src mnt")
    };
    no_power_to_mount 1 |t| {
        t.sh("exec setpriv --bounding-set -sys_admin --inh-caps -sys_admin \
              ./bcachefs-fuse mount src mnt")
    };
    no_fusermount3 1 |t| {
        t.give("mnt");
        t.give("run");
        t.apart("for f in /usr/bin/fusermount3 /bin/fusermount3; do \
                   mount --bind /dev/null $f 2>/dev/null; done; true",
            "XDG_RUNTIME_DIR=$PWD/run setpriv --reuid 65534 --regid 65534 --clear-groups \
             ./bcachefs-fuse mount src mnt")
    };
    allow_other_for_root_only 1 |t| {
        t.give("mnt");
        t.give("run");
        t.apart("echo >conf && mount --bind conf /etc/fuse.conf",
            "XDG_RUNTIME_DIR=$PWD/run setpriv --reuid 65534 --regid 65534 --clear-groups \
             ./bcachefs-fuse mount -o allow_other src mnt")
    };
    runtime_directory_of_somebody_else 1 |t| {
        fs::create_dir(t.at("run/bcachefs-fuse")).unwrap();
        t.give("mnt");
        t.mount_as_nobody("src mnt")
    };
    runtime_directory_is_a_file 1 |t| {
        fs::write(t.at("run/bcachefs-fuse"), "").unwrap();
        t.give("mnt");
        t.mount_as_nobody("src mnt")
    };
    registry_not_writable 1 |t| {
        fs::create_dir_all(t.at("run/bcachefs-fuse/lock")).unwrap();
        fs::set_permissions(t.at("run/bcachefs-fuse"), fs::Permissions::from_mode(0o700)).unwrap();
        t.give("run/bcachefs-fuse");
        t.give("mnt");
        t.mount_as_nobody("src mnt")
    };
    control_socket_not_ours 1 |t| {
        fs::create_dir(t.at("run/bcachefs-fuse")).unwrap();
        fs::set_permissions(t.at("run/bcachefs-fuse"), fs::Permissions::from_mode(0o700)).unwrap();
        // The number of the next mount is not ours to choose.
        for minor in 0..512 {
            fs::create_dir(t.at(&format!("run/bcachefs-fuse/0-{minor}.sock"))).unwrap();
        }
        t.give("run/bcachefs-fuse");
        t.give("mnt");
        let mut output = t.mount_as_nobody("src mnt");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (front, back) = (said.find("/0-").unwrap(), said.find(".sock").unwrap());
        output.stderr = format!("{}/0-MINOR{}", &said[..front], &said[back..]).into();
        output
    };
    detached_while_in_use 1 |t| {
        let mut child = Command::new(t.at("bcachefs-fuse"))
            .args(["mount", "-f", "src", "mnt"])
            .env("RUST_LOG", "off")
            .current_dir(t.scratch.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = wait_for(Duration::from_secs(10), || File::open(t.at("mnt/file")).ok());
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::TERM).unwrap();
        // Signals of one number do not queue.
        std::thread::sleep(Duration::from_millis(300));
        kill_process(pid, Signal::TERM).unwrap();
        let ended = wait_for(Duration::from_secs(10), || child.try_wait().unwrap());
        if ended.is_none() {
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        drop(ready.unwrap());
        output
    };
    cache_too_small 2 |t| t.mount("-o cache=512K src mnt");
    block_size_not_a_power_of_two 2 |t| t.mount("-o block-size=3000 src mnt");
    nonsense_size 2 |t| t.mount("-o cache=lots src mnt");
    unknown_option 2 |t| t.mount("-o cash=64M src mnt");
}

#[test]
fn every_line_has_its_test() {
    let golden = golden();
    let lines: Vec<&str> = golden.keys().map(String::as_str).collect();
    let mut tests = [NAMES, state::NAMES, damage::NAMES, layers::NAMES].concat();
    tests.sort_unstable();
    assert_eq!(lines, tests, "left: golden/errors.txt, right: tests");
}

/// The first words of every message in the sources of `mount`.
#[test]
fn every_message_has_its_line() {
    let golden = golden();
    let mut files: Vec<PathBuf> =
        ["src/cli/run.rs", "src/fuse/mount.rs", "src/fuse/fusermount.rs", "src/cli/journal.rs"]
            .map(PathBuf::from)
            .to_vec();
    for directory in ["src/cli/run", "src/cli/run/state", "src/cli/journal"] {
        let below = fs::read_dir(repository().join(directory)).unwrap().flatten();
        let sources = below.map(|file| file.path()).filter(|path| path.is_file());
        files.extend(sources.filter(|path| !path.ends_with("tests.rs")));
    }
    let untested = [
        // Need a kernel or a system that fails in a way a test cannot make.
        "the FUSE session broke",
        "no writeback without file handles or birth times",
        "not a journal of this user",
        "write",
        // Need a terminal.
        "nothing was changed",
    ];
    let mut seen = 0;
    for file in files {
        let text = fs::read_to_string(repository().join(&file)).unwrap();
        for start in ["Failure::new(", "Refusal::new(", "MountError::new(", "words(", "what: "] {
            for (at, _) in text.match_indices(start) {
                let Some(rest) = text[at + start.len()..].trim_start().strip_prefix('"') else {
                    continue;
                };
                let message = &rest[..rest.find('"').unwrap()];
                let words = message.split('{').next().unwrap();
                let found = golden.values().any(|line| line.contains(words));
                assert!(found || untested.contains(&words), "{}: {message:?}", file.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 15, "only {seen} messages were found: has the code another form now?");
}
