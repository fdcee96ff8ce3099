//! Planned handover (M7). openraft mutes a leader once it asked another to take over, for the rest of its term; so
//! it is asked only when the other is sure to follow: it answers now, it does not keep out of elections after a restart (R2),
//! and it lacks no more than one batch, which the closed gate lets it catch up with first.

use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver;
use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft::metrics::RaftMetrics;
use tidepool_proto::NodeId;

use crate::election::{APPEND_ENTRIES_MAX, ElectionProfile};
use crate::host::Host;
use crate::leadership::Role;
use crate::machine::StateMachine;
use crate::network::Network;
use crate::node::RaftNode;
use crate::roll_call::ask;
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

/// How long a standby is waited for that restarted, before the gate closes: until it may take part in elections, and a little more.
fn fence_limit(profile: ElectionProfile) -> Duration {
    profile.startup_fence() + profile.heartbeat()
}

/// How long a standby may take to say whether it may take over.
fn ask_limit(profile: ElectionProfile) -> Duration {
    silence_max(profile)
}

/// How long a standby may have been silent to count as answering: two heartbeats and the time of a slow tick.
fn silence_max(profile: ElectionProfile) -> Duration {
    profile.heartbeat() * 3
}

/// How long the closed gate waits for the target to catch up.
fn catch_up_limit(profile: ElectionProfile) -> Duration {
    profile.timeout_max()
}

