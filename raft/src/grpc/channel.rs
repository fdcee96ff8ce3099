//! One connection to one member: opened when first used, checked before it carries anything, replaced after it broke.
//! Opening goes on in the background, so that a caller with a short limit does not undo the work of connecting.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use hyper_util::client::legacy::connect::HttpConnector;
use parking_lot::Mutex;
use tidepool_proto::v1::raft_service_client::RaftServiceClient;
use tidepool_proto::{Address, Error, ErrorCode, v1};
use tonic::transport::{Channel, Endpoint};

use super::{MESSAGE_BYTES_MAX, WINDOW_BYTES};
use crate::election::ElectionProfile;
use crate::identity::{IdentityStore, check_protocol, wire_cluster};
use crate::network::LinkError;
use crate::types::NodeId;

type Client = RaftServiceClient<Channel>;
type Opening = Shared<BoxFuture<'static, Result<Client, LinkError>>>;

/// How long a connection may take to open, or an idle one not to answer, before it counts as lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    ping_interval: Duration,
    ping_timeout: Duration,
    /// How long sent bytes may stay unacknowledged by the peer's kernel (TCP_USER_TIMEOUT).
    unacknowledged: Duration,
}

impl Patience {
    pub(super) fn of(profile: ElectionProfile) -> Patience {
        let lease = profile.timeout_max();
        Patience {
            connect: lease.clamp(Duration::from_millis(250), Duration::from_secs(2)),
            ping_interval: lease.max(Duration::from_millis(250)),
            ping_timeout: (lease * 2).max(Duration::from_millis(500)),
            unacknowledged: (lease * 2).max(Duration::from_millis(500)),
        }
    }
}

/// One connection; shared by all who use its lane.
pub(super) struct Connection {
    pub(super) target: NodeId,
    address: String,
    identity: Arc<IdentityStore>,
    patience: Patience,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    opening: Option<Opening>,
    /// Counts openings, so that a late failure of an old connection does not close its successor.
    generation: u64,
}

/// An open connection, and which one it is.
pub(super) struct Open {
    pub(super) client: Client,
    generation: u64,
}

impl Connection {
    pub(super) fn new(target: NodeId, address: String, identity: Arc<IdentityStore>, patience: Patience) -> Connection {
        Connection { target, address, identity, patience, state: Mutex::default() }
    }

    /// The open connection, opening it if need be; waits for that no longer than `limit`.
    pub(super) async fn open(&self, limit: Duration) -> Result<Open, LinkError> {
        let (opening, generation) = {
            let mut state = self.state.lock();
            let failed =
                state.opening.as_ref().and_then(|opening| opening.peek()).is_some_and(|result| result.is_err());
            if failed {
                state.opening = None;
            }
            match &state.opening {
                Some(opening) => (opening.clone(), state.generation),
                None => {
                    let work = connect(self.target, self.address.clone(), self.identity.clone(), self.patience);
                    let task = tokio::spawn(work);
                    let opening =
                        async move { task.await.unwrap_or_else(|e| Err(LinkError::Unreachable(e.to_string()))) };
                    let opening = opening.boxed().shared();
                    state.opening = Some(opening.clone());
                    state.generation += 1;
                    (opening, state.generation)
                }
            }
        };
        let client = tokio::time::timeout(limit, opening).await.map_err(|_| LinkError::Timeout(limit))??;
        Ok(Open { client, generation })
    }

    /// Forgets a connection that failed.
    pub(super) fn broke(&self, generation: u64) {
        let mut state = self.state.lock();
        if state.generation == generation {
            state.opening = None;
        }
    }

    /// What an answer came to. One who refuses may be another than was dialled, or its ghost: the next call dials anew.
    pub(super) fn judge(
        &self,
        generation: u64,
        error: Option<v1::CallError>,
        payload: Bytes,
    ) -> Result<Bytes, LinkError> {
        match error {
            None => Ok(payload),
            Some(error) => {
                self.broke(generation);
                Err(LinkError::Refused(error.into()))
            }
        }
    }

    /// Says who calls and whom it means.
    pub(super) fn identity(&self) -> &IdentityStore {
        &self.identity
    }

    /// Sorts out a failed call; a broken connection is forgotten.
    pub(super) fn failed(&self, open: &Open, status: &tonic::Status) -> LinkError {
        self.failed_generation(open.generation, status)
    }

    pub(super) fn failed_generation(&self, generation: u64, status: &tonic::Status) -> LinkError {
        self.broke(generation);
        LinkError::Unreachable(format!("node {} at {}: {}", self.target, self.address, status.message()))
    }
}

impl Open {
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }
}

