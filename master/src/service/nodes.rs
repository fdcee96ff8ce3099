//! NodeService: registration, mounts and heartbeats of datanodes (N1, I3, W5).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{Stream, StreamExt};
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId, v1};
use tonic::{Request, Response, Status, Streaming};

use super::copying;
use super::core::{Service, unexpected, uuid};
use super::options::REPLICA_IDS_PER_BATCH;
use super::tenure::Tenure;
use super::upkeep;
use crate::directory::{Contact, NodeView, Op, Outcome};

/// How long a registration may wait for its commit.
const COMMIT_WAIT: Duration = Duration::from_secs(5);

/// The gRPC face for datanodes.
pub struct NodeFace {
    service: Arc<Service>,
}

impl NodeFace {
    /// Serves `service`.
    pub fn new(service: Arc<Service>) -> NodeFace {
        NodeFace { service }
    }

    async fn register(&self, request: &v1::RegisterRequest) -> Result<v1::RegisterResponse, Error> {
        let tenure = self.service.tenure()?;
        self.service.check_identity(request.identity.as_ref())?;
        let op = Op::RegisterNode {
            node_uuid: uuid(&request.node_uuid, "node_uuid")?,
            process_uuid: uuid(&request.process_uuid, "process_uuid")?,
            address: &request.address,
            host_id: &request.host_id,
        };
        match commit(&tenure, op).await? {
            Outcome::Registered { node, incarnation } => {
                tenure.nodes.heard(node);
                tracing::info!(node = node.0, %incarnation, address = request.address, "datanode registered");
                Ok(v1::RegisterResponse {
                    error: None,
                    identity: Some(self.service.identity()),
                    node_id: node.0,
                    incarnation: incarnation.0,
                    cluster_secret: bytes::Bytes::copy_from_slice(&self.service.secret().0),
                    heartbeat_interval_ms: self.service.options().node_heartbeat_interval.as_millis() as u32,
                    log_time_ms: tenure.log_time().0,
                    term: tenure.term,
                })
            }
            Outcome::Refused(error) => Err(error),
            other => Err(unexpected("register_node", &other)),
        }
    }

    async fn mount(&self, request: &v1::MountRequest) -> Result<Vec<v1::MountedSegment>, Error> {
        let tenure = self.service.tenure()?;
        self.service.check_identity(request.identity.as_ref())?;
        let (node, incarnation) = (NodeId(request.node_id), Incarnation(request.incarnation));
        let mut mounted = Vec::with_capacity(request.segments.len());
        for (i, segment) in request.segments.iter().enumerate() {
            let op = Op::MountSegment { node, incarnation, name: &segment.name, bytes: segment.bytes };
            mounted.push(match commit(&tenure, op).await? {
                Outcome::Mounted { segment } => v1::MountedSegment { error: None, segment_id: segment.0 },
                Outcome::Refused(error) => v1::MountedSegment { error: Some(error.for_item(i)), segment_id: 0 },
                other => return Err(unexpected("mount_segment", &other)),
            });
        }
        tenure.set_capacity_bytes(self.service.directory().counts().capacity_bytes);
        Ok(mounted)
    }

    async fn unmount(&self, request: &v1::UnmountRequest) -> Result<(), Error> {
        let tenure = self.service.tenure()?;
        self.service.check_identity(request.identity.as_ref())?;
        let (node, incarnation) = (NodeId(request.node_id), Incarnation(request.incarnation));
        let ops: Vec<Op<'_>> = if request.segment_ids.is_empty() {
            vec![Op::DropNode { node, incarnation }]
        } else {
            let ids = request.segment_ids.iter();
            ids.map(|&id| Op::UnmountSegment { node, incarnation, segment: SegmentId(id) }).collect()
        };
        for op in ops {
            match commit(&tenure, op).await? {
                Outcome::Dropped { .. } => {}
                Outcome::Refused(error) => return Err(error),
                other => return Err(unexpected("unmount", &other)),
            }
        }
        Ok(())
    }
}

async fn commit(tenure: &Tenure, op: Op<'_>) -> Result<Outcome, Error> {
    let name = op.name();
    match tokio::time::timeout(COMMIT_WAIT, tenure.proposer.propose_one(op, None)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::new(
            ErrorCode::DeadlineExceeded,
            format!("{name} was not committed within {} s; its outcome is unknown", COMMIT_WAIT.as_secs()),
        )),
    }
}

