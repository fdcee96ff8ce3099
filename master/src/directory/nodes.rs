//! Registered datanodes.

use super::op::{Contact, Uuid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, SegmentId};

/// Uuids of earlier processes remembered per node, so that a late registration of one is refused, not obeyed.
pub(super) const EARLIER_PROCESSES_MAX: usize = 8;

/// One datanode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Node {
    pub(super) node_uuid: Uuid,
    pub(super) process_uuid: Uuid,
    pub(super) incarnation: Incarnation,
    pub(super) address: Arc<str>,
    pub(super) host_id: Arc<str>,
    pub(super) contact: Contact,
    pub(super) earlier_processes: VecDeque<Uuid>,
    /// Mounted segments; follows from the segments.
    pub(super) segments: BTreeSet<SegmentId>,
}

/// All datanodes, by id and by uuid.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    pub(super) by_id: BTreeMap<NodeId, Node>,
    pub(super) by_uuid: BTreeMap<Uuid, NodeId>,
}

impl Nodes {
    /// The node in this life, or NODE_UNKNOWN or FENCED.
    pub(super) fn current(&mut self, id: NodeId, incarnation: Incarnation) -> Result<&mut Node, Error> {
        let node = self.by_id.get_mut(&id).ok_or_else(|| {
            Error::new(ErrorCode::NodeUnknown, format!("node {id} is not registered; the datanode must register again"))
        })?;
        if node.incarnation != incarnation {
            return Err(Error::new(
                ErrorCode::Fenced,
                format!(
                    "node {id}: incarnation {incarnation} is over, {} is registered; the older process must exit",
                    node.incarnation
                ),
            ));
        }
        Ok(node)
    }
}