/// How long to wait for the target to lead, before an election would have decided anyway.
fn handover_limit(profile: ElectionProfile) -> Duration {
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

/// Other voters that answer and hold nearly all of the log.
pub(crate) fn keeping_up<C: Host>(metrics: &RaftMetrics<C>, profile: ElectionProfile) -> Vec<RawNodeId> {
    standbys(metrics).into_iter().filter(|standby| standby.ready(profile)).map(|standby| standby.id).collect()
}

/// Standbys that could be asked: voters that answer, or the one asked for, if it does.
fn answering<C: Host>(
    metrics: &RaftMetrics<C>,
    asked: Option<RawNodeId>,
    profile: ElectionProfile,
) -> Result<Vec<RawNodeId>, TransferError> {
    check(metrics, asked)?;
    let answer = standbys(metrics).into_iter().filter(|standby| standby.silent <= silence_max(profile));
    Ok(answer.map(|standby| standby.id).filter(|id| asked.is_none_or(|asked| asked == *id)).collect())
}

/// Chooses who takes over, of these: the one that lacks least; only if it can at once.
fn choose<C: Host>(
    metrics: &RaftMetrics<C>,
    of: &[RawNodeId],
    profile: ElectionProfile,
) -> Result<RawNodeId, TransferError> {
    check(metrics, None)?;
    let candidates: Vec<Standby> = standbys(metrics).into_iter().filter(|standby| of.contains(&standby.id)).collect();
    let best = candidates.iter().filter(|s| s.ready(profile)).min_by_key(|s| (s.lacks, s.silent, s.id));
    best.map(|standby| standby.id).ok_or_else(|| not_ready(&candidates))
}

/// Why none of the standbys that are asked for can take over.
fn none_ready<C: Host>(metrics: &RaftMetrics<C>, asked: Option<RawNodeId>) -> TransferError {
    let mut candidates = standbys(metrics);
    candidates.retain(|standby| asked.is_none_or(|id| id == standby.id));
    not_ready(&candidates)
}

fn not_ready(candidates: &[Standby]) -> TransferError {
    let seen: Vec<String> = candidates
        .iter()
        .map(|s| format!("node {} lacks {} entries and was last heard {} ms ago", s.id, s.lacks, s.silent.as_millis()))
        .collect();
    TransferError::NotReady(if seen.is_empty() { "none is heard".to_owned() } else { seen.join(", ") })
}

fn check<C: Host>(metrics: &RaftMetrics<C>, asked: Option<RawNodeId>) -> Result<(), TransferError> {
    if !metrics.state.is_leader() {
        return Err(TransferError::NotLeader);
    }
    let voter = |id: &RawNodeId| metrics.membership_config.membership().voter_ids().any(|voter| voter == *id);
    if let Some(id) = asked.filter(|id| *id == metrics.id || !voter(id)) {
        return Err(TransferError::NotAVoter(NodeId(id)));
    }
    Ok(())
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    /// Hands leadership to `to`, or to the standby that is nearest (M7). Refused unless it can take over at once.
    /// While it goes on nothing new is accepted here.
    pub async fn transfer_leader(&self, to: Option<NodeId>) -> Result<NodeId, TransferError> {
        let parts = self.parts();
        let profile = parts.options.election;
        let fatal = |e: &dyn std::fmt::Display| TransferError::Fatal(e.to_string());
        if self.watch_leadership().borrow().role != Role::Leader {
            return Err(TransferError::NotLeader);
        }
        let electable = self.electable(to.map(|id| id.0)).await?;
        let _gate = self.close_gate().ok_or(TransferError::Busy)?;
        let raft = &parts.raft;
        let target = self.choose_target(&electable).await?;
        let wait = raft.wait(Some(catch_up_limit(profile)));
        let caught_up = wait.metrics(
            |m| m.running_state.is_err() || !m.state.is_leader() || lacks(m, target) == Some(0),
            "the next leader holds the whole log",
        );
        let metrics = match caught_up.await {
            Ok(metrics) => metrics,
            Err(openraft::metrics::WaitError::Timeout(..)) => {
                return Err(TransferError::NotReady(format!(
                    "node {target} did not catch up within {:?}",
                    catch_up_limit(profile)
                )));
            }
            Err(error) => return Err(fatal(&error)),
        };
        metrics.running_state.map_err(|e| fatal(&e))?;
        if !metrics.state.is_leader() {
            return Err(TransferError::NotLeader);
        }
        raft.trigger().transfer_leader(target).await.map_err(|e| fatal(&e))?;
        let own = parts.options.node_id.0;
        let wait = raft.wait(Some(handover_limit(profile)));
        let taken_over = wait.metrics(
            |m| m.running_state.is_err() || m.current_leader.is_some_and(|leader| leader != own),
            "another leads",
        );
        match taken_over.await {
            Ok(metrics) => {
                metrics.running_state.map_err(|e| fatal(&e))?;
                metrics.current_leader.map(NodeId).ok_or(TransferError::TimedOut(NodeId(target)))
            }
            Err(openraft::metrics::WaitError::Timeout(..)) => Err(TransferError::TimedOut(NodeId(target))),
            Err(error) => Err(fatal(&error)),
        }
    }

    /// Standbys that answer and take part in elections. One that restarted just now would refuse to take over, and a leader that
    /// asked it could only wait for an election; it is waited for, while this member serves.
    async fn electable(&self, asked: Option<u64>) -> Result<Vec<u64>, TransferError> {
        let parts = self.parts();
        let profile = parts.options.election;
        let deadline = <C::AsyncRuntime as AsyncRuntime>::Instant::now() + fence_limit(profile);
        loop {
            let answering = answering(&parts.raft.metrics().borrow_watched(), asked, profile)?;
            let members = self.watch_members().borrow().clone();
            let asking = members.iter().filter(|member| answering.contains(&member.node_id.0)).map(|member| async {
                let answer = ask::<C, N>(&parts.network, &parts.identity, member, ask_limit(profile)).await;
                answer.is_ok_and(|answer| answer.error.is_none() && !answer.keeps_out).then_some(member.node_id.0)
            });
            let electable: Vec<u64> = futures::future::join_all(asking).await.into_iter().flatten().collect();
            if !electable.is_empty() {
                return Ok(electable);
            }
            if <C::AsyncRuntime as AsyncRuntime>::Instant::now() >= deadline {
                return Err(match answering.is_empty() {
                    true => none_ready(&parts.raft.metrics().borrow_watched(), asked),
                    false => TransferError::NotReady(format!(
                        "of {answering:?} none answers, or they restarted and keep out of elections until earlier leases have run out"
                    )),
                });
            }
            C::AsyncRuntime::sleep(profile.heartbeat() / 4).await;
        }
    }

    /// Whoever of these can take over at once. With the gate closed a standby soon is where it must be, or never.
    async fn choose_target(&self, electable: &[u64]) -> Result<u64, TransferError> {
        let profile = self.parts().options.election;
        let deadline = <C::AsyncRuntime as AsyncRuntime>::Instant::now() + catch_up_limit(profile);
        loop {
            let chosen = choose(&self.parts().raft.metrics().borrow_watched(), electable, profile);
            match chosen {
                Err(TransferError::NotReady(_)) if <C::AsyncRuntime as AsyncRuntime>::Instant::now() < deadline => {
                    C::AsyncRuntime::sleep(profile.heartbeat() / 4).await;
                }
                chosen => return chosen,
            }
        }
    }
}
