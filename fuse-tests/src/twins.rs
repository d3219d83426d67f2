//! Two trees that are given the same operations and must stay equal: the subject (a mount) and
//! its twin (a plain copy).
//!
//! Every answer must be equal, and after each step so must be what the touched paths name;
//! [`Twins::compare`] looks at everything. Times that a filesystem set by itself need only be near
//! each other; a time given explicitly must stay until the twin's changes, and change then. An
//! inode number of the subject stays with its file, by whatever name.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, OsStr};
use std::fmt::Write;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::treegen::Can;
use crate::treeops::choose::Chooser;
use crate::treeops::{Answer, HELD, Hands, Op, Short};
use crate::treestate::{self, Entry, Rule, State, Time, readable};
use crate::users::{ALICE, as_user};

/// How many operations a failure prints.
const SHOWN: usize = 12;

/// One step that was made.
#[derive(Clone, Debug)]
struct Made {
    step: usize,
    what: String,
    paths: Vec<PathBuf>,
}

/// The two trees.
#[derive(Debug)]
pub struct Twins {
    can: Can,
    subject: PathBuf,
    twin: PathBuf,
    hands: Option<[Hands; 2]>,
    chooser: Chooser,
    /// Times that were given, by inode number of the twin.
    explicit: HashMap<u64, Time>,
    /// Inode numbers of the subject, by file handle of the twin.
    numbers: HashMap<Vec<u8>, u64>,
    made: Vec<Made>,
    /// Operations that were not refused.
    worked: usize,
}

impl Twins {
    /// Begins with two equal trees.
    pub fn new(seed: u64, can: &Can, subject: &Path, twin: &Path) -> Result<Twins, String> {
        let mut twins = Twins {
            can: can.clone(),
            subject: subject.to_owned(),
            twin: twin.to_owned(),
            hands: None,
            chooser: Chooser::new(seed, can),
            explicit: if can.times { State::read(twin)?.times() } else { HashMap::new() },
            numbers: HashMap::new(),
            made: Vec::new(),
            worked: 0,
        };
        twins.compare()?;
        twins.take_up()?;
        Ok(twins)
    }

    /// Opens the roots, after a mount.
    pub fn take_up(&mut self) -> Result<(), String> {
        let open = |path: &Path| Hands::new(path).map_err(|e| format!("{}: {e}", path.display()));
        self.hands = Some([open(&self.subject)?, open(&self.twin)?]);
        Ok(())
    }

    /// Closes everything, before a mount goes away.
    pub fn let_go(&mut self, why: &str) {
        self.hands = None;
        self.note(format!("-- {why} --"), Vec::new());
    }

    /// A decision beside the operations.
    pub fn below(&mut self, below: u64) -> u64 {
        self.chooser.below(below)
    }

    /// How many operations were not refused so far.
    pub fn worked(&self) -> usize {
        self.worked
    }

    fn note(&mut self, what: String, paths: Vec<PathBuf>) {
        let step = self.made.iter().filter(|made| !made.what.starts_with("--")).count();
        self.made.push(Made { step, what, paths });
    }

    /// The next operation on both trees.
    pub fn step(&mut self) -> Result<(), String> {
        let seen = treestate::paths(&self.twin)?;
        let hands = self.hands.as_mut().ok_or("nothing is opened")?;
        let held: [bool; HELD] = std::array::from_fn(|slot| hands[1].holds(slot));
        let op = self.chooser.next(&seen, held);
        let alice = self.can.users && self.chooser.below(6) == 0;
        let mut act = || hands.each_mut().map(|hands| hands.perform(&op));
        let [there, wanted] = if alice { as_user(ALICE, ALICE, &[], act) } else { act() };
        let who = if alice { "as another user: " } else { "" };
        let paths: Vec<PathBuf> = op.paths().into_iter().map(Path::to_owned).collect();
        self.note(format!("{who}{op:?} -> {}", Short(&wanted)), paths.clone());
        if there != wanted {
            let said = format!("answered {}, not {}", Short(&there), Short(&wanted));
            return Err(self.failure(&paths, &said));
        }
        self.worked += usize::from(wanted.is_ok());
        self.remember_times(&op, &wanted);
        self.compare_paths(&paths)?;
        self.compare_held()
    }

    fn remember_times(&mut self, op: &Op, answer: &Answer) {
        if let (Op::Times { path, modification: Some(_), .. }, Ok(_)) = (op, answer)
            && let Ok(entry) = look(&self.twin, path)
            && self.can.times
        {
            self.explicit.insert(entry.ino, entry.mtime);
        }
    }

