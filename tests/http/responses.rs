//! `/v1/responses` as OpenAI's clients use it, and llama.cpp's `/slots`.

use super::{chat, plain};
use serde_json::{Value, json};

fn ask(more: Value) -> Value {
    let mut body = json!({"input": "What is gravity?", "temperature": 0, "max_output_tokens": 16});
    for (k, v) in more.as_object().unwrap() {
        body[k] = v.clone();
    }
    body
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{response}"))
}

#[test]
fn a_response_is_what_a_chat_answers_whole_and_in_events() {
    let d = plain();
    let said = |more: Value| {
        let v = d.good("/v1/chat/completions", chat(more));
        (
            v["choices"][0]["message"]["content"].as_str().unwrap().to_owned(),
            v["usage"]["prompt_tokens"].clone(),
        )
    };
    let whole = d.good("/v1/responses", ask(json!({"metadata": {"a": "b"}})));
    let (want, prompt_tokens) = said(json!({}));
    assert_eq!(text(&whole), want);
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(
        (&whole["usage"]["input_tokens"], &whole["usage"]["output_tokens"]),
        (&prompt_tokens, &json!(16))
    );
    assert_eq!(whole["metadata"]["a"], "b");
    // A conversation: instructions, what was answered as it was, parts.
    let input = json!([{"role": "user", "content": "What is gravity?"}, whole["output"][0],
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "light?"}]}]);
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is gravity?"},
        {"role": "assistant", "content": want}, {"role": "user", "content": "And light?"}]);
    let on = d.good("/v1/responses", ask(json!({"input": input, "instructions": "Be brief."})));
    assert_eq!(text(&on), said(json!({"messages": messages})).0);

    let (_, streamed) = d.send("POST", "/v1/responses", ask(json!({"stream": true})).to_string().as_bytes());
    let data = streamed.lines().filter_map(|l| l.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|l| serde_json::from_str(l).unwrap()).collect();
    let named: Vec<&str> = streamed.lines().filter_map(|l| l.strip_prefix("event: ")).collect();
    let mut kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(named, kinds);
    assert!(events.iter().enumerate().all(|(i, e)| e["sequence_number"] == i), "{streamed}");
    kinds.dedup();
    let want_kinds = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds, want_kinds);
    let pieces: Vec<&str> = events.iter().filter_map(|e| e["delta"].as_str()).collect();
    assert!(pieces.len() > 3 && pieces.concat() == want, "{pieces:?}");
    let last = &events.last().unwrap()["response"];
    assert_eq!((text(last), &last["id"]), (want.as_str(), &events[0]["response"]["id"]));
    assert_eq!(last["usage"]["output_tokens"], 16);
    assert_eq!(events[2]["item"]["id"], last["output"][0]["id"]);
}

#[test]
fn a_response_ends_keeps_a_form_and_tells_probabilities() {
    let d = plain();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["n"], "properties": {"n": {"enum": [1, 2]}}});
    let format = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    let v = d.good("/v1/responses", ask(json!({"text": {"format": format}, "max_output_tokens": 60})));
    let object: Value = serde_json::from_str(text(&v)).unwrap();
    assert!(object["n"].is_number(), "{v}");
    assert_eq!((&v["status"], &v["incomplete_details"]), (&json!("completed"), &Value::Null));
    assert_eq!(v["text"]["format"]["name"], "x");
    let v =
        d.good("/v1/responses", ask(json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2})));
    let entries = v["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert_eq!((entries.len(), entries[0]["top_logprobs"].as_array().unwrap().len()), (16, 2));
}

#[test]
fn what_a_response_cannot_be_is_refused_by_name() {
    let d = plain();
    let tool = json!({"type": "function", "name": "f", "parameters": {}});
    for (more, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"role": "robot", "content": "x"}]}), "input[0].role"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
            "input[0].type",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"tools": [tool]}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"include": ["file_search_call.results"]}), "include[0]"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"n": 2}), "n"),
        (json!({"max_output_token": 5}), "max_output_token"),
    ] {
        let (status, v) = d.post("/v1/responses", ask(more.clone()));
        assert_eq!((status, v["error"]["param"].as_str()), (400, Some(param)), "{more}: {v}");
    }
    let (status, v) = d.post("/infill", json!({"input_prefix": "a", "input_suffix": "b"}));
    assert!(status == 501 && v["error"]["message"].as_str().unwrap().contains("/completion"), "{v}");
}

#[test]
fn slots_show_that_no_one_is_served() {
    let d = plain();
    let all: Vec<Value> = serde_json::from_str(&d.get("/slots").unwrap().1).unwrap();
    let props: Value = serde_json::from_str(&d.get("/props").unwrap().1).unwrap();
    assert!(!all.is_empty());
    let context = &props["default_generation_settings"]["n_ctx"];
    assert!(all.iter().enumerate().all(|(i, s)| s["id"] == i && s["n_ctx"] == *context), "{all:?}");
    assert!(all.iter().all(|s| s["is_processing"] == false), "{all:?}");
}
