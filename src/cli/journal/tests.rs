//! The commands over a journal that a killed mount left.

use std::fs;
use std::path::Path;

use super::*;
use crate::cli::args::{AbandonArgs, ReplayArgs};
use crate::cli::run::state::tests::{Bench, WB, write_and_die};

fn summary(dir: &Path) -> Summary {
    Summary::of(&Target::open(dir, Access::Read).unwrap(), &mut |_| Ok(())).unwrap()
}

fn condition(dir: &Path) -> Condition {
    look(&CheckArgs { dir: dir.to_owned(), json: false }).unwrap()
}

fn refusal(dir: &Path) -> String {
    Target::open(dir, Access::Read).unwrap_err().line
}

fn abandon(dir: &Path) -> Outcome<()> {
    abandon::run(&AbandonArgs { dir: dir.to_owned(), yes: true })
}

#[test]
fn a_journal_is_clean_dirty_or_corrupt() {
    let bench = Bench::new();
    let (source, state) = (bench.at("src"), bench.at("src/.bcachefs-fuse"));
    assert_eq!(condition(&source), Condition::Clean);
    drop(bench.journal(WB));
    assert_eq!((condition(&source), condition(&state)), (Condition::Clean, Condition::Clean));
    write_and_die(*bench.journal(WB));
    for dir in [&source, &state] {
        let summary = summary(dir);
        assert_eq!((summary.state, summary.bytes()), (Condition::Dirty, 4096));
        let text = summary.text();
        assert!(
            text.contains("7.5M in 15 segments of 512K") && text.contains("generation 1"),
            "{text}"
        );
        assert!(text.contains("a.img") && text.contains("owner mark: this journal"), "{text}");
        assert!(text.contains("dirty: 4K of 1 images"), "{text}");
    }
    let (journal, owner) = (state.join("journal"), state.join("owner"));
    let mark = fs::read_to_string(&owner).unwrap();
    fs::write(&owner, mark.replace("\"generation\":1", "\"generation\":2")).unwrap();
    for dir in [&source, &state] {
        assert!(summary(dir).text().contains("an older copy of the journal (generation 1, not 2)"));
        assert_eq!(condition(dir), Condition::Corrupt);
    }
    fs::remove_file(&owner).unwrap();
    for dir in [&source, &state] {
        assert!(summary(dir).text().contains("SOURCE does not ask for these records"));
        assert_eq!(condition(dir), Condition::Corrupt);
    }
    fs::write(&owner, mark).unwrap();
    // A durable record that is not there any more.
    let mut bytes = fs::read(&journal).unwrap();
    bytes[64 << 10] ^= 1;
    bytes[72] = 9;
    let crc = crc32c::crc32c(&bytes[..124]);
    bytes[124..128].copy_from_slice(&crc.to_le_bytes());
    fs::write(&journal, &bytes).unwrap();
    let text = summary(&source).text();
    assert!(
        text.contains("corrupt: record 1 at byte 65536") && text.ends_with("corrupt\n"),
        "{text}"
    );
    fs::write(&journal, b"rubbish").unwrap();
    assert!(summary(&source).text().contains("not a journal (no superblock)"));
    assert_eq!((condition(&source), condition(&state)), (Condition::Corrupt, Condition::Corrupt));
    fs::remove_file(&journal).unwrap();
    assert!(summary(&source).text().contains("its journal is not here"));
    assert_eq!(condition(&source), Condition::Corrupt);
}

#[test]
fn a_journal_elsewhere_is_found_from_both_sides() {
    let bench = Bench::new();
    let list = format!("{WB},state={}", bench.at("st").display());
    write_and_die(*bench.journal(&list));
    for dir in ["src", "st"] {
        let summary = summary(&bench.at(dir));
        assert_eq!((summary.state, summary.bytes()), (Condition::Dirty, 4096), "{dir}");
        assert!(summary.text().contains("owner mark: this journal"), "{dir}");
    }
    fs::remove_dir_all(bench.at("src")).unwrap();
    assert!(summary(&bench.at("st")).text().contains("owner mark: unknown"));
    assert!(refusal(&bench.at("src")).contains("name a SOURCE"));
}

