//! System calls (layer 1): the only `unsafe` of the program; rustix wherever it has the call.

pub mod process;
