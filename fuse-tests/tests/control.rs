//! The control socket on real mounts: stat, set, list, trace, umount, and who may ask.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use fuse_tests::tools::{self, wait_for};
use fuse_tests::users::{ALICE, run_as};
use fuse_tests::{Mount, paths, report, try_run};

const MIB: usize = 1 << 20;

/// Two images of 2 MiB.
fn two_images(source: &Path) {
    for (seed, name) in [(1, "a.img"), (2, "b.img")] {
        tools::write_synced(&source.join(name), &tools::pattern(seed, 2 * MIB));
    }
}

/// Reads a file through the mount past the page cache, in requests of 128 KiB.
fn read_direct(path: &Path) {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).custom_flags(direct).open(path).unwrap();
    let mut space = vec![0u8; 132 << 10];
    let start = space.as_ptr().align_offset(4096);
    let buffer = &mut space[start..start + (128 << 10)];
    let mut offset = 0;
    loop {
        match file.read_at(buffer, offset).unwrap() {
            0 => return,
            read => offset += read as u64,
        }
    }
}

/// Runs the binary under test.
fn ask(args: &[&str]) -> Output {
    try_run(paths::binary(), args)
}

/// Its output; it must succeed.
fn answer(args: &[&str]) -> String {
    let output = ask(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Its one line of complaint and its exit code.
fn refusal(args: &[&str]) -> (String, i32) {
    let output = ask(args);
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{args:?} succeeded");
    assert_eq!(line.lines().count(), 1, "{args:?}: {line}");
    assert!(line.starts_with("bcachefs-fuse: "), "{line}");
    (line.trim_end().to_string(), output.status.code().unwrap())
}

fn path(mount: &Mount) -> String {
    mount.path().to_str().unwrap().to_string()
}

fn socket(mount: &Mount) -> Option<PathBuf> {
    let device = rustix::fs::stat(mount.path()).unwrap().st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = format!("/run/bcachefs-fuse/{major}-{minor}.sock");
    Path::new(&path).exists().then(|| path.into())
}

#[test]
fn stat_counts_devices_and_narrows() {
    let Some(mount) = Mount::builder("stat").option("cache=64M").prepare(two_images).start() else {
        return;
    };
    let root = path(&mount);
    let idle = "no reads reached the daemon: the kernel's page cache answers buffered re-reads";
    assert!(answer(&["stat", &root]).contains(idle));
    for name in ["a.img", "a.img", "b.img"] {
        read_direct(&mount.at(name));
    }
    let stat = mount.stat_json("");
    assert_eq!(stat["schema"], 1);
    let total = &stat["snapshot"]["total"];
    let number = |name: &str| total[name].as_u64().unwrap();
    assert_eq!(number("ops"), 48, "{total}");
    assert_eq!(number("hits") + number("misses") + number("bypassed"), 3 * 512);
    assert!(number("hits") >= 512);
    // C2 for one device, and only that device.
    let one = mount.stat_json("b.img");
    let unit = one["unit"].as_u64().unwrap();
    let devices = one["snapshot"]["devices"].as_array().unwrap();
    let b = devices.iter().find(|d| d["unit"].as_u64() == Some(unit)).unwrap();
    assert_eq!((b["path"].as_str(), b["counters"]["ops"].as_u64()), (Some("b.img"), Some(16)));

    let text = answer(&["stat", &root]);
    let line = format!(
        "{} ops {} bypasses {} hits {} misses\n",
        number("ops"),
        number("bypasses"),
        number("hits"),
        number("misses")
    );
    assert!(text.contains(&line), "{text}");
    let narrow = answer(&["stat", mount.at("a.img").to_str().unwrap()]);
    assert!(narrow.contains("a.img") && !narrow.contains("b.img"), "{narrow}");
    let blocks = answer(&["stat", "--blocks", mount.at("b.img").to_str().unwrap()]);
    assert_eq!(blocks.lines().count(), 128);
    assert_eq!(blocks.matches(&format!("{unit}:")).count(), 512);
    let metrics = answer(&["stat", "--prometheus", &root]);
    assert!(metrics.contains(&format!("bcachefs_fuse_hits_total{{mountpoint=\"{root}\"}} ")));
    assert_eq!(answer(&["stat", "--errors", &root]), "");
    let (line, code) = refusal(&["stat", &format!("{root}/missing.img")]);
    assert!(line.contains("missing.img") && code == 1, "{line}");
}

#[test]
fn set_changes_a_live_mount_all_or_nothing() {
    let Some(mount) = Mount::builder("set").option("cache=64M").prepare(two_images).start() else {
        return;
    };
    let root = path(&mount);
    let value = |name: &str| {
        let list = answer(&["set", &root]);
        let line = list.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.split_whitespace().nth(1).unwrap().to_string()
    };
    assert_eq!((value("cache"), value("expire")), ("64M".into(), "0s".into()));
    assert_eq!(answer(&["set", &root, "expire=30s", "sequential-cutoff=8M"]), "");
    assert_eq!((value("expire"), value("sequential_cutoff")), ("30s".into(), "8M".into()));
    let (line, code) = refusal(&["set", &root, "expire=1s", "bypass=32M"]);
    assert!(line.contains("cache too small") && code == 1, "{line}");
    let (line, _) = refusal(&["set", &root, "expire=1s", "threads=4"]);
    assert!(line.contains("not changeable on a live mount: threads"), "{line}");
    let (line, code) = refusal(&["set", &root, "expirre=1s"]);
    assert!(line.ends_with("unknown option: expirre: did you mean expire?") && code == 2);
    assert_eq!(value("expire"), "30s");

    read_direct(&mount.at("a.img"));
    let resident =
        |mount: &Mount| mount.stat_json("")["snapshot"]["resident_blocks"].as_u64().unwrap();
    assert_eq!(resident(&mount), 512);
    answer(&["set", &root, "cache-mode=none"]);
    assert_eq!(resident(&mount), 0);
    read_direct(&mount.at("a.img"));
    assert_eq!(resident(&mount), 0);
    assert!(answer(&["stat", &root]).contains("cache_mode is none, nothing is cached"));
}

fn spawn(args: &[&str]) -> Child {
    let mut command = Command::new(paths::binary());
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Reads until the recording shows requests; it begins some time after its command does.
fn record(mount: &Mount, file: &Path) {
    let begun = wait_for(Duration::from_secs(10), || file.exists().then_some(()));
    begun.expect("the recording begins");
    read_direct(&mount.at("a.img"));
}

#[test]
fn a_trace_is_recorded_and_ends_with_its_command() {
    let Some(mount) = Mount::builder("trace").prepare(two_images).start() else { return };
    let root = path(&mount);
    let files = ["one", "two", "three"].map(|name| mount.scratch().join(name));
    let [one, two, three] = files.each_ref().map(|file| file.to_str().unwrap());
    let child = spawn(&["trace", &root, one, "2"]);
    record(&mount, &files[0]);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, format!("16 read requests recorded in {one}\n"));
    let text = fs::read_to_string(one).unwrap();
    let lines: Vec<Vec<u64>> = text
        .lines()
        .map(|line| line.split(' ').map(|number| number.parse().unwrap()).collect())
        .collect();
    assert_eq!(lines.len(), 16, "{text}");
    assert!(lines.iter().all(|line| line.len() == 3 && line[2] == 32), "{text}");
    assert_eq!(lines.iter().map(|line| line[1]).max(), Some(480));

    // Ctrl-C ends it in order, kill -9 ends it too.
    let mut child = spawn(&["trace", &root, two]);
    record(&mount, &files[1]);
    let (line, _) = refusal(&["trace", &root, three, "1"]);
    assert!(line.contains("a recording runs"), "{line}");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(two).unwrap().lines().count(), 16);
    let mut child = spawn(&["trace", &root, three]);
    record(&mount, &files[2]);
    child.kill().unwrap();
    child.wait().unwrap();
    let again = wait_for(Duration::from_secs(5), || {
        ask(&["trace", &root, one, "0"]).status.success().then_some(())
    });
    again.expect("a killed recording makes room");
    let inside = mount.at("t.trace");
    let (line, _) = refusal(&["trace", &root, inside.to_str().unwrap(), "1"]);
    assert!(line.contains("give a file outside of the mount"), "{line}");
    assert!(!inside.exists());
}

#[test]
fn watch_prints_lines_until_nobody_reads() {
    let Some(mount) = Mount::builder("watch").prepare(two_images).start() else { return };
    let mut child = spawn(&["stat", "--watch", "100ms", &path(&mount)]);
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.starts_with("0 ops/s 0 bypasses/s 0 hits/s 0 misses/s - hit"), "{line}");
    let reads = mount.at("a.img");
    let busy = wait_for(Duration::from_secs(10), || {
        read_direct(&reads);
        line.clear();
        reader.read_line(&mut line).unwrap();
        (!line.starts_with("0 ops/s")).then_some(())
    });
    busy.expect("rates of reads");
    drop(reader);
    assert!(child.wait().unwrap().success());
}

