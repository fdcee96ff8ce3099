//! The operators' service of one master, asked over short-lived connections: a dead or paused master costs the
//! deadline, never a hang.

use std::fmt::Display;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::{
    CompactRequest, StateDigestRequest, StateDigestResponse, StatusRequest, StatusResponse, TakeSnapshotRequest,
    TransferRequest, TransferResponse,
};
use tonic::transport::{Channel, Endpoint};

/// Deadline of one admin call.
pub const CALL_WITHIN: Duration = Duration::from_secs(2);

/// A connection to one master that outlives a call.
pub async fn connect(address: impl Display) -> Result<AdminServiceClient<Channel>> {
    let uri = format!("http://{address}").replace('%', "%25");
    let endpoint = Endpoint::from_shared(uri)?.connect_timeout(CALL_WITHIN).tcp_nodelay(true);
    let channel = endpoint.connect().await.with_context(|| format!("connecting to master {address}"))?;
    Ok(AdminServiceClient::new(channel))
}

async fn within<T>(limit: Duration, address: impl Display, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, call).await.map_err(|_| anyhow!("master {address} did not answer within {limit:?}"))?
}

/// What a master says about itself.
pub async fn status(address: impl Display) -> Result<StatusResponse> {
    within(CALL_WITHIN, &address, async { Ok(connect(&address).await?.status(StatusRequest {}).await?.into_inner()) })
        .await
}

/// The digest of a master's state at a checkpoint; index 0 asks the leader to log one.
pub async fn state_digest(address: impl Display, checkpoint: u64) -> Result<StateDigestResponse> {
    within(CALL_WITHIN, &address, async {
        let request = StateDigestRequest { at_least_index: checkpoint, remaining_ms: CALL_WITHIN.as_millis() as u32 };
        let response = connect(&address).await?.state_digest(request).await?.into_inner();
        match response.error {
            Some(error) => bail!("state digest of master {address}: {}", tidepool_proto::Error::from(error)),
            None => Ok(response),
        }
    })
    .await
}

/// Asks the leader to hand over (target 0: to its best standby).
pub async fn transfer_leader(address: impl Display, target_node_id: u64) -> Result<TransferResponse> {
    within(Duration::from_secs(10), &address, async {
        let response = connect(&address).await?.transfer_leader(TransferRequest { target_node_id }).await?.into_inner();
        match response.error {
            Some(error) => bail!("transfer of leadership by {address}: {}", tidepool_proto::Error::from(error)),
            None => Ok(response),
        }
    })
    .await
}

/// Asks a master to publish a snapshot; answers the log index that it covers.
pub async fn take_snapshot(address: impl Display) -> Result<u64> {
    let limit = Duration::from_secs(60);
    within(limit, &address, async {
        let request = TakeSnapshotRequest { remaining_ms: limit.as_millis() as u32 };
        let response = connect(&address).await?.take_snapshot(request).await?.into_inner();
        match response.error {
            Some(error) => bail!("snapshot of {address}: {}", tidepool_proto::Error::from(error)),
            None if !response.published => bail!("the snapshot of {address} was not published"),
            None => Ok(response.index),
        }
    })
    .await
}

/// Asks a master to snapshot its state and purge its log.
pub async fn compact(address: impl Display) -> Result<u64> {
    within(Duration::from_secs(60), &address, async {
        let response = connect(&address).await?.compact(CompactRequest {}).await?.into_inner();
        match response.error {
            Some(error) => bail!("compaction of {address}: {}", tidepool_proto::Error::from(error)),
            None => Ok(response.snapshot_index),
        }
    })
    .await
}
