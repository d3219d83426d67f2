//! Files in a scratch directory, direct and buffered.

use super::*;
use std::path::Path;

fn device(path: &Path, policy: DirectIo) -> FileDevice {
    let path = path.to_path_buf();
    let opener = move |flags| rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
    FileDevice::new(Box::new(opener), policy)
}

#[test]
fn unaligned_reads_and_tails_are_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let bytes: Vec<u8> = (0..20_001u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    for policy in [DirectIo::Auto, DirectIo::Never] {
        let device = device(&path, policy);
        for (offset, len) in [(0, 4096), (1, 10), (4095, 2), (16384, 8192), (20_000, 100)] {
            let mut buf = vec![0; len];
            let got = device.read_at(&mut buf, offset as u64).unwrap();
            assert_eq!(got, len.min(bytes.len() - offset));
            assert_eq!(buf[..got], bytes[offset..offset + got]);
        }
        assert_eq!(device.read_at(&mut [0; 8], 20_001).unwrap(), 0);
    }
}

#[test]
fn long_and_short_writes_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, b"").unwrap();
    let device = device(&path, DirectIo::Auto);
    let long = vec![7u8; 3 * STREAM_STEP as usize];
    for (i, part) in long.chunks(1 << 20).enumerate() {
        device.write_at(part, 4096 + ((i as u64) << 20)).unwrap();
    }
    device.write_at(b"abc", 1).unwrap();
    device.sync(true).unwrap();
    let mut buf = vec![0; 4096 + long.len()];
    assert_eq!(device.read_at(&mut buf, 0).unwrap(), buf.len());
    assert_eq!(
        (&buf[..5], buf[4096], device.size().unwrap()),
        (&b"\0abc\0"[..], 7, 4096 + 3 * STREAM_STEP)
    );
    device.change_range(Range::Punch, 4096, 4096).unwrap();
    device.read_at(&mut buf, 0).unwrap();
    assert_eq!((buf[4096], buf[8192]), (0, 7));
}

/// What a device says of itself after a first home write of nothing.
fn opened_for_home(device: &FileDevice) -> Option<RawTarget> {
    assert!(device.raw().is_none(), "raw() opens nothing");
    device.write_home(&[], 0).unwrap();
    device.raw()
}

#[test]
fn home_writes_of_any_shape_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for policy in [DirectIo::Auto, DirectIo::Never] {
        let mut expected = vec![1u8; 3 << 20];
        std::fs::write(&path, &expected).unwrap();
        let device = device(&path, policy);
        let shapes = [
            (0, 4096, 0),
            (4096, 8192, 1),
            (100, 50, 0),
            (4000, 200, 3),
            (4095, 4098, 0),
            (8192, 1, 0),
            (12_288 - 1, 4097, 1),
            (1 << 20, (1 << 20) + 77, 5),
            ((3 << 20) - 5000, 5000, 0),
        ];
        for (turn, (offset, len, skew)) in shapes.into_iter().enumerate() {
            let mut memory = AlignedBuf::new(len + skew);
            memory.fill(turn as u8 + 10);
            device.write_home(&memory[skew..], offset as u64).unwrap();
            expected[offset..offset + len].fill(turn as u8 + 10);
            // Somebody else's buffered read sees direct and buffered parts alike.
            assert!(std::fs::read(&path).unwrap() == expected, "{policy:?} {offset} {len}");
        }
        let mut bytes = vec![0; 3 << 20];
        device.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == expected);
        device.start_write_out();
        device.sync(true).unwrap();
    }
}

#[test]
fn only_buffered_parts_count_for_the_write_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 65536]).unwrap();
    let device = device(&path, DirectIo::Auto);
    let target = opened_for_home(&device).expect("the scratch filesystem takes O_DIRECT");
    assert!(target.align.is_multiple_of(rustix::param::page_size() as u64));
    device.write_home(&vec![1; 2 * target.align as usize], target.align).unwrap();
    assert!(!device.home.take_buffered());
    device.write_home(&vec![1; target.align as usize], 1).unwrap();
    assert!(device.home.take_buffered());
    device.write_home(&[1], 0).unwrap();
    device.start_write_out();
    assert!(!device.home.take_buffered());
}

