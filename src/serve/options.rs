//! The fields that every request for text has: how tokens are chosen, when the answer ends, how urgent it is.

use super::Settings;
use super::fail::Fail;
use super::fields::{Answered, Fields, found};
use crate::engine::Class;
use crate::limits::STOPS_MAX;
use crate::sample::{Form, SampleParams};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Answers of one request.
pub const CHOICES_MAX: u64 = 16;
/// The likeliest tokens that may be asked for.
pub const TOP_LOGPROBS_MAX: u64 = 20;
/// Tokens that one answer may be asked to have.
const TOKENS_MAX: u64 = 1 << 24;

/// Fields of OpenAI's and llama.cpp's requests that clients send and that change no answer here: what is cached is always used,
/// and there are no slots to choose.
pub const IGNORED: &[&str] = &[
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "verbosity",
    "prediction",
    "cache_prompt",
    "id_slot",
    "timings_per_token",
    "return_progress",
    "return_tokens",
];

/// What was asked for, checked.
pub struct Options {
    /// How tokens are chosen; the seed is that of the first answer.
    pub params: SampleParams,
    /// Answers.
    pub n: usize,
    /// Most tokens of an answer; none: what the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// The answer comes in pieces.
    pub stream: bool,
    /// The last piece tells the counts.
    pub include_usage: bool,
    /// How urgent it is.
    pub class: Class,
    /// Whose it is, if the request says.
    pub client: Option<String>,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
    /// A form that the answer is held to, and the field that asked for it.
    pub form: Option<(Form, &'static str)>,
    /// Go on past end tokens.
    pub ignore_end: bool,
    /// The session that the answer belongs to.
    pub session: Option<String>,
    /// When the context is full, keep this many tokens at its front and go on.
    pub slide: Option<usize>,
}

/// A seed that no request has asked for: from the clock, different each time.
pub fn any_seed() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = now.map_or(0, |d| d.as_nanos() as u64);
    // Two requests of one nanosecond still differ.
    nanos ^ COUNT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed)
}

impl Options {
    /// Reads them from a request of OpenAI's form.
    pub fn read(f: &Fields, settings: &Settings) -> Answered<Options> {
        let stream = f.flag("stream")?.unwrap_or(false);
        let include_usage = match f.object("stream_options")? {
            None => false,
            Some(o) => {
                let usage = o.flag("include_usage")?.unwrap_or(false);
                o.flag("include_obfuscation")?;
                o.done(&[])?;
                usage
            }
        };
        let max = [
            or_all(f, "max_completion_tokens", TOKENS_MAX)?,
            or_all(f, "max_tokens", TOKENS_MAX)?,
            or_all(f, "n_predict", TOKENS_MAX)?,
        ];
        let stops = f.texts("stop", STOPS_MAX)?;
        // OpenAI's `user`, else the name by which Tegu's own clients tell themselves apart.
        let client = f.text("user")?.map(crate::units::one_line);
        let class = f.word("class", &["interactive", "normal", "background"])?;
        let deadline = f.count("deadline_ms", 1, 86_400_000)?;
        let session = f.text("session")?.map(str::to_owned);
        // llama.cpp's names.
        let keep = f.count("n_keep", 0, TOKENS_MAX)?.unwrap_or(0) as usize;
        let slide = f.flag("context_shift")?.unwrap_or(false).then_some(keep);
        Ok(Options {
            params: params(f, settings)?,
            n: f.count("n", 1, CHOICES_MAX)?.unwrap_or(1) as usize,
            max_tokens: max.into_iter().flatten().next().map(|n| n as usize),
            stops,
            stream,
            include_usage,
            class: class.map_or(Class::Interactive, class_of),
            client,
            deadline: deadline.map(|ms| Instant::now() + Duration::from_millis(ms)),
            form: form(f)?,
            ignore_end: f.flag("ignore_eos")?.unwrap_or(false),
            session,
            slide,
        })
    }
}

