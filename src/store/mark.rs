//! What the store tells its source's owner mark (STORE 6): whether the journal holds data that is
//! not in the image files. No state here; the mark itself is made by whoever opened the journal.

use crate::error::Result;

/// The mark in the source that says "these files are not current without that journal".
///
/// States: clean -> dirty -> clean. Both calls may block on device I/O: make them with no lock
/// held. Both are idempotent, and cheap where nothing changes.
pub trait OwnerMark: Send + Sync {
    /// Durable on return. To be called after the journal's generation was started (its superblock
    /// is durable then) and before the first append of that generation. An error: nothing may be
    /// appended.
    fn dirty(&self) -> Result<()>;

    /// Removes the mark. To be called only when the journal has no record left between tail and
    /// head and the superblock that says so is durable: a journal with records and no mark is
    /// refused at the next mount, since an older or another program may have written behind it.
    fn clean(&self) -> Result<()>;
}
