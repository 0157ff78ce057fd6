//! `/metrics` in Prometheus' text form (exposition format 0.0.4). [`REFERENCE`] lists every name, and
//! [`BOARD_REFERENCE`] those that depend on the board; nothing else is written.

use super::Server;
use super::power::Gauge;
use crate::engine::CacheCounters;
use crate::engine::service::Metrics as Engine;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Every metric: name, kind, meaning.
pub const REFERENCE: &[(&str, &str, &str)] = &[
    ("tegu_up_seconds", "gauge", "Seconds since the daemon started."),
    ("tegu_process_resident_bytes", "gauge", "Memory that the process holds (VmRSS)."),
    ("tegu_connections", "gauge", "Open connections."),
    ("tegu_http_responses_total", "counter", "Responses by path and status."),
    ("tegu_http_seconds", "histogram", "From a request's headers to its response's headers, by path."),
    ("tegu_model_loaded", "gauge", "1 for the model in memory."),
    ("tegu_model_loads_total", "counter", "Models loaded."),
    ("tegu_model_idle_unloads_total", "counter", "Models given back because they were idle."),
    ("tegu_model_planned_bytes", "gauge", "Memory planned for the model in memory."),
    ("tegu_requests_total", "counter", "Requests that the engine took."),
    ("tegu_requests_refused_total", "counter", "Requests refused because the queue was full."),
    ("tegu_requests_cancelled_total", "counter", "Requests given up by their reader, slow ones included."),
    ("tegu_requests_slow_reader_total", "counter", "Requests cancelled because their reader was too slow."),
    ("tegu_requests_failed_total", "counter", "Requests that failed in the engine."),
    ("tegu_choices_finished_total", "counter", "Answers that ended by themselves."),
    ("tegu_deadlines_missed_total", "counter", "Answers whose deadline passed."),
    ("tegu_requests_open", "gauge", "Requests open now, waiting ones included."),
    ("tegu_sequences_prefilling", "gauge", "Sequences that read their prompt or wait to."),
    ("tegu_sequences_decoding", "gauge", "Sequences that generate."),
    ("tegu_prefill_tokens_total", "counter", "Prompt tokens read."),
    ("tegu_reused_tokens_total", "counter", "Prompt tokens that were in the cache."),
    ("tegu_generated_tokens_total", "counter", "Tokens generated."),
    ("tegu_steps_total", "counter", "Steps of the engine."),
    ("tegu_step_seconds_total", "counter", "Time in those steps."),
    ("tegu_kv_pages", "gauge", "Pages of the KV cache."),
    ("tegu_kv_pages_free", "gauge", "Pages that nothing holds."),
    ("tegu_kv_page_bytes", "gauge", "Bytes of one page."),
    ("tegu_kv_pages_resident", "gauge", "Pages that take memory."),
    ("tegu_kv_blocks_cached", "gauge", "Blocks of the prefix tree in memory."),
    ("tegu_kv_blocks_on_disk", "gauge", "Blocks of the prefix tree in the spill file."),
    ("tegu_kv_preempted_total", "counter", "Sequences thrown out to make room; they come back."),
    ("tegu_kv_evicted_total", "counter", "Blocks forgotten."),
    ("tegu_kv_spilled_total", "counter", "Blocks written to the spill file."),
    ("tegu_kv_fetched_total", "counter", "Blocks read back from it."),
    ("tegu_kv_given_back_bytes_total", "counter", "Cache memory given back to the system."),
];

/// Every metric of the board's power: each is written where it is measured.
pub const BOARD_REFERENCE: &[(&str, &str, &str)] = &[
    ("tegu_power_milliwatts", "gauge", "Power by rail; rail=\"total\" is the module's."),
    ("tegu_energy_millijoules_total", "counter", "Energy of the module by what the engine was doing."),
    ("tegu_phase_seconds_total", "counter", "Time by what the engine was doing."),
    ("tegu_temperature_celsius", "gauge", "Temperature by thermal zone."),
    ("tegu_gpu_hertz", "gauge", "GPU clock: now, and its bounds."),
    ("tegu_memory_clock_hertz", "gauge", "Memory clock."),
    ("tegu_gpu_load_ratio", "gauge", "Share of time that the GPU is busy."),
    ("tegu_throttle_active", "gauge", "1 for each thing that holds clocks back now."),
    ("tegu_over_current_total", "counter", "Under-voltage and over-current events since boot."),
    ("tegu_fan_ratio", "gauge", "Drive of the fan."),
    ("tegu_sensor_faults", "gauge", "Sensors that cannot be trusted now."),
    ("tegu_profile", "gauge", "1 for the power profile in force."),
    ("tegu_clock_changes_total", "counter", "Times that other clocks were asked for."),
];

/// Upper bounds of the histogram's buckets, in seconds.
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0];

#[derive(Debug, Clone, Default)]
struct Histogram {
    counts: [u64; BUCKETS.len()],
    count: u64,
    seconds: f64,
}

