//! The `bcachefs-fuse` command.

fn main() {}
