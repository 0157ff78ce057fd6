//! A simulated board's state and how time changes it: clocks that settle, work that goes on, heat, meters that lag.

use super::meter::Meters;
use super::physics::{self, At, Cost, Power};
use super::spec::{Mode, Spec};
use super::work::Work;
use super::{Options, Truth};

/// Longest step of the integration: a tenth of the meters' lag.
const STEP_US: u64 = 100_000;
/// How long a new GPU clock takes to hold, and a new memory clock (medians measured on an Orin Nano).
const GPU_SETTLE_US: u64 = 5_000;
const EMC_SETTLE_US: u64 = 8_000;
/// The stock GPU governor: this long busy raises the clock to its ceiling, this long idle lets it fall to its floor
/// (assumption).
const GOVERNOR_UP_US: u64 = 30_000;
const GOVERNOR_DOWN_US: u64 = 100_000;
/// The kernel looks at temperatures once a second.
const POLL_US: u64 = 1_000_000;
/// Trip points of NVIDIA's device trees, in °C.
const PASSIVE_C: f64 = 99.0;
const HARDWARE_C: f64 = 103.0;
const SHUTDOWN_C: f64 = 104.5;
/// Time constants of die, spreader and sink. The first is measured; the others are assumptions, as are their
/// resistances.
const TAU_S: [f64; 3] = [0.3, 25.0, 300.0];

/// Noise, always the same for a seed (SplitMix64).
#[derive(Debug)]
pub struct Noise(pub u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to 1, both left out.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Normal with deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }
}

/// A clock on its way to another rate.
#[derive(Debug, Clone, Copy)]
pub struct Settling {
    pub now_hz: u64,
    pub to_hz: u64,
    pub at_us: u64,
}

impl Settling {
    fn at(hz: u64) -> Settling {
        Settling { now_hz: hz, to_hz: hz, at_us: 0 }
    }

    fn aim(&mut self, hz: u64, now_us: u64, settle_us: u64) {
        if hz != self.to_hz {
            *self = Settling { now_hz: self.now_hz, to_hz: hz, at_us: now_us + settle_us };
        }
    }

    fn arrive(&mut self, now_us: u64) {
        if now_us >= self.at_us {
            self.now_hz = self.to_hz;
        }
    }

    /// When the next change comes, if one does.
    fn next_us(&self) -> Option<u64> {
        (self.now_hz != self.to_hz).then_some(self.at_us)
    }
}

/// Everything that a board knows.
#[derive(Debug)]
pub struct State {
    pub spec: &'static Spec,
    pub options: Options,
    pub mode: &'static Mode,
    pub now_us: u64,
    pub noise: Noise,
    /// devfreq's limits, as set.
    pub gpu_min_hz: u64,
    pub gpu_max_hz: u64,
    pub gpu: Settling,
    pub emc: Settling,
    pub emc_locked: bool,
    /// Rate asked of the lock.
    pub emc_asked_hz: u64,
    /// nvpmodel's cap; 0: none.
    pub emc_cap_hz: u64,
    pub cpu_min_khz: u64,
    pub cpu_max_khz: u64,
    pub work: Work,
    /// Share of the work's present unit, or steps, that is done.
    pub done_units: f64,
    /// This run's own deviation of time.
    run_factor: f64,
    busy_since_us: Option<u64>,
    idle_since_us: Option<u64>,
    pub load_permille: f64,
    /// Rise of each thermal stage over its input, °C.
    pub heat_c: [f64; 3],
    /// Steps that the kernel's throttle takes off the GPU's table.
    pub throttle_steps: usize,
    next_poll_us: u64,
    pub shut_down: bool,
    pub meters: Meters,
    pub oc: [f64; 3],
    pub truth: Truth,
}

