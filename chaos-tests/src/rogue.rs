//! A client that does what ours never does: raw requests to one chosen master, unended puts, forged and stale ones.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tidepool_proto::v1::client_request::Body;
use tidepool_proto::v1::client_service_client::ClientServiceClient;
use tidepool_proto::v1::{self, client_response};
use tidepool_proto::{Error, PROTOCOL_VERSION};
use tonic::transport::{Channel, Endpoint};

/// Deadline of one call, on both sides.
pub const CALL_WITHIN: Duration = Duration::from_secs(10);

/// A connection to one master, whatever its role.
#[derive(Clone)]
pub struct RogueClient {
    service: ClientServiceClient<Channel>,
    /// Session of the last hello.
    pub session_id: u64,
    /// The cluster, as the last hello told it.
    pub identity: v1::Identity,
}

impl RogueClient {
    /// Connects; says nothing yet.
    pub async fn connect(address: SocketAddr) -> Result<RogueClient> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(CALL_WITHIN);
        let channel = endpoint.connect().await.with_context(|| format!("connecting to {address}"))?;
        let identity = v1::Identity { protocol_version: PROTOCOL_VERSION, ..v1::Identity::default() };
        Ok(RogueClient { service: ClientServiceClient::new(channel), session_id: 0, identity })
    }

    /// Connects and opens a session.
    pub async fn open(address: SocketAddr) -> Result<RogueClient> {
        let mut client = RogueClient::connect(address).await?;
        let hello = v1::HelloRequest {
            identity: Some(client.identity.clone()),
            client_uuid: rand::random::<[u8; 16]>().to_vec().into(),
            host_id: String::new(),
            lineage: Vec::new(),
        };
        match client.call(Body::Hello(hello)).await? {
            client_response::Body::Hello(answer) => {
                client.session_id = answer.session_id;
                client.identity = answer.identity.context("hello was answered without an identity")?;
                Ok(client)
            }
            other => bail!("hello was answered with {other:?}"),
        }
    }

    /// One request as it is; errors of the whole call come back as `Error`.
    pub async fn call(&mut self, body: Body) -> Result<client_response::Body> {
        self.call_within(body, CALL_WITHIN).await
    }

    /// One request with its own deadline.
    pub async fn call_within(&mut self, body: Body, within: Duration) -> Result<client_response::Body> {
        let request = v1::ClientRequest {
            id: 1,
            remaining_ms: within.as_millis() as u32,
            tenant: String::new(),
            body: Some(body),
        };
        // Twice what the master was told: a late answer is an answer, silence is a finding.
        let patience = within * 2 + CALL_WITHIN;
        let answer = tokio::time::timeout(patience, self.service.call(request));
        let answer = answer.await.map_err(|_| anyhow!("no answer within {patience:?}"))??.into_inner();
        match (answer.error, answer.body) {
            (Some(error), _) => Err(Error::from(error).into()),
            (None, Some(body)) => Ok(body),
            (None, None) => bail!("an answer without error and body"),
        }
    }

    /// PutStart of some keys; one grant a key.
    pub async fn put_start(&mut self, keys: &[&[u8]], length: u64, replica_num: u32) -> Result<Vec<v1::PutGrant>> {
        let items = keys.iter().map(|key| v1::PutStartItem {
            key: key.to_vec().into(),
            length,
            token: rand::random::<[u8; 16]>().to_vec().into(),
            ..Default::default()
        });
        let request = v1::PutStartRequest {
            session_id: self.session_id,
            items: items.collect(),
            replica_num,
            replica_mode: v1::ReplicaMode::BestEffort as i32,
            excluded_nodes: Vec::new(),
            ..Default::default()
        };
        match self.call(Body::PutStart(request)).await? {
            client_response::Body::PutStart(answer) => Ok(answer.grants),
            other => bail!("PutStart was answered with {other:?}"),
        }
    }

    /// PutEnd of one key.
    pub async fn put_end(&mut self, item: v1::PutEndItem) -> Result<v1::PutEndResult> {
        match self.call(Body::PutEnd(v1::PutEndRequest { items: vec![item], session_id: self.session_id })).await? {
            client_response::Body::PutEnd(answer) => {
                answer.results.into_iter().next().context("PutEnd was answered without a result")
            }
            other => bail!("PutEnd was answered with {other:?}"),
        }
    }

    /// PutRevoke of one key.
    pub async fn put_revoke(&mut self, item: v1::PutEndItem) -> Result<Option<v1::ItemError>> {
        match self
            .call(Body::PutRevoke(v1::PutRevokeRequest { items: vec![item], session_id: self.session_id }))
            .await?
        {
            client_response::Body::PutRevoke(answer) => Ok(answer.errors.into_iter().next()),
            other => bail!("PutRevoke was answered with {other:?}"),
        }
    }

    /// Exist of one key without touching it: what this very master believes.
    pub async fn exists(&mut self, key: &[u8], within: Duration) -> Result<bool> {
        let request = v1::ExistRequest {
            keys: Some(v1::Keys::pack([key])),
            lease_mode: v1::LeaseMode::NoTouch as i32,
            ..v1::ExistRequest::default()
        };
        match self.call_within(Body::Exist(request), within).await? {
            client_response::Body::Exist(answer) => {
                answer.present.first().map(|&byte| byte == 1).context("exist was answered without a byte")
            }
            other => bail!("exist was answered with {other:?}"),
        }
    }
}
