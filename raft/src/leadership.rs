//! Who leads, as the rest of the process may rely on it. This member counts as leader only once it applied the first
//! entry of its own term: then its state holds everything that any leader before it acknowledged.

use crate::rt::watch;
use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::metrics::RaftServerMetrics;

use crate::apply::{Adapter, Progress};
use crate::host::Host;
use crate::machine::{LogPosition, StateMachine};
use crate::options::Member;
use crate::types::NodeId;

/// What this member is at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Role {
    /// Starting: no cluster yet, or restoring its state.
    #[default]
    Recovering,
    /// Follows without a vote.
    Learner,
    /// Follows a leader, or waits for one.
    Standby,
    /// Asks for votes, or was elected and has not applied its first entry yet.
    Candidate,
    /// Leads.
    Leader,
}

impl Role {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Role::Recovering => "recovering",
            Role::Learner => "learner",
            Role::Standby => "standby",
            Role::Candidate => "candidate",
            Role::Leader => "leader",
        }
    }
}

/// Role, term and leader at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leadership {
    /// This member's role.
    pub role: Role,
    /// The term it is in.
    pub term: u64,
    /// Who leads it, if known.
    pub leader: Option<Member>,
}

pub(crate) fn judge<C: Host>(metrics: &RaftServerMetrics<C>, applied: Option<LogPosition>) -> Leadership {
    let term = metrics.vote.leader_id.term;
    let own_entry_applied = applied.is_some_and(|at| at.term == term);
    let role = match metrics.state {
        ServerState::Leader if own_entry_applied => Role::Leader,
        ServerState::Leader | ServerState::Candidate => Role::Candidate,
        ServerState::Follower => Role::Standby,
        ServerState::Learner if metrics.membership_config.membership().get_node(&metrics.id).is_some() => Role::Learner,
        ServerState::Learner | ServerState::Shutdown => Role::Recovering,
    };
    // A leader that may not serve yet is no hint for clients.
    let leader = metrics.current_leader.filter(|&id| id != metrics.id || role == Role::Leader);
    Leadership { role, term, leader: leader.and_then(|id| member_of(metrics, id)) }
}

pub(crate) fn member_of<C: Host>(metrics: &RaftServerMetrics<C>, id: NodeId) -> Option<Member> {
    let node = metrics.membership_config.membership().get_node(&id)?;
    Some(Member { node_id: tidepool_proto::NodeId(id), address: node.address.parse().ok()? })
}

fn members_of<C: Host>(metrics: &RaftServerMetrics<C>) -> Vec<Member> {
    let nodes = metrics.membership_config.membership().nodes();
    let member = |(id, node): (&NodeId, &crate::types::Member)| {
        Some(Member { node_id: tidepool_proto::NodeId(*id), address: node.address.parse().ok()? })
    };
    nodes.filter_map(member).collect()
}

/// Follows openraft and publishes; returns when openraft stopped.
pub(crate) async fn follow<C, M>(
    raft: openraft::Raft<C, Adapter<C, M>>,
    applied: std::sync::Arc<Progress>,
    (publish, members): (std::sync::Arc<watch::Sender<Leadership>>, std::sync::Arc<watch::Sender<Vec<Member>>>),
    changes: prometheus::IntCounter,
) where
    C: Host<Outcome = M::Outcome>,
    M: StateMachine,
{
    let mut metrics = raft.server_metrics();
    loop {
        let at = applied.get();
        let (now, belong) = {
            let metrics = metrics.borrow_watched();
            (judge(&metrics, at), members_of(&metrics))
        };
        members.send_if_modified(|seen| {
            let changed = *seen != belong;
            *seen = belong;
            changed
        });
        let waits_for_own_entry = now.role == Role::Candidate;
        publish.send_if_modified(|seen| {
            let changed = *seen != now;
            if changed {
                changes.inc();
                tracing::info!(role = now.role.name(), term = now.term, leader = ?now.leader.as_ref().map(|m| m.node_id.0), "leadership");
                *seen = now;
            }
            changed
        });
        // The applied position moves with every entry; it matters only to a leader that waits for its first.
        let stopped = if waits_for_own_entry {
            use openraft::async_runtime::{AsyncRuntime, Select2};
            let moved = applied.wait_for(|position| position != at);
            match C::AsyncRuntime::select2(metrics.changed(), moved).await {
                Select2::First(changed) => changed.is_err(),
                Select2::Second(()) => false,
            }
        } else {
            metrics.changed().await.is_err()
        };
        if stopped {
            publish.send_modify(|seen| *seen = Leadership { role: Role::Recovering, leader: None, ..*seen });
            return;
        }
    }
}
