//! Mounts a directory of two images from within a program, reads both twice through the kernel,
//! and shows that the second time nothing came from the disk: the library behind `mount`.
//!
//! `cargo run --example mount_images` (root, or a user who may use fusermount3).

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use bcachefs_fuse::config::{Config, DaemonConfig, MountConfig, StoreConfig};
use bcachefs_fuse::fs::Fs;
use bcachefs_fuse::fuse::Adapter;
use bcachefs_fuse::fuse::mount::{How, Outcome};
use bcachefs_fuse::fuse::session::{End, serve};
use rustix::fs::{Mode, OFlags, open};

const IMAGE_BYTES: u64 = 4 << 20;
const REQUEST: usize = 64 << 10;

/// What `mount SOURCE MOUNTPOINT` means when nothing else is said.
fn config(source: &Path, mountpoint: &Path) -> Config {
    let mount = MountConfig {
        source: source.to_path_buf(),
        upper: None,
        lowers: Vec::new(),
        mountpoint: mountpoint.to_path_buf(),
        read_only: false,
        allow_other: false,
        attr_timeout: Duration::from_secs(1),
        fsname: source.display().to_string(),
        threads: 4,
        flags: Vec::new(),
        test_panic: None,
    };
    let store = StoreConfig { cache_bytes: 32 << 20, ..StoreConfig::default() };
    Config { mount, store, daemon: DaemonConfig::default() }
}

/// Reads both images in turn, past the kernel's page cache, and checks every byte.
fn read_both(mountpoint: &Path) -> Result<(), Box<dyn Error>> {
    let direct = OFlags::DIRECT.bits() as i32;
    let image = |name: &str| -> std::io::Result<File> {
        OpenOptions::new().read(true).custom_flags(direct).open(mountpoint.join(name))
    };
    let images = [(image("a.img")?, b'a'), (image("b.img")?, b'b')];
    let mut buffer = vec![0; REQUEST];
    for offset in (0..IMAGE_BYTES).step_by(REQUEST) {
        for (image, byte) in &images {
            image.read_exact_at(&mut buffer, offset)?;
            assert!(buffer.iter().all(|read| read == byte), "wrong bytes at {offset}");
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let scratch = tempfile::tempdir()?;
    let path = scratch.path().canonicalize()?;
    let (source, mountpoint) = (path.join("images"), path.join("mnt"));
    fs::create_dir(&source)?;
    fs::create_dir(&mountpoint)?;
    for (name, byte) in [("a.img", b'a'), ("b.img", b'b')] {
        fs::write(source.join(name), vec![byte; IMAGE_BYTES as usize])?;
    }

    let config = config(&source, &mountpoint);
    let root = open(&source, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let fs = Fs::without_journal(bcachefs_fuse::fs::host_tree(root, &config)?, &config);
    fs.start()?;
    let adapter = Adapter::new(fs.clone(), &config.mount);
    let serving = serve(adapter, &config.mount, 0o040_755, |_| {})?;

    // Whatever fails from here on, the mount must go.
    let first = read_both(&mountpoint);
    let before = fs.store().snapshot(None);
    let second = read_both(&mountpoint);
    let after = fs.store().snapshot(None);
    let outcome = serving.mount().unmount(How::Politely);
    assert_eq!(outcome, Outcome::Gone, "still mounted: {}", mountpoint.display());
    assert_eq!(serving.run_to_end(|_| {}), End::Unmounted);
    fs.stop()?;
    first.and(second)?;

    let change = after.total.since(&before.total);
    let blocks = 2 * IMAGE_BYTES / u64::from(after.block_size);
    println!("{} devices, {} blocks cached", after.devices.len(), after.resident_blocks);
    println!("read again: {} hits, {} blocks from disk", change.hits, change.backing_blocks);
    assert_eq!((change.hits, change.backing_blocks), (blocks, 0));
    Ok(())
}
