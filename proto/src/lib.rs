//! What the parts of Tidepool say to each other: protobuf messages and services (`v1`), stable error codes,
//! identities, addresses, the self-describing object format and the capabilities that guard the data plane.
//!
//! No policy lives here: these are types, their encodings and the checks that both ends of a wire must agree on.
//! Start with `ids` for the words, then `object` for what is stored and `capability` for who may touch it.

pub mod address;
pub mod capability;
pub mod clock;
pub mod error;
pub mod ids;
pub mod keys;
pub mod object;
#[cfg(feature = "sim")]
pub mod plant;

/// Generated messages and services of `tidepool.v1`.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("tidepool.v1");
}

pub use address::Address;
pub use error::{Error, ErrorCode};
pub use ids::{ClusterId, History, Incarnation, LogTime, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

/// Whether a guard is left out on this thread, so that a simulation can see that it would be missed. In every other build false.
#[cfg(feature = "sim")]
#[macro_export]
macro_rules! planted {
    ($guard:ident) => {
        $crate::plant::Plant::$guard.is_on()
    };
}

/// Whether a guard is left out: never.
#[cfg(not(feature = "sim"))]
#[macro_export]
macro_rules! planted {
    ($guard:ident) => {
        false
    };
}

/// Version of the wire protocol; peers further apart than one are refused at the handshake.
pub const PROTOCOL_VERSION: u32 = 1;

/// Outcomes of numbered requests (W8) that masters keep a session. A client numbers no further ahead of its floor.
pub const OUTCOMES_PER_SESSION_MAX: usize = 4096;
