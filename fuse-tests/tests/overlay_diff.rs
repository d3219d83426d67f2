//! An overlay mount and a plain copy of its lower tree, given the same random operations, stay
//! equal; the lower tree stays untouched; a remount and a kill -9 change nothing.
//!
//! `OVERLAY_SEED=S` runs one seed and `OVERLAY_SEEDS=N` that many from there (0 unless said),
//! `OVERLAY_STEPS` so many steps of each. `OVERLAY_STAND_IN` and `OVERLAY_OPTIONS`: see
//! `fuse_tests::subject`.

use std::env;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fuse_tests::paths::Scratch;
use fuse_tests::subject::{Kind, Subject, copy};
use fuse_tests::treegen::{self, Can};
use fuse_tests::treestate::{Rule, State, readable};
use fuse_tests::twins::Twins;
use rustix::fs::{FileType, XattrFlags};

fn asked(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

fn steps() -> usize {
    asked("OVERLAY_STEPS").unwrap_or(100) as usize
}

/// Seeds that end in 4 and 9 begin with an empty lower directory.
fn is_empty(seed: u64) -> bool {
    seed % 5 == 4
}

/// What a run does to the subject behind everybody's back, and before which step.
type Sabotage = (usize, Change);
type Change = fn(&Path);

/// A lower tree, its copy and an overlay of it, through all steps. What went wrong, if anything.
fn run(kind: Kind, seed: u64, sabotage: Option<Sabotage>) -> Result<(), String> {
    let scratch = Scratch::new("overlay-twins");
    let (lower, twin) = (scratch.path().join("lower"), scratch.path().join("twin"));
    let mut can = Can::probe(scratch.path()).unwrap();
    kind.limit(&mut can);
    fs::create_dir(&lower).unwrap();
    if !is_empty(seed) {
        treegen::grow(&lower, seed, &can).unwrap();
    }
    copy(&lower, &twin);
    let untouched = State::read(&lower)?;
    let copied = untouched.differences(&State::read(&twin)?, Rule::Copy);
    assert!(copied.is_empty(), "cp -a made another tree:\n{}", readable(&copied));
    let limit = Duration::from_secs(60 + steps() as u64);
    let Some(mut subject) = Subject::start(kind, &lower, scratch.path(), limit) else {
        return Ok(());
    };
    let walked = walk(seed, &can, &mut subject, &twin, sabotage);
    let walked = walked.map_err(|wrong| format!("{wrong}--- daemon said:\n{}---", subject.log()));
    subject.end();
    let after = State::read(&lower)?;
    if after.fingerprint() != untouched.fingerprint() {
        let changed = untouched.differences(&after, Rule::Untouched);
        let walked = walked.err().unwrap_or_default();
        return Err(format!("the lower tree was touched:\n{}\n{walked}", readable(&changed)));
    }
    walked
}

fn walk(
    seed: u64,
    can: &Can,
    subject: &mut Subject,
    twin: &Path,
    sabotage: Option<Sabotage>,
) -> Result<(), String> {
    let path = subject.path();
    let mut twins = Twins::new(seed, can, &path, twin).map_err(|e| format!("at first: {e}"))?;
    let mut walk = || {
        for step in 0..steps() {
            let at = |wrong| format!("step {step}: {wrong}");
            if let Some((when, sabotage)) = sabotage
                && when == step
            {
                sabotage(&path);
            }
            twins.step().map_err(at)?;
            if step % 10 == 9 {
                twins.compare().map_err(at)?;
            }
            match twins.below(100) {
                0..2 => {
                    twins.let_go("remount");
                    subject.remount();
                }
                2..5 => {
                    twins.let_go("kill -9");
                    subject.crash();
                }
                _ => continue,
            }
            twins.compare().map_err(at)?;
            twins.take_up()?;
        }
        twins.compare()?;
        twins.let_go("remount at the end");
        subject.remount();
        twins.compare()
    };
    let walked = walk();
    // Whatever is open would keep the mount busy.
    twins.let_go("the end");
    let worked = twins.worked();
    // Two trees that refuse everything are equal, too.
    assert!(walked.is_err() || worked * 3 >= steps(), "seed {seed}: only {worked} worked");
    println!("seed {seed}: {worked} of {} operations worked", steps());
    walked
}

fn seeds(empty: bool) {
    let kind = Kind::asked();
    if !kind.is_there() {
        return;
    }
    let first = asked("OVERLAY_SEED");
    let count = asked("OVERLAY_SEEDS").unwrap_or(if first.is_some() { 1 } else { 20 });
    let first = first.unwrap_or(0);
    for seed in (first..first + count).filter(|seed| is_empty(*seed) == empty) {
        if let Err(wrong) = run(kind, seed, None) {
            panic!("OVERLAY_SEED={seed} ({kind:?}), {wrong}");
        }
    }
}

#[test]
fn a_rich_lower_tree_and_its_copy_stay_equal() {
    seeds(false);
}

#[test]
fn an_empty_lower_tree_and_its_copy_stay_equal() {
    seeds(true);
}

/// The first entry of a kind below `root`.
fn first(root: &Path, wanted: FileType) -> PathBuf {
    let all = fuse_tests::treestate::paths(root).unwrap();
    let found = all.into_iter().find(|(_, kind)| *kind == wanted);
    root.join(found.unwrap_or_else(|| panic!("no {wanted:?} in {}", root.display())).0)
}

fn change_a_byte(root: &Path) {
    let path = first(root, FileType::RegularFile);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    let read = file.read_at(&mut byte, 0).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 0).unwrap();
    assert!(read <= 1);
}

fn change_a_mode(root: &Path) {
    let path = first(root, FileType::Directory);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    fs::set_permissions(path, Permissions::from_mode(mode ^ 0o001)).unwrap();
}

fn add_an_attribute(root: &Path) {
    let path = first(root, FileType::Directory);
    rustix::fs::lsetxattr(path, "user.sabotage", b"", XattrFlags::empty()).unwrap();
}

fn add_a_link(root: &Path) {
    fs::hard_link(first(root, FileType::RegularFile), root.with_extension("elsewhere")).unwrap();
}

fn remove_a_name(root: &Path) {
    fs::remove_file(first(root, FileType::RegularFile)).unwrap();
}

fn change_a_time(root: &Path) {
    let file = File::open(first(root, FileType::Directory)).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(7)).unwrap();
}

#[test]
fn the_comparison_finds_what_was_changed() {
    let kinds: [(&str, Change); 6] = [
        ("byte", change_a_byte),
        ("mode", change_a_mode),
        ("user.sabotage", add_an_attribute),
        ("link", add_a_link),
        ("", remove_a_name),
        ("mtime", change_a_time),
    ];
    for (word, sabotage) in kinds {
        // Seed 0 without sabotage is among those that must pass.
        let found = run(Kind::Plain, 0, Some((37, sabotage))).unwrap_err();
        assert!(found.contains(word), "{word}: {found}");
        // At the next look at everything, if no operation met it before.
        let late = ["step 37", "step 38", "step 39", "step 4"].iter().any(|at| found.contains(at));
        assert!(late, "{word}: {found}");
    }
    run(Kind::Plain, 0, None).unwrap();
}
