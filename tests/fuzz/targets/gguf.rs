//! A GGUF header from arbitrary bytes: an error or a header, never a panic.
#![no_main]

use std::path::Path;

use tegu::format::{gguf, input::NamedBytes};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let input = NamedBytes { path: Path::new("fuzz.gguf"), bytes };
    if let Ok(header) = gguf::parse(&input) {
        // What was accepted lies inside the file.
        assert!(header.tensors.is_empty() || header.data_offset <= bytes.len() as u64);
    }
});
