//! `journal_fixture FILE`: writes a journal of the format of today as text (see
//! `fuse_tests::fixture`). A fixture that exists is never replaced.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;

use fuse_tests::fixture::{make, render};

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: journal_fixture NEW-FILE");
        return ExitCode::from(2);
    };
    let text = render(&make().expect("a store in memory"));
    let written = File::create_new(&path).and_then(|mut file| file.write_all(text.as_bytes()));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
