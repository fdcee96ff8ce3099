//! Counters of one client.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// Counters of one client, at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct MetricsSnapshot { $($(#[$doc])* pub $name: u64),+ }

        #[derive(Debug, Default)]
        pub(crate) struct Metrics { $(pub(crate) $name: Counter),+ }

        impl Metrics {
            pub(crate) fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot { $($name: self.$name.get()),+ }
            }
        }

        impl MetricsSnapshot {
            /// Name and value of each counter, in a fixed order.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),+]
            }
        }
    };
}

counters! {
    /// Objects put, this client's own writes.
    puts_stored,
    /// Puts answered by an object that existed.
    puts_already_existed,
    /// Puts that failed.
    puts_failed,
    /// Puts that made fewer copies than wanted.
    puts_degraded,
    /// Payload bytes of stored objects, once per object.
    put_bytes,
    /// Gets that returned bytes.
    gets_hit,
    /// Gets of keys that are not there.
    gets_missed,
    /// Gets that failed.
    gets_failed,
    /// Payload bytes returned.
    get_bytes,
    /// Reads of one replica that failed, so that another was tried or none was left.
    get_failovers,
    /// Gets that asked the directory a second time.
    get_relocations,
    /// Reads whose bytes did not verify.
    reads_corrupt,
    /// Reads whose node did not answer.
    reads_unreachable,
    /// Reads that ended after their lease.
    reads_past_lease,
    /// Requests sent to a master, retries included.
    requests_sent,
    /// Requests sent again.
    requests_retried,
    /// Calls that ended at their deadline.
    deadlines_exceeded,
    /// Times a leader was found.
    leaders_found,
    /// Answers NOT_LEADER.
    not_leader_answers,
    /// Answers of a stale master that were refused.
    stale_answers_refused,
    /// Streams to a master that ended.
    streams_lost,
    /// Dials to a master.
    dials,
    /// Times a datanode became suspect.
    nodes_suspected,
    /// Times a suspect datanode was found well.
    nodes_healed,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
