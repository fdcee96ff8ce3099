//! Lanes to the other members: pooled, so that an election or a new leader finds its connections open.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use tidepool_proto::v1;

use super::SNAPSHOT_CHUNK_BYTES;
use super::channel::{Connection, Patience, dial};
use crate::election::ElectionProfile;
use crate::identity::IdentityStore;
use crate::network::{Call, Lane, Link, LinkError, Network};
use crate::snapshot::Feed;
use crate::types::NodeId;

/// Snapshot chunks read ahead of the connection.
const CHUNKS_AHEAD: usize = 2;

type Pool = HashMap<(NodeId, String, Lane), Arc<Connection>>;

/// Connects this member to the others. Cheap to clone.
#[derive(Clone)]
pub struct GrpcNetwork {
    identity: Arc<IdentityStore>,
    patience: Patience,
    pool: Arc<Mutex<Pool>>,
}

impl GrpcNetwork {
    /// A network that speaks for `identity`.
    pub fn new(identity: Arc<IdentityStore>, profile: ElectionProfile) -> GrpcNetwork {
        GrpcNetwork { identity, patience: Patience::of(profile), pool: Arc::default() }
    }
}

/// A lane to one member.
#[derive(Clone)]
pub struct GrpcLink {
    connection: Arc<Connection>,
}

impl Network for GrpcNetwork {
    type Link = GrpcLink;

    fn link(&self, target: NodeId, address: &str, lane: Lane) -> GrpcLink {
        let mut pool = self.pool.lock();
        let connection = pool.entry((target, address.to_owned(), lane)).or_insert_with(|| {
            Arc::new(Connection::new(target, address.to_owned(), self.identity.clone(), self.patience))
        });
        GrpcLink { connection: connection.clone() }
    }

    async fn handshake(
        &self,
        address: &str,
        request: v1::HandshakeRequest,
        limit: Duration,
    ) -> Result<v1::HandshakeResponse, LinkError> {
        let asking = async {
            let mut client = dial(address, self.patience).await?;
            let answer = client.handshake(request).await;
            answer.map(tonic::Response::into_inner).map_err(|status| unreachable(address, &status))
        };
        tokio::time::timeout(limit, asking).await.map_err(|_| LinkError::Timeout(limit))?
    }

    async fn prepare(
        &self,
        address: &str,
        request: v1::PrepareRequest,
        limit: Duration,
    ) -> Result<v1::PrepareResponse, LinkError> {
        let asking = async {
            let mut client = dial(address, self.patience).await?;
            let answer = client.prepare(request).await;
            answer.map(tonic::Response::into_inner).map_err(|status| unreachable(address, &status))
        };
        tokio::time::timeout(limit, asking).await.map_err(|_| LinkError::Timeout(limit))?
    }
}

fn unreachable(address: &str, status: &tonic::Status) -> LinkError {
    LinkError::Unreachable(format!("{address}: {}", status.message()))
}

impl Link for GrpcLink {
    async fn call(&self, call: Call, payload: Bytes, limit: Duration) -> Result<Bytes, LinkError> {
        let connection = &self.connection;
        let request = v1::ConsensusMessage {
            identity: Some(connection.identity().to_wire()),
            target_node_id: connection.target,
            error: None,
            payload,
            store_uuid: connection.identity().store_uuid(),
        };
        let asking = async {
            let mut open = connection.open(limit).await?;
            let answer = match call {
                Call::Beat => open.client.beat(request).await,
                Call::Vote => open.client.vote(request).await,
                Call::PreVote => open.client.pre_vote(request).await,
                Call::TransferLeader => open.client.transfer_leader(request).await,
                Call::OfferSnapshot => match open.client.offer_snapshot(request).await {
                    // A member of an earlier version: it takes snapshots from their start only.
                    Err(status) if status.code() == tonic::Code::Unimplemented => return Ok(Bytes::new()),
                    answer => answer,
                },
            };
            let answer = answer.map_err(|status| connection.failed(&open, &status))?.into_inner();
            connection.judge(open.generation(), answer.error, answer.payload)
        };
        tokio::time::timeout(limit, asking).await.map_err(|_| LinkError::Timeout(limit))?
    }

