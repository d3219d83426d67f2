//! The `bcachefs-fuse` command; also mount(8)'s helpers, by its name.

fn main() -> std::process::ExitCode {
    bcachefs_fuse::cli::main()
}
