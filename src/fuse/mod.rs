//! FUSE (layer 8): the only module that knows fuser. Mounting, serving, ending.

pub mod adapter;
mod convert;
pub mod daemon;
pub mod fusermount;
pub mod holders;
pub mod kernel;
mod listing;
pub mod mount;
pub mod mountinfo;
mod reply;
pub mod session;
pub mod signals;

pub use adapter::Adapter;
