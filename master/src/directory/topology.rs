//! `Topology`: where segments and nodes are, as readers need it; apply publishes it, readers never wait for apply.

use super::ancestors::Ancestors;
use super::objects::{Record, SegmentSlot};
use super::op::{Contact, TenantId};
use super::view::{NodeView, ObjectState, ObjectView, ReplicaPlace};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidepool_proto::object::stored_bytes;
use tidepool_proto::{Incarnation, NodeId, SegmentId};

/// A segment as a reader needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SegmentPlace {
    pub(super) segment: SegmentId,
    pub(super) node: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) contact: Contact,
}

/// All segments by slot and all nodes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Topology {
    pub(super) segments: Vec<Option<SegmentPlace>>,
    pub(super) nodes: BTreeMap<NodeId, NodeView>,
    pub(super) tenants: BTreeMap<Arc<str>, TenantId>,
    pub(super) suspect_nodes: usize,
    pub(super) ancestors: Arc<Ancestors>,
}

impl Topology {
    fn place(&self, slot: SegmentSlot) -> Option<&SegmentPlace> {
        self.segments.get(slot as usize)?.as_ref()
    }

    /// A record as a reader sees it. A replica of a segment that is just being dropped is left out.
    pub(super) fn view<'r>(&self, record: &'r Record) -> ObjectView<'r> {
        let length = stored_bytes(record.length);
        let replicas = record.replicas.iter().filter_map(|replica| {
            let place = self.place(replica.segment)?;
            Some(ReplicaPlace {
                replica: replica.id,
                segment: place.segment,
                node: place.node,
                incarnation: place.incarnation,
                offset: replica.offset,
                length,
                listed: record.is_complete() && place.contact == Contact::Heard,
            })
        });
        ObjectView {
            tenant: record.tenant,
            key: &record.key,
            object: record.object,
            length: record.length,
            state: if record.is_complete() { ObjectState::Complete } else { ObjectState::Processing },
            data_type: record.data_type,
            hard_pinned: record.hard_pinned,
            soft_pinned_until: record.soft_pinned_until(),
            group: record.group().map(|name| &**name),
            started: record.started,
            replicas: replicas.collect(),
            wanted: record.asked.wanted().into(),
            made: record.copies.into(),
        }
    }

    /// Listed replicas of a record.
    pub(super) fn listed(&self, record: &Record) -> u32 {
        if !record.is_complete() {
            return 0;
        }
        let heard = |slot| self.place(slot).is_some_and(|place| place.contact == Contact::Heard);
        record.replicas.iter().filter(|r| heard(r.segment)).count() as u32
    }
}
