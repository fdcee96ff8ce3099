//! The handle of one member: everything that the rest of the process asks of consensus.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::rt::watch;
use bytes::Bytes;
use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::async_runtime::{AsyncRuntime, Instant, Select2};
use openraft::errors::{LinearizableReadError, RaftError};
use openraft::impls::OneshotResponder;
use openraft::raft::linearizable_read::LinearizerOption;
use parking_lot::Mutex;
use tidepool_proto::NodeId;

use crate::apply::{Adapter, Applied as Machine};
use crate::belonging::Belonging;
use crate::bootstrap::Bootstrap;
use crate::compaction::{CompactError, Compactor};
use crate::departure;
use crate::election::ElectionProfile;
use crate::failure::{Failure, FatalError};
use crate::fence::StartupFence;
use crate::host::Host;
use crate::identity::{ClusterIdentity, IdentityStore};
use crate::inbound::Inbound;
use crate::lag::LagView;
use crate::leadership::{Leadership, Role, follow, member_of};
use crate::log::AppendLatency;
use crate::machine::{LogPosition, StateMachine};
use crate::membership::Turns;
use crate::metrics::NodeMetrics;
use crate::network::Network;
use crate::open::OpenError;
use crate::options::{Member, Options};
use crate::propose::{Applied, ProposeError, hint};
use crate::read::{ReadBarrier, ReadError, SuspendWatch};
use crate::snapshot::SnapshotFile;
use crate::status::{NodeStatus, member_statuses};
use crate::types::{CommittedLeaderId, PAYLOAD_BYTES_MAX, Payload, term_of};

/// A member of the quorum. Cheap to clone; ends with [`RaftNode::shutdown`] or its last clone.
pub struct RaftNode<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> {
    inner: Arc<Inner<C, M, N>>,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> Clone for RaftNode<C, M, N> {
    fn clone(&self) -> Self {
        RaftNode { inner: self.inner.clone() }
    }
}

/// What a member is put together from.
pub(crate) struct Parts<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> {
    pub(crate) options: Options,
    pub(crate) raft: Raft<C, Adapter<C, M>>,
    pub(crate) machine: Arc<Machine<M>>,
    pub(crate) identity: Arc<IdentityStore>,
    pub(crate) network: N,
    pub(crate) fence: Arc<StartupFence<C>>,
    pub(crate) failure: Arc<Failure>,
    pub(crate) metrics: NodeMetrics,
    pub(crate) append_latency: AppendLatency<C>,
    pub(crate) log_closed: Mutex<Option<tokio::sync::oneshot::Receiver<()>>>,
}

struct Inner<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> {
    parts: Parts<C, M, N>,
    inbound: Inbound<C, M>,
    barrier: ReadBarrier,
    suspend: Arc<SuspendWatch>,
    leadership: Arc<watch::Sender<Leadership>>,
    members: Arc<watch::Sender<Vec<Member>>>,
    turns: Turns,
    compactor: Arc<Compactor<C, M>>,
    waiting_for: Mutex<Option<String>>,
    /// Set while leadership is handed over: nothing new is accepted (M7).
    handing_over: watch::Sender<bool>,
    /// Why the own state is not to be trusted any more (M3).
    doubt: Mutex<Option<String>>,
    stop: watch::Sender<bool>,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> Drop for Inner<C, M, N> {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// How long a stop waits for the log to be closed.
const CLOSE_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

/// How often a leader looks for a change of members that another left half done.
const TEND_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// Opens the gate again however the handover ends.
pub(crate) struct Gate<'a>(&'a watch::Sender<bool>);

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    pub(crate) fn assemble(parts: Parts<C, M, N>) -> Self {
        let (machine, options) = (parts.machine.clone(), parts.options.clone());
        let own = (parts.raft.clone(), parts.identity.clone());
        let inbound = Inbound::new(own, parts.fence.clone(), parts.append_latency.clone(), machine, options);
        let compactor = Arc::new(Compactor::new(parts.raft.clone(), parts.machine.clone(), &parts.options));
        let inner = Arc::new(Inner {
            inbound,
            barrier: ReadBarrier::default(),
            suspend: Arc::new(SuspendWatch::new(C::suspended())),
            leadership: Arc::new(watch::Sender::new(Leadership::default())),
            members: Arc::new(watch::Sender::new(Vec::new())),
            turns: Turns::default(),
            compactor,
            waiting_for: Mutex::new(None),
            handing_over: watch::Sender::new(false),
            doubt: Mutex::new(None),
            stop: watch::Sender::new(false),
            parts,
        });
        let node = RaftNode { inner };
        node.start_background();
        node
    }

