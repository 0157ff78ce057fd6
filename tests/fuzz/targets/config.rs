//! Hyperparameters from an arbitrary config.json: an error or a checked set, never a panic.
#![no_main]

use std::path::Path;

use tegu::model::hf;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(config) = serde_json::from_slice(bytes) else { return };
    if let Ok(hyper) = hf::hyper(Path::new("config.json"), &config) {
        // What was accepted can be computed with: widths and masks are there for every layer.
        assert_eq!(hyper.masks.len(), hyper.n_layers);
        assert!(hyper.kv_widths().0 > 0);
    }
});
