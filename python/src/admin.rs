//! The operators' service, asked at the leader: tasks and the state of the cluster.

use std::time::Duration;

use bytes::Bytes;
use rand::RngCore as _;
use tidepool_client::{Client, Error, ErrorCode};
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::{
    CallError, CancelTaskRequest, CreateTaskRequest, ListTasksRequest, StatusRequest, StatusResponse, TaskStatus,
};
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::transport::{Channel, Endpoint};

/// Pause before a lost request is repeated.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How long one attempt may take: a leader that died is left for its successor.
const ATTEMPT_WITHIN: Duration = Duration::from_secs(2);
/// A key that nobody puts; asking for it is the smallest question.
const NOBODYS_KEY: &[u8] = b"\0tidepool-ping";

fn unanswered(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::Unavailable, format!("the leader does not answer: {why}"))
}

async fn leader(client: &Client) -> Result<AdminServiceClient<Channel>, Error> {
    let address = client.leader().ok_or_else(|| unanswered("no master is known to lead"))?;
    let endpoint =
        Endpoint::from_shared(address.to_uri()).map_err(|error| unanswered(format!("{address}: {error}")))?;
    let channel = endpoint.connect_timeout(ATTEMPT_WITHIN).tcp_nodelay(true).connect().await;
    channel.map(AdminServiceClient::new).map_err(|error| unanswered(format!("{address}: {error}")))
}

/// Asks whoever leads until somebody does and answers. Every request here may be repeated.
async fn ask<T, F>(client: &Client, until: Instant, one: impl Fn(AdminServiceClient<Channel>) -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    loop {
        let attempt = async { one(leader(client).await?).await };
        let within = until.min(Instant::now() + ATTEMPT_WITHIN);
        let error = match timeout_at(within, attempt).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => unanswered(format!("not within {ATTEMPT_WITHIN:?}")),
        };
        let is_lost = matches!(error.code(), ErrorCode::NotLeader | ErrorCode::Unavailable);
        let again = Instant::now() + AGAIN_AFTER;
        if !is_lost {
            return Err(error);
        }
        if again >= until {
            let what = format!("no leader answered by the deadline; last: {}", error.message());
            return Err(Error::new(ErrorCode::DeadlineExceeded, what));
        }
        sleep_until(again).await;
    }
}

fn status_error(status: tonic::Status) -> Error {
    unanswered(status.message())
}

fn checked<T>(error: Option<CallError>, answer: T) -> Result<T, Error> {
    error.map_or(Ok(answer), |error| Err(error.into()))
}

/// Creates a task; its token makes a repeated request the same task.
pub(crate) async fn create_task(client: &Client, request: CreateTaskRequest, until: Instant) -> Result<u64, Error> {
    let mut token = [0u8; 16];
    rand::rng().fill_bytes(&mut token);
    let request = CreateTaskRequest { token: Bytes::copy_from_slice(&token), ..request };
    let create = |mut leader: AdminServiceClient<Channel>| {
        let request = request.clone();
        async move {
            let answer = leader.create_task(request).await.map_err(status_error)?.into_inner();
            checked(answer.error, answer.task_id)
        }
    };
    ask(client, until, create).await
}

/// One task.
pub(crate) async fn query_task(client: &Client, task_id: u64, until: Instant) -> Result<TaskStatus, Error> {
    let missing =
        || Error::new(ErrorCode::TaskNotFound, format!("no task {task_id}, or it was forgotten after it ended"));
    if task_id == 0 {
        return Err(missing());
    }
    let query = |mut leader: AdminServiceClient<Channel>| async move {
        let answer = leader.list_tasks(ListTasksRequest { task_id }).await.map_err(status_error)?.into_inner();
        checked(answer.error, answer.tasks)
    };
    ask(client, until, query).await?.into_iter().find(|task| task.task_id == task_id).ok_or_else(missing)
}

/// Cancels a task.
pub(crate) async fn cancel_task(client: &Client, task_id: u64, until: Instant) -> Result<(), Error> {
    let cancel = |mut leader: AdminServiceClient<Channel>| async move {
        let answer = leader.cancel_task(CancelTaskRequest { task_id }).await.map_err(status_error)?.into_inner();
        checked(answer.error, ())
    };
    ask(client, until, cancel).await
}

/// The leader's view of the cluster.
pub(crate) async fn status(client: &Client, until: Instant) -> Result<StatusResponse, Error> {
    let status = |mut leader: AdminServiceClient<Channel>| async move {
        let answer = leader.status(StatusRequest {}).await.map_err(status_error)?.into_inner();
        match answer.role.as_str() {
            "leader" => Ok(answer),
            role => Err(Error::new(ErrorCode::NotLeader, format!("the master asked is {role}"))),
        }
    };
    ask(client, until, status).await
}

/// How long the leader takes to answer.
pub(crate) async fn ping(client: &Client, deadline: Option<Duration>) -> Result<Duration, Error> {
    let began = Instant::now();
    match client.stat(NOBODYS_KEY, deadline).await {
        Ok(_) => Ok(began.elapsed()),
        Err(error) if error.code() == ErrorCode::ObjectNotFound => Ok(began.elapsed()),
        Err(error) => Err(error),
    }
}
