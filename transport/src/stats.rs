//! Counters of an engine or a server: plain atomics, read as one snapshot.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub struct Stats { $($(#[$doc])* pub $name: AtomicU64),+ }

        /// Counters at one moment.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct StatsSnapshot { $($(#[$doc])* pub $name: u64),+ }

        impl Stats {
            /// Reads all counters.
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

counters! {
    /// Payload bytes received.
    bytes_in,
    /// Payload bytes sent.
    bytes_out,
    /// Read items answered with their bytes.
    reads,
    /// Write items stored.
    writes,
    /// Items that ended with an error.
    item_errors,
    /// Payload bytes received and thrown away: fenced, refused or past their deadline.
    bytes_discarded,
    /// Connections opened: dialled by an engine, accepted by a server.
    connections_opened,
    /// Connections open now.
    connections_open,
    /// Dials and handshakes that failed.
    connections_failed,
    /// Connections closed because of a malformed frame.
    bad_frames,
}

impl Stats {
    /// Adds to one counter.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
    /// Takes from one gauge.
    pub fn sub(counter: &AtomicU64, n: u64) {
        counter.fetch_sub(n, Ordering::Relaxed);
    }
}
