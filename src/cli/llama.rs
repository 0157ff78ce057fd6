//! llama.cpp's spellings, so that its command lines can be tried here. Clap has no single-dash words, so those become
//! their long forms before parsing; the long forms are aliases of ours or accepted and ignored (see `args`).

use std::ffi::OsString;

use crate::units::{Error, Result};

/// Single-dash words and what they stand for.
const WORDS: &[(&str, &str)] = &[
    ("-ngl", "--n-gpu-layers"),
    ("-tb", "--threads-batch"),
    ("-ub", "--ubatch-size"),
    ("-fa", "--flash-attn"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-sys", "--system"),
    ("-cnv", "--conversation"),
    ("-no-cnv", "--raw"),
    ("-st", "--single-turn"),
    ("-sp", "--special"),
    ("-pg", "--pg"),
    ("-help", "--help"),
    ("-version", "--version"),
];

/// Words of llama.cpp for what there is not here, with what to do instead. Read as a cluster of single letters they would mean
/// something else: `-hf MODEL` help, `-mg 1` a model of the name `g`.
const REFUSED: &[(&[&str], &str)] = &[
    (
        &["-hf", "-hfr", "-hff", "-hfd", "-hfrd", "-hfv", "-hfrv", "-hffv", "-hft", "-mu", "-dr"],
        "a file or folder with -m: nothing is downloaded",
    ),
    (&["-md", "-ngld", "-devd", "-cd", "-td", "-tbd"], "no draft model"),
    (
        &["-sm", "-mg", "-ts", "-dev", "-ot", "-cmoe", "-ncmoe"],
        "--backend and --expert-budget, which place a model",
    ),
    (&["-np", "-ns"], "serve.sequences in the settings, for a daemon"),
    (&["-mm", "-mmu"], "text only"),
    (&["-nkvo", "-nr", "-dio", "-cb", "-nocb", "-kvu"], "nothing: there is no such choice here"),
];

/// The arguments with each known word replaced, up to `--`. `-ngl=99` works like `-ngl 99`.
///
/// # Errors
/// For a word of [`REFUSED`], and for letters behind `-h`, which the parser would answer with help as if all were well.
pub fn rewrite(args: impl Iterator<Item = OsString>) -> Result<Vec<OsString>> {
    let mut literal = false;
    let replace = |arg: OsString| {
        literal |= arg == "--";
        let Some(text) = arg.to_str().filter(|_| !literal) else { return Ok(arg) };
        let (head, tail) = text.split_once('=').map_or((text, None), |(h, t)| (h, Some(t)));
        if let Some((_, instead)) = REFUSED.iter().find(|(words, _)| words.contains(&head)) {
            return Err(Error::bad("command line", head, instead, "llama.cpp's flag"));
        }
        let long = WORDS.iter().find(|(w, _)| *w == head).map(|(_, long)| *long);
        match (long, tail) {
            (Some(long), Some(tail)) => Ok(format!("{long}={tail}").into()),
            (Some(long), None) => Ok(long.into()),
            (None, _) if head.starts_with("-h") && head != "-h" => {
                Err(Error::bad("command line", head, "-h or --help", "an unknown flag"))
            }
            (None, _) => Ok(arg),
        }
    };
    args.map(replace).collect()
}

#[test]
fn words_become_long_flags() {
    let args = ["tegu", "run", "-ngl", "99", "-fa=on", "-m", "x", "--", "-ngl"].map(OsString::from);
    let want = ["tegu", "run", "--n-gpu-layers", "99", "--flash-attn=on", "-m", "x", "--", "-ngl"];
    assert_eq!(rewrite(args.into_iter()).unwrap(), want.map(OsString::from));
}

#[test]
fn words_without_a_counterpart_are_refused() {
    let say = |args: &[&str]| rewrite(args.iter().map(OsString::from)).map_err(|e| e.to_string());
    for word in REFUSED.iter().flat_map(|(words, _)| *words) {
        let said = say(&["tegu", "run", word, "x"]).expect_err(word);
        assert!(said.contains(&format!("{word}: expected ")), "{said}");
        assert!(!WORDS.iter().any(|(known, _)| known == word), "{word} is both");
    }
    assert!(say(&["tegu", "run", "-hf=x"]).unwrap_err().contains("with -m: nothing is downloaded"));
    assert!(say(&["tegu", "run", "-hx"]).unwrap_err().contains("-h or --help"));
    for fine in [&["tegu", "-h"][..], &["tegu", "-help"], &["tegu", "run", "--", "-hf"]] {
        assert!(say(fine).is_ok(), "{fine:?}");
    }
}
