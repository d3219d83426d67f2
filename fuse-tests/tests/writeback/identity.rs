//! Images that changed, went or came back while the journal was dirty and nobody held it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use fuse_tests::Mount;
use fuse_tests::tools::pattern;
use fuse_tests::writeback::{builder, device, hold, is_dirty, journaled, release, try_product};

use super::common::*;

const LEN: usize = 2_000_000;
/// A heartbeat is at most 1 s old at the crash, and 2 s more are forgiven (J12).
const PAST_HEARTBEAT: Duration = Duration::from_millis(3300);

/// Two dirty files, and the daemon killed.
fn two_dirty(name: &str) -> Option<(Mount, Vec<u8>, Vec<u8>)> {
    let mut mount = builder(name)?.start()?;
    if !journaled() {
        return None;
    }
    hold(&mount);
    let one = scattered(&mount, "one.img", LEN, 1);
    let two = scattered(&mount, "two.img", LEN, 2);
    for name in ["one.img", "two.img"] {
        open(&mount.at(name)).sync_all().unwrap();
    }
    is_dirty(&mount);
    mount.kill();
    Some((mount, one, two))
}

/// Mounts again: `name` is refused by its name, somewhere a user looks, and nothing is written
/// into it.
fn refused_by_name(mount: &mut Mount, name: &str) {
    if let Err(said) = mount.try_again() {
        assert!(said.contains(name), "refused, but not by name: {said}");
        return;
    }
    release(mount);
    let output = try_product(&["flush".as_ref(), mount.path().as_os_str()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = said + &String::from_utf8_lossy(&output.stdout) + &mount.log();
    assert!(!output.status.success(), "a flush claimed to have written {name}: {said}");
    assert!(said.contains(name), "{name} is not named: {said}");
    if let Some(state) = device(mount, name) {
        let state = state["state"].as_str().unwrap_or_default().to_owned();
        assert!(state == "failed" || state == "degraded", "{name} is {state}");
    }
}

/// The rest of the mount goes home, and the mount can be left.
fn leave(mount: &mut Mount, name: &str, bytes: &[u8]) {
    if fs::metadata(mount.at(name)).is_ok() {
        holds(&mount.source_at(name), bytes);
        let args = ["umount".as_ref(), "-n".as_ref(), mount.path().as_os_str()];
        let output = try_product(&args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        mount.ended();
    }
}

#[test]
fn a_restored_image_is_refused_by_name() {
    let Some((mut mount, _, two)) = two_dirty("id-restored") else { return };
    std::thread::sleep(PAST_HEARTBEAT);
    let backup = pattern(99, LEN);
    let image = mount.source_at("one.img");
    let inode = fs::metadata(&image).unwrap().ino();
    // As cp does: the same inode, other bytes.
    fs::write(&image, &backup).unwrap();
    assert_eq!(fs::metadata(&image).unwrap().ino(), inode);
    refused_by_name(&mut mount, "one.img");
    holds(&image, &backup);
    leave(&mut mount, "two.img", &two);
    holds(&image, &backup);
}

#[test]
fn a_replaced_image_gets_none_of_the_old_ones_bytes() {
    let Some((mut mount, _, two)) = two_dirty("id-replaced") else { return };
    let (image, other) = (mount.source_at("one.img"), mount.scratch().join("other"));
    let replacement = pattern(98, LEN);
    fs::write(&other, &replacement).unwrap();
    fs::rename(&other, &image).unwrap();
    refused_by_name(&mut mount, "one.img");
    holds(&image, &replacement);
    leave(&mut mount, "two.img", &two);
    holds(&image, &replacement);
}

#[test]
fn a_missing_image_is_named_and_the_others_go_home() {
    let Some((mut mount, _, two)) = two_dirty("id-missing") else { return };
    let image = mount.source_at("one.img");
    fs::remove_file(&image).unwrap();
    refused_by_name(&mut mount, "one.img");
    assert!(!image.exists(), "replay made a file");
    leave(&mut mount, "two.img", &two);
    // Its data is still in the journal: the next mount names it again.
    refused_by_name(&mut mount, "one.img");
    leave(&mut mount, "two.img", &two);
}

#[test]
fn a_clean_image_that_is_removed_is_not_missed_after_a_crash() {
    let Some(mut mount) = builder("id-removed").and_then(|builder| builder.start()) else { return };
    if !journaled() {
        return;
    }
    hold(&mount);
    let one = scattered(&mount, "one.img", LEN, 1);
    scattered(&mount, "two.img", LEN, 2);
    for name in ["one.img", "two.img"] {
        open(&mount.at(name)).sync_all().unwrap();
    }
    // Home, closed, and its records stand behind one.img's, which keep the tail.
    let output =
        try_product(&["flush".as_ref(), mount.path().as_os_str(), mount.at("two.img").as_os_str()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    settle();
    fs::remove_file(mount.at("two.img")).unwrap();
    mount.kill();
    mount.start_again();
    assert!(!mount.log().contains("two.img"), "{}", mount.log());
    holds(&mount.at("one.img"), &one);
    fuse_tests::writeback::flush(&mount);
    holds(&mount.source_at("one.img"), &one);
}

#[test]
fn a_moved_image_is_found_again() {
    let Some((mut mount, one, two)) = two_dirty("id-moved") else { return };
    fs::create_dir(mount.source_at("sub")).unwrap();
    fs::rename(mount.source_at("one.img"), mount.source_at("sub/uno.img")).unwrap();
    // A rename changes ctime: done within what the heartbeat forgives.
    mount.start_again();
    holds(&mount.at("sub/uno.img"), &one);
    holds(&mount.at("two.img"), &two);
    fuse_tests::writeback::flush(&mount);
    holds(&mount.source_at("sub/uno.img"), &one);
}

#[test]
fn another_state_directory_is_refused_while_the_first_is_dirty() {
    let Some((mut mount, one, _)) = two_dirty("id-state") else { return };
    let elsewhere = mount.scratch().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let option = format!("state={}", elsewhere.display());
    mount.change_options(|options| options.push(option.clone()));
    let said = mount.try_again().expect_err("the dirty journal was left behind");
    assert!(said.contains("journal"), "{said}");
    mount.change_options(|options| options.retain(|known| *known != option));
    mount.start_again();
    holds(&mount.at("one.img"), &one);
}
