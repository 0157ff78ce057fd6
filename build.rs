//! Puts the kernels that a package brings along into the program: `TEGU_KERNELS=FILE cargo build`, the file made by
//! `tegu kernels build --archive FILE`. Without it nothing is embedded and kernels are compiled at first use.

use std::path::PathBuf;
use std::{env, fs};

/// First bytes of an archive (src/backend/cuda/archive.rs, which checks the rest).
const MAGIC: &[u8] = b"tegukrn1";

fn main() {
    println!("cargo:rerun-if-env-changed=TEGU_KERNELS");
    println!("cargo:rerun-if-changed=build.rs");
    let to = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("kernels.bin");
    let archive = match env::var_os("TEGU_KERNELS").filter(|v| !v.is_empty()) {
        Some(path) => {
            let path = PathBuf::from(path);
            println!("cargo:rerun-if-changed={}", path.display());
            let bytes = fs::read(&path).unwrap_or_else(|e| panic!("TEGU_KERNELS={}: {e}", path.display()));
            assert!(bytes.starts_with(MAGIC), "TEGU_KERNELS={}: no archive of kernels", path.display());
            bytes
        }
        None => Vec::new(),
    };
    fs::write(&to, archive).unwrap_or_else(|e| panic!("{}: {e}", to.display()));
}
