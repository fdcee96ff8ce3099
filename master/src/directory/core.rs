//! `Core`: everything apply reads except the object records, which lie in the shards.

use super::ancestors::Ancestors;
use super::audit::{Auditor, ObjectSums, Parts};
use super::copies::Copies;
use super::digest::{Digest, Sign};
use super::groups::Groups;
use super::limits::{ConfigState, FEATURE_LEVEL_FIRST};
use super::nodes::Nodes;
use super::objects::{Location, Record};
use super::op::{Contact, SessionId, SoftPinAction, TenantId, Token};
use super::sessions::Sessions;
use super::space::{Retired, Space};
use super::tasks::Tasks;
use super::tenants::{Tenant, Tenants};
use super::topology::{SegmentPlace, Topology};
use super::view::{Change, NodeView};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::{LogTime, NodeId, ObjectId, ReplicaId};

/// See the module.
#[derive(Debug)]
pub(super) struct Core {
    /// (index, term) of the last applied entry. Not in the digest: apply decides nothing by it.
    pub(super) applied: Option<(u64, u64)>,
    pub(super) clock: LogTime,
    /// What the log may hold (M6). In the digest from the second on.
    pub(super) feature_level: u16,
    pub(super) config: ConfigState,
    pub(super) checkpoint: Option<(u64, u128)>,
    /// The clusters that this directory was in before.
    pub(super) ancestors: Arc<Ancestors>,
    pub(super) nodes: Nodes,
    pub(super) space: Space,
    pub(super) sessions: Sessions,
    /// Every object by id, which is by age.
    pub(super) index: BTreeMap<ObjectId, Location>,
    /// Objects being put.
    pub(super) open: BTreeMap<ObjectId, OpenPut>,
    /// COMPLETE objects that an open upsert will replace, and by what; follows from `open`.
    pub(super) upserts: BTreeMap<ObjectId, ObjectId>,
    pub(super) tenants: Tenants,
    pub(super) groups: Groups,
    pub(super) copies: Copies,
    pub(super) tasks: Tasks,
    /// COMPLETE objects with fewer replicas than are wanted, and those with more; follow from the records.
    pub(super) degraded: BTreeSet<ObjectId>,
    pub(super) extra: BTreeSet<ObjectId>,
    pub(super) retired: BTreeMap<ReplicaId, Retired>,
    /// The unclean ones of `retired`, by node.
    pub(super) unclean: BTreeSet<(NodeId, ReplicaId)>,
    /// Part of the digest of what is neither an object, nor free, nor in `parts`.
    pub(super) digest: Digest,
    /// The objects' part.
    pub(super) objects: ObjectSums,
    /// The parts that may be large.
    pub(super) parts: Parts,
    /// Not state.
    pub(super) auditor: Auditor,
    /// What became readable or went since it was last taken; kept only when somebody takes it. Not state.
    pub(super) changes: Option<Vec<Change>>,
}

/// What is known of a put until it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OpenPut {
    /// Retry token.
    pub(super) token: Token,
    /// Writer.
    pub(super) session: SessionId,
    /// What becomes of the soft pin when it ends.
    pub(super) soft_pin: SoftPinAction,
    /// The COMPLETE object under the same key that it will replace. While it is set this one is under no key.
    pub(super) replaces: Option<ObjectId>,
}

impl Core {
    /// The empty state.
    pub(super) fn new() -> Core {
        let mut config = ConfigState::default();
        config.lease_ttl_max_before_ms = config.config.lease_ttl_max_ms;
        let mut digest = Digest::default();
        digest.add(|c| c.clock(LogTime(0)));
        digest.add(|c| c.config(&config));
        let tenants = Tenants::new();
        digest.add(|c| c.next_tenant(tenants.next));
        digest.add(|c| c.tenant(TenantId::DEFAULT, tenants.get(TenantId::DEFAULT).expect("it always exists")));
        Core {
            applied: None,
            clock: LogTime(0),
            feature_level: FEATURE_LEVEL_FIRST,
            config,
            checkpoint: None,
            ancestors: Arc::default(),
            nodes: Nodes::default(),
            space: Space::default(),
            sessions: Sessions::default(),
            index: BTreeMap::new(),
            open: BTreeMap::new(),
            upserts: BTreeMap::new(),
            tenants,
            groups: Groups::default(),
            copies: Copies::default(),
            tasks: Tasks::default(),
            degraded: BTreeSet::new(),
            extra: BTreeSet::new(),
            retired: BTreeMap::new(),
            unclean: BTreeSet::new(),
            digest,
            objects: ObjectSums::new(),
            parts: Parts::default(),
            auditor: Auditor::default(),
            changes: None,
        }
    }

    /// State digest (M2).
    pub(super) fn digest(&self) -> u128 {
        let sums = [self.space.digest(), self.objects.sum(), self.parts.sum()];
        sums.iter().fold(self.digest.sum(), |sum, &part| sum.wrapping_add(part))
    }

