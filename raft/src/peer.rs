//! The sending half of consensus: openraft's requests, encoded and put on the lanes to one member.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use openraft::OptionalSend;
use openraft::async_runtime::AsyncRuntime;
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RPCTypes, stream_append_sequential};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{RaftNetworkFactory, RaftNetworkV2};

use crate::apply::Snapshot;
use crate::codec::{self, Message};
use crate::election::{ElectionProfile, SNAPSHOT_TIMEOUT};
use crate::host::Host;
use crate::network::{Call, Lane, Link, LinkError, Network};
use crate::snapshot::{Feed, Offer, Pace, SnapshotFile, SnapshotStore, decode_offset};
use crate::types::{Member, NodeId, Vote};

/// Shortest time after which appends in flight without any answer mean a dead connection: above a slow fsync.
const STALL_MIN: Duration = Duration::from_secs(2);

/// How long a member may take to look what it has of a snapshot: it syncs that.
const OFFER_LIMIT: Duration = Duration::from_secs(30);

/// Makes the senders that openraft asks for.
pub(crate) struct Peers<N> {
    pub(crate) own: NodeId,
    pub(crate) profile: ElectionProfile,
    pub(crate) network: N,
    pub(crate) snapshots: SnapshotStore,
    /// Of all snapshots that this member sends.
    pub(crate) pace: Arc<Pace>,
}

impl<N: Network> Peers<N> {
    fn peer<C: Host>(&self, target: NodeId, member: &Member, bulk: Lane) -> Peer<C, N::Link> {
        Peer {
            own: self.own,
            target,
            stall: STALL_MIN.max(self.profile.timeout_max() * 4),
            control: self.network.link(target, &member.address, Lane::Control),
            bulk: self.network.link(target, &member.address, bulk),
            sends_beats: bulk == Lane::Control,
            snapshots: self.snapshots.clone(),
            pace: self.pace.clone(),
            config: PhantomData,
        }
    }
}

impl<C: Host, N: Network> RaftNetworkFactory<C> for Peers<N> {
    type Network = Peer<C, N::Link>;

    async fn new_client(&mut self, target: NodeId, member: &Member) -> Self::Network {
        self.peer(target, member, Lane::Append)
    }
    async fn new_heartbeat_client(&mut self, target: NodeId, member: &Member) -> Self::Network {
        self.peer(target, member, Lane::Control)
    }
    async fn new_snapshot_client(&mut self, target: NodeId, member: &Member) -> Self::Network {
        self.peer(target, member, Lane::Snapshot)
    }
}

/// Sends to one member.
pub(crate) struct Peer<C, L> {
    own: NodeId,
    target: NodeId,
    stall: Duration,
    control: L,
    bulk: L,
    sends_beats: bool,
    snapshots: SnapshotStore,
    pace: Arc<Pace>,
    config: PhantomData<C>,
}

impl<C: Host, L: Link> Peer<C, L> {
    async fn ask<Q: Message, A: Message>(&self, call: Call, request: &Q, option: &RPCOption) -> Result<A, RPCError<C>> {
        let action = match call {
            Call::Beat => RPCTypes::AppendEntries,
            Call::Vote | Call::PreVote => RPCTypes::Vote,
            Call::TransferLeader => RPCTypes::TransferLeader,
            Call::OfferSnapshot => RPCTypes::InstallSnapshot,
        };
        let limit = option.soft_ttl();
        let failed = |error| self.error(action, error);
        // The network keeps the limit itself; this is the belt to its braces.
        let answer =
            C::AsyncRuntime::timeout(option.hard_ttl(), self.control.call(call, codec::encode(request), limit));
        let frame = answer.await.unwrap_or(Err(LinkError::Timeout(limit))).map_err(failed)?;
        codec::decode(frame).map_err(|error| RPCError::Network(NetworkError::new(&error)))
    }

    fn error(&self, action: RPCTypes, error: LinkError) -> RPCError<C> {
        match error {
            LinkError::Unreachable(_) | LinkError::Refused(_) => RPCError::Unreachable(Unreachable::from_string(error)),
            LinkError::Timeout(timeout) => {
                RPCError::Timeout(Timeout { action, id: self.own, target: self.target, timeout })
            }
        }
    }

