//! The two programs as a person or a script meets them: what is on standard output, what on standard error, and the
//! exit code. Everything runs on the bundled demo model.

use crate::support::{self, data, read_safetensors};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tegu::format::input::NamedBytes;

const TEGU: &str = "tegu";
const TEGUD: &str = "tegud";
const QUESTION: &str = "What is gravity?";

/// A command with none of the user's settings.
fn command(program: &str) -> Command {
    let mut command = support::command(program);
    for name in ["TEGU_MODEL", "TEGU_THREADS", "TEGU_LOG", "HOME"] {
        command.env_remove(name);
    }
    command.env("XDG_CONFIG_HOME", "no-such-folder").stdin(Stdio::null());
    command
}

fn tegu(args: &[&str]) -> Output {
    command(TEGU).args(args).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The one object of a `--json` run.
fn json(args: &[&str]) -> Value {
    let text = stdout(&tegu(args));
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}: {text}"));
    assert!(value.is_object(), "{args:?}");
    value
}

/// Exit code and the one line that says why.
fn refused(args: &[&str]) -> (i32, String) {
    let output = tegu(args);
    assert!(output.stdout.is_empty(), "{args:?} printed on standard output");
    let lines = stderr(&output);
    let mut said = lines.lines().filter(|l| l.starts_with("tegu: ") && !l.starts_with("tegu: warn"));
    let line = said.next().unwrap_or_else(|| panic!("{args:?}: {lines}")).to_owned();
    assert_eq!(said.next(), None, "one line");
    assert!(!lines.contains("panicked"), "{lines}");
    (output.status.code().unwrap_or(-1), line)
}

fn demo() -> String {
    let path = data().join("tinymoe-demo.gguf");
    assert!(path.is_file(), "the bundled demo is missing");
    path.display().to_string()
}

fn temp() -> (tempfile::TempDir, impl Fn(&str) -> String) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    (dir, move |name: &str| root.join(name).display().to_string())
}

#[test]
fn the_first_command_answers_with_the_demo() {
    let output = tegu(&["run", QUESTION, "-n", "24"]);
    let answer = stdout(&output);
    assert!(answer.starts_with("Gravity is "), "{answer}");
    let notes = stderr(&output);
    assert!(notes.contains("the bundled demo"), "{notes}");
    assert!(notes.contains("TTFT") && notes.contains("pp ") && notes.contains("tg "), "{notes}");
    // Greedy is the default, and every way to say the same gives the same.
    let demo = demo();
    for same in [
        vec!["run", &demo, QUESTION, "-n", "24"],
        vec!["run", "-m", &demo, "-p", QUESTION, "-n", "24", "--temp", "0", "-t", "1"],
        vec!["run", "--model", &demo, QUESTION, "--n-predict", "24", "-c", "512", "-ngl", "99", "-b", "3"],
    ] {
        assert_eq!(stdout(&tegu(&same)), answer, "{same:?}");
    }
    let by_variable = command(TEGU).args(["run", QUESTION, "-n", "24"]).env("TEGU_MODEL", &demo).output();
    assert_eq!(stdout(&by_variable.unwrap()), answer);
}

