//! `Service`: what the parts of a master share, and who may answer. A request is answered only by a leader that knows
//! its term; everything it promises lives in that term's `Tenure`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tidepool_proto::capability::Secret;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, OpId, PROTOCOL_VERSION, planted, v1};
use tidepool_raft::rt::{self, watch};
use tidepool_raft::{Member, Role};

use super::agreement::Halt;
use super::clients::Clients;
use super::evictor::Evictor;
use super::machine::Machine;
use super::metrics::ServiceMetrics;
use super::node::MasterNode;
use super::options::MasterOptions;
use super::recency::Standbys;
use super::refusal;
use super::snapshots::Snapshots;
use super::tenure::Tenure;
use crate::directory::limits::ANCESTORS_MAX;
use crate::directory::{Ancestors, Directory, Op, Outcome};

/// How long a hello waits for a master that was elected to take office: longer than its first entry takes.
const OFFICE_WAIT: Duration = Duration::from_millis(100);

/// Shared by every face of a master.
pub struct Service {
    node: MasterNode,
    machine: Arc<Machine>,
    options: MasterOptions,
    metrics: Arc<ServiceMetrics>,
    clients: Clients,
    standbys: Standbys,
    snapshots: Snapshots,
    halt: Halt,
    tenure: RwLock<Option<Arc<Tenure>>>,
    /// Changes when office is taken or left.
    office: watch::Sender<()>,
    term: AtomicU64,
}

impl Service {
    /// A service that does not lead yet.
    pub fn new(
        node: MasterNode,
        machine: Arc<Machine>,
        options: MasterOptions,
        metrics: Arc<ServiceMetrics>,
    ) -> Arc<Service> {
        let snapshots = Snapshots::new(options.snapshot_location.clone());
        Arc::new(Service {
            node,
            machine,
            options,
            metrics,
            clients: Clients::default(),
            standbys: Standbys::default(),
            snapshots,
            halt: Halt::default(),
            tenure: RwLock::new(None),
            office: watch::Sender::new(()),
            term: AtomicU64::new(0),
        })
    }

    /// The Raft node.
    pub fn node(&self) -> &MasterNode {
        &self.node
    }
    /// The state machine around the directory.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }
    /// The directory.
    pub fn directory(&self) -> &Directory {
        self.machine.directory()
    }
    /// Settings.
    pub fn options(&self) -> &MasterOptions {
        &self.options
    }
    /// Counters.
    pub fn metrics(&self) -> &Arc<ServiceMetrics> {
        &self.metrics
    }
    /// The eviction policies.
    pub fn evictor(&self) -> &Arc<Evictor> {
        self.machine.evictor()
    }
    /// When clients were heard of.
    pub fn clients(&self) -> &Clients {
        &self.clients
    }
    /// Connections to the standbys.
    pub fn standbys(&self) -> &Standbys {
        &self.standbys
    }
    /// What this master published.
    pub fn snapshots(&self) -> &Snapshots {
        &self.snapshots
    }
    /// Why nothing is written while the masters disagree.
    pub fn halt(&self) -> &Halt {
        &self.halt
    }
    /// Last term seen, carried in every answer.
    pub fn term(&self) -> u64 {
        self.term.load(Ordering::Relaxed)
    }
    /// Notes a term.
    pub(super) fn set_term(&self, term: u64) {
        self.term.fetch_max(term, Ordering::Relaxed);
    }

    /// Takes or leaves office.
    pub(super) fn set_tenure(&self, tenure: Option<Arc<Tenure>>) {
        self.metrics.is_leader.set(i64::from(tenure.is_some()));
        self.evictor().keep_hints(tenure.is_some());
        let before = std::mem::replace(&mut *self.tenure.write(), tenure);
        self.office.send_replace(());
        if let Some(before) = before {
            before.end();
        }
    }

    /// The term in office, or NOT_LEADER with a hint.
    pub fn tenure(&self) -> Result<Arc<Tenure>, Error> {
        let tenure = self.tenure.read().clone();
        tenure.ok_or_else(|| self.not_leader())
    }

