//! Pre-tokenizers by the name that GGUF files give them (`tokenizer.ggml.pre`).
//!
//! A byte-level vocabulary is only half a tokenizer: merges never cross the pieces that text is first cut into, and
//! GGUF names the cutting rules instead of carrying them. Each row below is what the models' published `tokenizer.json`
//! says (fields `pre_tokenizer` and `model.ignore_merges`); which name means which rules, and the rules where no
//! `tokenizer.json` is public, are llama.cpp's (`src/llama-vocab.cpp`). Rules are applied in order, each to the
//! pieces that the one before left; both what a rule matches and what lies between stay pieces.

use crate::units::{Error, Result};
use std::path::Path;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

/// GPT-2's rule: contractions, words, numbers and punctuation with the space before them, runs of white space.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Llama 3's: contractions in any case, numbers by three, punctuation with the newlines after it.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Qwen 2's: as Llama 3's, but each digit alone.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Qwen 3.5's: combining marks stay with their letters.
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Mistral's Tekken: a word may start anew at a capital.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// GPT-4o's: as Tekken's, with contractions at the end of a word and numbers by three.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// DeepSeek V3's last rule; numbers and CJK are cut out before it.
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Chinese ideographs, Japanese kana.
const CJK_KANA: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// Ideographs, everything from Samaritan to kana, hangul: DeepSeek LLM's and Coder's idea of CJK.
const CJK_WIDE: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// DeepSeek LLM's words: letters that have case, as an old Unicode table lists them, so newer `\p{Lu}` would differ.
const DEEPSEEK_WORD: &str = concat!(
    r"\s?[",
    r"\x{41}-\x{5A}\x{61}-\x{7A}\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}",
    r"\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}",
    r"\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}",
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}",
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}",
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}",
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}",
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}",
    r"\x{1E900}-\x{1E943}",
    r"]+"
);
/// DeepSeek LLM's punctuation: ASCII from `!` to `/` and from `:` to `~`, full-width forms, quotes, 。.
const DEEPSEEK_PUNCT: &str =
    concat!(r"\s?[!-/:-~", r"\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+");

/// How a family of models cuts text before merging.
#[derive(Debug)]
pub struct PreTok {
    /// The names in `tokenizer.ggml.pre`; the first is the family's own.
    pub names: &'static [&'static str],
    /// The rules, applied in order.
    rules: &'static [&'static str],
    /// Whether a piece that is a token is taken whole, whatever the merges say.
    pub ignore_merges: bool,
    /// Whether BOS is added where the file does not say.
    pub add_bos: bool,
}

const fn row(names: &'static [&'static str], rules: &'static [&'static str]) -> PreTok {
    PreTok { names, rules, ignore_merges: false, add_bos: false }
}

