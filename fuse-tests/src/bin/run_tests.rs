//! `make test`: see `fuse_tests::runner`.

use std::process::ExitCode;

use fuse_tests::runner::{self, Options};

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)) {
        Ok(options) => runner::main(options).into(),
        Err(error) => {
            eprintln!("run_tests: {error}");
            ExitCode::from(2)
        }
    }
}