impl State {
    pub fn new(spec: &'static Spec, mode: &'static Mode, options: Options) -> State {
        let floor = spec.gpu_hz[0];
        let noise = Noise(options.seed);
        let mut state = State {
            spec,
            mode,
            now_us: 0,
            noise,
            gpu_min_hz: floor,
            gpu_max_hz: mode.gpu_max_hz,
            gpu: Settling::at(floor),
            emc: Settling::at(mode.emc_stock_hz),
            emc_locked: false,
            emc_asked_hz: mode.emc_stock_hz,
            emc_cap_hz: mode.emc_cap_hz,
            cpu_min_khz: 729_600,
            cpu_max_khz: mode.cpu_max_khz,
            work: Work::Idle,
            done_units: 0.0,
            run_factor: 1.0,
            busy_since_us: None,
            idle_since_us: Some(0),
            load_permille: 0.0,
            heat_c: [0.0; 3],
            throttle_steps: 0,
            next_poll_us: POLL_US,
            shut_down: false,
            meters: Meters::new(spec),
            oc: [0.0; 3],
            truth: Truth::default(),
            options,
        };
        // A board that has been idle for long: warm, its meters settled.
        let power = physics::power(spec, &Cost::default(), &state.clocks());
        for (stage, r) in state.resistances().into_iter().enumerate() {
            state.heat_c[stage] = power.total_w() * r;
        }
        state.meters.settle(&power);
        state
    }

    fn resistances(&self) -> [f64; 3] {
        let [die, spreader, sink] = self.spec.r_c_per_w;
        [die, spreader, self.options.sink_c_per_w.unwrap_or(sink)]
    }

    /// The junction's temperature.
    pub fn junction_c(&self) -> f64 {
        self.options.ambient_c + self.heat_c.iter().sum::<f64>()
    }

    /// The clocks as they run now.
    pub fn clocks(&self) -> At {
        At { gpu_hz: self.gpu.now_hz, emc_hz: self.emc.now_hz, cpu_khz: self.cpu_max_khz, sms: self.mode.sms }
    }

    /// Begins a unit of work; what was going on is dropped.
    pub fn start(&mut self, work: Work) {
        self.work = work;
        self.done_units = 0.0;
        let deviation = self.options.run_noise;
        self.run_factor = if deviation > 0.0 { (deviation * self.noise.normal()).exp() } else { 1.0 };
    }

    /// Steps that the work has, and whether they are all done.
    fn units(&self) -> f64 {
        match self.work {
            Work::Idle => f64::INFINITY,
            Work::Prefill { .. } => 1.0,
            Work::Decode { steps, .. } => steps as f64,
        }
    }

    pub fn is_busy(&self) -> bool {
        !matches!(self.work, Work::Idle)
    }

    /// Lets at most `us` pass, less where the work ends before; returns how much did.
    pub fn advance(&mut self, us: u64) -> u64 {
        let end_us = self.now_us.saturating_add(us);
        let began_us = self.now_us;
        while self.now_us < end_us {
            let was_busy = self.is_busy();
            self.step(end_us);
            if was_busy && !self.is_busy() {
                break;
            }
        }
        self.now_us - began_us
    }

    /// One step of the integration: until the next event, and no longer than [`STEP_US`].
    fn step(&mut self, end_us: u64) {
        self.steer();
        let at = self.clocks();
        let mut cost = physics::cost(self.spec, &self.work, &at);
        cost.ms *= self.run_factor;
        let mut until_us = end_us.min(self.now_us + STEP_US).min(self.next_poll_us).min(self.meters.next_us);
        let governor = [
            self.busy_since_us.map(|t| t + GOVERNOR_UP_US),
            self.idle_since_us.map(|t| t + GOVERNOR_DOWN_US),
        ];
        let events = [self.gpu.next_us(), self.emc.next_us()].into_iter().chain(governor).flatten();
        for event in events.filter(|&e| e > self.now_us) {
            until_us = until_us.min(event);
        }
        let left_us = match self.is_busy() {
            true => ((self.units() - self.done_units) * cost.ms * 1e3).ceil().max(1.0) as u64,
            false => u64::MAX,
        };
        let dt_us = (until_us - self.now_us).min(left_us).max(1);
        let power = physics::power(self.spec, &cost, &at);
        self.integrate(&cost, &power, dt_us as f64 / 1e6);
        self.now_us += dt_us;
        if self.is_busy() {
            self.done_units += dt_us as f64 / 1e3 / cost.ms;
            if dt_us == left_us {
                self.finish();
            }
        }
        if self.now_us >= self.meters.next_us {
            self.meters.publish(self.now_us, self.options.noise, &mut self.noise);
        }
        if self.now_us >= self.next_poll_us {
            self.next_poll_us += POLL_US;
            self.poll(&power);
        }
    }

