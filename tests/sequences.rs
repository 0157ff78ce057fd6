//! What sequences share and what they take from one another: prefixes, pages, the machine. None of it may show in a token.

use crate::support::data;
use tegu::app::{self, App, Options};
use tegu::backend::{KvType, MlaOrder};
use tegu::engine::{Budget, Class, Done, Engine, EvalChunk, EvalOptions, Event, Request, SeqId};
use tegu::sample::{SampleParams, Sampler};

/// A small model with a pool of `pages` times 32 tokens.
pub fn open(name: &str, context: usize, sequences: usize, mla: Option<MlaOrder>) -> App {
    let mut o = Options::new(data().join("oracles").join(name));
    (o.context_tokens, o.sequences, o.threads, o.mla) = (context, sequences, 2, mla);
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

pub fn request(prompt: &[u32], max_new: usize, class: Class) -> Request {
    let sampler = Sampler::new(SampleParams::greedy()).unwrap();
    let mut r = Request::new(prompt.to_vec(), sampler, max_new, vec![]);
    (r.class, r.prefix) = (class, true);
    r
}

fn prompt(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * 7919 + seed * 104_729 + i * i * 31) % 380).collect()
}

/// Steps until nothing is left to do, adding tokens to `out`.
fn finish(engine: &mut Engine, ids: &[SeqId], out: &mut [Vec<u32>]) {
    for _ in 0..20_000 {
        let events = engine.step(&Budget::default()).unwrap();
        if events.is_empty() {
            return;
        }
        collect(events, ids, out);
    }
    panic!("the engine never rests");
}

fn collect(events: Vec<Event>, ids: &[SeqId], out: &mut [Vec<u32>]) {
    for e in events {
        if let Event::Token { seq, sampled } = e {
            out[ids.iter().position(|&i| i == seq).unwrap()].push(sampled.token);
        }
    }
}

/// One request by itself; closes it.
pub fn alone(engine: &mut Engine, r: Request) -> (Vec<u32>, usize, usize) {
    let id = engine.open(r, None).unwrap();
    let mut out = vec![vec![]];
    finish(engine, &[id], &mut out);
    let stats = engine.stats(id).unwrap();
    engine.close(id);
    (out.remove(0), stats.reused, stats.prefilled)
}

/// The same without anything cached.
pub fn fresh(name: &str, mla: Option<MlaOrder>, prompt: &[u32], max_new: usize) -> Vec<u32> {
    let mut app = open(name, 256, 1, mla);
    alone(&mut app.engine, request(prompt, max_new, Class::Interactive)).0
}

#[test]
fn a_shared_prefix_is_read_once() {
    for name in ["llama", "qwen3-moe"] {
        let mut app = open(name, 256, 4, None);
        let system = prompt(100, 1);
        let with = |seed, n| -> Vec<u32> { system.iter().copied().chain(prompt(n, seed)).collect() };
        let (a, b) = (with(2, 20), with(3, 9));
        let (first, reused, read) = alone(&mut app.engine, request(&a, 12, Class::Interactive));
        assert_eq!((reused, read), (0, 120), "{name}");
        assert_eq!(first, fresh(name, None, &a, 12));
        let (second, reused, read) = alone(&mut app.engine, request(&b, 12, Class::Interactive));
        assert_eq!((reused, read), (100, 9), "{name}: what is shared, to the token");
        assert_eq!(second, fresh(name, None, &b, 12), "{name}");
        assert!(app.engine.cache_counters().copied > 0);
        // A conversation goes on: prompt and answer are there, and only the new turn is read.
        let next: Vec<u32> = a.iter().chain(&first).copied().chain(prompt(7, 5)).collect();
        let (third, reused, read) = alone(&mut app.engine, request(&next, 12, Class::Interactive));
        // The last token of an answer was given and never read.
        assert_eq!((reused, read), (120 + 11, 8), "{name}");
        assert_eq!(third, fresh(name, None, &next, 12), "{name}");
        // The first again: all of it is there.
        let (again, reused, read) = alone(&mut app.engine, request(&a, 12, Class::Interactive));
        assert_eq!((again, reused, read), (first, 120, 0), "{name}");
    }
}

