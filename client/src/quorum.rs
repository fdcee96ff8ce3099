//! The client's view of the master quorum: which members there are and which of them leads.
//!
//! One task per member (`member.rs`) keeps a stream open to it and offers what it hears; this is where the offers are
//! judged. A leader is believed when it belongs to the known cluster and its term is not below the highest seen in
//! this history; the one of the highest term wins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History, PROTOCOL_VERSION, v1};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::deadline::Deadline;
use crate::link::Link;
use crate::member;
use crate::metrics::Metrics;
use crate::options::MASTER_PORT_DEFAULT;
use crate::resolver::Resolve;

/// Clusters remembered that were followed one after the other.
const LINEAGE_MAX: usize = 64;
/// How long nobody of the known cluster has said anything before a cluster that goes on from it is followed.
const KNOWN_SILENCE_MIN: Duration = Duration::from_secs(3);
/// Members kept; further hints and learned addresses are ignored.
const MEMBERS_MAX: usize = 32;

/// The master that leads, and this client's session with it.
pub(crate) struct Leader {
    pub(crate) link: Arc<Link>,
    pub(crate) session_id: u64,
    pub(crate) term: u64,
    pub(crate) cluster: ClusterId,
    pub(crate) history: History,
}

/// What is fixed for the life of the client.
pub(crate) struct QuorumSettings {
    pub(crate) client_uuid: [u8; 16],
    pub(crate) host_id: String,
    pub(crate) tenant: String,
    pub(crate) resolver: Arc<dyn Resolve>,
    pub(crate) metrics: Arc<Metrics>,
    /// Called when a leader of another history is taken: what is known by ids is forgotten.
    pub(crate) new_history: Box<dyn Fn() + Send + Sync>,
}

/// Members and leader.
pub(crate) struct Quorum {
    pub(crate) settings: QuorumSettings,
    leader: watch::Sender<Option<Arc<Leader>>>,
    /// The member that was last named as the leader by another, since one was found.
    named: watch::Sender<Option<Address>>,
    /// Grows when a caller waits suspiciously long for the leader: then the other members are asked.
    stalls: watch::Sender<u64>,
    /// Set while every configured master refuses this client, which has met no leader.
    refused: watch::Sender<Option<Error>>,
    ids: AtomicU64,
    view: Mutex<View>,
}

#[derive(Default)]
struct View {
    cluster_uuid: Bytes,
    history: u64,
    /// The clusters that were followed, the present one first.
    lineage: Vec<v1::Ancestor>,
    /// When a member of the known cluster was last heard.
    known_heard: Option<Instant>,
    /// Highest term of an answer in this history.
    term_max: u64,
    members: Vec<Member>,
    /// Leaders that said they do not lead any more, until another is found: calls may still wait for their answers.
    deposed: Vec<Arc<Leader>>,
    stopped: bool,
}

impl View {
    /// Whether this is a master of a cluster that goes on from the known one, or from one before it: restored or recovered.
    fn is_succeeded_by(&self, identity: &v1::Identity) -> bool {
        identity.ancestors.iter().any(|ancestor| self.lineage.contains(ancestor))
    }

    /// Notes the cluster that is followed from now on.
    fn belong(&mut self, cluster_uuid: Bytes, history: u64) {
        (self.cluster_uuid, self.history) = (cluster_uuid.clone(), history);
        let now = v1::Ancestor { cluster_uuid, history };
        if !self.lineage.contains(&now) {
            self.lineage.insert(0, now);
            self.lineage.truncate(LINEAGE_MAX);
        }
    }
}

struct Member {
    address: Address,
    /// Named by the caller: kept whatever the masters say, since a name may come to mean another host.
    configured: bool,
    task: AbortHandle,
    failure: Option<Error>,
}

impl Quorum {
    pub(crate) fn start(settings: QuorumSettings, masters: &[Address]) -> Arc<Quorum> {
        let quorum = Arc::new(Quorum {
            settings,
            leader: watch::Sender::new(None),
            named: watch::Sender::new(None),
            stalls: watch::Sender::new(0),
            refused: watch::Sender::new(None),
            ids: AtomicU64::new(1),
            view: Mutex::default(),
        });
        for address in masters {
            quorum.add(address.clone(), true);
        }
        quorum
    }

