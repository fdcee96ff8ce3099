//! Replicated log over openraft: RocksDB log store, gRPC network, leadership, snapshots.
//!
//! The crate replicates opaque payloads into a [`StateMachine`] and does not know what an object is. Everything is
//! generic over the async runtime and the machine under it ([`Host`]): production ([`Node`]) runs on tokio, the
//! deterministic simulation runs the same code on virtual time, over a network that carries the same bytes.
//!
//! Start with `node`, the handle; `open` and `bootstrap` say how a member starts, `fence` and `read` why a read is
//! current, `log` what is durable when, `inbound` who may speak to a member at all.

// Without a disk to open there is no node, only the types.
#![cfg_attr(not(any(test, feature = "rocksdb", feature = "sim")), allow(dead_code))]

mod apply;
mod background;
mod belonging;
mod bootstrap;
pub mod codec;
mod compaction;
mod departure;
mod divergence;
mod election;
mod failure;
mod fence;
pub mod grpc;
mod host;
mod identity;
mod inbound;
mod lag;
mod leadership;
pub mod log;
mod machine;
mod membership;
mod metrics;
pub mod network;
mod node;
mod open;
mod options;
mod own_disk;
mod peer;
mod propose;
mod read;
#[cfg(feature = "rocksdb")]
mod recover;
#[cfg(feature = "rocksdb")]
mod restore;
mod retired;
mod roll_call;
pub mod rt;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod skips;
pub mod snapshot;
mod status;
mod tokio_node;
mod transfer;
pub mod types;
#[cfg(feature = "rocksdb")]
mod unfinished;

pub use background::background;
pub use compaction::CompactError;
pub use election::ElectionProfile;
pub use failure::FatalError;
pub use fence::FencePolicy;
pub use host::Host;
pub use identity::ClusterIdentity;
pub use inbound::{Arrival, Inbound};
pub use lag::LAG_MAX;
pub use leadership::{Leadership, Role};
pub use machine::{Frozen, Levels, LogPosition, MachineError, Replaced, StateMachine, Unsound};
pub use membership::{ChangeReport, MemberChange, MembershipError};
pub use node::RaftNode;
pub use open::OpenError;
pub use options::{Agreement, Member, Options};
pub use propose::{Applied, ProposeError};
pub use read::ReadError;
#[cfg(feature = "rocksdb")]
pub use recover::{Facts, LastOne, skip, start_over};
#[cfg(feature = "rocksdb")]
pub use restore::{Restored, is_vacant, knows_cluster};
pub use skips::{OpPlace, PayloadHash, StoppedAt};
pub use status::{MemberStatus, NodeStatus};
pub use tokio_node::{Node, NodeService};
pub use transfer::TransferError;