#[test]
fn json_is_one_object_and_nothing_else() {
    let (_dir, path) = temp();
    std::fs::write(path("text"), "Gravity is a force. ".repeat(40)).unwrap();
    let run = json(&["run", QUESTION, "-n", "5", "--json", "--logprobs", "3"]);
    assert_eq!(run["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(run["finish"], "length");
    let first = &run["logprobs"][0];
    assert_eq!(first["id"], first["top"][0]["id"], "greedy takes the likeliest");
    assert!(first["logprob"].as_f64().unwrap() <= 0.0);
    let inspect = json(&["inspect", "--json", "--tensors", "-c", "256"]);
    assert_eq!(inspect["memory"]["context"], 256);
    assert_eq!(
        inspect["tensor_count"].as_u64().unwrap() as usize,
        inspect["tensors"].as_array().unwrap().len()
    );
    let ppl = json(&["ppl", "--file", &path("text"), "--ctx", "32", "--json"]);
    assert!(ppl["ppl"].as_f64().unwrap() > 1.0 && ppl["scored"].as_u64().unwrap().is_multiple_of(31));
    let half = json(&["ppl", "--file", &path("text"), "--ctx", "32", "--skip-half", "--json"]);
    assert_eq!(half["scored"].as_u64().unwrap(), half["windows"].as_u64().unwrap() * 16);
    let bench = json(&[&BENCH[..], &["--depth", "0,4", "--batch", "1,2", "-r", "1", "--json"]].concat());
    let tests: Vec<&str> =
        bench["results"].as_array().unwrap().iter().map(|r| r["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp8", "tg4", "tg4 x2", "pp8 @ d4", "tg4 @ d4", "tg4 x2 @ d4"]);
    let two = &bench["results"][2];
    assert!(two["share_of_roof"].as_f64().unwrap() > 0.0 && two["share_of_union"].as_f64().unwrap() > 0.0);
    // Two rows use more experts than one, and at most twice as many.
    let experts = [1, 2].map(|i| bench["results"][i]["experts_a_step"].as_f64().unwrap());
    assert!(experts[0] > 0.0 && experts[0] < experts[1] && experts[1] <= 2.0 * experts[0], "{experts:?}");
    assert!(bench["peak_bytes"].as_u64().unwrap() > bench["file_bytes"].as_u64().unwrap());
    let kernels = json(&["bench", "--kernels=q4_0,F16", "--pp", "4", "--roof-mib", "2", "--json"]);
    let codecs: Vec<&str> =
        kernels["results"].as_array().unwrap().iter().map(|r| r["codec"].as_str().unwrap()).collect();
    assert_eq!(codecs, ["f16", "q4_0"]);
    assert_eq!(json(&["config", "--json"])["settings"]["kv"]["value"], "f16");
}

/// A small benchmark.
const BENCH: [&str; 7] = ["bench", "--pp", "8", "--tg", "4", "--roof-mib", "2"];

/// Runs `tegu logits` and gives the bytes of the file.
fn logits(more: &[&str]) -> Vec<u8> {
    let (_dir, path) = temp();
    let out = path("out.safetensors");
    let mut args = vec!["logits", "--tokens", "1,8106,2787,300,259,1593,7,8,9", "-o", &out, "--hidden"];
    args.extend(more);
    assert_eq!(stdout(&tegu(&args)), "");
    std::fs::read(out).unwrap()
}

#[test]
fn logits_do_not_depend_on_chunks_company_or_threads() {
    for mode in [&["--exact"][..], &[]] {
        for order in ["absorbed", "materialized"] {
            let with = |more: &[&str]| logits(&[mode, &["--mla", order], more].concat());
            let whole = with(&["--threads", "1"]);
            for more in [
                &["--chunk", "1"][..],
                &["--chunk", "7", "--threads", "2"],
                &["--batch", "8", "--chunk", "2"],
            ] {
                assert!(with(more) == whole, "{mode:?} {order} {more:?}");
            }
        }
    }
}

#[test]
fn expert_picks_are_replayed() {
    let (_dir, path) = temp();
    let (picks, a, b) = (path("picks"), path("a"), path("b"));
    let run = |more: &[&str]| stdout(&tegu(&[&["logits", "--tokens", "5,6,7,8", "--exact"], more].concat()));
    run(&["--routes-out", &picks, "-o", &a]);
    run(&["--routes-in", &picks, "-o", &b]);
    let (a, b) = (read_safetensors(Path::new(&a)), read_safetensors(Path::new(&b)));
    assert_eq!(a["logits"].f32, b["logits"].f32);
    // Replaying is not ignoring: other picks give other logits.
    let mut bytes = std::fs::read(&picks).unwrap();
    let n = bytes.len();
    bytes[n - 4] ^= 1;
    std::fs::write(&picks, &bytes).unwrap();
    let c = path("c");
    run(&["--routes-in", &picks, "-o", &c]);
    assert_ne!(a["logits"].f32, read_safetensors(Path::new(&c))["logits"].f32);
    // Picks for another number of tokens, or of experts that there are not, are refused.
    let out = path("d");
    let (code, line) = refused(&["logits", "--tokens", "5,6", "-o", &out, "--routes-in", &picks]);
    assert!(code == 2 && line.contains("routes: expected I32 [2, "), "{line}");
    bytes[n - 2] = 1;
    std::fs::write(&picks, &bytes).unwrap();
    let (code, line) = refused(&["logits", "--tokens", "5,6,7,8", "-o", &out, "--routes-in", &picks]);
    assert!(code == 2 && line.contains("expected an expert below"), "{line}");
    assert!(!PathBuf::from(out).exists(), "a failed run leaves no file");
}

#[test]
fn mistakes_are_one_line_and_an_exit_code() {
    let (_dir, path) = temp();
    std::fs::write(path("bad.toml"), "thread = 3\n").unwrap();
    std::fs::write(path("short.txt"), "too short").unwrap();
    std::fs::write(path("bytes.txt"), [b'a', 0xff]).unwrap();
    std::fs::write(path("not.gguf"), "GGUFnot").unwrap();
    let out = path("out");
    let config = path("bad.toml");
    let long = "word ".repeat(3000);
    let cases: &[(&[&str], i32, &str)] = &[
        (&["run", "no/such.gguf", "hi"], 2, "no/such.gguf: open"),
        (&["run", "no-such.gguf"], 2, "no-such.gguf"),
        (&["inspect", &path("not.gguf")], 2, "expected"),
        (&["inspect", "--config", &config], 2, "thread: expected a known key (did you mean threads?)"),
        (&["logits", "--tokens", "1,99999999", "-o", &out], 2, "token id: expected below"),
        (
            &["logits", "--tokens-file", &path("short.txt"), "-o", &out],
            2,
            "token id: expected a whole number",
        ),
        (&["logits", "--tokens", "1", "-o", &path("no/such/folder")], 2, "create"),
        (&["ppl", "--file", &path("short.txt"), "--ctx", "64"], 2, "at least one window"),
        (&["ppl", "--file", &path("bytes.txt"), "--ctx", "64"], 2, "expected UTF-8"),
        (&["ppl", "--file", &path("short.txt"), "--ctx", "9999999"], 3, "--ctx"),
        (&["run", &long, "-n", "1"], 3, "context tokens: needs"),
        (&["run", "hi", "-c", "9999999"], 3, "context tokens: needs"),
        (&["run", "hi", "--top-p", "1.5"], 2, "--top-p: flag: expected a number from 0 to 1"),
        (&["run", "hi", "--typical", "1.5"], 2, "typical"),
        (&["run", "a", "-p", "b"], 2, "one prompt"),
        (&["run", "--json"], 2, "--json: expected a prompt"),
        (&["bench", "--batch", "0"], 2, "--batch"),
        (&["bench", "--kernels=q9_9"], 2, "q4_0"),
        (&["bench", "--backend", "cpu", "--fake-missing", "0.5"], 2, "--fake-missing: expected a model on"),
        (&["bench", "--fake-missing", "1.5"], 2, "a number from 0 to 1"),
        (&["run", "hi", "--expert-budget", "3T"], 2, "--expert-budget: flag: expected bytes"),
        (&["bench", "--kernels", "--roof-mib", "70000"], 2, "--roof-mib"),
        (&["run", "hi", "--temp", "-1"], 2, "--temp: flag: expected a number from 0 to 100"),
        (&["run", "hi", "--temp", "-inf"], 2, "--temp: flag: expected a number from 0 to 100"),
        (&["run", "hi", "--repeat-penalty", "0"], 2, "--repeat-penalty: flag: expected a number from 0.001"),
        (&["run", "hi", "--top-k", "-1"], 2, "'-1' for '--top-k"),
        (&["run", "hi", "-c", "-1"], 2, "'-1' for '--ctx-size <N>': expected a whole number, 0 or more"),
        (&["stop", "-1"], 2, "'-1' for '<ID>': expected a whole number"),
        (&["run", "-hf", "some/model"], 2, "-hf: expected a file or folder with -m"),
        (&["run", "-hx"], 2, "-hx: expected -h or --help"),
        (&["list", "--models", "no/such"], 2, "serve.models: expected a folder"),
        (&["list", "--at", "no/such"], 2, "no/such: connect to the daemon"),
    ];
    for (args, code, says) in cases {
        let (got, line) = refused(args);
        assert!(got == *code && line.contains(says), "{args:?}: {got} {line}");
    }
}

#[test]
fn usage_errors_and_help_have_their_codes() {
    for args in
        [&["run", "--tmep", "1"][..], &["frobnicate"], &[], &["logits", "-o", "x"], &["ppl", "--ctx", "1"]]
    {
        assert_eq!(tegu(args).status.code(), Some(2), "{args:?}");
    }
    let help = stdout(&tegu(&["--help"]));
    for said in ["run", "logits", "ppl", "inspect", "bench", "Exit codes", "130"] {
        assert!(help.contains(said), "{said}");
    }
    for name in ["run", "logits", "ppl", "inspect", "bench", "config", "completions"] {
        let help = stdout(&tegu(&[name, "--help"]));
        assert!(help.contains("Example") && help.contains("tegu "), "{name}");
    }
    assert!(stdout(&tegu(&["completions", "bash"])).contains("complete -F _tegu"));
    assert!(stdout(&tegu(&["--version"])).starts_with("tegu "));
}

#[test]
fn a_conversation_is_a_line_a_turn() {
    let mut child = command(TEGU)
        .args(["run", "-n", "8"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let long = "word ".repeat(3000);
    let mut stdin = child.stdin.take().unwrap();
    write!(stdin, "{QUESTION}\n\n{long}\nHow do I make tea?\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let answers = String::from_utf8(output.stdout.clone()).unwrap();
    let notes = stderr(&output);
    // The empty line is skipped, the turn that does not fit is refused, and the conversation goes on; how it ends says so.
    assert_eq!(output.status.code(), Some(3), "{notes}");
    assert_eq!(answers.lines().count(), 2, "{answers}");
    assert!(notes.contains("context tokens: needs"), "{notes}");
    assert!(notes.contains("cached)"), "the second turn reuses the first: {notes}");
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let run = |seed: &str| {
        let flags = ["--temp", "1.5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "20", "-s"];
        stdout(&tegu(&[&["run", "Tell me a story."], &flags[..], &[seed]].concat()))
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7"), run("8"));
    let stop = stdout(&tegu(&["run", QUESTION, "--stop", "is"]));
    assert_eq!(stop, "Gravity \n");
}

/// An answer that goes on until the context is full: its ends are forbidden.
fn endless() -> Child {
    let ends = json(&["inspect", "--json"])["tokenizer"]["ends"].clone();
    let mut run = command(TEGU);
    run.args(["run", QUESTION, "-c", "2048", "--temp", "1"]);
    for id in ends.as_array().unwrap() {
        run.arg(format!("--logit-bias={id}-inf"));
    }
    run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What one says that is interrupted; one whose context was full before that proves nothing.
fn interrupted() -> Output {
    for _ in 0..10 {
        let mut child = endless();
        let mut first = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let output = child.wait_with_output().unwrap();
        if !output.status.success() {
            return output;
        }
    }
    panic!("whole answers, though each was interrupted after eight bytes");
}

#[test]
fn an_interrupt_stops_the_answer_and_keeps_its_text() {
    let output = interrupted();
    let notes = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{notes}");
    assert!(notes.contains("interrupted]"), "{notes}");
}

#[test]
fn a_closed_pipe_is_a_quiet_end() {
    let mut child = endless();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut some = [0; 8];
    reader.read_exact(&mut some).unwrap();
    drop(reader);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let last = stderr(&output).lines().last().unwrap_or_default().to_owned();
    assert!(!last.contains("panicked") && !last.contains("roken pipe"), "{last}");
}

#[test]
fn the_daemon_checks_itself() {
    let daemon = |args: &[&str]| command(TEGUD).args(args).output().unwrap();
    let checked = daemon(&["--check", "-m", &demo()]);
    assert!(stdout(&checked).starts_with("ok: loaded"), "{}", stderr(&checked));
    assert!(stderr(&checked).contains("memory: "));
    assert_eq!(daemon(&["--check", "-m", "no/such"]).status.code(), Some(2));
    let unknown = daemon(&["--serve"]);
    assert_eq!(
        (unknown.status.code(), stderr(&unknown).lines().count()),
        (Some(2), 1),
        "{}",
        stderr(&unknown)
    );
    let (_dir, path) = temp();
    std::fs::write(path("c.toml"), "threads = 2\n[sample]\ntemp = 0.5\n").unwrap();
    let shown = stdout(&daemon(&["--config", &path("c.toml"), "--print-config"]));
    let lines: Vec<&str> = shown.lines().filter(|l| l.contains("# file")).collect();
    assert_eq!(lines.len(), 2, "{shown}");
    assert_eq!(daemon(&["--config", &path("none.toml"), "--print-config"]).status.code(), Some(2));
    // The daemon's own default is in the print, and does not become a setting by it: the bytes load to the same.
    assert!(shown.contains("\ntemp = 0.5") && shown.contains("\n# kv = \"f16\""), "{shown}");
    let own = stdout(&daemon(&["--print-config", "-m", "x.gguf"]));
    assert!(own.contains("\n# temp = 1.0 ") && own.contains("\nmodel = \"x.gguf\" "), "{own}");
    std::fs::write(path("own.toml"), &own).unwrap();
    let again = stdout(&daemon(&["--config", &path("own.toml"), "--print-config"]));
    assert!(again.contains("\n# temp = 1.0 "), "{again}");
    // What would fail at the start, or at the first request, fails here.
    std::fs::write(path("file"), "").unwrap();
    for (setting, says) in [
        ("serve.group = \"no-such-group\"".to_owned(), "serve.group"),
        ("serve.models = \"no/such\"".into(), "serve.models"),
        (format!("serve.spill = {:?}", path("file")), "serve.spill: expected a folder"),
        (format!("serve.sessions = {:?}", path("file/a")), "serve.sessions: expected a folder"),
        ("expert_budget = \"x\"".into(), "expert_budget"),
        ("power.board = \"x\"".into(), "power.board"),
        ("power.profile = \"x\"".into(), "profiles of "),
        ("context = 1".into(), "context: expected 0, or room"),
    ] {
        std::fs::write(path("bad.toml"), setting).unwrap();
        for verb in ["--print-config", "--check"] {
            let refused = daemon(&["--config", &path("bad.toml"), verb]);
            let said = stderr(&refused);
            assert!(refused.status.code() == Some(2) && said.contains(says), "{verb}: {said}");
        }
    }
    let help = daemon(&["-hf", "x"]);
    assert!(help.status.code() == Some(2) && stderr(&help).contains("nothing is downloaded"));
    // A first line is enough to see that text streams as it is made.
    let text = BufReader::new(shown.as_bytes()).lines().next().unwrap().unwrap();
    assert!(text.starts_with("# settings file: "));
}

#[test]
fn pipes_and_own_inputs_are_refused_at_once() {
    let (_dir, at) = temp();
    let pipe = at("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let out = at("out");
    // No one writes to the pipe: whatever opens it waits for ever.
    for args in [
        vec!["run", "-f", &pipe],
        vec!["ppl", "--file", &pipe],
        vec!["logits", "--tokens-file", &pipe, "-o", &out],
        vec!["--config", &pipe, "config"],
        vec!["inspect", &pipe],
    ] {
        let (code, line) = refused(&args);
        assert!(code == 2 && line.contains("pipe"), "{args:?}: {code} {line}");
    }
    let model = at("model.gguf");
    std::fs::copy(demo(), &model).unwrap();
    for args in [vec!["pack", &model, "-o", &model], vec!["logits", &model, "--tokens", "1", "-o", &model]] {
        let (code, line) = refused(&args);
        assert!(code == 2 && line.contains("another file than the input"), "{args:?}: {code} {line}");
    }
    assert_eq!(std::fs::metadata(&model).unwrap().len(), std::fs::metadata(demo()).unwrap().len());
}

#[test]
fn usage_errors_are_one_line_and_quiet_is_quiet() {
    for args in [vec!["pack", "x", "-o", "y", "-t", "9999"], vec!["run", "--no-such-flag"], vec!["logits"]] {
        let output = tegu(&args);
        let said = stderr(&output);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
    let output = tegu(&["run", &demo(), QUESTION, "-n", "4", "-q"]);
    assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
}

/// A command on a shape so large that it is still at work when something else happens, once it has begun to write into `dir`.
fn writing(dir: &Path, out: &str) -> Child {
    let mut child = command(TEGU).args(["synth", "llama3-8b", "-q", "-o", out]).spawn().unwrap();
    while std::fs::read_dir(dir).unwrap().count() == 0 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it wrote");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

#[test]
fn no_part_of_a_file_stays_behind() {
    let (dir, path) = temp();
    let (dir, out) = (dir.path(), path("out"));
    let names = || -> Vec<String> {
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    };
    // Who started the tests may have had SIGINT ignored, as shells do for what they run in the background.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap().trim();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    for (name, signal) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        if ignored >> (signal - 1) & 1 == 0 {
            let child = writing(dir, &out);
            let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
            assert!(sent.success());
            let ended = child.wait_with_output().unwrap().status;
            assert_eq!((ended.signal(), names()), (Some(signal), vec![]), "{ended}");
        }
    }
    // Nothing can be put in order by who is killed: the next command that writes this file does.
    let mut child = writing(dir, &out);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(names().len() == 1 && names() != ["out"], "{:?}", names());
    let next = tegu(&["logits", "--tokens", "1", "-o", &out]);
    assert!(stdout(&next).is_empty() && stderr(&next).contains("which an interrupted run left"));
    assert_eq!(names(), ["out"]);
}

/// The demo with an element of a tensor that is no number.
fn broken_demo(path: &str, tensor: &str) {
    let bytes = std::fs::read(demo()).unwrap();
    let file = tegu::format::gguf::parse(&NamedBytes { path: Path::new(path), bytes: &bytes }).unwrap();
    let found = file.tensors.iter().find(|t| t.name == tensor).unwrap();
    assert_eq!(found.codec, tegu::format::Codec::F32);
    let at = found.offset as usize + 4 * 5;
    let bytes = [&bytes[..at], &f32::NAN.to_le_bytes(), &bytes[at + 4..]].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn results_that_are_no_numbers_are_errors() {
    let (_dir, path) = temp();
    let (model, out, text) = (path("m.gguf"), path("out"), path("text"));
    std::fs::write(&text, "Gravity is a force. ".repeat(40)).unwrap();
    broken_demo(&model, "output_norm.weight");
    let (code, line) = refused(&["ppl", &model, "--file", &text, "--ctx", "32", "--json"]);
    assert!(code == 2 && line.contains("m.gguf: logits at window 0, position 0: expected a prob"), "{line}");
    assert!(line.ends_with("found NaN for token 0"), "{line}");
    let (code, line) = refused(&["logits", &model, "--tokens", "1,2,3", "-o", &out]);
    let says = "m.gguf: logits at position 0, element 0: expected a finite number, found NaN";
    assert!(code == 2 && line.contains(says), "{line}");
    // With the hidden states it is told where the trouble begins.
    broken_demo(&model, "blk.1.attn_norm.weight");
    let (_, line) = refused(&["logits", &model, "--tokens", "1,2,3", "-o", &out, "--hidden", "--exact"]);
    assert!(line.contains("m.gguf: hidden.2 at position 0, element "), "{line}");
    assert!(!Path::new(&out).exists());
}

/// A flag without a use is refused by its name rather than passed over.
#[test]
fn flags_that_would_do_nothing_are_refused() {
    let (_dir, path) = temp();
    let dense = data().join("oracles/llama").display().to_string();
    let (out, sim) = (path("out"), "sim:orin-nano-super");
    let logits = |more: &[&'static str]| {
        [&["logits", &dense, "--backend", "cpu", "--tokens", "1,2", "-o", &out], more]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let words = |line: &str| line.replace("SIM", sim).split(' ').map(str::to_owned).collect::<Vec<_>>();
    for (args, says) in [
        (logits(&["--mla", "absorbed"]), "--mla: expected a model with latent attention"),
        (logits(&["--routes-out", "x"]), "--routes-out: expected a model with routed experts"),
        (logits(&["--routes-in", "x"]), "--routes-in: expected a model with routed experts"),
        (logits(&["--dense-mask"]), "--dense-mask: expected a --mask"),
        (logits(&["--expert-budget", "1G"]), "--expert-budget: expected a model on --backend cuda"),
        (words("inspect --spin-us 3"), "--spin-us: expected a command that runs the model"),
        (words("bench --svg x"), "--kernels"),
        (words("bench model.gguf --svg x"), "cannot be used with '--svg <FILE>'"),
        (words("bench --kernels=q4_0 --backend cpu --svg x"), "--svg: expected --backend cuda"),
        (words("bench --kernels=q4_0 --tg 5"), "--tg"),
        (words("bench --kernels --kv int8"), "--kv"),
        (words("power tune --board SIM -m x.gguf"), "--model: expected a real board, or --sim-model"),
        (words("power tune --board SIM -ngl 5"), "--n-gpu-layers: expected a real board"),
        (words("power tune --board SIM --helper x"), "--helper: expected a real board"),
        (words("power tune --board SIM --work chat"), "--work: expected none"),
        (words("power tune --sim-model x"), "--sim-model"),
        (words("power apply silent --ambient 30"), "--board"),
        (words("power apply silent --root . --seed 3"), "--seed"),
        (words("power apply silent --board SIM --helper x"), "--helper: expected a real board"),
        (words("power record -o x --root . --profile silent"), "--profile"),
        (words("power profiles --of orin-nx-16 --board SIM"), "--board"),
        (words("top --once --every 3"), "--every"),
        (words("list --models . --token-file x"), "--token-file"),
        (
            words("synth llama3-8b -o x --router-skew 1"),
            "--router-skew: expected a shape with routed experts",
        ),
        (words("pack a -o b --config no/such.toml"), "no/such.toml: open"),
        (words("power profiles --config no/such.toml"), "no/such.toml: open"),
        (words("run hi -ngl abc"), "'abc' for '--n-gpu-layers <N>': expected a whole number, auto or all"),
        (words("run hi -ngl 0 --backend cuda"), "--n-gpu-layers: expected above 0 with --backend cuda"),
        (words("run hi -tb abc"), "'abc' for '--threads-batch"),
        (words("run hi -ctv q8_0"), "'q8_0' for '--cache-type-v"),
        (words("run hi -ctk f16 -ctv int8"), "--cache-type-v: expected the type of --cache-type-k"),
    ] {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, line) = refused(&args);
        assert!(code == 2 && line.contains(says), "{args:?}: {code} {line}");
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn variables_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"model\xff.gguf");
    for program in [TEGU, TEGUD] {
        let args: &[&str] = if program == TEGU { &["config"] } else { &["--print-config"] };
        let output = command(program).args(args).env("TEGU_MODEL", bytes).output().unwrap();
        let said = stderr(&output);
        let says = "TEGU_MODEL: environment: expected UTF-8, found \"model\\xFF.gguf\"";
        assert!(output.status.code() == Some(2) && said.contains(says), "{said}");
    }
}
