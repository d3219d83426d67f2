//! Writeback (part of layer 4): how dirty extents go home (STORE 4).
//!
//! `controller` decides, from snapshots of the world, what is done next; it owns no lock, thread or
//! clock. `view` is what it is told and what it answers, `health` judges single devices, `rate`
//! limits busy ones.

pub(crate) mod controller;
mod health;
mod rate;
#[cfg(test)]
mod tests;
pub(crate) mod view;
