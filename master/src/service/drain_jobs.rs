//! Drain jobs over HTTP, in the shape of Mooncake's routes: `POST /api/v1/drain_jobs`, `GET /api/v1/drain_jobs/query`,
//! `POST /api/v1/drain_jobs/cancel`, and beside them a listing. A job is a drain task. Any master answers: one that does
//! not lead asks the leader.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::{Address, Error, ErrorCode, v1};
use tidepool_raft::rt;
use tonic::transport::{Channel, Endpoint};

use super::core::Service;
use super::tasks;

/// How long the leader may take to answer for another master.
const LEADER_WAIT: Duration = Duration::from_secs(5);
/// Number and name of the kind of job.
const TYPE: (i32, &str) = (0, "DRAIN");

/// The routes.
pub fn routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/api/v1/drain_jobs", post(create).get(list))
        .route("/api/v1/drain_jobs/query", get(query))
        .route("/api/v1/drain_jobs/cancel", post(cancel))
        .with_state(service)
}

/// What a job is asked for with. Mooncake's fields, and ours behind them.
#[derive(Deserialize)]
struct CreateJob {
    segments: Vec<String>,
    #[serde(default)]
    target_segments: Vec<String>,
    #[serde(default)]
    max_concurrency: u32,
    /// The segments leave when they are empty.
    #[serde(default)]
    unmount: bool,
    /// 32 hexadecimal digits: the same token, the same job.
    #[serde(default)]
    token: String,
}

#[derive(Deserialize)]
struct JobQuery {
    #[serde(default)]
    job_id: String,
}

#[derive(Serialize)]
struct JobJson {
    success: bool,
    job_id: String,
    r#type: i32,
    type_name: &'static str,
    status: i32,
    status_name: &'static str,
    created_at_ms_epoch: u64,
    last_updated_at_ms_epoch: u64,
    segments: Vec<String>,
    succeeded_units: u64,
    failed_units: u64,
    blocked_units: u64,
    active_units: u64,
    left_units: u64,
    migrated_bytes: u64,
    message: String,
    error_code: i32,
    error_message: String,
}

async fn create(State(service): State<Arc<Service>>, body: Bytes) -> Response {
    let created = async {
        let asked: CreateJob = serde_json::from_slice(&body)
            .map_err(|error| Error::new(ErrorCode::InvalidParams, format!("the body is no drain job: {error}")))?;
        let request = v1::CreateTaskRequest {
            kind: v1::TaskKind::Drain as i32,
            token: token(&asked.token)?.to_vec().into(),
            source_segments: asked.segments,
            target_segments: asked.target_segments,
            concurrency: asked.max_concurrency,
            unmount: asked.unmount,
            ..Default::default()
        };
        Jobs { service }.create(request).await
    };
    done(created.await, "CREATED")
}

async fn cancel(State(service): State<Arc<Service>>, Query(asked): Query<JobQuery>) -> Response {
    let cancelled = async {
        let jobs = Jobs { service };
        let id = job_id(&asked.job_id)?;
        let job = jobs.find(id).await?;
        if job.state != "RUNNING" {
            let message = format!("job {id} has ended {}", job.state);
            return Err(Error::new(ErrorCode::InvalidParams, message));
        }
        jobs.cancel(id).await.map(|()| id)
    };
    done(cancelled.await, "CANCELED")
}

async fn query(State(service): State<Arc<Service>>, Query(asked): Query<JobQuery>) -> Response {
    let found = async { Jobs { service }.find(job_id(&asked.job_id)?).await };
    match found.await {
        Ok(job) => Json(job_json(job, now_ms())).into_response(),
        Err(error) => failed(&error),
    }
}

