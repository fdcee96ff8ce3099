//! What a member knows about itself and, when it leads, about the others.

use std::time::Duration;

use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft::metrics::RaftMetrics;
use tidepool_proto::NodeId;

use crate::host::Host;
use crate::identity::ClusterIdentity;
use crate::leadership::{Leadership, Role};
use crate::options::Member;

/// Figures of one member at one moment. An index of 0 means none.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeStatus {
    /// This member.
    pub node_id: NodeId,
    /// Cluster and history; zeros before they are known.
    pub identity: ClusterIdentity,
    /// Role, term, leader.
    pub leadership: Leadership,
    /// Last entry in the log.
    pub last_log_index: u64,
    /// Last entry known to be committed by a quorum.
    pub committed_index: u64,
    /// Last entry applied.
    pub applied_index: u64,
    /// Last entry dropped from the log.
    pub purged_index: u64,
    /// Last entry that the current snapshot covers.
    pub snapshot_index: u64,
    /// Entries and payload bytes applied since that snapshot.
    pub entries_since_snapshot: u64,
    /// Payload bytes applied since that snapshot.
    pub bytes_since_snapshot: u64,
    /// Entries applied since the start.
    pub entries_applied: u64,
    /// Time since a quorum last confirmed this leader; none elsewhere.
    pub quorum_confirmed_ago: Option<Duration>,
    /// Voters and learners.
    pub members: Vec<MemberStatus>,
    /// Time since a leader was heard; none: never since the start. None on a leader.
    pub leader_heard_ago: Option<Duration>,
    /// Last entry that the leader said is committed, since it committed one of its own term; 0: not heard yet.
    pub leader_committed_index: u64,
    /// Age of the oldest entry that is known to be committed and not applied here, counted on this member's monotonic clock
    /// from when it first heard of it; zero on a leader, none while nothing is known.
    pub lag: Option<Duration>,
    /// Whether this member applied all that the leader had committed at some moment since the start, and fell never further
    /// behind than [`LAG_MAX`](crate::LAG_MAX) since.
    pub was_level: bool,
    /// Age of the current snapshot's file by the wall clock, for people.
    pub snapshot_age: Option<Duration>,
    /// Whether it has a vote in the old and in the new membership, where one is turning into the other.
    pub votes: bool,
    /// Longest silence of a leader that counts as its presence.
    pub leader_silence_max: Duration,
    /// Whether this member takes part in elections yet.
    pub fenced: bool,
    /// What the start still waits for, in words.
    pub waiting_for: Option<String>,
    /// Why the node stopped, if it did.
    pub fatal: Option<String>,
}

/// One member as seen from here.
#[derive(Clone, PartialEq, Debug)]
pub struct MemberStatus {
    /// Who and where.
    pub member: Member,
    /// Whether it votes.
    pub voter: bool,
    /// Last entry it is known to hold; leader only.
    pub matched_index: Option<u64>,
    /// Time since it was last heard; leader only, and zero for itself.
    pub last_heard: Option<Duration>,
}

impl NodeStatus {
    /// Whether a quorum confirmed this leader so lately. Who is the whole quorum is cut off from nobody, and hears from nobody
    /// while it is idle.
    pub fn quorum_answered_within(&self, limit: Duration) -> bool {
        let mut voters = self.members.iter().filter(|m| m.voter).map(|m| m.member.node_id);
        let is_alone = voters.next() == Some(self.node_id) && voters.next().is_none();
        (is_alone && self.leadership.role == Role::Leader) || self.quorum_confirmed_ago.is_some_and(|ago| ago <= limit)
    }

    /// Whether this member could lead without losing what was acknowledged, or why not. A standby says yes once it was level
    /// with a leader that it hears.
    pub fn promotable(&self) -> Result<(), String> {
        if let Some(fatal) = &self.fatal {
            return Err(fatal.clone());
        }
        match self.leadership.role {
            Role::Leader => return Ok(()),
            Role::Recovering => {
                return Err(self.waiting_for.clone().unwrap_or_else(|| "it is starting".to_owned()));
            }
            Role::Learner => return Err("it is a learner: it has no vote before it holds the log".to_owned()),
            Role::Standby | Role::Candidate => {}
        }
        if !self.votes {
            return Err(
                "its vote does not count yet: the change of the members that gives it one is half done".to_owned()
            );
        }
        if self.fenced {
            return Err("it restarted, and keeps out of elections until earlier leases have run out".to_owned());
        }
        let Some(silent) = self.leader_heard_ago else {
            return Err("it has not heard a leader since it started".to_owned());
        };
        if silent > self.leader_silence_max {
            let ms = silent.as_millis();
            return Err(format!("it heard its leader {ms} ms ago: what was committed since is not known here"));
        }
        if !self.was_level {
            return Err(match self.leader_committed_index {
                0 => "the leader has not told yet what is committed".to_owned(),
                committed => format!(
                    "it was never level with the leader, or fell too far behind: it applied entry {} of {committed}, and is {} ms behind",
                    self.applied_index,
                    self.lag.unwrap_or_default().as_millis()
                ),
            });
        }
        Ok(())
    }
}

pub(crate) fn member_statuses<C: Host>(metrics: &RaftMetrics<C>) -> Vec<MemberStatus> {
    let membership = metrics.membership_config.membership();
    let leads = metrics.state.is_leader();
    let now = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
    membership
        .nodes()
        .filter_map(|(id, node)| {
            let own = *id == metrics.id;
            let matched = match (&metrics.replication, own) {
                (Some(_), true) => metrics.last_log_index,
                (Some(replication), false) => replication.get(id).and_then(|log_id| log_id.as_ref().map(|l| l.index)),
                (None, _) => None,
            };
            let heard = metrics.heartbeat.as_ref().and_then(|heard| heard.get(id)?.as_ref().map(|at| **at));
            let last_heard = heard.map(|at| if now > at { now - at } else { Duration::ZERO });
            Some(MemberStatus {
                member: Member { node_id: NodeId(*id), address: node.address.parse().ok()? },
                voter: membership.voter_ids().any(|voter| voter == *id),
                matched_index: matched,
                last_heard: if own && leads { Some(Duration::ZERO) } else { last_heard },
            })
        })
        .collect()
}
