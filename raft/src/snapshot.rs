//! Whole-state snapshots: what lets the log be purged and a purged follower return.
//!
//! `file` is one snapshot on disk, `store` the directory of them and how one becomes current, `durable` the steps in which that
//! outlives a power cut, `transfer` how one travels to another member, `partial` what of one arrived so far, `pace` how fast it is sent.

mod durable;
mod file;
mod pace;
mod partial;
mod store;
mod transfer;

pub use file::{SnapshotError, SnapshotFile};
pub use pace::Pace;
pub use partial::Wanted;
pub use store::SnapshotStore;
pub use transfer::Feed;
pub(crate) use transfer::{Offer, decode_offset, encode_offset};
