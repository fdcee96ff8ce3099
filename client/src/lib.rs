//! Rust client of Tidepool: two-phase put, leased get, leader discovery, retries, deadlines.
//!
//! `ClientOptions -> Client::connect -> Client`, a cheap clone; every call is a batch with one result per item, and
//! every call ends by its deadline (plus [`options::DEADLINE_ALLOWANCE`]).
//!
//! What happens where: [`client`] is the handle; `put` (with `writer`) and `get` (with `fetch`, `reader`) are the two
//! payload paths; `lookup` and `remove` talk to the directory only; `call` is one request with its repeats; `link` is
//! one stream to one master, `member` keeps one to each, `quorum` judges who leads; `suspects` remembers unreachable
//! datanodes; `landing` believes no byte it has not checked (I2, R1); `abandoned` gives back what nobody waits for any more.
//!
//! Architecture invariants: this crate decides nothing about placement, leases or space; it caches no replica list
//! beyond a lease (W7); it never retries a call whose first attempt may have been executed unless the repeat is
//! recognised as the same request (W8).

mod abandoned;
mod backoff;
mod call;
mod checksums;
pub mod client;
mod deadline;
mod fetch;
pub mod get;
mod grants;
mod landing;
mod link;
mod lookup;
pub mod matching;
mod member;
pub mod metrics;
mod nodes;
pub mod options;
pub mod plane;
pub mod put;
mod quorum;
mod reader;
mod release;
pub mod remove;
mod reports;
pub mod resolver;
mod sequence;
pub mod stat;
mod stepped;
mod suspects;
mod unreadable;
mod writer;

pub use client::Client;
pub use get::{GetInto, GetRange, GetRangeInto};
pub use matching::{Matching, Removed};
pub use metrics::MetricsSnapshot;
pub use options::ClientOptions;
pub use plane::EngineFactory;
pub use put::{PutItem, PutOptions, PutOutcome, ReplicaMode, SoftPin};
pub use remove::RemoveMode;
pub use resolver::{Resolve, SystemResolver};
pub use stat::{ListFilter, ListPage, ListedObject, ObjectStat, ReplicaStat};
pub use tidepool_proto::v1::DataType;
pub use tidepool_proto::{Address, Error, ErrorCode};
pub use tidepool_transport::{Buffer, LocalMut};
