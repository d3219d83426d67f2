//! `stat --prometheus` (layer 8): the counters in the Prometheus text format.

use std::fmt::Write;

use crate::control::proto::StatReply;
use crate::control::writeback;
use crate::stats::Counters;

/// What each counter counts, by its name in `Counters`.
const HELP: &[(&str, &str)] = &[
    ("ops", "Read requests"),
    ("bypasses", "Read requests that were not admitted to the cache"),
    ("hits", "Blocks of admitted reads found in the cache"),
    ("misses", "Blocks of admitted reads not found in the cache"),
    ("bypassed", "Blocks of requests that were not admitted"),
    ("bypassed_large", "Bypassed blocks of requests larger than bypass"),
    ("bypassed_stream", "Bypassed blocks of streams past sequential_cutoff"),
    ("bypass_hits", "Bypassed blocks served from the cache all the same"),
    ("backing_blocks", "Blocks read from the device"),
    ("backing_reads", "Read calls to the device"),
    ("readahead_blocks", "Blocks read ahead"),
    ("readahead_used", "Blocks read ahead and then used"),
    ("readahead_wasted", "Blocks read ahead and dropped unused"),
    ("evictions", "Blocks evicted to make room"),
    ("invalidations", "Blocks dropped because their bytes changed"),
    ("writes", "Write requests"),
    ("read_bytes", "Bytes of read requests"),
    ("written_bytes", "Bytes of write requests"),
    ("syncs", "Sync requests that reached the device"),
    ("errors", "Requests that failed with an I/O error"),
];

/// The whole exposition: `_total` series per mount, `_device_` series per device.
pub fn exposition(stat: &StatReply) -> String {
    let mount = format!("mountpoint=\"{}\"", escape(&stat.mount.mountpoint.to_string()));
    let snapshot = &stat.snapshot;
    let mut text = String::new();
    let gauges = [
        ("block_size_bytes", "Bytes of one block", u64::from(snapshot.block_size)),
        ("capacity_blocks", "Blocks the cache can hold", snapshot.capacity_blocks),
        ("resident_blocks", "Blocks in the cache", snapshot.resident_blocks),
        ("open_files", "Open file handles", stat.open_files),
        ("uptime_seconds", "Seconds since the mount", stat.mount.uptime_ms / 1000),
    ];
    for (name, help, value) in gauges {
        head(&mut text, name, help, "gauge");
        let _ = writeln!(text, "bcachefs_fuse_{name}{{{mount}}} {value}");
    }
    head(&mut text, "logged_errors_total", "Errors logged since the mount", "counter");
    let _ = writeln!(text, "bcachefs_fuse_logged_errors_total{{{mount}}} {}", stat.errors_logged);
    for (index, name) in Counters::NAMES.iter().enumerate() {
        let help = HELP.iter().find(|(known, _)| known == name).map_or(*name, |(_, help)| help);
        head(&mut text, &format!("{name}_total"), help, "counter");
        let value = snapshot.total.values()[index];
        let _ = writeln!(text, "bcachefs_fuse_{name}_total{{{mount}}} {value}");
        head(&mut text, &format!("device_{name}_total"), help, "counter");
        for device in &snapshot.devices {
            let (unit, path) = (device.unit, escape(&device.path));
            let value = device.counters.values()[index];
            let _ = writeln!(
                text,
                "bcachefs_fuse_device_{name}_total{{{mount},unit=\"{unit}\",device=\"{path}\"}} \
                 {value}"
            );
        }
    }
    for series in writeback::series(stat) {
        head(&mut text, &series.name, series.help, series.kind);
        for (labels, value) in series.samples {
            let labels: String = labels
                .iter()
                .map(|(name, value)| format!(",{name}=\"{}\"", escape(value)))
                .collect();
            let _ = writeln!(text, "bcachefs_fuse_{}{{{mount}{labels}}} {value}", series.name);
        }
    }
    text
}

fn head(text: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(text, "# HELP bcachefs_fuse_{name} {help}");
    let _ = writeln!(text, "# TYPE bcachefs_fuse_{name} {kind}");
}

/// A label value: backslash, quote and newline are escaped.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::format::tests::sample;

    #[test]
    fn every_counter_has_its_help() {
        let names: Vec<&str> = HELP.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, Counters::NAMES);
    }

    #[test]
    fn every_line_is_a_comment_or_a_sample() {
        let mut stat = sample();
        stat.snapshot.devices[0].path = "a\"b\\c\nd".into();
        writeback::tests::make_dirty(&mut stat);
        let text = exposition(&stat);
        assert!(text.contains("bcachefs_fuse_journal_dirty_bytes{mountpoint=\"/mnt\"} 3145728\n"));
        assert!(text.contains("unit=\"2\",device=\"b.img\",state=\"degraded\"} 1\n"), "{text}");
        assert!(text.contains("bcachefs_fuse_hits_total{mountpoint=\"/mnt\"} 90\n"), "{text}");
        assert!(text.contains("device=\"a\\\"b\\\\c\\nd\"} 45\n"), "{text}");
        for line in text.lines().filter(|line| !line.starts_with("# ")) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(series.starts_with("bcachefs_fuse_") && series.ends_with('}'), "{line}");
            assert!(value.parse::<u64>().is_ok(), "{line}");
        }
    }
}
