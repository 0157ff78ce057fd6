//! Answers held to a form: JSON, a JSON schema, a grammar in Lark's or llama.cpp's notation.
//!
//! llguidance computes which tokens may come next; here its vocabulary is built from ours ([`Grammars`], once a model), and
//! a compiled grammar becomes a [`Constraint`] of the sampler. What a client sends is compiled within fixed bounds of work,
//! size and depth.

use super::Constraint;
use super::grammar_gbnf::{nesting, to_lark};
use crate::limits::{GRAMMAR_BYTES_MAX, GRAMMAR_DEPTH_MAX};
use crate::text::{TokenKind, Tokenizer};
use crate::units::{Error, Result, TokenId};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// A form to hold an answer to.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// Any JSON object.
    JsonObject,
    /// JSON that validates against this schema.
    JsonSchema(Value),
    /// Lark's notation, in llguidance's dialect.
    Lark(String),
    /// The same around JSON schemas, whose numbers are kept readable: calls of tools.
    JsonInLark(String),
    /// llama.cpp's GBNF.
    Gbnf(String),
}

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// Made at first use: most programs that load a model never ask for a form.
    factory: OnceLock<std::result::Result<ParserFactory, String>>,
    /// How many digits a token's text begins with.
    digits: OnceLock<Arc<[u8]>>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

/// A token longer than this is left out of the trie, whose nodes count their depth in 10 bits.
const TOKEN_BYTES_MAX: usize = 512;
/// Nodes that the trie can count.
const TRIE_BYTES_MAX: usize = 3 << 20;
/// Digits in a row after which a JSON number has to go on in another way. A double has 17; JSON itself sets no bound, and a
/// small model that has begun to count may never stop.
const DIGITS_MAX: usize = 17;
/// The same for an exponent: with three digits it may be more than a double can hold, and readers refuse that.
const EXPONENT_DIGITS_MAX: usize = 2;
/// Stack of a compilation: room for the deepest grammar that [`GRAMMAR_DEPTH_MAX`] lets through.
const COMPILE_STACK_BYTES: usize = 64 << 20;

impl Grammars {
    /// For a model's tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Grammars {
        Grammars { tokenizer, factory: OnceLock::new(), digits: OnceLock::new() }
    }

    /// Compiles a form. `field` names it in errors: "response_format", "grammar".
    pub fn compile(&self, form: &Form, field: &str) -> Result<Box<dyn Constraint>> {
        let refuse =
            |found: &dyn std::fmt::Display| Error::bad("request", field, "a grammar that can be used", found);
        let is_json = matches!(form, Form::JsonObject | Form::JsonSchema(_) | Form::JsonInLark(_));
        let grammar = grammar(form, field)?;
        let factory = match self.factory.get_or_init(|| factory(&self.tokenizer)) {
            Ok(factory) => factory,
            Err(e) => return Err(refuse(e)),
        };
        // Its parser recurses over the grammar; a thread of its own has the stack for that.
        let compile = || Matcher::new(factory.create_parser(grammar));
        let matcher = std::thread::scope(|scope| {
            let thread =
                std::thread::Builder::new().name("tegu-grammar".into()).stack_size(COMPILE_STACK_BYTES);
            let running = thread
                .spawn_scoped(scope, compile)
                .map_err(|e| Error::io("grammar", "start a thread for the compilation", e))?;
            running.join().map_err(|_| refuse(&"one that its compiler cannot take"))
        })?;
        if let Some(e) = matcher.get_error() {
            return Err(refuse(&e));
        }
        let digits = is_json.then(|| Digits {
            begins: self.digit_tokens(),
            run: 0,
            most: DIGITS_MAX,
            in_string: false,
        });
        Ok(Box::new(Grammar { matcher, tokenizer: self.tokenizer.clone(), digits }))
    }

    fn digit_tokens(&self) -> Arc<[u8]> {
        let begins = |id| {
            let digits = self.tokenizer.token_bytes(id).iter().take_while(|b| b.is_ascii_digit()).count();
            digits.min(usize::from(u8::MAX)) as u8
        };
        let table = || (0..self.tokenizer.vocab_size() as TokenId).map(begins).collect();
        self.digits.get_or_init(table).clone()
    }
}

