//! The service around the directory: who leads, what clients and datanodes ask, and the leader's own knowledge (leases,
//! liveness) that is never replicated. Start reading with `core`, then `tenure`, then `session`.

// Time, randomness and tasks belong here, through `tidepool_raft::rt` only: the methods that clippy.toml bans stay banned, so
// that a simulation decides them all. The types are only held.
#![allow(clippy::disallowed_types)]

mod admin;
mod agreement;
mod audit;
mod clients;
mod copying;
mod core;
mod drain_jobs;
mod endings;
mod evictor;
mod gather;
mod healing;
mod heat;
mod hot;
mod http;
mod leases;
mod level;
mod liveness;
mod logging;
mod machine;
mod master;
mod matching;
mod members;
mod metrics;
mod neighbourhood;
mod node;
mod nodes;
mod office;
mod options;
mod presence;
mod proposer;
mod puts;
mod reads;
mod recency;
mod refusal;
mod removal;
mod requests;
mod reserve;
mod room;
mod session;
#[cfg(feature = "sim")]
pub mod sim;
mod snapshots;
mod status;
mod tasks;
mod tenants;
mod tenure;
#[cfg(test)]
mod tests;
mod upkeep;
mod walk;

pub use logging::LogFilter;
pub use machine::is_applying;
pub use master::{Master, MasterError, Stopped};
pub use options::{DynamicReplication, FailoverReclaim, MasterOptions};
pub use status::Readiness;
