//! Sessions that one backend writes and the other reads, through their files; skipped where there is no GPU.

use crate::cuda::{gpu, open};
use crate::support::data;
use std::path::Path;
use tegu::app::{App, Choice};
use tegu::backend::KvType;
use tegu::engine::{Budget, Event, Request};
use tegu::model::Mask;
use tegu::sample::{SampleParams, Sampler};

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * 7919 + i * i * 31) % 380).collect()
}

/// Greedy tokens after `prompt`, and how many of the prompt's were read rather than found.
fn answer(app: &mut App, prompt: &[u32], n: usize) -> (Vec<u32>, usize) {
    let sampler = Sampler::new(SampleParams::greedy()).unwrap();
    let mut r = Request::new(prompt.to_vec(), sampler, n, vec![]);
    r.prefix = true;
    let id = app.engine.open(r, None).unwrap();
    let mut out = Vec::new();
    loop {
        let events = app.engine.step(&Budget::default()).unwrap();
        if events.is_empty() {
            break;
        }
        out.extend(events.into_iter().filter_map(|e| match e {
            Event::Token { sampled, .. } => Some(sampled.token),
            _ => None,
        }));
    }
    let read = app.engine.stats(id).unwrap().prefilled;
    app.engine.close(id);
    (out, read)
}

/// Writes on one backend, reads on the other: nothing is read again, what is written again is the same file, and the
/// conversation goes on as the writer's own would.
fn cross(path: &Path, kv: KvType, mask: Option<Mask>, from: Choice, to: Choice) {
    let what = format!("{} {} {mask:?} from {from:?} to {to:?}", path.display(), kv.name());
    let folder = tempfile::tempdir().unwrap();
    let (file, again) = (folder.path().join("a"), folder.path().join("b"));
    let set = |o: &mut tegu::app::Options| (o.kv, o.mask) = (Some(kv), mask);
    let (mut writer, mut reader) = (open(path, from, set), open(path, to, set));
    let start = prompt(100);
    let (first, read) = answer(&mut writer, &start, 20);
    assert_eq!((first.len(), read), (20, 100), "{what}");
    let all: Vec<u32> = start.iter().chain(&first).copied().collect();
    // The last token of an answer was given and never read.
    assert_eq!(writer.engine.save_session(&file, &all).unwrap().0, 119, "{what}");
    assert_eq!(reader.engine.load_session(&file).unwrap(), (all.clone(), 119), "{what}");
    reader.engine.save_session(&again, &all).unwrap();
    assert!(std::fs::read(&file).unwrap() == std::fs::read(&again).unwrap(), "{what}: other bytes");
    // One more token than is there: a row like those that generate, and nothing of the prompt is read.
    let (on, read) = answer(&mut reader, &all, 8);
    assert_eq!((on.len(), read), (8, 0), "{what}");
    let (own, _) = answer(&mut writer, &all, 8);
    println!("{what}: {} of 8 tokens are the writer's", on.iter().zip(&own).filter(|(a, b)| a == b).count());
    // Random models have near ties now and then, but not at once.
    assert_eq!(on[0], own[0], "{what}");
}

#[test]
fn sessions_cross_between_the_backends() {
    if !gpu("sessions_cross_between_the_backends") {
        return;
    }
    let models = ["tinymoe-demo.gguf", "oracles/llama", "oracles/deepseek-v2"].map(|m| data().join(m));
    for path in &models {
        for kv in [KvType::F32, KvType::F16, KvType::Int8] {
            cross(path, kv, None, Choice::Cuda, Choice::Cpu);
            cross(path, kv, None, Choice::Cpu, Choice::Cuda);
        }
    }
    let strided = Some(Mask::Strided { stride: 3 });
    cross(&models[1], KvType::Int8, strided, Choice::Cuda, Choice::Cpu);
    cross(&models[2], KvType::Int8, strided, Choice::Cpu, Choice::Cuda);
}
