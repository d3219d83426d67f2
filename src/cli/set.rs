//! `set` (layer 9): lists a live mount's options, or changes them, all or none.

use crate::cli::args::SetArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::options::{self, OPTIONS};
use crate::cli::output::print;
use crate::cli::place::Place;
use crate::control::format;
use crate::control::proto::{Ask, Reply};

/// Runs it.
pub fn run(args: &SetArgs) -> Outcome<()> {
    let assignments =
        args.assignments.iter().map(|text| assignment(text)).collect::<Outcome<Vec<_>>>()?;
    let place = Place::find(&args.path)?;
    if assignments.is_empty() {
        return print(&listing(&settings(&place)?)).map(drop);
    }
    let mut client = place.connect()?;
    client.ask(Ask::Set { assignments }).map(drop).map_err(|refusal| place.failure(refusal))
}

fn assignment(text: &str) -> Outcome<(String, String)> {
    let (name, value) = text.split_once('=').ok_or_else(|| {
        Failure::usage("not an assignment", text, "give NAME=VALUE; no argument lists all")
    })?;
    match options::find(name) {
        Some(option) => Ok((option.name.to_string(), value.to_string())),
        None => {
            let live = OPTIONS.iter().filter(|option| option.live).map(|option| option.name);
            let nearest = options::nearest(name, live).unwrap_or_default();
            Err(Failure::usage("unknown option", name, format!("did you mean {nearest}?")))
        }
    }
}

/// Every option's present value by name.
pub fn settings(place: &Place) -> Outcome<Vec<(String, String)>> {
    let mut client = place.connect()?;
    match client.ask(Ask::Settings) {
        Ok(Reply::Settings { values }) => Ok(values),
        Ok(_) => Err(place.failure(client.strange("its answer is not understood"))),
        Err(refusal) => Err(place.failure(refusal)),
    }
}

fn listing(values: &[(String, String)]) -> String {
    let value =
        |name: &str| values.iter().find(|(known, _)| known == name).map_or("?", |(_, value)| value);
    let rows = OPTIONS
        .iter()
        .filter(|option| !option.hidden)
        .map(|option| {
            let live = if option.live { "yes" } else { "no" };
            [option.name, value(option.name), option.default, option.kind.unit(), live]
                .map(str::to_string)
                .to_vec()
        })
        .collect();
    format::table(&["name", "value", "default", "unit", "live"], rows, 0..0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::live;

    #[test]
    fn the_table_and_the_daemon_agree_on_what_is_live() {
        let mut live: Vec<&str> = OPTIONS.iter().filter(|o| o.live).map(|o| o.name).collect();
        let mut names = live::NAMES.to_vec();
        live.sort_unstable();
        names.sort_unstable();
        assert_eq!(live, names);
    }

    #[test]
    fn assignments_are_checked_before_anything_is_asked() {
        assert_eq!(assignment("cache-mode=none"), Ok(("cache_mode".into(), "none".into())));
        assert!(assignment("expire").unwrap_err().usage);
        let failure = assignment("sequential_cutof=1M").unwrap_err();
        assert_eq!(
            failure.line,
            "unknown option: sequential_cutof: did you mean sequential_cutoff?"
        );
    }

    #[test]
    fn the_listing_shows_every_option() {
        let text = listing(&[("cache".into(), "1G".into())]);
        assert!(text.lines().count() == OPTIONS.iter().filter(|o| !o.hidden).count() + 1);
        let cache = text.lines().nth(1).unwrap();
        assert!(cache.starts_with("cache") && cache.contains("1G") && cache.ends_with("no"));
    }
}