/// A whole number, or -1 for as many as there can be, as llama.cpp's clients say it.
fn or_all(f: &Fields, name: &'static str, high: u64) -> Answered<Option<u64>> {
    match f.get(name).and_then(Value::as_f64) {
        Some(-1.0) => Ok(Some(high)),
        _ => f.count(name, 0, high),
    }
}

fn class_of(word: &str) -> Class {
    match word {
        "background" => Class::Background,
        "normal" => Class::Normal,
        _ => Class::Interactive,
    }
}

/// How tokens are chosen: OpenAI's fields, and those of llama.cpp's server beside them. What is not said comes from the
/// settings.
fn params(f: &Fields, settings: &Settings) -> Answered<SampleParams> {
    let d = &settings.sample;
    let real = |name, low, high, default: f32| {
        Ok::<f32, Fail>(f.real(name, low, high)?.map_or(default, |x| x as f32))
    };
    // -1 looks back over everything, as in llama.cpp.
    let last_n = |name, default: Option<usize>| -> Answered<Option<usize>> {
        Ok(f.real(name, -1.0, 1e9)?.map_or(default, |n| usize::try_from(n as i64).ok()))
    };
    Ok(SampleParams {
        seed: seed(f)?,
        temp: real("temperature", 0.0, 100.0, d.temp)?,
        top_k: or_all(f, "top_k", u32::MAX.into())?.map_or(d.top_k, |k| k as usize),
        top_p: real("top_p", 0.0, 1.0, d.top_p)?,
        min_p: real("min_p", 0.0, 1.0, d.min_p)?,
        typical: real("typical_p", 0.0, 1.0, d.typical)?,
        top_n_sigma: real("top_n_sigma", -1e6, 1e6, d.top_n_sigma)?,
        xtc_probability: real("xtc_probability", 0.0, 1.0, d.xtc_probability)?,
        xtc_threshold: real("xtc_threshold", 0.0, 1.0, d.xtc_threshold)?,
        dry_multiplier: real("dry_multiplier", 0.0, 1e6, d.dry_multiplier)?,
        dry_base: real("dry_base", 0.0, 1e6, d.dry_base)?,
        dry_allowed_length: f
            .count("dry_allowed_length", 0, 1 << 20)?
            .map_or(d.dry_allowed_length, |n| n as usize),
        dry_penalty_last_n: last_n("dry_penalty_last_n", d.dry_penalty_last_n)?,
        dry_breakers: d.dry_breakers.clone(),
        // Two names, as some servers say it the other way.
        repeat_penalty: real(
            "repeat_penalty",
            1e-3,
            1e3,
            real("repetition_penalty", 1e-3, 1e3, d.repeat_penalty)?,
        )?,
        repeat_last_n: last_n("repeat_last_n", d.repeat_last_n)?,
        frequency_penalty: real("frequency_penalty", -2.0, 2.0, 0.0)?,
        presence_penalty: real("presence_penalty", -2.0, 2.0, 0.0)?,
        logit_bias: logit_bias(f)?,
        logprobs: None,
    })
}

/// Any whole number: a negative one is a seed like any other, but for -1, which asks for a new one each time.
fn seed(f: &Fields) -> Answered<u64> {
    match f.get("seed") {
        None => Ok(any_seed()),
        Some(v) => match (v.as_u64(), v.as_i64()) {
            (Some(n), _) => Ok(n),
            (_, Some(-1)) => Ok(any_seed()),
            (_, Some(n)) => Ok(n as u64),
            _ => Err(Fail::field(f.at("seed"), "a whole number", found(v))),
        },
    }
}

