//! The state digest: the sum mod 2^128 of xxh3-128 over canonical records of everything apply reads (M2).
//!
//! A sum does not depend on order, so it is kept up as records come, change and go; equal states have equal digests
//! whatever way they were reached. Each record starts with its kind, fields are fixed-width little endian.

use super::ancestors::Ancestor;
use super::copies::OpenCopy;
use super::core::OpenPut;
use super::groups::GroupName;
use super::op::{SoftPinAction, TenantId};
use super::sessions::Session;
use super::space::{Retired, Segment, Space};
use super::tasks::Task;
use super::tenants::Tenant;
use super::{
    limits::{Config, ConfigState, FEATURE_LEVEL_FIRST},
    nodes::Node,
    objects::{Record, SegmentSlot},
};
use super::{
    op::{SessionId, TaskId},
    outcome::{Answered, Removal},
};
use tidepool_proto::{LogTime, NodeId, ReplicaId, SegmentId};
use xxhash_rust::xxh3::xxh3_128;

/// A running sum with the buffer that records are written into.
#[derive(Clone, Debug, Default)]
pub(super) struct Digest {
    sum: u128,
    record: Canonical,
}

impl Digest {
    pub(super) fn sum(&self) -> u128 {
        self.sum
    }

    pub(super) fn add(&mut self, fill: impl FnOnce(&mut Canonical)) {
        self.sum = self.sum.wrapping_add(self.record.hash(fill));
    }

    pub(super) fn sub(&mut self, fill: impl FnOnce(&mut Canonical)) {
        self.sum = self.sum.wrapping_sub(self.record.hash(fill));
    }
}

/// Whether a record comes or goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sign {
    Add,
    Sub,
}

impl Sign {
    /// Adds a record's hash to a sum, or takes it away.
    pub(super) fn apply(self, sum: &mut u128, hash: u128) {
        *sum = match self {
            Sign::Add => sum.wrapping_add(hash),
            Sign::Sub => sum.wrapping_sub(hash),
        };
    }

    /// The same with a count.
    pub(super) fn count(self, sum: &mut u64, by: u64) {
        *sum = match self {
            Sign::Add => sum.wrapping_add(by),
            Sign::Sub => sum.wrapping_sub(by),
        };
    }
}

/// A record being written in its canonical form.
#[derive(Clone, Debug, Default)]
pub(super) struct Canonical(Vec<u8>);

impl Canonical {
    /// A record of nothing counts for nothing.
    pub(super) fn hash(&mut self, fill: impl FnOnce(&mut Canonical)) -> u128 {
        self.0.clear();
        fill(self);
        if self.0.is_empty() { 0 } else { xxh3_128(&self.0) }
    }

    fn kind(&mut self, kind: Kind) {
        self.0.push(kind as u8);
    }

