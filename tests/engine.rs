//! Sequences through the engine: the same tokens alone, in company, over a reused prefix; pages come back.

use crate::support::data;
use tegu::app::{self, App, Options};
use tegu::engine::{Budget, Done, Engine, EvalOptions, Event, Request, SeqId};
use tegu::sample::{SampleParams, Sampler};

fn open(name: &str, context: usize, sequences: usize) -> App {
    let mut o = Options::new(data().join("oracles").join(name));
    (o.context_tokens, o.sequences, o.threads) = (context, sequences, 2);
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

fn request(prompt: &[u32], max_new: usize) -> Request {
    let sampler = Sampler::new(SampleParams::greedy()).unwrap();
    Request::new(prompt.to_vec(), sampler, max_new, vec![])
}

/// Steps until nothing is left to do; gives each sequence's tokens and how it ended.
fn finish(engine: &mut Engine, budget: &Budget, ids: &[SeqId]) -> Vec<(Vec<u32>, Option<Done>)> {
    let mut out = vec![(vec![], None); ids.len()];
    for _ in 0..10_000 {
        let events = engine.step(budget).unwrap();
        if events.is_empty() {
            return out;
        }
        for e in events {
            let at = |seq| ids.iter().position(|&i| i == seq).unwrap();
            match e {
                Event::Token { seq, sampled } => out[at(seq)].0.push(sampled.token),
                Event::Done { seq, why } => out[at(seq)].1 = Some(why),
                Event::Prefilled { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    panic!("the engine never rests");
}

fn prompt(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * 7919 + seed * 104_729 + i * i * 31) % 380).collect()
}

#[test]
fn generation_follows_the_logits() {
    for name in ["llama", "deepseek-v3"] {
        let mut app = open(name, 128, 1);
        let p = prompt(20, 1);
        let id = app.engine.open(request(&p, 12), None).unwrap();
        let (tokens, why) = finish(&mut app.engine, &Budget::default(), &[id]).remove(0);
        assert_eq!((tokens.len(), why), (12, Some(Done::Length)), "{name}");
        app.engine.close(id);
        // Each token is the likeliest after the text before it. Prompt and answer may be absorbed differently, so
        // that the comparison is of choices, not of bits.
        let all: Vec<u32> = p.iter().chain(&tokens).copied().collect();
        let vocab = app.engine.hyper().vocab;
        let mut logits = vec![];
        let collect = &mut |c: tegu::engine::EvalChunk| {
            logits.extend_from_slice(c.logits);
            Ok(())
        };
        app.engine.eval(&all, &EvalOptions::default(), collect).unwrap();
        for (i, &t) in tokens.iter().enumerate() {
            let row = &logits[(p.len() + i - 1) * vocab..][..vocab];
            assert_eq!(tegu::sample::argmax(row), t, "{name} token {i}");
        }
    }
}

#[test]
fn company_changes_no_token() {
    for name in ["llama", "qwen3-moe", "deepseek-v2"] {
        let mut app = open(name, 128, 5);
        let prompts: Vec<Vec<u32>> = (0..5).map(|s| prompt(10 + 9 * s, s)).collect();
        let alone: Vec<_> = prompts
            .iter()
            .map(|p| {
                let id = app.engine.open(request(p, 16), None).unwrap();
                let out = finish(&mut app.engine, &Budget::default(), &[id]).remove(0);
                app.engine.close(id);
                out
            })
            .collect();
        for chunk in [512, 7] {
            let budget = Budget { prefill_chunk: chunk, ..Budget::default() };
            let ids: Vec<_> =
                prompts.iter().map(|p| app.engine.open(request(p, 16), None).unwrap()).collect();
            assert_eq!(finish(&mut app.engine, &budget, &ids), alone, "{name} chunk {chunk}");
            ids.into_iter().for_each(|id| app.engine.close(id));
        }
    }
}

#[test]
fn a_reused_prefix_is_not_read_again() {
    let mut app = open("llama", 128, 2);
    let first = prompt(40, 3);
    let id = app.engine.open(request(&first, 8), None).unwrap();
    let (answer, _) = finish(&mut app.engine, &Budget::default(), &[id]).remove(0);
    let next: Vec<u32> = first.iter().chain(&answer[..7]).copied().chain(prompt(9, 4)).collect();
    let again = app.engine.open(request(&next, 8), Some(id)).unwrap();
    let (reused, _) = finish(&mut app.engine, &Budget::default(), &[again]).remove(0);
    let stats = app.engine.stats(again).unwrap();
    assert_eq!((stats.reused, stats.prefilled), (47, 9));
    app.engine.close(again);
    let fresh = app.engine.open(request(&next, 8), None).unwrap();
    let (read, _) = finish(&mut app.engine, &Budget::default(), &[fresh]).remove(0);
    assert_eq!(reused, read);
}

#[test]
fn limits_are_said_and_pages_come_back() {
    let mut app = open("llama", 64, 1);
    let long = app.engine.open(request(&prompt(64, 1), 4), None).map(|_| ()).unwrap_err().to_string();
    assert!(long.contains("context tokens: needs 65, has 64"), "{long}");
    let none = app.engine.open(request(&[], 4), None).map(|_| ()).unwrap_err().to_string();
    assert!(none.contains("at least one token"), "{none}");
    let foreign = app.engine.open(request(&[384], 4), None).map(|_| ()).unwrap_err().to_string();
    assert!(foreign.contains("below the vocabulary's 384"), "{foreign}");
    for round in 0..3 {
        let id = app.engine.open(request(&prompt(50, 2), 100), None).unwrap();
        let (tokens, why) = finish(&mut app.engine, &Budget::default(), &[id]).remove(0);
        assert_eq!(why, Some(Done::Context), "round {round}");
        assert_eq!(tokens.len(), 15, "14 that fit and one that need not");
        app.engine.close(id);
    }
    let paused = Budget { pause: true, ..Budget::default() };
    let id = app.engine.open(request(&prompt(5, 2), 1), None).unwrap();
    assert!(app.engine.step(&paused).unwrap().is_empty());
    app.engine.close(id);
    assert!(app.engine.step(&Budget::default()).unwrap().is_empty());
}
