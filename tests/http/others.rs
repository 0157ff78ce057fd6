//! Clients made for other servers: what they send is taken or refused by name, and none of it costs the daemon its memory or
//! another client its turn.

use super::Daemon;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const MODEL: &str = "tinymoe-demo";

fn refused(d: &Daemon, path: &str, body: &Value, field: &str) -> String {
    let (status, value) = d.post(path, body.clone());
    let error = &value["error"];
    assert_eq!((status, error["param"].as_str()), (400, Some(field)), "{path} {body}: {value}");
    error["message"].as_str().unwrap().to_owned()
}

/// The objects of a stream of events.
fn events(text: &str) -> Vec<Value> {
    let lines = text.lines().filter_map(|l| l.strip_prefix("data: ")).filter(|l| *l != "[DONE]");
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn llama_cpps_endpoints_answer_as_openais_do() {
    let d = Daemon::start("");
    let prompt = "Once upon a time";
    let same = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let text = d.good("/v1/completions", same)["choices"][0]["text"].as_str().unwrap().to_owned();
    let native = |more: Value| {
        let mut body = json!({"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": true,
            "cache_prompt": true, "id_slot": -1, "suffix": null});
        more.as_object().unwrap().iter().for_each(|(k, v)| body[k] = v.clone());
        body
    };
    for path in ["/completion", "/completions"] {
        let v = d.good(path, native(json!({"n_probs": 2})));
        assert_eq!((v["content"].as_str(), &v["stop"]), (Some(&*text), &json!(true)), "{v}");
        assert_eq!((&v["stop_type"], &v["tokens_predicted"]), (&json!("limit"), &json!(12)));
        let probs = v["completion_probabilities"].as_array().unwrap();
        assert!(probs.len() == 12 && probs.iter().all(|p| p["top_logprobs"].as_array().unwrap().len() == 2));
    }
    let (status, streamed) =
        d.send("POST", "/completion", native(json!({"stream": true})).to_string().as_bytes());
    let pieces = events(&streamed);
    let whole: String = pieces.iter().map(|p| p["content"].as_str().unwrap()).collect();
    assert_eq!((status, whole), (200, text.clone()));
    let stops: Vec<bool> = pieces.iter().map(|p| p["stop"].as_bool().unwrap()).collect();
    assert!(stops.ends_with(&[true]) && stops.iter().filter(|s| **s).count() == 1);
    let middle: String = text.trim().chars().skip(3).take(3).collect();
    assert_eq!(d.good("/completion", native(json!({"stop": [middle]})))["stop_type"], "word");
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
        "additionalProperties": false});
    let v =
        d.good("/completion", native(json!({"json_schema": schema, "n_predict": 40, "ignore_eos": false})));
    let made: Value = serde_json::from_str(v["content"].as_str().unwrap()).unwrap();
    assert!(made["a"] == 1 || made["a"] == 2, "{made}");
    let (_, props) = d.get("/props").unwrap();
    let props: Value = serde_json::from_str(&props).unwrap();
    assert!(props["default_generation_settings"]["n_ctx"].as_u64().unwrap() > 0);
    let messages = json!([{"role": "user", "content": "What is a lizard?"}]);
    let templated = d.good("/apply-template", json!({"messages": messages}));
    assert!(templated["prompt"].as_str().unwrap().contains("What is a lizard?"));
    let chat = json!({"messages": messages, "max_tokens": 5, "temperature": 0});
    let said = |path: &str| d.good(path, chat.clone())["choices"][0]["message"]["content"].clone();
    assert_eq!(said("/chat/completions"), said("/v1/chat/completions"));
    assert_eq!(d.get("/models").unwrap().0, 200);
    assert_eq!(d.send("HEAD", "/v1/models", b""), (200, String::new()));
    assert_eq!(d.get("/").unwrap(), (200, "Tegu is running\n".to_owned()));
    refused(&d, "/completion", &native(json!({"n": 2})), "n");
    refused(
        &d,
        "/completion",
        &native(json!({"json_schema": {}, "grammar": "root ::= \"x\""})),
        "json_schema",
    );
}

#[test]
fn ollamas_embeddings_and_keep_alive() {
    let d = Daemon::start("");
    let openai = d.good("/v1/embeddings", json!({"input": ["one", "two"]}));
    let v = d.good("/api/embed", json!({"model": MODEL, "input": ["one", "two"], "keep_alive": "5m"}));
    for i in 0..2 {
        assert_eq!(v["embeddings"][i], openai["data"][i]["embedding"]);
    }
    assert_eq!(v["prompt_eval_count"], openai["usage"]["prompt_tokens"]);
    let v = d.good("/api/embeddings", json!({"model": MODEL, "prompt": "two"}));
    assert_eq!(v["embedding"], openai["data"][1]["embedding"]);
    for wrong in [json!(true), json!("soon"), json!([])] {
        let body = json!({"model": MODEL, "prompt": "", "keep_alive": wrong});
        let (status, v) = d.post("/api/generate", body);
        assert!(status == 400 && v["error"].as_str().unwrap().starts_with("keep_alive"), "{v}");
    }
    let there = |d: &Daemon| !d.get("/api/ps").unwrap().1.contains("\"models\":[]");
    assert!(there(&d));
    for (keep_alive, word) in
        [(json!(-1), "load"), (json!("10s"), "load"), (json!("0s"), "unload"), (json!(0), "unload")]
    {
        let v = d.good("/api/generate", json!({"model": MODEL, "keep_alive": keep_alive}));
        assert_eq!((&v["done_reason"], there(&d)), (&json!(word), word == "load"), "{v}");
    }
    d.good(
        "/api/generate",
        json!({"model": MODEL, "prompt": "a", "stream": false, "options": {"num_predict": 2}}),
    );
}

