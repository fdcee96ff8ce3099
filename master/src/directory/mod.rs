//! The directory: the pure replicated state machine, in DRAM, the same on every master.
//!
//! `Directory::apply_entry` is its only mutation and reads no clock, random source, thread or hash order (APPLY-PURE);
//! `clippy.toml` bans them here by name. Time is the log time of entries, ids are positions in the log, random choices
//! are drawn from the log position. Leases never enter: the leader decides about them and proposes explicit ids (L2).
//!
//! Start with `op` (what can be asked), `outcome` (what is answered), `apply/` (what each op does), then `space` and
//! `free_space` (who has which bytes) and `objects` (records and shards). Reads are in `read` and `eviction`.
//!
//! Lock order: core, topology, one shard. Apply takes the core per op; readers of keys never take it.

mod ancestors;
mod apply;
mod audit;
pub mod codec;
mod copies;
mod core;
mod digest;
mod eviction;
mod free_space;
mod groups;
pub mod image;
mod invariants;
pub mod limits;
mod listing;
mod nodes;
mod objects;
pub mod op;
pub mod outcome;
mod placement;
mod read;
mod replication;
mod sessions;
mod space;
mod tasks;
mod tenants;
#[cfg(test)]
pub(crate) mod tests;
mod topology;
mod varint;
pub mod view;

pub use ancestors::{Ancestor, Ancestors};
pub use audit::{AuditProgress, STEP_ITEMS as AUDIT_STEP_ITEMS, Violation, ViolationKind};
pub use codec::{DecodeError, EntryBuilder, encode_op};
pub use eviction::Neighbourhood;
pub use image::{FORMAT_VERSION, FrozenDirectory, Manifest, Part, RestoreError, admit_image};
pub use limits::{Config, ConfigState, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, Strategy};
pub use op::{
    ClearReplicas, Contact, CopyStart, CreateTask, DataType, Entry, Op, PutEnd, PutStart, Quota, Remove, ReplicaEnd,
    ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction, Statuses, TaskId, TaskKind, TenantId, Token,
    Turn, Uuid,
};
pub use outcome::{Answered, Grant, GrantedReplica, Outcome, Removal};
pub use tasks::{Task, TaskState};
pub use view::{
    Change, CopyView, Counts, GroupView, KeyTest, ListFilter, ListPage, ListedObject, NodeView, ObjectState,
    ObjectView, ReplicaPlace, RetiredView, SegmentView, SessionView, TenantView, Victim,
};

use core::Core;
use objects::Shards;
use parking_lot::RwLock;
use std::cell::Cell;
use std::sync::Arc;
use tidepool_proto::{History, LogTime};
use topology::Topology;

/// The replicated state. One task applies entries; any thread may read.
#[derive(Debug)]
pub struct Directory {
    core: RwLock<Core>,
    topology: RwLock<Topology>,
    shards: Arc<Shards>,
}

impl Directory {
    /// An empty directory.
    pub fn new(_history: History) -> Directory {
        Directory {
            core: RwLock::new(Core::new()),
            topology: RwLock::new(Core::new().topology()),
            shards: Arc::new(Shards::new()),
        }
    }

    /// Applies one committed entry: one outcome an op, in order. The log index must grow (asserted).
    pub fn apply_entry(&self, index: u64, term: u64, entry: &Entry<'_>) -> Vec<Outcome> {
        self.apply_entry_skipping((index, term), entry, &[], &Cell::new(0))
    }

    /// The same, with the ops of these ordinals refused (M1). Before each op `reached` is set to its ordinal.
    pub fn apply_entry_skipping(
        &self,
        at: (u64, u64),
        entry: &Entry<'_>,
        skipped: &[u32],
        reached: &Cell<u32>,
    ) -> Vec<Outcome> {
        apply::apply_entry(&self.core, &self.shards, &self.topology, at, entry, skipped, reached)
    }

    /// A committed entry without ops: only the applied position moves.
    pub fn skip(&self, index: u64, term: u64) {
        self.core.write().advance(index, term);
    }

    /// (index, term) of the last applied entry; None before the first.
    pub fn applied(&self) -> Option<(u64, u64)> {
        self.core.read().applied
    }

    /// Log time of the last applied entry.
    pub fn log_time(&self) -> LogTime {
        self.core.read().clock
    }

    /// What the log may hold (M6).
    pub fn feature_level(&self) -> u16 {
        self.core.read().feature_level
    }

    /// The state digest (M2): equal at equal applied indexes on every master.
    pub fn digest(&self) -> u128 {
        self.core.read().digest()
    }

    /// (applied index, digest there), read together; only between entries it is the state at that index.
    pub fn digest_at(&self) -> (u64, u128) {
        let core = self.core.read();
        (core.applied.map_or(0, |(index, _)| index), core.digest())
    }
}
