//! What the power threads know, for anyone to read at any moment without asking them, and what they are told.

use super::cores::Cores;
use super::driven::Driven;
use super::looker::Looker;
use crate::engine::service::{Handle, Metrics, Signal};
use crate::power::energy::{Energy, Method};
use crate::power::governor::Ladder;
use crate::power::modes::{Modes, SystemPrograms};
use crate::power::nodes::Nodes;
use crate::power::profile::{Profile, board_key};
use crate::power::status::{Allowed, PhaseEnergy, Served, Status};
use crate::power::types::{Clocks, Phase, Sample};
use crate::power::wire::{Ask, Client};
use crate::serve::{Gauge, Power, Spent};
use crate::units::{Error, Result};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Who switches power modes.
pub enum ModesBy {
    /// The clock helper at this socket.
    Helper(PathBuf),
    /// This process, as root.
    ThisProcess,
    /// No one, and why.
    NoOne(String),
}

/// What the governor decides on.
#[derive(Default)]
pub struct Seen {
    /// The latest sample.
    pub sample: Sample,
    /// The clocks that the board can be set to.
    pub ladder: Ladder,
}

/// What to tell of a bug.
type Fatal = Box<dyn Fn(&str) + Send + Sync>;

/// The shared part.
pub struct Told {
    /// Rings for the thread.
    pub signal: Arc<Signal>,
    /// The thread is to end.
    pub stop: AtomicBool,
    nodes: Arc<dyn Nodes>,
    /// A moment, and what the board's clock showed.
    clock: (Instant, u64),
    driven: Option<Driven>,
    board_key: &'static str,
    modes_by: ModesBy,
    cores: Cores,
    profile: Mutex<Option<Arc<Profile>>>,
    engine: Mutex<Option<Handle>>,
    status: Mutex<Status>,
    seen: Mutex<Arc<Seen>>,
    /// None where nothing measures power.
    energy: Mutex<Option<Energy>>,
    clock_changes: AtomicU64,
    fatal: Mutex<Option<Fatal>>,
}

/// What these locks guard is whole at every moment.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Told {
    pub(super) fn new(
        looker: &mut Looker,
        driven: Option<Driven>,
        profile: Option<Profile>,
        modes_by: ModesBy,
        cores: Cores,
    ) -> Told {
        let nodes = looker.nodes().clone();
        let method = looker.method();
        if let Some(driven) = &driven {
            driven.pass();
        }
        let clock = (Instant::now(), nodes.now_us());
        let energy = method.map(|m| Energy::new(m, Phase::Idle, clock.1));
        Told {
            signal: Arc::default(),
            stop: false.into(),
            nodes,
            clock,
            driven,
            board_key: board_key(looker.board()),
            modes_by,
            cores,
            profile: Mutex::new(profile.map(Arc::new)),
            engine: Mutex::default(),
            status: Mutex::default(),
            seen: Mutex::default(),
            energy: Mutex::new(energy),
            clock_changes: AtomicU64::new(0),
            fatal: Mutex::default(),
        }
    }

    /// The engine in memory, and how many bytes its weights have.
    pub fn set_engine(&self, engine: Handle, weight_bytes: u64) {
        if let Some(driven) = &self.driven {
            driven.set_model(weight_bytes);
        }
        *lock(&self.engine) = Some(engine);
        // It gets its budget.
        self.signal.ring();
    }

    pub(super) fn engine(&self) -> Option<Handle> {
        lock(&self.engine).clone().filter(|e| e.stopped().is_none())
    }

    pub(super) fn profile(&self) -> Option<Arc<Profile>> {
        lock(&self.profile).clone()
    }

    pub(super) fn broke(&self, why: &str) {
        if let Some(fatal) = lock(&self.fatal).as_ref() {
            fatal(why);
        }
    }

    /// A simulated board's time comes up to ours.
    pub(super) fn pass(&self) {
        if let Some(driven) = &self.driven {
            driven.pass();
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        if let Some(driven) = &self.driven {
            let rows = self.engine().map_or(0, |e| e.metrics().decoding);
            driven.set(phase, rows);
        }
        self.settle_phases();
        lock(&self.status).phase = Some(phase);
    }

    /// Tells the meter which phases there were, each from when it began: also those that passed before anyone woke.
    fn settle_phases(&self) {
        self.settle(lock(&self.energy).as_mut());
    }

    fn settle(&self, energy: Option<&mut Energy>) {
        let changes = self.signal.take_changes();
        let Some(energy) = energy else { return };
        for (at, activity) in changes {
            energy.phase(super::phase_of(activity), self.board_us(at));
        }
    }

    /// A time by the board's clock. A simulated one goes in leaps, and ahead where a clock is waited for: what it shows at this
    /// moment would move one phase's beginning against another's.
    fn board_us(&self, at: Instant) -> u64 {
        let (base, base_us) = self.clock;
        base_us + at.saturating_duration_since(base).as_micros() as u64
    }

    /// Takes a look at the board; true if its power mode is another than before.
    pub(super) fn looked(&self, new: Status, counter_mj: Option<u64>) -> bool {
        let mut energy = lock(&self.energy);
        // Phases first: a reading gives the time before it to the phase that it knows of, and a whole prompt can pass
        // before anyone else tells it of another.
        self.settle(energy.as_mut());
        if let Some(energy) = energy.as_mut() {
            let at_us = new.sample.at_us.min(self.board_us(Instant::now()));
            energy.reading(&Sample { at_us, ..new.sample.clone() }, counter_mj);
        }
        drop(energy);
        let mut status = lock(&self.status);
        let other = status.mode != new.mode;
        *status = Status {
            phase: status.phase,
            asked: status.asked,
            reasons: std::mem::take(&mut status.reasons),
            allowed: status.allowed,
            hands: std::mem::take(&mut status.hands),
            ..new
        };
        other
    }

    pub(super) fn saw(&self, seen: Seen) {
        *lock(&self.seen) = Arc::new(seen);
    }

    /// What the governor decides on.
    pub(super) fn seen(&self) -> Arc<Seen> {
        lock(&self.seen).clone()
    }

    pub(super) fn hands_are(&self, name: String) {
        lock(&self.status).hands = name;
    }

    pub(super) fn decided(&self, asked: Option<Clocks>, reasons: Vec<String>, allowed: Option<Allowed>) {
        let mut status = lock(&self.status);
        (status.asked, status.reasons, status.allowed) = (asked, reasons, allowed);
    }

    pub(super) fn changed(&self) {
        self.clock_changes.fetch_add(1, Ordering::Relaxed);
    }

    /// All that is known now.
    pub fn now(&self) -> Status {
        let mut status = lock(&self.status).clone();
        status.profile = self.profile().map(|p| p.name.clone());
        status.profiles = Profile::names(self.board_key).into_iter().map(String::from).collect();
        status.profiles.push(NONE.into());
        if let Some(energy) = lock(&self.energy).as_ref() {
            let one = |phase: Phase| {
                let share = energy.share(phase);
                let error_permille = energy.uncertainty(phase).map(|e| (e * 1e3).round() as u32);
                PhaseEnergy {
                    phase,
                    energy_mj: share.energy_mj as u64,
                    time_us: share.time_us,
                    error_permille,
                }
            };
            status.energy = Phase::ALL.map(one).to_vec();
            status.energy_method = Some(word(energy.method()).to_owned());
        }
        status
    }
}

