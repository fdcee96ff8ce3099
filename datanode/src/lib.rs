//! A datanode lends DRAM to the pool and serves the payload in it.
//!
//! It registers with the master quorum, mounts its segments, and beats to the leader, whose fences it obeys. Clients put and get
//! straight from and to its memory through `transport`; what they may touch is decided here, from capabilities the master signed,
//! without asking a master. The datanode alone writes its memory, and it verifies every object on arrival.
//!
//! What is absent: keys, the directory, placement. A datanode knows extents by their replica ids, and nothing of an object but what
//! its header says. Nothing in DRAM outlives an incarnation.
//!
//! Start with [`Datanode`], then `membership` (the order of lives), `life` (what one incarnation holds), `payload` (the transport
//! seam) and `writes` (ONE-WRITER, fences, replays).

mod beat;
mod clock_rate;
mod copier;
mod datanode;
mod describe;
mod host_memory;
mod http;
mod identity;
mod inspection;
mod life;
mod listener;
mod log_clock;
mod masters;
mod membership;
mod metrics;
mod options;
mod outbox;
mod payload;
mod prefault;
mod presence;
mod registration;
pub mod segment;
#[cfg(feature = "sim")]
pub mod sim;
mod succession;
mod verify;
mod writes;

pub use datanode::{Datanode, DatanodeError, Readiness, SEGMENTS_MAX};
pub use identity::IdentityError;
pub use membership::StopReason;
pub use options::{DatanodeLimits, DatanodeOptions, HugePages, MasterTiming, Prefault, split_dram};
pub use segment::SegmentError;