/// Every known pre-tokenizer.
pub static PRETOKS: &[PreTok] = &[
    // What llama.cpp does for a file that names none: older conversions.
    row(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
    PreTok {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        rules: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    row(&["dbrx", "smaug-bpe"], &[LLAMA3]),
    row(&["chatglm-bpe"], &[LLAMA3]),
    PreTok { names: &["glm4", "glm5"], rules: &[LLAMA3], ignore_merges: true, add_bos: false },
    row(&["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"], &[QWEN2]),
    row(&["qwen35"], &[QWEN35]),
    row(&["deepseek-llm"], &[r"[\r\n]", DEEPSEEK_WORD, DEEPSEEK_PUNCT, r"\s+$", CJK_WIDE, r"\p{N}+"]),
    row(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_WIDE, r"\p{N}"]),
    row(&["deepseek-v3", "hunyuan-dense", "joyai-llm"], &[r"\p{N}{1,3}", CJK_KANA, DEEPSEEK_V3]),
    row(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "exaone4",
            "gigachat",
            "mellum",
            "granite-docling",
        ],
        &[GPT2],
    ),
    row(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    row(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    PreTok { names: &["tekken"], rules: &[TEKKEN], ignore_merges: true, add_bos: true },
    row(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT4O]),
];

impl PreTok {
    /// The row that `name` means; an unknown name is an error, since a wrong guess gives wrong ids and no sign of it.
    pub fn find(file: &Path, name: &str) -> Result<&'static Self> {
        PRETOKS.iter().find(|p| p.names.contains(&name)).ok_or_else(|| {
            let known: Vec<&str> = PRETOKS.iter().map(|p| p.names[0]).collect();
            Error::bad(
                file,
                "tokenizer.ggml.pre",
                format!("a known pre-tokenizer ({})", known.join(", ")),
                name,
            )
        })
    }

    /// The rules as one pre-tokenizer that ends in GPT-2's byte alphabet.
    pub(super) fn build(&self) -> PreTokenizerWrapper {
        let mut steps: Vec<PreTokenizerWrapper> = self
            .rules
            .iter()
            .map(|rule| {
                Split::new(SplitPattern::Regex((*rule).to_owned()), SplitDelimiterBehavior::Isolated, false)
                    .unwrap_or_else(|e| panic!("{}: {rule}: {e}", self.names[0]))
                    .into()
            })
            .collect();
        steps.push(ByteLevel::new(false, false, false).into());
        Sequence::new(steps).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::pieces::byte_to_char;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    /// The pieces that `name` cuts `text` into, spelled as text again.
    fn pieces(name: &str, text: &str) -> Vec<String> {
        let pre = PreTok::find(Path::new("t"), name).unwrap().build();
        let mut s = PreTokenizedString::from(text);
        pre.pre_tokenize(&mut s).unwrap();
        let alphabet = byte_to_char();
        s.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .iter()
            .map(|(piece, _, _)| {
                let bytes =
                    piece.chars().map(|c| alphabet.iter().position(|a| *a == c).unwrap() as u8).collect();
                String::from_utf8(bytes).unwrap()
            })
            .collect()
    }

    #[test]
    fn every_row_builds_and_loses_nothing() {
        let text = "Hello, y'all! It'S 12345 ñandú\u{301} 我想在apple工作1314151天～\r\n\n\t  x = {a:[1,2]};\n   ½ 🚀😶‍🌫️ ſ ";
        for row in PRETOKS {
            assert_eq!(pieces(row.names[0], text).concat(), text, "{}", row.names[0]);
        }
        let mut names: Vec<_> = PRETOKS.iter().flat_map(|p| p.names).collect();
        let n = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), n, "a name in two rows");
    }

    #[test]
    fn tricky_strings() {
        // (name, text, pieces parted by `¦`)
        let table = [
            ("llama-bpe", "12345 a", "123¦45¦ a"),
            ("llama-bpe", "I'LL don't 'Re", "I¦'LL¦ don¦'t¦ '¦Re"),
            ("llama-bpe", "a  b\n\n  c", "a¦ ¦ b¦\n\n¦ ¦ c"),
            ("llama-bpe", "x=[1,\n", "x¦=[¦1¦,\n"),
            ("llama-bpe", "工作abc，好", "工作abc¦，好"),
            ("llama-bpe", "\t\tif", "\t¦\tif"),
            ("qwen2", "12345 a", "1¦2¦3¦4¦5¦ a"),
            ("qwen2", "I'LL", "I¦'LL"),
            ("qwen2", "...\r\n\r\nA", "...\r\n\r\n¦A"),
            ("qwen2", "क\u{93F}", "क¦\u{93F}"),
            ("qwen35", "क\u{93F}", "क\u{93F}"),
            ("gpt-2", "12345 a", "12345¦ a"),
            ("gpt-2", "I'LL don't", "I¦'¦LL¦ don¦'t"),
            ("gpt-2", "a  b\n\n  c", "a¦ ¦ b¦\n\n ¦ c"),
            ("gpt-2", " 🚀!x", " 🚀!¦x"),
            ("smollm", "a 123", "a¦ ¦1¦2¦3"),
            ("smollm", "v1.5\n", "v¦1¦.¦5¦\n"),
            ("deepseek-llm", "ab 12\nc。好 ", "ab¦ ¦12¦\n¦c¦。¦好¦ "),
            ("deepseek-llm", "x = y;  ", "x¦ =¦ y¦;¦  "),
            ("deepseek-coder", "f(12) + 好", "f¦(¦1¦2¦)¦ +¦ ¦好"),
            ("deepseek-v3", "12345天_x 好", "123¦45¦天¦_x¦ ¦好"),
            ("deepseek-v3", "'tis #tag a.b", "'tis¦ #¦tag¦ a¦.b"),
            ("deepseek-v3", "e\u{301}a かな漢字!", "e\u{301}a¦ ¦かな漢字¦!"),
            ("glm4", "1234 It'S", "123¦4¦ It¦'S"),
            ("tekken", "HelloWorld 12", "Hello¦World¦ ¦1¦2"),
            ("tekken", "a/b//\n", "a¦/b¦//\n"),
            ("gpt-4o", "HelloWorld's 1234", "Hello¦World's¦ ¦123¦4"),
            ("default", "a+b 12345", "a¦+¦b¦ ¦123¦45"),
            ("falcon", "a, 12345", "a¦,¦ ¦123¦45"),
        ];
        for (name, text, want) in table {
            assert_eq!(pieces(name, text).join("¦"), want, "{name}: {text:?}");
        }
    }

    #[test]
    fn an_unknown_name_is_named() {
        let e = PreTok::find(Path::new("m.gguf"), "gpt-17").unwrap_err().to_string();
        assert!(
            e.starts_with("m.gguf: tokenizer.ggml.pre: expected a known") && e.ends_with("found gpt-17"),
            "{e}"
        );
    }
}
