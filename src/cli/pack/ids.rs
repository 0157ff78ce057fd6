//! Texts through both tokenizers: the one that tokenizer.json describes and the one that the packed file will. Rules that
//! are near another's, merges that depend on their order, added tokens that strip: whatever GGUF cannot say shows as other
//! ids, and other ids are another model.

use std::path::Path;

use super::hparams::Meta;
use crate::format::gguf;
use crate::observe;
use crate::text::{TokenKind, Tokenizer};
use crate::units::{Error, Result};

/// What real text has and rules for cutting differ in: cases, contractions, digits, scripts, marks that combine, spaces of
/// all kinds, punctuation, code, symbols outside the basic plane.
const TEXTS: [&str; 16] = [
    "Hello world, it's 12345 o'clock.",
    "  two  spaces\n\n new line\ttab",
    "don't DON'T we'LL they'Re 3.14159 1000000",
    "Ünïcode ﬁne é e\u{301} Straße İstanbul ǅ",
    "日本語の文章、中文句子。한국어 문장",
    "مرحبا بالعالم हिन्दी ภาษาไทย",
    "👩\u{200d}👩\u{200d}👧 🚀 😀!!",
    "foo_bar(baz) != {qux: [1,2]}; // code\r\n\treturn x->y;",
    "a\u{a0}b\u{200b}c\u{3000}d",
    "HelloWorld camelCase XMLHttp ABCdef",
    "#include <stdio.h>\n\n\n\n    int main() {}",
    "½ ² 10% $5.00 €7 ½cup",
    "ends with space ",
    "x",
    "   ",
    "\n",
];

/// Compares what `folder`'s tokenizer gives with what the one in `meta` will give.
pub fn check(folder: &Path, meta: &Meta) -> Result<()> {
    let file = folder.join("tokenizer.json");
    let mut entries = gguf::Meta::new(&file);
    for (key, value) in meta {
        assert!(entries.insert(key.clone(), value.clone()), "{key} is written twice");
    }
    let (want, got) = (Tokenizer::from_hf_dir(folder)?, Tokenizer::from_gguf_meta(&entries)?);
    let same = |text: &str, special: bool| {
        let (a, b) = (want.encode(text, special, false)?, got.encode(text, special, false)?);
        if a == b {
            return Ok(());
        }
        let field = format!("ids of {text:?}");
        let expected = format!("{a:?}, which a rule that GGUF cannot name must give");
        Err(Error::bad(&file, field, expected, format!("{b:?}")))
    };
    TEXTS.iter().try_for_each(|text| same(text, false))?;
    // An added token between words, at a start and beside itself. (GGUF's unknown token is never made from its own text.)
    let added = |t: &Tokenizer, id| matches!(t.token_kind(id), TokenKind::Control | TokenKind::UserDefined);
    for id in (0..want.vocab_size() as u32).filter(|&id| added(&want, id) && added(&got, id)) {
        let token = String::from_utf8_lossy(want.token_bytes(id)).into_owned();
        same(&format!("{token}a {token} b{token}{token}"), true)?;
    }
    around(&file, &want, &got)
}

/// What begins and ends a text is the caller's choice, so a difference is said and no reason to stop.
fn around(file: &Path, want: &Tokenizer, got: &Tokenizer) -> Result<()> {
    let (a, b) = (want.encode("x", false, true)?, got.encode("x", false, true)?);
    if a != b {
        observe::note(format_args!("{}: \"x\" is {a:?} there and {b:?} in the packed file", file.display()));
    }
    let lost: Vec<_> = want.end_ids().iter().filter(|id| !got.is_end(**id)).collect();
    if !lost.is_empty() {
        observe::note(format_args!(
            "{}: {lost:?} end an answer there and not in the packed file",
            file.display()
        ));
    }
    Ok(())
}
