//! Rust client of Tidepool: two-phase put, leased get, leader discovery, retries, deadlines.
//!
//! `ClientOptions -> Client::connect -> Client`, a cheap clone; every call is a batch with one result per item, and
//! every call ends by its deadline (plus [`options::DEADLINE_ALLOWANCE`]).
//!
//! What happens where: [`client`] is the handle; `put` and `get` are the two payload paths; `lookup` and `remove`
//! talk to the directory only; `session` is one stream to one master, `scout` keeps one to each and finds the
//! leader; `suspects` remembers unreachable datanodes; `verify` believes no byte it has not checked (I2, R1).
//!
//! Architecture invariants: this crate decides nothing about placement, leases or space; it caches no replica list
//! beyond a lease (W7); it never retries a call whose first attempt may have been executed unless the repeat is
//! recognised as the same request (W8).

pub mod client;
pub mod get;
pub mod metrics;
pub mod options;
pub mod put;
pub mod remove;
pub mod stat;

pub use client::Client;
pub use metrics::MetricsSnapshot;
pub use options::ClientOptions;
pub use put::{PutItem, PutOptions, PutOutcome, ReplicaMode};
pub use remove::RemoveMode;
pub use stat::{ListPage, ListedObject, ObjectStat, ReplicaStat};
pub use tidepool_proto::{Address, Error, ErrorCode};
