//! Answers as text for people (layer 8): tables, the loader's line, the block listing.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use crate::control::proto::{LoggedError, StatReply};
use crate::control::{explain, writeback};
use crate::stats::{BlockInfo, Counters};
use crate::units::format_size;

/// A table without frames: it survives being pasted and cut. The columns in `right` are numbers.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, right: std::ops::Range<usize>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec()).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        column.set_padding((0, 2));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}

/// "N ops N bypasses N hits N misses", as FreeBSD's loader says it.
pub fn loader_line(counters: &Counters) -> String {
    format!(
        "{} ops {} bypasses {} hits {} misses",
        counters.ops, counters.bypasses, counters.hits, counters.misses
    )
}

/// "93 %" of the admitted blocks; "-" where there were none.
pub fn hit_percent(counters: &Counters) -> String {
    match (counters.hits * 100).checked_div(counters.hits + counters.misses) {
        Some(percent) => format!("{percent} %"),
        None => "-".to_string(),
    }
}

/// The answer of plain `stat`: a line a device (at most `top`), the total, and the words.
pub fn stat(stat: &StatReply, top: usize) -> String {
    let snapshot = &stat.snapshot;
    let bytes = |blocks: u64| format_size(blocks * u64::from(snapshot.block_size));
    let row = |unit: String, counters: &Counters, resident: u64, name: &str| {
        vec![
            unit,
            counters.ops.to_string(),
            counters.bypasses.to_string(),
            counters.hits.to_string(),
            counters.misses.to_string(),
            hit_percent(counters),
            bytes(counters.backing_blocks),
            bytes(resident),
            name.to_string(),
        ]
    };
    let wanted = |unit: u32| stat.unit.is_none_or(|only| only == unit);
    let devices: Vec<_> = snapshot.devices.iter().filter(|d| wanted(d.unit)).collect();
    let mut rows: Vec<_> = devices
        .iter()
        .take(top)
        .map(|d| row(d.unit.to_string(), &d.counters, d.resident_blocks, &d.path))
        .collect();
    if stat.unit.is_none() {
        rows.push(row("all".into(), &snapshot.total, snapshot.resident_blocks, "total"));
    }
    let header =
        ["unit", "ops", "bypasses", "hits", "misses", "hit", "from disk", "cached", "device"];
    let mut text = table(&header, rows, 0..8);
    if devices.len() > top {
        let _ = writeln!(text, "({} more devices: --all)", devices.len() - top);
    }
    let _ = writeln!(
        text,
        "\ncache {} in blocks of {}: {} % full; {}, bypass {}, sequential_cutoff {}",
        bytes(snapshot.capacity_blocks),
        format_size(u64::from(snapshot.block_size)),
        snapshot.resident_blocks * 100 / snapshot.capacity_blocks.max(1),
        stat.cache_mode,
        format_size(stat.bypass),
        format_size(stat.sequential_cutoff),
    );
    let counters = explain::counters(stat);
    let _ = writeln!(text, "{}", loader_line(&counters));
    if counters.readahead_blocks > 0 {
        let _ = writeln!(
            text,
            "{} blocks read ahead: {} used, {} wasted",
            counters.readahead_blocks, counters.readahead_used, counters.readahead_wasted
        );
    }
    text.push_str(&writeback::block(stat, top));
    for line in explain::idle(stat) {
        let _ = writeln!(text, "{line}");
    }
    if stat.errors_logged > 0 {
        let _ = writeln!(text, "{} errors: stat --errors shows the last", stat.errors_logged);
    }
    text
}

/// What happened within `seconds`, on one line.
pub fn rates(change: &Counters, seconds: f64, block_size: u32) -> String {
    let per = |count: u64| count as f64 / seconds.max(0.001);
    let mib = |bytes: u64| per(bytes) / f64::from(1 << 20);
    format!(
        "{:.0} ops/s {:.0} bypasses/s {:.0} hits/s {:.0} misses/s {} hit, read {:.1} MiB/s, \
         from disk {:.1} MiB/s, written {:.1} MiB/s",
        per(change.ops),
        per(change.bypasses),
        per(change.hits),
        per(change.misses),
        hit_percent(change),
        mib(change.read_bytes),
        mib(change.backing_blocks * u64::from(block_size)),
        mib(change.written_bytes),
    )
}

