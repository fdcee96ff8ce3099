//! The directory: the pure replicated state machine. `Directory::apply_entry` is its only mutation.

pub mod codec;
pub mod limits;
pub mod op;
pub mod outcome;
mod varint;
pub mod view;

pub use codec::{DecodeError, EntryBuilder, encode_op};
pub use limits::{Config, ConfigState, FEATURE_LEVEL};
pub use op::{
    Contact, Entry, Op, PutEnd, PutStart, Remove, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionId,
    Statuses, TenantId, Token, Uuid,
};
pub use outcome::{Grant, GrantedReplica, Outcome, Removal};
pub use view::*;

use std::io;
use tidepool_proto::{History, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// See the module.
#[derive(Debug)]
pub struct Directory {
    history: History,
}

/// The whole state at one index, to be written beside the apply loop.
#[derive(Debug)]
pub struct FrozenDirectory {
    bytes: Vec<u8>,
}

impl FrozenDirectory {
    /// Writes it.
    pub fn write_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(&self.bytes)
    }
}

/// Why a snapshot was not installed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Reading failed.
    #[error("snapshot could not be read: {0}")]
    Io(#[from] io::Error),
    /// Its content is damaged or of another version.
    #[error("snapshot is damaged: {0}")]
    Damaged(String),
}

// Signatures first; the bodies follow within the hour.
#[allow(unused_variables, clippy::unimplemented, missing_docs)]
impl Directory {
    /// An empty directory. The history only seeds the hash of keys; it is not part of the state.
    pub fn new(history: History) -> Directory {
        Directory { history }
    }
    /// Applies one committed entry: one outcome an op, in order. `index` must grow.
    pub fn apply_entry(&self, index: u64, term: u64, entry: &Entry<'_>) -> Vec<Outcome> {
        unimplemented!()
    }
    /// A committed entry without ops: only the applied position moves.
    pub fn skip(&self, index: u64, term: u64) {
        unimplemented!()
    }
    /// (index, term) of the last applied entry; None before the first.
    pub fn applied(&self) -> Option<(u64, u64)> {
        unimplemented!()
    }
    /// Log time of the last applied entry.
    pub fn log_time(&self) -> LogTime {
        unimplemented!()
    }
    pub fn digest(&self) -> u128 {
        unimplemented!()
    }
    /// (applied index, digest), read together.
    pub fn digest_at(&self) -> (u64, u128) {
        unimplemented!()
    }
    pub fn recompute_digest(&self) -> u128 {
        unimplemented!()
    }
    pub fn check_invariants(&self) -> Result<(), String> {
        unimplemented!()
    }
    /// Looks a key up. `f` runs under the shard's read lock, so that a lease may be granted against a concurrent Retire
    /// (L1); it must not call the directory.
    pub fn with_object<R>(&self, tenant: TenantId, key: &[u8], f: impl FnOnce(Option<&ObjectView<'_>>) -> R) -> R {
        unimplemented!()
    }
    /// Looks many keys up; `f` is called in order, each time under that key's shard lock.
    pub fn with_objects<'k>(
        &self,
        tenant: TenantId,
        keys: impl IntoIterator<Item = &'k [u8]>,
        f: impl FnMut(usize, Option<&ObjectView<'_>>),
    ) {
        unimplemented!()
    }
    /// Looks an object up by id.
    pub fn with_object_id<R>(&self, object: ObjectId, f: impl FnOnce(Option<&ObjectView<'_>>) -> R) -> R {
        unimplemented!()
    }
    /// One page of the readable objects under a prefix, in hash order.
    pub fn list(&self, tenant: TenantId, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> ListPage {
        unimplemented!()
    }
    pub fn nodes(&self) -> Vec<NodeView> {
        unimplemented!()
    }
    pub fn node(&self, node: NodeId) -> Option<NodeView> {
        unimplemented!()
    }
    pub fn segments(&self) -> Vec<SegmentView> {
        unimplemented!()
    }
    pub fn segment(&self, segment: SegmentId) -> Option<SegmentView> {
        unimplemented!()
    }
    pub fn session(&self, session: SessionId) -> Option<SessionView> {
        unimplemented!()
    }
    pub fn sessions(&self) -> Vec<SessionView> {
        unimplemented!()
    }
    pub fn counts(&self) -> Counts {
        unimplemented!()
    }
    pub fn config(&self) -> ConfigState {
        unimplemented!()
    }
    /// (index, digest) of the last Checkpoint op.
    pub fn checkpoint(&self) -> Option<(u64, u128)> {
        unimplemented!()
    }
    /// Largest extent that a put could get now, on nodes that are heard.
    pub fn largest_free(&self) -> u64 {
        unimplemented!()
    }
    /// Retired replicas of a node that wait for its fence.
    pub fn unclean(&self, node: NodeId, limit: usize) -> Vec<ReplicaId> {
        unimplemented!()
    }
    /// Retired replicas that wait for `Reclaim`, by id, after a cursor.
    pub fn reclaimable(&self, after: Option<ReplicaId>, limit: usize) -> Vec<RetiredView> {
        unimplemented!()
    }
    /// Open puts that are older than the discard timeout at this log time, oldest first.
    pub fn discardable(&self, now: LogTime, limit: usize) -> Vec<ObjectId> {
        unimplemented!()
    }
    /// Oldest COMPLETE objects until their bytes reach `bytes`, from a cursor. `accept` runs under no lock.
    pub fn oldest_victims(
        &self,
        after: Option<ObjectId>,
        bytes: u64,
        limit: usize,
        accept: impl FnMut(&Victim) -> bool,
    ) -> VictimPage {
        unimplemented!()
    }
    /// Victims that lie side by side, so that an extent of `extent_bytes` comes free; None when none was found near
    /// the oldest objects.
    pub fn neighbour_victims(&self, extent_bytes: u64, accept: impl FnMut(&Victim) -> bool) -> Option<Vec<Victim>> {
        unimplemented!()
    }
    /// The whole state, encoded in one pass: apply waits for it.
    pub fn freeze(&self) -> FrozenDirectory {
        unimplemented!()
    }
    /// Replaces the whole state by a frozen one.
    pub fn restore(&self, input: &mut dyn io::Read) -> Result<(), RestoreError> {
        unimplemented!()
    }
}
