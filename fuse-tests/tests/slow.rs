//! The slow source itself: it must delay, fail where told and nowhere else, and be gone after.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fuse_tests::cleanup::mount_at;
use fuse_tests::paths::Scratch;
use fuse_tests::report::have_fuse;
use fuse_tests::slow::SlowSource;

const DELAY: Duration = Duration::from_millis(5);

#[test]
fn delays_fails_where_told_and_heals() {
    if !have_fuse() {
        return;
    }
    let scratch = Scratch::new("slow");
    let (images, at) = (scratch.path().join("images"), scratch.path().join("mnt"));
    fs::create_dir(&images).unwrap();
    fs::create_dir(&at).unwrap();
    let bytes: Vec<u8> = (0..64 << 10).map(|n: u32| (n >> 8) as u8).collect();
    fs::write(images.join("a.img"), &bytes).unwrap();
    let source = SlowSource::mount(&images, &at, DELAY).unwrap();

    let file = OpenOptions::new().read(true).write(true).open(at.join("a.img")).unwrap();
    let mut block = [0; 4096];
    let start = Instant::now();
    for n in 0..4 {
        file.read_exact_at(&mut block, n * 4096).unwrap();
        assert_eq!(block, bytes[n as usize * 4096..][..4096]);
    }
    assert!(start.elapsed() >= 4 * DELAY, "{:?}", start.elapsed());
    assert_eq!(source.reads(), 4);

    source.set_delay(Duration::ZERO);
    source.fail_reads("a.img", 8192..12288);
    let errno = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    assert_eq!(errno(file.read_exact_at(&mut block, 8192)), Some(libc::EIO));
    file.read_exact_at(&mut block, 4096).unwrap();
    file.read_exact_at(&mut block, 12288).unwrap();
    source.fail_writes("a.img", 0..1);
    assert_eq!(errno(file.write_all_at(&block, 0)), Some(libc::EIO));
    file.write_all_at(&[7; 4096], 4096).unwrap();
    source.heal();
    file.write_all_at(&block, 0).unwrap();
    file.read_exact_at(&mut block, 8192).unwrap();
    assert_eq!(fs::read(images.join("a.img")).unwrap()[4096..8192], [7; 4096]);

    drop(file);
    assert_eq!(fs::read_dir(&at).unwrap().count(), 1);
    File::create(at.join("b.img")).unwrap().set_len(8192).unwrap();
    assert_eq!(fs::metadata(images.join("b.img")).unwrap().len(), 8192);
    fs::remove_file(at.join("b.img")).unwrap();
    drop(source);
    assert_eq!(mount_at(&at), None);
}
