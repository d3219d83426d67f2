//! The life of a mount: made, served, ended, on real mounts.

#[path = "lifecycle/place.rs"]
mod place;

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use bcachefs_fuse::config::MountConfig;
use bcachefs_fuse::fuse::mount::{How, Outcome};
use bcachefs_fuse::fuse::session::{self, End};
use fuse_tests::cleanup::mount_at;
use fuse_tests::paths::{Scratch, binary};
use fuse_tests::tools::{sh, wait_for};
use fuse_tests::users::{BOB, run_as};
use fuse_tests::{Mount, report, run};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

use place::*;

#[test]
fn a_session_of_any_filesystem_from_mount_to_end() {
    let Some(place) = Place::root("session") else { return };
    let config = MountConfig {
        source: "/nowhere".into(),
        upper: None,
        lowers: Vec::new(),
        mountpoint: place.mountpoint.clone(),
        read_only: false,
        allow_other: true,
        attr_timeout: Duration::from_secs(1),
        fsname: "/srv/a, b".into(),
        threads: 4,
        flags: vec!["nosuid".into(), "noatime".into()],
        test_panic: None,
    };
    let serving = session::serve(Empty, &config, 0o040755, |_| {}).unwrap();
    let line = mount_at(&place.mountpoint).unwrap();
    assert!(serving.mount().is_mounted());
    assert_eq!(line.fstype, "fuse.bcachefs-fuse");
    assert_eq!(line.source, "/srv/a, b");
    assert_eq!(line.options, "rw,nosuid,noatime");
    assert!(line.super_options.contains("default_permissions,allow_other"), "{line:?}");
    assert_eq!(serving.mount().unmount(How::Politely), Outcome::Gone);
    assert_eq!(serving.run_to_end(|_| {}), End::Unmounted);
    assert_eq!(serving.mount().unmount(How::Politely), Outcome::Gone);
    assert!(!serving.mount().is_mounted());
}

