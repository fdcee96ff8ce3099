//! The surroundings of code that runs on a simulated machine ([`rt`](crate::rt)): which machine that is, whether it
//! lives, how fast its clocks go.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::{SimInstant, SimRuntime};
use parking_lot::Mutex;

use super::host::draw;

thread_local! {
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
    static MACHINE: RefCell<Option<Arc<SimMachine>>> = const { RefCell::new(None) };
}

/// Parts of a million.
const MILLION: i128 = 1_000_000;
/// Where the clocks of all machines begin: nothing that subtracts from them goes below zero.
const CLOCK_BASE: Duration = Duration::from_secs(1_000_000);

/// A simulated machine: its tasks run while it lives and is not paused, and see its clocks.
pub struct SimMachine {
    /// Its number, for errors.
    pub id: u64,
    dead: AtomicBool,
    paused: AtomicBool,
    parked: Mutex<Vec<Waker>>,
    /// How much faster than true time its clocks go, in millionths.
    fast_ppm: i64,
    /// Its CLOCK_BOOTTIME when the simulation began, beside [`CLOCK_BASE`].
    boot_offset: Duration,
    /// What its time of day is wrong by, in milliseconds.
    wall_ms: AtomicI64,
}

impl SimMachine {
    /// A machine whose clocks go `fast_ppm` millionths faster and began `boot_offset` later.
    pub fn new(id: u64, fast_ppm: i64, boot_offset: Duration) -> Arc<SimMachine> {
        Arc::new(SimMachine {
            id,
            dead: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            parked: Mutex::default(),
            fast_ppm,
            boot_offset,
            wall_ms: AtomicI64::new(0),
        })
    }

    /// Ends every task of it: none is polled again.
    pub fn die(&self) {
        self.dead.store(true, Ordering::Release);
        self.wake_parked();
    }

    /// Whether it died.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Stops every task of it where it stands, as SIGSTOP does, or lets them go on.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Release);
        if !paused {
            self.wake_parked();
        }
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Moves its time of day.
    pub fn step_wall_clock(&self, by_ms: i64) {
        self.wall_ms.fetch_add(by_ms, Ordering::AcqRel);
    }

    fn wake_parked(&self) {
        let parked = std::mem::take(&mut *self.parked.lock());
        parked.into_iter().for_each(Waker::wake);
    }

    /// Its own measure of a stretch of true time.
    fn own(&self, time: Duration) -> Duration {
        scale(time, MILLION + i128::from(self.fast_ppm), MILLION)
    }

    /// True time of a stretch by its own measure.
    fn true_time(&self, own: Duration) -> Duration {
        scale(own, MILLION, MILLION + i128::from(self.fast_ppm))
    }
}

fn scale(time: Duration, by: i128, of: i128) -> Duration {
    Duration::from_nanos((time.as_nanos() as i128 * by / of) as u64)
}

/// While it lives, this thread runs a simulation.
pub struct Simulation(());

/// Declares that this thread runs a simulation from here on, on a fresh [`SimRuntime`].
pub fn simulate(seed: u64) -> Simulation {
    super::host::seed_host(seed);
    SIMULATED.set(true);
    tidepool_proto::clock::simulate(Some(boot_time));
    Simulation(())
}

impl Drop for Simulation {
    fn drop(&mut self) {
        SIMULATED.set(false);
        MACHINE.set(None);
        tidepool_proto::clock::simulate(None);
    }
}

/// Whether this thread runs one.
pub fn is_simulated() -> bool {
    SIMULATED.get()
}

/// The machine whose task is being polled.
pub fn machine() -> Option<Arc<SimMachine>> {
    MACHINE.with_borrow(Clone::clone)
}

/// True time since the simulation began.
pub fn elapsed() -> Duration {
    SimInstant::try_now().map_or(Duration::ZERO, SimInstant::elapsed_since_start)
}

fn own_elapsed() -> Duration {
    machine().map_or_else(elapsed, |machine| machine.own(elapsed()))
}

/// An instant of the system's that the simulation counts from: only differences to it mean anything.
fn base() -> Instant {
    static BASE: OnceLock<Instant> = OnceLock::new();
    *BASE.get_or_init(Instant::now)
}

pub(crate) fn now() -> Instant {
    base() + own_elapsed()
}

fn boot_time() -> Duration {
    CLOCK_BASE + machine().map_or(Duration::ZERO, |machine| machine.boot_offset) + own_elapsed()
}

pub(crate) fn wall_clock() -> SystemTime {
    let wrong_ms = machine().map_or(0, |machine| machine.wall_ms.load(Ordering::Acquire));
    let right = CLOCK_BASE * 1_000 + elapsed();
    SystemTime::UNIX_EPOCH + Duration::from_millis((right.as_millis() as i64 + wrong_ms).max(0) as u64)
}

pub(crate) fn random() -> u128 {
    draw()
}

pub(crate) async fn sleep(time: Duration) {
    let true_time = machine().map_or(time, |machine| machine.true_time(time));
    SimRuntime::sleep(true_time).await;
}

/// Starts a task on the machine of the caller.
pub fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    match machine() {
        Some(machine) => spawn_on(&machine, work),
        None => drop(SimRuntime::spawn(work)),
    }
}

/// Starts a task on a machine.
pub fn spawn_on(machine: &Arc<SimMachine>, work: impl Future<Output = ()> + Send + 'static) {
    drop(SimRuntime::spawn(On::new(machine.clone(), work)));
}

/// Work on a machine: polled while it lives and is not paused. On one that died it resolves never.
pub struct On<F> {
    machine: Arc<SimMachine>,
    work: Option<Pin<Box<F>>>,
}

impl<F: Future> On<F> {
    /// `work`, on `machine`.
    pub fn new(machine: Arc<SimMachine>, work: F) -> On<F> {
        On { machine, work: Some(Box::pin(work)) }
    }
}

/// Restores who ran before.
struct Before(Option<Arc<SimMachine>>);

impl Drop for Before {
    fn drop(&mut self) {
        MACHINE.set(self.0.take());
    }
}

fn enter(machine: &Arc<SimMachine>) -> Before {
    Before(MACHINE.replace(Some(machine.clone())))
}

impl<F: Future> Future for On<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let machine = self.machine.clone();
        if machine.is_dead() {
            let _before = enter(&machine);
            self.work = None;
            return Poll::Pending;
        }
        if machine.is_paused() {
            machine.parked.lock().push(context.waker().clone());
            return Poll::Pending;
        }
        let Some(work) = &mut self.work else { return Poll::Pending };
        let _before = enter(&machine);
        work.as_mut().poll(context)
    }
}

impl<F> Drop for On<F> {
    fn drop(&mut self) {
        let _before = enter(&self.machine);
        self.work = None;
    }
}
