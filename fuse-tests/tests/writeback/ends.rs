//! The ends of a mount: each leaves dirty data home or in the journal, and nothing is lost.

use std::fs;

use fuse_tests::paths::Scratch;
use fuse_tests::writeback::{
    STATE, builder, crash, flush, hold, is_dirty, journaled, names, number, try_product,
};
use fuse_tests::{Mount, run, try_run};
use rustix::process::{Pid, Signal, kill_process};

use super::common::*;

const LEN: usize = 5_000_003;

/// A mount with a dirty file that nothing writes home by itself.
fn dirty(name: &str) -> Option<(Mount, Vec<u8>)> {
    let mount = builder(name)?.start()?;
    hold(&mount);
    let bytes = scattered(&mount, "disk.img", LEN, 77);
    is_dirty(&mount);
    settle();
    Some((mount, bytes))
}

#[test]
fn umount_flushes() {
    let Some((mut mount, bytes)) = dirty("end-umount") else { return };
    let output = try_product(&["umount".as_ref(), mount.path().as_os_str()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(mount.ended().success(), "{}", mount.log());
    holds(&mount.source_at("disk.img"), &bytes);
    assert_eq!(names(mount.source()), ["disk.img"]);
    // No owner mark is left on a clean source.
    assert!(!mount.source_at(STATE).join("owner").exists());
}

#[test]
fn umount_n_leaves_the_journal_and_the_next_mount_resumes_it() {
    let Some((mut mount, bytes)) = dirty("end-umount-n") else { return };
    if !journaled() {
        return;
    }
    let args = ["umount".as_ref(), "-n".as_ref(), mount.path().as_os_str()];
    let output = try_product(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(mount.ended().success(), "{}", mount.log());
    assert!(fs::read(mount.source_at("disk.img")).unwrap() != bytes, "it was flushed all the same");
    mount.start_again();
    holds(&mount.at("disk.img"), &bytes);
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn a_foreign_umount_is_followed_by_the_flush() {
    let Some((mut mount, bytes)) = dirty("end-foreign") else { return };
    assert!(mount.unmount().success(), "{}", mount.log());
    mount.start_again();
    holds(&mount.at("disk.img"), &bytes);
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn fusermount_and_a_mount_at_once() {
    let Some((mut mount, mut bytes)) = dirty("end-fusermount") else { return };
    for round in 0..4 {
        run("fusermount3", &["-u", text(mount.path())]);
        let old = mount.part();
        mount.start_again();
        holds(&mount.at("disk.img"), &bytes);
        ended_well(old);
        hold(&mount);
        scatter(&open(&mount.at("disk.img")), &mut bytes, 100 + round, 50);
        settle();
    }
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn sigterm_flushes() {
    for signal in [Signal::TERM, Signal::INT] {
        let Some((mut mount, bytes)) = dirty("end-signal") else { return };
        kill_process(Pid::from_raw(mount.pid() as i32).unwrap(), signal).unwrap();
        assert!(mount.ended().success(), "{}", mount.log());
        holds(&mount.source_at("disk.img"), &bytes);
    }
}

#[test]
fn a_second_signal_leaves_the_journal() {
    let Some((mut mount, bytes)) = dirty("end-signals") else { return };
    let pid = Pid::from_raw(mount.pid() as i32).unwrap();
    for _ in 0..2 {
        // The daemon may be gone by the second one.
        let _ = kill_process(pid, Signal::TERM);
    }
    let _ = mount.ended();
    mount.start_again();
    holds(&mount.at("disk.img"), &bytes);
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn a_busy_umount_changes_nothing() {
    let Some((mount, mut bytes)) = dirty("end-busy") else { return };
    let file = open(&mount.at("disk.img"));
    let output = try_product(&["umount".as_ref(), mount.path().as_os_str()]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let pid = std::process::id().to_string();
    assert!(said.contains(&pid) && (said.contains("disk.img") || !journaled()), "{said}");
    scatter(&file, &mut bytes, 5, 50);
    holds(&mount.at("disk.img"), &bytes);
    drop(file);
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn umount_8_flushes_through_our_helper_or_after() {
    let Some((mut mount, bytes)) = dirty("end-umount8") else { return };
    let output = try_run("umount", &[mount.path()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(mount.ended().success(), "{}", mount.log());
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn crashes_one_after_another_lose_nothing() {
    let Some((mut mount, mut bytes)) = dirty("end-crashes") else { return };
    for round in 0..6 {
        crash(&mut mount);
        // Every other round while what was recovered goes home.
        if round % 2 == 0 {
            hold(&mount);
        }
        holds(&mount.at("disk.img"), &bytes);
        scatter(&open(&mount.at("disk.img")), &mut bytes, 200 + round, 60);
    }
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
}

#[test]
fn a_state_directory_may_be_moved_while_nobody_holds_it() {
    let Some(builder) = builder("end-moved") else { return };
    if !journaled() {
        return;
    }
    let states = Scratch::new("end-moved-state");
    let place = |name: &str| format!("state={}", states.path().join(name).display());
    fs::create_dir(states.path().join("first")).unwrap();
    let Some(mut mount) = builder.option(&place("first")).start() else { return };
    hold(&mount);
    let bytes = scattered(&mount, "disk.img", LEN, 78);
    is_dirty(&mount);
    mount.kill();
    fs::rename(states.path().join("first"), states.path().join("second")).unwrap();
    mount.change_options(|options| {
        options.retain(|option| !option.starts_with("state="));
        options.push(place("second"));
    });
    mount.start_again();
    holds(&mount.at("disk.img"), &bytes);
    flush(&mount);
    holds(&mount.source_at("disk.img"), &bytes);
    drop(mount);
}

#[test]
fn the_size_of_a_journal_changes_when_it_is_clean() {
    let Some(builder) = builder("end-resize") else { return };
    if !journaled() {
        return;
    }
    let Some(mut mount) = builder.option("journal_size=8M").start() else { return };
    let typed = |mount: &mut Mount, size: &str| {
        mount.change_options(|options| {
            options.retain(|option| !option.starts_with("journal_size="));
            options.push(format!("journal_size={size}"));
        });
    };
    let small = number(&mount, "journal_bytes");
    assert!(small <= 8 << 20, "{small}");
    hold(&mount);
    let bytes = scattered(&mount, "disk.img", LEN, 79);
    // Dirty: it is resumed whatever was typed.
    mount.kill();
    typed(&mut mount, "32M");
    mount.start_again();
    holds(&mount.at("disk.img"), &bytes);
    flush(&mount);
    mount.remount();
    let large = number(&mount, "journal_bytes");
    assert!(large > 24 << 20, "{large} bytes after a mount with a clean journal");
    hold(&mount);
    let other = scattered(&mount, "other.img", LEN, 80);
    crash(&mut mount);
    holds(&mount.at("other.img"), &other);
    flush(&mount);
    typed(&mut mount, "8M");
    mount.remount();
    assert_eq!(number(&mount, "journal_bytes"), small);
    holds(&mount.at("other.img"), &other);
}
