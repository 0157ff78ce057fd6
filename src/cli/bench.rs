//! `tegu bench`: tokens a second of prefill and decode.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::args::{Common, Load, useless};
use super::bench_report::{Case, Measured, Phase, Report, cases, spread};
use super::load::ReadBytes;
use super::{bench_cuda, bench_kernels, load, out, resolve};
use crate::app;
use crate::app::power::{EnergyWatch, Site};
use crate::backend::cpu::Isa;
use crate::backend::cpu::kernels::bench::{self as kernels, KernelBench, ReadRoof};
use crate::config::Config;
use crate::engine::{Budget, Event, Request, SeqId};
use crate::format::codec::{Codec, TABLE};
use crate::limits::THREADS_MAX;
use crate::observe::{Progress, Unit};
use crate::power::types as power;
use crate::sample::{SampleParams, Sampler};
use crate::units::{Bytes, Error, Result, TokenId};

/// Arguments of `tegu bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model file or folder [default: $TEGU_MODEL, then the settings, then the bundled demo]
    #[arg(value_name = "MODEL", conflicts_with = "model_flag")]
    model: Option<PathBuf>,
    /// Prompt lengths; 0: no prefill test
    #[arg(short = 'p', long, visible_alias = "n-prompt", value_name = "N,…", value_delimiter = ',')]
    #[arg(default_value = "512")]
    pp: Vec<usize>,
    /// Numbers of generated tokens; 0: no decode test
    #[arg(short = 'n', long, visible_alias = "n-gen", value_name = "N,…", value_delimiter = ',')]
    #[arg(default_value = "128")]
    tg: Vec<usize>,
    /// Tokens in the cache before the test
    #[arg(
        short,
        long,
        visible_alias = "n-depth",
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0"
    )]
    depth: Vec<usize>,
    /// Sequences decoded together
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Repetitions of each test, after one that warms up
    #[arg(short, long, visible_alias = "repetitions", value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    reps: u16,
    /// Measure the matrix products of these codecs (all, if none is named) on random weights, and no model
    #[arg(long, value_name = "CODEC,…", value_delimiter = ',', num_args = 0.., require_equals = true)]
    #[arg(value_parser = codec, conflicts_with_all = ["model", "model_flag", "tg", "depth", "batch", "reps"])]
    #[arg(conflicts_with_all = ["kv", "expert_budget", "exact", "spin_us"])]
    kernels: Option<Vec<Codec>>,
    /// With --kernels --backend cuda: a picture of each kernel under the memory roof
    #[arg(long, value_name = "FILE", requires = "kernels", conflicts_with_all = ["model", "model_flag"])]
    svg: Option<PathBuf>,
    /// With --kernels: print what an earlier --json run on a GPU measured, on a machine without one
    #[arg(long, value_name = "FILE", requires = "kernels")]
    #[arg(conflicts_with_all = ["model", "model_flag", "pp", "roof_mib", "threads", "backend"])]
    recorded: Option<PathBuf>,
    /// Memory that is read to find the roof, and that --kernels works on; 0: no roof
    #[arg(long, value_name = "MIB", default_value_t = (kernels::WORKING_SET_BYTES >> 20) as u16)]
    roof_mib: u16,
    /// Tell the GPU that it lacks this share of the routed experts that are asked for, though it has them all: what
    /// streaming costs apart from reading and copying
    #[arg(long, value_name = "SHARE", conflicts_with_all = ["kernels", "expert_budget"], value_parser = share)]
    fake_missing: Option<f32>,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Examples:
  tegu bench
  tegu bench model.gguf --pp 512 --tg 128 --depth 0,4096 --batch 1,4,8 --threads 2 --json
  tegu bench --kernels=Q4_0,Q4_K --threads 2
  tegu bench --kernels=Q4_0 --backend cuda --json --svg roofline.svg

Roof: bytes a second that the threads read from memory and do nothing else: in turns with decode steps that take 20 ms or more,
each for at least as long as its step, as memory's speed changes from one moment to the next; for 0.4 s before and after a
repetition of shorter ones, which may work in a cache, and where a sensor tells the power, which would see both. Of roof: the bytes
of weights that the decode steps read (experts as counted), each once, over that. Of union: at a batch, those bytes a second over
batch 1's. J/token is there where a sensor tells the power, and says what it is of: a module's rails, or a GPU's board.";

/// Decode steps of at least this length take turns with reading the roof; shorter ones may work in a cache that it would empty.
const TURNS_STEP: Duration = Duration::from_millis(20);

/// Positions beyond the tests' own: the tokens by which sequences of a batch start one after another.
const SLACK: usize = 2;
const BATCH_MAX: usize = 256;

