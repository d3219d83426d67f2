//! Writing dirty extents home (STORE.md 4).

// Until the store starts them.
#[allow(dead_code)]
pub(crate) mod workers;
