//! Planned handover (M7). openraft mutes a leader once it asked another to take over, for the rest of its term; so
//! it is asked only when the other is sure to follow: it answers now, and lacks no more than one batch, which the
//! closed gate lets it catch up with first.

use std::time::Duration;

use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft::metrics::RaftMetrics;
use tidepool_proto::NodeId;

use crate::election::{APPEND_ENTRIES_MAX, ElectionProfile};
use crate::host::Host;
use crate::types::NodeId as RawNodeId;

/// Why leadership was not handed over. This member leads on, unless it says otherwise.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransferError {
    /// Nothing to hand over.
    #[error("this member does not lead")]
    NotLeader,
    /// Not a voter, or this member itself.
    #[error("node {0} cannot take over: it is not another voter")]
    NotAVoter(NodeId),
    /// No voter could take over at once.
    #[error("no standby can take over at once: {0}")]
    NotReady(String),
    /// It was asked and did not take over in time; an election decides.
    #[error("node {0} was asked to take over and did not in time; an election decides who leads")]
    TimedOut(NodeId),
    /// Another handover is going on.
    #[error("another handover is going on")]
    Busy,
    /// The node stopped for good.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

/// How long a standby may have been silent to count as answering: two heartbeats and the time of a slow tick.
fn silence_max(profile: ElectionProfile) -> Duration {
    profile.heartbeat() * 3
}

/// How long the closed gate waits for the target to catch up.
pub(crate) fn catch_up_limit(profile: ElectionProfile) -> Duration {
    profile.timeout_max()
}

/// How long to wait for the target to lead, before an election would have decided anyway.
pub(crate) fn handover_limit(profile: ElectionProfile) -> Duration {
    profile.timeout_max() * 3
}

/// Another voter, as this leader sees it.
struct Standby {
    id: RawNodeId,
    lacks: u64,
    silent: Duration,
}

impl Standby {
    fn ready(&self, profile: ElectionProfile) -> bool {
        self.lacks <= APPEND_ENTRIES_MAX && self.silent <= silence_max(profile)
    }
}

/// Entries the target lacks.
pub(crate) fn lacks<C: Host>(metrics: &RaftMetrics<C>, id: RawNodeId) -> Option<u64> {
    let matched = metrics.replication.as_ref()?.get(&id)?.as_ref().map_or(0, |log_id| log_id.index + 1);
    Some(metrics.last_log_index.map_or(0, |index| index + 1).saturating_sub(matched))
}

fn standbys<C: Host>(metrics: &RaftMetrics<C>) -> Vec<Standby> {
    let heard = metrics.heartbeat.as_ref();
    let voters = metrics.membership_config.membership().voter_ids().filter(|id| *id != metrics.id);
    voters
        .filter_map(|id| {
            let last = heard?.get(&id)?.as_ref()?;
            let now = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
            let silent = if now > **last { now - **last } else { Duration::ZERO };
            Some(Standby { id, lacks: lacks(metrics, id)?, silent })
        })
        .collect()
}

/// Chooses who takes over: the one asked for, or the one that lacks least; only if it can at once.
pub(crate) fn choose<C: Host>(
    metrics: &RaftMetrics<C>,
    asked: Option<RawNodeId>,
    profile: ElectionProfile,
) -> Result<RawNodeId, TransferError> {
    if !metrics.state.is_leader() {
        return Err(TransferError::NotLeader);
    }
    let voter = |id: &RawNodeId| metrics.membership_config.membership().voter_ids().any(|voter| voter == *id);
    if let Some(id) = asked.filter(|id| *id == metrics.id || !voter(id)) {
        return Err(TransferError::NotAVoter(NodeId(id)));
    }
    let mut candidates = standbys(metrics);
    candidates.retain(|standby| asked.is_none_or(|id| id == standby.id));
    let best = candidates.iter().filter(|s| s.ready(profile)).min_by_key(|s| (s.lacks, s.silent, s.id));
    best.map(|standby| standby.id).ok_or_else(|| {
        let seen: Vec<String> = candidates
            .iter()
            .map(|s| {
                format!("node {} lacks {} entries and was last heard {} ms ago", s.id, s.lacks, s.silent.as_millis())
            })
            .collect();
        TransferError::NotReady(if seen.is_empty() { "none is heard".to_owned() } else { seen.join(", ") })
    })
}
