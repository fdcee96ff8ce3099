//! Published snapshots: images of the directory in a place that outlives the master's host, a directory or an
//! S3-compatible store.
//!
//! Nothing here decides when to publish or talks to a quorum; `service::snapshots` does. Publishing never touches the
//! log, and what is published starts nothing by itself (I5): restoring is an explicit command.
//!
//! `location` is where (one URL), `layout` what the names there mean, `descriptor` whose state a snapshot is, `store` what a
//! place can do and `local` and `s3` the two kinds, `durable` the steps in which a directory keeps what it was given; `catalogue` reads, `publish` writes, as fast as `pace` allows, `retention` removes, `policy` says
//! when.

// Files, sockets and their clocks belong here; the directory has none of them.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod catalogue;
mod descriptor;
mod durable;
#[cfg(test)]
mod durable_tests;
mod layout;
mod local;
mod location;
mod pace;
pub mod policy;
mod publish;
mod retention;
mod s3;
#[cfg(test)]
mod s3_server_tests;
#[cfg(test)]
mod s3_tests;
mod store;
#[cfg(test)]
mod tests;

pub use catalogue::{Candidate, Catalogue, PublishedImage, Rejected, Skipped};
pub use descriptor::{Ancestor, Descriptor, MemberLine};
pub use layout::Place;
pub use location::{Location, LocationError};
pub use pace::Pace;
pub use publish::{ImageFile, PublishError, Published, Whose, publish};
pub use retention::{RETAIN_MIN, Removed, prune};
pub use store::{Store, StoreError};
