//! Whole-state snapshots: what lets the log be purged and a purged follower return.
//!
//! `file` is one snapshot on disk, `store` the directory of them and how one becomes current, `transfer` how one
//! travels to another member.

mod file;
mod store;
mod transfer;

pub use file::{SnapshotError, SnapshotFile};
pub use store::{Incoming, SnapshotStore};
pub(crate) use transfer::Offer;