    /// The same; a master that was elected and is about to take office answers when it has. Whoever looks for the leader is spared
    /// another round.
    async fn tenure_soon(&self) -> Result<Arc<Tenure>, Error> {
        let (mut office, mut leadership) = (self.office.subscribe(), self.node.watch_leadership());
        let soon = async {
            loop {
                office.borrow_and_update();
                let is_coming = matches!(leadership.borrow_and_update().role, Role::Candidate | Role::Leader);
                match self.tenure() {
                    Err(_) if is_coming => {}
                    found => return found,
                }
                tokio::select! {
                    biased;
                    changed = office.changed() => if changed.is_err() { return self.tenure() },
                    changed = leadership.changed() => if changed.is_err() { return self.tenure() },
                }
            }
        };
        rt::timeout(OFFICE_WAIT, soon).await.unwrap_or_else(|_| self.tenure())
    }

    /// A point after which reads see every acknowledged mutation (R2): the linearizer first, state afterwards.
    pub async fn barrier(&self) -> Result<Arc<Tenure>, Error> {
        let tenure = self.tenure()?;
        if planted!(NoReadFence) {
            return Ok(tenure);
        }
        let term = self.node.linearize().await.map_err(refusal::read)?;
        if term != tenure.term {
            return Err(self.not_leader());
        }
        Ok(tenure)
    }

    /// Whether a quorum confirmed this leader lately. One that is cut off keeps its role in Raft; it must not keep its
    /// datanodes on a log time and on commands that nobody else knows.
    pub fn is_confirmed(&self) -> bool {
        self.node.status().quorum_answered_within(2 * self.options.election.timeout_max())
    }

    /// NOT_LEADER, naming the leader when it is known.
    pub fn not_leader(&self) -> Error {
        let leadership = self.node.watch_leadership().borrow().clone();
        let hint = leadership
            .leader
            .map(|leader| refusal::hint(&leader, leadership.term))
            .filter(|h| h.node_id != self.options.node_id.0);
        let message = match &hint {
            Some(h) => format!(
                "master {} does not lead; the leader is master {} at {}",
                self.options.node_id, h.node_id, h.address
            ),
            None => format!("master {} does not lead and knows no leader; try again", self.options.node_id),
        };
        Error::new(ErrorCode::NotLeader, message).with_leader(hint)
    }

    /// Identity of this master and its cluster, as sent on every connection.
    pub fn identity(&self) -> v1::Identity {
        let identity = self.node.identity();
        v1::Identity {
            cluster_uuid: if identity.cluster == ClusterId::default() {
                bytes::Bytes::new()
            } else {
                bytes::Bytes::copy_from_slice(&identity.cluster.0)
            },
            history: identity.history.0,
            node_id: self.options.node_id.0,
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ancestors: self
                .directory()
                .ancestors()
                .iter()
                .map(|ancestor| v1::Ancestor {
                    cluster_uuid: bytes::Bytes::copy_from_slice(&ancestor.cluster.0),
                    history: ancestor.history.0,
                })
                .collect(),
        }
    }

    /// The history that an op's things name in their headers, for the wire: 0 is the present one (I1).
    pub fn history_on_wire(ancestors: &Ancestors, of: OpId) -> u64 {
        ancestors.history_of(of).map_or(0, |history| history.0)
    }

    /// This life of the directory.
    pub fn history(&self) -> History {
        self.node.identity().history
    }

    /// The key of capabilities (W2).
    pub fn secret(&self) -> Secret {
        self.directory().config().config.secret
    }