#[derive(Debug, Default)]
struct Http {
    responses: BTreeMap<(&'static str, u16), u64>,
    seconds: BTreeMap<&'static str, Histogram>,
}

/// What the server itself counts, and what engines of models that were given back had counted: counters never fall.
#[derive(Default)]
pub struct Metrics {
    http: Mutex<Http>,
    engine: Mutex<Past>,
    /// How many connections are open.
    pub connections: std::sync::OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

/// The last counts of the engine that was seen last, and the sums of those before it.
#[derive(Default)]
struct Past {
    load: u64,
    last: Engine,
    before: Engine,
}

impl Metrics {
    /// Counts a response.
    pub fn answered(&self, route: &'static str, status: u16, took: Duration) {
        let mut http = self.http.lock().unwrap_or_else(PoisonError::into_inner);
        *http.responses.entry((route, status)).or_default() += 1;
        let h = http.seconds.entry(route).or_default();
        let seconds = took.as_secs_f64();
        h.count += 1;
        h.seconds += seconds;
        for (bound, n) in BUCKETS.iter().zip(&mut h.counts) {
            *n += u64::from(seconds <= *bound);
        }
    }

    /// The engine's counts over all loads.
    fn engine(&self, load: u64, now: Option<Engine>) -> Engine {
        let mut past = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if load != past.load {
            past.before = sum(&past.before, &past.last);
            past.last = Engine::default();
            past.load = load;
        }
        let gone = now.is_none();
        past.last = now.unwrap_or_else(|| past.last.clone());
        let mut all = sum(&past.before, &past.last);
        if gone {
            (all.open, all.prefilling, all.decoding) = (0, 0, 0);
            (all.pages, all.pages_free, all.page_bytes) = (0, 0, 0);
            (all.pages_resident, all.blocks_cached, all.blocks_spilled) = (0, 0, 0);
        }
        all
    }

    /// The whole page.
    pub fn text(&self, server: &Server) -> String {
        let live = server.models.peek();
        let loads = server.models.loads.load(Ordering::Relaxed);
        let e = self.engine(loads, live.as_ref().map(|l| l.handle.metrics()));
        let connections = self.connections.get().map_or(0, |count| count());
        let mut page = Page(String::new());
        page.number("tegu_up_seconds", server.started.elapsed().as_secs_f64());
        page.number("tegu_process_resident_bytes", resident_bytes() as f64);
        page.number("tegu_connections", connections as f64);
        self.http(&mut page);
        page.head("tegu_model_loaded");
        if let Some(l) = &live {
            page.row(&format!("tegu_model_loaded{{model=\"{}\"}}", escaped(&l.name)), 1.0);
        }
        page.number("tegu_model_loads_total", loads as f64);
        let unloads = server.models.unloads.load(Ordering::Relaxed);
        page.number("tegu_model_idle_unloads_total", unloads as f64);
        page.number("tegu_model_planned_bytes", live.map_or(0, |l| l.planned_bytes) as f64);
        for (name, value) in [
            ("tegu_requests_total", e.requests),
            ("tegu_requests_refused_total", e.refused),
            ("tegu_requests_cancelled_total", e.cancelled),
            ("tegu_requests_slow_reader_total", e.slow_readers),
            ("tegu_requests_failed_total", e.failed),
            ("tegu_choices_finished_total", e.finished),
            ("tegu_deadlines_missed_total", e.deadlines_missed),
            ("tegu_requests_open", e.open as u64),
            ("tegu_sequences_prefilling", e.prefilling as u64),
            ("tegu_sequences_decoding", e.decoding as u64),
            ("tegu_prefill_tokens_total", e.prefill_tokens),
            ("tegu_reused_tokens_total", e.reused_tokens),
            ("tegu_generated_tokens_total", e.generated_tokens),
            ("tegu_steps_total", e.steps),
            ("tegu_kv_pages", e.pages as u64),
            ("tegu_kv_pages_free", e.pages_free as u64),
            ("tegu_kv_page_bytes", e.page_bytes as u64),
            ("tegu_kv_pages_resident", e.pages_resident as u64),
            ("tegu_kv_blocks_cached", e.blocks_cached as u64),
            ("tegu_kv_blocks_on_disk", e.blocks_spilled as u64),
            ("tegu_kv_preempted_total", e.cache.preempted),
            ("tegu_kv_evicted_total", e.cache.evicted),
            ("tegu_kv_spilled_total", e.cache.spilled),
            ("tegu_kv_fetched_total", e.cache.fetched),
            ("tegu_kv_given_back_bytes_total", e.cache.given_back_bytes),
        ] {
            page.number(name, value as f64);
        }
        page.number("tegu_step_seconds_total", e.step_time.as_secs_f64());
        if let Some(power) = &server.models.power {
            page.gauges(&power.gauges());
        }
        page.0
    }

