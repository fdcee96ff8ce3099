//! The state digest: the sum mod 2^128 of xxh3-128 over canonical records of everything apply reads (M2).
//!
//! A sum does not depend on order, so it is kept up as records come, change and go; equal states have equal digests
//! whatever way they were reached. Each record starts with its kind, fields are fixed-width little endian.

use super::op::Token;
use super::sessions::Session;
use super::space::{Retired, Segment, Space};
use super::{limits::ConfigState, nodes::Node, objects::Record};
use super::{op::SessionId, outcome::Removal};
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

/// A record being written in its canonical form.
#[derive(Clone, Debug, Default)]
pub(super) struct Canonical(Vec<u8>);

impl Canonical {
    fn hash(&mut self, fill: impl FnOnce(&mut Canonical)) -> u128 {
        self.0.clear();
        fill(self);
        xxh3_128(&self.0)
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

    pub(super) fn config(&mut self, state: &ConfigState) {
        self.kind(Kind::Config);
        self.number(state.config.lease_ttl_max_ms);
        self.number(state.config.put_start_discard_timeout_ms);
        self.number(state.config.objects_max);
        self.0.extend_from_slice(&state.config.secret.0);
        self.number(state.lease_ttl_max_before_ms);
        self.number(state.lease_ttl_lowered_at.0);
    }

    pub(super) fn checkpoint(&mut self, index: u64, digest: u128) {
        self.kind(Kind::Checkpoint);
        self.number(index);
        self.0.extend_from_slice(&digest.to_le_bytes());
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

    pub(super) fn removal(&mut self, session: SessionId, sequence: u64, removal: Removal) {
        self.kind(Kind::Removal);
        self.number(session.0);
        self.number(sequence);
        let (answer, object) = match removal {
            Removal::Removed(object) => (0, object.0),
            Removal::NotFound => (1, 0),
            Removal::NotReady => (2, 0),
        };
        self.0.push(answer);
        self.number(object);
    }

    pub(super) fn object(&mut self, record: &Record, token: Option<&Token>, space: &Space) {
        self.kind(Kind::Object);
        self.number(record.object.0);
        self.number(record.tenant.0.into());
        self.number(record.length);
        self.number(record.session.0);
        self.number(record.started.0);
        self.0.extend_from_slice(&record.stored_slots.to_le_bytes());
        self.0.push(record.granted);
        self.0.push(record.copies);
        if let Some(token) = token {
            self.0.extend_from_slice(token);
        }
        self.bytes(&record.key);
        for replica in &record.replicas {
            self.number(replica.id.0);
            self.number(space.segment(replica.segment).id.0);
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
    Removal = 8,
    Object = 9,
    Retired = 10,
}
