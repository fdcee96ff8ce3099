//! Reads: take a shard's lock, copy what is answered, let go.

use super::objects::{Record, Shards};
use super::op::{Contact, SessionId, TenantId};
use super::outcome::Answered;
use super::sessions::Session;
use super::space::Segment;
use super::tenants::Tenant;
use super::view::{Change, Counts, GroupView, NodeView, ObjectView, RetiredView, SegmentView, SessionView, TenantView};
use super::{Ancestors, ConfigState, Directory, Uuid};
use std::sync::Arc;
use tidepool_proto::{LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

impl Directory {
    /// Looks a key up. `f` runs under the shard's read lock, so that a lease can be granted against a concurrent
    /// Retire (L1); it must not call the directory.
    pub fn with_object<R>(&self, tenant: TenantId, key: &[u8], f: impl FnOnce(Option<&ObjectView<'_>>) -> R) -> R {
        let topology = self.topology.read();
        let hash = self.shards.hash(tenant, key);
        let shard = self.shards.read(Shards::shard_of(hash));
        let record = shard.find(hash, tenant, key).and_then(|slot| shard.record(slot));
        f(record.map(|r| topology.view(r)).as_ref())
    }

    /// Looks many keys up; `f` is called in order, each time under that key's shard lock. It must not call the
    /// directory.
    pub fn with_objects<'k>(
        &self,
        tenant: TenantId,
        keys: impl IntoIterator<Item = &'k [u8]>,
        mut f: impl FnMut(usize, Option<&ObjectView<'_>>),
    ) {
        let topology = self.topology.read();
        for (i, key) in keys.into_iter().enumerate() {
            let hash = self.shards.hash(tenant, key);
            let shard = self.shards.read(Shards::shard_of(hash));
            let record = shard.find(hash, tenant, key).and_then(|slot| shard.record(slot));
            f(i, record.map(|r| topology.view(r)).as_ref());
        }
    }

    /// Looks an object up by id; `f` as in [`Directory::with_object`].
    pub fn with_object_id<R>(&self, object: ObjectId, f: impl FnOnce(Option<&ObjectView<'_>>) -> R) -> R {
        let at = self.core.read().index.get(&object).copied();
        let topology = self.topology.read();
        let Some(at) = at else { return f(None) };
        let shard = self.shards.read(at.shard());
        // The slot may have another object by now.
        let record = shard.record(at.slot()).filter(|r| r.object == object);
        f(record.map(|r| topology.view(r)).as_ref())
    }

    /// Hash of a tenant's key, the same on every master of this history.
    pub fn key_hash(&self, tenant: TenantId, key: &[u8]) -> u64 {
        self.shards.hash(tenant, key)
    }

    /// From now on what becomes readable and what goes is kept for `take_changes`.
    pub fn keep_changes(&self) {
        self.core.write().changes.get_or_insert_default();
    }

    /// What became readable or went since the last call, in order.
    pub fn take_changes(&self) -> Vec<Change> {
        self.core.write().changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Every COMPLETE object as a change, the oldest first: after the whole state was replaced.
    pub fn all_readable(&self) -> Vec<Change> {
        let core = self.core.read();
        let change = |at| self.shards.with(at, |r| r.is_complete().then(|| readable(&self.shards, r))).flatten();
        core.index.values().filter_map(|&at| change(at)).collect()
    }

    /// What a session's key-named request answered, if it was executed.
    pub fn answered(&self, session: SessionId, sequence: u64) -> Option<Answered> {
        self.core.read().sessions.by_id.get(&session)?.outcomes.get(&sequence).copied()
    }

    /// The clusters that this directory was in before.
    pub fn ancestors(&self) -> Arc<Ancestors> {
        self.topology.read().ancestors.clone()
    }

    /// All registered nodes, by id.
    pub fn nodes(&self) -> Vec<NodeView> {
        self.topology.read().nodes.values().cloned().collect()
    }

    /// One node.
    pub fn node(&self, node: NodeId) -> Option<NodeView> {
        self.topology.read().nodes.get(&node).cloned()
    }

    /// All mounted segments, by id.
    pub fn segments(&self) -> Vec<SegmentView> {
        self.core.read().space.iter().map(|(_, segment)| segment_view(segment)).collect()
    }

    /// One segment.
    pub fn segment(&self, segment: SegmentId) -> Option<SegmentView> {
        let core = self.core.read();
        core.space.by_id.get(&segment).map(|&slot| segment_view(core.space.segment(slot)))
    }

    /// One session.
    pub fn session(&self, session: SessionId) -> Option<SessionView> {
        self.core.read().sessions.by_id.get(&session).map(|s| session_view(session, s))
    }

    /// The session of a client process.
    pub fn session_of(&self, client_uuid: &Uuid) -> Option<SessionId> {
        self.core.read().sessions.by_uuid.get(client_uuid).copied()
    }

    /// All sessions, by id.
    pub fn sessions(&self) -> Vec<SessionView> {
        self.core.read().sessions.by_id.iter().map(|(&id, s)| session_view(id, s)).collect()
    }

    /// Number of a registered tenant.
    pub fn tenant(&self, name: &str) -> Option<TenantId> {
        self.topology.read().tenants.get(name).copied()
    }

    /// Bytes that a tenant may still pin for good.
    pub fn hard_pin_room(&self, tenant: TenantId) -> u64 {
        self.core.read().hard_pin_room(tenant)
    }

    /// All tenants and what they hold, by number.
    pub fn tenants(&self) -> Vec<TenantView> {
        let core = self.core.read();
        core.tenants.iter().map(|(id, tenant)| tenant_view(id, tenant)).collect()
    }

    /// One tenant.
    pub fn tenant_view(&self, tenant: TenantId) -> Option<TenantView> {
        let core = self.core.read();
        core.tenants.get(tenant).map(|t| tenant_view(tenant, t))
    }

    /// A group: whether a reader that cannot reach some nodes can read all of it. Walks its members only if a node is
    /// suspect, or the reader suspects one.
    pub fn group(&self, tenant: TenantId, name: &[u8], suspects: &[u64]) -> Option<GroupView> {
        let core = self.core.read();
        let group = core.groups.get(&(tenant, name.into()))?;
        let topology = self.topology.read();
        let readable = |id: &ObjectId| {
            let view = |r: &Record| topology.view(r).listed().any(|place| !suspects.contains(&place.node.0));
            core.index.get(id).is_some_and(|&at| self.shards.with(at, view) == Some(true))
        };
        let all_heard = suspects.is_empty() && topology.suspect_nodes == 0;
        let whole = group.is_finished() && (all_heard || group.members.iter().all(readable));
        Some(GroupView { members: group.members.len(), whole })
    }

    /// Members that `group` would walk.
    pub fn group_walk(&self, tenant: TenantId, name: &[u8], suspects: &[u64]) -> usize {
        let core = self.core.read();
        if suspects.is_empty() && self.topology.read().suspect_nodes == 0 {
            return 0;
        }
        let group = core.groups.get(&(tenant, name.into())).filter(|group| group.is_finished());
        group.map_or(0, |group| group.members.len())
    }

    /// How much of everything there is. Walks the nodes and segments, not the objects.
    pub fn counts(&self) -> Counts {
        let core = self.core.read();
        let mut counts = Counts {
            objects: core.index.len() as u64,
            processing: core.open.len() as u64,
            nodes: core.nodes.by_id.len() as u64,
            suspect_nodes: core.nodes.by_id.values().filter(|n| n.contact == Contact::Suspect).count() as u64,
            segments: core.space.by_id.len() as u64,
            sessions: core.sessions.by_id.len() as u64,
            retired_clean: (core.retired.len() - core.unclean.len()) as u64,
            retired_unclean: core.unclean.len() as u64,
            ..Counts::default()
        };
        for (_, segment) in core.space.iter() {
            counts.capacity_bytes += segment.capacity;
            counts.free_bytes += segment.free.free();
            counts.processing_bytes += segment.processing;
            counts.complete_bytes += segment.complete;
            counts.retired_bytes += segment.retired;
        }
        counts
    }

    /// Memory that a freeze which is being written holds beside the state, about; 0 without one.
    pub fn freeze_bytes(&self) -> u64 {
        self.shards.undo_bytes()
    }

    /// The replicated settings.
    pub fn config(&self) -> ConfigState {
        self.core.read().config
    }

    /// (index, digest) of the last Checkpoint op.
    pub fn checkpoint(&self) -> Option<(u64, u128)> {
        self.core.read().checkpoint
    }

    /// Largest extent that a put could get now, on nodes that are heard.
    pub fn largest_free(&self) -> u64 {
        self.core.read().space.largest_free()
    }

    /// Retired replicas of a node that wait for its fence, the oldest first.
    pub fn unclean(&self, node: NodeId, limit: usize) -> Vec<ReplicaId> {
        let core = self.core.read();
        let of_node = core.unclean.range((node, ReplicaId(0))..=(node, ReplicaId(u64::MAX)));
        of_node.take(limit).map(|&(_, replica)| replica).collect()
    }

    /// Retired replicas that wait for `Reclaim`, by id, after a cursor.
    pub fn reclaimable(&self, after: Option<ReplicaId>, limit: usize) -> Vec<RetiredView> {
        let core = self.core.read();
        let from = after.map_or(ReplicaId(0), |id| ReplicaId(id.0.saturating_add(1)));
        let clean = core.retired.range(from..).filter(|(_, r)| r.clean).take(limit);
        clean
            .map(|(&replica, retired)| {
                let segment = core.space.segment(retired.segment);
                RetiredView {
                    replica,
                    object: retired.object,
                    segment: segment.id,
                    node: segment.node,
                    offset: retired.offset,
                    bytes: retired.bytes,
                }
            })
            .collect()
    }

    /// Open puts that are older than the discard timeout at this log time, oldest first.
    pub fn discardable(&self, now: LogTime, limit: usize) -> Vec<ObjectId> {
        let core = self.core.read();
        let timeout_ms = core.config.config.put_start_discard_timeout_ms;
        let mut objects = Vec::new();
        for object in core.open.keys() {
            let started = core.index.get(object).and_then(|&at| self.shards.with(at, |r| r.started));
            // Objects start in the order of their ids, so the first young one ends the search.
            if objects.len() == limit || started.is_none_or(|s| now.0.saturating_sub(s.0) < timeout_ms) {
                break;
            }
            objects.push(*object);
        }
        objects
    }
}

/// A COMPLETE record as the change that made it.
pub(super) fn readable(shards: &Shards, record: &Record) -> Change {
    Change::Readable {
        tenant: record.tenant,
        key: shards.hash(record.tenant, &record.key),
        object: record.object,
        bytes: record.all_bytes(),
        group: record.group().map(|name| shards.hash(record.tenant, name)),
    }
}

fn tenant_view(id: TenantId, tenant: &Tenant) -> TenantView {
    TenantView {
        tenant: id,
        name: tenant.name.clone(),
        quota: tenant.quota,
        bytes: tenant.bytes,
        objects: tenant.objects,
    }
}

fn segment_view(segment: &Segment) -> SegmentView {
    SegmentView {
        segment: segment.id,
        node: segment.node,
        incarnation: segment.incarnation,
        name: segment.name.clone(),
        contact: segment.contact,
        draining: segment.draining,
        capacity: segment.capacity,
        free: segment.free.free(),
        processing: segment.processing,
        complete: segment.complete,
        retired: segment.retired,
        largest_free: segment.free.largest(),
        free_extents: segment.free.extents() as u64,
    }
}

fn session_view(id: SessionId, session: &Session) -> SessionView {
    SessionView {
        session: id,
        client_uuid: session.client_uuid,
        host_id: session.host_id.clone(),
        floor: session.floor,
        open_grants: session.open_grants,
        open_bytes: session.open_bytes,
        outcomes: session.outcomes.len(),
    }
}
