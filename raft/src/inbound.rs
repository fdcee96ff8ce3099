//! The receiving half of consensus: who may speak, decoding, the start-up fence, and openraft's answers encoded.
//! Networks bring bytes here; nothing reaches openraft another way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode, NodeId, v1};

use crate::apply::{Adapter, Applied, Snapshot};
use crate::codec::{self, CodecError, Message};
use crate::fence::StartupFence;
use crate::host::Host;
use crate::identity::{ClusterIdentity, IdentityStore, check_protocol, wire_cluster, wire_store};
use crate::lag::{Lag, LagView};
use crate::log::{AppendLatency, StoreId};
use crate::machine::{MachineError, StateMachine};
use crate::network::Call;
use crate::options::Options;
use crate::snapshot::{Offer, SnapshotError, encode_offset};
use crate::types::retired_of;

/// Answers peers. Cheap to clone.
pub struct Inbound<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    shared: Arc<Shared<C, M>>,
}

struct Shared<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    raft: Raft<C, Adapter<C, M>>,
    identity: Arc<IdentityStore>,
    fence: Arc<StartupFence<C>>,
    append_latency: AppendLatency<C>,
    machine: Arc<Applied<M>>,
    options: Options,
    lag: Lag<C>,
    /// Heartbeats heard, from whoever sends them.
    beats: AtomicU64,
    /// Whether this member may still be asked to lead.
    may_lead: AtomicBool,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Shared<C, M> {
    fn applied_index(&self) -> u64 {
        self.machine.machine.applied().map_or(0, |at| at.index)
    }

    /// A leader was heard, if it is not one of a term that is over.
    fn note_leader(&self, request: &AppendEntriesRequest<C>) {
        let over = self.raft.metrics().borrow_watched().vote > request.vote;
        if !over {
            self.lag.note(&request.vote, request.leader_commit.as_ref(), self.applied_index());
        }
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Clone for Inbound<C, M> {
    fn clone(&self) -> Self {
        Inbound { shared: self.shared.clone() }
    }
}

fn bad_frame(error: CodecError) -> Error {
    Error::new(ErrorCode::BadFrame, format!("a consensus message cannot be read: {error}"))
}

fn too_new(error: MachineError) -> Error {
    Error::new(ErrorCode::FeatureLevel, error.message)
}

fn stopped(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::Unavailable, format!("consensus does not answer: {error}"))
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Inbound<C, M> {
    pub(crate) fn new(
        (raft, identity): (Raft<C, Adapter<C, M>>, Arc<IdentityStore>),
        fence: Arc<StartupFence<C>>,
        append_latency: AppendLatency<C>,
        machine: Arc<Applied<M>>,
        options: Options,
    ) -> Inbound<C, M> {
        let beats = AtomicU64::new(0);
        let lag = Lag::new(options.election.silence_max());
        Inbound {
            shared: Arc::new(Shared {
                raft,
                identity,
                fence,
                append_latency,
                machine,
                options,
                lag,
                beats,
                may_lead: AtomicBool::new(true),
            }),
        }
    }

    /// Whether two handles are of one life of one member.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// From here on no other hands leadership over to this member.
    pub(crate) fn leads_no_more(&self) {
        self.shared.may_lead.store(false, Ordering::Release);
    }

    /// Heartbeats heard since the start.
    pub(crate) fn beats(&self) -> u64 {
        self.shared.beats.load(Ordering::Relaxed)
    }

    /// How far this member is behind its leader, as far as it heard.
    pub(crate) fn lag(&self) -> LagView {
        self.shared.lag.view(self.shared.applied_index())
    }

    /// Whether a caller may reach consensus (I4).
    pub fn admit(&self, peer: Option<&v1::Identity>, target: u64, store_uuid: &[u8]) -> Result<(), Error> {
        self.shared.identity.admit(peer, target, store_uuid).inspect_err(|error| {
            tracing::warn!(%error, "a call from another member was refused");
        })
    }

    /// Says who this member is, and whether it holds anything (I4).
    pub async fn handshake(&self, request: v1::HandshakeRequest) -> v1::HandshakeResponse {
        let error = self.check_handshake(&request).err();
        let initialized = self.shared.raft.is_initialized().await.map_err(stopped);
        let error = error.or_else(|| initialized.as_ref().err().cloned());
        // Also where another member took over the address that the caller knows: what counts is who asks.
        let caller_removed = request.identity.as_ref().is_some_and(|peer| self.has_left(peer));
        v1::HandshakeResponse {
            error: error.map(Into::into),
            identity: Some(self.shared.identity.to_wire()),
            store_uuid: self.shared.identity.store_uuid(),
            initialized: initialized.unwrap_or(true),
            caller_removed,
            feature_level: self.shared.machine.machine.levels().binary.into(),
            append_us: Some(self.shared.append_latency.now().as_micros() as u64),
            keeps_out: !self.shared.fence.passed() || !self.shared.may_lead.load(Ordering::Acquire),
        }
    }

    /// Whether a member of this cluster left it: committed and applied here, and not half done.
    fn has_left(&self, peer: &v1::Identity) -> bool {
        let ours = self.shared.identity.record().cluster;
        let members = self.shared.machine.membership();
        ours.is_some()
            && wire_cluster(peer) == ours
            && members.get_node(&peer.node_id).is_none()
            && retired_of(&members).contains(peer.node_id)
    }

    fn check_handshake(&self, request: &v1::HandshakeRequest) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::new(ErrorCode::WrongCluster, message));
        let Some(peer) = &request.identity else {
            return wrong("the caller did not say who it is".to_owned());
        };
        check_protocol(peer)?;
        let record = self.shared.identity.record();
        if request.target_node_id != record.node_id.0 {
            return wrong(format!("the caller wants node {}, this is node {}", request.target_node_id, record.node_id));
        }
        match (wire_cluster(peer), record.cluster) {
            (Some(theirs), Some(own)) if theirs != own => {
                wrong(format!("this member belongs to {own}, the caller to {theirs}"))
            }
            _ => Ok(()),
        }
    }

    /// Takes part in a bootstrap: remembers the proposed identity durably, if this member is empty and agrees (I4).
    pub async fn prepare(&self, request: v1::PrepareRequest) -> v1::PrepareResponse {
        let error = self.try_prepare(request).await.err();
        v1::PrepareResponse { error: error.map(Into::into), store_uuid: self.shared.identity.store_uuid() }
    }

    async fn try_prepare(&self, request: v1::PrepareRequest) -> Result<(), Error> {
        let wrong = |message: String| Error::new(ErrorCode::WrongCluster, message);
        let peer = request.identity.as_ref().ok_or_else(|| wrong("the caller did not say who it is".to_owned()))?;
        check_protocol(peer)?;
        let record = self.shared.identity.record();
        if request.target_node_id != record.node_id.0 {
            return Err(wrong(format!(
                "the caller wants node {}, this is node {}",
                request.target_node_id, record.node_id
            )));
        }
        let proposed = wire_cluster(peer).ok_or_else(|| wrong("a bootstrap must name its cluster".to_owned()))?;
        if self.shared.raft.is_initialized().await.map_err(stopped)? {
            return Err(wrong(format!("node {} holds a log already; it takes part in no bootstrap", record.node_id)));
        }
        if request.join && !self.shared.options.join {
            return Err(wrong(format!(
                "node {} was not started to join a cluster; start it with --join and an empty data directory",
                record.node_id
            )));
        }
        if let Some(own) = record.cluster.filter(|own| *own != proposed) {
            return Err(wrong(format!(
                "node {} was prepared for {own} before; if that bootstrap was never completed, empty its data directory",
                record.node_id
            )));
        }
        let roster = match request.join {
            true => read_roster(&request.members)?,
            false => self.check_members(peer.node_id, &request.members, record.store)?,
        };
        self.adopt(proposed, roster).await
    }

    /// The members proposed must be the ones this member was started with.
    fn check_members(
        &self,
        proposer: u64,
        proposed: &[v1::RaftMember],
        own: StoreId,
    ) -> Result<Vec<(NodeId, StoreId)>, Error> {
        let refuse = |message: String| Error::new(ErrorCode::InvalidParams, message);
        let expected: Vec<(u64, String)> =
            self.shared.options.members.iter().map(|m| (m.node_id.0, m.address.to_string())).collect();
        let named: Vec<(u64, String)> = proposed.iter().map(|m| (m.node_id, m.address.clone())).collect();
        if expected != named {
            return Err(refuse(format!(
                "node {proposer} was started with the members {named:?}, this one with {expected:?}; make them equal"
            )));
        }
        if expected.first().map(|(id, _)| *id) != Some(proposer) {
            return Err(refuse(format!("node {proposer} may not lead the bootstrap, the lowest node id does")));
        }
        let roster = read_roster(proposed)?;
        let record = self.shared.identity.record();
        if roster.iter().any(|(id, store)| *id == record.node_id && *store != own) {
            let message = format!(
                "node {} has another data directory than the bootstrap saw; it will be tried again",
                record.node_id
            );
            return Err(Error::new(ErrorCode::Unavailable, message));
        }
        Ok(roster)
    }

    async fn adopt(&self, cluster: ClusterIdentity, roster: Vec<(NodeId, StoreId)>) -> Result<(), Error> {
        let identity = self.shared.identity.clone();
        let failed = |e: std::io::Error| {
            Error::new(ErrorCode::StorageFailed, format!("the identity file cannot be written: {e}"))
        };
        C::blocking(move || {
            identity.update(|record| {
                record.cluster = Some(cluster);
                record.roster = roster.into_iter().collect();
            })
        })
        .await
        .map_err(failed)?
        .map_err(failed)
    }

    /// Answers one question. The caller was admitted.
    pub async fn call(&self, call: Call, payload: Bytes) -> Result<Bytes, Error> {
        let raft = &self.shared.raft;
        match call {
            Call::Beat => {
                self.shared.beats.fetch_add(1, Ordering::Relaxed);
                let request: AppendEntriesRequest<C> = decode(payload)?;
                self.shared.machine.admit(&request.entries).map_err(too_new)?;
                self.shared.note_leader(&request);
                Ok(codec::encode(&raft.append_entries(request).await.map_err(stopped)?))
            }
            Call::Vote => {
                self.check_fence()?;
                let request: VoteRequest<C> = decode(payload)?;
                Ok(codec::encode(&raft.vote(request).await.map_err(stopped)?))
            }
            Call::PreVote => {
                self.check_fence()?;
                let request: VoteRequest<C> = decode(payload)?;
                Ok(codec::encode(&raft.pre_vote(request).await.map_err(stopped)?))
            }
            Call::TransferLeader => {
                self.check_fence()?;
                if !self.shared.may_lead.load(Ordering::Acquire) {
                    return Err(Error::new(ErrorCode::StateDiverged, "this member starts over; it does not lead"));
                }
                let request: TransferLeaderRequest<C> = decode(payload)?;
                Ok(codec::encode(&raft.handle_transfer_leader(request).await.map_err(stopped)?))
            }
            Call::OfferSnapshot => {
                let wanted = Offer::decode(payload).map_err(bad_frame)?.wanted();
                let snapshots = self.shared.machine.snapshots.clone();
                let held = C::blocking(move || snapshots.offered(&wanted)).await.map_err(stopped)?;
                Ok(encode_offset(held.map_err(snapshot_failed)?))
            }
        }
    }

    fn check_fence(&self) -> Result<(), Error> {
        if self.shared.fence.passed() {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::Unavailable,
            "this member restarted and keeps out of elections until earlier leases have run out",
        ))
    }

    /// Answers a stream of append requests, in order. Ends at the first that cannot be read. The caller was admitted.
    pub fn append<S>(&self, requests: S) -> impl Stream<Item = Result<Bytes, Error>> + Send + 'static
    where
        S: Stream<Item = Bytes> + Send + Unpin + 'static,
    {
        let unreadable: Arc<Mutex<Option<Error>>> = Arc::default();
        let (noted, shared) = (unreadable.clone(), self.shared.clone());
        let decoded = requests.map(decode::<AppendEntriesRequest<C>>).scan((), move |(), request| {
            let request = request.and_then(|request| {
                shared.machine.admit(&request.entries).map_err(too_new)?;
                shared.note_leader(&request);
                Ok(request)
            });
            let request = request.map_err(|error| *noted.lock() = Some(error)).ok();
            std::future::ready(request)
        });
        let answers = self.shared.raft.stream_append(decoded);
        let answers = answers.map(|answer| answer.map(|answer| codec::encode(&answer)).map_err(stopped));
        let raft = self.shared.raft.clone();
        // openraft ends the answers silently when it stops: the leader must hear of it, or it would wait for ever.
        let end = async move {
            let error = unreadable.lock().take();
            match error {
                Some(error) => Some(error),
                None => raft.is_initialized().await.err().map(stopped),
            }
        };
        answers.chain(stream::once(end).filter_map(|error| async move { error.map(Err) }))
    }

    /// Begins to take in a snapshot. The caller was admitted.
    pub async fn snapshot(&self, offer: Bytes) -> Result<Arrival<C, M>, Error> {
        let offer = Offer::decode(offer).map_err(bad_frame)?;
        let (snapshots, wanted) = (self.shared.machine.snapshots.clone(), offer.wanted());
        let stream = C::blocking(move || snapshots.receive(wanted)).await.map_err(stopped)?;
        Ok(Arrival { inbound: self.clone(), offer, stream: stream.map_err(snapshot_failed)? })
    }
}

