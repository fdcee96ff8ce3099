//! What a master says of itself: figures, readiness, and the one next step for an operator.

use tidepool_proto::v1;
use tidepool_raft::{NodeStatus, Role};

use super::core::Service;
use super::gather;
use crate::directory::{Contact, FEATURE_LEVEL};

/// Whether this master can do its work, for `/readyz`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Readiness {
    /// Can serve (leader), or can take over without loss (standby).
    pub ready: bool,
    /// leader, standby, candidate, learner or recovering.
    pub role: String,
    /// Raft term.
    pub term: u64,
    /// Last entry applied here.
    pub applied_index: u64,
    /// Last entry known here to be committed by a quorum.
    pub committed_index: u64,
    /// Last entry the leader is known to have.
    pub leader_index: u64,
    /// Age of the oldest entry that is known to be committed and not applied here, by this master's own clock from when it
    /// first heard of it; 0 on a leader, null while nothing was heard.
    pub lag_ms: Option<u64>,
    /// Time since the leader was heard; null on a leader, and before any was.
    pub leader_heard_ms: Option<u64>,
    /// Objects in this master's directory.
    pub objects: u64,
    /// Last entry that the snapshot on this master's disk covers; 0: none.
    pub snapshot_index: u64,
    /// Age of that snapshot; null: none.
    pub snapshot_age_ms: Option<u64>,
    /// What the log may hold.
    pub feature_level: u16,
    /// Can be promoted without losing an acknowledged mutation.
    pub promotable: bool,
    /// Why not.
    pub not_promotable_because: String,
    /// Whole passes of this master's auditor over its directory since it started.
    pub audit_passes: u64,
    /// Log index at which the last one ended.
    pub audit_last_pass_index: u64,
    /// Differences it found. Anything but 0 is a bug or bad memory: save the logs, and restore this master from the others.
    pub audit_violations: u64,
    /// Last log index this master published a snapshot of; 0: none.
    pub snapshot_published_index: u64,
    /// Age of that snapshot in seconds.
    pub snapshot_age_s: u64,
    /// Why not, when not ready.
    pub reason: String,
}

/// Judges this master.
pub fn readiness(service: &Service) -> Readiness {
    let status = service.node().status();
    let in_office = service.tenure().is_ok();
    let audit = service.directory().audit_progress();
    let snapshot = service.snapshots().status();
    let leadership = &status.leadership;
    let has_leader = leadership.leader.is_some();
    let halted = service.halt().reason().map(|why| why.to_string());
    let promotable = status.promotable();
    let (ready, reason) = match (leadership.role, &promotable) {
        (Role::Leader, Ok(())) if halted.is_some() => (false, halted.unwrap_or_default()),
        (Role::Leader, Ok(())) if in_office => (true, String::new()),
        (Role::Leader, Ok(())) => (false, "taking office: the term's first entry is being applied".to_owned()),
        (Role::Standby, Ok(())) if has_leader => (true, String::new()),
        (_, Err(why)) if has_leader || status.fatal.is_some() || status.waiting_for.is_some() => (false, why.clone()),
        _ => (false, "no leader is known: is a majority of the members running and reachable?".to_owned()),
    };
    Readiness {
        ready,
        role: leadership.role.name().to_owned(),
        term: leadership.term,
        applied_index: status.applied_index,
        committed_index: status.committed_index,
        leader_index: status.last_log_index.max(status.committed_index).max(status.leader_committed_index),
        lag_ms: status.lag.map(|lag| lag.as_millis() as u64),
        leader_heard_ms: status.leader_heard_ago.map(|ago| ago.as_millis() as u64),
        objects: service.directory().counts().objects,
        snapshot_index: status.snapshot_index,
        snapshot_age_ms: status.snapshot_age.map(|age| age.as_millis() as u64),
        feature_level: service.directory().feature_level(),
        promotable: promotable.is_ok(),
        not_promotable_because: promotable.err().unwrap_or_default(),
        audit_passes: audit.passes,
        audit_last_pass_index: audit.last_pass_index,
        audit_violations: audit.violations,
        snapshot_published_index: snapshot.published_index,
        snapshot_age_s: snapshot.age_ms / 1000,
        reason,
    }
}