/// Every block, four a row: "unit:block age count", the age in seconds.
pub fn blocks(blocks: &[BlockInfo]) -> String {
    let cells: Vec<String> = blocks
        .iter()
        .map(|b| format!("{}:{} {}s {}", b.unit, b.block, b.age_ms / 1000, b.count))
        .collect();
    let width = cells.iter().map(String::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in cells.chunks(4) {
        let row: Vec<String> = row.iter().map(|cell| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", row.join("  ").trim_end());
    }
    text
}

/// The last errors, newest last; `now_ms` is wall time.
pub fn errors(errors: &[LoggedError], now_ms: u64) -> String {
    let mut text = String::new();
    for error in errors {
        let age = now_ms.saturating_sub(error.time_ms) / 1000;
        let _ = writeln!(text, "{} ago: {}", span(age), error.text);
    }
    text
}

/// "45s", "12m", "3h", "4d".
pub fn span(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::control::proto::{MountFacts, Name};
    use crate::stats::{DeviceSnapshot, Snapshot};

    pub(crate) fn sample() -> StatReply {
        let total = Counters { ops: 30, bypasses: 2, hits: 90, misses: 10, ..Counters::default() };
        let device = |unit: u32, path: &str| DeviceSnapshot {
            unit,
            path: path.to_string(),
            resident_blocks: 256,
            open: true,
            counters: Counters { ops: 15, hits: 45, misses: 5, ..Counters::default() },
            writeback: None,
        };
        StatReply {
            mount: MountFacts {
                mountpoint: Name::Text("/mnt".into()),
                source: Name::Text("/srv".into()),
                device: "0:45".into(),
                pid: 7,
                uid: 0,
                read_only: false,
                allow_other: true,
                version: "0.1.0".into(),
                uptime_ms: 5000,
            },
            unit: None,
            open_files: 1,
            cache_mode: "writethrough".into(),
            bypass: 256 << 10,
            sequential_cutoff: 64 << 20,
            expire_ms: 0,
            errors_logged: 0,
            snapshot: Snapshot {
                block_size: 4096,
                capacity_blocks: 65536,
                resident_blocks: 512,
                total,
                devices: vec![device(1, "a.img"), device(2, "b.img")],
                writeback: None,
            },
        }
    }

    #[test]
    fn stat_shows_devices_total_and_the_loaders_line() {
        let text = stat(&sample(), 10);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("unit") && lines[0].ends_with("device"), "{text}");
        assert!(lines[1].ends_with("a.img") && lines[1].contains("90 %"), "{text}");
        assert!(lines[3].ends_with("total") && lines[3].contains("2M"), "{text}");
        assert!(text.contains("\n30 ops 2 bypasses 90 hits 10 misses\n"), "{text}");
        assert!(text.contains("cache 256M in blocks of 4K: 0 % full; writethrough"), "{text}");
        assert!(stat(&sample(), 1).contains("(1 more devices: --all)"));
        let one = stat(&StatReply { unit: Some(2), ..sample() }, 10);
        assert!(one.contains("b.img") && !one.contains("a.img") && !one.contains("total"));
        assert!(one.contains("15 ops 0 bypasses 45 hits 5 misses"));
    }

    #[test]
    fn blocks_stand_four_a_row() {
        let block = |unit, block, count| BlockInfo { unit, block, age_ms: 12_300, count };
        let list =
            [block(1, 0, 3), block(1, 1024, 0), block(2, 7, 1), block(2, 8, 1), block(3, 9, 1)];
        let text = blocks(&list);
        assert_eq!(text, "1:0 12s 3     1:1024 12s 0  2:7 12s 1     2:8 12s 1\n3:9 12s 1\n");
        assert_eq!(blocks(&[]), "");
    }

    #[test]
    fn rates_and_ages() {
        let change =
            Counters { ops: 20, hits: 9, misses: 1, read_bytes: 4 << 20, ..Counters::default() };
        let line = rates(&change, 2.0, 4096);
        assert!(line.starts_with("10 ops/s 0 bypasses/s 4 hits/s 0 misses/s 90 % hit, read 2.0"));
        let error = LoggedError { time_ms: 1000, text: "read: EIO".into() };
        assert_eq!(errors(&[error], 121_000), "2m ago: read: EIO\n");
    }
}
