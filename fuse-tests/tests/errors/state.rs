//! Refusals about the journal: its place, its owner mark, and the commands that look at it.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bcachefs_fuse::cli::meaning::{self, Machine};
use bcachefs_fuse::cli::run::source::Source;
use bcachefs_fuse::cli::run::state::{self, State, StateOutcome};
use bcachefs_fuse::cli::words::Words;
use bcachefs_fuse::journal::{
    Change, DeviceIdentity, Entry, Geometry, Journal, Purpose, Superblock,
};
use bcachefs_fuse::units::{DeviceId, Timestamp};
use fuse_tests::slow::SlowSource;
use rustix::fs::FlockOperation;

use super::place::Place;
use super::{check, nameless_holder, nameless_loop};

/// The state a mount of T/`source` opens.
fn open(t: &Place, source: &str, more: &str) -> State {
    let mut words = Words::default();
    words.add_list(format!("cache_mode=writeback,journal_size=8M{more}").as_ref()).unwrap();
    let machine = Machine { root: true, memory: 1 << 30 };
    let (source, mountpoint) = (t.at(source), t.at("mnt"));
    let config = meaning::config(&source, &mountpoint, &words, false, false, machine).unwrap();
    let source = Source::open(&source).unwrap();
    match state::open(&config, &source, &mountpoint).unwrap() {
        StateOutcome::Journal(state) => *state,
        StateOutcome::None { why } => panic!("{why:?}"),
    }
}

/// What a mount of T/`source` that was killed leaves: a mark, and one record. Returns the place of
/// its journal.
fn killed(t: &Place, source: &str, more: &str) -> PathBuf {
    let state = open(t, source, more);
    let journal: Journal = state.recovered.start().unwrap();
    state.mark.dirty().unwrap();
    let identity = DeviceIdentity { path: b"a.img".to_vec(), ..DeviceIdentity::default() };
    journal.set_device(DeviceId(1), &identity, 0).unwrap();
    let change = Change::Data(&[7; 4096]);
    let mtime = Timestamp::default();
    let entry = Entry { device: DeviceId(1), offset: 0, change, size_after: 4096, mtime };
    let mut room = journal.reserve(Purpose::Frontend, journal.charge(&[change])).unwrap();
    journal.append(&mut room, &[entry]).unwrap();
    state.place.into()
}

const OWN: &str = "other/.bcachefs-fuse";

fn unmark(t: &Place) {
    fs::remove_file(t.at(OWN).join("owner")).unwrap();
}

