//! What code asks of its surroundings: tasks, timers, clocks, chance and threads. In production this is tokio, the
//! system's clocks and its random source, each a call through. With the feature `sim`, on a thread that runs a
//! simulation, it is the simulation's: virtual time, the clock of the simulated machine, the seeded generator.
//!
//! The service of the master reaches all of them through here only, so that one seed decides everything it does.
//! Consensus itself is generic over its runtime instead ([`Host`](crate::Host)).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

#[cfg(any(test, feature = "sim"))]
use crate::sim::surroundings as sim;

#[cfg(any(test, feature = "sim"))]
pub mod watch;
/// A value that many follow. In the simulation one that wakes its followers in the order in which they waited; tokio's wakes
/// them in a random one.
#[cfg(not(any(test, feature = "sim")))]
pub use tokio::sync::watch;

/// Why a task has no result: it panicked, or its runtime ended.
#[derive(Clone, Debug, thiserror::Error)]
#[error("a task ended without a result: {0}")]
pub struct TaskLost(String);

/// A task that was started. Dropped, it goes on unobserved.
pub struct Task<T> {
    inner: Inner<T>,
}

enum Inner<T> {
    Tokio(tokio::task::JoinHandle<T>),
    #[cfg(any(test, feature = "sim"))]
    Simulated(tokio::sync::oneshot::Receiver<T>),
}

impl<T> Future for Task<T> {
    type Output = Result<T, TaskLost>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.inner {
            Inner::Tokio(handle) => Pin::new(handle).poll(context).map_err(|error| TaskLost(error.to_string())),
            #[cfg(any(test, feature = "sim"))]
            Inner::Simulated(result) => Pin::new(result).poll(context).map_err(|error| TaskLost(error.to_string())),
        }
    }
}

/// Starts a task, on the machine that runs the caller.
pub fn spawn<F>(work: F) -> Task<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        let (done, result) = tokio::sync::oneshot::channel();
        sim::spawn(async move {
            // Nobody may wait for it.
            let _unobserved = done.send(work.await);
        });
        return Task { inner: Inner::Simulated(result) };
    }
    Task { inner: Inner::Tokio(tokio::spawn(work)) }
}

/// CLOCK_MONOTONIC.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return sim::now();
    }
    Instant::now()
}

/// Time since an instant that [`now`] answered.
pub fn since(earlier: Instant) -> Duration {
    now().saturating_duration_since(earlier)
}

/// Time of day, for records that a person reads, never to order anything by.
pub fn wall_clock() -> SystemTime {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return sim::wall_clock();
    }
    SystemTime::now()
}

/// A random number, for ids.
pub fn random() -> u128 {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return sim::random();
    }
    rand::random()
}

/// Fills `bytes` with random ones, fit for secrets.
pub fn fill_random(bytes: &mut [u8]) {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return bytes.iter_mut().for_each(|byte| *byte = sim::random() as u8);
    }
    rand::RngCore::fill_bytes(&mut rand::rng(), bytes);
}

/// Runs long work on a thread of low priority. Dropped, the work goes on.
pub async fn background<T, F>(name: &str, work: F) -> io::Result<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return Ok(work());
    }
    crate::background::background(name, work).await
}

/// Resolves after a time.
pub async fn sleep(time: Duration) {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return sim::sleep(time).await;
    }
    tokio::time::sleep(time).await;
}

/// Resolves at an instant.
pub async fn sleep_until(at: Instant) {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return sim::sleep(at.saturating_duration_since(sim::now())).await;
    }
    tokio::time::sleep_until(at.into()).await;
}

/// The time was over first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the time is over")]
pub struct Elapsed;

/// Work, for as long as a time lasts.
pub async fn timeout<F: IntoFuture>(limit: Duration, work: F) -> Result<F::Output, Elapsed> {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return first(work, sim::sleep(limit)).await;
    }
    tokio::time::timeout(limit, work).await.map_err(|_| Elapsed)
}

