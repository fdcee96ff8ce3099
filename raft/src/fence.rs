//! The start-up fence (R2): a restarted member neither votes nor campaigns until every leader lease that its earlier
//! life may have helped to grant has run out. Without it a deposed leader can answer a read after a newer write was
//! acknowledged elsewhere. Appends are taken at once: they only ever confirm a leader.

use std::sync::atomic::{AtomicBool, Ordering};

use openraft::async_runtime::{AsyncRuntime, Instant};

use crate::election::ElectionProfile;
use crate::types::Config;

/// Whether this member may take part in elections yet.
pub(crate) struct StartupFence<C: Config> {
    until: Option<<C::AsyncRuntime as AsyncRuntime>::Instant>,
    passed: AtomicBool,
}

/// Whether to keep the fence. `Skip` exists so that a test can show what the fence prevents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FencePolicy {
    /// Wait, as production must.
    #[default]
    Keep,
    /// Vote at once after a restart: unsafe, for the regression test of the fence alone.
    #[cfg(any(test, feature = "sim"))]
    Skip,
}

impl<C: Config> StartupFence<C> {
    /// A fence from now on, if the store holds anything that could have voted or promised before.
    pub(crate) fn new(profile: ElectionProfile, store_used: bool, policy: FencePolicy) -> StartupFence<C> {
        let needed = store_used && policy == FencePolicy::Keep;
        let until = needed.then(|| <C::AsyncRuntime as AsyncRuntime>::Instant::now() + profile.startup_fence());
        StartupFence { until, passed: AtomicBool::new(!needed) }
    }

    /// True once votes may be given.
    pub(crate) fn passed(&self) -> bool {
        if self.passed.load(Ordering::Relaxed) {
            return true;
        }
        let passed = self.until.is_none_or(|until| <C::AsyncRuntime as AsyncRuntime>::Instant::now() >= until);
        if passed {
            self.passed.store(true, Ordering::Relaxed);
        }
        passed
    }

    /// Waits until votes may be given.
    pub(crate) async fn wait(&self) {
        if let (false, Some(until)) = (self.passed(), self.until) {
            C::AsyncRuntime::sleep_until(until).await;
        }
    }
}
