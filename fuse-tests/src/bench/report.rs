//! The table on the terminal, `bench.json` and `bench.svg`.

use std::fs;
use std::path::Path;

use plotters::prelude::*;
use serde_json::{Value, json};

use super::Res;
use super::duel::Duel;

/// What a row must reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Need {
    /// The ratio must be at least this.
    Ratio(f64),
    /// The value itself must be at most this.
    AtMost(f64),
    /// The value itself must be at least this.
    AtLeast(f64),
}

/// One measured line.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// Unit of `ours` and `other`.
    pub unit: &'static str,
    /// Whom it is measured against; empty for a value on its own.
    pub against: &'static str,
    /// Our value.
    pub ours: f64,
    /// The other's value.
    pub other: f64,
    /// Ours / other.
    pub ratio: f64,
    /// What is asked.
    pub need: Need,
}

impl Row {
    /// A comparison.
    pub fn of(
        name: &str,
        unit: &'static str,
        against: &'static str,
        result: Duel,
        need: f64,
    ) -> Row {
        let Duel { ours, other, ratio } = result;
        Row { name: name.into(), unit, against, ours, other, ratio, need: Need::Ratio(need) }
    }

    /// A value on its own.
    pub fn alone(name: &str, unit: &'static str, ours: f64, need: Need) -> Row {
        let (against, other, ratio) = ("", 0.0, 0.0);
        Row { name: name.into(), unit, against, ours, other, ratio, need }
    }

    /// Whether it reaches what is asked.
    pub fn ok(&self) -> bool {
        match self.need {
            Need::Ratio(least) => self.ratio >= least,
            Need::AtMost(most) => self.ours <= most,
            Need::AtLeast(least) => self.ours >= least,
        }
    }

    /// 1.0 is exactly what is asked, more is better; None where that is no ratio.
    fn reached(&self) -> Option<f64> {
        match self.need {
            Need::Ratio(least) => Some(self.ratio / least),
            Need::AtMost(most) if most > 0.0 && self.ours > 0.0 => Some(most / self.ours),
            Need::AtLeast(least) if least > 0.0 => Some(self.ours / least),
            _ => None,
        }
    }

    /// One line of the table.
    pub fn line(&self) -> String {
        let (other, ratio) = match self.need {
            Need::Ratio(_) => (number(self.other), format!("{:.2}", self.ratio)),
            _ => ("-".into(), "-".into()),
        };
        let need = match self.need {
            Need::Ratio(least) => format!(">= {least:.2}"),
            Need::AtMost(most) => format!("<= {}", number(most)),
            Need::AtLeast(least) => format!(">= {}", number(least)),
        };
        let verdict = if self.ok() { "ok" } else { "BELOW" };
        let against = if self.against.is_empty() { "-" } else { self.against };
        let (name, unit, ours) = (&self.name, self.unit, number(self.ours));
        format!(
            "{name:<36} {ours:>9} {other:>9} {unit:<6} {against:<7} {ratio:>6} {need:>9}  {verdict}"
        )
    }

    fn json(&self) -> Value {
        let (kind, need) = match self.need {
            Need::Ratio(n) => ("ratio_at_least", n),
            Need::AtMost(n) => ("at_most", n),
            Need::AtLeast(n) => ("at_least", n),
        };
        json!({"name": self.name, "unit": self.unit, "against": self.against, "ours": self.ours,
            "other": self.other, "ratio": self.ratio, "required": {kind: need}, "ok": self.ok()})
    }
}

/// The table's head.
pub fn head() -> String {
    format!(
        "{:<36} {:>9} {:>9} {:<6} {:<7} {:>6} {:>9}",
        "line", "ours", "other", "unit", "against", "ratio", "required"
    )
}

/// Three or four digits that matter.
fn number(value: f64) -> String {
    match value {
        v if v >= 1e7 => format!("{:.1}M", v / 1e6),
        v if v >= 1e5 => format!("{:.0}k", v / 1e3),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v if v >= 100.0 || v == v.trunc() => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// Writes `bench.json` and `bench.svg` into `directory`.
pub fn save(rows: &[Row], quick: bool, directory: &Path) -> Res<()> {
    fs::create_dir_all(directory)?;
    let rows_json: Vec<Value> = rows.iter().map(Row::json).collect();
    let all = json!({"schema": 1, "quick": quick, "rows": rows_json});
    fs::write(directory.join("bench.json"), serde_json::to_string_pretty(&all)? + "\n")?;
    draw(rows, &directory.join("bench.svg"))
}

/// A bar a row: how far what was asked is reached, 1.0 being the line.
fn draw(rows: &[Row], file: &Path) -> Res<()> {
    const LEFT: i32 = 330;
    const UNIT: f64 = 260.0;
    const STEP: i32 = 26;
    let rows: Vec<(&Row, f64)> =
        rows.iter().filter_map(|row| Some((row, row.reached()?))).collect();
    let height = 60 + STEP * rows.len() as i32;
    let area = SVGBackend::new(file, (960, height as u32)).into_drawing_area();
    area.fill(&WHITE).map_err(|e| e.to_string())?;
    let text = |at: (i32, i32), words: String, size: u32, color: &RGBColor| -> Res<()> {
        let style = ("sans-serif", size).into_font().color(color);
        area.draw(&Text::new(words, at, style)).map_err(|e| e.to_string().into())
    };
    text((10, 8), "make bench: reached / required (1.0 = required)".into(), 16, &BLACK)?;
    for (row, (line, reached)) in (0..).zip(&rows) {
        let top = 36 + STEP * row;
        let color = if line.ok() { RGBColor(46, 125, 50) } else { RGBColor(198, 40, 40) };
        let right = LEFT + (reached.min(2.0) * UNIT) as i32;
        let bar = Rectangle::new([(LEFT, top), (right, top + STEP - 8)], color.filled());
        area.draw(&bar).map_err(|e| e.to_string())?;
        text((10, top + 2), line.name.clone(), 14, &BLACK)?;
        let shown = match line.need {
            Need::Ratio(need) => format!("{:.2} (>= {need})", line.ratio),
            _ => format!("{} {}", number(line.ours), line.unit),
        };
        text((right + 6, top + 2), shown, 13, &BLACK)?;
    }
    let at = LEFT + UNIT as i32;
    let mark = PathElement::new([(at, 30), (at, height - 16)], BLACK.stroke_width(1));
    area.draw(&mark).map_err(|e| e.to_string())?;
    area.present().map_err(|e| e.to_string().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_and_files() {
        let result = Duel { ours: 90.0, other: 100.0, ratio: 0.9 };
        let good = Row::of("good", "1/s", "null", result, 0.9);
        let bad = Row::of("bad", "1/s", "null", result, 0.95);
        let none = Row::alone("requests", "ops", 0.0, Need::AtMost(0.0));
        assert!(good.ok() && !bad.ok() && none.ok());
        assert!(bad.line().ends_with("BELOW"), "{}", bad.line());
        let directory = tempfile::tempdir().unwrap();
        save(&[good, bad, none], true, directory.path()).unwrap();
        let svg = fs::read_to_string(directory.path().join("bench.svg")).unwrap();
        assert!(svg.contains("0.90 (&gt;= 0.95)"), "{svg}");
        let parsed: Value =
            serde_json::from_str(&fs::read_to_string(directory.path().join("bench.json")).unwrap())
                .unwrap();
        assert_eq!(parsed["rows"][2]["required"]["at_most"], 0.0);
    }
}