    /// Ends all tasks and streams.
    pub(crate) fn stop(&self) {
        let mut view = self.view.lock();
        view.stopped = true;
        for member in view.members.drain(..) {
            member.task.abort();
        }
        view.deposed.clear();
        drop(view);
        self.leader.send_replace(None);
    }

    /// A request id, unique in this process's streams.
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// The leader, waiting for one until the deadline.
    pub(crate) async fn leader(&self, deadline: Deadline) -> Result<Arc<Leader>, Error> {
        if let Some(leader) = self.leader.borrow().as_ref() {
            return Ok(leader.clone());
        }
        let mut receiver = self.leader.subscribe();
        match deadline.bound(receiver.wait_for(Option::is_some)).await {
            Some(Ok(leader)) => Ok(leader.clone().expect("waited for Some")),
            Some(Err(_)) => Err(Error::new(ErrorCode::Unavailable, "the client is shutting down")),
            None => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("no master of {} leads: {}", self.members_text(), self.failures_text()),
            )),
        }
    }

    /// The first leader. A refusal that waiting cannot change ends the wait when every configured master says so, and is what the
    /// caller hears when only some did and none led.
    pub(crate) async fn first_leader(&self, deadline: Deadline) -> Result<(), Error> {
        let mut refused = self.refused.subscribe();
        let error = tokio::select! {
            biased;
            found = self.leader(deadline) => match found {
                Ok(_) => return Ok(()),
                Err(error) => error,
            },
            Ok(refusal) = refused.wait_for(Option::is_some) => refusal.clone().expect("waited for Some"),
        };
        let refusal =
            self.view.lock().members.iter().filter_map(|member| member.failure.as_ref()).find(|f| is_final(f)).cloned();
        Err(refusal.map_or(error, |refusal| {
            Error::new(refusal.code(), format!("no master leads that takes this client: {}", self.failures_text()))
        }))
    }

    /// The leader now, if one is known.
    pub(crate) fn leader_now(&self) -> Option<Arc<Leader>> {
        self.leader.borrow().clone()
    }

    pub(crate) fn watch_leader(&self) -> watch::Receiver<Option<Arc<Leader>>> {
        self.leader.subscribe()
    }

    /// Wakes the search at a member that others name.
    pub(crate) fn watch_named(&self) -> watch::Receiver<Option<Address>> {
        self.named.subscribe()
    }

    pub(crate) fn watch_stalls(&self) -> watch::Receiver<u64> {
        self.stalls.subscribe()
    }

    /// Asks the other members whether they lead, without giving up the present leader.
    pub(crate) fn stalled(&self) {
        self.stalls.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Adds a member and starts dialling it.
    pub(crate) fn learn(self: &Arc<Self>, address: Address) {
        self.add(address, false);
    }

    /// Takes in who belongs to the quorum. Only the leader's word makes a member forgotten: another may be behind.
    pub(crate) fn hear_of_members(self: &Arc<Self>, from: &Arc<Link>, members: &[v1::Member]) {
        let leads = self.leader.borrow().as_ref().is_some_and(|leader| Arc::ptr_eq(&leader.link, from));
        if leads && !members.is_empty() {
            self.view.lock().members.retain(|member| {
                let stays = member.configured
                    || member.address == *from.address()
                    || members.iter().any(|m| {
                        Address::parse(&m.address, MASTER_PORT_DEFAULT).is_ok_and(|address| address == member.address)
                    });
                if !stays {
                    tracing::info!(master = %member.address, "it left the quorum");
                    member.task.abort();
                }
                stays
            });
        }
        for member in members {
            self.learn_text(&member.address);
        }
    }

    fn add(self: &Arc<Self>, address: Address, configured: bool) {
        let mut view = self.view.lock();
        if view.stopped || view.members.len() >= MEMBERS_MAX || view.members.iter().any(|m| m.address == address) {
            return;
        }
        let task = tokio::spawn(member::attend(self.clone(), address.clone())).abort_handle();
        view.members.push(Member { address, configured, task, failure: None });
    }

    /// Every known member.
    pub(crate) fn members(&self) -> Vec<Address> {
        self.view.lock().members.iter().map(|m| m.address.clone()).collect()
    }

    /// Records why a member is not usable, for the message of a call that finds none.
    pub(crate) fn note_failure(&self, address: &Address, failure: Option<Error>) {
        let mut view = self.view.lock();
        if let Some(member) = view.members.iter_mut().find(|m| &m.address == address) {
            member.failure = failure;
        }
        if view.cluster_uuid.is_empty() {
            let mut configured = view.members.iter().filter(|member| member.configured);
            let all_refuse = configured.all(|member| member.failure.as_ref().is_some_and(is_final));
            self.refused
                .send_replace(view.members.first().and_then(|member| member.failure.clone()).filter(|_| all_refuse));
        }
    }

    /// The hello of this client. `history` is left out when a member of another history is asked to take it.
    pub(crate) fn hello(&self, with_history: WithHistory) -> v1::HelloRequest {
        let view = self.view.lock();
        v1::HelloRequest {
            identity: Some(v1::Identity {
                cluster_uuid: view.cluster_uuid.clone(),
                history: if with_history == WithHistory::Known { view.history } else { 0 },
                node_id: 0,
                protocol_version: PROTOCOL_VERSION,
                build: env!("CARGO_PKG_VERSION").to_owned(),
                ancestors: Vec::new(),
            }),
            client_uuid: Bytes::copy_from_slice(&self.settings.client_uuid),
            host_id: self.settings.host_id.clone(),
            lineage: if with_history == WithHistory::Known { Vec::new() } else { view.lineage.clone() },
        }
    }

    /// Judges an answered hello. Ok: this member leads now (or did already).
    pub(crate) fn offer(self: &Arc<Self>, link: &Arc<Link>, term: u64, hello: v1::HelloResponse) -> Result<(), Error> {
        let identity = hello.identity.unwrap_or_default();
        let wrong =
            |what: String| Error::new(ErrorCode::WrongCluster, format!("master {} is refused: {what}", link.address()));
        if identity.protocol_version.abs_diff(PROTOCOL_VERSION) > 1 {
            return Err(wrong(format!(
                "it speaks protocol {}, this client {PROTOCOL_VERSION}; releases may differ by one",
                identity.protocol_version
            )));
        }
        let cluster = <[u8; 16]>::try_from(&identity.cluster_uuid[..])
            .map_err(|_| wrong(format!("its cluster id has {} bytes, not 16", identity.cluster_uuid.len())))?;
        let leader = Arc::new(Leader {
            cluster: ClusterId(cluster),
            link: link.clone(),
            session_id: hello.session_id,
            term,
            history: History(identity.history),
        });
        {
            let mut view = self.view.lock();
            let is_other = !view.cluster_uuid.is_empty() && view.cluster_uuid != identity.cluster_uuid;
            if is_other && !view.is_succeeded_by(&identity) {
                return Err(wrong("it belongs to another cluster".to_owned()));
            }
            let present = self.leader.borrow().clone();
            if view.history != 0 && (is_other || view.history != identity.history) {
                if present.is_some() {
                    return Err(wrong(format!("it is of history {:x}, the leader is not", identity.history)));
                }
                if let Some(ago) = view.known_heard.map(|at| at.elapsed()).filter(|ago| *ago < KNOWN_SILENCE_MIN) {
                    return Err(wrong(format!(
                        "it goes on from the known cluster, a master of which was heard {} ms ago; it is followed after {KNOWN_SILENCE_MIN:?} of silence",
                        ago.as_millis()
                    )));
                }
                tracing::warn!(master = %link.address(), history = identity.history, "the cluster has a new history");
                view.term_max = 0;
                (self.settings.new_history)();
            }
            if term < view.term_max || present.as_ref().is_some_and(|p| p.term > term) {
                self.settings.metrics.stale_answers_refused.add(1);
                return Err(stale(link.address(), term, view.term_max));
            }
            view.belong(identity.cluster_uuid, identity.history);
            view.term_max = term;
            // Under the lock of the view, so that two offers cannot pass each other.
            self.leader.send_replace(Some(leader));
            // In the same term it is the same master by another address: what is in flight there will be answered.
            for superseded in view.deposed.drain(..).chain(present) {
                if superseded.term < term && !Arc::ptr_eq(&superseded.link, link) {
                    superseded.link.fail_pending();
                }
            }
        }
        self.named.send_if_modified(|named| named.take().is_some());
        self.settings.metrics.leaders_found.add(1);
        tracing::info!(master = %link.address(), term, session = hello.session_id, "found the leader");
        self.hear_of_members(link, &hello.members);
        Ok(())
    }

    /// A member of the known cluster said something, or its leader was lost just now.
    pub(crate) fn heard_of_known(&self) {
        self.view.lock().known_heard = Some(Instant::now());
    }

    /// This leader turned out not to lead, or its session is gone.
    pub(crate) fn retract(&self, leader: &Arc<Leader>) {
        self.lose(|present| Arc::ptr_eq(present, leader));
    }

    fn lose(&self, which: impl Fn(&Arc<Leader>) -> bool) {
        let lost = self.leader.borrow().clone().filter(&which);
        if let Some(lost) = lost {
            // First: once it is taken away, another may be offered.
            let mut view = self.view.lock();
            view.known_heard = Some(Instant::now());
            if view.deposed.len() < MEMBERS_MAX && !view.stopped {
                view.deposed.push(lost);
            }
        }
        self.leader.send_if_modified(|present| {
            let same = present.as_ref().is_some_and(&which);
            if same {
                *present = None;
            }
            same
        });
    }

    /// This stream ended.
    pub(crate) fn link_ended(&self, link: &Arc<Link>) {
        self.settings.metrics.streams_lost.add(1);
        self.lose(|present| Arc::ptr_eq(&present.link, link));
    }

    /// Follows a hint: learns a member that is unknown, and has the one that is named asked at once.
    pub(crate) fn follow(self: &Arc<Self>, hint: Option<&v1::LeaderHint>) {
        let Some(hint) = hint.filter(|hint| !hint.address.is_empty()) else { return };
        self.learn_text(&hint.address);
        if let Ok(address) = Address::parse(&hint.address, MASTER_PORT_DEFAULT) {
            // A member that is named again and again without leading is news once.
            self.named.send_if_modified(|named| named.replace(address.clone()) != Some(address));
        }
    }

    /// Refuses what a master said that has been superseded; remembers higher terms.
    pub(crate) fn check_term(&self, leader: &Leader, term: u64) -> Result<(), Error> {
        let mut view = self.view.lock();
        if view.history != leader.history.0 || term < view.term_max {
            self.settings.metrics.stale_answers_refused.add(1);
            return Err(stale(leader.link.address(), term, view.term_max));
        }
        view.term_max = term;
        Ok(())
    }

    fn learn_text(self: &Arc<Self>, text: &str) {
        match Address::parse(text, MASTER_PORT_DEFAULT) {
            Ok(address) => self.learn(address),
            Err(error) => tracing::warn!(%error, "a master named a member by an address that does not parse"),
        }
    }

    fn members_text(&self) -> String {
        self.members().iter().map(Address::to_string).collect::<Vec<_>>().join(", ")
    }

    fn failures_text(&self) -> String {
        let view = self.view.lock();
        let failures: Vec<&str> = view.members.iter().filter_map(|m| m.failure.as_ref().map(Error::message)).collect();
        if failures.is_empty() { "none has answered yet".to_owned() } else { failures.join("; ") }
    }
}

/// What a master says to a client that met no leader yet, and will say again.
fn is_final(failure: &Error) -> bool {
    matches!(failure.code(), ErrorCode::WrongCluster | ErrorCode::TenantNotRegistered)
}

/// Whether a hello insists on the history this client has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WithHistory {
    Known,
    Any,
}

fn stale(address: &Address, term: u64, term_max: u64) -> Error {
    Error::new(
        ErrorCode::NotLeader,
        format!("master {address} answered in term {term}; a leader of term {term_max} is known"),
    )
}
