//! A request of arbitrary bytes, head and body, on an in-memory connection: whatever it says, the server answers or closes,
//! in bounded time, and never panics. No model is behind it: what would reach one is checked before.
#![no_main]

use std::sync::OnceLock;

use tegu::serve::Probe;

static PROBE: OnceLock<Probe> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let answer = PROBE.get_or_init(Probe::new).answer(bytes);
    // What is not empty is an HTTP response.
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{}", String::from_utf8_lossy(&answer));
});
