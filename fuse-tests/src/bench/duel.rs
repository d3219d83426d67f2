//! Two contenders side by side: alternating, each first as often as the other, medians.

use super::Res;

/// The medians of both, and the median of the ratios of neighbouring samples (drift of the
/// machine hits both of a pair).
#[derive(Clone, Copy, Debug)]
pub struct Duel {
    /// Median of ours.
    pub ours: f64,
    /// Median of the other.
    pub other: f64,
    /// Median of ours / other, pair by pair.
    pub ratio: f64,
}

/// Takes `rounds` samples of each (larger is better).
pub fn duel(
    rounds: usize,
    mut ours: impl FnMut() -> Res<f64>,
    mut other: impl FnMut() -> Res<f64>,
) -> Res<Duel> {
    let mut pairs = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let pair = if round % 2 == 0 {
            let first = ours()?;
            (first, other()?)
        } else {
            let first = other()?;
            (ours()?, first)
        };
        pairs.push(pair);
    }
    Ok(Duel::of(&pairs))
}

impl Duel {
    /// The medians of samples taken in pairs.
    pub fn of(pairs: &[(f64, f64)]) -> Duel {
        Duel {
            ours: median(pairs.iter().map(|p| p.0).collect()),
            other: median(pairs.iter().map(|p| p.1).collect()),
            ratio: median(pairs.iter().map(|p| p.0 / p.1).collect()),
        }
    }
}

/// The middle value (of an even number, the upper middle); 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_pairs() {
        let mut speed = [10.0, 20.0, 30.0].into_iter();
        let mut half = [5.0, 20.0, 60.0].into_iter();
        let result = duel(3, || Ok(speed.next().unwrap()), || Ok(half.next().unwrap())).unwrap();
        assert_eq!((result.ours, result.other, result.ratio), (20.0, 20.0, 1.0));
    }
}
