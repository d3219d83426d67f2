//! A second process for tests of locks and mappings. It does one thing, prints what came of it,
//! waits until its standard input ends, and leaves.
//!
//! `second flock FILE`, `second posix FILE`: a lock that does not wait ("locked" or "busy");
//! `second map-write FILE OFFSET TEXT`, `second map-read FILE OFFSET LEN`: a shared mapping.

use std::fs::File;
use std::io::{Read, Write, stdin, stdout};

use fuse_tests::mapping::Mapping;
use rustix::fs::{FlockOperation, fcntl_lock, flock};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let open = |path| File::options().read(true).write(true).open(path).expect("open");
    let map = |file: &File| Mapping::new(file, file.metadata().expect("stat").len() as usize, true);
    let file;
    let mapping;
    let exclusive = FlockOperation::NonBlockingLockExclusive;
    let said = match words[..] {
        ["flock", path] => {
            file = open(path);
            flock(&file, exclusive).map_or("busy", |()| "locked").to_owned()
        }
        ["posix", path] => {
            file = open(path);
            fcntl_lock(&file, exclusive).map_or("busy", |()| "locked").to_owned()
        }
        ["map-write", path, offset, text] => {
            mapping = map(&open(path)).expect("mmap");
            mapping.write(offset.parse().expect("offset"), text.as_bytes());
            "written".to_owned()
        }
        ["map-read", path, offset, len] => {
            mapping = map(&open(path)).expect("mmap");
            let bytes = mapping.read(offset.parse().expect("offset"), len.parse().expect("len"));
            String::from_utf8_lossy(&bytes).into_owned()
        }
        _ => panic!("{words:?}"),
    };
    writeln!(stdout(), "{said}").expect("stdout");
    let _ = stdin().read_to_end(&mut Vec::new());
}
