//! Extended attributes and POSIX ACLs: as on the source, tried as two users.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use fuse_tests::tools::{sh, try_run};
use fuse_tests::users::{ALICE, BOB};
use fuse_tests::{Backing, Mount, drop_caches, report, run, run_as};
use rustix::fs::{XattrFlags, getxattr, lgetxattr, listxattr, lsetxattr, removexattr, setxattr};
use rustix::io::Errno;

fn get(path: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0u8; 65536];
    let len = getxattr(path, name, &mut value[..])?;
    value.truncate(len);
    Ok(value)
}

fn list(path: &Path) -> Vec<String> {
    let mut names = vec![0u8; 65536];
    let len = listxattr(path, &mut names[..]).unwrap();
    let text = String::from_utf8(names[..len].to_vec()).unwrap();
    let mut names: Vec<_> = text.split_terminator('\0').map(str::to_owned).collect();
    names.retain(|name| !name.starts_with("security."));
    names.sort();
    names
}

/// getxattr with no buffer at all, as getfattr begins.
fn size_of_value(path: &Path) -> isize {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let name = c"user.a".as_ptr();
    // SAFETY: both strings end with NUL; nothing is written through a null pointer of size 0.
    unsafe { libc::getxattr(path.as_ptr(), name, std::ptr::null_mut(), 0) }
}