    /// Notes whether an object has fewer or more replicas than are wanted.
    pub(super) fn note_copies(&mut self, record: &Record) {
        for (set, belongs) in [(&mut self.degraded, record.is_degraded()), (&mut self.extra, record.has_extra())] {
            if belongs {
                set.insert(record.object);
            } else {
                set.remove(&record.object);
            }
        }
    }

    /// Notes what eviction policies want to know.
    pub(super) fn note_change(&mut self, change: impl FnOnce() -> Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change());
        }
    }

    /// Moves the applied position, which only grows.
    pub(super) fn advance(&mut self, index: u64, term: u64) {
        if let Some((last, last_term)) = self.applied {
            assert!(index > last && term >= last_term, "entry {index} of term {term} after {last} of {last_term}");
        }
        self.applied = Some((index, term));
    }

    /// Bytes that a tenant may still pin for good: any number within a quota of bytes; the tenants without share a part of
    /// the pool.
    pub(super) fn hard_pin_room(&self, tenant: TenantId) -> u64 {
        let has_quota = |tenant: &Tenant| tenant.quota.bytes != 0;
        let percent = self.config.config.hard_pinned_percent_max;
        if percent >= 100 || self.tenants.get(tenant).is_some_and(has_quota) {
            return u64::MAX;
        }
        let without = self.tenants.iter().filter(|(_, tenant)| !has_quota(tenant));
        let pinned = without.fold(0u64, |sum, (_, tenant)| sum.saturating_add(tenant.hard_pinned_bytes));
        let share = u128::from(self.space.capacity()) * u128::from(percent) / 100;
        u64::try_from(share).unwrap_or(u64::MAX).saturating_sub(pinned)
    }

    /// Log time never goes back (T1).
    pub(super) fn advance_clock(&mut self, to: LogTime) {
        if to > self.clock {
            self.digest.sub(|c| c.clock(self.clock));
            self.clock = to;
            self.digest.add(|c| c.clock(self.clock));
        }
    }

    /// Raises the feature level (M6).
    pub(super) fn set_feature_level(&mut self, level: u16) {
        self.digest.sub(|c| c.feature_level(self.feature_level));
        self.feature_level = level;
        self.digest.add(|c| c.feature_level(self.feature_level));
    }

    /// Puts a replica's extent aside.
    pub(super) fn retire(&mut self, id: ReplicaId, retired: Retired) {
        if !retired.clean {
            self.unclean.insert((self.space.segment(retired.segment).node, id));
        }
        self.parts.retired.add(&id, |c| c.retired(id, &retired, &self.space));
        self.book_retired(id, &retired, Sign::Add);
        assert!(self.retired.insert(id, retired).is_none(), "replica {id} retires twice");
    }

    /// Takes a retired replica out of the books; what becomes of its space is the caller's.
    pub(super) fn forget_retired(&mut self, id: ReplicaId) -> Option<Retired> {
        let retired = self.retired.remove(&id)?;
        self.parts.retired.sub(&id, |c| c.retired(id, &retired, &self.space));
        self.book_retired(id, &retired, Sign::Sub);
        if !retired.clean {
            self.unclean.remove(&(self.space.segment(retired.segment).node, id));
        }
        Some(retired)
    }

    /// Books a retired replica for the auditor, if it has passed it.
    fn book_retired(&mut self, id: ReplicaId, retired: &Retired, sign: Sign) {
        if self.parts.retired.has_walked(&id) {
            let books = &mut self.objects.books;
            sign.count(&mut books.segment(retired.segment).retired, retired.bytes);
            sign.count(&mut books.unclean, (!retired.clean).into());
        }
    }

    /// What readers need of nodes and segments.
    pub(super) fn topology(&self) -> Topology {
        let mut topology = Topology {
            tenants: self.tenants.by_name.clone(),
            ancestors: self.ancestors.clone(),
            ..Topology::default()
        };
        for (slot, segment) in self.space.iter() {
            let slot = slot as usize;
            if topology.segments.len() <= slot {
                topology.segments.resize(slot + 1, None);
            }
            topology.segments[slot] = Some(SegmentPlace {
                segment: segment.id,
                node: segment.node,
                incarnation: segment.incarnation,
                contact: segment.contact,
            });
        }
        for (&id, node) in &self.nodes.by_id {
            let view = NodeView {
                node: id,
                incarnation: node.incarnation,
                node_uuid: node.node_uuid,
                address: node.address.clone(),
                host_id: node.host_id.clone(),
                contact: node.contact,
                segments: node.segments.len(),
            };
            topology.suspect_nodes += usize::from(node.contact == Contact::Suspect);
            topology.nodes.insert(id, view);
        }
        topology
    }
}
