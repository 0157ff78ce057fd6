//! Templates: small ones in the constructs of published ones against Jinja2's output, the sources they come from, and
//! what bounds them.

use super::*;
use serde_json::{Value as Json, json};

fn special() -> impl Iterator<Item = (&'static str, &'static str)> {
    [("bos_token", "<BOS>"), ("eos_token", "<EOS>")].into_iter()
}

fn render(source: &str, chat: &Chat) -> Result<String> {
    ChatTemplate::new(Path::new("t.jinja"), source)?.render_with(special(), chat)
}

/// What a case of the file below gives that it should not, if anything.
fn difference(all: &Json, case: &Json) -> Option<String> {
    let source = all["sources"][case["template"].as_str().unwrap()].as_str().unwrap();
    let conv = case["conv"].as_str().unwrap();
    let chat = Chat {
        messages: case.get("messages").unwrap_or(&all["convs"][conv]).clone(),
        tools: case
            .get("tools")
            .unwrap_or(if case["with_tools"] == true { &all["tools"] } else { &Json::Null })
            .clone(),
        add_generation_prompt: case["agp"] == true,
        extra: case["extra"].as_object().cloned().unwrap_or_default(),
        now_unix_s: all["now"].as_i64(),
    };
    match (render(source, &chat), case["want"].as_str()) {
        (Ok(got), Some(want)) if got == want => None,
        (Err(_), None) => None,
        (Ok(got), Some(want)) => Some(format!("\n got {got:?}\nwant {want:?}")),
        (Err(e), Some(_)) => Some(e.to_string()),
        (Ok(_), None) => Some(format!("no error, Jinja2 says {}", case["error"])),
    }
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text/templates.json");
    let all: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    assert!(cases.len() > 90);
    for case in cases {
        if let Some(problem) = difference(&all, case) {
            panic!("{} on {} {}: {problem}", case["template"], case["conv"], case["extra"]);
        }
    }
}

/// One expression or statement each, in every form that Python and Jinja2 give it: the texts are Jinja2 3.1's in the environment
/// that transformers 5 makes; none where that is an error.
#[test]
fn expressions_mean_what_they_mean_in_jinja2() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text/expressions.json");
    let all: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let chat = Chat { extra: all["vars"].as_object().unwrap().clone(), ..Chat::default() };
    let cases = all["cases"].as_array().unwrap();
    assert!(cases.len() > 450);
    for case in cases {
        let source = case[0].as_str().unwrap();
        match (render(source, &chat), case[1].as_str()) {
            (Ok(got), want) => assert_eq!(Some(got.as_str()), want, "{source}"),
            (Err(e), want) => assert_eq!(None, want, "{source}: {e}"),
        }
    }
}

/// The same for a larger file of published templates, named by TEGU_TEMPLATE_CASES: prints what differs.
#[test]
fn published_templates() {
    let Some(path) = std::env::var_os("TEGU_TEMPLATE_CASES") else {
        return eprintln!("skipped: no TEGU_TEMPLATE_CASES");
    };
    let all: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    let wrong: Vec<_> = cases.iter().filter_map(|c| Some((c, difference(&all, c)?))).collect();
    for (i, (case, problem)) in wrong.iter().enumerate() {
        if i == 0 || wrong[i - 1].0["template"] != case["template"] {
            println!(
                "{} on {}: {}",
                case["template"],
                case["conv"],
                problem.chars().take(400).collect::<String>()
            );
        }
    }
    println!("{} of {} differ", wrong.len(), cases.len());
    assert!(wrong.len() * 20 < cases.len());
}

#[test]
fn a_template_that_does_not_end_is_an_error() {
    // Each of these runs its body on a growing `ns.l`, `n` times or nearly for ever.
    let grow = |n: usize, body: &str, then: &str| {
        let head = "{% set ns = namespace(l=[1], s='x') %}";
        format!("{head}{{% for i in range({n}) %}}{body}{{% endfor %}}{then}")
    };
    let ever = |body: &str| {
        let head = "{% set ns = namespace(l=[1]) %}{% for i in range(100000) %}{% for i in range(100000) %}";
        format!("{head}{body}{{% endfor %}}{{% endfor %}}")
    };
    let double = "{% set ns.l = ns.l + ns.l %}";
    let nest = "{% set ns.l = [ns.l] %}";
    let bombs = [
        ever(""),
        ever(nest),
        ever("{% set l = [l] %}"),
        ever("{% set ns.l = [[[[[[[[[[[[[[[[[[[[[[ns.l]]]]]]]]]]]]]]]]]]]]]] %}"),
        ever("{% set ns.l = ns.l|map('upper') %}"),
        ever("{% set ns.l = {'a': ns.l} %}"),
        grow(200, "{% set ns.s = ns.s ~ ns.s %}", "{{ ns.s }}"),
        grow(90_000, "{{ 'x' * 100000 }}", ""),
        grow(30, double, "{{ ns.l }}"),
        grow(30, double, "{{ ns.l | tojson }}"),
        grow(30, double, "{{ ns.l | list | length }}"),
        grow(5000, nest, "{{ ns.l | tojson }}"),
        grow(5000, nest, "{{ ns.l }}"),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
        "{{ 'x' * 1000000000000 }}".to_owned(),
        "{{ range(1000000000000) | list }}".to_owned(),
        "{{ '%1000000000000d' % 1 }}".to_owned(),
        "{{ '%.1000000000000d' % 1 }}".to_owned(),
        "{{ '%*s' % (1000000000000, 'x') }}".to_owned(),
        "{{ 'x'.center(1000000000000) }}".to_owned(),
        "{{ '1'.zfill(1000000000000) }}".to_owned(),
        "{{ 'x' | center(1000000000000) }}".to_owned(),
        "{{ 'x' | indent(1000000000000, true) }}".to_owned(),
        "{{ '\\t'.expandtabs(1000000000000) }}".to_owned(),
        "{{ 'aaaaaaaaaa'.replace('', 'b' * 1000000).replace('', 'c' * 1000000) }}".to_owned(),
    ];
    // Each would take hours or all memory; one that ends takes a second at most, on a machine that is busy or emulated more.
    let most_s = if cfg!(debug_assertions) { 600 } else { 60 };
    for bomb in bombs {
        let start = std::time::Instant::now();
        let e = render(&bomb, &Chat::default()).expect_err(&bomb).to_string();
        assert!(e.starts_with("t.jinja: chat_template") && !e.contains('\n'), "{e}");
        assert!(start.elapsed().as_secs() < most_s, "{bomb}: {:?}", start.elapsed());
    }
}

