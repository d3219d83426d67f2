//! SIGTERM, SIGINT and SIGHUP end the mount (layer 8). A thread of its own receives them; all other
//! threads have them blocked.

use crate::error::{OpContext, Result};
use crate::sys::process;

pub use crate::sys::process::Signal;

/// Blocks the signals. To be called before the first thread exists.
pub fn block() -> Result<()> {
    process::block_signals()
}

/// Starts the thread that calls `deliver` for every signal until that says false. It never keeps
/// the process alive.
pub fn spawn(deliver: impl Fn(Signal) -> bool + Send + 'static) -> Result<()> {
    let receive = move || {
        while let Ok(signal) = process::wait_signal() {
            if !deliver(signal) {
                break;
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(receive).op("start a thread")?;
    Ok(())
}
