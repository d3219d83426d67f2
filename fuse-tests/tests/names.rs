//! The namespace: names, links, renames, directories, special files, submounts.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use fuse_tests::paths::ShortPath;
use fuse_tests::{Backing, Mount, drop_caches, report, run, run_as, users};
use rustix::fs::{CWD, Mode, OFlags, RawDir, RenameFlags, renameat_with};
use rustix::io::Errno;

fn errno(error: &std::io::Error) -> Option<i32> {
    error.raw_os_error()
}

fn names_in(dir: &Path) -> BTreeSet<Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect()
}

#[test]
fn odd_names_are_names() {
    let Some(mount) = Mount::builder("odd").start() else { return };
    let long = "n".repeat(255);
    let odd: [&[u8]; 12] = [
        b"-rf",
        b"...",
        b"a\nb",
        b"\xff\xfe",
        b"a,b\\c=d",
        b"back\\040slash",
        b" ",
        b"\x01\x7f",
        b"%s%n",
        b".wh.x",
        "\u{fc}\u{1f600}".as_bytes(),
        long.as_bytes(),
    ];
    for (number, name) in odd.iter().enumerate() {
        fs::write(mount.at(OsStr::from_bytes(name)), number.to_string()).unwrap();
    }
    let expected: BTreeSet<Vec<u8>> = odd.iter().map(|name| name.to_vec()).collect();
    assert_eq!(names_in(mount.path()), expected);
    assert_eq!(names_in(mount.source()), expected);
    drop_caches();
    for (number, name) in odd.iter().enumerate() {
        let path = mount.at(OsStr::from_bytes(name));
        assert_eq!(fs::read_to_string(&path).unwrap(), number.to_string());
        let renamed = mount.at("renamed");
        fs::rename(&path, &renamed).unwrap();
        fs::rename(&renamed, &path).unwrap();
        fs::remove_file(&path).unwrap();
    }
    let error = fs::write(mount.at("n".repeat(256)), "").unwrap_err();
    assert_eq!(errno(&error), Some(libc::ENAMETOOLONG));
    assert!(names_in(mount.source()).is_empty());
    assert_eq!(rustix::fs::statvfs(mount.path()).unwrap().f_namemax, 255);
}

#[test]
fn rename_can_refuse_and_exchange() {
    let Some(mount) = Mount::builder("rename").start() else { return };
    let (a, b, dir) = (mount.at("a"), mount.at("b"), mount.at("dir"));
    fs::write(&a, "aa").unwrap();
    fs::write(&b, "bbb").unwrap();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("inside"), "x").unwrap();
    let with = |from: &Path, to: &Path, flags| renameat_with(CWD, from, CWD, to, flags);
    assert_eq!(with(&a, &b, RenameFlags::NOREPLACE), Err(Errno::EXIST));
    assert_eq!(with(&a, &mount.at("c"), RenameFlags::NOREPLACE), Ok(()));
    assert_eq!(with(&mount.at("c"), &b, RenameFlags::EXCHANGE), Ok(()));
    assert_eq!(fs::read_to_string(&b).unwrap(), "aa");
    assert_eq!(fs::read_to_string(mount.at("c")).unwrap(), "bbb");
    // A file and a directory, across directories.
    assert_eq!(with(&b, &dir, RenameFlags::EXCHANGE), Ok(()));
    assert_eq!(fs::read_to_string(b.join("inside")).unwrap(), "x");
    assert_eq!(fs::read_to_string(&dir).unwrap(), "aa");
    assert_eq!(with(&b, &mount.at("none"), RenameFlags::EXCHANGE), Err(Errno::NOENT));
    assert_eq!(fs::read_to_string(mount.source_at("dir")).unwrap(), "aa");
    let below = b.join("below");
    assert_eq!(with(&b, &below, RenameFlags::empty()), Err(Errno::INVAL));
    let full = mount.at("full");
    fs::create_dir_all(full.join("x")).unwrap();
    assert_eq!(with(&b, &full, RenameFlags::empty()), Err(Errno::NOTEMPTY));
}