async fn list(State(service): State<Arc<Service>>) -> Response {
    match (Jobs { service }).all().await {
        Ok(jobs) => {
            let jobs: Vec<JobJson> = jobs.into_iter().map(|job| job_json(job, now_ms())).collect();
            Json(json!({"success": true, "jobs": jobs})).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// The drain tasks, wherever the leader is.
struct Jobs {
    service: Arc<Service>,
}

impl Jobs {
    /// The leader, when it is another master.
    fn elsewhere(&self) -> Result<Option<AdminServiceClient<Channel>>, Error> {
        let Err(error) = self.service.tenure() else { return Ok(None) };
        let Some(address) = error.leader().and_then(|hint| hint.address.parse::<Address>().ok()) else {
            return Err(error);
        };
        let endpoint = Endpoint::from_shared(address.to_uri())
            .map_err(|why| Error::new(ErrorCode::Internal, format!("address {address} of the leader: {why}")))?;
        let channel = endpoint.connect_timeout(LEADER_WAIT).timeout(LEADER_WAIT).tcp_nodelay(true).connect_lazy();
        Ok(Some(AdminServiceClient::new(channel)))
    }

    async fn create(&self, request: v1::CreateTaskRequest) -> Result<u64, Error> {
        let Some(mut leader) = self.elsewhere()? else {
            return tasks::create(&self.service, &request).await.map(|task| task.0);
        };
        let answer = leader.create_task(request).await.map_err(unanswered)?.into_inner();
        answer.error.map_or(Ok(answer.task_id), |error| Err(error.into()))
    }

    async fn tasks(&self, task_id: u64) -> Result<Vec<v1::TaskStatus>, Error> {
        let Some(mut leader) = self.elsewhere()? else { return tasks::list(&self.service, task_id).await };
        let answer = leader.list_tasks(v1::ListTasksRequest { task_id }).await.map_err(unanswered)?.into_inner();
        answer.error.map_or(Ok(answer.tasks), |error| Err(error.into()))
    }

    async fn all(&self) -> Result<Vec<v1::TaskStatus>, Error> {
        let tasks = self.tasks(0).await?;
        Ok(tasks.into_iter().filter(|task| task.kind() == v1::TaskKind::Drain).collect())
    }

    async fn find(&self, id: u64) -> Result<v1::TaskStatus, Error> {
        let found = self.tasks(id).await?.into_iter().find(|task| task.kind() == v1::TaskKind::Drain);
        found.ok_or_else(|| Error::new(ErrorCode::TaskNotFound, format!("task {id} is no drain")))
    }

    async fn cancel(&self, task_id: u64) -> Result<(), Error> {
        let Some(mut leader) = self.elsewhere()? else { return tasks::cancel(&self.service, task_id).await };
        let answer = leader.cancel_task(v1::CancelTaskRequest { task_id }).await.map_err(unanswered)?.into_inner();
        answer.error.map_or(Ok(()), |error| Err(error.into()))
    }
}

fn unanswered(status: tonic::Status) -> Error {
    Error::new(ErrorCode::Unavailable, format!("the leader does not answer: {}", status.message()))
}

/// Sixteen bytes from hexadecimal digits, dashes aside; drawn when there are none.
fn token(text: &str) -> Result<[u8; 16], Error> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.is_empty() {
        return Ok(rt::random().to_be_bytes());
    }
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32 && !digits.starts_with('+'));
    let wrong = || Error::new(ErrorCode::InvalidParams, format!("token '{text}' is not 32 hexadecimal digits"));
    number.map(u128::to_be_bytes).ok_or_else(wrong)
}

fn job_id(text: &str) -> Result<u64, Error> {
    let wrong = || Error::new(ErrorCode::InvalidParams, format!("missing or invalid job_id '{text}'"));
    text.parse().ok().filter(|id| *id != 0).ok_or_else(wrong)
}

fn now_ms() -> u64 {
    rt::wall_clock().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Mooncake's number and name of a state.
fn status(state: &str) -> (i32, &'static str) {
    match state {
        "SUCCEEDED" => (3, "SUCCEEDED"),
        "FAILED" => (4, "FAILED"),
        "CANCELLED" => (5, "CANCELED"),
        _ => (2, "RUNNING"),
    }
}

fn job_json(job: v1::TaskStatus, now_ms: u64) -> JobJson {
    let (number, name) = status(&job.state);
    JobJson {
        success: true,
        job_id: job.task_id.to_string(),
        r#type: TYPE.0,
        type_name: TYPE.1,
        status: number,
        status_name: name,
        created_at_ms_epoch: now_ms.saturating_sub(job.age_ms),
        last_updated_at_ms_epoch: now_ms.saturating_sub(job.ended_age_ms),
        segments: job.source_segments,
        succeeded_units: job.moved,
        failed_units: job.failed,
        blocked_units: job.blocked,
        active_units: job.under_way,
        left_units: job.left,
        migrated_bytes: job.moved_bytes,
        message: job.message,
        error_code: 0,
        error_message: String::new(),
    }
}

fn done(result: Result<u64, Error>, status: &str) -> Response {
    match result {
        Ok(id) => {
            let body = json!({
                "success": true, "job_id": id.to_string(), "status": status, "error_code": 0, "error_message": "",
            });
            Json(body).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// An error as Mooncake's clients read it: its number, and the HTTP status of its kind.
fn failed(error: &Error) -> Response {
    let status = match error.code() {
        ErrorCode::InvalidParams | ErrorCode::InvalidKey => StatusCode::BAD_REQUEST,
        ErrorCode::TaskNotFound | ErrorCode::SegmentNotFound | ErrorCode::ObjectNotFound => StatusCode::NOT_FOUND,
        ErrorCode::TaskLimit | ErrorCode::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        ErrorCode::NotLeader | ErrorCode::Unavailable | ErrorCode::DeadlineExceeded => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let body = json!({"success": false, "error_code": error.code().mooncake(), "error_message": error.message()});
    (status, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_hexadecimal_and_the_same_each_time() {
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(token(text).unwrap(), token(&text.replace('-', "")).unwrap());
        assert_eq!(token(text).unwrap()[15], 0xff);
        assert_ne!(token("").unwrap(), token("").unwrap());
        for wrong in ["12", "+0112233445566778899aabbccddeeff", "zz112233445566778899aabbccddeeff", &"1".repeat(33)] {
            assert_eq!(token(wrong).unwrap_err().code(), ErrorCode::InvalidParams, "{wrong}");
        }
        for wrong in ["", "0", "-1", "x", "1-2"] {
            assert_eq!(job_id(wrong).unwrap_err().code(), ErrorCode::InvalidParams, "{wrong}");
        }
    }

    #[test]
    fn a_job_has_mooncakes_fields() {
        let job = v1::TaskStatus {
            task_id: 7,
            state: "CANCELLED".into(),
            moved: 3,
            age_ms: 1_000,
            ended_age_ms: 10,
            source_segments: vec!["dram-0".into()],
            ..Default::default()
        };
        let shown = serde_json::to_value(job_json(job, 5_000)).unwrap();
        assert_eq!(shown["job_id"], "7");
        assert_eq!((&shown["status"], &shown["status_name"]), (&json!(5), &json!("CANCELED")));
        assert_eq!((&shown["type"], &shown["type_name"]), (&json!(0), &json!("DRAIN")));
        assert_eq!((&shown["created_at_ms_epoch"], &shown["last_updated_at_ms_epoch"]), (&json!(4_000), &json!(4_990)));
        assert_eq!((&shown["succeeded_units"], &shown["segments"]), (&json!(3), &json!(["dram-0"])));
    }
}