pub(super) fn endpoint(address: &str, patience: Patience) -> Result<Endpoint, LinkError> {
    let unusable = |e: &dyn std::fmt::Display| LinkError::Unreachable(format!("address {address}: {e}"));
    let address: Address = address.parse().map_err(|e| unusable(&e))?;
    let endpoint = Endpoint::from_shared(address.to_uri()).map_err(|e| unusable(&e))?;
    Ok(endpoint
        .http2_keep_alive_interval(patience.ping_interval)
        .keep_alive_timeout(patience.ping_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES * 2))
}

/// Opens sockets. One whose peer fell silent with bytes under way dies early, instead of being retransmitted on for a
/// quarter of an hour.
fn connector(patience: Patience) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(patience.connect));
    connector.set_nodelay(true);
    connector.set_keepalive(Some(Duration::from_secs(5)));
    connector.set_tcp_user_timeout(Some(patience.unacknowledged));
    connector
}

pub(super) async fn dial(address: &str, patience: Patience) -> Result<Client, LinkError> {
    let endpoint = endpoint(address, patience)?;
    let channel = endpoint.connect_with_connector(connector(patience));
    // The connector bounds the TCP handshake; this bounds name resolution and the HTTP/2 preface as well.
    let channel = tokio::time::timeout(patience.connect * 2, channel)
        .await
        .map_err(|_| LinkError::Timeout(patience.connect * 2))?
        .map_err(|e| LinkError::Unreachable(format!("{address}: {}", with_causes(&e))))?;
    Ok(RaftServiceClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

async fn connect(
    target: NodeId,
    address: String,
    identity: Arc<IdentityStore>,
    patience: Patience,
) -> Result<Client, LinkError> {
    let mut client = dial(&address, patience).await?;
    let request = v1::HandshakeRequest {
        identity: Some(identity.to_wire()),
        target_node_id: target,
        store_uuid: identity.store_uuid(),
    };
    let answer = tokio::time::timeout(patience.connect * 2, client.handshake(request))
        .await
        .map_err(|_| LinkError::Timeout(patience.connect * 2))?
        .map_err(|status| LinkError::Unreachable(format!("{address}: {}", status.message())))?
        .into_inner();
    check(&answer, target, &address, &identity).map_err(|error| {
        tracing::warn!(%error, target, "refused to talk to a member");
        LinkError::Refused(error)
    })?;
    Ok(client)
}

/// Whether the one who answered is the member that was dialled.
fn check(answer: &v1::HandshakeResponse, target: NodeId, address: &str, own: &IdentityStore) -> Result<(), Error> {
    let wrong = |message: String| Err(Error::new(ErrorCode::WrongCluster, message));
    if let Some(error) = answer.error.clone() {
        return Err(error.into());
    }
    let Some(peer) = &answer.identity else {
        return wrong(format!("{address} does not say who it is"));
    };
    check_protocol(peer)?;
    if peer.node_id != target {
        return wrong(format!("{address} is node {}, node {target} was expected there", peer.node_id));
    }
    match wire_cluster(peer) {
        Some(theirs) if theirs == own.cluster() => {}
        Some(theirs) => {
            return wrong(format!("node {target} at {address} belongs to {theirs}, this one to {}", own.cluster()));
        }
        None => return wrong(format!("node {target} at {address} belongs to no cluster; its data directory is empty")),
    }
    match own.record().roster.get(&tidepool_proto::NodeId(target)) {
        Some(agreed) if agreed.0.to_be_bytes()[..] != answer.store_uuid[..] => {
            wrong(format!("node {target} at {address} has another data directory than the one it joined with"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::AsyncWriteExt;
    use tokio::time::{Instant, timeout};
    use tower::Service;

    use super::*;

    /// A peer that takes connections and nothing more: its window closes and never opens again. The kernel gives the
    /// connection up within the profile's limit. (Tried without TCP_USER_TIMEOUT: the write waits on past the limit of this
    /// test.)
    #[tokio::test]
    async fn a_connection_to_a_silent_peer_dies_early() {
        for profile in [ElectionProfile::Lan, ElectionProfile::Default] {
            let patience = Patience::of(profile);
            assert!(patience.unacknowledged >= profile.timeout_max() * 2);
            let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("http://{}", silent.local_addr().unwrap());
            let connecting = connector(patience).call(address.parse().unwrap());
            let mut stream = connecting.await.unwrap().into_inner();
            let began = Instant::now();
            let flood = async {
                let chunk = vec![0; 1 << 20];
                loop {
                    if let Err(error) = stream.write_all(&chunk).await {
                        return error;
                    }
                }
            };
            let error = timeout(Duration::from_secs(20), flood).await.expect("the connection lives on");
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            println!("{profile}: given up after {:?}", began.elapsed());
        }
    }
}