    pub(crate) fn raft(&self) -> &Raft<C, Adapter<C, M>> {
        &self.inner.parts.raft
    }

    pub(crate) fn applied(&self) -> &Machine<M> {
        &self.inner.parts.machine
    }

    pub(crate) fn failure(&self) -> &Failure {
        &self.inner.parts.failure
    }

    pub(crate) fn data_dir(&self) -> &std::path::Path {
        &self.inner.parts.options.data_dir
    }

    /// From here on nothing is answered from the own state. False if that was said before.
    pub(crate) fn doubt(&self, why: &str) -> bool {
        self.inner.inbound.leads_no_more();
        self.inner.doubt.lock().replace(why.to_owned()).is_none()
    }

    /// Whether this member starts over: nothing may leave it any more.
    pub fn is_doubted(&self) -> bool {
        self.inner.doubt.lock().is_some()
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.inner.turns
    }

    pub(crate) fn profile(&self) -> ElectionProfile {
        self.inner.parts.options.election
    }

    pub(crate) fn parts(&self) -> &Parts<C, M, N> {
        &self.inner.parts
    }

    /// No proposals until it is dropped. None: it is closed already.
    pub(crate) fn close_gate(&self) -> Option<Gate<'_>> {
        (!self.inner.handing_over.send_replace(true)).then(|| Gate(&self.inner.handing_over))
    }

    pub(crate) fn network_and_identity(&self) -> (&N, &IdentityStore) {
        (&self.inner.parts.network, &self.inner.parts.identity)
    }

