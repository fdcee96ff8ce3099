//! Moves bytes between a datanode's registered memory and a client's buffers.
//!
//! The crate knows segments, offsets and opaque authorisations; it does not know what a key is, never asks a master,
//! and never tries a second path by itself. Who may touch what is decided behind [`Memory`], which the datanode
//! implements; which replica to try next is decided by the client.
//!
//! Start with [`memory`] (the server's side of the seam) and [`engine`] (the client's side), then [`local`], which
//! makes it safe to hand buffers to an engine that outlives the call. [`tcp`] is the first engine; [`conformance`] is
//! what every engine must pass.
//!
//! Two promises hold for every engine:
//! - once `Engine::read` or `Engine::write` has returned, or its future was dropped, the engine touches none of the
//!   memory that was handed to it (R4);
//! - the extent of a put is written only between `WriteTicket::enter` and `WriteTicket::leave`, so that a fence which
//!   has seen `leave` knows that nothing more will arrive (W5).

pub mod access;
pub mod bench;
pub mod conformance;
pub mod engine;
pub mod loan;
pub mod local;
pub mod memory;
pub mod stats;
pub mod tcp;

pub use access::{ReadAccess, WriteAccess};
pub use engine::{Engine, ReadItem, WriteError, WriteItem};
pub use loan::Loan;
pub use local::{Buffer, LocalMut, LocalRef, Owner};
pub use memory::{Memory, Proof, RawSlice, ReadGuard, WriteOutcome, WriteReply, WriteTicket};
pub use stats::{Stats, StatsSnapshot};
