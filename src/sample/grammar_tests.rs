//! Forms on the demo's vocabulary: which texts they let through, and what a model that picks at random makes of them.

use super::*;
use crate::format::gguf;
use crate::format::input::NamedBytes;
use crate::sample::Rng;
use std::path::Path;

fn tokenizer() -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tinymoe-demo.gguf");
    let bytes = std::fs::read(&path).unwrap();
    let header = gguf::parse(&NamedBytes { path: &path, bytes: &bytes }).unwrap();
    Arc::new(Tokenizer::from_gguf_meta(&header.meta).unwrap())
}

fn grammars() -> &'static Grammars {
    static SHARED: OnceLock<Grammars> = OnceLock::new();
    SHARED.get_or_init(|| Grammars::new(tokenizer()))
}

/// Whether the form takes `text` whole and may end there.
fn takes(form: &Form, text: &str) -> bool {
    let g = grammars();
    let mut c = g.compile(form, "grammar").unwrap();
    for id in g.tokenizer.encode(text, false, false).unwrap() {
        let mut logits = vec![0.0; g.tokenizer.vocab_size()];
        c.mask(&mut logits).unwrap();
        if logits[id as usize] != 0.0 {
            return false;
        }
        if c.accept(id).unwrap() {
            // Nothing may follow, and this was the last token or the text is too long.
            let whole = g.tokenizer.encode(text, false, false).unwrap();
            return whole.last() == Some(&id);
        }
    }
    let mut logits = vec![0.0; g.tokenizer.vocab_size()];
    c.mask(&mut logits).is_ok() && g.tokenizer.end_ids().iter().any(|&e| logits[e as usize] == 0.0)
}

/// A text of the form by a model that finds all tokens equally likely; empty if it does not end within `most` tokens.
fn random_text(form: &Form, seed: u64, most: usize) -> String {
    let g = grammars();
    let mut c = g.compile(form, "grammar").unwrap();
    let (mut rng, mut ids) = (Rng::new(seed), Vec::new());
    while ids.len() < most {
        let mut logits = vec![0.0; g.tokenizer.vocab_size()];
        c.mask(&mut logits).unwrap();
        let may: Vec<TokenId> = (0..logits.len() as TokenId).filter(|&i| logits[i as usize] == 0.0).collect();
        let id = may[(rng.unit() * may.len() as f64) as usize % may.len()];
        if g.tokenizer.is_end(id) {
            return g.tokenizer.decode(&ids, true);
        }
        ids.push(id);
        if c.accept(id).unwrap() {
            return g.tokenizer.decode(&ids, true);
        }
    }
    String::new()
}

#[test]
fn json_schemas_hold() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["n", "tags", "x"], "properties": {
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "x": {"type": "number"}
    }});
    let form = Form::JsonSchema(schema);
    assert!(takes(&form, r#"{"n": 3, "tags": ["a", "b"], "x": 1.5}"#));
    assert!(takes(&form, r#"{"n":3,"tags":[],"x":1}"#));
    assert!(!takes(&form, r#"{"n": "3", "tags": [], "x": 1}"#));
    assert!(!takes(&form, r#"{"n": 3}"#));
    assert!(takes(&Form::JsonObject, r#"{"anything": [1, {"b": null}]}"#));
    assert!(!takes(&Form::JsonObject, "[1]"));
    for seed in 0..40 {
        let text = random_text(&form, seed, 600);
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}: {text:?}"));
        assert!(value["n"].is_number() && value["x"].is_number(), "{text}");
        assert!(value["tags"].as_array().unwrap().len() <= 3, "{text}");
        let longest = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap();
        assert!(longest <= DIGITS_MAX + 8, "{text}: a number that ran on");
    }
}

#[test]
fn lark_and_gbnf_hold_the_same_texts() {
    let lark = Form::Lark("start: /(yes|no)/ (\", \" /[a-z]+/)*".into());
    let gbnf = Form::Gbnf(
        "# a comment\nroot ::= answer (\", \" word)*\nanswer ::= \"yes\" |\n  \"no\"\nword ::= [a-z]+".into(),
    );
    for form in [lark, gbnf] {
        for (text, is) in
            [("yes", true), ("no, maybe, so", true), ("maybe", false), ("yes,", false), ("yes, A", false)]
        {
            assert_eq!(takes(&form, text), is, "{form:?} {text:?}");
        }
    }
}

#[test]
fn gbnf_is_translated_with_its_meaning() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("root ::= [a-z]* \"ab\"", &["ab", "abab", "zab"], &["a", "aba"]),
        ("root ::= (\"a\" | \"b\"){2,3} \"\\x41\\n\"", &["abA\n", "abaA\n"], &["aA\n", "ababA\n"]),
        (
            "root ::= list\nlist ::= \"[\" ws (item (\",\" ws item)*)? \"]\"\nitem ::= list | [0-9]+ ws\nws ::= [ ]*",
            &["[]", "[ 1, 2]", "[[1], [], 23]"],
            &["[", "[1,]", "]"],
        ),
        ("root ::= [^a-c\"\\-] .", &["d\n", "xx"], &["ax", "-x", "\"x"]),
        ("root ::= \"x\" root-2?\nroot-2 ::= \"y\" root", &["x", "xyx"], &["xy", "y"]),
    ];
    for (text, yes, no) in cases {
        let form = Form::Gbnf(text.to_string());
        yes.iter().for_each(|t| assert!(takes(&form, t), "{text:?} takes {t:?}"));
        no.iter().for_each(|t| assert!(!takes(&form, t), "{text:?} refuses {t:?}"));
    }
}

#[test]
fn bad_grammars_are_refused_by_name() {
    let say = |form: Form| grammars().compile(&form, "grammar").unwrap_err().to_string();
    assert!(say(Form::Gbnf("a ::= \"x\"".into())).contains("a rule named root"));
    assert!(say(Form::Gbnf("root ::= x\n".into())).contains("x, which no rule defines"));
    assert!(say(Form::Gbnf("root ::= \"x\"\nroot2 ::= [".into())).contains("grammar line 2"));
    assert!(say(Form::Gbnf(format!("root ::= {}", "(".repeat(5000)))).contains("nested"));
    for bounds in ["{20000", "{3,2", "{", "{x"] {
        let said = say(Form::Gbnf(format!("root ::= \"a\"{bounds}}}")));
        assert!(said.contains(&format!("up to 10000, found {bounds}")), "{said}");
    }
    assert!(say(Form::Lark(format!("start: {}", "(\n".repeat(5000)))).contains("nested"));
    assert!(say(Form::Lark("start: nothing".into())).starts_with("request: grammar"));
    assert!(say(Form::JsonSchema(json!(3))).contains("a JSON schema"));
    assert!(say(Form::JsonSchema(json!({"type": "no such"}))).starts_with("request: grammar"));
    assert!(say(Form::Lark("x".repeat(GRAMMAR_BYTES_MAX + 1))).contains("at most"));
}

#[test]
fn a_rule_that_only_refers_to_itself_is_refused_in_words() {
    let mut c = grammars().compile(&Form::Gbnf("root ::= root \"a\"".into()), "grammar").unwrap();
    let said = c.mask(&mut vec![0.0; tokenizer().vocab_size()]).unwrap_err().to_string();
    assert!(said.contains("one that no text satisfies"), "{said}");
}