/// llguidance's form of a form, within bounds.
fn grammar(form: &Form, field: &str) -> Result<TopLevelGrammar> {
    let bounded = |text: &str| {
        if text.len() > GRAMMAR_BYTES_MAX {
            let want = format!("at most {GRAMMAR_BYTES_MAX} bytes");
            return Err(Error::bad("request", field, want, text.len()));
        }
        let depth = nesting(text);
        if depth > GRAMMAR_DEPTH_MAX {
            let want = format!("brackets nested at most {GRAMMAR_DEPTH_MAX} deep");
            return Err(Error::bad("request", field, want, depth));
        }
        Ok(())
    };
    let with = |json_schema: Option<Value>, lark_grammar: Option<String>| TopLevelGrammar {
        grammars: vec![GrammarWithLexer { name: None, json_schema, lark_grammar }],
        max_tokens: None,
    };
    Ok(match form {
        Form::JsonObject => with(Some(tight(json!({ "type": "object" }))), None),
        Form::JsonSchema(schema) => {
            if !(schema.is_object() || schema.is_boolean()) {
                return Err(Error::bad("request", field, "a JSON schema: an object", schema));
            }
            bounded(&schema.to_string())?;
            let schema = if schema.is_object() { schema.clone() } else { json!({ "allOf": [schema] }) };
            with(Some(tight(schema)), None)
        }
        Form::Lark(text) | Form::JsonInLark(text) => {
            bounded(text)?;
            with(None, Some(text.clone()))
        }
        Form::Gbnf(text) => {
            bounded(text)?;
            with(None, Some(to_lark(text).map_err(|e| e.of(field))?))
        }
    })
}

/// JSON with at most one space after each separator and no other white space: the longest instance of a schema is then a
/// known number of bytes, and an answer cannot run out of tokens on blank lines.
pub fn tight(mut schema: Value) -> Value {
    if let Some(object) = schema.as_object_mut() {
        let options =
            json!({ "whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?" });
        object.insert("x-guidance".into(), options);
    }
    schema
}

fn factory(tokenizer: &Tokenizer) -> std::result::Result<ParserFactory, String> {
    let ids = 0..tokenizer.vocab_size() as TokenId;
    // Control tokens get a first byte that no text has, so that only their own names reach them.
    let word = |id: TokenId| {
        let bytes = tokenizer.token_bytes(id);
        match tokenizer.token_kind(id) {
            _ if bytes.is_empty() || bytes.len() > TOKEN_BYTES_MAX => Vec::new(),
            TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
            _ => bytes.to_vec(),
        }
    };
    let words: Vec<Vec<u8>> = ids.map(word).collect();
    if words.is_empty() || words.iter().map(Vec::len).sum::<usize>() > TRIE_BYTES_MAX {
        return Err(format!("a vocabulary of {} tokens, too large for grammars", words.len()));
    }
    let ends = tokenizer.end_ids();
    let Some(&end) = ends.first() else {
        return Err("a model without an end token".into());
    };
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words).with_eos_tokens(ends);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
    factory.quiet();
    // Its errors may carry the whole grammar; a client gets a line.
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// The state of one answer.
struct Grammar {
    matcher: Matcher,
    tokenizer: Arc<Tokenizer>,
    digits: Option<Digits>,
}

/// Counts the digits of a JSON number.
struct Digits {
    begins: Arc<[u8]>,
    run: usize,
    /// Digits that this part of a number may have.
    most: usize,
    in_string: bool,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

fn failed(e: impl std::fmt::Display) -> Error {
    let said = e.to_string();
    // The library's word for a state that no token leads on from: a rule that only refers to itself.
    let found = if said.contains("NoExtensionBias") { "one that no text satisfies".into() } else { said };
    Error::bad("request", "grammar", "one that can be followed", found)
}

impl Constraint for Grammar {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(failed)?;
        let mut any = false;
        let is_digit = |id: usize| self.digits.as_ref().is_some_and(|d| d.too_many(id));
        // Another way on than too many digits, where there is one.
        let other = allowed.iter().any(|id| (id as usize) < logits.len() && !is_digit(id as usize));
        for (id, l) in logits.iter_mut().enumerate() {
            let may = id < allowed.len() && allowed.is_allowed(id as TokenId) && !(other && is_digit(id));
            any |= may;
            if !may {
                *l = f32::NEG_INFINITY;
            }
        }
        if any { Ok(()) } else { Err(failed("a place where no token fits")) }
    }

    fn accept(&mut self, token: TokenId) -> Result<bool> {
        self.matcher.consume_token(token).map_err(failed)?;
        if let Some(d) = &mut self.digits {
            d.read(self.tokenizer.token_bytes(token));
        }
        Ok(self.matcher.is_stopped())
    }
}

impl Digits {
    fn too_many(&self, id: usize) -> bool {
        let begins = self.begins.get(id).map_or(0, |&n| usize::from(n));
        begins > 0 && !self.in_string && self.run + begins > self.most
    }

    fn read(&mut self, bytes: &[u8]) {
        let mut escaped = false;
        for &b in bytes {
            match b {
                _ if escaped => escaped = false,
                b'\\' if self.in_string => escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ => {}
            }
            let counts = b.is_ascii_digit() && !self.in_string;
            self.run = if counts { self.run + 1 } else { 0 };
            match b {
                b'e' | b'E' => self.most = EXPONENT_DIGITS_MAX,
                b'0'..=b'9' | b'+' | b'-' => {}
                _ => self.most = DIGITS_MAX,
            }
        }
        // An escape may be cut by the token's border: a quote after it is then taken for the string's end, and at worst
        // digits inside a string are counted, where other letters always fit.
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;
