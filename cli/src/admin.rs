//! The operators' service, asked on every master at once: a dead or black-holed master costs the deadline, not a hang.

use std::time::Duration;

use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::{CallError, StatusRequest, StatusResponse, TransferRequest, TransferResponse};
use tidepool_proto::{Address, Error, ErrorCode};
use tonic::transport::{Channel, Endpoint};

/// One master's answer.
#[derive(Debug)]
pub struct Answer {
    /// Whom we asked.
    pub address: Address,
    /// What it said.
    pub status: Result<StatusResponse, Error>,
}

fn unreachable(address: &Address, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::Unavailable, format!("master {address} does not answer: {why}"))
}

/// A channel to one master.
pub async fn connect(address: &Address, within: Duration) -> Result<AdminServiceClient<Channel>, Error> {
    let endpoint = Endpoint::from_shared(address.to_uri())
        .map_err(|error| Error::new(ErrorCode::InvalidParams, format!("address {address}: {error}")))?
        .connect_timeout(within)
        .timeout(within)
        .tcp_nodelay(true);
    match tokio::time::timeout(within, endpoint.connect()).await {
        Ok(Ok(channel)) => Ok(AdminServiceClient::new(channel)),
        Ok(Err(error)) => Err(unreachable(address, root_cause(&error))),
        Err(_) => Err(unreachable(address, format!("no connection within {within:?}"))),
    }
}

/// The innermost reason; tonic's own text is "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Asks one master about itself.
pub async fn status(address: &Address, within: Duration) -> Result<StatusResponse, Error> {
    let mut client = connect(address, within).await?;
    match tokio::time::timeout(within, client.status(StatusRequest {})).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(unreachable(address, status.message())),
        Err(_) => Err(unreachable(address, format!("no answer within {within:?}"))),
    }
}

/// Asks every known master, and those the first answers name, in parallel.
pub async fn status_of_all(masters: &[Address], within: Duration) -> Vec<Answer> {
    let ask = |address: Address| async move {
        let status = status(&address, within).await;
        Answer { address, status }
    };
    let mut answers = futures::future::join_all(masters.iter().cloned().map(ask)).await;
    let learned: Vec<Address> = answers
        .iter()
        .filter_map(|answer| answer.status.as_ref().ok())
        .flat_map(|status| status.members.iter().filter_map(|member| member.address.parse::<Address>().ok()))
        .collect();
    let mut more: Vec<Address> = Vec::new();
    for address in learned {
        if !more.contains(&address) && !answers.iter().any(|answer| is_at(answer, &address)) {
            more.push(address);
        }
    }
    answers.extend(futures::future::join_all(more.into_iter().map(ask)).await);
    answers.sort_by_key(|answer| (answer.status.as_ref().map_or(u64::MAX, own_node_id), answer.address.clone()));
    answers.dedup_by_key(|answer| (answer.status.as_ref().map_or(u64::MAX, own_node_id), unanswered(answer)));
    answers
}

fn unanswered(answer: &Answer) -> Option<Address> {
    answer.status.is_err().then(|| answer.address.clone())
}

/// The same master under the address it advertises, whatever name we dialled.
fn is_at(answer: &Answer, address: &Address) -> bool {
    let advertised = answer.status.as_ref().ok().and_then(|status| {
        let own = own_node_id(status);
        status.members.iter().find(|member| member.node_id == own).map(|member| member.address.clone())
    });
    answer.address == *address || advertised.is_some_and(|advertised| advertised == address.to_string())
}

/// Id of the master that answered.
pub fn own_node_id(status: &StatusResponse) -> u64 {
    status.identity.as_ref().map_or(0, |identity| identity.node_id)
}

/// The answer of the leader of the highest term.
pub fn leader(answers: &[Answer]) -> Option<(&Address, &StatusResponse)> {
    answers
        .iter()
        .filter_map(|answer| answer.status.as_ref().ok().map(|status| (&answer.address, status)))
        .filter(|(_, status)| status.role == "leader")
        .max_by_key(|(_, status)| status.term)
}

/// A channel to the leader.
pub async fn connect_leader(masters: &[Address], within: Duration) -> Result<AdminServiceClient<Channel>, Error> {
    let answers = status_of_all(masters, within).await;
    match leader(&answers) {
        Some((address, _)) => connect(address, within).await,
        None => {
            let text = "no master of the quorum says that it leads; see: tidepool status";
            Err(Error::new(ErrorCode::Unavailable, text))
        }
    }
}

/// Asks the leader to hand over; 0 lets it choose.
pub async fn transfer_leader(
    leader: &Address,
    target_node_id: u64,
    within: Duration,
) -> Result<TransferResponse, Error> {
    let mut client = connect(leader, within).await?;
    let call = client.transfer_leader(TransferRequest { target_node_id });
    let response = match tokio::time::timeout(within, call).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return Err(unreachable(leader, status.message())),
        Err(_) => {
            let text = format!(
                "no answer from {leader} within {within:?}; whether it handed over is unknown: see tidepool status"
            );
            return Err(Error::new(ErrorCode::DeadlineExceeded, text));
        }
    };
    match &response.error {
        None => Ok(response),
        Some(error) => Err(from_call(error)),
    }
}

/// A call's error as ours.
pub fn from_call(error: &CallError) -> Error {
    Error::new(ErrorCode::from_u32(error.code), error.message.clone())
        .retry_after(error.retry_after_ms)
        .with_leader(error.leader.clone())
}
