//! The runtime of simulated members: openraft's simulation runtime, whose tasks belong to the machine that started
//! them, so that a machine can die or stand still with all that runs on it.

use std::future::Future;
use std::io;
use std::time::Duration;

use openraft::OptionalSend;
use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;

use super::surroundings::{On, machine};

/// See the module.
#[derive(Debug)]
pub struct MachineRuntime(SimRuntime);

type Of<T> = <SimRuntime as AsyncRuntime>::JoinHandle<T>;

impl AsyncRuntime for MachineRuntime {
    type JoinError = <SimRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = Of<T>;
    type Sleep = <SimRuntime as AsyncRuntime>::Sleep;
    type Instant = <SimRuntime as AsyncRuntime>::Instant;
    type TimeoutError = <SimRuntime as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = <SimRuntime as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = <SimRuntime as AsyncRuntime>::ThreadLocalRng;
    type Mpsc = <SimRuntime as AsyncRuntime>::Mpsc;
    type Watch = <SimRuntime as AsyncRuntime>::Watch;
    type Oneshot = <SimRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <SimRuntime as AsyncRuntime>::Mutex<T>;

    fn spawn<T>(future: T) -> Of<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        match machine() {
            Some(machine) => SimRuntime::spawn(On::new(machine, future)),
            None => SimRuntime::spawn(future),
        }
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        SimRuntime::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        SimRuntime::sleep_until(deadline)
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(duration: Duration, future: F) -> Self::Timeout<R, F> {
        SimRuntime::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(deadline: Self::Instant, future: F) -> Self::Timeout<R, F> {
        SimRuntime::timeout_at(deadline, future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        SimRuntime::is_panic(join_error)
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        SimRuntime::thread_rng()
    }

    fn new(threads: usize) -> Self {
        MachineRuntime(SimRuntime::new(threads))
    }

    fn block_on<F: Future<Output = T>, T>(&mut self, future: F) -> T {
        self.0.block_on(future)
    }

    async fn spawn_blocking<F, T>(work: F) -> Result<T, io::Error>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        SimRuntime::spawn_blocking(work).await
    }
}