#[test]
fn what_a_mount_holds_is_refused_by_its_holder() {
    let bench = Bench::new();
    let state = bench.journal(WB);
    let pid = std::process::id();
    let line = refusal(&bench.at("src"));
    assert!(line.contains("state is in use") && line.contains(&format!("process {pid} holds it")));
    drop(state);
    let target = Target::open(&bench.at("src"), Access::Read).unwrap();
    Target::open(&bench.at("src"), Access::Read).unwrap();
    let line = Target::open(&bench.at("src"), Access::Write).unwrap_err().line;
    assert!(line.starts_with("SOURCE is in use"), "{line}");
    drop(target);
}

#[test]
fn records_are_printed_in_order() {
    let bench = Bench::new();
    write_and_die(*bench.journal(WB));
    let target = Target::open(&bench.at("src"), Access::Read).unwrap();
    let (mut json, mut text) = (Vec::new(), Vec::new());
    let summary = Summary::of(&target, &mut |record| {
        json.push(serde_json::from_str::<serde_json::Value>(&record.line(true)?).unwrap());
        text.push(record.line(false)?);
        Ok(())
    })
    .unwrap();
    assert_eq!(
        (json[0]["kind"].as_str(), json[1]["kind"].as_str()),
        (Some("device"), Some("data"))
    );
    assert_eq!((json[1]["seq"].as_u64(), json[1]["live_bytes"].as_u64()), (Some(2), Some(4096)));
    assert!(text[1].contains("data       unit 1 0+4096 size 4096"), "{text:?}");
    let value = serde_json::to_value(&summary).unwrap();
    assert_eq!((value["schema"].as_u64(), value["state"].as_str()), (Some(1), Some("dirty")));
    assert_eq!(value["devices"][0]["path"], "a.img");
}

#[test]
fn abandoning_moves_the_records_aside_and_frees_the_source() {
    let bench = Bench::new();
    let (source, state) = (bench.at("src"), bench.at("src/.bcachefs-fuse"));
    assert!(abandon(&source).unwrap_err().line.starts_with("no journal: "));
    drop(bench.journal(WB));
    assert!(abandon(&source).unwrap_err().line.starts_with("nothing to give up: "));
    for number in 1..=2 {
        write_and_die(*bench.journal(WB));
        let before = fs::read(state.join("journal")).unwrap();
        abandon(&source).unwrap();
        let aside = state.join(format!("journal.abandoned.{number}"));
        assert_eq!(fs::read(aside).unwrap(), before);
        assert!(!state.join("owner").exists() && !state.join("journal").exists());
        assert_eq!(condition(&source), Condition::Clean);
    }
    // The journal is lost: the mark alone is in the way.
    write_and_die(*bench.journal(WB));
    fs::remove_file(state.join("journal")).unwrap();
    abandon(&source).unwrap();
    assert!(!bench.journal(WB).dirty);
}

#[test]
fn a_replay_is_checked_before_anything_is_written() {
    let bench = Bench::new();
    let run = |skip: &[&str]| {
        let skip = skip.iter().map(|skip| skip.into()).collect();
        replay::run(&ReplayArgs { dir: bench.at("src"), skip }).map_err(|failure| failure.line)
    };
    assert!(run(&[]).unwrap_err().starts_with("no journal: "));
    drop(bench.journal(WB));
    run(&[]).unwrap();
    write_and_die(*bench.journal(WB));
    let line = run(&["b.img"]).unwrap_err();
    assert!(line.starts_with("not in the journal: b.img: give a path below SOURCE"), "{line}");
    fs::remove_file(bench.at("src/.bcachefs-fuse/owner")).unwrap();
    let line = run(&[]).unwrap_err();
    assert!(line.starts_with("SOURCE does not name this journal: "), "{line}");
}
