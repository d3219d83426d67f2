//! bcachefs-fuse: a FUSE overlay filesystem for directories of disk and boot images, with a
//! device-tagged block cache in front of the image files.
//!
//! It is NOT the on-disk filesystem called bcachefs. The module layers, lowest first: [`error`],
//! [`units`], [`config`], [`stats`], [`clock`] (0); [`sys`] (1); [`device`] (2); [`cache`] and
//! [`journal`], which no mount uses yet (3); [`store`] (4); [`tree`] (6); [`fs`] (7); [`fuse`],
//! [`control`] (8); [`cli`] (9). A module uses only lower layers; a test proves it.

pub mod cache;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod device;
pub mod error;
pub mod fs;
pub mod fuse;
pub mod journal;
pub mod stats;
pub mod store;
pub mod sys;
pub mod tree;
pub mod units;
