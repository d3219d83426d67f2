//! `seekdisk MOUNTPOINT BYTES BACKING`: the latency device of `make bench` (see
//! `fuse_tests::seekdisk`), served until it is unmounted.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

fn serve() -> Result<(), String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [mountpoint, bytes, backing] = words.as_slice() else {
        return Err("usage: seekdisk MOUNTPOINT BYTES BACKING".into());
    };
    let bytes = bytes.parse().map_err(|e| format!("{bytes}: {e}"))?;
    let mut options = File::options();
    let backing = options.read(true).write(true).create(true).truncate(true).open(backing);
    let backing = backing.map_err(|e| e.to_string())?;
    fuse_tests::seekdisk::serve(backing, bytes, Path::new(mountpoint)).map_err(|e| e.to_string())
}

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("seekdisk: {error}");
            ExitCode::FAILURE
        }
    }
}
