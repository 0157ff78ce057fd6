use super::*;
use crate::backend::{Backend, Counters, KvType, Pulse, StepOutput, StepPlan, serial_bytes};
use crate::engine::service::{Limits, OnPanic, Service, Submit, Work};
use crate::engine::{Class, Engine};
use crate::kv::{PAGE_TOKENS, PageId};
use crate::model::{self, Hyper};
use crate::sample::{SampleParams, Sampler};
use crate::units::Result;
use crate::weights::Source;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const WORKS: u8 = 0;
/// A step that lasts, layer by layer.
const LAYERS: u8 = 1;
const STANDS_STILL: u8 = 2;

/// A backend whose every token is number 5, and whose steps last as they are told.
struct StandIn {
    hyper: Hyper,
    how: Arc<AtomicU8>,
    pulse: Arc<Pulse>,
}

impl Backend for StandIn {
    fn step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        while self.how.load(Ordering::SeqCst) != WORKS {
            if self.how.load(Ordering::SeqCst) == LAYERS {
                self.pulse.beat();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        out.logits.clear();
        out.logits.resize(plan.runs.len() * self.hyper.vocab, 0.0);
        out.logits.iter_mut().skip(5).step_by(self.hyper.vocab).for_each(|l| *l = 1.0);
        Ok(())
    }
    fn rows_max(&self) -> usize {
        64
    }
    fn page_bytes(&self) -> usize {
        serial_bytes(&self.hyper, KvType::F16, PAGE_TOKENS)
    }
    fn kv_type(&self) -> KvType {
        KvType::F16
    }
    fn copy_page(&mut self, _: PageId, _: PageId) -> Result<()> {
        Ok(())
    }
    fn export(&self, _: &[PageId], tokens: usize, out: &mut Vec<u8>) -> Result<()> {
        out.resize(out.len() + serial_bytes(&self.hyper, KvType::F16, tokens), 0);
        Ok(())
    }
    fn import(&mut self, _: &[PageId], _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        self.pulse = pulse;
    }
    fn counters(&self) -> Counters {
        Counters::default()
    }
}

#[test]
fn pings_end_with_the_engine_and_not_with_its_work() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracles/llama");
    let hyper = model::bind(&Source::open(&path).unwrap()).unwrap().hyper;
    let how = Arc::new(AtomicU8::new(WORKS));
    let backend = StandIn { hyper: hyper.clone(), how: how.clone(), pulse: Arc::default() };
    let engine = Engine::new(Box::new(backend), hyper, 8, 128, None);
    let service = Service::start(engine, Limits::default(), OnPanic::Poison).unwrap();
    let handle = service.handle();
    // What beats is well for as long as it beats; a machine that stands still for seconds is no engine that does.
    let mut watchdog = Watchdog::new(Duration::from_secs(60));
    let mut stays_well = |what: &str| {
        let mut seen = handle.beats();
        let mut news = 0;
        while news < 4 {
            std::thread::sleep(Duration::from_millis(5));
            let beats = handle.beats();
            news += u32::from(beats != std::mem::replace(&mut seen, beats));
            assert!(watchdog.is_well(Instant::now(), Some((1, beats))), "{what}");
        }
    };
    stays_well("idle");
    how.store(LAYERS, Ordering::SeqCst);
    let sampler = Sampler::new(SampleParams::greedy()).unwrap();
    let submit = Submit {
        prompt: vec![3, 4],
        work: Work::Generate { samplers: vec![sampler], max_new: 3, end_ids: vec![] },
        class: Class::Interactive,
        deadline: None,
        client: String::new(),
        slide: None,
        session: None,
    };
    let mut stream = handle.submit(submit).unwrap();
    stays_well("a long step");
    how.store(STANDS_STILL, Ordering::SeqCst);
    // As a real one that has less patience: it sees the last beats, and then none.
    let mut strict = Watchdog::new(Duration::from_millis(1500));
    let mut is_well = || strict.is_well(Instant::now(), Some((1, handle.beats())));
    let began = Instant::now();
    while is_well() {
        assert!(began.elapsed() < Duration::from_secs(60), "a step that stands still");
        std::thread::sleep(Duration::from_millis(5));
    }
    how.store(WORKS, Ordering::SeqCst);
    while stream.next().is_some() {}
    stays_well("it goes on");
    assert!(is_well(), "it goes on");
}

#[test]
fn an_engine_has_its_time_from_when_it_is_first_seen() {
    let began = Instant::now();
    let at = |s: u64| began + Duration::from_secs(s);
    let mut w = Watchdog::new(Duration::from_secs(60));
    assert!(w.is_well(at(0), None) && w.is_well(at(500), None), "no model, nothing to watch");
    assert!(w.is_well(at(1000), Some((1, 7))));
    assert!(w.is_well(at(1059), Some((1, 7))));
    assert!(!w.is_well(at(1060), Some((1, 7))) && !w.is_well(at(1061), Some((1, 7))));
    assert!(w.is_well(at(1062), Some((1, 8))), "a beat");
    assert!(w.is_well(at(1121), Some((1, 8))));
    assert!(w.is_well(at(1130), Some((2, 8))), "another engine, by chance at the same count");
    assert!(w.is_well(at(1189), Some((2, 8))) && !w.is_well(at(1190), Some((2, 8))));
    assert!(w.is_well(at(1191), None));
}