/// What takes the profile away.
const NONE: &str = "none";

impl Power for Told {
    fn status(&self, served: Option<(String, Metrics)>) -> Value {
        let mut status = self.now();
        let counts = |(model, m): (String, Metrics)| Served {
            model: Some(model),
            uptime_us: 0,
            open: m.open,
            prefilling: m.prefilling,
            decoding: m.decoding,
            prefill_tokens: m.prefill_tokens,
            generated_tokens: m.generated_tokens,
            requests: m.requests,
        };
        status.served = Some(served.map_or_else(Served::default, counts));
        serde_json::to_value(&status).expect("strings and numbers")
    }

    fn set_profile(&self, name: &str) -> Result<String> {
        if name == NONE {
            self.cores.confine("")?;
            *lock(&self.profile) = None;
            self.signal.ring();
            return Ok("no profile: the system steers".into());
        }
        // A client names one of ours; a path is for the daemon's own settings.
        if name.contains(['/', '.']) {
            let names = Profile::names(self.board_key).join(", ");
            return Err(Error::bad(
                "request",
                "profile",
                format!("one of {names}, none"),
                format!("{name:?}"),
            ));
        }
        let profile = Profile::find(name, self.board_key)?;
        // Before the thread sees it, which counts them.
        self.cores.confine(&profile.cores)?;
        let said = format!("profile {}: {}", profile.name, profile.about);
        *lock(&self.profile) = Some(Arc::new(profile));
        self.signal.ring();
        Ok(said)
    }

    fn set_mode(&self, name: &str) -> Result<String> {
        match &self.modes_by {
            ModesBy::Helper(socket) => {
                let answer = Client::connect(socket)?.ask(&Ask::Mode { name: name.to_owned() })?;
                Ok(answer.said.unwrap_or_else(|| format!("power mode {name}")))
            }
            ModesBy::ThisProcess => {
                Modes::new(self.nodes.clone(), Box::new(SystemPrograms), false).switch(name)
            }
            ModesBy::NoOne(why) => {
                Err(Error::bad("request", "mode", "a board whose mode can be switched", why))
            }
        }
    }

    fn gauges(&self) -> Vec<Gauge> {
        gauges(&self.now(), self.clock_changes.load(Ordering::Relaxed))
    }

