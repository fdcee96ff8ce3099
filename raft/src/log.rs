//! The log store: votes and entries on disk, in one ordered stream, durable before they are acknowledged.
//!
//! Openraft's calls change the state in memory and join a bounded queue; one flusher takes what has queued up,
//! writes it as one batch, syncs once and then completes every call of the batch (group commit). What is in memory
//! is readable at once and acknowledged only after its sync. After one failed write or sync the store is poisoned:
//! a later sync could report success for pages the kernel already dropped, so nothing is tried again.
//!
//! Start at [`LogStore`]; below it are the [`Disk`] it writes to ([`RocksDisk`] or the simulation's `SimulatedDisk`)
//! and the check of everything at open.

#[cfg(feature = "rocksdb")]
mod directory;
mod disk;
mod error;
mod flusher;
mod hanging;
mod latency;
mod metrics;
mod reader;
mod recovery;
#[cfg(feature = "rocksdb")]
mod rocks;
#[cfg(any(test, feature = "sim"))]
mod simulated;
mod state;
mod store;
mod tail;
#[cfg(test)]
mod tests;
#[cfg(feature = "rocksdb")]
mod wal;

pub use disk::{Disk, StoreId, StoredState, Write};
pub use error::{LogFailure, OpenLogError};
pub(crate) use latency::AppendLatency;
#[cfg(feature = "rocksdb")]
pub(crate) use recovery::recover;
pub use recovery::{OpenReport, TornTail};
#[cfg(feature = "rocksdb")]
pub use rocks::RocksDisk;
#[cfg(any(test, feature = "sim"))]
pub use simulated::SimulatedDisk;
pub use store::{Flushing, LogOptions, LogStore};
