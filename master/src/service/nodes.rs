//! NodeService: registration, mounts and heartbeats of datanodes (N1, I3, W5).

use std::pin::Pin;
use std::sync::Arc;

use futures::stream::{self, Stream, StreamExt};
use tidepool_proto::capability::LOG_TIME_TOLD_BEHIND_MS;
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId, planted, v1};
use tidepool_raft::rt;
use tidepool_raft::rt::watch;
use tonic::{Request, Response, Status, Streaming};

use super::copying::{self, Told};
use super::core::{Service, unexpected, uuid};
use super::options::REPLICA_IDS_PER_BATCH;
use super::tenure::Tenure;
use super::upkeep;
use crate::directory::{Contact, NodeView, Op, Outcome};

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
        let ancestors = self.service.directory().ancestors();
        let op = Op::RegisterNode {
            node_uuid: uuid(&request.node_uuid, "node_uuid")?,
            process_uuid: uuid(&request.process_uuid, "process_uuid")?,
            address: &request.address,
            host_id: &request.host_id,
        };
        match tenure.proposer.commit(op).await? {
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
                    log_time_ms: told_log_time_ms(&self.service, &tenure),
                    term: tenure.term,
                    registered_history: Service::history_on_wire(&ancestors, incarnation.op()),
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
            mounted.push(match tenure.proposer.commit(op).await? {
                Outcome::Mounted { segment } => v1::MountedSegment { error: None, segment_id: segment.0 },
                Outcome::Refused(error) => v1::MountedSegment { error: Some(error.for_item(i)), segment_id: 0 },
                other => return Err(unexpected("mount_segment", &other)),
            });
        }
        tenure.note_segments(self.service.directory());
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
            match tenure.proposer.commit(op).await? {
                Outcome::Dropped { .. } => {}
                Outcome::Refused(error) => return Err(error),
                other => return Err(unexpected("unmount", &other)),
            }
        }
        Ok(())
    }
}

/// What a datanode is told of log time: so far behind the newest applied entry that its clock cannot pass that entry before it is told
/// again. The entry is committed, and every later leader begins where it ends: none signs what a datanode that still follows this one
/// takes for expired (W2). The log does not stand still: the auditor's rounds and the checkpoints are entries.
fn told_log_time_ms(service: &Service, tenure: &Tenure) -> u64 {
    if planted!(TimeAheadOfLog) {
        return tenure.log_time().0;
    }
    service.machine().log_time().0.saturating_sub(LOG_TIME_TOLD_BEHIND_MS)
}

/// Works on one beat.
pub(super) fn beat(
    service: &Arc<Service>,
    beat: v1::HeartbeatRequest,
    spoken: &mut Option<Spoken>,
) -> Result<v1::HeartbeatResponse, Error> {
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
    let spoken = match spoken {
        Some(spoken) if (spoken.term, spoken.node, spoken.incarnation) == (tenure.term, id, incarnation) => spoken,
        _ => spoken.insert(Spoken {
            term: tenure.term,
            node: id,
            incarnation,
            sequence: 0,
            told: Told::default(),
            presence: 0,
            orders: tenure.nodes.orders(id),
            over: tenure.watch_end(),
        }),
    };
    spoken.sequence = beat.sequence;
    spawn_ops(service, &tenure, &node, &mut spoken.told, &beat);
    if let Some(answer) = beat.presence.as_ref().filter(|answer| answer.term == tenure.term) {
        tenure.presence.answered((id, incarnation), answer);
    }
    let copy = spoken.told.in_answer(service, &tenure, id, &beat.copies);
    Ok(v1::HeartbeatResponse {
        error: None,
        term: tenure.term,
        sequence: beat.sequence,
        log_time_ms: told_log_time_ms(service, &tenure),
        fence_replicas: upkeep::fences(service, id),
        verify: tenure.nodes.take_verifications(id, REPLICA_IDS_PER_BATCH),
        identity: Some(service.identity()),
        copy,
        presence: tenure.presence.question((id, incarnation), &mut spoken.presence),
        masters: service.node().watch_members().borrow().iter().map(|m| m.address.to_string()).collect(),
    })
}

/// Proposes what a beat brought. The answer does not wait for it: beats must not depend on the log's latency.
fn spawn_ops(
    service: &Arc<Service>,
    tenure: &Arc<Tenure>,
    node: &NodeView,
    told: &mut Told,
    beat: &v1::HeartbeatRequest,
) {
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
    ops.extend(copying::ends(service, tenure, told, (node.node, node.incarnation), &beat.copies));
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
    rt::spawn(async move {
        if let Err(error) = tenure.proposer.propose(&ops, None).await {
            // The datanode repeats what was not acknowledged by a changed command list.
            tracing::debug!(%error, "ops of a heartbeat were not proposed");
        }
        if ops.iter().any(|op| matches!(op, Op::CopyEnd { .. })) {
            tenure.note_copy_ended();
        }
    });
}