    /// Follows openraft, reports its end, and compacts the log, until the node stops.
    fn start_background(&self) {
        let inner = &self.inner;
        let (raft, failure) = (inner.parts.raft.clone(), inner.parts.failure.clone());
        let following = follow(
            raft.clone(),
            inner.parts.machine.progress.clone(),
            (inner.leadership.clone(), inner.members.clone()),
            inner.parts.metrics.leader_changes.clone(),
        );
        drop(C::AsyncRuntime::spawn(async move {
            following.await;
            let running = raft.metrics().borrow_watched().running_state.clone();
            let cause = running.err().map_or_else(|| "it ended".to_owned(), |fatal| fatal.to_string());
            failure.report(FatalError::Consensus(cause));
        }));
        let (compactor, mut stop) = (inner.compactor.clone(), inner.stop.subscribe());
        drop(C::AsyncRuntime::spawn(async move {
            let stopped = async move {
                // An error means that the node is gone: the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            C::AsyncRuntime::select2(stopped, compactor.run()).await;
        }));
        self.notice_departure();
    }

    /// Ends the node once the others say that it left.
    fn notice_departure(&self) {
        let parts = &self.inner.parts;
        let (identity, network, failure) = (parts.identity.clone(), parts.network.clone(), parts.failure.clone());
        let (inbound, leadership) = (self.inner.inbound.clone(), self.inner.leadership.clone());
        let (members, listed) = (self.inner.members.clone(), parts.options.members.clone());
        let mut stop = self.inner.stop.subscribe();
        drop(C::AsyncRuntime::spawn(async move {
            let stopped = async move {
                // An error means that the node is gone: the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            let others = || {
                let mut known = members.borrow().clone();
                let more = listed.iter().filter(|m| known.iter().all(|k| k.address != m.address));
                let more: Vec<Member> = more.cloned().collect();
                known.extend(more);
                known
            };
            let leads = || leadership.borrow().role == Role::Leader;
            let noticed = departure::notice::<C, M, N>(&identity, &network, &inbound, others, leads);
            if let Select2::Second(why) = C::AsyncRuntime::select2(stopped, noticed).await {
                failure.report(FatalError::Removed(why));
            }
        }));
    }

    /// Completes membership changes that leaders before left half done, until the node stops.
    fn tend_members(&self) {
        let (inner, mut stop) = (Arc::downgrade(&self.inner), self.inner.stop.subscribe());
        drop(C::AsyncRuntime::spawn(async move {
            let stopped = async move {
                // An error means that the node is gone: the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            let tending = async move {
                loop {
                    C::AsyncRuntime::sleep(TEND_EVERY).await;
                    // Held only while it is used: the node ends with its last handle.
                    let Some(inner) = inner.upgrade() else { return };
                    RaftNode { inner }.tend_members_once().await;
                }
            };
            C::AsyncRuntime::select2(stopped, tending).await;
        }));
    }

    /// A way to this node that does not keep it, and its end.
    pub(crate) fn weak_and_stop(&self) -> (impl Fn() -> Option<Self> + Send + use<C, M, N>, watch::Receiver<bool>) {
        let inner = Arc::downgrade(&self.inner);
        (move || inner.upgrade().map(|inner| RaftNode { inner }), self.inner.stop.subscribe())
    }

    /// Answers the other members; a network brings their bytes here.
    pub fn inbound(&self) -> Inbound<C, M> {
        self.inner.inbound.clone()
    }

    /// Beside everything else, asks whether this member is among its own, and ends the node if it is not (I4).
    fn find_out_where(&self) {
        let parts = &self.inner.parts;
        let belonging = Belonging::<C, N>::new(parts.identity.clone(), parts.network.clone(), &parts.options);
        let (failure, mut stop) = (parts.failure.clone(), self.inner.stop.subscribe());
        drop(C::AsyncRuntime::spawn(async move {
            let stopped = async move {
                // An error means that the node is gone: the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            if let Select2::Second(Err(why)) = C::AsyncRuntime::select2(stopped, belonging.settle()).await {
                failure.report(FatalError::WrongCluster(why));
            }
        }));
    }

    /// Takes part: begins a cluster or finds its own again (I4), then waits until it may vote (R2). Call it once the
    /// other members can reach [`RaftNode::inbound`]. Waits for missing members for ever; see [`NodeStatus::waiting_for`].
    pub async fn run(&self) -> Result<(), OpenError> {
        let parts = &self.inner.parts;
        let bootstrap = Bootstrap {
            raft: &parts.raft,
            identity: &parts.identity,
            network: &parts.network,
            options: &parts.options,
            waiting_for: &self.inner.waiting_for,
        };
        match C::AsyncRuntime::select2(parts.failure.wait(), bootstrap.run()).await {
            Select2::First(fatal) => return Err(OpenError::fatal(&fatal)),
            Select2::Second(joined) => joined.map_err(OpenError::from)?,
        }
        let identity = parts.identity.clone();
        let written = C::blocking(move || identity.update(|record| record.took_part = true)).await;
        written.and_then(|written| written).map_err(OpenError::storage)?;
        self.find_out_where();
        self.tend_members();
        self.watch_own_disk();
        parts.fence.wait().await;
        parts.raft.runtime_config().elect(!self.is_doubted());
        Ok(())
    }

    /// Cluster and history; zeros before the bootstrap.
    pub fn identity(&self) -> ClusterIdentity {
        self.inner.parts.identity.cluster()
    }

    /// This member's id.
    pub fn node_id(&self) -> NodeId {
        self.inner.parts.options.node_id
    }

    /// The state machine.
    pub fn machine(&self) -> &Arc<M> {
        &self.inner.parts.machine.machine
    }

    /// Logs `payload` if this member still leads `term`, and answers once a quorum holds it on disk and it is applied
    /// here. Many may be in flight; they are logged in the order of the calls' first polls, unless 65536 wait already.
    /// May be dropped: the proposal then takes effect or not, unobserved.
    pub async fn propose(&self, payload: Bytes, term: u64) -> Result<Applied<M::Outcome>, ProposeError> {
        let metrics = &self.inner.parts.metrics;
        let timer = metrics.propose_seconds.start_timer();
        let result = self.try_propose(payload, term).await;
        let label = match &result {
            Ok(_) => "applied",
            Err(ProposeError::NotLeader { .. }) => "not_leader",
            Err(ProposeError::Unavailable(_)) => "unavailable",
            Err(ProposeError::Unknown { .. }) => "unknown",
            Err(ProposeError::TooLong { .. }) => "too_long",
            Err(ProposeError::Fatal(_)) => "fatal",
        };
        metrics.proposals.with_label_values(&[label]).inc();
        if result.is_ok() {
            timer.observe_duration()
        } else {
            timer.stop_and_discard();
        }
        result
    }

    async fn try_propose(&self, payload: Bytes, term: u64) -> Result<Applied<M::Outcome>, ProposeError> {
        let inner = &self.inner;
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(ProposeError::TooLong { bytes: payload.len() });
        }
        if let Some(fatal) = inner.parts.failure.get() {
            return Err(ProposeError::Fatal(fatal.to_string()));
        }
        if *inner.handing_over.borrow() {
            return Err(self.handed_over().await);
        }
        if let Some(why) = inner.doubt.lock().clone() {
            return Err(ProposeError::Unavailable(format!("the state of this member is in doubt: {why}")));
        }
        let fatal = |e: &dyn std::fmt::Display| match inner.parts.failure.get() {
            Some(cause) => ProposeError::Fatal(cause.to_string()),
            None => ProposeError::Fatal(e.to_string()),
        };
        let (responder, answer) = OneshotResponder::new_pair();
        let request =
            inner.parts.raft.write(Payload(payload)).with_leader(CommittedLeaderId::from(term)).responder(responder);
        // Without tokio's budget: a first poll that was cut short would let later proposals overtake this one.
        tokio::task::unconstrained(request.into_future()).await.map_err(|e| fatal(&e))?;
        let answer = answer.await.map_err(|_| fatal(&"it dropped a proposal"))?;
        let response = answer.map_err(ProposeError::from_openraft::<C>)?;
        let at = LogPosition { term: term_of(&response.log_id), index: response.log_id.index };
        let outcome = response.data.ok_or_else(|| fatal(&"a payload was applied without an outcome"))?;
        Ok(Applied { at, outcome })
    }