#[test]
fn what_cannot_be_done_is_refused_by_its_name() {
    let d = Daemon::start("");
    let completion = |more: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 2});
        more.as_object().unwrap().iter().for_each(|(k, v)| body[k] = v.clone());
        body
    };
    for (more, field) in [
        (json!({"echo": true, "logprobs": 1}), "echo"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"best_of": 3}), "best_of"),
        (json!({"context_shift": true}), "context_shift"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"stop": ["a", 5]}), "stop[1]"),
    ] {
        refused(&d, "/v1/completions", &completion(more), field);
    }
    let chat = |content: Value, more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2});
        more.as_object().unwrap().iter().for_each(|(k, v)| body[k] = v.clone());
        body
    };
    let path = "/v1/chat/completions";
    refused(&d, path, &chat(json!("a"), json!({"modalities": ["text", "audio"]})), "modalities");
    for kind in ["image_url", "input_audio", "file"] {
        let parts = json!([{"type": "text", "text": "what is it?"}, {"type": kind, kind: {}}]);
        let said = refused(&d, path, &chat(parts, json!({})), "messages[0].content[1].type");
        assert!(said.contains("no images") && said.contains(kind), "{said}");
    }
    for input in [json!(""), json!([""])] {
        refused(&d, "/v1/embeddings", &json!({"input": input}), "input[0]");
    }
    // None of these means anything.
    let nothing =
        json!({"grammar": "", "suffix": null, "functions": null, "audio": null, "modalities": ["text"]});
    d.good(path, chat(json!("a"), nothing));
}

/// The daemon's most memory so far, in MB.
fn peak_mb(d: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", d.child.id())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn text_that_no_context_holds_is_refused_before_it_is_cut() {
    let d = Daemon::start("context = 512\n");
    d.good("/v1/completions", json!({"prompt": "a", "max_tokens": 2}));
    let before = peak_mb(&d);
    let long = "1".repeat(7_000_000);
    let path = "/v1/completions";
    let too_long = |path: &str, body: Value| {
        let (status, v) = d.post(path, body);
        assert_eq!((status, &v["error"]["code"]), (400, &json!("context_length_exceeded")), "{path}: {v}");
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| too_long(path, json!({"prompt": long, "max_tokens": 1})));
        }
    });
    too_long("/v1/chat/completions", json!({"messages": [{"role": "user", "content": long}]}));
    too_long("/v1/embeddings", json!({"input": ["a", long]}));
    too_long("/tokenize", json!({"content": long}));
    let body = json!({"model": MODEL, "prompt": long, "raw": true});
    assert_eq!(d.post("/api/generate", body).0, 400);
    let grew = peak_mb(&d) - before;
    // A body is there as bytes and as JSON, five times at most; its tokens would take two gigabytes each.
    assert!(grew < 300, "{grew} MB for text that was refused");
}

#[test]
fn a_session_whose_file_is_of_no_use_begins_anew() {
    let d = Daemon::start("[serve]\nsessions = \"kept\"\n");
    let folder = d.dir.path().join("kept");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("talk.session"), b"not a session").unwrap();
    let body = json!({"prompt": "Once upon", "max_tokens": 6, "temperature": 0});
    let mut with = body.clone();
    with["session"] = json!("talk");
    assert_eq!(
        d.good("/v1/completions", with.clone())["choices"],
        d.good("/v1/completions", body)["choices"]
    );
    assert!(d.log().contains("session talk begins anew"), "{}", d.log());
    // Asked for by name it is still an error; saved, it is whole again.
    assert_eq!(d.post("/v1/sessions/talk/restore", json!({})).0, 400);
    d.good("/v1/sessions/talk/save", json!({}));
    d.good("/v1/sessions/talk/restore", json!({}));
}

#[test]
fn a_model_that_is_asked_for_gets_its_turn_and_no_name_means_the_default() {
    let dir = tempfile::tempdir().unwrap();
    // The same file by another path is another model.
    let link = dir.path().join("x.gguf");
    std::os::unix::fs::symlink(crate::support::data().join("tinymoe-demo.gguf"), &link).unwrap();
    let d = Daemon::start(&format!("[aliases]\nother = {:?}\n", link.to_str().unwrap()));
    let ask = |model: Option<&str>| {
        let mut body = json!({"prompt": "Once upon", "max_tokens": 4});
        if let Some(model) = model {
            body["model"] = json!(model);
        }
        d.good("/v1/completions", body)["model"].as_str().unwrap().to_owned()
    };
    assert_eq!(ask(None), MODEL);
    let (done, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    ask(None);
                    turns.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        while turns.load(Ordering::SeqCst) < 8 {
            std::thread::yield_now();
        }
        assert_eq!(ask(Some("other")), "other", "though others never stop asking");
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(ask(Some("other")), "other");
    assert_eq!(ask(None), MODEL, "not the one that was asked for last");
    assert_eq!(ask(Some("default")), MODEL);
}
