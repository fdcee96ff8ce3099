//! Changing who belongs to the quorum: one change at a time, asked of the leader. A new member follows as a learner until
//! it holds the log, then votes; whoever leaves is remembered for ever (I4). A call may be repeated after any failure: it
//! goes on where the quorum stands.

mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use openraft::ChangeMembers;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::async_runtime::{AsyncRuntime, Instant as _};
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::metrics::{RaftMetrics, WaitError};
use openraft::raft::Precondition;
use parking_lot::Mutex;
use tidepool_proto::{NodeId, v1};

use self::plan::{Roll, Step, plan};
use crate::election::APPEND_ENTRIES_MAX;
use crate::host::Host;
use crate::identity::{store_to_wire, wire_cluster};
use crate::leadership::Role;
use crate::machine::StateMachine;
use crate::network::{LinkError, Network};
use crate::node::RaftNode;
use crate::options::Member;
use crate::propose::hint;
use crate::read::ReadError;
use crate::roll_call::{ANSWER_LIMIT, announced, roll_call};
use crate::status::member_statuses;
use crate::transfer::{TransferError, lacks};
use crate::types::{self, CommittedLeaderId, retired_of};

/// How long a leader that counts too few members as answering waits for more to be heard, before it refuses.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two tries at something that may pass.
const TRY_EVERY: Duration = Duration::from_millis(50);

/// What to change: with both, the one takes the place of the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberChange {
    /// Becomes a voter.
    pub add: Option<Member>,
    /// Leaves for good.
    pub remove: Option<NodeId>,
}

/// How far a change came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeReport {
    /// What was done, in order, in words.
    pub steps: Vec<String>,
    /// Whether that is all.
    pub result: Result<(), MembershipError>,
}

/// Why the membership is not as was asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipError {
    /// This member does not lead, or handed over in order to leave: the next leader carries on.
    #[error("this member does not lead; {}", crate::read::hint_text(.hint))]
    NotLeader {
        /// Who does, as far as known.
        hint: Option<Member>,
    },
    /// It cannot be meant, or never be done.
    #[error("{0}")]
    Invalid(String),
    /// The id was a member's before.
    #[error("{0}")]
    IdUsed(String),
    /// The new member's binary is older than what the log holds.
    #[error("{0}")]
    FeatureLevel(String),
    /// Too few voters would be left that answer.
    #[error("{0}")]
    AtRisk(String),
    /// One change at a time.
    #[error("another change of the members is under way: {0}")]
    Changing(String),
    /// The new member did not catch up in time.
    #[error("{0}")]
    Behind(String),
    /// The member that is to be added does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// No quorum answers, or nobody could take over: it may pass.
    #[error("{0}")]
    Unavailable(String),
    /// The time was up; what was begun goes on.
    #[error("no time is left: {0}; what was begun goes on")]
    TimedOut(String),
    /// The node stopped for good.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

impl From<ReadError> for MembershipError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::NotLeader { hint } => MembershipError::NotLeader { hint },
            ReadError::Unavailable(why) => MembershipError::Unavailable(format!("no quorum answers: {why}")),
            ReadError::Fatal(why) => MembershipError::Fatal(why),
        }
    }
}

fn failed<C: Host>(error: RaftError<C, ClientWriteError<C>>) -> MembershipError {
    match error {
        RaftError::APIError(
            ClientWriteError::ForwardToLeader(forward) | ClientWriteError::LogEntryDiscarded(forward),
        ) => MembershipError::NotLeader { hint: hint(&forward) },
        RaftError::APIError(ClientWriteError::ChangeMembershipError(ChangeMembershipError::InProgress(_))) => {
            MembershipError::Changing("its last step is not committed yet".to_owned())
        }
        RaftError::APIError(ClientWriteError::PreconditionFailed(why)) => MembershipError::Changing(why.to_string()),
        RaftError::APIError(ClientWriteError::ChangeMembershipError(why)) => MembershipError::Invalid(why.to_string()),
        RaftError::Fatal(fatal) => MembershipError::Fatal(fatal.to_string()),
    }
}

