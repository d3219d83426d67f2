//! The only clock of the program (layer 0): nobody else calls `Instant::now`.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::units::Timestamp;

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

/// The time of day: what a file's times are made of.
pub fn wall() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    Timestamp { sec: now.as_secs() as i64, nsec: now.subsec_nanos() }
}
