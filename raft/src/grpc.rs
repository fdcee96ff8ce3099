//! The network of production: gRPC over TCP. `channel` is one connection, `client` the lanes to the other members,
//! `service` the receiving end.

mod channel;
mod client;
mod service;

pub use client::GrpcNetwork;
pub use service::GrpcService;

/// Longest message taken from or sent to a member: an append request of one longest payload and its neighbours.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;
/// Bytes of a snapshot in one message.
const SNAPSHOT_CHUNK_BYTES: usize = 1 << 20;
/// Bytes in flight to a member before its answers are waited for.
const WINDOW_BYTES: u32 = 4 << 20;
