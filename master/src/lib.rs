//! The master: the directory of what is where, and the service around it.
//!
//! `directory` is the pure replicated state machine: the same ops give the same state on every master. `service` holds
//! everything that is not replicated and that needs clocks, tasks and sockets: who leads, leases, liveness, eviction
//! decisions, gRPC and HTTP. No payload byte passes through this crate, and it does not import `transport`.
//!
//! Start with `directory::op`, then `service`.

pub mod directory;
pub mod eviction;
pub mod restore;
mod service;
pub mod snapshots;

#[cfg(feature = "sim")]
pub use service::sim;
pub use service::{
    DynamicReplication, FailoverReclaim, LogFilter, Master, MasterError, MasterOptions, Readiness, Stopped, is_applying,
};
