//! Units and small names (layer 0): sizes, durations, device tags, block numbers, extents.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The tag that tells the blocks of one device from another's: the "unit" of FreeBSD's loader
/// cache (patch of 2011). Never reused within one mount.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default,
)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The number of a cache block within its device: byte offset / block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockNo(pub u64);

/// A byte run of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// One past the last byte (saturating).
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether the two runs share a byte.
    pub fn overlaps(&self, other: &Extent) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// Seconds since the epoch (negative before 1970) and nanoseconds 0..999,999,999.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct Timestamp {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
}

/// What tells whether a file changed: taken after our own last touch of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Size in bytes.
    pub size: u64,
    /// Last change of bytes.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
}

/// Identity of an inode of the source: survives renames, differs for a reused number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Device number of its filesystem.
    pub dev: u64,
    /// Inode number there.
    pub ino: u64,
    /// From the file handle; zero where the filesystem has none.
    pub generation: u64,
}

/// Parses "4096", "4K", "64M", "1.5G", "2T", "256KiB", "0". Powers of 1024. None on anything else.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift);
    }
    let value = number.parse::<f64>().ok()? * (1u64 << shift) as f64;
    (shift > 0 && value.is_finite() && value < u64::MAX as f64).then_some(value as u64)
}

/// "4K", "256M", "1.5G": the shortest form that `parse_size` reads back to about the same number.
pub fn format_size(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        let one = 1u64 << shift;
        if bytes >= one {
            if bytes.is_multiple_of(one) {
                return format!("{}{unit}", bytes / one);
            }
            return format!("{:.1}{unit}", bytes as f64 / one as f64);
        }
    }
    bytes.to_string()
}

/// Parses "30s", "100ms", "2m", "1h", "0"; a bare number is seconds. None on anything else.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let seconds = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "us" => 0.000_001,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()
}

/// "2s", "100ms", "0s": the form that `parse_duration` reads.
pub fn format_duration(duration: Duration) -> String {
    if duration.subsec_nanos() == 0 {
        format!("{}s", duration.as_secs())
    } else if duration.subsec_nanos().is_multiple_of(1_000_000) {
        format!("{}ms", duration.as_millis())
    } else {
        format!("{}us", duration.as_micros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_trip() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("4K", 4096), ("64m", 64 << 20), ("1.5G", 3 << 29)]
        {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
            assert_eq!(parse_size(&format_size(bytes)), Some(bytes), "{text}");
        }
        for bad in ["", "K", "-1", "4X", "1e9", "4 K K", "99999999999T", ".5", "1.5"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }

    #[test]
    fn durations_round_trip() {
        for (text, ms) in
            [("0", 0), ("30s", 30_000), ("100ms", 100), ("2m", 120_000), ("1.5", 1500)]
        {
            let value = parse_duration(text);
            assert_eq!(value, Some(Duration::from_millis(ms)), "{text}");
            assert_eq!(parse_duration(&format_duration(Duration::from_millis(ms))), value);
        }
        for bad in ["", "s", "-1s", "3 weeks", "1e3", "99999999999999999999999999h"] {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }
}