/// Writes a superblock into both slots.
fn stamp(path: &Path, incompat: u32) {
    let geometry = Geometry::for_size(8 << 20).unwrap();
    let mut bytes = fs::read(path).unwrap();
    for serial in 0..2 {
        let superblock = Superblock {
            compat: 0,
            ro_compat: 0,
            incompat,
            uuid: [1; 16],
            serial,
            generation: 0,
            start_seq: 1,
            tail_seq: 1,
            durable_seq: 0,
            segment_bytes: geometry.segment_bytes,
            segment_count: geometry.count,
            tail_slot: 0,
        };
        let at = superblock.position() as usize;
        bytes[at..at + superblock.encode().len()].copy_from_slice(&superblock.encode());
    }
    fs::write(path, bytes).unwrap();
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn check_tells_clean_dirty_and_corrupt_by_its_exit_code() {
    let Some(t) = Place::new("check-codes") else { return };
    let code = |line: &str| t.sh(&format!("./bcachefs-fuse {line}")).status.code();
    assert_eq!(code("check src"), Some(0));
    let state = format!(",state={}", t.at("run").display());
    let journal = killed(&t, "other", &state);
    for directory in ["other", "run"] {
        let output = t.sh(&format!("./bcachefs-fuse check {directory}"));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = said(&output);
        assert!(said.contains("a.img") && said.contains("owner mark: this journal"), "{said}");
        assert!(
            said.ends_with("home\n") && said.contains("dirty: 4K of 1 images are in"),
            "{said}"
        );
    }
    let output = t.sh("./bcachefs-fuse journal dump --json --records other");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((value["schema"].as_u64(), value["state"].as_str()), (Some(1), Some("dirty")));
    assert_eq!(value["records"].as_array().unwrap().len(), 2);
    assert_eq!(value["records"][1]["kind"], "data");
    let text = said(&t.sh("./bcachefs-fuse journal dump --records run"));
    assert!(text.contains("data       unit 1 0+4096 size 4096"), "{text}");
    let json = t.sh("./bcachefs-fuse check --json run");
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((value["devices"][0]["bytes"].as_u64(), json.status.code()), (Some(4096), Some(1)));
    fs::write(&journal, "rubbish").unwrap();
    assert_eq!((code("check other"), code("check run")), (Some(4), Some(4)));
    let output = t.sh("./bcachefs-fuse journal abandon --yes other");
    assert!(output.status.success(), "{output:?}");
    assert!(said(&output).ends_with("/run/journal.abandoned.1\n"), "{output:?}");
    assert_eq!(fs::read(t.at("run/journal.abandoned.1")).unwrap(), b"rubbish");
    assert_eq!((code("check other"), code("mount other mnt")), (Some(0), Some(0)));
    t.clean();
}

#[test]
fn a_zeroed_partition_is_a_journal_as_a_whole() {
    let Some(t) = Place::new("partition") else { return };
    let sh = |line: &str| {
        let output = t.sh(line);
        assert!(output.status.success(), "{line}: {output:?}");
        said(&output).trim().to_owned()
    };
    let device = sh("truncate -s 16M disk && losetup -f --show disk");
    let state = format!(",state={device}");
    let place = killed(&t, "other", &state);
    assert_eq!(place, Path::new(&device));
    let dump = sh("./bcachefs-fuse journal dump --json other");
    let value: serde_json::Value = serde_json::from_str(&dump).unwrap();
    assert_eq!((value["journal"].as_str(), value["segments"].as_u64()), (Some(&*device), Some(15)));
    let output = t.sh(&format!("./bcachefs-fuse check {device}"));
    assert!(said(&output).contains("owner mark: unknown"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
    // Resumed without a word about where it is.
    assert!(open(&t, "other", "").dirty);
    let output = sh("./bcachefs-fuse journal abandon --yes other");
    assert!(output.contains(&format!("dd if=/dev/zero of={device}")), "{output}");
    sh(&format!("losetup -d {device}"));
    t.clean();
}

refusals! {
    state_on_tmpfs 1 |t| t.mount("-o cache_mode=writeback,state=/dev/shm src mnt");
    state_without_a_parent 1 |t| t.mount("-o cache_mode=writeback,state=absent/state src mnt");
    state_is_a_file 1 |t| t.mount("-o cache_mode=writeback,state=bcachefs-fuse src mnt");
    state_open_to_others 1 |t| {
        fs::set_permissions(t.at("other"), fs::Permissions::from_mode(0o777)).unwrap();
        t.mount("-o cache_mode=writeback,state=other src mnt")
    };
    state_of_another_user 1 |t| {
        t.give("other");
        t.mount("-o cache_mode=writeback,state=other src mnt")
    };
    state_in_use 1 |t| {
        let other = File::open(t.at("other")).unwrap();
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        nameless_holder(t.mount("-o cache_mode=writeback,state=other src mnt"))
    };
    state_through_a_link_below_the_mountpoint 1 |t| {
        t.sh("mkdir mnt/state && ln -s mnt/state link && \
              ./bcachefs-fuse mount -o cache_mode=writeback,state=link src mnt")
    };
    state_not_to_be_made 1 |t| {
        t.give("mnt");
        t.mount_as_nobody("-o cache_mode=writeback src mnt")
    };
    state_partition_of_something_else 1 |t| {
        nameless_loop(t.sh("truncate -s 16M disk && mkfs.ext4 -qF disk && \
            L=$(losetup -f --show disk) && \
            ./bcachefs-fuse mount -o cache_mode=writeback,state=$L src mnt; \
            C=$?; losetup -d $L; exit $C"))
    };
    state_partition_mounted 1 |t| {
        nameless_loop(t.sh("truncate -s 16M disk && mkfs.ext4 -qF disk && \
            L=$(losetup -f --show disk) && mount $L other && \
            ./bcachefs-fuse mount -o cache_mode=writeback,state=$L src mnt; \
            C=$?; umount other; losetup -d $L; exit $C"))
    };
    source_on_tmpfs 1 |t| {
        t.apart("mount -t tmpfs none src",
            "./bcachefs-fuse mount -o cache_mode=writeback src mnt")
    };
    source_on_a_fuse_filesystem 1 |t| {
        let slow = SlowSource::mount(&t.at("src"), &t.at("other"), Duration::ZERO).unwrap();
        let output = t.mount("-o cache_mode=writeback other mnt");
        drop(slow);
        output
    };
    source_on_a_read_only_filesystem 1 |t| {
        t.apart("mount --bind src src && mount -o remount,bind,ro src",
            "./bcachefs-fuse mount -o cache_mode=writeback src mnt")
    };
    no_space_for_the_journal 1 |t| {
        t.apart("truncate -s 16M disk && mkfs.ext4 -qF disk && mount -o loop disk src",
            "./bcachefs-fuse mount -o cache_mode=writeback src mnt")
    };
    journal_too_small 2 |t| t.mount("-o journal_size=4M src mnt");
    journal_delay_of_nothing 2 |t| t.mount("-o journal_delay=0 src mnt");
    percent_of_too_much 2 |t| t.mount("-o writeback-percent=101 src mnt");
    order_unknown 2 |t| t.mount("-o writeback_order=up src mnt");
    mode_unknown 2 |t| t.mount("-o cache_mode=fast src mnt");
    dirty_and_the_journal_is_lost 1 |t| {
        fs::remove_file(killed(t, "other", "")).unwrap();
        t.mount("other mnt")
    };
    dirty_and_another_state_is_typed 1 |t| {
        killed(t, "other", "");
        t.mount("-o state=run other mnt")
    };
    dirty_and_the_journal_is_an_older_copy 1 |t| {
        let place = open(t, "other", "").place;
        let older = fs::read(&place).unwrap();
        killed(t, "other", "");
        fs::write(&place, older).unwrap();
        t.mount("other mnt")
    };
    journal_of_another_source 1 |t| {
        killed(t, "other", &format!(",state={}", t.at("run").display()));
        t.mount("-o cache_mode=writeback,state=run src mnt")
    };
    journal_without_a_superblock 1 |t| {
        fs::write(open(t, "other", "").place, "rubbish").unwrap();
        t.mount("-o cache_mode=writeback other mnt")
    };
    journal_of_a_later_version 1 |t| {
        stamp(open(t, "other", "").place.as_ref(), 0x40);
        t.mount("-o cache_mode=writeback other mnt")
    };
    mark_without_sense 1 |t| {
        drop(open(t, "other", ""));
        fs::write(t.at(OWN).join("owner"), "{}").unwrap();
        t.mount("other mnt")
    };
    set_writeback_without_a_journal 1 |t| {
        t.live();
        t.sh("./bcachefs-fuse set mnt cache_mode=writeback")
    };
    check_of_nothing 8 |t| t.sh("./bcachefs-fuse check absent");
    check_of_a_mounted_source 8 |t| {
        t.live();
        t.sh("./bcachefs-fuse check src")
    };
    check_of_a_mountpoint 8 |t| {
        t.live();
        t.sh("./bcachefs-fuse check mnt")
    };
    check_of_a_locked_source 8 |t| {
        let source = File::open(t.at("src")).unwrap();
        rustix::fs::flock(&source, FlockOperation::NonBlockingLockExclusive).unwrap();
        t.sh("./bcachefs-fuse check src")
    };
    check_of_a_state_in_use 8 |t| {
        let lock = open(t, "other", &format!(",state={}", t.at("run").display())).lock;
        let output = nameless_holder(t.sh("./bcachefs-fuse check run"));
        drop(lock);
        output
    };
    dump_without_a_journal 1 |t| t.sh("./bcachefs-fuse journal dump src");
    abandon_an_empty_journal 1 |t| {
        drop(open(t, "other", ""));
        t.sh("./bcachefs-fuse journal abandon other")
    };
    abandon_without_a_word 1 |t| {
        killed(t, "other", "");
        t.sh("./bcachefs-fuse journal abandon other")
    };
    replay_without_a_mark 1 |t| {
        killed(t, "other", "");
        unmark(t);
        t.sh("./bcachefs-fuse journal replay other")
    };
    replay_of_a_lost_source 1 |t| {
        killed(t, "other", &format!(",state={}", t.at("run").display()));
        t.sh("rm -r other && ./bcachefs-fuse journal replay run")
    };
    replay_without_an_unknown_file 1 |t| {
        killed(t, "other", "");
        t.sh("./bcachefs-fuse journal replay --skip b.img other")
    };
}