/// Work, until an instant.
pub async fn timeout_at<F: IntoFuture>(deadline: Instant, work: F) -> Result<F::Output, Elapsed> {
    #[cfg(any(test, feature = "sim"))]
    if sim::is_simulated() {
        return first(work, sim::sleep(deadline.saturating_duration_since(sim::now()))).await;
    }
    tokio::time::timeout_at(deadline.into(), work).await.map_err(|_| Elapsed)
}

#[cfg(any(test, feature = "sim"))]
async fn first<F: IntoFuture>(work: F, over: impl Future<Output = ()>) -> Result<F::Output, Elapsed> {
    use futures::future::{Either, select};
    let (work, over) = (std::pin::pin!(work.into_future()), std::pin::pin!(over));
    match select(work, over).await {
        Either::Left((result, _)) => Ok(result),
        Either::Right(_) => Err(Elapsed),
    }
}

/// Ticks: the first at once, each other a period after the one before was taken, never two in a row.
pub struct Ticks {
    period: Duration,
    next: Instant,
}

/// Ticks of this period.
pub fn ticks(period: Duration) -> Ticks {
    Ticks { period, next: now() }
}

impl Ticks {
    /// The next one. May be dropped: no tick is lost.
    pub async fn tick(&mut self) {
        if self.next > now() {
            sleep_until(self.next).await;
        }
        self.next = now() + self.period;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_simulated_machine_time_is_the_machines() {
        use openraft::async_runtime::AsyncRuntime;
        use openraft_rt_sim::SimRuntime;

        let mut runtime = SimRuntime::with_seed(1);
        let simulation = sim::simulate(1);
        let (told, wait) = tokio::sync::oneshot::channel();
        runtime.block_on(async move {
            // Two per cent fast: its second is over before a true one is.
            let machine = sim::SimMachine::new(1, 20_000, Duration::ZERO);
            sim::spawn_on(&machine, async {
                let mut ticks = ticks(Duration::from_millis(10));
                ticks.tick().await;
                sleep(Duration::from_secs(1)).await;
                // Those that were missed do not pile up.
                ticks.tick().await;
                let began = now();
                ticks.tick().await;
                told.send((sim::elapsed(), since(began))).unwrap();
            });
            let (elapsed, tick) = wait.await.unwrap();
            assert!((985..995).contains(&elapsed.as_millis()), "{elapsed:?}");
            assert!((9..=11).contains(&tick.as_millis()), "{tick:?}");
        });
        drop((runtime, simulation));
    }

    #[test]
    fn a_paused_machine_stands_still_and_a_dead_one_ends() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicU64, Ordering};

        use openraft::async_runtime::AsyncRuntime;
        use openraft_rt_sim::SimRuntime;

        let mut runtime = SimRuntime::with_seed(1);
        let simulation = sim::simulate(1);
        runtime.block_on(async {
            let machine = sim::SimMachine::new(1, 0, Duration::ZERO);
            let steps = Arc::new(AtomicU64::new(0));
            let counted = steps.clone();
            sim::spawn_on(&machine, async move {
                // What it starts belongs to it as well.
                drop(spawn(async move {
                    loop {
                        sleep(Duration::from_millis(10)).await;
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                }));
            });
            let after = async |ms| {
                SimRuntime::sleep(Duration::from_millis(ms)).await;
                steps.load(Ordering::Relaxed)
            };
            assert_eq!(after(105).await, 10);
            machine.pause(true);
            assert_eq!(after(100).await, 10);
            machine.pause(false);
            assert!(after(100).await > 15);
            machine.die();
            let last = steps.load(Ordering::Relaxed);
            assert_eq!(after(100).await, last);
            assert_eq!(Arc::strong_count(&steps), 1, "its tasks are gone");
        });
        drop((runtime, simulation));
    }

    #[tokio::test]
    async fn a_task_that_panics_is_lost_and_says_why() {
        let task = spawn(async { assert!(std::hint::black_box(false), "on purpose") });
        assert!(task.await.unwrap_err().to_string().contains("on purpose"));
    }
}
