//! The engine as a service: many readers, slow ones, vanished ones, a full queue, a bug.

use crate::support::data;
use std::time::{Duration, Instant};
use tegu::app::{self, Options};
use tegu::engine::service::{Handle, Limits, Metrics, OnPanic, Reply, Service, Stream, Submit, Work};
use tegu::engine::{Budget, Class, Done, EvalOptions, Stats};
use tegu::sample::{Constraint, SampleParams, Sampler};
use tegu::units::{Error, Result};

pub fn start(name: &str, limits: Limits) -> Service {
    let mut o = Options::new(data().join("oracles").join(name));
    (o.context_tokens, o.sequences, o.threads) = (128, 8, 2);
    let app = app::prepare(o).unwrap().load(&|_| {}).unwrap();
    // Whoever is short of memory beside these tests takes nothing from what they look for in the cache.
    let limits = Limits { watch_memory: false, ..limits };
    Service::start(app.engine, limits, OnPanic::Poison).unwrap()
}

pub fn greedy() -> Sampler {
    Sampler::new(SampleParams::greedy()).unwrap()
}

pub fn ask(prompt: &[u32], samplers: Vec<Sampler>, max_new: usize) -> Submit {
    Submit {
        prompt: prompt.to_vec(),
        work: Work::Generate { samplers, max_new, end_ids: vec![] },
        class: Class::Interactive,
        deadline: None,
        client: "test".into(),
        slide: None,
        session: None,
    }
}

pub fn prompt(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * 7919 + seed * 104_729 + i * i * 31) % 380).collect()
}

/// One answer's tokens, and how it ended.
type Choice = (Vec<u32>, Option<(Done, Stats)>);

/// Reads a stream to its end: tokens and end of each choice.
pub fn read(mut stream: Stream) -> Result<Vec<Choice>> {
    let mut out: Vec<Choice> = vec![];
    while let Some(reply) = stream.next() {
        let (Reply::Token { choice, .. } | Reply::Done { choice, .. }) =
            &reply.as_ref().map_err(Error::again)?
        else {
            continue;
        };
        out.resize_with(out.len().max(choice + 1), Default::default);
        match reply? {
            Reply::Token { choice, sampled } => out[choice].0.push(sampled.token),
            Reply::Done { choice, why, stats } => out[choice].1 = Some((why, stats)),
            _ => unreachable!(),
        }
    }
    Ok(out)
}

/// Waits until the service says so.
pub fn until(handle: &Handle, is_so: impl Fn(&Metrics) -> bool) {
    let started = Instant::now();
    while !is_so(&handle.metrics()) {
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", handle.metrics());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until nothing is open.
pub fn settle(handle: &Handle) {
    until(handle, |m| m.open == 0 && m.decoding == 0);
}

/// No step is done until [`go_on`]: whatever is asked meanwhile finds what was asked before still open.
fn hold(handle: &Handle) {
    handle.set_budget(Budget { pause: true, ..Budget::default() });
}

fn go_on(handle: &Handle) {
    handle.set_budget(Budget::default());
}

#[test]
fn many_readers_get_what_each_gets_alone() {
    let service = start("llama", Limits::default());
    let handle = service.handle();
    let run = |seed| read(handle.submit(ask(&prompt(20 + seed, seed), vec![greedy()], 24)).unwrap()).unwrap();
    let alone: Vec<_> = (0..12).map(|seed| run(seed).remove(0).0).collect();
    let together: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..12).map(|seed| scope.spawn(move || run(seed).remove(0))).collect();
        threads
            .into_iter()
            .map(|t| {
                let (tokens, end) = t.join().unwrap();
                assert_eq!(end.unwrap().0, Done::Length);
                tokens
            })
            .collect()
    });
    assert_eq!(together, alone);
    settle(&handle);
    let m = handle.metrics();
    assert_eq!((m.requests, m.finished, m.generated_tokens), (24, 24, 24 * 24));
}

