//! The clock of leases, grants and deadlines: CLOCK_BOOTTIME, which counts through a suspend (T1, T2).
//!
//! Instants never travel between hosts, only remaining durations; each side counts on its own clock and assumes
//! that rates differ by less than 5 %.

use std::ops::Sub;
use std::time::Duration;

#[cfg(feature = "sim")]
thread_local! {
    static SIMULATED: std::cell::Cell<Option<fn() -> Duration>> = const { std::cell::Cell::new(None) };
}

/// From here on `time` is this thread's CLOCK_BOOTTIME; none: the system's is, again.
#[cfg(feature = "sim")]
pub fn simulate(time: Option<fn() -> Duration>) {
    SIMULATED.set(time);
}

/// An instant of this host's CLOCK_BOOTTIME.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// Now.
    pub fn now() -> BootInstant {
        #[cfg(feature = "sim")]
        if let Some(time) = SIMULATED.get() {
            return BootInstant(time());
        }
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        BootInstant(Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32))
    }
    /// Time since then; zero if it lies ahead.
    pub fn elapsed(self) -> Duration {
        BootInstant::now() - self
    }
    /// Milliseconds since boot.
    pub fn as_millis(self) -> u64 {
        self.0.as_millis() as u64
    }
    /// That much later.
    pub fn after(self, duration: Duration) -> BootInstant {
        BootInstant(self.0.saturating_add(duration))
    }
}

impl Sub for BootInstant {
    type Output = Duration;
    fn sub(self, earlier: BootInstant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// What a holder may count on of a duration measured by another host's clock: 5 % less.
pub fn holder_share(granted: Duration) -> Duration {
    granted.saturating_sub(granted / 20)
}

/// What a grantor must wait before it relies on a holder's clock having run out: 5 % more.
pub fn grantor_share(granted: Duration) -> Duration {
    granted.saturating_add(granted / 20)
}