#[test]
fn requests_at_once_share_what_is_ready() {
    let mut app = open("llama", 256, 8, None);
    let system = prompt(96, 1);
    let warm = alone(&mut app.engine, request(&system, 1, Class::Interactive));
    assert_eq!(warm.2, 96);
    let prompts: Vec<Vec<u32>> =
        (0..6).map(|s| system.iter().copied().chain(prompt(10 + s, s)).collect()).collect();
    let ids: Vec<_> =
        prompts.iter().map(|p| app.engine.open(request(p, 40, Class::Normal), None).unwrap()).collect();
    let mut out = vec![vec![]; 6];
    finish(&mut app.engine, &ids, &mut out);
    for ((id, p), tokens) in ids.iter().zip(&prompts).zip(&out) {
        assert!(app.engine.stats(*id).unwrap().reused >= 96);
        assert_eq!(*tokens, fresh("llama", None, p, 40));
    }
    // Six sequences of five pages hold three of them together.
    assert!(app.engine.pool().used_pages() <= 3 + 6 * 3, "{}", app.engine.pool().used_pages());
    ids.into_iter().for_each(|id| app.engine.close(id));
}

#[test]
fn who_is_thrown_out_comes_back_the_same() {
    for (name, mla) in [
        ("llama", None),
        ("deepseek-v3", Some(MlaOrder::Materialized)),
        ("deepseek-v2", Some(MlaOrder::Absorbed)),
    ] {
        for spill in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let mut app = open(name, 128, 1, mla);
            if spill {
                app.engine.spill_to(folder.path(), 1 << 30).unwrap();
            }
            let (long, urgent) = (prompt(50, 1), prompt(40, 2));
            let want = [fresh(name, mla, &long, 50), fresh(name, mla, &urgent, 50)];
            let first = app.engine.open(request(&long, 50, Class::Background), None).unwrap();
            let mut out = vec![vec![], vec![]];
            while out[0].len() < 20 {
                let events = app.engine.step(&Budget::default()).unwrap();
                collect(events, &[first], &mut out);
            }
            // Four pages in all: three are taken, and two and later three are wanted.
            let second = app.engine.open(request(&urgent, 50, Class::Interactive), None).unwrap();
            finish(&mut app.engine, &[first, second], &mut out);
            let counters = app.engine.cache_counters();
            assert!(counters.preempted > 0, "{name} {spill}: {counters:?}");
            assert_eq!(spill, counters.spilled > 0 && counters.fetched > 0, "{name}: {counters:?}");
            assert_eq!(out[..], want[..], "{name} spill {spill}");
            app.engine.close(first);
            app.engine.close(second);
        }
    }
}

#[test]
fn a_crowd_in_a_small_cache_says_what_each_says_alone() {
    for spill in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut app = open("llama", 128, 2, None);
        if spill {
            // Too small for all: what is coldest is forgotten.
            app.engine.spill_to(folder.path(), 5 * app.engine.page_bytes() as u64).unwrap();
        }
        let class = |s| [Class::Interactive, Class::Normal, Class::Background][s as usize % 3];
        let prompts: Vec<Vec<u32>> = (0..9).map(|s| prompt(20 + 7 * s, s)).collect();
        let ids: Vec<_> = prompts
            .iter()
            .zip(0u32..)
            .map(|(p, s)| app.engine.open(request(p, 40, class(s)), None).unwrap())
            .collect();
        let mut out = vec![vec![]; 9];
        finish(&mut app.engine, &ids, &mut out);
        for (p, tokens) in prompts.iter().zip(&out) {
            assert_eq!(*tokens, fresh("llama", None, p, 40));
        }
        ids.into_iter().for_each(|id| app.engine.close(id));
        // Everything that is still held is the tree's, and it can all go.
        app.engine.shrink(u64::MAX);
        assert_eq!((app.engine.pool().used_pages(), app.engine.cached_blocks().0), (0, 0));
    }
}

#[test]
fn a_full_context_moves_on_if_asked() {
    let mut app = open("llama", 64, 2, None);
    let p = prompt(20, 1);
    let mut sliding = request(&p, 200, Class::Interactive);
    sliding.slide = Some(4);
    let id = app.engine.open(sliding, None).unwrap();
    let mut out = vec![vec![]];
    finish(&mut app.engine, &[id], &mut out);
    app.engine.close(id);
    assert_eq!(out[0].len(), 200);
    // It says what a sequence says that begins with what was left.
    let all: Vec<u32> = p.iter().chain(&out[0]).copied().collect();
    let full = 65;
    let drop = (full - 4usize).div_ceil(2);
    let left: Vec<u32> = all[..4].iter().chain(&all[4 + drop..full]).copied().collect();
    assert_eq!(fresh("llama", None, &left, 10), all[full..full + 10]);
    // Latent attention does not offer it.
    let mut app = open("deepseek-v2", 64, 1, None);
    let mut sliding = request(&p, 200, Class::Interactive);
    sliding.slide = Some(4);
    let refused = app.engine.open(sliding, None).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("context_shift"), "{refused}");
}

