//! `tidepool task copy|move|drain|list|wait|cancel`.

use std::time::{Duration, Instant};

use serde_json::json;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::{CancelTaskRequest, CreateTaskRequest, ListTasksRequest, TaskKind, TaskStatus};
use tidepool_proto::{Error, ErrorCode};
use tonic::transport::Channel;

use super::Context;
use crate::admin::{self, from_call};
use crate::args::{TaskArgs, TaskCommand};
use crate::config::value::show_duration;
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// How often `wait` looks, and a lost request is repeated.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long one attempt to create a task may take.
const ATTEMPT_WITHIN: Duration = Duration::from_secs(2);

/// Asks the leader.
pub async fn run(context: &Context, args: &TaskArgs) -> anyhow::Result<Exit> {
    let tenant = context.config.text("tenant").to_owned();
    match &args.command {
        TaskCommand::Copy { key, targets } => {
            let request = CreateTaskRequest {
                kind: TaskKind::Copy as i32,
                tenant,
                key: key.clone().into(),
                target_segments: targets.clone(),
                ..request()
            };
            create(context, request).await
        }
        TaskCommand::Move { key, source, target } => {
            let request = CreateTaskRequest {
                kind: TaskKind::Move as i32,
                tenant,
                key: key.clone().into(),
                source_segments: vec![source.clone()],
                target_segments: vec![target.clone()],
                ..request()
            };
            create(context, request).await
        }
        TaskCommand::Drain { segments, targets, concurrency, unmount } => {
            let request = CreateTaskRequest {
                kind: TaskKind::Drain as i32,
                source_segments: segments.clone(),
                target_segments: targets.clone(),
                concurrency: *concurrency,
                unmount: *unmount,
                ..request()
            };
            create(context, request).await
        }
        TaskCommand::List { task } => {
            let tasks = list(&mut leader(context).await?, task.unwrap_or(0)).await?;
            show(context.format, &tasks)?;
            Ok(Exit::Success)
        }
        TaskCommand::Wait { task } => wait(context, &mut leader(context).await?, *task).await,
        TaskCommand::Cancel { task } => {
            let answer = leader(context).await?.cancel_task(CancelTaskRequest { task_id: *task }).await?.into_inner();
            answer.error.map_or(Ok(Exit::Success), |error| Err(from_call(&error).into()))
        }
    }
}

async fn leader(context: &Context) -> Result<AdminServiceClient<Channel>, Error> {
    admin::connect_leader(&context.config.addresses("masters"), context.deadline()).await
}

fn request() -> CreateTaskRequest {
    CreateTaskRequest { token: rand::random::<[u8; 16]>().to_vec().into(), ..CreateTaskRequest::default() }
}

/// Asks until a leader answers: the request's token makes a repeated one the same task.
async fn create(context: &Context, request: CreateTaskRequest) -> anyhow::Result<Exit> {
    let until = Instant::now() + context.deadline();
    let task_id = loop {
        let error = match create_once(context, request.clone(), until).await {
            Ok(task_id) => break task_id,
            Err(error) => error,
        };
        let is_lost = matches!(
            error.code(),
            ErrorCode::NotLeader | ErrorCode::Unavailable | ErrorCode::DeadlineExceeded | ErrorCode::Internal
        );
        if !is_lost || Instant::now() + LOOK_AGAIN >= until {
            return Err(error.into());
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    };
    match context.format {
        Format::Json => output::print_json(&json!({"task_id": task_id}))?,
        Format::Table => output::print(format!("{task_id}\n").as_bytes())?,
    }
    Ok(Exit::Success)
}

async fn create_once(context: &Context, request: CreateTaskRequest, until: Instant) -> Result<u64, Error> {
    let within = until.saturating_duration_since(Instant::now()).min(ATTEMPT_WITHIN);
    let mut leader = admin::connect_leader(&context.config.addresses("masters"), within).await?;
    let unanswered =
        |status: tonic::Status| Error::new(ErrorCode::Unavailable, format!("no answer: {}", status.message()));
    let created = leader.create_task(request).await.map_err(unanswered)?.into_inner();
    created.error.map_or(Ok(created.task_id), |error| Err(from_call(&error)))
}

async fn list(leader: &mut AdminServiceClient<Channel>, task_id: u64) -> anyhow::Result<Vec<TaskStatus>> {
    let answer = leader.list_tasks(ListTasksRequest { task_id }).await?.into_inner();
    match answer.error {
        Some(error) => Err(from_call(&error).into()),
        None => Ok(answer.tasks),
    }
}

async fn wait(context: &Context, leader: &mut AdminServiceClient<Channel>, task: u64) -> anyhow::Result<Exit> {
    let until = Instant::now() + context.deadline();
    loop {
        let tasks = list(leader, task).await?;
        let state = tasks.first().map_or("", |task| &*task.state);
        if state != "RUNNING" {
            show(context.format, &tasks)?;
            return Ok(if state == "SUCCEEDED" { Exit::Success } else { Exit::Partial });
        }
        if Instant::now() + LOOK_AGAIN >= until {
            let text = format!("task {task} still runs; wait again, or raise --deadline");
            return Err(Error::new(ErrorCode::DeadlineExceeded, text).into());
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

fn show(format: Format, tasks: &[TaskStatus]) -> anyhow::Result<()> {
    let kind = |t: &TaskStatus| {
        TaskKind::try_from(t.kind).unwrap_or_default().as_str_name().trim_start_matches("TASK_KIND_").to_owned()
    };
    if format == Format::Json {
        let item = |t: &TaskStatus| {
            json!({
                "task_id": t.task_id, "kind": kind(t), "state": t.state, "done": t.moved, "failed": t.failed,
                "left": t.left, "message": t.message, "age_ms": t.age_ms, "under_way": t.under_way,
                "blocked": t.blocked, "bytes": t.moved_bytes, "segments": t.source_segments,
            })
        };
        return output::print_json(&json!(tasks.iter().map(item).collect::<Vec<_>>()));
    }
    let mut table = Table::new(&["task", "kind", "state", "done", "left", "age", "message"]);
    for t in tasks {
        let age = show_duration(Duration::from_millis(t.age_ms));
        let (id, done, left) = (t.task_id.to_string(), t.moved.to_string(), t.left.to_string());
        table.row([id, kind(t), t.state.clone(), done, left, age, t.message.clone()]);
    }
    output::print(table.render(0).as_bytes())
}
