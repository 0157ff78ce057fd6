//! The command line. Everything is in the library: see [`tegu::cli`].

fn main() -> std::process::ExitCode {
    tegu::cli::main()
}
