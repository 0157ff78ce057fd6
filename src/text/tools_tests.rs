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
    let calls: Vec<_> = ToolPiece::gather(&whole.calls).into_iter().map(|c| (c.name, c.arguments)).collect();
    // In pieces a call is the same call, unless it breaks off.
    for pieces in [letters.clone(), vec![text.to_owned()]] {
        let (mut parser, mut text, mut found) = (ToolParser::pieces(format), String::new(), vec![]);
        for p in &pieces {
            let mut out = ToolOutput::default();
            parser.push(p, &mut out);
            text += &out.text;
            found.extend(out.calls);
        }
        let mut out = ToolOutput::default();
        parser.finish(&mut out);
        found.extend(out.calls);
        if !whole.calls.is_empty() {
            let gathered = ToolPiece::gather(&found).into_iter().map(|c| (c.name, c.arguments));
            assert_eq!((text + &out.text, gathered.collect::<Vec<_>>()), (whole.text.clone(), calls.clone()));
        }
    }
    (whole.text, calls)
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

#[test]
fn arguments_come_as_they_are_written() {
    for (format, before, between, after) in [
        (ToolFormat::Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": ", "", "}\n</tool_call>"),
        (
            ToolFormat::DeepSeek,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
            "",
            "\n```<｜tool▁call▁end｜>",
        ),
        (ToolFormat::DeepSeekPlain, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "", "<｜tool▁call▁end｜>"),
        (ToolFormat::Llama3, "<|python_tag|>{\"name\": \"f\", \"parameters\": ", "; ", "}"),
        (ToolFormat::Llama3, "<function=f>", "\n", "</function>"),
    ] {
        let arguments = ["{\"a\": \"x } \\\" y\", ", "\"b\": [1, {\"c\": null}", "]}"];
        let mut parser = ToolParser::pieces(format);
        let mut push = |text: &str| {
            let mut out = ToolOutput::default();
            parser.push(text, &mut out);
            assert_eq!(out.text, "", "{format:?} {text:?}");
            out.calls
        };
        for call in 0..2 {
            assert_eq!(push(if call == 0 { "" } else { between }), []);
            assert_eq!(push(before), []);
            let piece = |name: Option<&str>, arguments: &str| {
                [ToolPiece { call, name: name.map(str::to_owned), arguments: arguments.into() }]
            };
            assert_eq!(push(arguments[0]), piece(Some("f"), "{\"a\":\"x } \\\" y\","), "{format:?}");
            assert_eq!(push(arguments[1]), piece(None, "\"b\":[1,{\"c\":null}"));
            assert_eq!(push(arguments[2]), piece(None, "]}"));
            assert_eq!(push(after), []);
        }
        let mut out = ToolOutput::default();
        parser.finish(&mut out);
        assert_eq!(out, ToolOutput::default());
    }
}

#[test]
fn what_breaks_off_or_comes_in_another_order() {
    let run = |format, text: &str| {
        let (mut parser, mut out) = (ToolParser::pieces(format), ToolOutput::default());
        text.chars().for_each(|c| parser.push(c.encode_utf8(&mut [0; 4]), &mut out));
        parser.finish(&mut out);
        (out.text.clone(), ToolPiece::gather(&out.calls))
    };
    let (text, calls) = run(ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": [1, ");
    assert_eq!((text.as_str(), calls[0].arguments.as_str()), ("", "{\"x\":[1,"));
    let turned = "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"f\"}</tool_call>";
    assert_eq!(run(ToolFormat::Hermes, turned).1[0].arguments, "{\"x\":1}");
    let json = "{\"name\": \"Rome\", \"people\": 3}";
    assert_eq!(run(ToolFormat::Llama3, json), (json.into(), vec![]));
    let endless = format!("<tool_call>{{\"name\": \"{}", "x".repeat(5000));
    assert_eq!(run(ToolFormat::Hermes, &endless), (endless.clone(), vec![]));
}