/// Works on one beat.
fn beat(service: &Arc<Service>, beat: v1::HeartbeatRequest) -> Result<v1::HeartbeatResponse, Error> {
    let tenure = service.tenure()?;
    let (id, incarnation) = (NodeId(beat.node_id), Incarnation(beat.incarnation));
    if beat.history != service.history().0 {
        return Err(Error::new(
            ErrorCode::WrongCluster,
            format!(
                "datanode {id} knows history {:x}; the cluster is in {:x}: register anew",
                beat.history,
                service.history().0
            ),
        ));
    }
    let known = service.directory().node(id);
    if known.as_ref().is_some_and(|node| node.incarnation == incarnation) {
        // Heard is heard, even while no quorum confirms this leader: its silence must not count against the datanode.
        tenure.nodes.heard(id);
    }
    // A leader that may have been deposed commands nothing and ends no life.
    if !service.is_confirmed() || known.as_ref().is_some_and(|node| node.incarnation < incarnation) {
        return Err(service.not_leader());
    }
    let Some(node) = known else {
        return Err(Error::new(ErrorCode::NodeUnknown, format!("datanode {id} is not registered: register anew")));
    };
    if node.incarnation != incarnation {
        return Err(Error::new(
            ErrorCode::Fenced,
            format!("datanode {id} has a newer incarnation {}; {incarnation} must exit", node.incarnation),
        ));
    }
    spawn_ops(service, &tenure, &node, &beat);
    Ok(v1::HeartbeatResponse {
        error: None,
        term: tenure.term,
        sequence: beat.sequence,
        log_time_ms: tenure.log_time().0,
        fence_replicas: upkeep::fences(service, id),
        verify: tenure.nodes.take_verifications(id, REPLICA_IDS_PER_BATCH),
        identity: Some(service.identity()),
        copy: copying::orders(service, &tenure, id),
        masters: service.node().watch_members().borrow().iter().map(|m| m.address.to_string()).collect(),
    })
}

/// Proposes what a beat brought. The answer does not wait for it: beats must not depend on the log's latency.
fn spawn_ops(service: &Arc<Service>, tenure: &Arc<Tenure>, node: &NodeView, beat: &v1::HeartbeatRequest) {
    let mut ops = Vec::new();
    if node.contact == Contact::Suspect {
        ops.push(Op::SetContact { node: node.node, incarnation: node.incarnation, contact: Contact::Heard });
    }
    if !beat.fenced_replicas.is_empty() {
        ops.push(Op::FenceAcknowledged {
            node: node.node,
            incarnation: node.incarnation,
            replicas: beat.fenced_replicas.iter().map(|&r| ReplicaId(r)).collect(),
        });
    }
    ops.extend(copying::ends(service, node.node, node.incarnation, &beat.copies));
    for verdict in beat.verdicts.iter().filter(|v| !v.intact) {
        tracing::error!(
            node = node.node.0,
            object = %ObjectId(verdict.object_id),
            replica = %ReplicaId(verdict.replica_id),
            what = verdict.message,
            "replica is corrupt and is dropped"
        );
        service.metrics().corrupt_replicas.inc();
        ops.push(Op::DropReplica { object: ObjectId(verdict.object_id), replica: ReplicaId(verdict.replica_id) });
    }
    if ops.is_empty() {
        return;
    }
    let tenure = tenure.clone();
    tokio::spawn(async move {
        if let Err(error) = tenure.proposer.propose(&ops, None).await {
            // The datanode repeats what was not acknowledged by a changed command list.
            tracing::debug!(%error, "ops of a heartbeat were not proposed");
        }
        if ops.iter().any(|op| matches!(op, Op::CopyEnd { .. })) {
            tenure.note_copy_ended();
        }
    });
}

type BeatStream = Pin<Box<dyn Stream<Item = Result<v1::HeartbeatResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::node_service_server::NodeService for NodeFace {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let answer = NodeFace::register(self, request.get_ref()).await;
        Ok(Response::new(
            answer.unwrap_or_else(|error| v1::RegisterResponse { error: Some(error.into()), ..Default::default() }),
        ))
    }

    async fn mount(&self, request: Request<v1::MountRequest>) -> Result<Response<v1::MountResponse>, Status> {
        Ok(Response::new(match NodeFace::mount(self, request.get_ref()).await {
            Ok(segments) => v1::MountResponse { error: None, segments },
            Err(error) => v1::MountResponse { error: Some(error.into()), segments: Vec::new() },
        }))
    }

    async fn unmount(&self, request: Request<v1::UnmountRequest>) -> Result<Response<v1::UnmountResponse>, Status> {
        let error = NodeFace::unmount(self, request.get_ref()).await.err().map(Into::into);
        Ok(Response::new(v1::UnmountResponse { error }))
    }

    type HeartbeatStream = BeatStream;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::HeartbeatRequest>>,
    ) -> Result<Response<BeatStream>, Status> {
        let service = self.service.clone();
        let answers = request.into_inner().map(move |message| {
            let message = message?;
            let sequence = message.sequence;
            Ok(beat(&service, message).unwrap_or_else(|error| v1::HeartbeatResponse {
                error: Some(error.into()),
                term: service.term(),
                sequence,
                identity: Some(service.identity()),
                ..Default::default()
            }))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}
