//! What `stat` says of the journal and of writeback (layer 8): one block for people, series for
//! Prometheus. No state.

use std::fmt::Write;

use crate::control::format::{span, table};
use crate::control::proto::StatReply;
use crate::stats::{DeviceSnapshot, WritebackStat};
use crate::units::format_size;

/// The states of a device, in the order of their gravity.
const STATES: [&str; 5] = ["clean", "dirty", "flushing", "degraded", "failed"];

/// The block of plain `stat`; empty without a journal.
pub fn block(stat: &StatReply, top: usize) -> String {
    let Some(journal) = &stat.snapshot.writeback else { return String::new() };
    let mut text = journal_lines(journal);
    let wanted = |device: &&DeviceSnapshot| match (&device.writeback, stat.unit) {
        (Some(_), Some(unit)) => device.unit == unit,
        (Some(writeback), None) => writeback.state != "clean",
        _ => false,
    };
    let devices: Vec<_> = stat.snapshot.devices.iter().filter(wanted).collect();
    if !devices.is_empty() {
        let rows = devices.iter().take(top).filter_map(|device| row(device)).collect();
        let header = [
            "unit",
            "dirty",
            "extents",
            "oldest",
            "in flight",
            "errors",
            "state",
            "mode",
            "alone",
            "device",
            "why",
        ];
        text.push_str(&table(&header, rows, 0..6));
    }
    if devices.len() > top {
        let _ = writeln!(text, "({} more dirty images: --all)", devices.len() - top);
    }
    text
}

fn row(device: &DeviceSnapshot) -> Option<Vec<String>> {
    let writeback = device.writeback.as_ref()?;
    Some(vec![
        device.unit.to_string(),
        format_size(writeback.dirty_bytes),
        writeback.dirty_extents.to_string(),
        span(writeback.oldest_ms / 1000),
        writeback.in_flight.to_string(),
        writeback.errors.to_string(),
        writeback.state.clone(),
        writeback.mode.clone(),
        if writeback.consistent { "consistent" } else { "needs journal" }.to_string(),
        device.path.clone(),
        writeback.why.clone(),
    ])
}

fn journal_lines(journal: &WritebackStat) -> String {
    let mut text = String::new();
    let rate = match journal.rate {
        0 => "all go home at once".to_string(),
        rate => {
            let rate = rate as f64 / f64::from(1 << 20);
            format!("busy images go home at {rate:.1} MiB/s, idle ones at once")
        }
    };
    let _ = writeln!(
        text,
        "journal {}: {} % used; dirty {} in {} images, the oldest {}; {rate}, {} in flight ({})",
        format_size(journal.journal_bytes),
        journal.journal_used * 100 / journal.journal_bytes.max(1),
        format_size(journal.dirty_bytes),
        journal.dirty_devices,
        span(journal.oldest_ms / 1000),
        journal.in_flight,
        if journal.uring { "io_uring" } else { "pwrite" },
    );
    let _ = writeln!(
        text,
        "absorbed {}, home {} in {} writes, {} epochs, {} barriers ({} waiters each), {} writers \
         wait ({} had to), copied forward {}, {} records replayed",
        format_size(journal.absorbed_bytes),
        format_size(journal.home_bytes),
        journal.home_writes,
        journal.epochs,
        journal.barriers,
        per_barrier(journal),
        journal.waiting,
        journal.waited,
        format_size(journal.copied_bytes),
        journal.replayed,
    );
    if journal.errors > 0 {
        let _ = writeln!(text, "{} errors of home writes and syncs", journal.errors);
    }
    if let Some(why) = &journal.failed {
        let _ = writeln!(text, "the journal takes no more writes: {why}");
    }
    text
}

fn per_barrier(journal: &WritebackStat) -> String {
    match journal.barriers {
        0 => "-".to_string(),
        barriers => format!("{:.1}", journal.barrier_waiters as f64 / barriers as f64),
    }
}

/// What a line of `stat --watch` adds; empty without a journal.
pub fn rates(before: &StatReply, now: &StatReply, seconds: f64) -> String {
    let (Some(old), Some(new)) = (&before.snapshot.writeback, &now.snapshot.writeback) else {
        return String::new();
    };
    let home = new.home_bytes.saturating_sub(old.home_bytes) as f64 / seconds.max(0.001);
    format!(
        ", home {:.1} MiB/s, {} in flight, dirty {}",
        home / f64::from(1 << 20),
        new.in_flight,
        format_size(new.dirty_bytes)
    )
}

