//! Small things all of these tests use.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use fuse_tests::Mount;
use fuse_tests::storm::Random;
use fuse_tests::tools::{pattern, wait_for};

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub fn open(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Writes at random offsets, most of them small; `bytes` is the file's content before and after.
pub fn scatter(file: &File, bytes: &mut [u8], seed: u64, writes: u64) {
    let mut random = Random::new(seed);
    for number in 0..writes {
        let len = [3, 512, 4096, 4096, 70_001][random.below(5) as usize];
        let len = len.min(bytes.len() as u64 / 2);
        let at = random.below(bytes.len() as u64 - len);
        let at = if random.below(2) == 0 { at & !4095 } else { at };
        let data = pattern(seed ^ number << 16, len as usize);
        file.write_all_at(&data, at).unwrap();
        bytes[at as usize..(at + len) as usize].copy_from_slice(&data);
    }
}

/// A new file on the mount of `len` bytes with scattered writes in it; its content.
pub fn scattered(mount: &Mount, name: &str, len: usize, seed: u64) -> Vec<u8> {
    let file = open(&mount.at(name));
    let mut bytes = vec![0; len];
    file.set_len(len as u64).unwrap();
    scatter(&file, &mut bytes, seed, 200);
    bytes
}

/// Waits until no child of another test holds what was just closed: between fork and exec it has
/// every descriptor of this process, and an unmount would find the mount busy.
pub fn settle() {
    std::thread::sleep(Duration::from_millis(100));
}

/// Asserts that a file holds `wanted`.
pub fn holds(path: &Path, wanted: &[u8]) {
    let there = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if let Some(wrong) = fuse_tests::storm::same(&there, wanted) {
        panic!("{}: {wrong}", path.display());
    }
}

/// Waits for a daemon whose mount is gone; it must have ended well.
pub fn ended_well(mut child: Child) {
    let ended = wait_for(Duration::from_secs(30), || child.try_wait().unwrap());
    if ended.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    assert!(ended.is_some_and(|status| status.success()), "the old daemon: {ended:?}");
}
