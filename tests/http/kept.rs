//! What outlives a daemon: sessions, through an orderly end and through a kill at any moment; and what its end says.

use super::{Daemon, post_bytes};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A turn of the session "talk": the text so far is its prompt.
fn turn(d: &Daemon, prompt: &str, tokens: usize) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "session": "talk"});
    d.good("/v1/completions", body)
}

const STORY: &str = "Once upon a time there was a lizard that liked the sun. ";

#[test]
fn a_restored_session_reads_nothing_again_and_goes_on_as_it_would_have() {
    let d = Daemon::start("[serve]\nsessions = \"kept\"\n");
    std::fs::create_dir_all(d.dir.path().join("kept")).unwrap();
    let prompt = STORY.repeat(8);
    let first = turn(&d, &prompt, 24);
    let text = first["choices"][0]["text"].as_str().unwrap().to_owned();
    d.good("/v1/sessions/talk/save", json!({}));
    let went_on = turn(&d, &format!("{prompt}{text}"), 24);
    let expected = &went_on["choices"][0]["text"];
    let d = d.killed();
    let before = d.metric("tegu_prefill_tokens_total");
    let again = turn(&d, &format!("{prompt}{text}"), 24);
    assert_eq!(&again["choices"][0]["text"], expected);
    // All but the last token was in the file: that one is the first row that generates.
    assert_eq!(d.metric("tegu_prefill_tokens_total") - before, 0.0, "{again}");
}

#[test]
fn a_kill_while_a_session_is_written_leaves_a_whole_one() {
    let mut d = Daemon::start("[serve]\nsessions = \"kept\"\n");
    let folder = d.dir.path().join("kept");
    std::fs::create_dir_all(&folder).unwrap();
    let prompt = STORY.repeat(30);
    let tokens = turn(&d, &prompt, 1)["usage"]["prompt_tokens"].as_u64().unwrap();
    d.good("/v1/sessions/talk/save", json!({}));
    for round in 0..6 {
        // Written again and again by several at once, so that the kill comes in the middle of it.
        let socket = d.socket();
        // One that is slow to notice must not go on with the next daemon for ever.
        let killed = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let (socket, killed) = (socket.clone(), killed.clone());
                std::thread::spawn(move || {
                    while !killed.load(Ordering::SeqCst)
                        && let Ok(mut s) = UnixStream::connect(&socket)
                    {
                        let sent = s.write_all(&post_bytes("/v1/sessions/talk/save", &json!({})));
                        if sent.is_err() || super::read(s).0 != 200 {
                            return;
                        }
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(11 + 7 * round));
        killed.store(true, Ordering::SeqCst);
        d = d.killed();
        writers.into_iter().for_each(|w| w.join().unwrap());
        let restored = d.good("/v1/sessions/talk/restore", json!({}));
        assert!(restored["tokens"].as_u64().unwrap() >= tokens, "round {round}: {restored}");
        // What was half written was swept.
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["talk.session"], "round {round}");
    }
}

#[test]
fn a_daemon_whose_model_does_not_fit_says_so_by_its_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_tegud"))
        .args(["--ctx-size", "1000000", "--socket", "s", "-m"])
        .arg(crate::support::data().join("tinymoe-demo.gguf"))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert!(said.contains("context tokens"), "{said}");
}
