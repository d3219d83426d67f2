//! The command line (layer 9): arguments -> `Config` -> run.
//!
//! `args` is what was typed, `options` the one table of mount options, `words` the words behind
//! `-o`, `meaning` turns them into a `Config`. No state, no locks. Invariant: a command prints
//! its result, or exactly one line that says what, where, and what to do.

pub mod args;
pub mod doctor;
pub mod failure;
pub mod help;
pub mod meaning;
pub mod memory;
pub mod options;
pub mod run;
pub mod words;