    /// Sends a snapshot, or what the member lacks of it after an attempt that was cut short.
    async fn feed(&self, vote: Vote, file: SnapshotFile) -> Result<Bytes, LinkError> {
        let offer = Offer::new(vote, &file).encode();
        let answer = self.bulk.call(Call::OfferSnapshot, offer.clone(), OFFER_LIMIT).await?;
        let from = decode_offset(&answer, file.length()).map_err(|e| LinkError::Unreachable(e.to_string()))?;
        // It lives. What it is sent is kept until it holds the log that follows; see `compaction`.
        self.snapshots.hold(self.target, &file);
        if from > 0 {
            tracing::info!(
                target = self.target,
                from,
                bytes = file.length(),
                "a snapshot goes on where it was cut short"
            );
        }
        self.bulk.snapshot(Feed { offer, file, from, pace: self.pace.clone() }, SNAPSHOT_TIMEOUT).await
    }

    /// Turns answers back into openraft's, and gives up when requests stay unanswered.
    fn answers<'s>(
        &'s self,
        answers: futures::stream::BoxStream<'static, Result<Bytes, LinkError>>,
        unanswered: Arc<AtomicU64>,
    ) -> BoxStream<'s, Result<StreamAppendResult<C>, RPCError<C>>> {
        let stall = self.stall;
        let strm = stream::unfold(Some((answers, unanswered)), move |state| async move {
            let (mut answers, unanswered) = state?;
            let answer = loop {
                let waiting = unanswered.load(Ordering::Acquire) > 0;
                match C::AsyncRuntime::timeout(stall, answers.next()).await {
                    Ok(answer) => break answer?,
                    Err(_) if waiting => break Err(LinkError::Timeout(stall)),
                    Err(_) => {}
                }
            };
            unanswered.fetch_sub(1, Ordering::AcqRel);
            let decoded = answer.map_err(|error| self.error(RPCTypes::AppendEntries, error)).and_then(|frame| {
                codec::decode::<StreamAppendResult<C>>(frame)
                    .map_err(|error| RPCError::Network(NetworkError::new(&error)))
            });
            match decoded {
                Ok(answer) => Some((Ok(answer), Some((answers, unanswered)))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Box::pin(strm)
    }
}

impl<C: Host, L: Link> RaftNetworkV2<C> for Peer<C, L> {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<C>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<C>, RPCError<C>> {
        self.ask(Call::Beat, &request, &option).await
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<C>, RPCError<C>>>, RPCError<C>>>
    where
        S: Stream<Item = AppendEntriesRequest<C>> + OptionalSend + Unpin + 'static,
    {
        if self.sends_beats {
            return stream_append_sequential(self, input, option);
        }
        let mut input = input;
        Box::pin(async move {
            // openraft's pause after a failure is where it makes the next request: a stream that were opened before there is one
            // would be tried again at once, for as long as the member is gone.
            let Some(first) = input.next().await else { return Ok(stream::empty().boxed()) };
            let unanswered = Arc::new(AtomicU64::new(0));
            let sent = unanswered.clone();
            let requests = stream::iter([first]).chain(input).map(move |request| {
                sent.fetch_add(1, Ordering::AcqRel);
                codec::encode(&request)
            });
            let answers = self.bulk.append(requests.boxed(), self.stall).await;
            let answers = answers.map_err(|error| self.error(RPCTypes::AppendEntries, error))?;
            Ok(self.answers(answers, unanswered))
        })
    }

    async fn vote(&mut self, request: VoteRequest<C>, option: RPCOption) -> Result<VoteResponse<C>, RPCError<C>> {
        self.ask(Call::Vote, &request, &option).await
    }

    async fn pre_vote(&mut self, request: VoteRequest<C>, option: RPCOption) -> Result<VoteResponse<C>, RPCError<C>> {
        self.ask(Call::PreVote, &request, &option).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<C>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<C>, RPCError<C>> {
        self.ask(Call::TransferLeader, &request, &option).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<C>, StreamingError<C>> {
        let file = snapshot.snapshot;
        if !file.is_agreed() {
            // Tried again after a pause.
            let why = "no snapshot is there yet that a majority of the members vouched for";
            return Err(StreamingError::Unreachable(Unreachable::from_string(why)));
        }
        let sending = self.feed(vote, file);
        let frame = match C::AsyncRuntime::select2(cancel, sending).await {
            openraft::async_runtime::Select2::First(closed) => return Err(StreamingError::Closed(closed)),
            openraft::async_runtime::Select2::Second(answer) => answer,
        };
        let frame = frame.map_err(|error| StreamingError::from(self.error(RPCTypes::InstallSnapshot, error)))?;
        codec::decode(frame).map_err(|error| StreamingError::Network(NetworkError::new(&error)))
    }
}