    /// What to answer to a proposal that came while leadership is handed over: once that is decided, so that whoever asks knows
    /// where to go.
    async fn handed_over(&self) -> ProposeError {
        let inner = &self.inner;
        let mut handing_over = inner.handing_over.subscribe();
        // The sender lives as long as this node; a handover ends within its limits.
        let _ended = handing_over.wait_for(|is_going_on| !is_going_on).await;
        let metrics = inner.parts.raft.server_metrics().borrow_watched().clone();
        match metrics.current_leader.filter(|leader| *leader != metrics.id) {
            Some(leader) => ProposeError::NotLeader { hint: member_of(&metrics, leader) },
            None => ProposeError::Unavailable("leadership was to be handed over".to_owned()),
        }
    }

    /// Confirms that this member leads, and that its state machine holds everything acknowledged before this call
    /// (R2). Answers the term. Read the state after it, not before. Callers that wait together share one confirmation.
    pub async fn linearize(&self) -> Result<u64, ReadError> {
        let inner = &self.inner;
        inner.parts.metrics.reads.inc();
        if let Some(why) = inner.doubt.lock().clone() {
            return Err(ReadError::Unavailable(format!("the state of this member is in doubt: {why}")));
        }
        inner.barrier.wait(|| inner.confirm()).await
    }

    /// Follows role, term and leader.
    pub fn watch_leadership(&self) -> watch::Receiver<Leadership> {
        self.inner.leadership.subscribe()
    }

    /// Follows who belongs to the quorum, as far as this member knows; learners included, by id.
    pub fn watch_members(&self) -> watch::Receiver<Vec<Member>> {
        self.inner.members.subscribe()
    }

    /// Figures of this moment.
    pub fn status(&self) -> NodeStatus {
        let inner = &self.inner;
        let metrics = inner.parts.raft.metrics().borrow_watched().clone();
        let machine = &inner.parts.machine;
        let index = |id: Option<crate::types::LogId>| id.map_or(0, |id| id.index);
        let snapshot = machine.snapshots.current().and_then(|file| file.meta().last_log_id);
        let now = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
        let leads = metrics.state.is_leader();
        let lag = if leads { LagView::default() } else { inner.inbound.lag() };
        // Copied first: nobody who waits for these locks waits for those that are taken below.
        let leadership = inner.leadership.borrow().clone();
        let waiting_for = inner.waiting_for.lock().clone();
        NodeStatus {
            node_id: self.node_id(),
            identity: self.identity(),
            leadership,
            last_log_index: metrics.last_log_index.unwrap_or(0),
            committed_index: index(metrics.cluster_committed.max(metrics.local_committed)),
            applied_index: machine.machine.applied().map_or(0, |at| at.index),
            purged_index: index(metrics.purged),
            snapshot_index: index(snapshot),
            entries_since_snapshot: machine.entries_since_snapshot.load(Ordering::Relaxed),
            bytes_since_snapshot: machine.bytes_since_snapshot.load(Ordering::Relaxed),
            entries_applied: machine.entries_applied.load(Ordering::Relaxed),
            quorum_confirmed_ago: metrics.last_quorum_acked.filter(|_| metrics.state.is_leader()).map(|at| {
                let at = at.into_inner();
                if now > at { now - at } else { std::time::Duration::ZERO }
            }),
            members: member_statuses(&metrics),
            leader_heard_ago: lag.heard_ago,
            leader_committed_index: lag.committed.unwrap_or(0),
            lag: if leads { Some(std::time::Duration::ZERO) } else { lag.lag },
            was_level: lag.level,
            votes: metrics
                .membership_config
                .membership()
                .get_joint_config()
                .iter()
                .all(|voters| voters.contains(&metrics.id)),
            snapshot_age: machine.snapshots.current().and_then(|file| file.age()),
            leader_silence_max: inner.parts.options.election.silence_max(),
            fenced: !inner.parts.fence.passed(),
            waiting_for,
            fatal: inner.parts.failure.get().map(|fatal| fatal.to_string()),
        }
    }

