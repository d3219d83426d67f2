//! Refusals about the layers of an overlay.

use std::fs::{self, File};

use rustix::fs::FlockOperation;

use super::check;

refusals! {
    lower_in_use 1 |t| {
        let other = File::open(t.at("other")).unwrap();
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        t.mount("--upper up src:other mnt")
    };
    source_is_an_upper 1 |t| {
        fs::write(t.at("other/meta.redb"), "").unwrap();
        t.mount("other mnt")
    };
    upper_in_use 1 |t| {
        let other = File::open(t.at("other")).unwrap();
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        t.mount("--upper other src mnt")
    };
    upper_inside_source 1 |t| t.mount("--upper src/up src mnt");
    upper_around_source 1 |t| t.mount("--upper . src mnt");
    upper_is_a_lower 1 |t| t.mount("--upper other src:other mnt");
    upper_without_a_parent 1 |t| t.mount("--upper absent/up src mnt");
    upper_not_empty 1 |t| {
        fs::write(t.at("other/mine"), "").unwrap();
        t.mount("--upper other src mnt")
    };
    upper_of_another_lower 1 |t| {
        let made = "mkdir low up && ./bcachefs-fuse mount --upper up low mnt";
        t.sh(&format!("{made} && umount -i mnt && sleep 1"));
        t.mount("--upper up src mnt")
    };
    upper_damaged 1 |t| {
        fs::write(t.at("other/meta.redb"), "no database").unwrap();
        t.mount("--upper other src mnt")
    };
}