#[test]
fn choices_differ_by_seed_and_share_the_prompt() {
    let service = start("llama", Limits::default());
    let sampler = |seed| Sampler::new(SampleParams { temp: 1.0, seed, ..SampleParams::greedy() }).unwrap();
    let all = ask(&prompt(30, 1), vec![sampler(1), sampler(2), sampler(1)], 10);
    let out = read(service.handle().submit(all).unwrap()).unwrap();
    assert_eq!(out.len(), 3);
    assert!(out.iter().all(|(t, end)| t.len() == 10 && end.is_some()));
    assert!(out[0].0 == out[2].0 && out[0].0 != out[1].0);
    let bad = service.handle().submit(ask(&prompt(3, 1), vec![], 10)).map(|_| ()).unwrap_err().to_string();
    assert!(bad.contains("n: expected 1 to 16, found 0"), "{bad}");
}

#[test]
fn a_full_queue_refuses_at_once_and_a_dropped_stream_makes_room() {
    let service = start("llama", Limits { requests_max: 2, ..Limits::default() });
    let handle = service.handle();
    let long = || handle.submit(ask(&prompt(10, 1), vec![greedy()], 110));
    hold(&handle);
    let (first, second) = (long().unwrap(), long().unwrap());
    match long().map(|_| ()) {
        Err(Error::Busy { retry, .. }) => assert!(retry >= Duration::from_secs(1)),
        other => panic!("{other:?}"),
    }
    assert_eq!(handle.metrics().refused, 1);
    drop(first);
    assert!(handle.cancel(second.id()).unwrap());
    assert!(matches!(read(second), Err(Error::Interrupted)));
    settle(&handle);
    assert_eq!(handle.metrics().cancelled, 2);
    go_on(&handle);
    assert_eq!(read(long().unwrap()).unwrap()[0].0.len(), 110);
}

#[test]
fn a_slow_reader_is_let_go() {
    let service = start("llama", Limits { replies_max: 4, ..Limits::default() });
    let handle = service.handle();
    let slow = handle.submit(ask(&prompt(10, 1), vec![greedy()], 100)).unwrap();
    settle(&handle);
    assert_eq!(handle.metrics().slow_readers, 1);
    let error = read(slow).unwrap_err().to_string();
    assert!(error.contains("reader"), "{error}");
}

#[test]
fn a_deadline_ends_an_answer_and_a_pause_holds_all() {
    let service = start("llama", Limits::default());
    let handle = service.handle();
    hold(&handle);
    let mut late = ask(&prompt(10, 1), vec![greedy()], 100);
    late.deadline = Some(Instant::now() + Duration::from_millis(20));
    let out = read(handle.submit(late).unwrap()).unwrap();
    assert_eq!(out[0].1.unwrap().0, Done::Deadline);
    assert_eq!(handle.metrics().generated_tokens, 0);
    let mut held = handle.submit(ask(&prompt(10, 1), vec![greedy()], 3)).unwrap();
    assert!(held.next_within(Duration::from_millis(50)).is_none());
    assert_eq!(handle.requests().unwrap().len(), 1);
    go_on(&handle);
    assert_eq!(read(held).unwrap()[0].0.len(), 3);
    assert_eq!(handle.metrics().deadlines_missed, 1);
}

#[test]
fn an_embedding_is_the_mean_of_the_last_hidden_states() {
    let mut o = Options::new(data().join("oracles/deepseek-v2"));
    (o.context_tokens, o.threads) = (128, 2);
    let mut app = app::prepare(o).unwrap().load(&|_| {}).unwrap();
    let (tokens, layers, hidden) = (prompt(50, 2), app.engine.hyper().n_layers, app.engine.hyper().hidden);
    let mut sum = vec![0.0; hidden];
    let options = EvalOptions { hidden: vec![layers], ..EvalOptions::default() };
    let add = &mut |c: tegu::engine::EvalChunk| {
        for row in c.hidden[0].chunks(hidden) {
            sum.iter_mut().zip(row).for_each(|(s, x)| *s += f64::from(*x));
        }
        Ok(())
    };
    app.engine.eval(&tokens, &options, add).unwrap();
    let want: Vec<f32> = sum.iter().map(|s| (s / 50.0) as f32).collect();
    let budget = Budget { prefill_chunk: 7, ..Budget::default() };
    let service =
        Service::start(app.engine, Limits { budget, ..Limits::default() }, OnPanic::Poison).unwrap();
    // Beside a request that generates, whose rows are not part of it.
    let other = service.handle().submit(ask(&prompt(9, 1), vec![greedy()], 50)).unwrap();
    let embed = Submit { work: Work::Embed, ..ask(&tokens, vec![], 0) };
    let mut stream = service.handle().submit(embed).unwrap();
    let mut got = None;
    while let Some(reply) = stream.next() {
        if let Reply::Embedding { mean, .. } = reply.unwrap() {
            got = Some(mean);
        }
    }
    assert_eq!(got.unwrap(), want);
    assert_eq!(read(other).unwrap()[0].0.len(), 50);
}

