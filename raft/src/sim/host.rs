//! The simulated machine under a member: blocking work runs in place, randomness is seeded, nothing suspends.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use super::random::SplitMix;
use crate::host::Host;
use crate::types::SimConfig;

thread_local! {
    static RANDOM: RefCell<SplitMix> = RefCell::new(SplitMix::new(0));
}

/// Seeds what [`Host::random`] answers on this thread.
pub fn seed_host(seed: u64) {
    RANDOM.with_borrow_mut(|random| *random = SplitMix::new(seed));
}

/// The next number of this thread's generator.
pub(crate) fn draw() -> u128 {
    RANDOM.with_borrow_mut(|random| u128::from(random.number()) << 64 | u128::from(random.number()))
}

impl<O: std::fmt::Debug + Send + Sync + 'static> Host for SimConfig<O> {
    async fn blocking<T, F>(work: F) -> io::Result<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        Ok(work())
    }

    fn random() -> u128 {
        draw()
    }

    fn wall_clock() -> Duration {
        Duration::ZERO
    }

    fn suspended() -> Duration {
        Duration::ZERO
    }
}
