//! AdminService: what operators ask of a master. Every master answers Status and StateDigest about itself.

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::{Error, ErrorCode, NodeId, v1};
use tidepool_raft::rt;
use tonic::{Request, Response, Status};

use super::core::{Service, unexpected};
use super::logging::LogFilter;
use super::refusal;
use super::status::status;
use super::{hot, level, members, recency, snapshots, tasks, tenants};
use crate::directory::{Op, Outcome};

/// Longest wait for an index.
const DIGEST_WAIT_MAX: Duration = Duration::from_secs(60);
/// Longest wait for a snapshot that was asked for; it goes on after that.
const SNAPSHOT_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// The gRPC face for operators.
pub struct AdminFace {
    service: Arc<Service>,
    log_filter: LogFilter,
}

impl AdminFace {
    /// Serves `service`; `log_filter` changes the process's log level.
    pub fn new(service: Arc<Service>, log_filter: LogFilter) -> AdminFace {
        AdminFace { service, log_filter }
    }

    async fn transfer(&self, target: u64) -> Result<NodeId, Error> {
        let target = (target != 0).then_some(NodeId(target));
        self.service.node().transfer_leader(target).await.map_err(refusal::transfer)
    }

    /// A checkpoint is an op: every master records its digest when it applies that entry, so digests are compared at
    /// exactly one index however busy the cluster is.
    async fn digest(&self, at: u64, wait: Duration) -> Result<(u64, u128), Error> {
        let machine = self.service.machine();
        if at == 0 {
            let tenure = self.service.tenure()?;
            let before = machine.last_checkpoint().map_or(0, |(index, _)| index);
            match tenure.proposer.commit(Op::Checkpoint { index: 0, digest: 0 }).await? {
                Outcome::Done => {}
                Outcome::Refused(error) => return Err(error),
                other => return Err(unexpected("checkpoint", &other)),
            }
            let last = machine.last_checkpoint().filter(|(index, _)| *index > before);
            return last.ok_or_else(|| Error::new(ErrorCode::Internal, "the checkpoint left no digest"));
        }
        let mut applied = machine.watch_applied();
        let waited = rt::timeout(wait, applied.wait_for(|index| *index >= at)).await;
        if !matches!(waited, Ok(Ok(_))) {
            let reached = machine.watch_applied().borrow().to_owned();
            return Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("this master has applied {reached}, not yet {at}; wait longer or look at its lag in `status`"),
            ));
        }
        let digest = machine.digest_at(at).ok_or_else(|| {
            Error::new(
                ErrorCode::InvalidParams,
                format!("no checkpoint was applied at index {at}; take one from the leader"),
            )
        })?;
        Ok((at, digest))
    }
}

