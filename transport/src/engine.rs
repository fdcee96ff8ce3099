//! The client's side of the seam: batches of items to one peer, each with its own result, all by one deadline.

use std::fmt;
use std::time::Instant;

use futures::future::BoxFuture;
use tidepool_proto::{Address, Error};

use crate::access::{ReadAccess, WriteAccess};
use crate::local::{LocalMut, LocalRef};
use crate::memory::{Proof, WriteReply};
use crate::stats::StatsSnapshot;

/// Moves batches. Results come in the order of the items; the call returns by the deadline, with
/// `DEADLINE_EXCEEDED` for what was not finished. When it has returned, or its future was dropped, none of the
/// items' memory is touched any more, and every [`LocalMut`] and [`LocalRef`] was dropped.
pub trait Engine: Send + Sync + 'static {
    /// Reads each item's remote range into its local slices, in order (scatter).
    fn read<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<ReadItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<(), Error>>>;

    /// Sends each item's local slices, in order, to its remote extent (gather). `Ok` means stored, with the
    /// datanode's proof.
    fn write<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<WriteItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<WriteReply, WriteError>>>;

    /// Name of the path, as shown by tools: `tcp`, `shm`, `rdma`.
    fn name(&self) -> &'static str;

    /// Counters since the engine was made.
    fn stats(&self) -> StatsSnapshot;
}

/// One range to fetch. The lengths of `into` must add up to `access.length`.
#[derive(Debug)]
pub struct ReadItem {
    /// What to read.
    pub access: ReadAccess,
    /// Where to put it.
    pub into: Vec<LocalMut>,
}

/// One extent to fill. The lengths of `from` must add up to `access.length`.
#[derive(Debug)]
pub struct WriteItem {
    /// What to write.
    pub access: WriteAccess,
    /// Where it comes from.
    pub from: Vec<LocalRef>,
}

/// A put that was not stored.
#[derive(Clone, PartialEq, Debug)]
pub struct WriteError {
    /// Why.
    pub error: Error,
    /// The datanode's signed statement that nothing more will be written; without it the end is unclean (W5): the
    /// bytes may still be on their way.
    pub aborted: Option<Proof>,
}

impl WriteError {
    /// An end without a statement from the datanode.
    pub fn unclean(error: Error) -> WriteError {
        WriteError { error, aborted: None }
    }
    /// Whether the datanode confirmed that nothing more will be written.
    pub fn is_clean(&self) -> bool {
        self.aborted.is_some()
    }
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.is_clean() { "aborted" } else { "unknown" };
        write!(f, "{} (at the datanode: {end})", self.error)
    }
}

impl std::error::Error for WriteError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