/// Runs the command.
pub fn run(args: &BenchArgs, common: &Common) -> Result<()> {
    let config = common.config(args.load.overrides()?)?;
    if let Some(only) = &args.kernels {
        return args.run_kernels(only, &config);
    }
    let model = resolve::model(args.model.as_deref().or(args.load.model_flag.as_deref()), &config)?;
    let cases = cases(&args.pp, &args.tg, &args.depth, &args.batch);
    let longest = cases.iter().map(|c| c.depth.saturating_add(c.tokens)).max().unwrap_or(0);
    let widest = args.batch.iter().copied().max().unwrap_or(1);
    if cases.is_empty() || !(1..=BATCH_MAX).contains(&widest) || args.batch.contains(&0) {
        let expected = format!("at least one test with batches from 1 to {BATCH_MAX}");
        return Err(Error::bad("command line", "--pp, --tg, --batch", expected, format!("{:?}", args.batch)));
    }
    let mut options = args.load.options(model, &config);
    options.fake_missing = args.fake_missing;
    options.context_tokens = longest.saturating_add(SLACK + widest);
    options.sequences = widest;
    options.rows_max = options.rows_max.max(widest);
    let opened = app::prepare(options)?;
    args.load.check(&opened)?;
    if args.fake_missing.is_some() && !opened.on_gpu() {
        return Err(Error::bad("command line", "--fake-missing", "a model on --backend cuda", "the CPU"));
    }
    let needs = longest + SLACK + widest;
    if needs > opened.plan.context_tokens {
        let has = format!("{} (the model's context)", opened.plan.context_tokens);
        return Err(Error::Limit { what: "context tokens".into(), needs: needs.to_string(), has });
    }
    let reads = ReadBytes::of(&opened);
    let (name, file_bytes) = (opened.source.path().to_owned(), opened.file_bytes());
    let loaded = load::load(opened)?;
    let mut app = loaded.app;
    let watch = EnergyWatch::start(Site::open(None)?.sensors());
    let roof = roof(args.roof_mib, &app)?;
    let progress = Progress::new("benchmark", cases.len() as u64 * (1 + args.reps as u64), Unit::Items);
    let mut measured = Vec::new();
    for case in cases {
        measured.push(
            Bench { app: &mut app, case, progress: &progress, watch: watch.as_ref(), roof: roof.as_ref() }
                .measure(args.reps.into(), &reads)?,
        );
    }
    drop(progress);
    let energy_method = watch.as_ref().map(EnergyWatch::method);
    // What the model took, without the roof's working set.
    let peak_bytes = load::peak_bytes().saturating_sub(roof.as_ref().map_or(0, ReadRoof::bytes) as u64);
    let roofs = roof.map_or(Vec::new(), |roof| roofs(&roof, app.threads, &measured));
    let report = Report {
        measured: &measured,
        roofs: &roofs,
        peak_bytes,
        file_bytes,
        kv_bytes: app.plan.kv_bytes,
        energy_method,
    };
    if !args.json {
        return out::Out::stdout().text(&report.text());
    }
    let mut object = json!({
        "model": out::path(&name),
        "threads": app.threads,
        "kernels": app.kernels,
        "exact": args.load.exact,
        "load_seconds": loaded.took.as_secs_f64(),
        "weights_bytes": app.plan.resident_bytes + app.plan.all_expert_bytes(),
        "weights_bytes_a_token": reads.step(reads.experts_a_row as f64),
    });
    report.add_to(&mut object);
    out::Out::stdout().json(&object)
}

/// The read roof's meter; `None` if it is not wanted, if there is no memory to spare for it, or on a GPU, of whose memory the
/// host's threads say nothing.
fn roof(mib: u16, app: &app::App) -> Result<Option<ReadRoof>> {
    let bytes = usize::from(mib) << 20;
    if bytes == 0 || Isa::from_name(&app.kernels).is_none() {
        return Ok(None);
    }
    // Twice, because a measurement must not push anything out.
    if app::available_bytes().is_some_and(|has| has < 2 * bytes as u64) {
        log::warn!("too little memory is free for the read roof, which takes {}", Bytes(bytes as u64));
        return Ok(None);
    }
    ReadRoof::new(app.threads, bytes).map(Some)
}

/// `(threads, bytes a second)` with one thread, and with all: the median of what stood beside the tests.
fn roofs(roof: &ReadRoof, threads: usize, measured: &[Measured]) -> Vec<(usize, f64)> {
    let beside: Vec<f64> = measured.iter().flat_map(|m| m.roofs.iter().copied()).collect();
    let all = if beside.is_empty() { roof.rate() } else { spread(&beside).1 };
    let mut roofs = vec![(1, roof.rate_of_one()), (threads, all)];
    roofs.dedup_by_key(|(n, _)| *n);
    roofs
}

