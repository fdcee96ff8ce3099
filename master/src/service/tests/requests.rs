//! Short forms of requests.

use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::{ObjectId, v1};

use super::identity;
use crate::service::core::Service;

pub fn item(key: &str, length: u64, token: [u8; 16], group: &str) -> v1::PutStartItem {
    let (key, group) = (key.as_bytes().to_vec().into(), group.as_bytes().to_vec().into());
    v1::PutStartItem { key, length, token: token.to_vec().into(), group }
}

pub fn register(uuid: u8, process: u8, host: &str) -> v1::RegisterRequest {
    v1::RegisterRequest {
        identity: Some(identity()),
        node_uuid: vec![uuid; 16].into(),
        process_uuid: vec![process; 16].into(),
        address: "127.0.0.1:1".to_owned(),
        host_id: host.to_owned(),
    }
}

pub fn mount((node_id, incarnation): (u64, u64), name: &str, bytes: u64) -> v1::MountRequest {
    let segments = vec![v1::MountSegment { name: name.to_owned(), bytes }];
    v1::MountRequest { node_id, incarnation, segments, identity: Some(identity()) }
}

/// The statement of a datanode about a replica that it was granted.
pub fn status(service: &Service, object: u64, replica: &v1::Replica, outcome: v1::ReplicaOutcome) -> v1::ReplicaStatus {
    let verb = match outcome {
        v1::ReplicaOutcome::Stored => Some(Verb::Stored),
        v1::ReplicaOutcome::Aborted => Some(Verb::Aborted),
        _ => None,
    };
    let sign = |verb| {
        let capability = Capability::from_replica(verb, ObjectId(object), replica);
        capability.sign(&service.secret(), service.history()).to_vec().into()
    };
    let proof = verb.map(sign).unwrap_or_default();
    v1::ReplicaStatus { replica_id: replica.replica_id, outcome: outcome as i32, proof }
}

/// An end, or a revocation, with the same said of all replicas.
pub fn ending(service: &Service, key: &str, grant: &v1::PutGrant, outcome: v1::ReplicaOutcome) -> v1::PutEndItem {
    let statuses = grant.replicas.iter().map(|replica| status(service, grant.object_id, replica, outcome));
    v1::PutEndItem { key: key.as_bytes().to_vec().into(), object_id: grant.object_id, replicas: statuses.collect() }
}

pub fn keys(keys: &[&str]) -> Option<v1::Keys> {
    Some(v1::Keys::pack(keys))
}