#[test]
fn an_open_file_survives_a_rename_over_it_and_of_it() {
    let Some(mount) = Mount::builder("rename-open").start() else { return };
    fs::write(mount.at("old"), "old").unwrap();
    fs::write(mount.at("new"), "new").unwrap();
    let mut old = File::open(mount.at("old")).unwrap();
    let mut new = File::options().read(true).write(true).open(mount.at("new")).unwrap();
    fs::rename(mount.at("new"), mount.at("old")).unwrap();
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), old.metadata().unwrap().nlink()), ("old", 0));
    new.write_all(b"NEWER").unwrap();
    assert_eq!(fs::read_to_string(mount.at("old")).unwrap(), "NEWER");
    assert_eq!(fs::read_to_string(mount.source_at("old")).unwrap(), "NEWER");
}

#[test]
fn hard_links_are_one_file() {
    let Some(mount) = Mount::builder("links").start() else { return };
    fs::write(mount.at("a"), "one").unwrap();
    fs::create_dir(mount.at("d")).unwrap();
    fs::hard_link(mount.at("a"), mount.at("d/b")).unwrap();
    let (a, b) = (mount.at("a").metadata().unwrap(), mount.at("d/b").metadata().unwrap());
    assert_eq!((a.nlink(), a.ino()), (2, b.ino()));
    fs::write(mount.at("d/b"), "three").unwrap();
    assert_eq!(fs::read_to_string(mount.at("a")).unwrap(), "three");
    drop_caches();
    assert_eq!(mount.at("a").metadata().unwrap().ino(), mount.at("d/b").metadata().unwrap().ino());
    fs::remove_file(mount.at("a")).unwrap();
    assert_eq!(mount.at("d/b").metadata().unwrap().nlink(), 1);
    symlink("d", mount.at("s")).unwrap();
    fs::hard_link(mount.at("s"), mount.at("s2")).unwrap();
    assert!(mount.at("s2").symlink_metadata().unwrap().is_symlink());
    let error = fs::hard_link(mount.at("d"), mount.at("d2")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EPERM));
}

#[test]
fn an_open_unlinked_file_lives_on() {
    let Some(mount) = Mount::builder("unlinked").start() else { return };
    let path = mount.at("gone");
    let mut file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.write_all(b"before").unwrap();
    fs::remove_file(&path).unwrap();
    drop_caches();
    let meta = file.metadata().unwrap();
    assert_eq!((meta.nlink(), meta.len()), (0, 6));
    file.write_all(b" and after").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before and after");
    file.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    file.set_len(3).unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!((meta.len(), meta.mode() & 0o7777), (3, 0o640));
    file.sync_all().unwrap();
    // A file of the same name is another file.
    fs::write(&path, "fresh").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 3);
    assert_ne!(file.metadata().unwrap().ino(), path.metadata().unwrap().ino());
    let dir = mount.at("dir");
    fs::create_dir(&dir).unwrap();
    let open = File::open(&dir).unwrap();
    fs::remove_dir(&dir).unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

/// Names and next offsets of a directory from where it stands now.
fn read_on(dir: &File) -> Vec<(Vec<u8>, u64)> {
    let mut space = [MaybeUninit::uninit(); 8192];
    let mut entries = RawDir::new(dir, &mut space);
    let mut found = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        found.push((entry.file_name().to_bytes().to_vec(), entry.next_entry_cookie()));
    }
    found
}

#[test]
fn a_directory_of_5000_can_be_read_and_seeked() {
    let Some(mount) = Mount::builder("many").start() else { return };
    for number in 0..5000 {
        File::create(mount.at(format!("file-{number:05}"))).unwrap();
    }
    let dir = File::open(mount.path()).unwrap();
    let all = read_on(&dir);
    let names: BTreeSet<_> = all.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!((all.len(), names.len()), (5002, 5002));
    let mut dir = dir;
    for at in [0, 1, 17, 2500, 4999, 5000] {
        dir.seek(SeekFrom::Start(all[at].1)).unwrap();
        let rest: Vec<_> = read_on(&dir).into_iter().map(|(name, _)| name).collect();
        let expected: Vec<_> = all[at + 1..].iter().map(|(name, _)| name.clone()).collect();
        assert!(rest == expected, "after entry {at}: {} of {}", rest.len(), expected.len());
    }
    dir.seek(SeekFrom::Start(0)).unwrap();
    assert_eq!(read_on(&dir).len(), 5002);
    // Removing while reading misses nothing.
    fs::remove_dir_all(mount.path()).unwrap_err();
    assert!(names_in(mount.source()).is_empty());
}

