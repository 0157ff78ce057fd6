//! A safetensors header from arbitrary bytes: an error or a directory, never a panic.
#![no_main]

use std::path::Path;

use tegu::format::{input::NamedBytes, safetensors};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("fuzz.safetensors");
    for entry in safetensors::parse(&NamedBytes { path, bytes }).unwrap_or_default() {
        drop(entry.tensor(path));
    }
});