    async fn append(
        &self,
        requests: BoxStream<'static, Bytes>,
        limit: Duration,
    ) -> Result<BoxStream<'static, Result<Bytes, LinkError>>, LinkError> {
        let connection = self.connection.clone();
        let mut open = connection.open(limit).await?;
        let mut first = Some((connection.identity().to_wire(), connection.identity().store_uuid()));
        let target_node_id = connection.target;
        let messages = Requests(
            requests
                .map(move |payload| match first.take() {
                    Some((identity, store_uuid)) => {
                        v1::AppendRequest { identity: Some(identity), target_node_id, payload, store_uuid }
                    }
                    None => v1::AppendRequest { payload, ..Default::default() },
                })
                .boxed(),
        );
        let answers = tokio::time::timeout(limit, open.client.append(messages)).await;
        let answers = answers.map_err(|_| {
            connection.broke(open.generation());
            LinkError::Timeout(limit)
        })?;
        let answers = answers.map_err(|status| connection.failed(&open, &status))?.into_inner();
        let generation = open.generation();
        let answers = answers.map(move |answer| match answer {
            Ok(answer) => connection.judge(generation, answer.error, answer.payload),
            Err(status) => Err(connection.failed_generation(generation, &status)),
        });
        Ok(answers.boxed())
    }

    async fn snapshot(&self, feed: Feed, limit: Duration) -> Result<Bytes, LinkError> {
        let connection = &self.connection;
        let sending = async {
            let mut open = connection.open(limit).await?;
            let first = v1::SnapshotChunk {
                identity: Some(connection.identity().to_wire()),
                target_node_id: connection.target,
                header: feed.offer.clone(),
                store_uuid: connection.identity().store_uuid(),
                ..Default::default()
            };
            let unreadable: Arc<Mutex<Option<String>>> = Arc::default();
            let chunks = stream::once(async { first }).chain(chunks(feed, unreadable.clone()));
            let answer = open.client.snapshot(chunks).await;
            if let Some(why) = unreadable.lock().take() {
                return Err(LinkError::Unreachable(format!("the snapshot could not be read: {why}")));
            }
            let answer = answer.map_err(|status| connection.failed(&open, &status))?.into_inner();
            connection.judge(open.generation(), answer.error, answer.payload)
        };
        tokio::time::timeout(limit, sending).await.map_err(|_| LinkError::Timeout(limit))?
    }
}

/// Append requests on their way. A type of its own, because the compiler cannot see that a call which holds a boxed
/// stream is `Send`.
struct Requests(BoxStream<'static, v1::AppendRequest>);

impl Stream for Requests {
    type Item = v1::AppendRequest;
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<v1::AppendRequest>> {
        self.0.poll_next_unpin(context)
    }
}

/// The file in chunks, read off the async threads, no faster than its pace. Ends early when it cannot be read: the receiver
/// notices.
fn chunks(
    feed: Feed,
    unreadable: Arc<Mutex<Option<String>>>,
) -> impl futures::Stream<Item = v1::SnapshotChunk> + Send + 'static {
    let Feed { file, from, pace, .. } = feed;
    let offsets = (from..file.length()).step_by(SNAPSHOT_CHUNK_BYTES);
    let reads = stream::iter(offsets).map(move |offset| {
        let file = file.clone();
        async move {
            let read = tokio::task::spawn_blocking(move || file.read_at(offset, SNAPSHOT_CHUNK_BYTES)).await;
            match read {
                Ok(Ok(data)) => Ok((offset, data)),
                Ok(Err(error)) => Err(error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        }
    });
    let paced = reads.buffered(CHUNKS_AHEAD).then(move |read| {
        let pace = pace.clone();
        async move {
            if let Ok((_, data)) = &read {
                tokio::time::sleep(pace.reserve(process_age(), data.len())).await;
            }
            read
        }
    });
    paced.scan(unreadable, |unreadable, read| {
        let chunk = read.map_err(|why| *unreadable.lock() = Some(why)).ok();
        std::future::ready(chunk.map(|(offset, data)| {
            let crc32c = Some(crc32c::crc32c(&data));
            v1::SnapshotChunk { offset, data, crc32c, ..Default::default() }
        }))
    })
}

/// Time since the first call: a clock that all transfers share.
fn process_age() -> Duration {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed()
}