    fn finish(&mut self) {
        match self.work {
            Work::Prefill { tokens, .. } => self.truth.prompt_tokens += tokens as u64,
            Work::Decode { batch, steps, .. } => self.truth.output_tokens += batch as u64 * steps as u64,
            Work::Idle => {}
        }
        self.work = Work::Idle;
    }

    /// Where the clocks should be going, by limits, load and throttle.
    fn steer(&mut self) {
        let now = self.now_us;
        if self.is_busy() {
            self.busy_since_us.get_or_insert(now);
            self.idle_since_us = None;
        } else {
            self.idle_since_us.get_or_insert(now);
            self.busy_since_us = None;
        }
        let table = self.spec.gpu_hz;
        // The kernel's throttle takes entries off the top of the table.
        let top = table[table.len() - 1 - self.throttle_steps.min(table.len() - 1)];
        let ceiling = self.gpu_max_hz.min(self.mode.gpu_max_hz).min(top);
        let floor = self.gpu_min_hz.min(ceiling);
        let raised = self.busy_since_us.is_some_and(|t| now >= t + GOVERNOR_UP_US);
        let lowered = self.idle_since_us.is_some_and(|t| now >= t + GOVERNOR_DOWN_US);
        let wanted = match (raised, lowered) {
            (true, _) => ceiling,
            (_, true) => floor,
            _ => self.gpu.to_hz.clamp(floor, ceiling),
        };
        self.gpu.aim(wanted, now, GPU_SETTLE_US);
        let asked = if self.emc_locked { self.emc_asked_hz } else { self.mode.emc_stock_hz };
        let cap = if self.emc_cap_hz == 0 { u64::MAX } else { self.emc_cap_hz };
        let point = self.spec.emc_at(asked).hz;
        let lowest = self.spec.emc[0].hz;
        let capped = self.spec.emc.iter().map(|e| e.hz).filter(|&hz| hz <= cap).max().unwrap_or(lowest);
        self.emc.aim(point.min(capped), now, EMC_SETTLE_US);
        self.gpu.arrive(now);
        self.emc.arrive(now);
    }

    fn integrate(&mut self, cost: &Cost, power: &Power, dt_s: f64) {
        let busy = cost.ms > 0.0;
        let total_w = power.total_w();
        for (stage, r) in self.resistances().into_iter().enumerate() {
            let to = total_w * r;
            self.heat_c[stage] = to + (self.heat_c[stage] - to) * (-dt_s / TAU_S[stage]).exp();
        }
        self.meters.lag(power, dt_s);
        // The load file averages over about half a second.
        let aim = if busy { 985.0 } else { 0.0 };
        self.load_permille = aim + (self.load_permille - aim) * (-dt_s / 0.3).exp();
        // Instantaneous over-current fires on a busy GPU at full clock: 27 390 times in the hour that was published.
        if busy && self.gpu.now_hz == self.spec.gpu_hz[self.spec.gpu_hz.len() - 1] {
            self.oc[2] += 7.6 * dt_s;
        }
        let truth = &mut self.truth;
        truth.energy_j += total_w * dt_s;
        truth.gpu_j += power.gpu_w * dt_s;
        truth.soc_j += power.soc_w * dt_s;
        truth.peak_w = truth.peak_w.max(total_w);
        truth.busy_s += if busy { dt_s } else { 0.0 };
        let now_c = self.junction_c();
        self.truth.hottest_c = self.truth.hottest_c.max(now_c);
    }

    /// The kernel's own look, once a second: soft and hard throttle, shutdown, average over-current.
    fn poll(&mut self, power: &Power) {
        let now_c = self.junction_c();
        let most = self.spec.gpu_hz.len() - 1;
        self.throttle_steps = match now_c {
            c if c >= HARDWARE_C => most.min((self.throttle_steps + 1).max(most / 2)),
            c if c >= PASSIVE_C => most.min(self.throttle_steps + 1),
            _ => self.throttle_steps.saturating_sub(1),
        };
        self.shut_down |= now_c >= SHUTDOWN_C;
        if power.total_w() > self.spec.limit_w {
            self.oc[1] += 1.0;
        }
    }
}
