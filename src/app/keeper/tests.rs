//! The power thread on a simulated board: phases reach the hands, clocks go back however it ends, profiles are switched.

use super::*;
use crate::engine::Class;
use crate::engine::service::{Limits, OnPanic, Reply, Service, Submit, Work};
use crate::sample::{SampleParams, Sampler};
use crate::serve::Power;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// What was asked of the hands.
#[derive(Default)]
struct Log {
    set: Mutex<Vec<Clocks>>,
    beats: AtomicUsize,
    released: AtomicBool,
    breaks: AtomicBool,
}

struct Recording(Arc<Log>);

impl Hands for Recording {
    fn name(&self) -> String {
        "a recording".into()
    }
    fn set(&mut self, clocks: &Clocks) -> Result<()> {
        assert!(!self.0.breaks.load(Ordering::SeqCst), "a planned panic");
        self.0.set.lock().unwrap().push(*clocks);
        Ok(())
    }
    fn beat(&mut self) -> Result<()> {
        self.0.beats.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn release(&mut self) {
        self.0.released.store(true, Ordering::SeqCst);
    }
}

fn wanted(profile: &str) -> Wanted {
    Wanted {
        board: "sim:orin-nano-super".into(),
        profile: Some(profile.to_owned()),
        clocks: "helper".into(),
        helper: PathBuf::new(),
        batch_max: 3,
        threads: 5,
        spin_us: 7,
        spin_by_profile: true,
    }
}

fn recorded(profile: &str) -> (Keeper, Arc<Log>) {
    patient(profile, DECIDE)
}

fn patient(profile: &str, patience: Duration) -> (Keeper, Arc<Log>) {
    let (log, wanted) = (Arc::new(Log::default()), wanted(profile));
    let looker = Looker::open(&wanted.board).unwrap();
    let modes_by = ModesBy::NoOne("a test".into());
    (Keeper::with(&wanted, looker, Box::new(Recording(log.clone())), modes_by, patience).unwrap(), log)
}

/// Waits for something that is due at once, however slow the machine.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Each change of phase is one call of the hands, repeated news are none, and nothing but the news wakes the thread: it would
/// decide by itself an hour later.
#[test]
fn a_phase_reaches_the_hands_once_and_by_itself() {
    let (keeper, log) = patient("efficiency", Duration::from_secs(3600));
    let signal = keeper.signal();
    let profile = keeper.told().profile().unwrap();
    let of = |p: Phase| profile.clocks[p.index()];
    assert_ne!(of(Phase::Decode), of(Phase::Idle), "a profile whose phases differ is needed here");
    // The first decision comes with the first tick.
    until("the first wish", || !log.set.lock().unwrap().is_empty());
    for i in 0..40 {
        let activity = if i % 2 == 0 { Activity::Decode } else { Activity::Idle };
        let before = log.set.lock().unwrap().len();
        signal.set(activity);
        // A token a millisecond changes nothing.
        signal.set(activity);
        until("a wish", || log.set.lock().unwrap().len() > before);
        signal.set(activity);
        let wishes = log.set.lock().unwrap();
        assert_eq!(wishes[before], of(if i % 2 == 0 { Phase::Decode } else { Phase::Idle }));
        assert_eq!(wishes.len(), before + 1, "one call a change");
    }
    // Who is woken says that it lives, where it has not for a while.
    until("a beat", || {
        signal.ring();
        log.beats.load(Ordering::SeqCst) > 0
    });
    assert!(!log.released.load(Ordering::SeqCst));
    drop(keeper);
    assert!(log.released.load(Ordering::SeqCst), "clocks go back with the keeper");
}

/// A board whose temperatures give no answer for as long as it is told so, as where a bus hangs.
struct Hanging {
    sim: Arc<crate::power::sim::SimBoard>,
    hangs: AtomicBool,
    asked: AtomicBool,
}

impl Nodes for Hanging {
    fn read(&self, path: &str) -> std::io::Result<String> {
        while path.contains("thermal_zone") && self.hangs.load(Ordering::SeqCst) {
            self.asked.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.sim.read(path)
    }
    fn write(&self, path: &str, text: &str) -> std::io::Result<()> {
        self.sim.write(path, text)
    }
    fn list(&self, path: &str) -> std::io::Result<Vec<String>> {
        self.sim.list(path)
    }
    fn now_us(&self) -> u64 {
        self.sim.now_us()
    }
    fn sleep(&self, us: u64) {
        self.sim.sleep(us);
    }
}

#[test]
fn sensors_that_hang_keep_no_phase_from_the_clocks() {
    let sim =
        Arc::new(crate::power::sim::SimBoard::named("sim:orin-nano-super", Default::default()).unwrap());
    let board = sim.board();
    let nodes = Arc::new(Hanging { sim, hangs: false.into(), asked: false.into() });
    let site = crate::app::power::Site { nodes: nodes.clone(), board, is_here: false };
    let (log, wanted) = (Arc::new(Log::default()), wanted("efficiency"));
    let looker = Looker::of(site).unwrap();
    let modes_by = ModesBy::NoOne("a test".into());
    let keeper = Keeper::with(&wanted, looker, Box::new(Recording(log.clone())), modes_by, DECIDE).unwrap();
    nodes.hangs.store(true, Ordering::SeqCst);
    until("a look at the sensors", || nodes.asked.load(Ordering::SeqCst));
    for activity in [Activity::Decode, Activity::Idle, Activity::Prefill] {
        let before = log.set.lock().unwrap().len();
        keeper.signal().set(activity);
        until("a wish", || log.set.lock().unwrap().len() > before);
    }
    // The samples that no longer come are seen: six seconds of the board's own time pass.
    nodes.sim.sleep(6_000_000);
    let told = keeper.told();
    until("the fall-back", || told.now().reasons.iter().any(|r| r.contains("samples have stopped")));
    // Nor do they keep the clocks from going back.
    drop(keeper);
    assert!(log.released.load(Ordering::SeqCst));
    nodes.hangs.store(false, Ordering::SeqCst);
}

#[test]
fn a_bug_in_the_thread_puts_clocks_back_and_is_told() {
    let (keeper, log) = recorded("balanced");
    until("the first wish", || !log.set.lock().unwrap().is_empty());
    let told = Arc::new(Mutex::new(String::new()));
    let tells = told.clone();
    keeper.told().watch(Box::new(move |why| *tells.lock().unwrap() = why.to_owned()));
    log.breaks.store(true, Ordering::SeqCst);
    keeper.signal().set(Activity::Decode);
    until("the end", || !told.lock().unwrap().is_empty());
    assert!(log.released.load(Ordering::SeqCst));
    // What was known stays readable.
    assert!(!keeper.told().now().board.is_empty());
}

#[test]
fn profiles_are_switched_and_taken_away() {
    let (keeper, log) = recorded("balanced");
    let told = keeper.told();
    assert_eq!(told.now().profile.as_deref(), Some("balanced"));
    assert!(told.set_profile("silent").unwrap().starts_with("profile silent: "));
    until("a budget", || told.now().allowed.is_some());
    assert_eq!(told.now().profile.as_deref(), Some("silent"));
    assert!(told.now().allowed.unwrap().max_batch <= 3, "never more than the settings allow");
    let said = told.set_profile("silnt").unwrap_err().to_string();
    assert!(said.contains("did you mean \"silent\""), "{said}");
    assert!(told.set_profile("/etc/passwd").unwrap_err().to_string().contains("expected one of balanced"));
    assert!(told.set_mode("15W").is_err());
    told.set_profile("none").unwrap();
    until("the release", || log.released.load(Ordering::SeqCst));
    until("no wish", || told.now().asked.is_none());
    assert_eq!((told.now().profile, told.now().allowed), (None, None));
}

/// The whole way on the simulated board: real sensors, real governor, real actuator.
#[test]
fn a_simulated_board_is_seen_steered_and_put_back() {
    let keeper = Keeper::start(&wanted("efficiency")).unwrap();
    let told = keeper.told();
    let first = told.now();
    assert!(
        first.board.contains("Orin Nano") && first.board.contains("sim:orin-nano-super"),
        "{}",
        first.board
    );
    assert!(first.sample.total_mw.is_some() && !first.sample.zones.is_empty());
    let stock_hz = first.sample.gpu_max_hz.unwrap();
    keeper.signal().set(Activity::Decode);
    let profile = told.profile().unwrap();
    let cap_hz = profile.clocks[Phase::Decode.index()].gpu_cap_hz;
    if let Some(cap_hz) = cap_hz.filter(|c| *c < stock_hz) {
        until("the cap", || told.now().sample.gpu_max_hz == Some(cap_hz));
    }
    until("decode energy", || {
        told.now().energy.iter().any(|e| e.phase == Phase::Decode && e.energy_mj > 100)
    });
    assert_eq!(told.now().energy_method.as_deref(), Some("rails"));
    let spent = told.spent().unwrap();
    assert!(spent.decode_mj > 100.0 && spent.prefill_mj >= 0.0, "{spent:?}");
    let names: Vec<&str> = told.gauges().iter().map(|g| g.name).collect();
    assert!(names.contains(&"tegu_power_milliwatts") && names.contains(&"tegu_energy_millijoules_total"));
    let value = told.status(None);
    assert_eq!(value["phase"], "decode");
    assert!(value["served"].is_object());
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let say = |w: Wanted| Keeper::start(&w).err().expect("refused").to_string();
    assert!(say(Wanted { board: "sim:orin".into(), ..wanted("balanced") }).contains("sim:orin-nano-super"));
    assert!(say(Wanted { board: "nano".into(), ..wanted("balanced") }).contains("power.board"));
    assert!(say(wanted("balance")).contains("did you mean \"balanced\""));
}

/// The whole of it needs a process of its own: `tests/http/power.rs`.
#[test]
fn cores_that_are_not_there_are_refused_and_change_nothing() {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let before = sched_getaffinity(None).unwrap();
    let said = Cores::new().confine(&(CpuSet::MAX_CPU - 1).to_string());
    let said = said.unwrap_err().to_string();
    assert!(said.contains("cpu.cores: expected cores that there are"), "{said}");
    assert_eq!(sched_getaffinity(None).unwrap(), before);
}

#[test]
fn a_switched_profile_changes_the_threads_of_an_engine_that_runs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracles/llama");
    let mut options = app::Options::new(path);
    (options.context_tokens, options.threads) = (128, 2);
    let engine = app::prepare(options).unwrap().load(&|_| {}).unwrap().engine;
    let service = Service::start(engine, Limits::default(), OnPanic::Poison).unwrap();
    let (keeper, _log) = recorded("balanced");
    let (told, handle) = (keeper.told(), service.handle());
    let answer = || {
        let sampler = Sampler::new(SampleParams::greedy()).unwrap();
        let work = Work::Generate { samplers: vec![sampler], max_new: 8, end_ids: vec![] };
        let (prompt, class, client) = ((3..40).collect(), Class::Normal, String::new());
        let submit = Submit { prompt, work, class, deadline: None, client, slide: None, session: None };
        let mut stream = handle.submit(submit).unwrap();
        let mut tokens = Vec::new();
        while let Some(reply) = stream.next() {
            if let Reply::Token { sampled, .. } = reply.unwrap() {
                tokens.push(sampled.token);
            }
        }
        tokens
    };
    let first = answer();
    told.set_engine(handle.clone(), 0);
    // As the settings of these tests say.
    until("the team", || handle.workers() == Some(Workers { threads: 5, spin_us: 7 }));
    assert_eq!(answer(), first);
    told.set_profile("latency").unwrap();
    let spin_us = told.profile().unwrap().spin_us.expect("this profile says");
    assert_ne!(spin_us, 7);
    until("the profile's word", || handle.workers() == Some(Workers { threads: 5, spin_us }));
    assert_eq!(answer(), first);
    told.set_profile("none").unwrap();
    until("the settings' word", || handle.workers() == Some(Workers { threads: 5, spin_us: 7 }));
    assert_eq!(answer(), first);
}

/// A short prompt's phases are over before a busy machine wakes the thread; they are paid for all the same.
#[test]
fn phases_that_nobody_woke_for_are_counted() {
    let (keeper, _log) = recorded("balanced");
    let (told, signal) = (keeper.told(), keeper.signal());
    let before = told.spent().unwrap();
    for activity in [Activity::Prefill, Activity::Decode, Activity::Idle] {
        signal.set(activity);
        std::thread::sleep(Duration::from_millis(30));
    }
    let after = told.spent().unwrap();
    // 30 ms at no less than the idle board's 4 W.
    assert!(after.prefill_mj - before.prefill_mj > 60.0, "{before:?} {after:?}");
    assert!(after.decode_mj - before.decode_mj > 60.0, "{before:?} {after:?}");
}

/// The sensors may be read before anyone wakes for a prompt that has come and gone: its time is the prompt's all the same. A
/// simulated board's clock stands still while it is looked at: where this machine stood still just then, once more.
#[test]
fn a_reading_does_not_take_time_from_phases_that_nobody_woke_for() {
    let spent = || {
        let mut looker = Looker::open("sim:orin-nano-super").unwrap();
        let driven = looker.sim().map(|sim| Driven::new(sim.clone()));
        let modes_by = ModesBy::NoOne("a test".into());
        let told = Arc::new(Told::new(&mut looker, driven, None, modes_by, Cores::new()));
        let mut watcher = Watcher::new(told.clone(), looker);
        watcher.look();
        for activity in [Activity::Prefill, Activity::Decode, Activity::Idle] {
            told.signal.set(activity);
            std::thread::sleep(Duration::from_millis(30));
        }
        watcher.look();
        let spent = told.spent().unwrap();
        println!("{spent:?}");
        spent.prefill_mj > 60.0 && spent.decode_mj > 60.0
    };
    assert!((0..5).any(|_| spent()));
}
