//! Each format whole and cut at every character, and what is no call.

use super::*;

/// The text and calls of an answer, however it is cut in two, and a character at a time.
fn read(format: ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
    let run = |pieces: &[&str]| {
        let (mut parser, mut out) = (ToolParser::new(format), ToolOutput::default());
        pieces.iter().for_each(|p| parser.push(p, &mut out));
        parser.finish(&mut out);
        out
    };
    let whole = run(&[text]);
    for i in (0..=text.len()).filter(|&i| text.is_char_boundary(i)) {
        assert_eq!(run(&[&text[..i], &text[i..]]), whole, "cut at {i}: {text:?}");
    }
    let letters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(run(&letters.iter().map(String::as_str).collect::<Vec<_>>()), whole, "letters: {text:?}");
    (whole.text, whole.calls.into_iter().map(|c| (c.name, c.arguments)).collect())
}

fn calls(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect()
}

#[test]
fn hermes() {
    let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let f1 = ("f", "{\"x\":1}");
    assert_eq!(read(ToolFormat::Hermes, one), ("".into(), calls(&[f1])));
    assert_eq!(read(ToolFormat::Hermes, &format!("{one}\n{one}")), ("".into(), calls(&[f1, f1])));
    let with_text = format!("I look it up.\n{one}\n");
    assert_eq!(read(ToolFormat::Hermes, &with_text), ("I look it up.".into(), calls(&[f1])));
    let unclosed = "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}";
    assert_eq!(read(ToolFormat::Hermes, unclosed), ("".into(), calls(&[f1])));
    for none in [
        "<tool_call>\nnot JSON</tool_call> so",
        "a < b <tool",
        "<tool_call>{\"name\": 3}</tool_call>",
        "x \n y",
    ] {
        assert_eq!(read(ToolFormat::Hermes, none), (none.into(), vec![]));
    }
}

#[test]
fn deepseek() {
    let v3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Rome\"}\n```\
              <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\
              <｜tool▁calls▁end｜>";
    let expected = calls(&[("get_weather", "{\"city\":\"Rome\"}"), ("now", "{}")]);
    assert_eq!(read(ToolFormat::DeepSeek, v3), ("".into(), expected));
    let v31 = "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    assert_eq!(read(ToolFormat::DeepSeekPlain, v31), ("Let me see.".into(), calls(&[("f", "{\"a\":[1]}")])));
    let cut = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": ";
    assert_eq!(read(ToolFormat::DeepSeek, cut), (cut.into(), vec![]));
}

#[test]
fn llama3() {
    let one = "{\"name\": \"f\", \"parameters\": {\"x\": \"y\"}}";
    let f = ("f", "{\"x\":\"y\"}");
    assert_eq!(read(ToolFormat::Llama3, one), ("".into(), calls(&[f])));
    assert_eq!(read(ToolFormat::Llama3, &format!("<|python_tag|>{one}; {one}")), ("".into(), calls(&[f, f])));
    let element = "<function=f>{\"x\": \"y\"}</function>";
    assert_eq!(read(ToolFormat::Llama3, element), ("".into(), calls(&[f])));
    for none in ["{\"answer\": 3}", "Hello {", "{\"name\": \"f\"", "<fun"] {
        assert_eq!(read(ToolFormat::Llama3, none), (none.into(), vec![]));
    }
}

#[test]
fn the_template_names_the_format() {
    let of = ToolFormat::of_template;
    assert_eq!(of("…<tool_call>…"), Some(ToolFormat::Hermes));
    assert_eq!(of("<｜tool▁call▁begin｜> '```json'"), Some(ToolFormat::DeepSeek));
    assert_eq!(of("<｜tool▁call▁begin｜>"), Some(ToolFormat::DeepSeekPlain));
    assert_eq!(of("<|start_header_id|> \"parameters\""), Some(ToolFormat::Llama3));
    assert_eq!(of("<|im_start|>"), None);
}