/// `{"token id": bias}`, or llama.cpp's `[[token id, bias]]`, where `false` means never.
fn logit_bias(f: &Fields) -> Answered<Vec<(u32, f32)>> {
    const ENTRIES_MAX: usize = 1024;
    let Some(value) = f.get("logit_bias") else { return Ok(Vec::new()) };
    let too_many =
        || Fail::field("logit_bias", format!("an object of at most {ENTRIES_MAX} token ids"), found(value));
    match value {
        Value::Object(map) if map.len() <= ENTRIES_MAX => map
            .iter()
            .map(|(id, b)| {
                let at = format!("logit_bias.{}", crate::units::one_line(id));
                let number = id.parse().map_err(|_| {
                    Fail::field(&at, "a token id as the name", format!("{:?}", crate::units::one_line(id)))
                })?;
                Ok((number, bias(&at, b)?))
            })
            .collect(),
        Value::Array(list) if list.len() <= ENTRIES_MAX => list
            .iter()
            .enumerate()
            .map(|(i, pair)| {
                let at = format!("logit_bias[{i}]");
                let [id, b] = pair.as_array().map_or(&[][..], |p| p) else {
                    return Err(Fail::field(&at, "a token id and its bias", found(pair)));
                };
                let number = id.as_u64().and_then(|n| u32::try_from(n).ok());
                let number = number.ok_or_else(|| {
                    Fail::field(format!("{at}[0]"), "a token id (/tokenize tells a text's)", found(id))
                })?;
                Ok((number, bias(&format!("{at}[1]"), b)?))
            })
            .collect(),
        _ => Err(too_many()),
    }
}

/// OpenAI's bounds mean never and always.
fn bias(at: &str, value: &Value) -> Answered<f32> {
    let number = if value == false { Some(-100.0) } else { value.as_f64() };
    let number = number.filter(|b| (-100.0..=100.0).contains(b));
    let number = number.ok_or_else(|| Fail::field(at, "a number from -100 to 100", found(value)))?;
    Ok(if number == -100.0 { f32::NEG_INFINITY } else { number as f32 })
}

/// `response_format`, or a grammar in Lark's or llama.cpp's notation.
fn form(f: &Fields) -> Answered<Option<(Form, &'static str)>> {
    let mut forms = Vec::new();
    if let Some(format) = f.object("response_format")? {
        let kind = format.word("type", &["text", "json_object", "json_schema", "grammar"])?;
        match kind {
            None => {
                return Err(Fail::field(
                    "response_format.type",
                    "text, json_object or json_schema",
                    "nothing",
                ));
            }
            Some("json_object") => {
                // llama.cpp's server takes a schema here too.
                let form = format.get("schema").map_or(Form::JsonObject, |s| Form::JsonSchema(s.clone()));
                forms.push((form, "response_format"));
            }
            Some("json_schema") => forms.push((schema(&format)?, "response_format.json_schema.schema")),
            Some("grammar") => {
                forms.push((of_notation(format.required_text("grammar")?), "response_format.grammar"));
            }
            _ => {}
        }
        format.done(&[])?;
    }
    // Some clients send an empty one for none.
    if let Some(text) = f.text("grammar")?.filter(|t| !t.trim().is_empty()) {
        forms.push((of_notation(text), "grammar"));
    }
    if forms.len() > 1 {
        return Err(Fail::field("grammar", "no other form besides response_format", "both"));
    }
    Ok(forms.pop())
}

fn schema(format: &Fields) -> Answered<Form> {
    let missing = || Fail::field("response_format.json_schema.schema", "a JSON schema", "nothing");
    let named = format.object("json_schema")?.ok_or_else(missing)?;
    let schema: &Value = named.get("schema").ok_or_else(missing)?;
    for text in ["name", "description"] {
        named.text(text)?;
    }
    named.flag("strict")?;
    named.done(&[])?;
    Ok(Form::JsonSchema(schema.clone()))
}