#[test]
fn symbolic_links_say_what_they_were_told() {
    let Some(mount) = Mount::builder("symlinks").start() else { return };
    let long = "x/".repeat(2000);
    for (name, target) in
        [("abs", "/etc/passwd"), ("rel", "d/f"), ("dangling", "no"), ("long", &long)]
    {
        symlink(target, mount.at(name)).unwrap();
        assert_eq!(fs::read_link(mount.at(name)).unwrap().to_str(), Some(target));
        assert_eq!(fs::read_link(mount.source_at(name)).unwrap().to_str(), Some(target));
        assert_eq!(mount.at(name).symlink_metadata().unwrap().len(), target.len() as u64);
    }
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("d/f"), "through").unwrap();
    assert_eq!(fs::read_to_string(mount.at("rel")).unwrap(), "through");
    symlink("loop", mount.at("loop")).unwrap();
    assert_eq!(errno(&File::open(mount.at("loop")).unwrap_err()), Some(libc::ELOOP));
    let flags = OFlags::NOFOLLOW | OFlags::RDONLY;
    let nofollow = rustix::fs::open(mount.at("rel"), flags, Mode::empty());
    assert_eq!(nofollow.unwrap_err(), Errno::LOOP);
}

#[test]
fn special_files_of_every_type() {
    if !report::have_root("mknod") {
        return;
    }
    let Some(mount) = Mount::builder("mknod").start() else { return };
    run("mkfifo", &[mount.at("fifo")]);
    let make = |name: &str, kind: &str, numbers: [&str; 2]| {
        run("mknod", &[mount.at(name).to_str().unwrap(), kind, numbers[0], numbers[1]]);
    };
    make("null", "c", ["1", "3"]);
    make("block", "b", ["7", "200"]);
    let short = ShortPath::new(mount.path());
    let short_name = short.path().join("sock");
    let socket = std::os::unix::net::UnixListener::bind(&short_name).unwrap();
    drop_caches();
    assert!(mount.at("fifo").metadata().unwrap().file_type().is_fifo());
    let null = mount.at("null").metadata().unwrap();
    assert!(null.file_type().is_char_device());
    assert_eq!(null.rdev(), rustix::fs::makedev(1, 3));
    let block = mount.at("block").metadata().unwrap();
    assert!(block.file_type().is_block_device());
    assert_eq!(block.rdev(), rustix::fs::makedev(7, 200));
    assert!(mount.at("sock").metadata().unwrap().file_type().is_socket());
    let peer = std::os::unix::net::UnixStream::connect(&short_name).unwrap();
    drop((peer, socket));
    fs::write(mount.at("null"), "into nothing").unwrap();
    assert_eq!(fs::read(mount.at("null")).unwrap(), b"");
    let fifo = mount.at("fifo");
    let writer = std::thread::spawn(move || fs::write(fifo, "through the pipe").unwrap());
    assert_eq!(fs::read_to_string(mount.at("fifo")).unwrap(), "through the pipe");
    writer.join().unwrap();
}