#[test]
fn a_daemon_returns_once_it_is_mounted() {
    let Some(place) = Place::root("daemon") else { return };
    // Relative paths, and a caller's directory that is free again.
    let line = format!("{} mount src mnt", binary().display());
    assert_eq!(sh(place.scratch.path(), &line), "", "a success in a pipe is silent");
    assert_eq!(fs::read_to_string(place.mountpoint.join("file")).unwrap(), "content");
    let pid = pid_of(&place.mountpoint).as_raw_pid();
    let link = |name: &str| fs::read_link(format!("/proc/{pid}/{name}")).unwrap();
    assert_eq!(link("cwd"), Path::new("/"));
    for stream in ["fd/0", "fd/1", "fd/2"] {
        assert_eq!(link(stream), Path::new("/dev/null"));
    }
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    for task in tasks {
        assert_eq!(fs::read_link(task.path().join("cwd")).unwrap(), Path::new("/"));
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(session, pid.to_string(), "a session of its own");
}

#[test]
fn mounted_over_itself() {
    let Some(place) = Place::root("itself") else { return };
    assert!(place.mount(&[], &place.source).status.success());
    fs::write(place.source.join("new"), "through the mount").unwrap();
    assert_eq!(mount_at(&place.source).unwrap().fstype, "fuse.bcachefs-fuse");
    let again = place.mount(&[], &place.source);
    assert!(words(&again).contains("SOURCE is a mount of bcachefs-fuse"), "{}", words(&again));
    let pid = pid_of(&place.source);
    run("umount", &[&place.source]);
    assert!(gone(pid));
    assert_eq!(fs::read_to_string(place.source.join("new")).unwrap(), "through the mount");
}

#[test]
fn after_kill_9_mounting_again_works() {
    let Some(place) = Place::root("kill9") else { return };
    for onto in [&place.mountpoint, &place.source] {
        for round in 0..3 {
            let output = place.mount(&[], onto);
            assert!(output.status.success(), "round {round}: {}", words(&output));
            assert_eq!(fs::read_to_string(onto.join("file")).unwrap(), "content");
            kill_process(pid_of(onto), Signal::KILL).unwrap();
        }
        let output = place.mount(&[], onto);
        assert!(output.status.success(), "{}", words(&output));
        let lines = fuse_tests::cleanup::mounts_below(place.scratch.path());
        assert_eq!(lines.len(), 1, "dead mounts are detached: {lines:?}");
        let pid = pid_of(onto);
        run("umount", &[onto]);
        assert!(gone(pid));
    }
}

#[test]
fn a_source_has_one_mount() {
    let Some(place) = Place::root("one") else { return };
    let (inner, other) = (place.source.join("inner"), place.scratch.path().join("other"));
    fs::create_dir(&inner).unwrap();
    fs::create_dir(&other).unwrap();
    assert!(place.mount(&[], &place.mountpoint).status.success());
    let pid = pid_of(&place.mountpoint).as_raw_pid();
    let who =
        format!("pid {pid} shows {} on {}", place.source.display(), place.mountpoint.display());
    let inner_on_mount = place.mountpoint.join("inner");
    for (source, what) in [
        (place.source.as_path(), "SOURCE is mounted already"),
        (&inner, "SOURCE lies inside a mounted source"),
        (place.scratch.path(), "SOURCE lies around a mounted source"),
        (&place.mountpoint, "SOURCE is a mount of bcachefs-fuse"),
        (&inner_on_mount, "SOURCE lies in a mount of bcachefs-fuse"),
    ] {
        // Outside of the scratch directory: it is a source itself.
        let onto = if source == place.scratch.path() { Path::new("/mnt") } else { &other };
        let output = mount(&[], source, onto);
        assert_eq!(output.status.code(), Some(1));
        assert!(words(&output).contains(what), "{what}: {}", words(&output));
        assert!(words(&output).contains(&who), "{what}: {}", words(&output));
    }
    // Under other names, too.
    for (bound, source, what) in
        [(&inner, &other, "inside"), (&place.source, &other.join("inner"), "inside")]
    {
        run("mount", &[Path::new("--bind"), bound, &other]);
        let output = mount(&[], source, Path::new("/mnt"));
        run("umount", &[&other]);
        let what = format!("SOURCE lies {what} a mounted source");
        assert!(words(&output).contains(&what), "{}", words(&output));
    }
    // Another source on the same mountpoint.
    let output = mount(&[], &other, &place.mountpoint);
    assert!(words(&output).contains("MOUNTPOINT is a mount"), "{}", words(&output));
}

#[test]
fn read_only_mounts_share_a_source() {
    let Some(place) = Place::root("shared") else { return };
    let other = place.scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    assert!(place.mount(&["-o", "ro"], &place.mountpoint).status.success());
    let output = place.mount(&["-o", "ro"], &other);
    assert!(output.status.success(), "{}", words(&output));
    let error = fs::write(other.join("file"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    let third = place.scratch.path().join("third");
    fs::create_dir(&third).unwrap();
    let output = place.mount(&[], &third);
    assert!(words(&output).contains("SOURCE is mounted already"), "{}", words(&output));
    let pids = [pid_of(&place.mountpoint), pid_of(&other)];
    run("umount", &[&place.mountpoint, &other]);
    assert!(pids.into_iter().all(gone));
    assert!(place.mount(&[], &third).status.success(), "the locks are gone");
}

#[test]
fn a_foreign_umount_ends_the_daemon() {
    let Some(place) = Place::root("foreign") else { return };
    for command in ["umount", "fusermount3 -u", "umount -l"] {
        assert!(place.mount(&[], &place.mountpoint).status.success());
        let (pid, socket) = (pid_of(&place.mountpoint), socket_of(&place.mountpoint));
        let inode = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.ino()).ok();
        let before = inode(&socket);
        assert!(before.is_some());
        sh(place.scratch.path(), &format!("{command} mnt"));
        assert!(gone(pid), "{command}");
        // A mount of another test may have its device number, and so its name, by now.
        assert_ne!(inode(&socket), before, "{command}");
        assert!(entry_of(&place.mountpoint).is_none(), "{command}");
    }
}

#[test]
fn the_exit_code_of_an_unmounted_foreground_is_0() {
    let Some(mut mount) = Mount::builder("exit").start() else { return };
    assert_eq!(mount.unmount().code(), Some(0));
}

#[test]
fn an_aborted_connection_ends_the_daemon() {
    let Some(place) = Place::root("abort") else { return };
    let mut daemon = Foreground::start(&place);
    let open = File::open(place.mountpoint.join("file")).unwrap();
    // umount -f: everything open fails, but the mount stays while it is held.
    let result = rustix::mount::unmount(&place.mountpoint, UnmountFlags::FORCE);
    assert_eq!(result, Err(rustix::io::Errno::BUSY));
    assert_eq!(daemon.end(), Some(0));
    assert!(mount_at(&place.mountpoint).is_none(), "no dead mount is left");
    drop(open);
}

#[test]
fn each_signal_unmounts() {
    let Some(place) = Place::root("signal") else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut daemon = Foreground::start(&place);
        daemon.signal(signal);
        assert_eq!(daemon.end(), Some(0), "{signal:?}");
        assert!(mount_at(&place.mountpoint).is_none(), "{signal:?}");
    }
}

#[test]
fn a_busy_mount_names_its_holder_and_serves_on() {
    let Some(place) = Place::root("busy") else { return };
    let mut daemon = Foreground::start(&place);
    let file = place.mountpoint.join("file");
    let mut holder = Command::new("sleep")
        .arg("60")
        .current_dir(&place.mountpoint)
        .stdin(File::open(&file).unwrap())
        .spawn()
        .unwrap();
    daemon.signal(Signal::TERM);
    let said = wait_for(SOON, || daemon.log().contains("is busy").then_some(()));
    let answer = fs::read_to_string(&file);
    // The second one detaches; the file's user gets errors from then on.
    daemon.signal(Signal::TERM);
    let code = daemon.end();
    let detached = mount_at(&place.mountpoint).is_none();
    holder.kill().unwrap();
    holder.wait().unwrap();
    let log = daemon.log();
    assert!(said.is_some() && detached, "{log}");
    assert!(log.contains(&format!("sleep (pid {}, open file ", holder.id())), "{log}");
    assert_eq!(answer.unwrap(), "content");
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("detached while files were open"), "{log}");
}

