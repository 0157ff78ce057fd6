//! The daemon's binary. Everything is in the library: see [`tegu::cli::daemon`].

fn main() -> std::process::ExitCode {
    tegu::cli::daemon::main()
}