    fn spent(&self) -> Option<Spent> {
        self.pass();
        self.settle_phases();
        let energy = lock(&self.energy);
        let energy = energy.as_ref()?;
        let [prefill_mj, decode_mj, _] = energy.so_far_mj(self.board_us(Instant::now()))?;
        let errors = energy.uncertainty(Phase::Prefill).zip(energy.uncertainty(Phase::Decode));
        Some(Spent { prefill_mj, decode_mj, errors: errors.map(Into::into), method: word(energy.method()) })
    }

    fn watch(&self, fatal: Fatal) {
        *lock(&self.fatal) = Some(fatal);
    }
}

/// A method in a word, as responses have it.
fn word(method: Method) -> &'static str {
    match method {
        Method::Rails => "rails",
        Method::Counter => "counter",
        Method::GpuPower => "gpu-power",
    }
}

/// The rows of `/metrics`, those of one name together.
fn gauges(status: &Status, clock_changes: u64) -> Vec<Gauge> {
    let mut rows = Vec::new();
    let mut add = |name, labels: &[(&'static str, &str)], value: f64| {
        let labels = labels.iter().map(|(n, v)| (*n, (*v).to_owned())).collect();
        rows.push(Gauge { name, labels, value });
    };
    let s = &status.sample;
    for rail in &s.rails {
        add("tegu_power_milliwatts", &[("rail", &rail.label)], f64::from(rail.power_mw));
    }
    if let Some(mw) = s.total_mw {
        add("tegu_power_milliwatts", &[("rail", "total")], f64::from(mw));
    }
    let method = status.energy_method.as_deref().unwrap_or_default();
    for e in &status.energy {
        let labels = [("phase", e.phase.name()), ("method", method)];
        add("tegu_energy_millijoules_total", &labels, e.energy_mj as f64);
    }
    for e in &status.energy {
        add("tegu_phase_seconds_total", &[("phase", e.phase.name())], e.time_us as f64 / 1e6);
    }
    for zone in &s.zones {
        add("tegu_temperature_celsius", &[("zone", &zone.kind)], f64::from(zone.temp_mc) / 1e3);
    }
    for (bound, hz) in [("now", s.gpu_hz), ("min", s.gpu_min_hz), ("max", s.gpu_max_hz)] {
        if let Some(hz) = hz {
            add("tegu_gpu_hertz", &[("bound", bound)], hz as f64);
        }
    }
    if let Some(hz) = s.emc_hz {
        add("tegu_memory_clock_hertz", &[], hz as f64);
    }
    if let Some(load) = s.gpu_load_permille {
        add("tegu_gpu_load_ratio", &[], f64::from(load) / 1e3);
    }
    for what in s.throttle.active.iter().chain(&s.throttle.gpu_reasons) {
        add("tegu_throttle_active", &[("what", what)], 1.0);
    }
    for (name, count) in ["OC1", "OC2", "OC3"].iter().zip(s.throttle.oc_counts) {
        if let Some(count) = count {
            add("tegu_over_current_total", &[("alarm", name)], count as f64);
        }
    }
    if let Some(pwm) = s.fan.and_then(|f| f.pwm) {
        add("tegu_fan_ratio", &[], f64::from(pwm) / 255.0);
    }
    add("tegu_sensor_faults", &[], s.faults.len() as f64);
    if let Some(profile) = &status.profile {
        add("tegu_profile", &[("profile", profile)], 1.0);
    }
    add("tegu_clock_changes_total", &[], clock_changes as f64);
    rows
}

#[test]
fn every_row_is_of_the_table_and_names_stand_together() {
    use crate::power::types::{Fan, Rail, Sample, Throttle, Zone};
    let rail = |label: &str| Rail { label: label.into(), power_mw: 5, volt_mv: None };
    let status = Status {
        sample: Sample {
            rails: vec![rail("VDD_IN"), rail("VDD_SOC")],
            total_mw: Some(5),
            zones: vec![Zone { kind: "tj-thermal".into(), temp_mc: 50_500 }],
            gpu_hz: Some(1),
            gpu_max_hz: Some(2),
            emc_hz: Some(3),
            gpu_load_permille: Some(4),
            fan: Some(Fan { pwm: Some(255), rpm: None }),
            throttle: Throttle {
                active: vec!["x".into()],
                oc_counts: [Some(1), None, Some(3)],
                ..Throttle::default()
            },
            ..Sample::default()
        },
        profile: Some("p".into()),
        energy: vec![PhaseEnergy { phase: Phase::Idle, energy_mj: 1, time_us: 2, error_permille: None }],
        ..Status::default()
    };
    let rows = gauges(&status, 7);
    let names: Vec<&str> = rows.iter().map(|r| r.name).collect();
    let mut once = names.clone();
    once.dedup();
    let mut sorted = once.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), once.len(), "names stand together: {names:?}");
    let table: Vec<&str> = crate::serve::BOARD_METRICS.iter().map(|(n, ..)| *n).collect();
    let mut known = table.clone();
    known.sort_unstable();
    assert_eq!(sorted, known, "this status has a row of each");
    assert!(
        gauges(&Status::default(), 0).iter().all(|r| r.value == 0.0),
        "nothing is told as zero but counts"
    );
}
