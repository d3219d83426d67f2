//! What a mount and the commands say of images and journals that were damaged behind a killed
//! daemon's back: real mounts, real damage.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Output;

use fuse_tests::cleanup::unmount_path;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::check;
use super::place::Place;

const JOURNAL: &str = "other/.bcachefs-fuse/journal";
const BYTES: usize = 65536;

fn said(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn does(t: &Place, line: &str) -> String {
    let output = t.sh(line);
    assert!(output.status.success(), "{line}: {output:?}");
    said(&output.stdout)
}

/// kill -9 of the mount on T/mnt; nothing of it is left but what the journal holds.
fn kill(t: &Place) {
    for (file, entry) in t.entries() {
        let pid = Pid::from_raw(entry["pid"].as_i64().unwrap() as i32).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        let gone = || test_kill_process(pid).is_err().then_some(());
        fuse_tests::tools::wait_for(std::time::Duration::from_secs(10), gone).expect("it lives");
        // Perhaps another mount of the machine was there before.
        let _ = fs::remove_file(file);
    }
    unmount_path(&t.at("mnt"), UnmountFlags::DETACH).unwrap();
}

/// A mount of T/other with two files dirty and durable in the journal.
fn dirty(t: &Place, options: &str) {
    does(t, &format!("./bcachefs-fuse mount -o cache_mode=writeback,{options} other mnt"));
    does(t, "./bcachefs-fuse set mnt writeback_running=0");
    for (name, byte) in [("a.img", b'A'), ("b.img", b'B')] {
        let file = File::create(t.at("mnt").join(name)).unwrap();
        file.write_all_at(&[byte; BYTES], 0).unwrap();
        file.sync_all().unwrap();
    }
}

/// The same after its daemon was killed.
fn killed(t: &Place) {
    dirty(t, "journal_size=8M");
    kill(t);
}

/// The same after an orderly unmount: any change is noticed.
fn left(t: &Place) {
    dirty(t, "journal_size=8M");
    does(t, "./bcachefs-fuse umount -n mnt");
}

/// Somebody appends to the image.
fn change(t: &Place) {
    let file = File::options().write(true).open(t.at("other/a.img")).unwrap();
    file.write_all_at(b"changed", BYTES as u64).unwrap();
}

/// A byte of a durable record's payload is another one.
fn corrupt(t: &Place) {
    let bytes = fs::read(t.at(JOURNAL)).unwrap();
    let at = bytes.windows(512).position(|bytes| bytes == [b'A'; 512]).unwrap();
    let journal = File::options().write(true).open(t.at(JOURNAL)).unwrap();
    journal.write_all_at(b"?", at as u64 + 100).unwrap();
}

/// The error lines of a mount's log, as if they had been said on standard error.
fn logged(t: &Place, line: &str) -> Output {
    let mut output = t.sh(&format!("./bcachefs-fuse mount -o log=log {line}"));
    assert!(output.status.success(), "{output:?}");
    let log = fs::read_to_string(t.at("log")).unwrap();
    let errors = log.lines().filter_map(|line| Some(line.split_once(" ERROR] ")?.1));
    output.stderr = errors.collect::<Vec<_>>().join("\n").into();
    output
}

refusals! {
    mounted_with_a_changed_image 0 |t| {
        left(t);
        change(t);
        logged(t, "other mnt")
    };
    mounted_with_a_replaced_image 0 |t| {
        killed(t);
        // While somebody has the old one open it can be found, and has no name.
        let old = File::open(t.at("other/a.img")).unwrap();
        does(t, "echo new >new && mv new other/a.img");
        let output = logged(t, "other mnt");
        drop(old);
        output
    };
    mounted_with_a_missing_image 0 |t| {
        killed(t);
        fs::remove_file(t.at("other/a.img")).unwrap();
        logged(t, "other mnt")
    };
    mounted_with_a_corrupt_journal 0 |t| {
        killed(t);
        corrupt(t);
        logged(t, "other mnt")
    };
    flush_of_a_changed_image 1 |t| {
        left(t);
        change(t);
        t.sh("./bcachefs-fuse mount other mnt && ./bcachefs-fuse flush mnt >/dev/null")
    };
    umount_of_a_missing_image 1 |t| {
        killed(t);
        fs::remove_file(t.at("other/a.img")).unwrap();
        t.sh("./bcachefs-fuse mount other mnt && ./bcachefs-fuse umount mnt")
    };
    flush_of_a_corrupt_journal 1 |t| {
        killed(t);
        corrupt(t);
        t.sh("./bcachefs-fuse mount other mnt && ./bcachefs-fuse flush mnt")
    };
    replay_of_a_changed_image 1 |t| {
        left(t);
        change(t);
        t.sh("./bcachefs-fuse journal replay other >/dev/null")
    };
    journal_moved_with_its_mark 1 |t| {
        killed(t);
        fs::rename(t.at("other/.bcachefs-fuse"), t.at("moved")).unwrap();
        t.mount("-o cache_mode=writeback,state=moved other mnt")
    };
}

#[test]
fn a_corrupt_or_read_only_mount_is_left_without_a_failure() {
    let Some(t) = Place::new("left-ro") else { return };
    killed(&t);
    does(&t, "./bcachefs-fuse mount -o ro other mnt");
    let place = t.scratch.path().display();
    let expected = format!(
        "unmounted, 128K are left in the journal: {place}/other: it was mounted read-only; \
         bcachefs-fuse check {place}/other says what is in it; until then these files are not \
         current\n"
    );
    assert_eq!(does(&t, "./bcachefs-fuse umount mnt"), expected);
    corrupt(&t);
    does(&t, "./bcachefs-fuse mount -o log=log other mnt");
    let output = t.sh("echo x >mnt/new");
    assert!(said(&output.stderr).contains("Read-only file system"), "{output:?}");
    let left = does(&t, "./bcachefs-fuse umount mnt");
    // What lies behind the damage cannot be counted.
    assert!(left.starts_with("unmounted, the journal is left as it is: "), "{left}");
    let output = t.sh("./bcachefs-fuse check other");
    assert!(said(&output.stdout).contains("corrupt: record"), "{output:?}");
    assert_eq!(output.status.code(), Some(4));
    // Foreground, as systemd sees it: once is enough.
    let line = "timeout --signal=TERM 2 ./bcachefs-fuse mount -f other mnt 2>/dev/null";
    let line = said(&t.sh(line).stdout);
    assert_eq!(line.matches("read-only").count(), 1, "{line}");
    assert!(line.contains("the journal is corrupt at "), "{line}");
    t.clean();
}

#[test]
fn stat_lists_what_is_refused_and_why() {
    let Some(t) = Place::new("stat-refused") else { return };
    left(&t);
    fs::remove_file(t.at("other/a.img")).unwrap();
    fs::write(t.at("other/b.img"), [b'X'; 2 * BYTES]).unwrap();
    does(&t, "./bcachefs-fuse mount other mnt");
    let text = does(&t, "./bcachefs-fuse stat mnt");
    for (name, why) in [
        ("a.img", "missing"),
        ("b.img", "changed behind the journal: it is not as the last mount left it"),
    ] {
        let line = text.lines().find(|line| line.contains(name) && line.contains("failed"));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        assert!(line.trim_end().ends_with(why) && line.contains("64K"), "{line}");
    }
    let settings = does(&t, "./bcachefs-fuse set mnt");
    let state = settings.lines().find(|line| line.starts_with("state ")).unwrap();
    assert!(state.contains("/other/.bcachefs-fuse "), "{state}");
    does(&t, "./bcachefs-fuse umount -n mnt");
    t.clean();
}

#[test]
fn what_is_skipped_is_kept_and_the_rest_goes_home() {
    let Some(t) = Place::new("replay-skip") else { return };
    left(&t);
    change(&t);
    let journal = fs::read(t.at(JOURNAL)).unwrap();
    let output = t.sh("./bcachefs-fuse journal replay --skip a.img other");
    assert!(output.status.success(), "{output:?}");
    let place = t.scratch.path().display();
    let expected = format!(
        "the journal as it was: {place}/{JOURNAL}.skipped.1\n64K written home to 1 images\n"
    );
    assert_eq!(said(&output.stdout), expected);
    assert_eq!(fs::read(t.at(&format!("{JOURNAL}.skipped.1"))).unwrap(), journal);
    let image = fs::read(t.at("other/a.img")).unwrap();
    assert!(image.starts_with(&[0; 512]) && image.ends_with(b"changed"), "it was written to");
    assert_eq!(fs::read(t.at("other/b.img")).unwrap(), [b'B'; BYTES]);
    assert_eq!(does(&t, "./bcachefs-fuse check other | tail -1"), "clean\n");
    // What was given up can be read.
    fs::copy(t.at(&format!("{JOURNAL}.skipped.1")), t.at("run/journal")).unwrap();
    let records = does(&t, "./bcachefs-fuse journal dump run");
    assert!(records.contains("a.img") && records.contains("64K"), "{records}");
    t.clean();
}

#[test]
fn a_state_directory_that_was_moved_stands_for_its_source() {
    let Some(t) = Place::new("state-moved") else { return };
    dirty(&t, "journal_size=8M,state=run");
    kill(&t);
    fs::rename(t.at("run"), t.at("moved")).unwrap();
    let output = t.sh("./bcachefs-fuse check other");
    assert_eq!(output.status.code(), Some(4));
    let place = t.scratch.path().display();
    let way_out = format!(
        "it was in {place}/run: name its place now (mount --state DIR, check DIR, journal replay \
         DIR)"
    );
    assert!(said(&output.stdout).contains(&way_out), "{output:?}");
    let output = t.sh("./bcachefs-fuse check moved");
    let text = said(&output.stdout);
    assert!(text.contains("dirty: 128K of 2 images are in the journal"), "{text}");
    assert!(text.contains("owner mark: this journal"), "{text}");
    assert_eq!(output.status.code(), Some(1));
    let home = does(&t, "./bcachefs-fuse journal replay moved");
    assert_eq!(home, "128K written home to 2 images\n");
    assert_eq!(fs::read(t.at("other/a.img")).unwrap(), [b'A'; BYTES]);
    t.clean();
}
