//! Chat messages and tools: checked field by field, and put into the form that templates take.

use super::fail::Fail;
use super::fields::{Answered, Fields, found};
use super::models::Live;
use crate::text::{Chat, ChatTemplate, ToolFormat};
use crate::units::Error;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};

/// Messages of one conversation; each is a turn, and no context holds as many.
const MESSAGES_MAX: usize = 16_384;
/// Tools of one request.
const TOOLS_MAX: usize = 256;
/// Bytes of a function's name (OpenAI's bound).
const NAME_BYTES_MAX: usize = 64;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The schema of its arguments.
    pub parameters: Value,
    /// The whole definition, for the template.
    pub definition: Value,
}

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// Never.
    None,
    /// As the model likes.
    Auto,
    /// One of them.
    Required,
    /// This one, by its place in the list.
    Named(usize),
}

/// Reads `messages`. `ollama`: calls hold objects for arguments, and images stand beside the content.
pub fn messages(f: &Fields, ollama: bool) -> Answered<Vec<Value>> {
    let list = f.array("messages")?.ok_or_else(|| Fail::field("messages", "an array", "nothing"))?;
    if list.is_empty() || list.len() > MESSAGES_MAX {
        return Err(Fail::field("messages", format!("1 to {MESSAGES_MAX} messages"), list.len()));
    }
    list.iter().enumerate().map(|(i, m)| message(format!("messages[{i}]"), m, ollama)).collect()
}

fn message(path: String, value: &Value, ollama: bool) -> Answered<Value> {
    const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];
    let m = Fields::of(path, value)?;
    let role = m.word("role", ROLES)?.ok_or_else(|| Fail::field(m.at("role"), "a role", "nothing"))?;
    let mut out = Map::new();
    // Templates know the older name.
    out.insert("role".into(), json!(if role == "developer" { "system" } else { role }));
    let content = content(&m)?;
    let calls = calls(&m, ollama)?;
    if content.is_none() && calls.is_empty() && role != "assistant" {
        return Err(Fail::field(m.at("content"), "text or an array of parts", "nothing"));
    }
    out.insert("content".into(), content.map_or(json!(""), Value::from));
    for name in ["name", "tool_call_id", "tool_name"] {
        if let Some(text) = m.text(name)? {
            out.insert(name.into(), json!(text));
        }
    }
    for name in ["reasoning_content", "thinking"] {
        if let Some(text) = m.text(name)? {
            out.insert("reasoning_content".into(), json!(text));
        }
    }
    if !calls.is_empty() {
        if role != "assistant" {
            return Err(Fail::field(m.at("tool_calls"), "only in the assistant's messages", role));
        }
        out.insert("tool_calls".into(), calls.into());
    }
    if let Some(images) = m.array("images")?.filter(|i| !i.is_empty()) {
        return Err(Fail::field(m.at("images"), "no images: the model reads text", images.len()));
    }
    m.done(&["refusal", "audio", "annotations", "function_call"])?;
    Ok(Value::Object(out))
}

/// Text, or the texts of an array of parts.
fn content(m: &Fields) -> Answered<Option<String>> {
    let parts = match m.get("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text.clone())),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(Fail::field(m.at("content"), "text or an array of parts", found(other))),
    };
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let p = Fields::of(format!("{}[{i}]", m.at("content")), part)?;
        // What is not text is refused by its type, before its own fields are looked at.
        let kind = p.required_text("type")?;
        if kind != "text" {
            let expected = "text: the model reads no images, sounds or files";
            return Err(Fail::field(p.at("type"), expected, format!("{kind:?}")));
        }
        text.push_str(p.required_text("text")?);
        p.done(&["cache_control"])?;
    }
    Ok(Some(text))
}

/// Calls of an earlier answer, in OpenAI's form.
fn calls(m: &Fields, ollama: bool) -> Answered<Vec<Value>> {
    let list = m.array("tool_calls")?.map_or(&[][..], Vec::as_slice);
    list.iter()
        .enumerate()
        .map(|(i, call)| {
            let c = Fields::of(format!("{}[{i}]", m.at("tool_calls")), call)?;
            let id = c.text("id")?.unwrap_or_default();
            c.word("type", &["function"])?;
            let function = c.object("function")?;
            let f = function.ok_or_else(|| Fail::field(c.at("function"), "an object", "nothing"))?;
            let name = f.required_text("name")?;
            let arguments = match f.get("arguments") {
                Some(v) if v.is_object() && ollama => v.to_string(),
                Some(Value::String(text)) => text.clone(),
                None => "{}".into(),
                Some(v) => return Err(Fail::field(f.at("arguments"), "JSON as text", found(v))),
            };
            f.count("index", 0, u32::MAX.into())?;
            f.done(&[])?;
            c.done(&["index"])?;
            let function = json!({ "name": name, "arguments": arguments });
            Ok(json!({ "id": id, "type": "function", "function": function }))
        })
        .collect()
}

