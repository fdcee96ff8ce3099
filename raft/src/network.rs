//! How members reach each other, as the node sees it: encoded bytes over lanes that do not hold each other up.
//! `grpc` is the network of production, `sim` that of the deterministic simulation; both carry the same bytes.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use tidepool_proto::{Error, v1};

use crate::snapshot::Feed;
use crate::types::NodeId;

/// Connections to one member. Each lane is a connection of its own, so that neither a full send buffer nor a
/// snapshot delays a heartbeat.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Heartbeats, votes and transfers of leadership.
    Control,
    /// Log replication.
    Append,
    /// Snapshots.
    Snapshot,
}

/// One question, one answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// A heartbeat: an append request without entries.
    Beat,
    /// A vote.
    Vote,
    /// A vote that would be given, without giving it.
    PreVote,
    /// The leader asks for an election in its favour of another.
    TransferLeader,
    /// How much of a snapshot is there already? Asked on the lane of snapshots; one that does not know the question answers
    /// nothing.
    OfferSnapshot,
}

/// Why a peer did not answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// Not connected, refused, reset.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// No answer within the limit.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// It answered that it will not.
    #[error("refused: {0}")]
    Refused(Error),
}

/// A lane to one member. Connects when it is used; a cheap clone of a pooled connection.
pub trait Link: Send + Sync + 'static {
    /// Asks once.
    fn call(
        &self,
        call: Call,
        payload: Bytes,
        limit: Duration,
    ) -> impl Future<Output = Result<Bytes, LinkError>> + Send;

    /// Opens a stream of append requests, many in flight, answered in order.
    fn append(
        &self,
        requests: BoxStream<'static, Bytes>,
        limit: Duration,
    ) -> impl Future<Output = Result<BoxStream<'static, Result<Bytes, LinkError>>, LinkError>> + Send;

    /// Sends a snapshot: its offer, then its bytes from where the receiver wants them.
    fn snapshot(&self, feed: Feed, limit: Duration) -> impl Future<Output = Result<Bytes, LinkError>> + Send;
}

/// Makes lanes, and carries the calls that come before there is a cluster.
pub trait Network: Clone + Send + Sync + 'static {
    /// Its lanes.
    type Link: Link;

    /// A lane to a member. Does not wait for a connection.
    fn link(&self, target: NodeId, address: &str, lane: Lane) -> Self::Link;

    /// Who are you (I4)?
    fn handshake(
        &self,
        address: &str,
        request: v1::HandshakeRequest,
        limit: Duration,
    ) -> impl Future<Output = Result<v1::HandshakeResponse, LinkError>> + Send;

    /// Join this fresh cluster (I4).
    fn prepare(
        &self,
        address: &str,
        request: v1::PrepareRequest,
        limit: Duration,
    ) -> impl Future<Output = Result<v1::PrepareResponse, LinkError>> + Send;
}
