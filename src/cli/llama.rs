//! llama.cpp's spellings, so that its command lines can be tried here. Clap has no single-dash words, so those become
//! their long forms before parsing; the long forms are aliases of ours or accepted and ignored (see `args`).

use std::ffi::OsString;

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
];

/// The arguments with each known word replaced, up to `--`. `-ngl=99` works like `-ngl 99`.
pub fn rewrite(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut literal = false;
    let replace = |arg: OsString| {
        literal |= arg == "--";
        let Some(text) = arg.to_str().filter(|_| !literal) else { return arg };
        let (head, tail) = text.split_once('=').map_or((text, None), |(h, t)| (h, Some(t)));
        match (WORDS.iter().find(|(w, _)| *w == head), tail) {
            (Some((_, long)), Some(tail)) => format!("{long}={tail}").into(),
            (Some((_, long)), None) => (*long).into(),
            (None, _) => arg,
        }
    };
    args.map(replace).collect()
}

#[test]
fn words_become_long_flags() {
    let args = ["tegu", "run", "-ngl", "99", "-fa=on", "-m", "x", "--", "-ngl"].map(OsString::from);
    let want = ["tegu", "run", "--n-gpu-layers", "99", "--flash-attn=on", "-m", "x", "--", "-ngl"];
    assert_eq!(rewrite(args.into_iter()), want.map(OsString::from));
}