/// Reads `tools`.
pub fn tools(f: &Fields) -> Answered<Vec<Tool>> {
    let list = f.array("tools")?.map_or(&[][..], Vec::as_slice);
    if list.len() > TOOLS_MAX {
        return Err(Fail::field("tools", format!("at most {TOOLS_MAX}"), list.len()));
    }
    list.iter()
        .enumerate()
        .map(|(i, tool)| {
            let t = Fields::of(format!("tools[{i}]"), tool)?;
            t.word("type", &["function"])?;
            let function = t.object("function")?;
            let function = function.ok_or_else(|| Fail::field(t.at("function"), "an object", "nothing"))?;
            let name = function.required_text("name")?;
            let simple = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(simple) {
                let expected = format!("1 to {NAME_BYTES_MAX} letters, digits, '_', '-' or '.'");
                return Err(Fail::field(function.at("name"), expected, format!("{name:?}")));
            }
            function.text("description")?;
            function.flag("strict")?;
            let parameters = match function.get("parameters") {
                None => json!({ "type": "object", "properties": {} }),
                Some(p) if p.is_object() => p.clone(),
                Some(p) => return Err(Fail::field(function.at("parameters"), "a JSON schema", found(p))),
            };
            function.done(&[])?;
            t.done(&[])?;
            Ok(Tool { name: name.to_owned(), parameters, definition: tool.clone() })
        })
        .collect()
}

/// Reads `tool_choice`.
pub fn tool_choice(f: &Fields, tools: &[Tool]) -> Answered<Choice> {
    const WORDS: &str = "none, auto, required or a function";
    let choice = match f.get("tool_choice") {
        None => return Ok(if tools.is_empty() { Choice::None } else { Choice::Auto }),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Choice::None,
            "auto" => Choice::Auto,
            "required" => Choice::Required,
            other => return Err(Fail::field("tool_choice", WORDS, format!("{other:?}"))),
        },
        Some(value) => {
            let c = Fields::of("tool_choice".into(), value)?;
            c.word("type", &["function"])?;
            let function = c.object("function")?;
            let function =
                function.ok_or_else(|| Fail::field("tool_choice.function", "an object", "nothing"))?;
            let name = function.required_text("name")?;
            let place = tools.iter().position(|t| t.name == name);
            let unknown =
                || Fail::field("tool_choice.function.name", "the name of a tool", format!("{name:?}"));
            Choice::Named(place.ok_or_else(unknown)?)
        }
    };
    match choice {
        Choice::Required if tools.is_empty() => {
            Err(Fail::field("tool_choice", "tools to choose from", "required, without tools"))
        }
        Choice::Auto if tools.is_empty() => Ok(Choice::None),
        choice => Ok(choice),
    }
}

/// The grammar of one call that must be made, after the text that opens it.
pub fn call_grammar(format: ToolFormat, tools: &[&Tool]) -> String {
    let (_, before, between, after) = format.frame();
    let quoted = |text: &str| Value::from(text).to_string();
    let mut text = String::from("start: ");
    text += &(0..tools.len()).map(|i| format!("c{i}")).collect::<Vec<_>>().join(" | ");
    for (i, tool) in tools.iter().enumerate() {
        let head = quoted(&format!("{before}{}{between}", tool.name));
        let end = if after.is_empty() { String::new() } else { format!(" {}", quoted(after)) };
        text += &format!("\nc{i}: {head} a{i}{end}");
        text += &format!("\na{i}: %json {}", crate::sample::grammar::tight(tool.parameters.clone()));
    }
    text + "\n"
}

/// The prompt of a conversation.
pub struct Prompt {
    /// Its text, control tokens written out.
    pub text: String,
    /// Whether the template wrote the text: then control tokens in it are meant, the first one included.
    pub from_template: bool,
}

/// Renders the messages by the model's template; what tells the model of its tools is put into the messages where the
/// template knows none.
pub fn prompt(
    live: &Live,
    mut messages: Vec<Value>,
    tools: &[Tool],
    extra: Map<String, Value>,
) -> Answered<Prompt> {
    let Some(template) = &live.template else {
        let lines: Vec<&str> = messages.iter().filter_map(|m| m["content"].as_str()).collect();
        return Ok(Prompt { text: lines.join("\n"), from_template: false });
    };
    let taught = live.tool_format.is_some();
    if !tools.is_empty() && !taught {
        describe_tools(&mut messages, tools);
    }
    for m in &mut messages {
        reshape_calls(m, live.tool_format);
    }
    let definitions: Vec<Value> = tools.iter().map(|t| t.definition.clone()).collect();
    let chat = Chat {
        messages: messages.into(),
        tools: if taught && !tools.is_empty() { definitions.into() } else { Value::Null },
        add_generation_prompt: true,
        extra,
        now_unix_s: None,
    };
    let text = render(template, live, &chat)?;
    Ok(Prompt { text, from_template: true })
}