    fn number(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn clock(&mut self, clock: LogTime) {
        self.kind(Kind::Clock);
        self.number(clock.0);
    }

    /// Nothing at the first level, whose binaries do not know of levels.
    pub(super) fn feature_level(&mut self, level: u16) {
        if level > FEATURE_LEVEL_FIRST {
            self.kind(Kind::FeatureLevel);
            self.number(level.into());
        }
    }

    pub(super) fn config(&mut self, state: &ConfigState) {
        self.kind(Kind::Config);
        self.number(state.config.lease_ttl_max_ms);
        self.number(state.config.put_start_discard_timeout_ms);
        self.number(state.config.objects_max);
        self.0.push(state.config.strategy as u8);
        self.0.extend_from_slice(&state.config.secret.0);
        self.number(state.lease_ttl_max_before_ms);
        self.number(state.lease_ttl_lowered_at.0);
        // Left out at their defaults, as by those that do not know them.
        let Config { granted_bytes_min, hard_pinned_percent_max, .. } = Config::default();
        if (state.config.granted_bytes_min, state.config.hard_pinned_percent_max)
            != (granted_bytes_min, hard_pinned_percent_max)
        {
            self.number(state.config.granted_bytes_min);
            self.number(state.config.hard_pinned_percent_max);
        }
    }

    pub(super) fn checkpoint(&mut self, index: u64, digest: u128) {
        self.kind(Kind::Checkpoint);
        self.number(index);
        self.0.extend_from_slice(&digest.to_le_bytes());
    }

    pub(super) fn ancestor(&mut self, ancestor: &Ancestor) {
        self.kind(Kind::Ancestor);
        self.0.extend_from_slice(&ancestor.cluster.0);
        self.number(ancestor.history.0);
        self.number(ancestor.until);
    }

    pub(super) fn node(&mut self, id: NodeId, node: &Node) {
        self.kind(Kind::Node);
        self.number(id.0);
        self.number(node.incarnation.0);
        self.0.extend_from_slice(&node.node_uuid);
        self.0.extend_from_slice(&node.process_uuid);
        self.bytes(node.address.as_bytes());
        self.bytes(node.host_id.as_bytes());
        self.0.push(node.contact as u8);
        self.number(node.earlier_processes.len() as u64);
        for uuid in &node.earlier_processes {
            self.0.extend_from_slice(uuid);
        }
    }

    pub(super) fn segment(&mut self, segment: &Segment) {
        self.kind(Kind::Segment);
        self.number(segment.id.0);
        self.number(segment.node.0);
        self.number(segment.incarnation.0);
        self.bytes(segment.name.as_bytes());
        self.number(segment.capacity);
        self.0.push(segment.draining.into());
    }

    pub(super) fn free_extent(&mut self, segment: SegmentId, offset: u64, bytes: u64) {
        self.kind(Kind::FreeExtent);
        self.number(segment.0);
        self.number(offset);
        self.number(bytes);
    }

    pub(super) fn session(&mut self, id: SessionId, session: &Session) {
        self.kind(Kind::Session);
        self.number(id.0);
        self.0.extend_from_slice(&session.client_uuid);
        self.bytes(session.host_id.as_bytes());
        self.number(session.floor);
    }

    pub(super) fn answered(&mut self, session: SessionId, sequence: u64, answered: Answered) {
        self.kind(Kind::Answered);
        self.number(session.0);
        self.number(sequence);
        let (answer, number) = answered_parts(answered);
        self.0.push(answer);
        self.number(number);
    }

    pub(super) fn tenant(&mut self, id: TenantId, tenant: &Tenant) {
        self.kind(Kind::Tenant);
        self.number(id.0.into());
        self.bytes(tenant.name.as_bytes());
        self.number(tenant.quota.bytes);
        self.number(tenant.quota.objects);
        self.0.push(tenant.quota.refuse.into());
    }

    pub(super) fn next_tenant(&mut self, next: u16) {
        self.kind(Kind::NextTenant);
        self.number(next.into());
    }

    pub(super) fn lost_member(&mut self, group: &GroupName, key: &[u8]) {
        self.kind(Kind::LostMember);
        self.number(group.0.0.into());
        self.bytes(&group.1);
        self.bytes(key);
    }

    pub(super) fn copy(&mut self, replica: ReplicaId, copy: &OpenCopy, space: &Space) {
        self.kind(Kind::Copy);
        self.number(replica.0);
        self.number(copy.object.0);
        self.number(copy.instead_of.map_or(0, |r| r.0));
        self.number(space.segment(copy.segment).id.0);
        self.number(copy.offset);
        self.number(copy.bytes);
        self.number(copy.started.0);
        self.number(copy.task.0);
    }

    pub(super) fn task(&mut self, id: TaskId, task: &Task) {
        self.kind(Kind::Task);
        self.number(id.0);
        let asked = &task.asked;
        self.0.push(asked.kind as u8);
        self.0.push(task.state as u8);
        self.0.push(asked.unmount.into());
        self.0.extend_from_slice(&asked.token);
        self.number(asked.object.0);
        for segments in [&asked.sources, &asked.targets] {
            self.number(segments.len() as u64);
            segments.iter().for_each(|segment| self.number(segment.0));
        }
        self.number(asked.concurrency.into());
        self.number(task.created.0);
        self.number(task.ended.0);
        self.number(task.done);
        self.number(task.done_bytes);
        self.number(task.left);
        self.bytes(task.message.as_bytes());
    }

    pub(super) fn object(&mut self, record: &Record, open: Option<&OpenPut>, space: &Space) {
        self.object_in(record, open, |slot| space.segment(slot).id);
    }

    /// The same where the segments' ids come from elsewhere.
    pub(super) fn object_in(
        &mut self,
        record: &Record,
        open: Option<&OpenPut>,
        segment_of: impl Fn(SegmentSlot) -> SegmentId,
    ) {
        self.kind(Kind::Object);
        self.number(record.object.0);
        self.number(record.tenant.0.into());
        self.number(record.length);
        self.number(record.started.0);
        self.0.extend_from_slice(&record.stored_slots.to_le_bytes());
        self.0.push(record.asked.granted());
        self.0.push(record.asked.wanted());
        self.0.push(record.copies);
        self.0.push(record.data_type.0);
        self.0.push(record.hard_pinned.into());
        self.number(record.soft_pinned_until().0);
        self.bytes(record.group().map_or(&[][..], |name| name));
        if let Some(open) = open {
            self.0.extend_from_slice(&open.token);
            self.number(open.session.0);
            self.number(open.replaces.map_or(0, |old| old.0));
            let (action, ttl_ms) = soft_pin_parts(open.soft_pin);
            self.0.push(action);
            self.number(ttl_ms);
        }
        self.bytes(&record.key);
        for replica in &record.replicas {
            self.number(replica.id.0);
            self.number(segment_of(replica.segment).0);
            self.number(replica.offset);
        }
    }

    pub(super) fn retired(&mut self, id: ReplicaId, retired: &Retired, space: &Space) {
        self.kind(Kind::Retired);
        self.number(id.0);
        self.number(retired.object.0);
        self.number(space.segment(retired.segment).id.0);
        self.number(retired.offset);
        self.number(retired.bytes);
        self.0.push(retired.clean.into());
    }
}

#[derive(Clone, Copy)]
#[repr(u8)]
enum Kind {
    Clock = 1,
    Config = 2,
    Checkpoint = 3,
    Node = 4,
    Segment = 5,
    FreeExtent = 6,
    Session = 7,
    Answered = 8,
    Object = 9,
    Retired = 10,
    Tenant = 11,
    LostMember = 12,
    Copy = 13,
    Task = 14,
    NextTenant = 15,
    FeatureLevel = 16,
    Ancestor = 17,
}

/// An answer as a number of its kind and one more.
pub(super) fn answered_parts(answered: Answered) -> (u8, u64) {
    match answered {
        Answered::Removal(Removal::Removed(object)) => (0, object.0),
        Answered::Removal(Removal::NotFound) => (1, 0),
        Answered::Removal(Removal::NotReady) => (2, 0),
        Answered::Removed { objects } => (3, objects),
        Answered::Upsert(object) => (4, object.0),
        Answered::Cleared(cleared) => (5, cleared.into()),
    }
}

/// An action as a number of its kind and its time.
pub(super) fn soft_pin_parts(action: SoftPinAction) -> (u8, u64) {
    match action {
        SoftPinAction::Preserve => (0, 0),
        SoftPinAction::Enable { ttl_ms } => (1, ttl_ms),
        SoftPinAction::Disable => (2, 0),
    }
}
