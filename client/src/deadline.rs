//! The deadline every call carries (R4).

use std::future::Future;
use std::time::Duration;

use tidepool_proto::{Error, ErrorCode};
use tokio::time::Instant;

/// Longest deadline that is believed; longer ones are cut to it, so that instants cannot overflow.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// When a call must have returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// So much from now.
    pub(crate) fn after(duration: Duration) -> Deadline {
        Deadline(Instant::now() + duration.min(DEADLINE_MAX))
    }
    /// What is left; zero once passed.
    pub(crate) fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
    /// What is left in whole milliseconds, as sent to a master; None when less than one.
    pub(crate) fn remaining_ms(self) -> Option<u32> {
        match self.remaining().as_millis() {
            0 => None,
            ms => Some(u32::try_from(ms).unwrap_or(u32::MAX)),
        }
    }
    /// True once passed.
    pub(crate) fn expired(self) -> bool {
        self.remaining().is_zero()
    }
    /// As an instant.
    pub(crate) fn instant(self) -> Instant {
        self.0
    }
    /// The sooner of this and `duration` from now.
    pub(crate) fn within(self, duration: Duration) -> Deadline {
        self.min(Deadline::after(duration))
    }
    /// Runs to completion or to the deadline.
    pub(crate) async fn bound<T>(self, what: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout_at(self.0, what).await.ok()
    }
    /// Sleeps, but not beyond the deadline. False when the deadline came first.
    pub(crate) async fn sleep(self, duration: Duration) -> bool {
        let until = Instant::now() + duration.min(DEADLINE_MAX);
        tokio::time::sleep_until(until.min(self.0)).await;
        until < self.0
    }
    /// The error of a call that ran into it.
    pub(crate) fn error(self, doing: &str) -> Error {
        Error::new(ErrorCode::DeadlineExceeded, format!("the deadline passed while {doing}"))
    }
}