/// Members and their data directories.
fn read_roster(members: &[v1::RaftMember]) -> Result<Vec<(NodeId, StoreId)>, Error> {
    let stores = members.iter().map(|m| wire_store(&m.store_uuid).map(|store| (NodeId(m.node_id), store)));
    stores.collect::<Option<Vec<_>>>().ok_or_else(|| {
        Error::new(ErrorCode::InvalidParams, "a bootstrap must name every member's data directory".to_owned())
    })
}

fn decode<T: Message>(frame: Bytes) -> Result<T, Error> {
    codec::decode(frame).map_err(bad_frame)
}

fn snapshot_failed(error: SnapshotError) -> Error {
    Error::new(ErrorCode::StorageFailed, format!("a snapshot from the leader was not taken in: {error}"))
}

/// One stream of a snapshot on its way in. What it brought stays when it breaks, for the next stream of the same snapshot.
pub struct Arrival<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    inbound: Inbound<C, M>,
    offer: Offer,
    stream: u64,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Arrival<C, M> {
    /// Takes the next bytes.
    pub async fn chunk(&self, offset: u64, data: Bytes, checksum: Option<u32>) -> Result<(), Error> {
        let (snapshots, stream) = (self.inbound.shared.machine.snapshots.clone(), self.stream);
        let taken = C::blocking(move || snapshots.append(stream, offset, &data, checksum)).await;
        taken.map_err(stopped)?.map_err(snapshot_failed)
    }

    /// Verifies and installs it, and answers the leader.
    pub async fn finish(self) -> Result<Bytes, Error> {
        let Arrival { inbound, offer, stream } = self;
        let snapshots = inbound.shared.machine.snapshots.clone();
        let arrived = C::blocking(move || snapshots.finish(stream)).await.map_err(stopped)?;
        let file = arrived.map_err(snapshot_failed)?;
        if let Err(newer) = inbound.shared.machine.admit_snapshot(&file) {
            inbound.shared.machine.snapshots.drop_unpublished(&file);
            return Err(too_new(newer));
        }
        tracing::info!(bytes = offer.length, "a snapshot arrived from the leader");
        let snapshot = Snapshot { meta: offer.meta, snapshot: file.clone() };
        let answer = inbound.shared.raft.install_full_snapshot(offer.vote, snapshot).await.map_err(stopped)?;
        // Refused, or of no use any more.
        inbound.shared.machine.snapshots.drop_unpublished(&file);
        Ok(codec::encode::<openraft::raft::SnapshotResponse<C>>(&answer))
    }
}