    fn rule(&self) -> Rule<'_> {
        let directory_links = self.can.directory_links;
        Rule::Twins { explicit: &self.explicit, directory_links }
    }

    /// Compares what these paths and the directories above them name.
    fn compare_paths(&self, paths: &[PathBuf]) -> Result<(), String> {
        let with_parents: BTreeSet<_> =
            paths.iter().flat_map(|path| path.ancestors().take(2)).collect();
        for path in with_parents {
            let words = match (look(&self.twin, path), look(&self.subject, path)) {
                (Ok(wanted), Ok(there)) => wanted.differences(&there, self.rule()).join("; "),
                (Err(wanted), Err(there)) if wanted == there => continue,
                (wanted, there) => {
                    let short = |found: Result<Entry, Errno>| match found {
                        Ok(entry) => format!("{:?}", entry.kind),
                        Err(error) => error.to_string(),
                    };
                    format!("is {}, not {}", short(there), short(wanted))
                }
            };
            if !words.is_empty() {
                return Err(self.failure(paths, &format!("{path:?}: {words}")));
            }
        }
        Ok(())
    }

    fn compare_held(&self) -> Result<(), String> {
        let Some([there, wanted]) = &self.hands else { return Ok(()) };
        for slot in 0..HELD {
            let (there, wanted) = (there.look(slot), wanted.look(slot));
            if there != wanted {
                let (there, wanted) = (Short(&there), Short(&wanted));
                let said = format!("the file held in slot {slot}: {there}, not {wanted}");
                return Err(self.failure(&[], &said));
            }
        }
        Ok(())
    }

    /// Compares both trees entry by entry.
    pub fn compare(&mut self) -> Result<(), String> {
        let wanted = State::read(&self.twin)?;
        let there = State::read(&self.subject).map_err(|e| self.failure(&[], &e))?;
        let differences = wanted.differences(&there, self.rule());
        if let Some((first, _)) = differences.first() {
            let first = first.clone();
            return Err(self.failure(&[first], &format!("\n{}", readable(&differences))));
        }
        self.compare_numbers(&wanted, &there)
    }

    /// A file keeps its inode number. Which file it is, the twin's file handle says.
    fn compare_numbers(&mut self, wanted: &State, there: &State) -> Result<(), String> {
        let mut numbers = HashMap::new();
        for path in wanted.entries.keys().filter(|_| self.can.inodes) {
            let Some(handle) = handle(&self.twin, path) else { continue };
            let number = there.entries[path].ino;
            if let Some(before) = self.numbers.get(&handle)
                && *before != number
            {
                let said = format!("{path:?}: the inode number was {before} and is {number}");
                return Err(self.failure(std::slice::from_ref(path), &said));
            }
            numbers.insert(handle, number);
        }
        self.numbers = numbers;
        Ok(())
    }

    /// What went wrong, with the last operations on these paths and the last ones of all.
    fn failure(&self, paths: &[PathBuf], said: &str) -> String {
        let mut text = said.to_owned();
        let near = |made: &Made| {
            made.what.starts_with("--")
                || made.paths.iter().any(|touched| {
                    let root = |path: &Path| path.as_os_str().is_empty();
                    let touched = touched.as_path();
                    paths.iter().any(|path| {
                        path == touched
                            || !root(touched) && path.starts_with(touched)
                            || !root(path) && touched.starts_with(path)
                    })
                })
        };
        let near: Vec<&Made> = self.made.iter().filter(|made| near(made)).collect();
        let _ = writeln!(text, "\nthe last operations on {paths:?}, or above or below:");
        for made in near.iter().rev().take(SHOWN).rev() {
            let _ = writeln!(text, "  {:4} {}", made.step, made.what);
        }
        let _ = writeln!(text, "the last operations of all:");
        for made in self.made.iter().rev().take(SHOWN).rev() {
            let _ = writeln!(text, "  {:4} {}", made.step, made.what);
        }
        text
    }
}

/// What a path names, links in it not followed.
fn look(root: &Path, path: &Path) -> Result<Entry, Errno> {
    let open = |path: &Path| File::open(path).map_err(|e| Errno::from_io_error(&e).unwrap());
    let mut at = OwnedFd::from(open(root)?);
    let mut parts = path.iter().peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return Entry::read(at.as_fd(), part);
        }
        at = treestate::directory(at.as_fd(), part)?;
    }
    Entry::read(at.as_fd(), OsStr::new(""))
}

/// The file handle of a path: a number that no later file has.
fn handle(root: &Path, path: &Path) -> Option<Vec<u8>> {
    const MOST: usize = 128;
    #[repr(C, align(8))]
    struct Space {
        bytes: u32,
        kind: i32,
        handle: [u8; MOST],
    }
    let path = CString::new(root.join(path).as_os_str().as_bytes()).ok()?;
    let mut space = Space { bytes: MOST as u32, kind: 0, handle: [0; MOST] };
    let mut mount = 0;
    // SAFETY: a terminated path, and a file_handle (its array in place) with the room it names.
    let done = unsafe {
        let space = (&raw mut space).cast::<libc::file_handle>();
        libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), space, &raw mut mount, 0)
    };
    (done == 0).then(|| space.handle[..space.bytes as usize].to_vec())
}