/// Everything `tidepool status` shows.
pub fn status(service: &Service) -> v1::StatusResponse {
    let raft = service.node().status();
    let counts = service.directory().counts();
    let tenure = service.tenure().ok();
    let (ops_applied, entries_applied) = service.machine().applied_counts();
    let readiness = readiness(service);
    let nodes: Vec<v1::NodeStatus> = service
        .directory()
        .nodes()
        .into_iter()
        .map(|node| v1::NodeStatus {
            node_id: node.node.0,
            address: node.address.to_string(),
            host_id: node.host_id.to_string(),
            incarnation: node.incarnation.0,
            suspect: node.contact == Contact::Suspect,
            last_heard_ms: tenure.as_ref().map_or(0, |t| t.nodes.silence(node.node).as_millis() as u64),
        })
        .collect();
    let mut response = v1::StatusResponse {
        identity: Some(service.identity()),
        role: readiness.role.clone(),
        term: raft.leadership.term,
        leader: raft.leadership.leader.as_ref().map(|leader| v1::LeaderHint {
            node_id: leader.node_id.0,
            address: leader.address.to_string(),
            term: raft.leadership.term,
        }),
        last_log_index: raft.last_log_index,
        committed_index: raft.committed_index,
        applied_index: raft.applied_index,
        leader_last_log_index: readiness.leader_index,
        purged_index: raft.purged_index,
        snapshot_index: raft.snapshot_index,
        members: members(&raft),
        objects: counts.objects,
        object_bytes: counts.complete_bytes,
        nodes,
        segments: segments(service),
        log_time_ms: tenure.as_ref().map_or(service.directory().log_time().0, |t| t.log_time().0),
        state_digest: bytes::Bytes::copy_from_slice(&service.directory().digest().to_be_bytes()),
        ops_applied,
        entries_applied,
        leases: tenure.as_ref().map_or(0, |t| t.leases.len() as u64),
        grants_open: counts.processing,
        promotable: readiness.promotable,
        not_promotable_because: readiness.not_promotable_because.clone(),
        lag_ms: readiness.lag_ms,
        snapshot_age_ms: readiness.snapshot_age_ms,
        next_step: String::new(),
        snapshot: Some(service.snapshots().status()),
        feature_level: service.directory().feature_level().into(),
        feature_level_max: FEATURE_LEVEL.into(),
    };
    let missing = gather::missing(service);
    response.next_step = match missing.first() {
        Some(member) if response.leader.is_some() => format!(
            "master {} at {} is not taken into the restored cluster yet ({} missing): start it with an empty data directory and --restore-from, or look at its log",
            member.node_id,
            member.address,
            missing.len()
        ),
        _ => next_step(&response),
    };
    response
}

/// The quorum as this master sees it.
pub fn members(raft: &NodeStatus) -> Vec<v1::MemberStatus> {
    let members = raft.members.iter().map(|m| v1::MemberStatus {
        node_id: m.member.node_id.0,
        address: m.member.address.to_string(),
        voter: m.voter,
        matched_index: m.matched_index.unwrap_or(0),
        last_heard_ms: m.last_heard.map_or(0, |ago| ago.as_millis() as u64),
    });
    members.collect()
}

fn segments(service: &Service) -> Vec<v1::SegmentStatus> {
    let views = service.directory().segments().into_iter();
    views
        .map(|s| v1::SegmentStatus {
            segment_id: s.segment.0,
            name: s.name.to_string(),
            node_id: s.node.0,
            capacity_bytes: s.capacity,
            free_bytes: s.free,
            processing_bytes: s.processing,
            complete_bytes: s.complete,
            retired_bytes: s.retired,
            largest_free_extent_bytes: s.largest_free,
            state: match (s.contact, s.draining) {
                (Contact::Suspect, _) => "SUSPECT".to_owned(),
                (Contact::Heard, true) => "UNMOUNTING".to_owned(),
                (Contact::Heard, false) => "MOUNTED".to_owned(),
            },
        })
        .collect()
}

/// The most urgent thing to do, in one sentence.
fn next_step(status: &v1::StatusResponse) -> String {
    let voters = status.members.iter().filter(|m| m.voter).count();
    if status.leader.is_none() {
        return format!(
            "no leader: start or reach a majority of the {voters} masters; then run `tidepool status` again"
        );
    }
    if status.nodes.is_empty() {
        return "no datanode has registered: start one with `tidepool datanode --masters <this address>`".to_owned();
    }
    if let Some(node) = status.nodes.iter().find(|n| n.suspect) {
        return format!(
            "datanode {} at {} is silent: check the process and its network; its objects are unlisted until it is heard",
            node.node_id, node.address
        );
    }
    let lagging = status.members.iter().find(|m| {
        status.role == "leader" && m.voter && m.matched_index > 0 && m.matched_index + 10_000 < status.last_log_index
    });
    if let Some(member) = lagging {
        return format!(
            "master {} lags by {} entries: look at its disk",
            member.node_id,
            status.last_log_index - member.matched_index
        );
    }
    match voters {
        1 => "a quorum of one loses service when this process stops; run three masters in production".to_owned(),
        2 => "two masters tolerate no failure; run three".to_owned(),
        _ => "nothing to do".to_owned(),
    }
}
