//! What the node asks of the machine it runs on beside the async runtime: blocking work, randomness, and whether the
//! machine was suspended. Production runs on tokio; the simulation answers deterministically.

use std::future::Future;
use std::io;
use std::time::Duration;

use crate::background::background;
use crate::types::{Config, TokioConfig};

/// The machine under a node.
pub trait Host: Config {
    /// Runs work that blocks (files, serialising the state) away from the async threads.
    fn blocking<T, F>(work: F) -> impl Future<Output = io::Result<T>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static;

    /// As [`Host::blocking`], for work that is long and may wait: it must not take the processor from who serves.
    fn background<T, F>(work: F) -> impl Future<Output = io::Result<T>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        Self::blocking(work)
    }

    /// A random number, for identities.
    fn random() -> u128;

    /// How long the machine has been suspended since it booted: time that CLOCK_MONOTONIC, and with it every lease,
    /// did not see pass.
    fn suspended() -> Duration;
}

impl<O: std::fmt::Debug + Send + Sync + 'static> Host for TokioConfig<O> {
    async fn blocking<T, F>(work: F) -> io::Result<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
    }

    async fn background<T, F>(work: F) -> io::Result<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        background("image", work).await
    }

    fn random() -> u128 {
        rand::random()
    }

    fn suspended() -> Duration {
        use rustix::time::{ClockId, clock_gettime};
        let read = |clock| {
            let now = clock_gettime(clock);
            Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
        };
        // Monotonic first: the difference can then only be overstated, which costs one confirmation.
        let monotonic = read(ClockId::Monotonic);
        read(ClockId::Boottime).saturating_sub(monotonic)
    }
}