fn render(template: &ChatTemplate, live: &Live, chat: &Chat) -> Answered<String> {
    template.render(&live.tokenizer, chat).map_err(|e| match e {
        // A template that does not end is the model's fault, not the client's.
        Error::Limit { .. } => {
            Fail::new(StatusCode::INTERNAL_SERVER_ERROR, crate::units::one_line(&e.to_string()))
                .code("chat_template")
        }
        e => Fail { param: Some("messages".into()), ..Fail::from(e) },
    })
}

/// Tells a model whose template knows no tools of them, in the words of Hermes.
fn describe_tools(messages: &mut Vec<Value>, tools: &[Tool]) {
    let mut text = String::from(
        "You may call these functions. To call one, answer with only a JSON object with its name and arguments \
         between <tool_call> and </tool_call>, like\n<tool_call>\n{\"name\": \"NAME\", \"arguments\": {}}\n</tool_call>\n\n",
    );
    tools.iter().for_each(|t| text += &format!("{}\n", t.definition));
    match messages.first_mut().filter(|m| m["role"] == "system") {
        Some(first) => {
            let said = first["content"].as_str().unwrap_or_default().to_owned();
            first["content"] = json!(format!("{said}\n\n{text}"));
        }
        None => messages.insert(0, json!({ "role": "system", "content": text })),
    }
    // Such a template knows neither the role of a result nor calls.
    for m in messages.iter_mut() {
        if let Some(calls) = m["tool_calls"].as_array() {
            let call = |c: &Value| {
                let arguments = c["function"]["arguments"].as_str().unwrap_or("{}");
                format!(
                    "<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>",
                    c["function"]["name"]
                )
            };
            let written: Vec<String> = calls.iter().map(call).collect();
            m["content"] =
                json!(format!("{}{}", m["content"].as_str().unwrap_or_default(), written.join("\n")));
            m.as_object_mut().expect("a message").remove("tool_calls");
        }
        if m["role"] == "tool" || m["role"] == "function" {
            let result = m["content"].as_str().unwrap_or_default();
            m["content"] = json!(format!("<tool_response>\n{result}\n</tool_response>"));
            m["role"] = json!("user");
        }
    }
}

/// Most templates take a call's arguments as an object; DeepSeek's join them as text.
fn reshape_calls(message: &mut Value, format: Option<ToolFormat>) {
    if matches!(format, Some(ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain)) {
        return;
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        let object = arguments.as_str().and_then(|t| serde_json::from_str::<Value>(t).ok());
        if let Some(object) = object.filter(Value::is_object) {
            *arguments = object;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Answered<(Vec<Value>, Choice)> {
        let f = Fields::of_body(&body).unwrap();
        let m = messages(&f, false)?;
        let t = tools(&f)?;
        let c = tool_choice(&f, &t)?;
        Ok((m, c))
    }

    #[test]
    fn messages_become_what_templates_take() {
        let body = json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}}});
        let (mut m, c) = read(body).unwrap();
        assert_eq!(m[0], json!({"role": "system", "content": "ab"}));
        assert_eq!(m[2]["tool_call_id"], "1");
        assert_eq!(c, Choice::Named(0));
        reshape_calls(&mut m[1], Some(ToolFormat::Hermes));
        assert_eq!(m[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        describe_tools(&mut m, &[]);
        assert_eq!(m[2]["role"], "user");
    }

    #[test]
    fn every_mistake_names_its_field() {
        let user = json!({"role": "user", "content": "x"});
        let cases = [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "x"}), "messages"),
            (json!({"messages": [1]}), "messages[0]"),
            (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "king", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"messages": [user, {"role": "user", "content": 3}]}), "messages[1].content"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content[0].type",
            ),
            (json!({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}), "messages[0].nmae"),
            (json!({"messages": [user], "tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"messages": [user], "tools": [{"function": {"name": "a b"}}]}), "tools[0].function.name"),
            (json!({"messages": [user], "tool_choice": "required"}), "tool_choice"),
            (
                json!({"messages": [user], "tool_choice": {"function": {"name": "f"}}}),
                "tool_choice.function.name",
            ),
        ];
        for (body, field) in cases {
            let e = read(body.clone()).err().unwrap_or_else(|| panic!("{body} was taken"));
            assert_eq!(e.param.as_deref(), Some(field), "{body}: {}", e.message);
        }
    }

    #[test]
    fn a_forced_call_is_held_to_its_schema() {
        let body = json!({"tools": [{"function": {"name": "f", "parameters": {"type": "object"}}}]});
        let tools = tools(&Fields::of_body(&body).unwrap()).unwrap();
        let text = call_grammar(ToolFormat::Hermes, &[&tools[0]]);
        assert!(
            text.starts_with(
                "start: c0\nc0: \"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": \" a0 \"}\\n</tool_call>\"\n"
            ),
            "{text}"
        );
        assert!(text.contains("a0: %json {\"type\":\"object\",\"x-guidance\":"), "{text}");
    }
}
