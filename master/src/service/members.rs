//! Who belongs to the quorum, as operators change it: the leader carries it out, one change at a time.

use std::time::Duration;

use tidepool_proto::{Address, Error, ErrorCode, NodeId, v1};
use tidepool_raft::rt;
use tidepool_raft::{ChangeReport, Member, MemberChange};

use super::core::Service;
use super::{refusal, status};

/// Longest time one call may take.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// Changes the members, or says what that would take.
pub async fn change(service: &Service, request: &v1::ChangeMembersRequest) -> v1::ChangeMembersResponse {
    let report = match wanted(request) {
        Ok((change, limit)) => carry_out(service, change, limit, request.dry_run).await,
        Err(error) => (Vec::new(), Err(error)),
    };
    let (steps, result) = report;
    v1::ChangeMembersResponse {
        error: result.err().map(Into::into),
        steps,
        members: status::members(&service.node().status()),
    }
}

async fn carry_out(
    service: &Service,
    change: MemberChange,
    limit: Duration,
    dry_run: bool,
) -> (Vec<String>, Result<(), Error>) {
    if dry_run {
        let planned = rt::timeout(limit, service.node().plan_members(&change)).await;
        return match planned {
            Ok(Ok(steps)) => (steps, Ok(())),
            Ok(Err(error)) => (Vec::new(), Err(refusal::membership(error))),
            Err(_) => {
                let why = format!("no quorum confirmed this leader within {limit:?}");
                (Vec::new(), Err(Error::new(ErrorCode::DeadlineExceeded, why)))
            }
        };
    }
    let ChangeReport { steps, result } = service.node().change_members(change, limit).await;
    (steps, result.map_err(refusal::membership))
}

fn wanted(request: &v1::ChangeMembersRequest) -> Result<(MemberChange, Duration), Error> {
    let invalid = |what: &str| Error::new(ErrorCode::InvalidParams, what);
    let limit = Duration::from_millis(u64::from(request.remaining_ms)).min(CHANGE_WAIT_MAX);
    if limit.is_zero() {
        return Err(invalid("the request carries no time (remaining_ms is 0)"));
    }
    let add = match request.add_node_id {
        0 => None,
        id => Some(Member { node_id: NodeId(id), address: request.add_address.parse::<Address>()? }),
    };
    let remove = Some(NodeId(request.remove_node_id)).filter(|id| id.0 != 0);
    if add.is_none() && remove.is_none() {
        return Err(invalid("the request names no member to add or remove"));
    }
    Ok((MemberChange { add, remove }, limit))
}
