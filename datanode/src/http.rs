//! Node-specific HTTP routes; the process that runs the datanode merges them with those every role has.

use axum::Router;
use axum::extract::State;
use axum::response::Json;
use axum::routing::get;
use serde::Serialize;

use crate::datanode::Datanode;

#[derive(Serialize)]
struct SegmentReport {
    segment_id: u64,
    name: String,
    bytes: u64,
    prefaulted_bytes: u64,
    hugepages: bool,
}

pub(crate) fn routes(datanode: Datanode) -> Router {
    Router::new()
        .route("/get_all_segments", get(segment_names))
        .route("/api/v1/segments", get(segments))
        .route("/api/v1/node", get(node))
        .with_state(datanode)
}

fn report(datanode: &Datanode) -> Vec<SegmentReport> {
    let Some(life) = datanode.life() else { return Vec::new() };
    let mut segments: Vec<_> = life
        .segments()
        .iter()
        .map(|(id, segment)| SegmentReport {
            segment_id: id.0,
            name: segment.name().to_owned(),
            bytes: segment.bytes(),
            prefaulted_bytes: segment.prefaulted_bytes(),
            hugepages: segment.hugepages(),
        })
        .collect();
    segments.sort_by_key(|s| s.segment_id);
    segments
}

/// One `address/name` a line, as scripts poll it: empty until something is mounted.
async fn segment_names(State(datanode): State<Datanode>) -> String {
    let address = datanode.address().to_string();
    report(&datanode).iter().map(|s| format!("{address}/{}\n", s.name)).collect()
}

async fn segments(State(datanode): State<Datanode>) -> Json<serde_json::Value> {
    Json(serde_json::json!({ "segments": report(&datanode) }))
}

async fn node(State(datanode): State<Datanode>) -> Json<serde_json::Value> {
    Json(serde_json::json!(datanode.readiness()))
}
