//! The control service on the datanode's port: who it is and what it lends.

use std::sync::Arc;

use tidepool_proto::v1::datanode_service_server::DatanodeService;
use tidepool_proto::{Error, ErrorCode, PROTOCOL_VERSION, v1};
use tonic::{Request, Response, Status};

use crate::life::Life;
use crate::payload::Payload;
use crate::registration::wire_identity;

pub(crate) struct Describe {
    pub(crate) payload: Arc<Payload>,
}

#[tonic::async_trait]
impl DatanodeService for Describe {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Result<Response<v1::DescribeResponse>, Status> {
        let response = match self.payload.life() {
            None => {
                let error =
                    Error::new(ErrorCode::Unavailable, "this datanode is not registered with a master at the moment");
                v1::DescribeResponse { error: Some(error.retry_after(100).into()), ..Default::default() }
            }
            Some(life) => match check(request.get_ref().identity.as_ref(), &life) {
                Ok(()) => describe(&life),
                Err(error) => v1::DescribeResponse { error: Some(error.into()), ..describe_identity(&life) },
            },
        };
        Ok(Response::new(response))
    }
}

/// A caller that names a cluster or history must name ours.
fn check(caller: Option<&v1::Identity>, life: &Life) -> Result<(), Error> {
    let wrong = |what: String| Err(Error::new(ErrorCode::WrongCluster, what));
    let Some(caller) = caller else { return wrong("the caller did not say who it is".into()) };
    let ours = life.registration();
    if caller.protocol_version.abs_diff(PROTOCOL_VERSION) > 1 {
        return wrong(format!("protocol {} is too far from {PROTOCOL_VERSION}", caller.protocol_version));
    }
    if !caller.cluster_uuid.is_empty() && caller.cluster_uuid[..] != ours.cluster.0 {
        return wrong(format!("this datanode belongs to cluster {}", ours.cluster));
    }
    if caller.history != 0 && caller.history != ours.history.0 {
        return wrong(format!(
            "this datanode lives in history {:x}, the caller in {:x}",
            ours.history.0, caller.history
        ));
    }
    Ok(())
}

fn describe_identity(life: &Life) -> v1::DescribeResponse {
    let ours = life.registration();
    v1::DescribeResponse {
        error: None,
        identity: Some(wire_identity(Some(ours.cluster), ours.history, ours.node)),
        incarnation: ours.incarnation.0,
        segments: Vec::new(),
    }
}

fn describe(life: &Life) -> v1::DescribeResponse {
    let mut segments: Vec<_> = life
        .segments()
        .iter()
        .map(|(id, segment)| v1::SegmentDescription {
            segment_id: id.0,
            name: segment.name().to_owned(),
            bytes: segment.bytes(),
            prefaulted_bytes: segment.prefaulted_bytes(),
            hugepages: segment.hugepages(),
        })
        .collect();
    segments.sort_by_key(|s| s.segment_id);
    v1::DescribeResponse { segments, ..describe_identity(life) }
}
