//! The only clock of the program (layer 0): nobody else calls `Instant::now`.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Monotonic time since the first call in this process.
pub fn now() -> Duration {
    start().elapsed()
}

/// Monotonic milliseconds since the first call in this process.
pub fn now_ms() -> u64 {
    now().as_millis() as u64
}