#[test]
fn a_file_that_refuses_direct_writes_is_written_buffered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for refusal in [Errno::INVAL, Errno::ACCESS, Errno::MFILE] {
        std::fs::write(&path, vec![0; 8192]).unwrap();
        let file = path.clone();
        let refusing = move |policy| {
            let file = file.clone();
            let opener = move |flags: OFlags| {
                if flags.contains(OFlags::DIRECT) {
                    return Err(refusal);
                }
                rustix::fs::open(&file, flags, rustix::fs::Mode::empty())
            };
            FileDevice::new(Box::new(opener), policy)
        };
        let device = refusing(DirectIo::Auto);
        device.write_home(&[7; 4096], 4096).unwrap();
        assert!(device.raw().is_none() && device.home.take_buffered());
        assert_eq!(std::fs::read(&path).unwrap()[4096..], [7; 4096]);
        // Asked for always, an honest refusal is an error.
        let always = refusing(DirectIo::Always).write_home(&[7; 4096], 0);
        assert_eq!(always.is_err(), refusal == Errno::INVAL, "{refusal:?}");
    }
    assert!(opened_for_home(&device(&path, DirectIo::Never)).is_none());
}

#[test]
fn a_direct_descriptor_that_refuses_a_write_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 8192]).unwrap();
    let device = device(&path, DirectIo::Auto);
    if opened_for_home(&device).is_none() {
        return;
    }
    // Aligned to what the file does not take: EINVAL, as from a filesystem without direct writes.
    let fd = device.raw().unwrap().fd;
    assert_eq!(
        home::write_direct(&fd, &AlignedBuf::new(100), 0).unwrap_err().errno(),
        Errno::INVAL.raw_os_error()
    );
    device.home.claim(fd, 100);
    device.write_home(&[9; 300], 50).unwrap();
    assert!(device.raw().is_none());
    assert_eq!(std::fs::read(&path).unwrap()[49..351], [&[0][..], &[9; 300], &[0]].concat());
}

#[test]
fn the_sync_descriptor_precedes_the_writes_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 8192]).unwrap();
    let opens = Arc::new(Mutex::new(Vec::new()));
    let log = opens.clone();
    let opener = move |flags: OFlags| {
        log.lock().push(flags);
        rustix::fs::open(&path, flags, rustix::fs::Mode::empty())
    };
    let device = FileDevice::new(Box::new(opener), DirectIo::Auto);
    device.prepare(true).unwrap();
    device.write_home(&[1; 4096], 0).unwrap();
    device.sync(true).unwrap();
    device.write_home(&[1; 4096], 10).unwrap();
    device.sync(false).unwrap();
    let home = OFlags::RDWR | OFlags::DIRECT;
    assert_eq!(*opens.lock(), [OFlags::RDWR, home]);
}

#[test]
fn a_sync_that_another_overtook_with_an_error_fails_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, b"x").unwrap();
    let device = device(&path, DirectIo::Auto);
    let begun = device.failed_syncs.load(SeqCst);
    assert!(device.synced(Err(Error::os("fdatasync", Errno::IO)), begun).is_err());
    assert!(device.synced(Ok(()), begun).is_err());
    device.sync(true).unwrap();
}

#[test]
fn times_and_space_are_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; 777]).unwrap();
    let device = device(&path, DirectIo::Auto);
    let accessed = || std::fs::metadata(&path).unwrap().accessed().unwrap();
    let before = accessed();
    let mtime = Timestamp { sec: -5, nsec: 999_999_999 };
    device.set_mtime(mtime).unwrap();
    let stamp = device.stamp().unwrap().unwrap();
    assert_eq!((stamp.size, stamp.mtime), (777, mtime));
    assert!(stamp.ctime.sec > 0);
    assert_eq!(accessed(), before);
    assert!(device.free_bytes().unwrap().is_some_and(|bytes| bytes > 0));
    // procfs counts no blocks.
    let proc = self::device(Path::new("/proc/self/status"), DirectIo::Never);
    assert_eq!(proc.free_bytes().unwrap(), None);
}

#[test]
fn a_filesystem_without_holes_says_that_it_has_none() {
    let proc = device(Path::new("/proc/self/comm"), DirectIo::Never);
    let error = proc.change_range(Range::Punch, 0, 4096).unwrap_err();
    assert_eq!(error.kind, crate::error::Kind::NotSupported);
}
