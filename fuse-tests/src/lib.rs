//! What the mount tests share: real mounts of the real binary that are gone after the test
//! ([`Mount`]), source directories on every kind of filesystem ([`Backing`]), a line protocol to
//! the runner for skipped tests and external suites ([`report`]), and small helpers ([`tools`],
//! [`users`]).
//!
//! A mount test begins with `let Some(mount) = Mount::builder("name").start() else { return };`:
//! None means that the test was reported as skipped (no /dev/fuse, not root).
//!
//! Everything a test makes lies below [`paths::scratch_base`], so that the runner can find and
//! remove what a killed test left.

pub mod backing;
pub mod bench;
pub mod cleanup;
pub mod fixture;
pub mod loopfs;
pub mod mapping;
pub mod mount;
pub mod paths;
pub mod report;
pub mod runner;
pub mod second;
pub mod seekdisk;
pub mod slow;
pub mod storm;
pub mod subject;
pub mod tidy;
pub mod tools;
pub mod treegen;
pub mod treeops;
pub mod treestate;
pub mod twins;
pub mod users;
pub mod watch;
pub mod writeback;
pub mod writers;

pub use backing::Backing;
pub use mount::Mount;
pub use tools::{drop_caches, run, try_run};
pub use users::{as_user, run_as};