/// A share of something.
fn share(text: &str) -> std::result::Result<f32, String> {
    let share = text.parse().ok().filter(|s| (0.0..=1.0).contains(s));
    share.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// A codec's name on the command line.
fn codec(name: &str) -> std::result::Result<Codec, String> {
    Codec::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = TABLE.iter().map(|i| i.name).collect();
        format!("expected one of {}", known.join(" "))
    })
}

impl BenchArgs {
    /// `--kernels`: a GPU's if one is asked for, else the CPU's.
    fn run_kernels(&self, only: &[Codec], config: &Config) -> Result<()> {
        if self.recorded.is_none() && config.text("backend") != "cuda" {
            // Beside a roof that the CPU's caches break through, a picture would say nothing.
            if self.svg.is_some() {
                return Err(useless("--svg", "--backend cuda or --recorded", "the CPU"));
            }
            return bench_kernels::run(self.kernel_options(only, config), self.json);
        }
        let prefill_rows = self.pp.iter().copied().max().unwrap_or(0).clamp(16, 2048);
        bench_cuda::run(only, prefill_rows, self.recorded.as_deref(), self.svg.as_deref(), self.json)
    }

    fn kernel_options<'a>(&self, only: &'a [Codec], config: &Config) -> KernelBench<'a> {
        let threads = match config.count("threads") as usize {
            0 => app::cores(),
            n => n.min(THREADS_MAX),
        };
        // Prefill's rows, as many as a chunk has at most.
        let prefill_rows = self.pp.iter().copied().max().unwrap_or(0).clamp(1, 512);
        let bytes = usize::from(self.roof_mib) << 20;
        KernelBench { threads, isa: Isa::best(), only, prefill_rows, bytes }
    }
}

/// One case on the engine.
struct Bench<'a> {
    app: &'a mut app::App,
    case: Case,
    progress: &'a Progress,
    /// The power meter, where there is one.
    watch: Option<&'a EnergyWatch>,
    /// What decode is held against.
    roof: Option<&'a ReadRoof>,
}