#[test]
fn a_long_chat_is_within_the_limits() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text/templates.json");
    let all: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    // The longest of the templates, 1,000 messages, a megabyte of text: about 250,000 tokens.
    let text = "word ".repeat(200);
    let chat = Chat::of((0..1000).map(|i| (if i % 2 == 0 { "user" } else { "assistant" }, text.as_str())));
    for name in ["qwen3-like", "llama3-like", "deepseek-like", "glm-like"] {
        let out =
            render(all["sources"][name].as_str().unwrap(), &chat).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(out.len() > 990_000, "{name}");
    }
}

#[test]
fn errors_name_the_template_and_the_line() {
    let table = [
        (
            "a\n{{ raise_exception('no system role') }}",
            "chat_template line 2: expected messages that the template takes, found no system role",
        ),
        ("a\n\n{% if %}", "chat_template line 3: expected a Jinja template, found syntax error"),
        ("{{ nothing.at.all }}", "chat_template line 1: expected messages"),
        ("{{ 1 | nofilter }}", "chat_template line 1: expected"),
        ("{{ 'x'.nomethod() }}", "chat_template line 1: expected"),
        ("{% include 'x' %}", "chat_template line 1: expected"),
    ];
    for (source, want) in table {
        let e = render(source, &Chat::default()).expect_err(source).to_string();
        assert!(e.starts_with("t.jinja: ") && e.contains(want), "{source}: {e}");
    }
    let e = ChatTemplate::new(Path::new("t"), &"x".repeat(TEMPLATE_BYTES_MAX + 1)).unwrap_err().to_string();
    assert!(e.contains("at most"), "{e}");
}

#[test]
fn generation_tags_leave_no_trace() {
    for (source, want) in [
        ("{% generation %}a{% endgeneration %}", "{% if true %}a{% endif %}"),
        ("{%- generation -%}", "{%- if true -%}"),
        ("{%generation%}", "{% if true %}"),
        ("{% generations %}{% set generation = 1 %}", "{% generations %}{% set generation = 1 %}"),
        ("{{ '%}' }}{%", "{{ '%}' }}{%"),
        ("{%+ endgeneration +%}é", "{%+ endif +%}é"),
    ] {
        assert_eq!(without_generation_tags(source), want);
    }
}

#[test]
fn templates_come_from_every_source() {
    let chat = Chat::of([("user", "hi")]);
    let with_tools = Chat { tools: json!([{}]), ..chat.clone() };
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "\n{{ tools }} {{ oops.x }}"}]});
    let t = ChatTemplate::from_config(Path::new("c.json"), &named).unwrap().unwrap();
    assert_eq!(t.render_with(special(), &chat).unwrap(), "plain hi");
    assert_eq!(t.source(false), "plain {{ messages[0].content }}");
    assert!(t.source(true).contains("oops"));
    let e = t.render_with(special(), &with_tools).unwrap_err().to_string();
    assert!(e.starts_with("c.json: chat_template \"tool_use\" line 2"), "{e}");
    for (config, want) in [
        (json!({"chat_template": 3}), "c.json: chat_template: expected a string or a list"),
        (
            json!({"chat_template": [{"name": "x", "template": ""}]}),
            "c.json: chat_template: expected a template named",
        ),
    ] {
        let e = ChatTemplate::from_config(Path::new("c.json"), &config).unwrap_err().to_string();
        assert!(e.starts_with(want), "{e}");
    }
    assert!(ChatTemplate::from_config(Path::new("c.json"), &json!({})).unwrap().is_none());

    let dir = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::from_hf_dir(dir.path()).unwrap().is_none());
    std::fs::write(dir.path().join("tokenizer_config.json"), named.to_string()).unwrap();
    let from_dir =
        || ChatTemplate::from_hf_dir(dir.path()).unwrap().unwrap().render_with(special(), &chat).unwrap();
    assert_eq!(from_dir(), "plain hi");
    std::fs::write(dir.path().join("chat_template.jinja"), "file {{ bos_token }}").unwrap();
    assert_eq!(from_dir(), "file <BOS>");

    let chatml = ChatTemplate::builtin("chatml").unwrap();
    let chat = Chat::of([("system", "s"), ("user", "u")]);
    let want = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(chatml.render_with(special(), &chat).unwrap(), want);
    assert!(ChatTemplate::builtin("nope").is_none());
}