/// Allows multiples of a number, and ends after some tokens; panics if asked to.
#[derive(Debug)]
struct Multiples(u32, usize, bool);

impl Constraint for Multiples {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        assert!(!self.2, "a planted bug");
        let other = |(i, _): &(usize, &mut f32)| !(*i as u32).is_multiple_of(self.0);
        logits.iter_mut().enumerate().filter(other).for_each(|(_, l)| *l = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool> {
        if !token.is_multiple_of(self.0) {
            return Err(Error::bad("grammar", "token", "a multiple", token));
        }
        self.1 -= 1;
        Ok(self.1 == 0)
    }
}

#[test]
fn a_grammar_holds_its_answer_and_no_other() {
    let service = start("llama", Limits::default());
    let held = greedy().constrained(Box::new(Multiples(7, 5, false)));
    // The prompt is full of tokens that the form would not allow.
    let out = read(service.handle().submit(ask(&prompt(20, 3), vec![held, greedy()], 30)).unwrap()).unwrap();
    assert_eq!((out[0].0.len(), out[0].1.unwrap().0), (5, Done::Complete));
    assert!(out[0].0.iter().all(|t| t % 7 == 0));
    assert_eq!((out[1].0.len(), out[1].1.unwrap().0), (30, Done::Length));
    let impossible = greedy().constrained(Box::new(Multiples(1000, 5, false)));
    let only_zero = read(service.handle().submit(ask(&prompt(20, 3), vec![impossible], 9)).unwrap()).unwrap();
    assert_eq!(only_zero[0].0, [0; 5]);
}

#[test]
fn a_bug_fails_what_is_open_and_everything_after() {
    let service = start("llama", Limits::default());
    let handle = service.handle();
    hold(&handle);
    let other = handle.submit(ask(&prompt(10, 1), vec![greedy()], 110)).unwrap();
    let bad = greedy().constrained(Box::new(Multiples(7, 5, true)));
    let panics = handle.submit(ask(&prompt(10, 2), vec![bad], 9)).unwrap();
    go_on(&handle);
    for stream in [panics, other] {
        let error = read(stream).unwrap_err();
        assert!(matches!(&error, Error::Stopped(why) if why == "a planted bug"), "{error}");
    }
    let after = handle.submit(ask(&prompt(10, 1), vec![greedy()], 3)).map(|_| ()).unwrap_err();
    assert!(matches!(after, Error::Stopped(_)), "{after}");
    assert_eq!(handle.stopped().as_deref(), Some("a planted bug"));
}

#[test]
fn stopping_waits_for_open_answers_within_reason() {
    let service = start("llama", Limits::default());
    let handle = service.handle();
    let open = handle.submit(ask(&prompt(10, 1), vec![greedy()], 20)).unwrap();
    service.stop(Duration::from_secs(30));
    assert_eq!(read(open).unwrap()[0].0.len(), 20);
    let after = handle.submit(ask(&prompt(10, 1), vec![greedy()], 3)).map(|_| ()).unwrap_err();
    assert!(matches!(after, Error::Stopped(_)), "{after}");
    let service = start("llama", Limits::default());
    hold(&service.handle());
    let never = service.handle().submit(ask(&prompt(10, 1), vec![greedy()], 20)).unwrap();
    service.stop(Duration::from_millis(10));
    assert!(matches!(read(never), Err(Error::Stopped(_))));
}

/// A service whose sessions go to `folder`.
fn with_sessions(name: &str, folder: &std::path::Path) -> Service {
    start(name, Limits { session_folder: Some(folder.into()), ..Limits::default() })
}

#[test]
fn a_saved_session_goes_on_in_another_process_without_reading() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama", "deepseek-v3"] {
        let p = prompt(40, 7);
        let service = with_sessions(name, folder.path());
        let whole = read(service.handle().submit(ask(&p, vec![greedy()], 30)).unwrap()).unwrap();
        service.stop(Duration::ZERO);
        let service = with_sessions(name, folder.path());
        let handle = service.handle();
        let mut first = ask(&p, vec![greedy()], 12);
        first.session = Some("talk".into());
        let begun = read(handle.submit(first).unwrap()).unwrap();
        assert_eq!(begun[0].0[..], whole[0].0[..12]);
        let saved = handle.save_session("talk").unwrap();
        assert_eq!((saved.tokens, saved.cached_tokens), (52, 51));
        // Stopping saves too.
        service.stop(Duration::from_secs(5));
        let service = with_sessions(name, folder.path());
        let handle = service.handle();
        assert_eq!(handle.sessions().unwrap()[0].tokens, 0, "on disk only");
        let restored = handle.restore_session("talk").unwrap();
        assert_eq!(
            (restored.tokens, restored.cached_tokens, restored.file_bytes),
            (52, 51, saved.file_bytes)
        );
        let tokens = handle.session_tokens("talk").unwrap();
        let on = read(handle.submit(ask(&tokens, vec![greedy()], 18)).unwrap()).unwrap();
        assert_eq!(on[0].0[..], whole[0].0[12..], "{name}");
        let stats = on[0].1.unwrap().1;
        assert_eq!((stats.prefilled, stats.reused), (0, 52), "{name}");
        assert_eq!(handle.metrics().prefill_tokens, 0);
        assert_eq!(handle.delete_session("talk").unwrap().tokens, 52);
        assert!(handle.sessions().unwrap().is_empty());
        let gone = handle.restore_session("talk").unwrap_err().to_string();
        assert!(gone.contains("session"), "{gone}");
    }
}

