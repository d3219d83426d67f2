//! Writing dirty extents home (STORE.md 4).

pub(crate) mod workers;