/// GBNF defines its rules with `::=`, Lark with a colon.
fn of_notation(text: &str) -> Form {
    if text.contains("::=") { Form::Gbnf(text.to_owned()) } else { Form::Lark(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Answered<Options> {
        let f = Fields::of_body(&body).unwrap();
        let o = Options::read(&f, &Settings::default())?;
        f.done(IGNORED)?;
        Ok(o)
    }

    #[test]
    fn fields_are_read_with_their_defaults() {
        let o =
            read(json!({"temperature": 0.5, "n": 3, "stop": "x", "max_tokens": 5, "seed": 7, "store": true,
            "logit_bias": {"5": -100, "6": 1.5}, "stream": true, "stream_options": {"include_usage": true}}));
        let o = o.unwrap();
        assert_eq!((o.params.temp, o.n, o.max_tokens, o.params.seed), (0.5, 3, Some(5), 7));
        assert_eq!(o.stops, ["x"]);
        assert_eq!(o.params.logit_bias, [(5, f32::NEG_INFINITY), (6, 1.5)]);
        assert!(o.stream && o.include_usage && o.form.is_none());
        // llama.cpp's words, and null for what a client knows and does not mean.
        let o = read(json!({"n_predict": -1, "top_k": -1, "repetition_penalty": 1.5, "cache_prompt": false,
            "id_slot": -1, "logit_bias": [[5, false], [6, -1]], "mirostat": null, "functions": null}));
        let o = o.unwrap();
        assert_eq!((o.max_tokens, o.params.top_k), (Some(TOKENS_MAX as usize), u32::MAX as usize));
        assert_eq!(
            (o.params.repeat_penalty, o.params.logit_bias),
            (1.5, vec![(5, f32::NEG_INFINITY), (6, -1.0)])
        );
        assert_eq!(read(json!({"max_tokens": 7, "n_predict": 9})).unwrap().max_tokens, Some(7));
        let schema =
            json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}});
        let o = read(json!({"response_format": schema})).unwrap();
        assert_eq!(o.form.unwrap().0, Form::JsonSchema(json!({"type": "object"})));
        assert!(matches!(read(json!({"grammar": "root ::= \"x\""})).unwrap().form, Some((Form::Gbnf(_), _))));
    }

    #[test]
    fn every_mistake_names_its_field() {
        let cases = [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"temperature": -1}), "temperature"),
            (json!({"top_p": 2}), "top_p"),
            (json!({"n": 0}), "n"),
            (json!({"n": 1.5}), "n"),
            (json!({"max_tokens": -2}), "max_tokens"),
            (json!({"max_tokens": "5"}), "max_tokens"),
            (json!({"n_predict": 1.5}), "n_predict"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"stop": ["a", 1]}), "stop[1]"),
            (json!({"stop": [null]}), "stop[0]"),
            (json!({"stop": vec!["x"; STOPS_MAX + 1]}), "stop"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": {"x": 1}}), "stream_options.x"),
            (json!({"seed": "x"}), "seed"),
            (json!({"logit_bias": {"a": 1}}), "logit_bias.a"),
            (json!({"logit_bias": {"1": 1000}}), "logit_bias.1"),
            (json!({"logit_bias": {"1": true}}), "logit_bias.1"),
            (json!({"logit_bias": [[1, "x"]]}), "logit_bias[0][1]"),
            (json!({"logit_bias": [[5, 1], ["hi", 1]]}), "logit_bias[1][0]"),
            (json!({"logit_bias": [[5, 1, 2]]}), "logit_bias[0]"),
            (json!({"logit_bias": [5]}), "logit_bias[0]"),
            (json!({"logit_bias": vec![json!([1, 1]); 1025]}), "logit_bias"),
            (json!({"logit_bias": "5"}), "logit_bias"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"response_format": {"type": "json_object"}, "grammar": "start: \"x\""}), "grammar"),
            (json!({"class": "urgent"}), "class"),
            (json!({"temprature": 1}), "temprature"),
        ];
        for (body, field) in cases {
            let e = read(body.clone()).err().unwrap_or_else(|| panic!("{body} was taken"));
            assert_eq!(e.param.as_deref(), Some(field), "{body}: {}", e.message);
            assert_eq!(e.status, 400);
        }
    }
}