#[test]
fn a_daemon_with_lost_files_makes_way_for_the_next_mount() {
    let Some(place) = Place::root("lazy") else { return };
    assert!(place.mount(&[], &place.mountpoint).status.success());
    let first = pid_of(&place.mountpoint);
    let open = File::open(place.mountpoint.join("file")).unwrap();
    run("umount", &[Path::new("-l"), &place.mountpoint]);
    let mut bytes = [0; 7];
    rustix::io::pread(&open, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"content", "served on after the lazy unmount");
    let output = place.mount(&[], &place.mountpoint);
    assert!(output.status.success(), "{}", words(&output));
    assert!(gone(first));
    assert_ne!(pid_of(&place.mountpoint), first);
}

#[test]
fn systemd_hears_of_it() {
    let scratch = Scratch::new("notify");
    let path = scratch.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let source = scratch.path().join("src");
    let mountpoint = scratch.path().join("mnt");
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    if !report::have_fuse() {
        return;
    }
    let mut child = Command::new(binary())
        .args(["mount", "-f"])
        .args([&source, &mountpoint])
        .env("NOTIFY_SOCKET", &path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let heard = |what: &str| {
        let start = Instant::now();
        let mut all = String::new();
        while start.elapsed() < SOON && !all.contains(what) {
            let mut bytes = [0; 4096];
            let Ok(length) = socket.recv(&mut bytes) else { break };
            all.push_str(&String::from_utf8_lossy(&bytes[..length]));
            all.push('\n');
        }
        all
    };
    let ready = heard("READY=1");
    let mounted = mount_at(&mountpoint).is_some();
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
    let stopping = heard("STOPPING=1");
    let ended = wait_for(SOON, || child.try_wait().unwrap());
    if ended.is_none() {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert!(ready.contains("READY=1") && mounted, "{ready}");
    let status = format!("STATUS={} on {}: ", source.display(), mountpoint.display());
    assert!(ready.contains(&status), "{ready}");
    assert!(stopping.contains("STOPPING=1"), "{stopping}");
    assert_eq!(ended.unwrap().code(), Some(0));
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    let shown = format!("{} on {}: ", source.display(), mountpoint.display());
    assert!(line.starts_with(&shown) && line.contains(" cache of 4K blocks, writeback, journal "));
    assert_eq!(line.lines().count(), 1, "{line}");
}

#[test]
fn the_parent_of_a_daemon_that_dies_early_says_so() {
    let Some(place) = Place::root("early") else { return };
    // It cannot make its threads: the mount is undone and the parent gets the line.
    let mut command = Command::new("prlimit");
    command.arg("--nofile=12:12").arg(binary()).arg("mount");
    let output = command.args([&place.source, &place.mountpoint]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    assert_eq!(words(&output).lines().count(), 1, "{}", words(&output));
    assert!(mount_at(&place.mountpoint).is_none());
    assert!(entry_of(&place.mountpoint).is_none());
}

#[test]
fn a_user_mounts_through_fusermount3() {
    let Some(place) = Place::root("user") else { return };
    open_fuse_to_users();
    let runtime = place.scratch.path().join("run");
    fs::create_dir(&runtime).unwrap();
    for path in [&place.source, &place.mountpoint, &runtime, &place.source.join("file")] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    // Root's own in a user's image: he sees it, for the kernel does not check.
    fs::write(place.source.join("secret"), "root's").unwrap();
    fs::set_permissions(place.source.join("secret"), fs::Permissions::from_mode(0o644)).unwrap();
    let program = place.scratch.path().join("bcachefs-fuse");
    // Not fs::copy: a fork of another test would hold the file open for writing (ETXTBSY).
    run("cp", &[&binary(), &program]);
    let (program, runtime) = (program.display(), runtime.display());
    let (source, mountpoint) = (place.source.display(), place.mountpoint.display());
    let as_nobody = |line: &str| run_as(NOBODY, &format!("XDG_RUNTIME_DIR={runtime} {line}"));
    let output =
        as_nobody(&format!("{program} mount -o 'fsname=a\\,b\\\\c' {source} {mountpoint}"));
    assert!(output.status.success(), "{}", words(&output));
    let line = mount_at(&place.mountpoint).unwrap();
    assert_eq!(line.fstype, "fuse.bcachefs-fuse");
    assert!(line.options.contains("nosuid,nodev"), "{line:?}");
    assert!(line.super_options.contains(&format!("user_id={NOBODY}")), "{line:?}");
    assert!(!line.super_options.contains("allow_other"), "{line:?}");
    assert!(!line.super_options.contains("default_permissions"), "{line:?}");
    let line =
        format!("cat {mountpoint}/file && echo new > {mountpoint}/new && cat {mountpoint}/new");
    assert_eq!(String::from_utf8_lossy(&run_as(NOBODY, &line).stdout), "contentnew\n");
    assert!(!run_as(BOB, &format!("cat {mountpoint}/file")).status.success(), "private");
    let output = as_nobody(&format!("{program} mount {source} {mountpoint}"));
    assert!(words(&output).contains("SOURCE is mounted already"), "{}", words(&output));
    // kill -9 and again, without root.
    let runtime = place.scratch.path().join("run/bcachefs-fuse");
    let entry = fs::read_dir(&runtime).unwrap().flatten().find_map(|file| {
        let name = file.file_name().into_string().unwrap();
        name.strip_suffix(".json")?.parse().ok()
    });
    kill_process(Pid::from_raw(entry.unwrap()).unwrap(), Signal::KILL).unwrap();
    let output = as_nobody(&format!("{program} mount {source} {mountpoint}"));
    assert!(output.status.success(), "{}", words(&output));
    let output = run_as(NOBODY, &format!("cat {mountpoint}/file && fusermount3 -u {mountpoint}"));
    assert!(output.status.success(), "{}", words(&output));
    // Another test may have got the killed one's device number: then its dead socket stays.
    let dead = |path: &Path| std::os::unix::net::UnixStream::connect(path).is_err();
    let is_socket = |path: &Path| path.extension().is_some_and(|kind| kind == "sock");
    let left = || {
        let files = fs::read_dir(place.scratch.path().join("run/bcachefs-fuse")).unwrap();
        let paths = files.flatten().map(|file| file.path());
        paths.filter(|path| !(is_socket(path) && dead(path))).count()
    };
    let empty = wait_for(SOON, || (left() == 1).then_some(()));
    assert!(empty.is_some(), "only the lock file stays: {}", left());
}

#[test]
fn findmnt_and_df_show_the_source() {
    let Some(place) = Place::root("shown") else { return };
    let source = place.scratch.path().join("my images");
    fs::create_dir(&source).unwrap();
    let output = mount(&["-o", "noexec,noatime"], &source, &place.mountpoint);
    assert!(output.status.success(), "{}", words(&output));
    let at = place.mountpoint.to_str().unwrap();
    let shown = run("findmnt", &["-nro", "SOURCE,FSTYPE,OPTIONS", at]);
    let name = source.to_str().unwrap().replace(' ', "\\x20");
    let start = format!("{name} fuse.bcachefs-fuse rw,noexec,noatime");
    assert!(shown.starts_with(&start), "{shown}");
    let shown = run("df", &["--output=source,fstype,target", at]);
    assert!(shown.contains(source.to_str().unwrap()) && shown.contains("fuse.bcachefs-fuse"));
}

#[test]
fn remounted_read_only_and_back() {
    let Some(place) = Place::root("remount") else { return };
    assert!(place.mount(&["-o", "nosuid"], &place.mountpoint).status.success());
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let remount = bcachefs_fuse::fuse::mount::remount;
    remount(&place.mountpoint, &words(&["ro", "nosuid"])).unwrap();
    let error = fs::write(place.mountpoint.join("file"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    assert!(mount_at(&place.mountpoint).unwrap().options.starts_with("ro,nosuid"));
    remount(&place.mountpoint, &words(&["rw", "nosuid"])).unwrap();
    fs::write(place.mountpoint.join("file"), "again").unwrap();
    assert_eq!(fs::read_to_string(place.mountpoint.join("file")).unwrap(), "again");
    let home = || fs::read_to_string(place.source.join("file")).unwrap() == "again";
    assert!(wait_for(SOON, || home().then_some(())).is_some(), "it never went home");
}

#[test]
fn two_at_once_and_one_wins() {
    let Some(place) = Place::root("race") else { return };
    let mounts: Vec<PathBuf> = (0..6).map(|n| place.scratch.path().join(format!("m{n}"))).collect();
    for path in &mounts {
        fs::create_dir(path).unwrap();
    }
    let outputs: Vec<Output> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            mounts.iter().map(|path| scope.spawn(|| place.mount(&[], path))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let won = outputs.iter().filter(|output| output.status.success()).count();
    assert_eq!(won, 1);
    let refused = outputs.iter().filter(|output| words(output).contains("is mounted already"));
    assert_eq!(refused.count(), 5);
}

#[test]
fn the_source_is_locked_as_long_as_it_is_mounted() {
    for options in [&["ro"][..], &["cache_mode=writethrough"], &["cache_mode=writeback"]] {
        let mut builder = Mount::builder("source-lock");
        for option in options {
            builder = builder.option(option);
        }
        let Some(mut mount) = builder.start() else { return };
        let source = mount.source().to_str().unwrap().to_owned();
        let free = || fuse_tests::try_run("flock", &["-x", "-n", &source, "true"]).status.success();
        assert!(!free(), "{options:?}");
        assert!(mount.unmount().success());
        assert!(free(), "{options:?}");
    }
}