/// Whom a conversation is with, once it has beaten and was answered.
pub(super) struct Spoken {
    term: u64,
    node: NodeId,
    incarnation: Incarnation,
    /// Of the last beat that was answered.
    sequence: u64,
    told: Told,
    /// Number of the question about what it holds that it was told last.
    presence: u64,
    orders: watch::Receiver<u64>,
    /// Whether the term is over.
    over: watch::Receiver<bool>,
}

/// One datanode's beats and what it is told: an answer to each beat, and copies as soon as they have started.
struct Conversation {
    service: Arc<Service>,
    beats: Streaming<v1::HeartbeatRequest>,
    spoken: Option<Spoken>,
}

impl Conversation {
    /// The next message; None: the datanode says no more.
    async fn next(&mut self) -> Option<Result<v1::HeartbeatResponse, Status>> {
        loop {
            tokio::select! {
                biased;
                message = self.beats.next() => return match message? {
                    Ok(message) => Some(Ok(self.answer(message))),
                    Err(status) => Some(Err(status)),
                },
                woken = woken(self.spoken.as_mut()) => match woken {
                    Woken::Orders => if let Some(orders) = self.orders() {
                        return Some(Ok(orders));
                    },
                    Woken::TermOver => if let Some(told) = self.term_over() {
                        return Some(Ok(told));
                    },
                }
            }
        }
    }

    fn answer(&mut self, message: v1::HeartbeatRequest) -> v1::HeartbeatResponse {
        let (service, sequence) = (&self.service, message.sequence);
        beat(service, message, &mut self.spoken).unwrap_or_else(|error| v1::HeartbeatResponse {
            error: Some(error.into()),
            term: service.term(),
            sequence,
            identity: Some(service.identity()),
            ..Default::default()
        })
    }

    /// Says at once that the term is over, and who leads now: the datanode need not find out with its next beat.
    fn term_over(&mut self) -> Option<v1::HeartbeatResponse> {
        let sequence = self.spoken.take()?.sequence;
        Some(v1::HeartbeatResponse {
            error: Some(self.service.not_leader().into()),
            term: self.service.term(),
            sequence,
            identity: Some(self.service.identity()),
            ..Default::default()
        })
    }

    /// What is new since the last message, under the number of the beat that was answered last.
    fn orders(&mut self) -> Option<v1::HeartbeatResponse> {
        let spoken = self.spoken.as_mut()?;
        let tenure = self.service.tenure().ok().filter(|tenure| tenure.term == spoken.term)?;
        let node = self.service.directory().node(spoken.node)?;
        if node.incarnation != spoken.incarnation || !self.service.is_confirmed() {
            return None;
        }
        let copy = spoken.told.fresh(&self.service, &tenure, spoken.node);
        let presence = tenure.presence.question((spoken.node, spoken.incarnation), &mut spoken.presence);
        (!copy.is_empty() || presence.is_some()).then(|| v1::HeartbeatResponse {
            term: tenure.term,
            sequence: spoken.sequence,
            log_time_ms: told_log_time_ms(&self.service, &tenure),
            identity: Some(self.service.identity()),
            copy,
            presence,
            ..Default::default()
        })
    }
}

/// What a conversation has to tell, without being asked.
enum Woken {
    Orders,
    TermOver,
}

/// Resolves when there may be something to tell.
async fn woken(spoken: Option<&mut Spoken>) -> Woken {
    let Some(spoken) = spoken else { return std::future::pending().await };
    tokio::select! {
        biased;
        // The term is gone, and what follows its end with it.
        _ = spoken.over.wait_for(|over| *over) => Woken::TermOver,
        changed = spoken.orders.changed() => if changed.is_ok() { Woken::Orders } else { Woken::TermOver },
    }
}

type BeatStream = Pin<Box<dyn Stream<Item = Result<v1::HeartbeatResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::node_service_server::NodeService for NodeFace {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let answer = NodeFace::register(self, request.get_ref()).await;
        Ok(Response::new(answer.unwrap_or_else(|error| {
            // Who refuses: one that belongs to a cluster of before learns of its successor (I3).
            let identity = Some(self.service.identity());
            v1::RegisterResponse { error: Some(error.into()), identity, ..Default::default() }
        })))
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
        let beats = request.into_inner();
        let conversation = Conversation { service: self.service.clone(), beats, spoken: None };
        let answers = stream::unfold(conversation, |mut conversation| async move {
            let message = conversation.next().await?;
            Some((message, conversation))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}