    /// The newest snapshot that a majority vouched for (M3): what may leave this member.
    pub fn agreed_snapshot(&self) -> Option<SnapshotFile> {
        self.inner.parts.machine.snapshots.agreed()
    }

    /// Snapshots the state now, and purges the log behind the older of two agreed snapshots. Answers the index that the new one
    /// covers.
    pub async fn compact(&self) -> Result<u64, CompactError> {
        self.inner.compactor.compact().await
    }

    /// The newest snapshot on disk.
    pub fn current_snapshot(&self) -> Option<SnapshotFile> {
        self.inner.parts.machine.snapshots.current()
    }

    /// Before a stop: the same, if half of what makes a snapshot due was applied since the last. None: it was not.
    pub async fn compact_before_stop(&self) -> Result<Option<u64>, CompactError> {
        self.inner.compactor.compact_before_stop().await
    }

    /// Resolves when the node stopped for good: the process must exit. Never, if it is shut down.
    pub fn fatal(&self) -> impl Future<Output = FatalError> + Send + 'static {
        let failure = self.inner.parts.failure.clone();
        async move { failure.wait().await }
    }

    /// Stops. What was acknowledged is on disk; proposals in flight end with an error.
    pub async fn shutdown(&self) {
        self.inner.parts.failure.expect_stop();
        self.inner.stop.send_replace(true);
        if let Err(error) = self.inner.parts.raft.shutdown().await {
            tracing::warn!(%error, "consensus ended badly while stopping");
        }
        let closed = self.inner.parts.log_closed.lock().take();
        if let Some(closed) = closed {
            // The sender is only ever dropped, with the last handle to the log.
            let closed = async move { drop(closed.await) };
            if C::AsyncRuntime::timeout(CLOSE_LIMIT, closed).await.is_err() {
                tracing::warn!("the log is still open {CLOSE_LIMIT:?} after the stop");
            }
        }
    }

    /// Metrics of this member, its log store's included; states are brought up to date by the call.
    pub fn metrics(&self) -> &prometheus::Registry {
        let metrics = &self.inner.parts.metrics;
        metrics.observe(&self.status());
        metrics.read_rounds.inc_by(self.inner.barrier.rounds.swap(0, Ordering::Relaxed));
        &metrics.registry
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> Inner<C, M, N> {
    /// One confirmation by openraft's linearizer. Holds no reference to the node.
    fn confirm(&self) -> impl Future<Output = Result<u64, ReadError>> + Send + 'static {
        let (raft, failure, suspend) = (self.parts.raft.clone(), self.parts.failure.clone(), self.suspend.clone());
        let (applied, profile) = (self.parts.machine.progress.clone(), self.parts.options.election);
        let suspensions = self.parts.metrics.suspensions.clone();
        async move {
            if let Some(fatal) = failure.get() {
                return Err(ReadError::Fatal(fatal.to_string()));
            }
            let doubtful = suspend.doubtful(C::suspended());
            let age = if doubtful { std::time::Duration::ZERO } else { profile.read_confirmation_age_max() };
            let option = LinearizerOption::new(Some(age), true).with_wait_timeout(profile.timeout_max());
            let linearizer = raft.get_read_linearizer(option).await.map_err(|e| read_error::<C>(e))?;
            if doubtful {
                suspensions.inc();
                suspend.confirmed();
            }
            let needed = *linearizer.read_log_id().log_id();
            let reached = |at: Option<LogPosition>| at.is_some_and(|at| at.index >= needed.index);
            if !reached(applied.get())
                && let Select2::First(fatal) = C::AsyncRuntime::select2(failure.wait(), applied.wait_for(reached)).await
            {
                return Err(ReadError::Fatal(fatal.to_string()));
            }
            Ok(term_of(&needed))
        }
    }
}

fn read_error<C: Host>(error: RaftError<C, LinearizableReadError<C>>) -> ReadError {
    match error {
        RaftError::APIError(LinearizableReadError::ForwardToLeader(forward)) => {
            ReadError::NotLeader { hint: hint(&forward) }
        }
        RaftError::APIError(LinearizableReadError::QuorumNotEnough(error)) => ReadError::Unavailable(error.to_string()),
        RaftError::Fatal(fatal) => ReadError::Fatal(fatal.to_string()),
    }
}