/// Label names and values, and the value, of one sample.
pub type Sample = (Vec<(&'static str, String)>, u64);

/// One series of the Prometheus format.
#[derive(Debug)]
pub struct Series {
    /// Behind "bcachefs_fuse_".
    pub name: String,
    /// What it counts.
    pub help: &'static str,
    /// "gauge" or "counter".
    pub kind: &'static str,
    /// Labels beside the mountpoint, and values.
    pub samples: Vec<Sample>,
}

/// Every series of writeback; none without a journal.
pub fn series(stat: &StatReply) -> Vec<Series> {
    let Some(journal) = &stat.snapshot.writeback else { return Vec::new() };
    let mut all: Vec<Series> = totals(journal)
        .into_iter()
        .map(|(name, help, kind, value)| {
            let samples = vec![(Vec::new(), value)];
            Series { name: format!("journal_{name}"), help, kind, samples }
        })
        .collect();
    let dirty: Vec<_> = stat
        .snapshot
        .devices
        .iter()
        .filter_map(|device| Some((device, device.writeback.as_ref()?)))
        .collect();
    let labels = |device: &DeviceSnapshot| {
        vec![("unit", device.unit.to_string()), ("device", device.path.clone())]
    };
    let bytes = dirty.iter().map(|(device, writeback)| (labels(device), writeback.dirty_bytes));
    all.push(Series {
        name: "device_dirty_bytes".into(),
        help: "Bytes of the device that are not home",
        kind: "gauge",
        samples: bytes.collect(),
    });
    let states = dirty.iter().flat_map(|(device, writeback)| {
        STATES.iter().map(|state| {
            let mut labels = labels(device);
            labels.push(("state", (*state).to_string()));
            (labels, u64::from(writeback.state == *state))
        })
    });
    all.push(Series {
        name: "device_writeback_state".into(),
        help: "1 for the state the device is in",
        kind: "gauge",
        samples: states.collect(),
    });
    all
}

type Total = (&'static str, &'static str, &'static str, u64);

fn totals(journal: &WritebackStat) -> [Total; 18] {
    const G: &str = "gauge";
    const C: &str = "counter";
    [
        ("size_bytes", "Bytes of the journal", G, journal.journal_bytes),
        ("used_bytes", "Bytes of the journal in use", G, journal.journal_used),
        ("dirty_bytes", "Bytes that are not home", G, journal.dirty_bytes),
        ("dirty_devices", "Devices that have such bytes", G, journal.dirty_devices),
        ("oldest_ms", "Milliseconds since the oldest of them was written", G, journal.oldest_ms),
        ("rate_bytes", "Bytes a second busy devices may go home with", G, journal.rate),
        ("in_flight", "Home writes in flight", G, journal.in_flight),
        ("waiting", "Writers that wait for room", G, journal.waiting),
        (
            "failed",
            "1 once the journal takes no more writes",
            G,
            u64::from(journal.failed.is_some()),
        ),
        (
            "absorbed_bytes_total",
            "Bytes overwritten before they went home",
            C,
            journal.absorbed_bytes,
        ),
        ("home_bytes_total", "Bytes written home", C, journal.home_bytes),
        ("home_writes_total", "Home write calls", C, journal.home_writes),
        ("epochs_total", "Epochs synced", C, journal.epochs),
        ("barriers_total", "Journal syncs", C, journal.barriers),
        ("barrier_waiters_total", "Requests that waited for one", C, journal.barrier_waiters),
        ("waited_total", "Writers that had to wait for room", C, journal.waited),
        ("copied_bytes_total", "Bytes copied forward from the tail", C, journal.copied_bytes),
        ("writeback_errors_total", "Home writes and syncs that failed", C, journal.errors),
    ]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::control::format;
    use crate::control::format::tests::sample;
    use crate::stats::DeviceWriteback;

    pub(crate) fn make_dirty(stat: &mut StatReply) {
        stat.snapshot.writeback = Some(WritebackStat {
            journal_bytes: 256 << 20,
            journal_used: 64 << 20,
            dirty_bytes: 3 << 20,
            dirty_devices: 1,
            oldest_ms: 4000,
            rate: 12 << 20,
            in_flight: 7,
            home_bytes: 1 << 30,
            barriers: 10,
            barrier_waiters: 32,
            ..WritebackStat::default()
        });
        let device = |state: &str, dirty_bytes, why: &str| DeviceWriteback {
            state: state.into(),
            mode: "busy".into(),
            dirty_bytes,
            why: why.into(),
            consistent: dirty_bytes == 0,
            ..DeviceWriteback::default()
        };
        stat.snapshot.devices[0].writeback = Some(device("clean", 0, ""));
        stat.snapshot.devices[1].writeback = Some(device("degraded", 3 << 20, "No space left"));
    }

    #[test]
    fn a_mount_without_a_journal_says_nothing_of_one() {
        assert_eq!((block(&sample(), 10), rates(&sample(), &sample(), 1.0)), Default::default());
        assert!(series(&sample()).is_empty());
    }

    #[test]
    fn the_journal_is_one_block_and_what_is_dirty_a_line() {
        let mut stat = sample();
        make_dirty(&mut stat);
        let text = format::stat(&stat, 10);
        let line = "journal 256M: 25 % used; dirty 3M in 1 images, the oldest 4s; busy images go \
                    home at 12.0 MiB/s, idle ones at once, 7 in flight (pwrite)\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("10 barriers (3.2 waiters each)"), "{text}");
        let dirty = text.lines().find(|line| line.contains("degraded")).unwrap();
        assert!(dirty.contains("b.img") && dirty.ends_with("No space left"), "{text}");
        assert!(!text.contains("clean"), "{text}");
        let one = block(&StatReply { unit: Some(1), ..stat.clone() }, 10);
        assert!(one.contains("clean") && one.contains("consistent") && !one.contains("degraded"));
        assert!(block(&stat, 0).contains("(1 more dirty images: --all)"));
        if let Some(journal) = &mut stat.snapshot.writeback {
            (journal.rate, journal.failed) = (0, Some("fdatasync failed".into()));
        }
        let text = block(&stat, 10);
        assert!(text.contains("all go home at once"), "{text}");
        assert!(text.contains("takes no more writes: fdatasync failed"), "{text}");
    }

    #[test]
    fn watching_shows_what_goes_home() {
        let (mut before, mut now) = (sample(), sample());
        make_dirty(&mut before);
        make_dirty(&mut now);
        if let Some(journal) = &mut now.snapshot.writeback {
            journal.home_bytes += 20 << 20;
        }
        assert_eq!(rates(&before, &now, 2.0), ", home 10.0 MiB/s, 7 in flight, dirty 3M");
    }
}
