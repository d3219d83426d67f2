//! The miss curves as SVG, both axes logarithmic.

use std::path::Path;

use plotters::prelude::*;

use crate::{Outcome, Result, SIZES};

pub fn draw(path: &Path, curves: [(&str, &Vec<Outcome>); 3]) -> Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let most = curves.iter().flat_map(|(_, curve)| curve.iter()).map(|o| o.misses).max();
    let most = most.unwrap_or(1).max(1) as f64 * 2.0;
    let area = SVGBackend::new(path, (800, 500)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Misses of one boot by cache size", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d((32f64..1024f64).log_scale().base(2.0), (100f64..most).log_scale())?;
    chart.configure_mesh().x_desc("cache, blocks of 512 bytes").y_desc("blocks missed").draw()?;
    for ((name, curve), color) in curves.into_iter().zip([&RED, &BLUE, &BLACK]) {
        let points: Vec<(f64, f64)> = SIZES
            .iter()
            .zip(curve)
            .map(|(&size, outcome)| (size as f64, outcome.misses.max(100) as f64))
            .collect();
        let style = ShapeStyle::from(color).stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.clone(), style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], style));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, style.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