    /// Refuses a caller of another cluster, history or protocol.
    pub fn check_identity(&self, theirs: Option<&v1::Identity>) -> Result<(), Error> {
        let Some(theirs) = theirs else {
            return Err(Error::new(ErrorCode::WrongCluster, "the caller did not say who it is"));
        };
        let ours = self.identity();
        let refuse = |what: String| Err(Error::new(ErrorCode::WrongCluster, what));
        if theirs.protocol_version.abs_diff(PROTOCOL_VERSION) > 1 {
            return refuse(format!(
                "protocol version {} is too far from {PROTOCOL_VERSION}; upgrade one release at a time",
                theirs.protocol_version
            ));
        }
        if !theirs.cluster_uuid.is_empty() && theirs.cluster_uuid != ours.cluster_uuid {
            return refuse(format!("the caller belongs to another cluster; this is {}", self.node.identity().cluster));
        }
        if theirs.history != 0 && theirs.history != ours.history {
            return refuse(format!(
                "the caller knows history {:x}; this cluster is in {:x}: register anew",
                theirs.history, ours.history
            ));
        }
        Ok(())
    }

    /// As `check_identity`; a client that finds nobody of a history that this directory was in before is taken over.
    fn check_caller(&self, request: &v1::HelloRequest) -> Result<(), Error> {
        let theirs = request.identity.as_ref();
        let was_ours = |theirs: &v1::Identity| {
            let ancestors = self.directory().ancestors();
            let of_us = |one: &v1::Ancestor| ancestors.names(&one.cluster_uuid, one.history);
            !theirs.cluster_uuid.is_empty() && request.lineage.iter().take(ANCESTORS_MAX).any(of_us)
        };
        match theirs.filter(|theirs| was_ours(theirs)) {
            Some(theirs) => {
                let now = v1::Identity { cluster_uuid: Default::default(), history: 0, ..theirs.clone() };
                self.check_identity(Some(&now))
            }
            None => self.check_identity(theirs),
        }
    }

    /// Opens or resumes a client's session.
    pub async fn hello(&self, request: &v1::HelloRequest) -> Result<v1::HelloResponse, Error> {
        self.check_caller(request)?;
        let client_uuid = uuid(&request.client_uuid, "client_uuid")?;
        self.tenure_soon().await?;
        let tenure = self.barrier().await?;
        // After a failover every client comes back with a session that is known: no entry is needed to say so.
        let known = self.directory().session_of(&client_uuid);
        let session = match known {
            Some(session) => session,
            None => {
                let open = Op::OpenSession { client_uuid, host_id: &request.host_id };
                match tenure.proposer.propose_one(open, None).await? {
                    Outcome::Opened { session, .. } => session,
                    Outcome::Refused(error) => return Err(error),
                    other => return Err(unexpected("open_session", &other)),
                }
            }
        };
        Ok(v1::HelloResponse {
            identity: Some(self.identity()),
            session_id: session.0,
            members: self.members(),
            lease_ttl_default_ms: self.options.lease_ttl_default.as_millis() as u32,
            lease_ttl_max_ms: self.lease_ttl_max().as_millis() as u32,
        })
    }

    /// The quorum as clients should know it.
    pub fn members(&self) -> Vec<v1::Member> {
        wire_members(&self.node.watch_members().borrow())
    }

    /// Longest lease, replicated (L3).
    pub fn lease_ttl_max(&self) -> Duration {
        Duration::from_millis(self.directory().config().config.lease_ttl_max_ms)
    }
}

/// Members for clients.
pub fn wire_members(members: &[Member]) -> Vec<v1::Member> {
    members.iter().map(|m| v1::Member { node_id: m.node_id.0, address: m.address.to_string() }).collect()
}

/// Sixteen bytes, or a clear refusal.
pub fn uuid(bytes: &[u8], name: &str) -> Result<[u8; 16], Error> {
    bytes
        .try_into()
        .map_err(|_| Error::new(ErrorCode::InvalidParams, format!("{name} has {} bytes; it must have 16", bytes.len())))
}

/// An outcome that the op cannot have.
pub fn unexpected(op: &str, outcome: &Outcome) -> Error {
    Error::new(ErrorCode::Internal, format!("{op} had the outcome {outcome:?}"))
}
