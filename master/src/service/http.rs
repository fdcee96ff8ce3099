//! HTTP routes of a master beside `/metrics`, `/livez` and `/readyz`, which the binary serves for every role.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use serde::{Deserialize, Serialize};

use super::core::Service;
use super::status::status;
use crate::directory::{ObjectState, TenantId};

/// Routes of this master.
pub fn routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/get_all_segments", get(get_all_segments))
        .route("/query_key", get(query_key))
        .route("/api/v1/status", get(status_json))
        .route("/api/v1/segments", get(segments_json))
        .with_state(service.clone())
        .merge(super::drain_jobs::routes(service))
}

/// Segment names, one a line, as Mooncake's route answers.
async fn get_all_segments(State(service): State<Arc<Service>>) -> String {
    let mut text = String::new();
    for segment in service.directory().segments() {
        let _ = writeln!(text, "{}", segment.name);
    }
    text
}

#[derive(Deserialize)]
struct KeyQuery {
    key: String,
}

/// Addresses of a key's replicas, one a line; looks without granting a lease.
async fn query_key(State(service): State<Arc<Service>>, Query(query): Query<KeyQuery>) -> Response {
    let places = service.directory().with_object(TenantId::DEFAULT, query.key.as_bytes(), |view| {
        view.filter(|v| v.state == ObjectState::Complete).map(|v| v.listed().copied().collect::<Vec<_>>())
    });
    let Some(places) = places else {
        return (StatusCode::NOT_FOUND, format!("key '{}' names no object\n", query.key)).into_response();
    };
    let mut text = String::new();
    for place in places {
        if let Some(node) = service.directory().node(place.node) {
            let _ = writeln!(text, "{}", node.address);
        }
    }
    text.into_response()
}

#[derive(Serialize)]
struct StatusJson {
    role: String,
    term: u64,
    leader: Option<String>,
    applied_index: u64,
    committed_index: u64,
    objects: u64,
    object_bytes: u64,
    datanodes: usize,
    suspect_datanodes: usize,
    state_digest: String,
    next_step: String,
}

async fn status_json(State(service): State<Arc<Service>>) -> Json<StatusJson> {
    let status = status(&service);
    Json(StatusJson {
        role: status.role,
        term: status.term,
        leader: status.leader.map(|l| l.address),
        applied_index: status.applied_index,
        committed_index: status.committed_index,
        objects: status.objects,
        object_bytes: status.object_bytes,
        datanodes: status.nodes.len(),
        suspect_datanodes: status.nodes.iter().filter(|n| n.suspect).count(),
        state_digest: status.state_digest.iter().map(|b| format!("{b:02x}")).collect(),
        next_step: status.next_step,
    })
}

#[derive(Serialize)]
struct SegmentJson {
    segment_id: u64,
    name: String,
    node_id: u64,
    capacity_bytes: u64,
    free_bytes: u64,
    processing_bytes: u64,
    complete_bytes: u64,
    retired_bytes: u64,
    largest_free_extent_bytes: u64,
    state: String,
}

async fn segments_json(State(service): State<Arc<Service>>) -> Json<Vec<SegmentJson>> {
    let segments = status(&service).segments.into_iter().map(|s| SegmentJson {
        segment_id: s.segment_id,
        name: s.name,
        node_id: s.node_id,
        capacity_bytes: s.capacity_bytes,
        free_bytes: s.free_bytes,
        processing_bytes: s.processing_bytes,
        complete_bytes: s.complete_bytes,
        retired_bytes: s.retired_bytes,
        largest_free_extent_bytes: s.largest_free_extent_bytes,
        state: s.state,
    });
    Json(segments.collect())
}