    fn http(&self, page: &mut Page) {
        let http = self.http.lock().unwrap_or_else(PoisonError::into_inner);
        page.head("tegu_http_responses_total");
        for ((route, status), n) in &http.responses {
            page.row(
                &format!("tegu_http_responses_total{{path=\"{route}\",status=\"{status}\"}}"),
                *n as f64,
            );
        }
        page.head("tegu_http_seconds");
        for (route, h) in &http.seconds {
            for (bound, n) in BUCKETS.iter().zip(&h.counts) {
                page.row(&format!("tegu_http_seconds_bucket{{path=\"{route}\",le=\"{bound}\"}}"), *n as f64);
            }
            page.row(&format!("tegu_http_seconds_bucket{{path=\"{route}\",le=\"+Inf\"}}"), h.count as f64);
            page.row(&format!("tegu_http_seconds_sum{{path=\"{route}\"}}"), h.seconds);
            page.row(&format!("tegu_http_seconds_count{{path=\"{route}\"}}"), h.count as f64);
        }
    }
}

/// Counters added, states of the later one.
fn sum(a: &Engine, b: &Engine) -> Engine {
    Engine {
        requests: a.requests + b.requests,
        refused: a.refused + b.refused,
        finished: a.finished + b.finished,
        deadlines_missed: a.deadlines_missed + b.deadlines_missed,
        cancelled: a.cancelled + b.cancelled,
        slow_readers: a.slow_readers + b.slow_readers,
        failed: a.failed + b.failed,
        prefill_tokens: a.prefill_tokens + b.prefill_tokens,
        reused_tokens: a.reused_tokens + b.reused_tokens,
        generated_tokens: a.generated_tokens + b.generated_tokens,
        steps: a.steps + b.steps,
        step_time: a.step_time + b.step_time,
        cache: CacheCounters {
            preempted: a.cache.preempted + b.cache.preempted,
            evicted: a.cache.evicted + b.cache.evicted,
            spilled: a.cache.spilled + b.cache.spilled,
            fetched: a.cache.fetched + b.cache.fetched,
            copied: a.cache.copied + b.cache.copied,
            given_back_bytes: a.cache.given_back_bytes + b.cache.given_back_bytes,
        },
        ..b.clone()
    }
}

struct Page(String);

impl Page {
    /// The lines that say what a metric is.
    ///
    /// # Panics
    /// If it is not in the reference table: names are constants of the program.
    fn head(&mut self, name: &str) {
        let mut known = REFERENCE.iter().chain(BOARD_REFERENCE);
        let (_, kind, help) = known.find(|(n, ..)| *n == name).expect("a metric of the table");
        write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n").expect("writing to a string");
    }

    fn row(&mut self, name: &str, value: f64) {
        writeln!(self.0, "{name} {value}").expect("writing to a string");
    }

    /// What the board's power tells; rows of one name stand together.
    fn gauges(&mut self, gauges: &[Gauge]) {
        for (i, g) in gauges.iter().enumerate() {
            if i == 0 || gauges[i - 1].name != g.name {
                self.head(g.name);
            }
            let labels: Vec<String> =
                g.labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
            match labels.is_empty() {
                true => self.row(g.name, g.value),
                false => self.row(&format!("{}{{{}}}", g.name, labels.join(",")), g.value),
            }
        }
    }

    fn number(&mut self, name: &str, value: f64) {
        self.head(name);
        self.row(name, value);
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// `VmRSS` of /proc/self/status (proc(5)); 0 if the system does not say.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test]
fn counters_never_fall_when_a_model_is_given_back() {
    let m = Metrics::default();
    let with = |requests, open| Some(Engine { requests, open, ..Engine::default() });
    assert_eq!(m.engine(1, with(3, 1)).requests, 3);
    let gone = m.engine(1, None);
    assert_eq!((gone.requests, gone.open), (3, 0));
    assert_eq!(m.engine(2, with(2, 1)).requests, 5);
    assert_eq!(m.engine(2, with(4, 1)).requests, 7);
}

#[test]
fn times_fall_into_their_buckets() {
    let m = Metrics::default();
    m.answered("/health", 200, Duration::from_micros(700));
    m.answered("/health", 200, Duration::from_secs(7));
    let mut page = Page(String::new());
    m.http(&mut page);
    for line in [
        "tegu_http_responses_total{path=\"/health\",status=\"200\"} 2",
        "tegu_http_seconds_bucket{path=\"/health\",le=\"0.0005\"} 0",
        "tegu_http_seconds_bucket{path=\"/health\",le=\"0.001\"} 1",
        "tegu_http_seconds_bucket{path=\"/health\",le=\"+Inf\"} 2",
        "tegu_http_seconds_count{path=\"/health\"} 2",
    ] {
        assert!(page.0.lines().any(|l| l == line), "{line} in\n{}", page.0);
    }
}
