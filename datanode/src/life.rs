//! One incarnation: what a registration gave, the segments mounted under it, and who writes where in them (I3).
//!
//! Everything a grant is checked against is here, so ending a life invalidates all of it at once: another incarnation has another
//! `Life`, another history also another set of segments with nothing in them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidepool_proto::capability::{Capability, Secret, Verb};
use tidepool_proto::object::HEADER_BYTES;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, Incarnation, NodeId, ObjectId, SegmentId, v1};

use tokio::sync::watch;

use crate::segment::Segment;
use crate::succession::Lineage;
use crate::writes::WriteTable;

/// What the leader answered to Register.
#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) cluster: ClusterId,
    pub(crate) history: History,
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) secret: Secret,
    pub(crate) heartbeat_interval: Duration,
    /// The history in which the incarnation was registered; an earlier one than `history` where a restored directory knows it.
    pub(crate) registered_in: History,
    /// The retry token of the registration.
    pub(crate) process_uuid: [u8; 16],
    /// Where this process was registered.
    pub(crate) lineage: Lineage,
}

/// A registered and mounted incarnation.
pub(crate) struct Life {
    registration: Registration,
    segments: HashMap<SegmentId, Arc<Segment>>,
    writes: Arc<WriteTable>,
    over: AtomicBool,
    ended: watch::Sender<bool>,
}

impl Life {
    pub(crate) fn new(
        registration: Registration,
        segments: HashMap<SegmentId, Arc<Segment>>,
        writes: Arc<WriteTable>,
    ) -> Life {
        Life { registration, segments, writes, over: AtomicBool::new(false), ended: watch::Sender::new(false) }
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }
    pub(crate) fn segments(&self) -> &HashMap<SegmentId, Arc<Segment>> {
        &self.segments
    }
    pub(crate) fn writes(&self) -> &Arc<WriteTable> {
        &self.writes
    }

    /// Ends it: no step of any write begins any more.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.ended.send_replace(true);
    }
    /// Resolves when it is over.
    pub(crate) async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // The sender lives in self, so the wait can end only with the value.
        let _ended = ended.wait_for(|ended| *ended).await;
    }
    /// The history that an object's header names, as masters tell it: 0 is the present one.
    pub(crate) fn history_of(&self, told: u64) -> History {
        if told == 0 { self.registration.history } else { History(told) }
    }
    /// Gives the memory of an ended life back to the kernel; takes a while for large segments.
    pub(crate) fn drop_content(&self) {
        self.segments.values().for_each(|segment| segment.release());
    }
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub(crate) fn sign(&self, capability: &Capability) -> [u8; 16] {
        capability.sign(&self.registration.secret, self.registration.history)
    }

    /// Checks what a client presents, in this order: is it for this node, for this incarnation, genuine, and inside a segment.
    /// Expiry is left to the caller.
    pub(crate) fn authorise(
        &self,
        verb: Verb,
        object_id: u64,
        replica: &v1::Replica,
    ) -> Result<(Capability, &Arc<Segment>), Error> {
        let refuse = |code, what: String| Err(Error::new(code, format!("replica {}: {what}", replica.replica_id)));
        let Registration { node, incarnation, secret, history, .. } = &self.registration;
        let capability = Capability::from_replica(verb, ObjectId(object_id), replica);
        if replica.kind() != v1::ReplicaKind::Memory {
            return refuse(ErrorCode::NotSupported, format!("kind {} is not served here, only memory", replica.kind));
        }
        if capability.node != *node {
            return refuse(
                ErrorCode::WrongCluster,
                format!("it lies on node {}, this is node {node}", capability.node),
            );
        }
        if capability.incarnation != *incarnation {
            return refuse(
                ErrorCode::Fenced,
                format!(
                    "its address is of incarnation {}, node {node} now lives as {incarnation}; look the object up again",
                    capability.incarnation
                ),
            );
        }
        if !capability.verify(secret, *history, &replica.mac) {
            return refuse(ErrorCode::CapabilityRefused, "its signature does not match; nothing was touched".into());
        }
        let Some(segment) = self.segments.get(&capability.segment) else {
            return refuse(ErrorCode::SegmentNotFound, format!("segment {} is not mounted here", capability.segment));
        };
        if capability.length < HEADER_BYTES as u64 || segment.address(capability.offset, capability.length).is_none() {
            return refuse(
                ErrorCode::OutOfBounds,
                format!(
                    "{} bytes at {} do not lie within the {} bytes of segment {}",
                    capability.length,
                    capability.offset,
                    segment.bytes(),
                    capability.segment
                ),
            );
        }
        Ok((capability, segment))
    }
}
