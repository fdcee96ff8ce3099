//! When each client session was last heard of, whoever led: what its expiry is judged by.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use tidepool_proto::clock::BootInstant;

use crate::directory::SessionId;
use crate::directory::limits::SESSIONS_MAX;

/// Sessions and when they were heard, on this master's CLOCK_BOOTTIME.
#[derive(Default)]
pub struct Clients {
    heard_ms: DashMap<u64, Arc<AtomicU64>>,
}

impl Clients {
    /// A request of this session arrived.
    pub fn heard(&self, session: SessionId) {
        if session.0 == 0 {
            return;
        }
        let now_ms = BootInstant::now().as_millis();
        match self.heard_ms.get(&session.0) {
            Some(heard) => heard.store(now_ms, Ordering::Relaxed),
            // A request may name any number; those that are no sessions are forgotten in time, and do not fill this.
            None if self.heard_ms.len() >= 2 * SESSIONS_MAX => {}
            None => self.heard_ms.entry(session.0).or_default().store(now_ms, Ordering::Relaxed),
        }
    }

    /// Whether a request of it arrived not longer ago than this.
    pub fn heard_within(&self, session: SessionId, timeout: Duration) -> bool {
        let since_ms = BootInstant::now().as_millis().saturating_sub(timeout.as_millis() as u64);
        self.heard_ms.get(&session.0).is_some_and(|heard| heard.load(Ordering::Relaxed) >= since_ms)
    }

    /// Forgets those not heard for this long.
    pub fn forget_before(&self, timeout: Duration) {
        let since_ms = BootInstant::now().as_millis().saturating_sub(timeout.as_millis() as u64);
        self.heard_ms.retain(|_, heard| heard.load(Ordering::Relaxed) >= since_ms);
    }
}