#[test]
fn extended_attributes() {
    let Some(mount) = Mount::builder("xattr").start() else { return };
    let file = mount.at("f");
    fs::write(&file, "x").unwrap();
    assert_eq!(get(&file, "user.none"), Err(Errno::NODATA));
    setxattr(&file, "user.a", b"1", XattrFlags::empty()).unwrap();
    setxattr(&file, "user.b", b"\x00\xff", XattrFlags::CREATE).unwrap();
    setxattr(&file, "user.empty", b"", XattrFlags::empty()).unwrap();
    assert_eq!(setxattr(&file, "user.b", b"", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(setxattr(&file, "user.c", b"", XattrFlags::REPLACE), Err(Errno::NODATA));
    setxattr(&file, "user.a", b"longer", XattrFlags::REPLACE).unwrap();
    drop_caches();
    assert_eq!(list(&file), ["user.a", "user.b", "user.empty"]);
    assert_eq!(list(&mount.source_at("f")), list(&file));
    assert_eq!(get(&file, "user.a").unwrap(), b"longer");
    assert_eq!(get(&file, "user.b").unwrap(), b"\x00\xff");
    assert_eq!(get(&file, "user.empty").unwrap(), b"");
    let mut small = [0u8; 3];
    assert_eq!(getxattr(&file, "user.a", &mut small[..]), Err(Errno::RANGE));
    // A zero-length buffer asks for the size.
    assert_eq!((size_of_value(&file), size_of_value(&mount.source_at("f"))), (6, 6));
    let big = vec![7u8; 3000];
    setxattr(&file, "user.big", &big, XattrFlags::empty()).unwrap();
    assert_eq!(get(&mount.source_at("f"), "user.big").unwrap(), big);
    for name in ["user.a", "user.b", "user.big", "user.empty"] {
        removexattr(&file, name).unwrap();
    }
    assert_eq!(removexattr(&file, "user.a"), Err(Errno::NODATA));
    assert!(list(&file).is_empty());
    // What this kernel and filesystem say to an unknown namespace, ours says too.
    let odd = |path: &Path| setxattr(path, "nonsense.a", b"1", XattrFlags::empty());
    assert_eq!(odd(&file), odd(&mount.source_at("f")));
}

#[test]
fn attributes_of_links_directories_and_root() {
    let Some(mount) = Mount::builder("xattr-types").start() else { return };
    fs::create_dir(mount.at("d")).unwrap();
    setxattr(mount.at("d"), "user.d", b"dir", XattrFlags::empty()).unwrap();
    assert_eq!(get(&mount.source_at("d"), "user.d").unwrap(), b"dir");
    symlink("d", mount.at("s")).unwrap();
    let on_link = |name| lsetxattr(mount.at("s"), name, b"1", XattrFlags::empty());
    assert_eq!(on_link("user.s"), Err(Errno::PERM));
    assert_eq!(get(&mount.at("s"), "user.d").unwrap(), b"dir");
    if report::have_root("trusted attributes") {
        on_link("trusted.s").unwrap();
        let mut value = [0u8; 8];
        assert_eq!(lgetxattr(mount.source_at("s"), "trusted.s", &mut value[..]), Ok(1));
        setxattr(mount.path(), "trusted.root", b"r", XattrFlags::empty()).unwrap();
        assert_eq!(get(mount.source(), "trusted.root").unwrap(), b"r");
    }
}

#[test]
fn a_write_takes_set_user_id_and_capabilities_away() {
    if !report::have_root("file capabilities") {
        return;
    }
    let Some(mount) = Mount::builder("caps").backing(Backing::Ext4(32)).start() else { return };
    for root in [mount.path(), mount.source()] {
        let file = root.join("program");
        fs::write(&file, "x").unwrap();
        run("chown", &[&ALICE.to_string(), file.to_str().unwrap()]);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        let capability = b"\x01\x00\x00\x02\x00\x20\x00\x00\0\0\0\0\0\0\0\0\0\0\0\0";
        setxattr(&file, "security.capability", capability, XattrFlags::empty()).unwrap();
        let line = format!("echo more >> {}", file.display());
        assert!(run_as(ALICE, &line).status.success());
        let mode = file.metadata().unwrap().mode() & 0o7777;
        assert_eq!((mode, get(&file, "security.capability")), (0o755, Err(Errno::NODATA)));
        fs::remove_file(&file).unwrap();
    }
}

/// Does the same things in a directory and says what came of each.
fn story(dir: &Path) -> Vec<String> {
    let mut said = Vec::new();
    let here = dir.display();
    let mut attempt = |who: u32, line: &str| {
        let output = run_as(who, &format!("cd {here} && umask 022 && {line}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = error.lines().last().unwrap_or("").replace(&here.to_string(), "");
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        said.push(format!("{who} {line}: {} {out} {last}", output.status));
    };
    sh(dir, "umask 022; echo secret > f; mkdir d; chmod 755 .; chmod 640 f");
    // Alice is let in by ACL only; Bob is kept out by ACL only.
    sh(dir, &format!("setfacl -m u:{ALICE}:rw f; echo open > g; chmod 666 g"));
    sh(dir, &format!("setfacl -m u:{BOB}:--- g"));
    for who in [ALICE, BOB] {
        attempt(who, "cat f");
        attempt(who, "echo more >> f");
        attempt(who, "cat g");
        attempt(who, "echo more >> g");
    }
    // chmod of the group bits is chmod of the mask.
    sh(dir, "chmod 600 f");
    attempt(ALICE, "cat f");
    sh(dir, "chmod 640 f");
    attempt(ALICE, "cat f");
    attempt(ALICE, "echo no >> f");
    // What is made in a directory with default entries inherits them.
    sh(dir, &format!("chmod 777 d; setfacl -m d:u:{BOB}:rwx,d:g::r-x,d:o::- d"));
    attempt(ALICE, "umask 077; echo a > d/file; mkdir d/sub; echo b > d/sub/deep; ln -s x d/link");
    attempt(BOB, "cat d/file d/sub/deep");
    attempt(BOB, "echo b > d/sub/bob; rm d/file");
    attempt(ALICE, "setfacl -b d/sub/deep; chmod 755 d/sub");
    attempt(BOB, "setfacl -m u:0:r d/sub/deep");
    sh(dir, "cp -a d copy; setfacl -k d; touch d/plain; setfacl -x u:23001 f");
    attempt(ALICE, "cat f");
    said
}

#[test]
fn access_control_lists_are_those_of_the_source() {
    if !report::have_root("acting as two users") {
        return;
    }
    let Some(mount) = Mount::builder("acl").backing(Backing::Ext4(32)).start() else { return };
    fs::create_dir(mount.source_at("straight")).unwrap();
    fs::create_dir(mount.at("ours")).unwrap();
    let straight = story(&mount.source_at("straight"));
    let ours = story(&mount.at("ours"));
    for (ours, straight) in ours.iter().zip(&straight) {
        assert_eq!(ours, straight);
    }
    // The lists themselves, seen from both sides, fresh and from the kernel's caches.
    let listing = |dir: &Path| sh(dir, "getfacl -R -n . | sort -s; stat -c '%n %A' $(find .|sort)");
    let expected = listing(&mount.source_at("straight"));
    assert!(expected.contains("default:user:23002:rwx"), "{expected}");
    assert_eq!(listing(&mount.at("ours")), expected);
    assert_eq!(listing(&mount.source_at("ours")), expected);
    drop_caches();
    assert_eq!(listing(&mount.at("ours")), expected);
    assert_eq!(listing(&mount.at("straight")), expected);
}

#[test]
fn a_source_without_lists_says_so() {
    if !report::have_root("mounting ext4 with noacl") {
        return;
    }
    let Some(mount) = Mount::builder("noacl").backing(Backing::Tmpfs(8)).start() else { return };
    // tmpfs has ACLs but no user attributes on old kernels: the same answer on both sides.
    fs::write(mount.at("f"), "x").unwrap();
    let said = |path: &Path| {
        let path: &OsStr = path.as_os_str();
        let words = [OsStr::new("-m"), OsStr::new("u:1:r"), path];
        try_run("setfacl", &words).status.success()
    };
    assert_eq!(said(&mount.at("f")), said(&mount.source_at("f")));
}
