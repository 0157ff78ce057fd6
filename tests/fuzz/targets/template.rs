//! An arbitrary chat template over two messages: text or an error, in bounded time and memory.
#![no_main]

use std::path::Path;

use tegu::text::template::{Chat, ChatTemplate};

libfuzzer_sys::fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(Path::new("template.jinja"), source) else { return };
    let mut chat = Chat::of([("system", "Be brief."), ("user", "What is gravity?")]);
    chat.now_unix_s = Some(0);
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")].into_iter();
    drop(template.render_with(special, &chat));
});