impl Bench<'_> {
    fn measure(&mut self, reps: usize, reads: &ReadBytes) -> Result<Measured> {
        let case = self.case;
        // The sequences' depth is read once; each repetition goes back to it.
        let mut open: Vec<SeqId> = Vec::new();
        for b in 0..case.batch {
            let seq = self.open(text(b, case.depth.max(1), self.vocab()), 0, None)?;
            self.drain()?;
            open.push(seq);
        }
        let (mut seconds, mut experts, mut steps) = (Vec::new(), 0, 0);
        let meter = self.roof.filter(|_| case.phase == Phase::Decode);
        let (mut roofs, mut roof_before) = (Vec::new(), None);
        // Whether the roof is read in turns with the steps: what warms up tells.
        let mut turns = false;
        // The phase that a case is counted as, and what it had taken before this case.
        let phase = match case.phase {
            Phase::Prefill => power::Phase::Prefill,
            Phase::Decode => power::Phase::Decode,
        };
        let mut before = None;
        for rep in 0..=reps {
            if rep == 1 {
                before = self.watch.map(|w| w.share(phase));
            }
            // Beside steps that it takes no turns with: before and after.
            let beside = meter.filter(|_| rep > 0 && !turns);
            if roof_before.is_none() {
                roof_before = beside.map(ReadRoof::rate);
            }
            let took = match case.phase {
                Phase::Prefill => self.prefill(&mut open[0], rep)?,
                Phase::Decode => {
                    let decoded = self.decode(&mut open, meter.filter(|_| rep > 0 && turns))?;
                    (experts, steps) = (experts + decoded.experts, steps + case.tokens);
                    roofs.extend(decoded.roof);
                    let long = decoded.seconds >= TURNS_STEP.as_secs_f64() * case.tokens as f64;
                    // Not where power is metered: a sensor is too slow to tell such turns apart.
                    turns |= rep == 0 && long && self.watch.is_none();
                    decoded.seconds
                }
            };
            if rep > 0 {
                seconds.push(took);
                let roof_after = beside.map(ReadRoof::rate);
                roofs.extend(roof_before.zip(roof_after).map(|(a, b)| (a + b) / 2.0));
                roof_before = roof_after;
            }
            self.progress.add(1);
        }
        let taken = self.watch.map(|w| w.share(phase)).zip(before);
        open.into_iter().for_each(|seq| self.app.engine.close(seq));
        let tokens = (case.tokens * case.batch * reps) as f64;
        let joules = taken.map(|(now, before)| (now.energy_mj - before.energy_mj) / 1e3 / tokens);
        let experts_a_step = match (experts, reads.experts_a_row, case.batch) {
            // A backend that does not count: one row reads what it picks, several share nobody knows how much.
            (0, picked, 1) => picked as f64,
            (0, picked, _) if picked > 0 => f64::NAN,
            _ => experts as f64 / steps.max(1) as f64,
        };
        let joules_a_token = joules.filter(|j| *j > 0.0);
        let step_bytes = reads.step(experts_a_step);
        Ok(Measured { case, seconds, roofs, experts_a_step, step_bytes, joules_a_token })
    }

    /// Tells the meter what is measured from now on; what lies between the timed parts is counted as idle.
    fn begin(&self, phase: power::Phase) {
        if let Some(watch) = self.watch {
            watch.phase(phase);
        }
    }

    fn vocab(&self) -> usize {
        self.app.engine.hyper().vocab
    }

    fn open(&mut self, prompt: Vec<TokenId>, max_new: usize, reuse: Option<SeqId>) -> Result<SeqId> {
        let sampler = Sampler::new(SampleParams::greedy())?;
        self.app.engine.open(Request::new(prompt, sampler, max_new, Vec::new()), reuse)
    }

    /// Steps until nothing is left to do.
    fn drain(&mut self) -> Result<()> {
        while !self.step()?.is_empty() {}
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Event>> {
        self.app.engine.step(&Budget { max_batch: self.case.batch, ..Budget::default() })
    }

    /// Seconds to read `tokens` new tokens after the depth. They differ in each repetition, so that none is in the cache.
    fn prefill(&mut self, seq: &mut SeqId, rep: usize) -> Result<f64> {
        let mut prompt = text(0, self.case.depth, self.vocab());
        prompt.extend(text(1000 + rep, self.case.tokens, self.vocab()));
        *seq = self.open(prompt, 0, Some(*seq))?;
        self.begin(power::Phase::Prefill);
        let started = Instant::now();
        self.drain()?;
        let took = started.elapsed().as_secs_f64();
        self.begin(power::Phase::Idle);
        Ok(took)
    }

    /// `tokens` steps with a row of every sequence in each, in turns with reading `roof` if there is one.
    fn decode(&mut self, open: &mut [SeqId], roof: Option<&ReadRoof>) -> Result<Decoded> {
        let case = self.case;
        for (b, seq) in open.iter_mut().enumerate() {
            let prompt = text(b, case.depth.max(1), self.vocab());
            *seq = self.open(prompt, case.tokens + case.batch + 1, Some(*seq))?;
        }
        // Sequences start one a step; the clock starts when all decode.
        let mut started = vec![false; open.len()];
        while started.contains(&false) {
            for event in self.step()? {
                if let Event::Token { seq, .. } = event
                    && let Some(i) = open.iter().position(|s| *s == seq)
                {
                    started[i] = true;
                }
            }
        }
        let fetched = self.app.engine.counters().experts_fetched;
        let (mut steps, mut read) = (Duration::ZERO, (0, Duration::ZERO));
        self.begin(power::Phase::Decode);
        for _ in 0..case.tokens {
            let clock = Instant::now();
            let events = self.step()?;
            let took = clock.elapsed();
            assert_eq!(events.len(), case.batch, "a token of every sequence in each step");
            steps += took;
            if let Some(roof) = roof {
                let (bytes, time) = roof.turn(took);
                read = (read.0 + bytes, read.1 + time);
            }
        }
        self.begin(power::Phase::Idle);
        Ok(Decoded {
            seconds: steps.as_secs_f64(),
            experts: self.app.engine.counters().experts_fetched - fetched,
            roof: roof.map(|_| read.0 as f64 / read.1.as_secs_f64()),
        })
    }
}

/// What a repetition of a decode test gave.
struct Decoded {
    /// In the steps alone.
    seconds: f64,
    /// Experts that the steps fetched.
    experts: u64,
    /// Bytes a second of the reading between them.
    roof: Option<f64>,
}

/// `len` token ids, the same for the same `salt`, spread over the vocabulary as text is not: experts get even work.
fn text(salt: usize, len: usize, vocab: usize) -> Vec<TokenId> {
    // Weyl sequence with a 32-bit mix (Steele & Vigna's splitmix constants, cut to what is needed here).
    let mix = |i: usize| {
        let z = (i as u64 + 1 + ((salt as u64) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
    };
    (0..len).map(|i| (mix(i) % vocab as u64) as TokenId).collect()
}

#[test]
fn texts_differ_by_salt_and_stay_in_the_vocabulary() {
    let a = text(0, 1000, 50);
    assert!(a.iter().all(|&t| t < 50));
    assert_eq!(a, text(0, 1000, 50));
    assert_ne!(a, text(1, 1000, 50));
    let distinct: std::collections::BTreeSet<TokenId> = a.into_iter().collect();
    assert_eq!(distinct.len(), 50);
}