#[tonic::async_trait]
impl v1::admin_service_server::AdminService for AdminFace {
    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Ok(Response::new(status(&self.service)))
    }

    async fn transfer_leader(
        &self,
        request: Request<v1::TransferRequest>,
    ) -> Result<Response<v1::TransferResponse>, Status> {
        let began = rt::now();
        let result = self.transfer(request.get_ref().target_node_id).await;
        let elapsed_ms = rt::since(began).as_millis() as u64;
        Ok(Response::new(match result {
            Ok(leader) => v1::TransferResponse { error: None, leader_node_id: leader.0, elapsed_ms },
            Err(error) => v1::TransferResponse { error: Some(error.into()), leader_node_id: 0, elapsed_ms },
        }))
    }

    async fn set_log_level(
        &self,
        request: Request<v1::SetLogLevelRequest>,
    ) -> Result<Response<v1::SetLogLevelResponse>, Status> {
        let filter = &request.get_ref().filter;
        let error = self.log_filter.set(filter).err().map(|why| {
            Error::new(
                ErrorCode::InvalidParams,
                format!("log filter '{filter}': {why}; write `info` or `tidepool_master=debug,info`"),
            )
            .into()
        });
        Ok(Response::new(v1::SetLogLevelResponse { error }))
    }

    async fn compact(&self, _: Request<v1::CompactRequest>) -> Result<Response<v1::CompactResponse>, Status> {
        // In a task of its own: a caller that goes away must not leave a half-done compaction behind.
        let node = self.service.node().clone();
        let compaction = rt::spawn(async move { node.compact().await.map_err(|e| e.to_string()) });
        let result = compaction.await.unwrap_or_else(|e| Err(e.to_string()));
        Ok(Response::new(match result {
            Ok(snapshot_index) => v1::CompactResponse { error: None, snapshot_index },
            Err(error) => {
                let error = Error::new(ErrorCode::Unavailable, error);
                v1::CompactResponse { error: Some(error.into()), snapshot_index: 0 }
            }
        }))
    }

    async fn set_tenant(
        &self,
        request: Request<v1::SetTenantRequest>,
    ) -> Result<Response<v1::SetTenantResponse>, Status> {
        let error = tenants::set(&self.service, request.get_ref()).await.err().map(Into::into);
        Ok(Response::new(v1::SetTenantResponse { error }))
    }

    async fn drop_tenant(
        &self,
        request: Request<v1::DropTenantRequest>,
    ) -> Result<Response<v1::DropTenantResponse>, Status> {
        let error = tenants::drop(&self.service, request.get_ref()).await.err().map(Into::into);
        Ok(Response::new(v1::DropTenantResponse { error }))
    }

    async fn list_tenants(
        &self,
        _: Request<v1::ListTenantsRequest>,
    ) -> Result<Response<v1::ListTenantsResponse>, Status> {
        Ok(Response::new(match tenants::list(&self.service).await {
            Ok(tenants) => v1::ListTenantsResponse { error: None, tenants },
            Err(error) => v1::ListTenantsResponse { error: Some(error.into()), tenants: Vec::new() },
        }))
    }

    async fn create_task(
        &self,
        request: Request<v1::CreateTaskRequest>,
    ) -> Result<Response<v1::CreateTaskResponse>, Status> {
        Ok(Response::new(match tasks::create(&self.service, request.get_ref()).await {
            Ok(task) => v1::CreateTaskResponse { error: None, task_id: task.0 },
            Err(error) => v1::CreateTaskResponse { error: Some(error.into()), task_id: 0 },
        }))
    }

    async fn list_tasks(
        &self,
        request: Request<v1::ListTasksRequest>,
    ) -> Result<Response<v1::ListTasksResponse>, Status> {
        Ok(Response::new(match tasks::list(&self.service, request.get_ref().task_id).await {
            Ok(tasks) => v1::ListTasksResponse { error: None, tasks },
            Err(error) => v1::ListTasksResponse { error: Some(error.into()), tasks: Vec::new() },
        }))
    }

    async fn cancel_task(
        &self,
        request: Request<v1::CancelTaskRequest>,
    ) -> Result<Response<v1::CancelTaskResponse>, Status> {
        let error = tasks::cancel(&self.service, request.get_ref().task_id).await.err().map(Into::into);
        Ok(Response::new(v1::CancelTaskResponse { error }))
    }

    async fn list_hot_objects(
        &self,
        request: Request<v1::ListHotObjectsRequest>,
    ) -> Result<Response<v1::ListHotObjectsResponse>, Status> {
        let listed = hot::list(&self.service, request.get_ref().limit as usize);
        Ok(Response::new(listed.unwrap_or_else(|error| v1::ListHotObjectsResponse {
            error: Some(error.into()),
            mode: self.service.options().dynamic_replication.name().to_owned(),
            objects: Vec::new(),
        })))
    }

    async fn change_members(
        &self,
        request: Request<v1::ChangeMembersRequest>,
    ) -> Result<Response<v1::ChangeMembersResponse>, Status> {
        Ok(Response::new(members::change(&self.service, request.get_ref()).await))
    }

    async fn take_snapshot(
        &self,
        request: Request<v1::TakeSnapshotRequest>,
    ) -> Result<Response<v1::TakeSnapshotResponse>, Status> {
        let limit = Duration::from_millis(u64::from(request.get_ref().remaining_ms)).min(SNAPSHOT_WAIT_MAX);
        Ok(Response::new(snapshots::on_demand(&self.service, limit).await))
    }

    async fn feature_level(
        &self,
        request: Request<v1::FeatureLevelRequest>,
    ) -> Result<Response<v1::FeatureLevelResponse>, Status> {
        Ok(Response::new(level::answer(&self.service, request.get_ref()).await))
    }

    async fn share_recency(
        &self,
        request: Request<v1::ShareRecencyRequest>,
    ) -> Result<Response<v1::ShareRecencyResponse>, Status> {
        let error = recency::take(&self.service, request.into_inner()).err().map(Into::into);
        Ok(Response::new(v1::ShareRecencyResponse { error }))
    }

    async fn state_digest(
        &self,
        request: Request<v1::StateDigestRequest>,
    ) -> Result<Response<v1::StateDigestResponse>, Status> {
        let request = request.get_ref();
        let wait = Duration::from_millis(u64::from(request.remaining_ms)).min(DIGEST_WAIT_MAX);
        Ok(Response::new(match self.digest(request.at_least_index, wait).await {
            Ok((applied_index, digest)) => v1::StateDigestResponse {
                error: None,
                applied_index,
                digest: bytes::Bytes::copy_from_slice(&digest.to_be_bytes()),
                identity: Some(self.service.identity()),
                doubted: self.service.machine().doubted().is_some(),
            },
            Err(error) => v1::StateDigestResponse { error: Some(error.into()), ..Default::default() },
        }))
    }
}
