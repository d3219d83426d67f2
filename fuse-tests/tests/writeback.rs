//! Writeback on real mounts: what is acknowledged is kept, what is dirty looks like what is clean,
//! and every way in which a mount ends leaves its data either home or in the journal.
//!
//! Skipped as a whole while the binary refuses `cache_mode=writeback`. With
//! `FUSE_TESTS_CACHE_MODE=writethrough` the same tests run without a journal.

#[path = "writeback/attrs.rs"]
mod attrs;
#[path = "writeback/barriers.rs"]
mod barriers;
#[path = "writeback/common.rs"]
mod common;
#[path = "writeback/data.rs"]
mod data;
#[path = "writeback/ends.rs"]
mod ends;
#[path = "writeback/identity.rs"]
mod identity;
#[path = "writeback/slowly.rs"]
mod slowly;
#[path = "writeback/software.rs"]
mod software;
#[path = "writeback/space.rs"]
mod space;