#[test]
fn submounts_of_the_source_are_shown() {
    if !report::have_root("mounting a tmpfs inside the source") {
        return;
    }
    let prepare = |source: &Path| {
        for name in ["before", "inner"] {
            let dir = source.join(name);
            fs::create_dir(&dir).unwrap();
            run("mount", &["-t", "tmpfs", "-o", "size=4M", "tmpfs", dir.to_str().unwrap()]);
            fs::write(dir.join("file"), name).unwrap();
        }
        fs::write(source.join("outside"), "o").unwrap();
    };
    let Some(mut mount) = Mount::builder("submounts").prepare(prepare).start() else { return };
    for name in ["before", "inner"] {
        assert_eq!(fs::read_to_string(mount.at(name).join("file")).unwrap(), name);
    }
    // Both files are likely to have the same inode number on their own filesystems.
    let ino = |name: &str| mount.at(name).join("file").metadata().unwrap().ino();
    assert_ne!(ino("before"), ino("inner"));
    fs::write(mount.at("inner/new"), "n").unwrap();
    assert_eq!(fs::read_to_string(mount.source_at("inner/new")).unwrap(), "n");
    let error = fs::rename(mount.at("outside"), mount.at("inner/outside")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EXDEV));
    let error = fs::hard_link(mount.at("outside"), mount.at("inner/outside")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EXDEV));
    let error = fs::remove_dir(mount.at("inner")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EBUSY));
    mount.unmount();
    run("umount", &[mount.source_at("before"), mount.source_at("inner")]);
}

#[test]
fn numbers_and_link_counts_are_those_of_the_source() {
    let Some(mount) = Mount::builder("numbers").start() else { return };
    fs::create_dir_all(mount.at("a/b/c")).unwrap();
    fs::create_dir(mount.at("a/d")).unwrap();
    fs::write(mount.at("a/f"), "x").unwrap();
    drop_caches();
    assert_eq!(mount.path().metadata().unwrap().ino(), 1);
    for (name, links) in [("", 3), ("a", 4), ("a/b", 3), ("a/b/c", 2), ("a/d", 2), ("a/f", 1)] {
        let meta = mount.at(name).metadata().unwrap();
        assert_eq!(meta.nlink(), links, "{name}");
        if !name.is_empty() {
            assert_eq!(meta.ino(), mount.source_at(name).metadata().unwrap().ino(), "{name}");
        }
    }
    let listed: Vec<u64> = {
        use std::os::unix::fs::DirEntryExt;
        fs::read_dir(mount.at("a")).unwrap().map(|entry| entry.unwrap().ino()).collect()
    };
    for ino in listed {
        assert!(["a/b", "a/d", "a/f"].iter().any(|n| mount.at(n).metadata().unwrap().ino() == ino));
    }
}

#[test]
fn files_belong_to_who_makes_them() {
    if !report::have_root("acting as other users") {
        return;
    }
    let Some(mount) = Mount::builder("owners").backing(Backing::Ext4(32)).start() else { return };
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let here = mount.path().display();
    let alice = |line: &str| run_as(users::ALICE, &format!("cd {here} && {line}"));
    let made = alice("umask 027 && echo x > f && mkdir d && ln -s f s && mkfifo p");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for (name, mode) in [("f", 0o640), ("d", 0o750), ("s", 0o777), ("p", 0o640)] {
        for root in [mount.path(), mount.source()] {
            let meta = root.join(name).symlink_metadata().unwrap();
            let seen = (meta.uid(), meta.gid(), meta.mode() & 0o7777);
            assert_eq!(seen, (users::ALICE, users::ALICE, mode), "{name}");
        }
    }
    // A set-group-id directory hands its group down, and its bit to directories.
    fs::create_dir(mount.at("shared")).unwrap();
    run("chown", &["0:12345", mount.at("shared").to_str().unwrap()]);
    fs::set_permissions(mount.at("shared"), fs::Permissions::from_mode(0o2777)).unwrap();
    assert!(alice("umask 022 && echo x > shared/f && mkdir shared/d").status.success());
    for (name, mode) in [("shared/f", 0o644), ("shared/d", 0o2755)] {
        let meta = mount.at(name).metadata().unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o7777), (12345, mode), "{name}");
    }
    let denied = run_as(users::BOB, &format!("cat {here}/f"));
    assert!(!denied.status.success());
    assert!(String::from_utf8_lossy(&denied.stderr).contains("Permission denied"));
    // The sticky bit: Bob may not remove Alice's file.
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    assert!(!run_as(users::BOB, &format!("rm -f {here}/f")).status.success());
    assert!(alice("rm f").status.success());
}