#[test]
fn the_budget_holds_in_every_step() {
    let mut app = open("llama", 256, 8, None);
    let ids: Vec<_> = (0..7)
        .map(|s| app.engine.open(request(&prompt(60 + s, s), 20, Class::Normal), None).unwrap())
        .collect();
    let of = |seq: SeqId| ids.iter().position(|&i| i == seq).unwrap();
    let budget = Budget { max_batch: 2, prefill_chunk: 16, pause: false };
    let mut read = [0; 7];
    let mut done = 0;
    while done < 7 {
        let events = app.engine.step(&budget).unwrap();
        // A prompt that is read but for its last token generates from that: one row of the batch, and none of the chunk. How
        // many are, and how many ends of prompts a chunk has, depends on who waited how long.
        let before = read;
        let generates = |at: usize| before[at] + 1 >= 60 + at;
        let (mut tokens, mut rows) = (0, 0);
        for e in events {
            match e {
                Event::Prefilled { seq, tokens } => {
                    let at = of(seq);
                    read[at] = tokens;
                    rows += if generates(at) { 0 } else { tokens - before[at] };
                }
                Event::Token { seq, .. } => tokens += usize::from(generates(of(seq))),
                Event::Done { why, .. } => {
                    assert_eq!(why, Done::Length);
                    done += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(rows <= 16 && tokens <= 2, "{rows} rows, {tokens} tokens");
    }
}

#[test]
fn a_newcomer_waits_for_no_one_of_lower_class() {
    let mut app = open("llama", 256, 8, None);
    app.engine.set_shared(true);
    let busy: Vec<_> = (0..4)
        .map(|s| app.engine.open(request(&prompt(10, s), 200, Class::Background), None).unwrap())
        .collect();
    let bulk = app.engine.open(request(&prompt(250, 9), 4, Class::Normal), None).unwrap();
    let budget = Budget { prefill_chunk: 32, ..Budget::default() };
    let mut read = 0;
    for _ in 0..6 {
        for e in app.engine.step(&budget).unwrap() {
            if let Event::Prefilled { seq, tokens } = e
                && seq == bulk
            {
                assert!(tokens - read <= 32);
                read = tokens;
            }
        }
    }
    assert!(read > 0 && read < 250, "{read}");
    let urgent = app.engine.open(request(&prompt(128, 11), 3, Class::Interactive), None).unwrap();
    let events = app.engine.step(&Budget::default()).unwrap();
    // The very next step reads all of it, and nothing else.
    assert!(events.iter().any(|e| matches!(e, Event::Token { seq, .. } if *seq == urgent)), "{events:?}");
    assert!(!events.iter().any(|e| matches!(e, Event::Prefilled { seq, .. } if *seq == bulk)));
    assert!(!events.iter().any(|e| matches!(e, Event::Token { seq, .. } if busy.contains(seq))));
}

#[test]
fn two_clients_share_whatever_each_asks_for() {
    let mut app = open("llama", 256, 16, None);
    let ask = |engine: &mut Engine, client: &str, seed: u32| {
        let mut r = request(&prompt(12, seed), 60, Class::Normal);
        r.client = client.into();
        engine.open(r, None).unwrap()
    };
    let greedy: Vec<_> = (0..12).map(|s| ask(&mut app.engine, "greedy", s)).collect();
    let mut modest = ask(&mut app.engine, "modest", 100);
    let mut got = [0, 0];
    for seed in 101.. {
        let events = app.engine.step(&Budget::default()).unwrap();
        for e in events {
            match e {
                Event::Token { seq, .. } => got[usize::from(seq == modest)] += 1,
                Event::Done { seq, .. } if seq == modest => {
                    app.engine.close(modest);
                    modest = ask(&mut app.engine, "modest", seed);
                }
                _ => {}
            }
        }
        if greedy.iter().all(|g| app.engine.stats(*g).unwrap().generated == 60) {
            break;
        }
    }
    assert_eq!(got[0], 12 * 60);
    assert!(got[1] * 10 >= (got[0] + got[1]) * 4, "{got:?}");
}

/// The trained demo model with a cache type.
fn demo(kv: KvType) -> App {
    let mut o = Options::new(data().join("tinymoe-demo.gguf"));
    (o.context_tokens, o.sequences, o.threads, o.kv) = (2048, 2, 2, Some(kv));
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

/// Tokens of held-out text.
fn held_out() -> Vec<u32> {
    let text = std::fs::read_to_string(data().join("text/slice.ids.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(json["parse_special"].clone()).unwrap()
}

#[test]
fn int8_changes_perplexity_by_less_than_half_a_percent() {
    let ids = held_out();
    let ppl = |kv| {
        let mut app = demo(kv);
        let (vocab, mut nll) = (app.engine.hyper().vocab, 0.0);
        let score = &mut |c: EvalChunk| {
            for (i, row) in c.logits.chunks(vocab).enumerate() {
                let Some(&next) = ids.get(c.logits_from + i + 1) else { break };
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
                nll += sum.ln() - f64::from(row[next as usize] - max);
            }
            Ok(())
        };
        app.engine.eval(&ids, &EvalOptions::default(), score).unwrap();
        (nll / (ids.len() - 1) as f64).exp()
    };
    let (f16, int8) = (ppl(KvType::F16), ppl(KvType::Int8));
    assert!(f16 != int8 && (int8 / f16 - 1.0).abs() < 0.005, "{f16} {int8}");
}

#[test]
fn int8_is_the_same_however_it_is_split_and_saved() {
    let ids = held_out();
    let mut app = demo(KvType::Int8);
    let want = alone(&mut app.engine, request(&ids[..300], 20, Class::Normal)).0;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x");
    let all: Vec<u32> = ids[..300].iter().chain(&want).copied().collect();
    assert_eq!(app.engine.save_session(&file, &all).unwrap().0, 319);
    app.engine.shrink(u64::MAX);
    assert_eq!(app.engine.load_session(&file).unwrap(), (all, 319));
    let again = alone(&mut app.engine, request(&ids[..300], 20, Class::Normal));
    assert_eq!((again.0, again.2), (want.clone(), 0));
    let mut app = demo(KvType::Int8);
    let id = app.engine.open(request(&ids[..300], 20, Class::Normal), None).unwrap();
    let mut out = vec![vec![]];
    loop {
        let events = app.engine.step(&Budget { prefill_chunk: 37, ..Budget::default() }).unwrap();
        if events.is_empty() {
            break;
        }
        collect(events, &[id], &mut out);
    }
    assert_eq!(out[0], want);
    // Another type's session is refused by name.
    let error = demo(KvType::F16).engine.load_session(&file).unwrap_err().to_string();
    assert!(error.contains("kv: expected f16, found int8"), "{error}");
}

#[test]
fn idle_pages_go_back_to_the_system_and_the_cache_goes_on() {
    let ids = held_out();
    let mut app = demo(KvType::F16);
    let want = alone(&mut app.engine, request(&ids[..1000], 8, Class::Normal)).0;
    let page = app.engine.page_bytes() as u64;
    let resident = app.engine.pool().resident_pages();
    assert_eq!(resident, 32);
    let id = app.engine.open(request(&ids[..200], 50, Class::Normal), None).unwrap();
    let events = app.engine.step(&Budget::default()).unwrap();
    assert!(!events.is_empty());
    // What a sequence uses stays; what only might be used again goes.
    let freed = app.engine.shrink(u64::MAX);
    assert!(freed >= 20 * page && freed <= 32 * page, "{freed} of {}", 32 * page);
    assert!(app.engine.pool().resident_pages() < resident);
    let mut out = vec![vec![]];
    finish(&mut app.engine, &[id], &mut out);
    app.engine.close(id);
    assert_eq!(out[0].len() + usize::from(events.iter().any(|e| matches!(e, Event::Token { .. }))), 50);
    assert_eq!(alone(&mut app.engine, request(&ids[..1000], 8, Class::Normal)).0, want);
    while !app.engine.allow_growth() {}
    assert_eq!(app.engine.pool().cap(), app.engine.pool().len());
}