#[test]
fn others_ask_where_they_may_enter_and_change_nothing() {
    if !report::have_root("acting as another user") {
        return;
    }
    let open = Mount::builder("open").prepare(two_images).start();
    let shut = Mount::builder("shut").option("allow_other=no").prepare(two_images).start();
    let (Some(open), Some(shut)) = (open, shut) else { return };
    let (open_path, shut_path) = (path(&open), path(&shut));
    let binary = paths::binary();
    let as_alice = |what: &str| run_as(ALICE, &format!("{} {what}", binary.display()));
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for what in ["stat", "stat --json", "stat --blocks", "stat --errors"] {
        let output = as_alice(&format!("{what} {open_path}"));
        assert!(output.status.success(), "{what}: {}", said(&output));
        let output = as_alice(&format!("{what} {shut_path}"));
        assert!(said(&output).contains("ask as the user who mounted it, or as root"), "{what}");
    }
    let trace = open.scratch().join("t");
    for what in [
        format!("set {open_path}"),
        format!("set {open_path} expire=1s"),
        format!("trace {open_path} {} 1", trace.display()),
    ] {
        let output = as_alice(&what);
        assert_eq!(output.status.code(), Some(1), "{what}");
        assert!(said(&output).contains("not permitted"), "{what}: {}", said(&output));
    }
    let output = as_alice(&format!("umount {open_path}"));
    assert!(said(&output).contains("cannot unmount"), "{}", said(&output));
    let list = String::from_utf8(as_alice("list").stdout).unwrap();
    assert!(list.contains(&open_path) && !list.contains(&shut_path), "{list}");
    let list = answer(&["list", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let mounts = list["mounts"].as_array().unwrap();
    for path in [&open_path, &shut_path] {
        let ours = mounts.iter().find(|m| m["mountpoint"] == **path).unwrap();
        assert_eq!((ours["state"].as_str(), ours["uid"].as_u64()), (Some("rw"), Some(0)));
    }
    assert_eq!(open.stat_json("")["expire_ms"], 0);
}

#[test]
fn check_is_silent_while_all_is_well() {
    if !report::have_root("a socket in /run") {
        return;
    }
    let Some(mut mount) = Mount::builder("check").prepare(two_images).start() else { return };
    let root = path(&mount);
    let below = mount.at("a.img");
    for place in [&*root, below.to_str().unwrap()] {
        assert_eq!(answer(&["stat", "--check", "--max-age", "1h", place]), "");
    }
    let socket = socket(&mount).expect("a socket in /run");
    mount.kill();
    let (line, code) = refusal(&["stat", "--check", &root]);
    assert!(line.contains("the daemon is gone") && line.contains(&root) && code == 1, "{line}");
    assert!(socket.exists());
    let list = answer(&["list"]);
    let ours = list.lines().find(|line| line.starts_with(&root)).unwrap();
    assert!(ours.ends_with("unanswered"), "{ours}");
    assert!(!socket.exists(), "list removes the socket of a dead daemon");
    // No daemon is needed to take a dead mount away.
    assert_eq!(answer(&["umount", &root]), "");
    let (line, _) = refusal(&["umount", &root]);
    assert!(line.contains("not on a mount of bcachefs-fuse"), "{line}");
}

#[test]
fn a_socket_that_is_not_ours_is_named() {
    if !report::have_root("a socket in /run") {
        return;
    }
    let Some(mount) = Mount::builder("foreign").prepare(two_images).start() else { return };
    // Answered: the socket is the daemon's, not one that a dead mount of this number left.
    answer(&["stat", &path(&mount)]);
    let socket = socket(&mount).expect("a socket in /run");
    let aside = socket.with_extension("aside");
    fs::rename(&socket, &aside).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let answering = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 512]);
        stream.write_all(b"220 ready\n").unwrap();
    });
    let (line, code) = refusal(&["stat", &path(&mount)]);
    answering.join().unwrap();
    fs::rename(&aside, &socket).unwrap();
    assert!(line.contains("not a control socket of ours") && code == 1, "{line}");
    assert!(line.contains(socket.to_str().unwrap()), "{line}");
    assert!(ask(&["stat", &path(&mount)]).status.success());
}

#[test]
fn umount_waits_for_the_daemon_and_says_who_is_in_the_way() {
    let Some(mut mount) = Mount::builder("umount").prepare(two_images).start() else { return };
    let root = path(&mount);
    let held = File::open(mount.at("a.img")).unwrap();
    let (line, code) = refusal(&["umount", &root]);
    let file = mount.at("a.img");
    let holder = format!("(pid {}, open file {})", std::process::id(), file.display());
    assert!(line.contains(": busy: ") && line.contains(&holder) && code == 1, "{line}");
    assert!(rustix::fs::fstat(held.as_fd()).is_ok());
    drop(held);
    // A path below the mountpoint will do; afterwards only the exit status is left of the daemon.
    let pid = mount.pid();
    assert_eq!(answer(&["umount", mount.at("a.img").to_str().unwrap()]), "");
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert!(state.contains(") Z "), "{state}");
    assert!(mount.ended().success());
}