/// The change that is under way, if any.
#[derive(Clone, Default, Debug)]
pub(crate) struct Turns(Arc<Mutex<Option<String>>>);

/// The right to change the members; given back by being dropped.
struct Turn(Turns);

impl Turns {
    fn take(&self, what: String) -> Result<Turn, MembershipError> {
        let mut current = self.0.lock();
        if let Some(current) = &*current {
            return Err(MembershipError::Changing(current.clone()));
        }
        *current = Some(what);
        Ok(Turn(self.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.0.lock() = None;
    }
}

fn describe(change: &MemberChange) -> String {
    match (&change.add, change.remove) {
        (Some(new), Some(old)) => format!("node {} replaces node {old}", new.node_id),
        (Some(new), None) => format!("node {} is added", new.node_id),
        (None, Some(old)) => format!("node {old} is removed"),
        (None, None) => "nothing".to_owned(),
    }
}

/// What was done, and what is being done.
#[derive(Clone, Default)]
struct Progress(Arc<Mutex<(Vec<String>, Option<String>)>>);

impl Progress {
    fn begin(&self, what: &Step) {
        self.0.lock().1 = Some(what.to_string());
    }
    fn done(&self) {
        let (done, doing) = &mut *self.0.lock();
        let Some(step) = doing.take() else { return };
        tracing::info!(step, "membership");
        done.push(step);
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    /// What [`RaftNode::change_members`] would do now, or why it would refuse.
    pub async fn plan_members(&self, change: &MemberChange) -> Result<Vec<String>, MembershipError> {
        self.linearize().await?;
        Ok(plan(&self.roll(), change)?.iter().map(Step::to_string).collect())
    }

    /// The highest feature level that each member's binary knows, this one's included, as it says now (M6). None: no answer.
    pub async fn member_levels(&self) -> Vec<(Member, Option<u16>)> {
        let (network, identity) = self.network_and_identity();
        let members = self.watch_members().borrow().clone();
        let answers = roll_call::<C, N>(network, identity, self.node_id(), &members).await;
        let own = members.iter().filter(|member| member.node_id == self.node_id());
        let own = own.map(|member| (member.clone(), Some(self.machine().levels().binary)));
        let level = |answer: Result<v1::HandshakeResponse, LinkError>| {
            answer.ok().filter(|answer| answer.error.is_none()).map(|answer| announced(&answer))
        };
        own.chain(answers.into_iter().map(|(member, answer)| (member.clone(), level(answer)))).collect()
    }

    /// Runs `act` while no member can come or go: what it found out about them stays true.
    pub async fn with_members_fixed<R>(&self, what: &str, act: impl Future<Output = R>) -> Result<R, MembershipError> {
        let _turn = self.turns().take(what.to_owned())?;
        Ok(act.await)
    }

    /// Changes the members within `limit`. What is under way when the time is up, or when the call is dropped, goes on; the
    /// same call finds out and carries on.
    pub async fn change_members(&self, change: MemberChange, limit: Duration) -> ChangeReport {
        let progress = Progress::default();
        let turn = match self.turns().take(describe(&change)) {
            Ok(turn) => turn,
            Err(error) => return ChangeReport { steps: Vec::new(), result: Err(error) },
        };
        let (answer, answered) = tokio::sync::oneshot::channel();
        let (node, told) = (self.clone(), progress.clone());
        // Earlier than the caller's, so that what is waited for can be told.
        let deadline = <C::AsyncRuntime as AsyncRuntime>::Instant::now() + limit * 9 / 10;
        drop(C::AsyncRuntime::spawn(async move {
            let result = node.carry_out(&change, deadline, &told).await;
            drop(turn);
            // The caller may have gone.
            drop(answer.send(result));
        }));
        let result = match C::AsyncRuntime::timeout(limit, answered).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(MembershipError::Fatal("the change was given up".to_owned())),
            Err(_) => {
                let doing = progress.0.lock().1.clone();
                Err(MembershipError::TimedOut(doing.unwrap_or_else(|| "a quorum was waited for".to_owned())))
            }
        };
        let steps = progress.0.lock().0.clone();
        ChangeReport { steps, result }
    }

    async fn carry_out(
        &self,
        change: &MemberChange,
        deadline: Instant<C>,
        progress: &Progress,
    ) -> Result<(), MembershipError> {
        let term = self.linearize().await?;
        self.complete(term, progress).await?;
        let patience = deadline.min(<C::AsyncRuntime as AsyncRuntime>::Instant::now() + PATIENCE);
        let steps = loop {
            match plan(&self.roll(), change) {
                Err(refused @ (MembershipError::AtRisk(_) | MembershipError::Unreachable(_))) => {
                    // Who leads no more hears nobody. That says nothing about the others: the next leader is asked.
                    self.linearize().await?;
                    if !before(patience) {
                        return Err(refused);
                    }
                    C::AsyncRuntime::sleep(TRY_EVERY).await
                }
                planned => break planned?,
            }
        };
        for step in &steps {
            progress.begin(step);
            match step {
                Step::Invite(member) => self.invite(member, deadline).await?,
                Step::Follow(member) => {
                    let node = types::Member::new(&member.address, self.roll().retired);
                    let nodes = BTreeMap::from([(member.node_id.0, node)]);
                    self.write(term, ChangeMembers::AddNodes(nodes)).await?;
                }
                Step::CatchUp(member) => self.catch_up(member, deadline).await?,
                Step::Vote { joins, leaves } => {
                    let mut changes = Vec::new();
                    changes.extend(joins.iter().map(|m| ChangeMembers::AddVoterIds([m.node_id.0].into())));
                    changes.extend(leaves.iter().map(|id| ChangeMembers::RemoveVoters([id.0].into())));
                    changes.extend(leaves.map(|id| self.remember(id.0)));
                    self.write(term, ChangeMembers::Batch(changes)).await?;
                }
                Step::Forget(id) => {
                    let remember = self.remember(id.0);
                    let leaves = ChangeMembers::RemoveNodes([id.0].into());
                    self.write(term, ChangeMembers::Batch(vec![remember, leaves])).await?;
                }
                Step::HandOver(_) => {
                    let next = self.hand_over(deadline).await?;
                    progress.done();
                    let members = self.watch_members().borrow().clone();
                    let hint = members.iter().find(|member| member.node_id == next).cloned();
                    return Err(MembershipError::NotLeader { hint });
                }
            }
            progress.done();
        }
        Ok(())
    }

    /// Brings a change to its end that a leader before left half done: the old voters and the new ones both decide until then.
    async fn complete(&self, term: u64, progress: &Progress) -> Result<(), MembershipError> {
        if self.metrics_now().membership_config.membership().get_joint_config().len() < 2 {
            return Ok(());
        }
        progress.begin(&Step::Vote { joins: None, leaves: None });
        self.write(term, ChangeMembers::AddVoterIds(BTreeSet::new())).await?;
        progress.done();
        Ok(())
    }

    /// A leader completes what leaders before it left half done.
    pub(crate) async fn tend_members_once(&self) {
        let joint = self.metrics_now().membership_config.membership().get_joint_config().len() > 1;
        if !joint || self.watch_leadership().borrow().role != Role::Leader {
            return;
        }
        let turn = self.turns().take("a change that was left half done is completed".to_owned());
        let Ok(_turn) = turn else { return };
        let done = async { self.complete(self.linearize().await?, &Progress::default()).await };
        if let Err(error) = done.await {
            tracing::warn!(%error, "a membership change that was left half done is not completed yet");
        }
    }

    fn metrics_now(&self) -> RaftMetrics<C> {
        self.raft().metrics().borrow_watched().clone()
    }

    fn roll(&self) -> Roll {
        let metrics = self.metrics_now();
        let membership = metrics.membership_config.membership();
        let silence_max = self.profile().timeout_max() * 3;
        let heard =
            member_statuses(&metrics).into_iter().filter(|m| m.last_heard.is_some_and(|ago| ago <= silence_max));
        Roll {
            own: metrics.id,
            voters: membership.voter_ids().collect(),
            members: membership.nodes().map(|(id, member)| (*id, member.clone())).collect(),
            retired: retired_of(membership),
            heard: heard.map(|m| m.member.node_id.0).collect(),
        }
    }

    /// Every member's record of who left, with one more.
    fn remember(&self, id: u64) -> ChangeMembers<u64, types::Member> {
        let roll = self.roll();
        let mut retired = roll.retired;
        retired.insert(id);
        let all = roll.members.into_iter();
        ChangeMembers::SetNodes(all.map(|(id, m)| (id, types::Member { retired: retired.clone(), ..m })).collect())
    }

    /// Logs one change, on top of the membership that was looked at, and waits until it shows here.
    async fn write(&self, term: u64, changes: ChangeMembers<u64, types::Member>) -> Result<(), MembershipError> {
        let last_membership_log_id = *self.metrics_now().membership_config.log_id();
        let unchanged = [
            Precondition::CommittedLeaderId { committed_leader_id: CommittedLeaderId::from(term) },
            Precondition::LastMembershipLogId { last_membership_log_id },
        ];
        let written = self.raft().change_membership_if(changes, false, unchanged).await.map_err(failed)?;
        let wait = self.raft().wait(Some(self.profile().timeout_max() * 10));
        let shown = wait.metrics(
            |m| m.running_state.is_err() || m.membership_config.log_id().as_ref() >= Some(&written.log_id),
            "the new membership shows",
        );
        shown.await.map(drop).map_err(|error| MembershipError::Unavailable(error.to_string()))
    }

    /// A fresh master takes over the cluster's identity: only now does it let anybody in, and only this cluster (I4).
    async fn invite(&self, member: &Member, deadline: Instant<C>) -> Result<(), MembershipError> {
        let until = deadline.min(<C::AsyncRuntime as AsyncRuntime>::Instant::now() + ANSWER_LIMIT);
        loop {
            match self.try_invite(member).await {
                // It may be about to start.
                Err(MembershipError::Unreachable(_)) if before(until) => C::AsyncRuntime::sleep(TRY_EVERY).await,
                result => return result,
            }
        }
    }

    async fn try_invite(&self, member: &Member) -> Result<(), MembershipError> {
        let (network, identity) = self.network_and_identity();
        let (id, address) = (member.node_id, member.address.to_string());
        let name = format!("node {id} at {address}");
        let silent = |error: LinkError| match error {
            LinkError::Refused(error) => MembershipError::Invalid(format!("{name} refuses: {}", error.message())),
            error => {
                MembershipError::Unreachable(format!("{name} does not answer ({error}); is it started with --join?"))
            }
        };
        let hello = v1::HandshakeRequest {
            identity: Some(identity.to_wire()),
            target_node_id: id.0,
            store_uuid: identity.store_uuid(),
        };
        let answer = C::AsyncRuntime::timeout(ANSWER_LIMIT * 2, network.handshake(&address, hello, ANSWER_LIMIT));
        let answer = answer.await.unwrap_or(Err(LinkError::Timeout(ANSWER_LIMIT))).map_err(silent)?;
        let invalid = |why: String| Err(MembershipError::Invalid(format!("{name} {why}")));
        let peer = answer.identity.clone().unwrap_or_default();
        if peer.node_id != id.0 {
            return invalid(format!("calls itself node {}; check the id and the address", peer.node_id));
        }
        let (theirs, needed) = (announced(&answer), self.machine().levels().state);
        if theirs < needed {
            return Err(MembershipError::FeatureLevel(format!(
                "{name} knows feature level {theirs}, the cluster is at {needed}: start it with a newer binary"
            )));
        }
        match wire_cluster(&peer) {
            Some(theirs) if theirs == identity.cluster() => return Ok(()),
            Some(theirs) => {
                return invalid(format!("belongs to {theirs}; start it with an empty data directory and --join"));
            }
            None if answer.initialized => return invalid("holds a log of no cluster that it names".to_owned()),
            None => {}
        }
        if let Some(error) = answer.error {
            return invalid(format!("refuses: {}", error.message));
        }
        let known = identity.record().roster.into_iter().map(|(id, store)| v1::RaftMember {
            node_id: id.0,
            address: String::new(),
            store_uuid: store_to_wire(store),
        });
        let invitation = v1::PrepareRequest {
            identity: Some(identity.to_wire()),
            target_node_id: id.0,
            members: known.collect(),
            join: true,
        };
        let answer = C::AsyncRuntime::timeout(ANSWER_LIMIT * 2, network.prepare(&address, invitation, ANSWER_LIMIT));
        let answer = answer.await.unwrap_or(Err(LinkError::Timeout(ANSWER_LIMIT))).map_err(silent)?;
        match answer.error {
            Some(error) => invalid(format!("refuses: {}", error.message)),
            None => Ok(()),
        }
    }

    /// Waits until a learner holds what the log holds now, and little is missing of what came since.
    async fn catch_up(&self, member: &Member, deadline: Instant<C>) -> Result<(), MembershipError> {
        let id = member.node_id.0;
        let goal = self.metrics_now().last_log_index.unwrap_or(0);
        let matched =
            move |m: &RaftMetrics<C>| m.replication.as_ref().and_then(|all| all.get(&id)?.as_ref().map(|at| at.index));
        let now = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
        let left = if deadline > now { deadline - now } else { Duration::ZERO };
        let wait = self.raft().wait(Some(left));
        let caught_up = wait.metrics(
            move |m| {
                m.running_state.is_err()
                    || !m.state.is_leader()
                    || matched(m) >= Some(goal) && lacks(m, id).is_some_and(|lacks| lacks <= APPEND_ENTRIES_MAX)
            },
            "the new member holds the log",
        );
        match caught_up.await {
            Ok(m) if m.state.is_leader() => Ok(()),
            Ok(_) => Err(MembershipError::NotLeader { hint: self.watch_leadership().borrow().leader.clone() }),
            Err(WaitError::Timeout(..)) => {
                let m = self.metrics_now();
                let holds = matched(&m).map_or("nothing of the log yet".to_owned(), |at| format!("entry {at}"));
                Err(MembershipError::Behind(format!(
                    "node {id} follows as a learner and holds {holds}, of {} entries: it has no vote yet; repeat the command to \
                     go on",
                    m.last_log_index.unwrap_or(0)
                )))
            }
            Err(error) => Err(MembershipError::Fatal(error.to_string())),
        }
    }

    async fn hand_over(&self, deadline: Instant<C>) -> Result<NodeId, MembershipError> {
        loop {
            match self.transfer_leader(None).await {
                Ok(next) => return Ok(next),
                Err(TransferError::NotReady(_) | TransferError::Busy) if before(deadline) => {
                    C::AsyncRuntime::sleep(TRY_EVERY).await;
                }
                Err(TransferError::NotLeader) => {
                    return Err(MembershipError::NotLeader { hint: self.watch_leadership().borrow().leader.clone() });
                }
                Err(TransferError::Fatal(why)) => return Err(MembershipError::Fatal(why)),
                Err(error) => return Err(MembershipError::Unavailable(error.to_string())),
            }
        }
    }
}

type Instant<C> = <<C as openraft::RaftTypeConfig>::AsyncRuntime as AsyncRuntime>::Instant;

fn before<I: openraft::async_runtime::Instant>(deadline: I) -> bool {
    I::now() < deadline
}
