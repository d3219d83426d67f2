//! Standard output (layer 9): a reader that went away is no error, and no panic.

use std::io::{ErrorKind, Write};

use crate::cli::failure::{Failure, Outcome};

/// Writes the text. False: nobody reads any more.
pub fn print(text: &str) -> Outcome<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            Err(Failure::new("write", "standard output", format!("{error}; check where it goes")))
        }
    }
}

/// Writes one JSON object and a newline.
pub fn print_json(value: &impl serde::Serialize) -> Outcome<bool> {
    let text = serde_json::to_string(value)
        .map_err(|error| Failure::new("write", "standard output", error))?;
    print(&(text + "\n"))
}