#[test]
fn a_session_that_is_not_whole_is_refused_and_the_old_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let service = with_sessions("llama", folder.path());
    let handle = service.handle();
    let mut submit = ask(&prompt(40, 7), vec![greedy()], 5);
    submit.session = Some("a.b-c_1".into());
    read(handle.submit(submit).unwrap()).unwrap();
    handle.save_session("a.b-c_1").unwrap();
    let file = folder.path().join("a.b-c_1.session");
    let good = std::fs::read(&file).unwrap();
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&file, bytes).unwrap();
        let error = handle.restore_session("a.b-c_1").unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    for cut in [0, 7, 15, 40, good.len() / 2, good.len() - 1] {
        refused(&good[..cut], "a.b-c_1.session");
    }
    for at in (0..good.len()).step_by(good.len() / 97 + 1) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        refused(&bad, "a.b-c_1.session");
    }
    let mut longer = good.clone();
    longer.push(0);
    refused(&longer, "length");
    std::fs::write(&file, &good).unwrap();
    assert_eq!(handle.restore_session("a.b-c_1").unwrap().cached_tokens, 44);
    // Another model's.
    let other = with_sessions("qwen2", folder.path());
    let error = other.handle().restore_session("a.b-c_1").unwrap_err().to_string();
    assert!(error.contains("model: expected"), "{error}");
    // What a killed process left half written is swept and never read.
    let half = folder.path().join(".a.b-c_1.session.4242.part");
    std::fs::write(&half, &good[..good.len() / 3]).unwrap();
    drop(service);
    let service = with_sessions("llama", folder.path());
    assert_eq!(service.handle().restore_session("a.b-c_1").unwrap().cached_tokens, 44);
    assert!(!half.exists());
    for name in ["", "..", "a/b", ".hidden", "ä", &"x".repeat(65)] {
        assert!(service.handle().save_session(name).is_err(), "{name:?}");
    }
    let mut submit = ask(&prompt(4, 7), vec![greedy()], 1);
    submit.session = Some("../up".into());
    assert!(service.handle().submit(submit).is_err());
    drop(service);
    let none = start("llama", Limits::default());
    let error = none.handle().restore_session("x").unwrap_err().to_string();
    assert!(error.contains("session folder"), "{error}");
}
