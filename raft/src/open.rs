//! Opening a member: directory, identity, log and snapshots are checked against each other before anything is said to
//! anybody.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use openraft::Raft;
use prometheus::Registry;
use tidepool_proto::{Error, ErrorCode, NodeId};

use crate::apply::{Adapter, Applied};
use crate::divergence;
use crate::failure::{Failure, FatalError};
use crate::fence::StartupFence;
use crate::host::Host;
use crate::identity::IdentityStore;
use crate::log::{LogFailure, LogStore, OpenLogError, OpenReport};
use crate::machine::{AdmitPayload, StateMachine};
use crate::metrics::NodeMetrics;
use crate::network::Network;
use crate::node::{Parts, RaftNode};
use crate::options::Options;
use crate::peer::Peers;
use crate::skips::Skips;
use crate::snapshot::{Pace, SnapshotStore};

/// Why a member does not start: code and message say what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(transparent)]
pub struct OpenError(#[from] pub Error);

impl OpenError {
    pub(crate) fn corrupt(message: String) -> OpenError {
        OpenError(Error::new(ErrorCode::StorageCorrupt, message))
    }
    pub(crate) fn storage(error: impl Into<io::Error>) -> OpenError {
        let error = error.into();
        let code = if error.kind() == io::ErrorKind::InvalidData {
            ErrorCode::StorageCorrupt
        } else {
            ErrorCode::StorageFailed
        };
        OpenError(Error::new(code, error.to_string()))
    }
    pub(crate) fn feature_level(message: String) -> OpenError {
        OpenError(Error::new(ErrorCode::FeatureLevel, message))
    }
    pub(crate) fn fatal(fatal: &FatalError) -> OpenError {
        match fatal {
            FatalError::WrongCluster(why) => OpenError(Error::new(ErrorCode::WrongCluster, why.clone())),
            FatalError::Diverged(why) => OpenError(Error::new(ErrorCode::StateDiverged, why.clone())),
            FatalError::FeatureLevel(why) => OpenError::feature_level(why.clone()),
            FatalError::Removed(why) => OpenError(Error::new(ErrorCode::MemberRemoved, why.clone())),
            fatal => OpenError(Error::new(ErrorCode::StorageFailed, fatal.to_string())),
        }
    }
}

impl From<OpenLogError> for OpenError {
    fn from(error: OpenLogError) -> OpenError {
        let code = match &error {
            OpenLogError::Io { .. } | OpenLogError::InUse { .. } | OpenLogError::Thread(_) => ErrorCode::StorageFailed,
            OpenLogError::FeatureLevel { .. } => ErrorCode::FeatureLevel,
            OpenLogError::Metrics(_) => ErrorCode::Internal,
            _ => ErrorCode::StorageCorrupt,
        };
        OpenError(Error::new(code, error.to_string()))
    }
}

/// An open log and what hangs on it.
pub(crate) struct OpenLog<C: Host> {
    pub(crate) store: LogStore<C>,
    pub(crate) report: OpenReport,
    pub(crate) failure: Arc<Failure>,
    pub(crate) registry: Registry,
    /// Resolves when the last handle to the log is gone.
    pub(crate) closed: tokio::sync::oneshot::Receiver<()>,
}

/// Tells `failure` of the log's end, and by being dropped that the log is closed.
pub(crate) fn reporter(
    failure: &Arc<Failure>,
) -> (Box<dyn Fn(LogFailure) + Send + Sync>, tokio::sync::oneshot::Receiver<()>) {
    let (open, closed) = tokio::sync::oneshot::channel::<()>();
    let failure = failure.clone();
    let report = move |cause: LogFailure| {
        // Held until the log drops this closure.
        let _ = &open;
        failure.report(FatalError::Storage(cause.to_string()));
    };
    (Box::new(report), closed)
}

/// What a log asks the machine of its entries.
pub(crate) fn admits<M: StateMachine>(machine: &Arc<M>) -> Box<AdmitPayload> {
    let machine = machine.clone();
    Box::new(move |payload| machine.admits(payload))
}

/// Puts a member together over an open log. `network` is made once the identity is known.
pub(crate) async fn open<C, M, N>(
    options: Options,
    machine: Arc<M>,
    log: OpenLog<C>,
    network: impl FnOnce(Arc<IdentityStore>) -> N,
) -> Result<RaftNode<C, M, N>, OpenError>
where
    C: Host<Outcome = M::Outcome>,
    M: StateMachine,
    N: Network,
{
    let (dir, node_id, store_id) = (options.data_dir.clone(), options.node_id, log.store.store_id());
    let new_directory = log.report.is_pristine();
    let (agreement, purged) = (options.agreement, log.report.purged);
    let (identity, snapshots, starts_over, skips) = C::blocking(move || {
        let identity = IdentityStore::open(&dir, node_id, store_id, new_directory)?;
        let snapshots = SnapshotStore::open(&dir.join("snapshots"), agreement).map_err(OpenError::storage)?;
        let starts_over = divergence::begin_anew(&dir, &snapshots, purged, C::wall_clock())?;
        let skips = Skips::read(&dir).map_err(OpenError::storage)?;
        Ok::<_, OpenError>((Arc::new(identity), snapshots, starts_over, (dir, skips)))
    })
    .await
    .map_err(OpenError::storage)??;
    check_together(&options.data_dir, &identity, &log.report, &snapshots, starts_over.is_some())?;
    if let Some(anew) = starts_over {
        C::blocking(move || anew.done()).await.and_then(|done| done).map_err(OpenError::storage)?;
    }
    if let Some(at) = machine.applied() {
        return Err(OpenError::corrupt(format!("the state machine is not empty at the start: it stands at {at}")));
    }
    if let Some(snapshot) = snapshots.current() {
        let admitted = machine.admits_state(&mut snapshot.reader());
        admitted.map_err(|why| {
            let path = snapshot.path().display();
            OpenError::feature_level(format!("snapshot {path}: {why}; start the newer binary that wrote it"))
        })?;
    }

    let metrics = NodeMetrics::new(log.registry).map_err(|e| OpenError::corrupt(format!("metrics: {e}")))?;
    let used = !log.report.is_pristine() || snapshots.current().is_some();
    let fence = Arc::new(StartupFence::new(options.election, used, options.fence));
    let held = metrics.apply_held.clone();
    let applied = Applied::new(machine, snapshots, log.failure.clone(), held, skips);
    let beginning = applied.clone();
    C::blocking(move || beginning.begin()).await.map_err(OpenError::storage)?.map_err(OpenError::storage)?;
    // Again: a snapshot that does not load is none.
    check_together(&options.data_dir, &identity, &log.report, &applied.snapshots, false)?;
    applied.purged.fetch_max(purged.map_or(0, |id| id.index), Ordering::Relaxed);
    let network = network(identity.clone());
    let append_latency = log.store.append_latency();
    let config = options.election.openraft_config().validate();
    let config = Arc::new(config.map_err(|e| OpenError(Error::new(ErrorCode::InvalidParams, e.to_string())))?);
    let peers = Peers {
        own: node_id.0,
        profile: options.election,
        network: network.clone(),
        snapshots: applied.snapshots.clone(),
        pace: Arc::new(Pace::new(options.snapshot_send_bytes_per_s)),
    };
    let raft = Raft::new(node_id.0, config, peers, log.store, Adapter::<C, M>::new(applied.clone())).await;
    let raft = raft.map_err(|fatal| match log.failure.get() {
        Some(cause) => OpenError::fatal(&cause),
        None => OpenError::storage(io::Error::other(fatal)),
    })?;
    applied.is_started.store(true, Ordering::Release);
    let log_closed = parking_lot::Mutex::new(Some(log.closed));
    let failure = log.failure;
    Ok(RaftNode::assemble(Parts {
        options,
        raft,
        machine: applied,
        identity,
        network,
        fence,
        failure,
        metrics,
        append_latency,
        log_closed,
    }))
}

/// Why a member whose state is not the majority's has nothing to begin with.
pub(crate) fn cannot_start_over(dir: &str, node: NodeId) -> String {
    format!(
        "the state of {dir} was not the majority's, and no snapshot is left here that a majority vouched for and that the log reaches \
         back to; move the directory away, start a master with an empty one and --join under a new node id, and run \
         `tidepool member replace {node} ID@HOST`"
    )
}

/// The directory's parts must belong together: a member that lost one of them must not vote.
fn check_together(
    dir: &Path,
    identity: &IdentityStore,
    report: &OpenReport,
    snapshots: &SnapshotStore,
    starts_over: bool,
) -> Result<(), OpenError> {
    let dir = dir.display();
    let record = identity.record();
    if record.took_part && report.is_pristine() {
        return Err(OpenError::corrupt(format!(
            "{dir} took part in {} but its log is empty; a member that lost its log must not vote: move the directory away \
             and join as a learner under a new node id",
            identity.cluster()
        )));
    }
    let covered = snapshots.current().and_then(|file| file.meta().last_log_id);
    if report.purged > covered {
        if starts_over {
            let node = record.node_id;
            return Err(OpenError(Error::new(ErrorCode::StateDiverged, cannot_start_over(&dir.to_string(), node))));
        }
        let (purged, covered) = (report.purged.map_or(0, |id| id.index), covered.map_or(0, |id| id.index));
        return Err(OpenError::corrupt(format!(
            "the log in {dir} begins after index {purged}, and the newest intact snapshot covers only {covered}: the state \
             between is lost here; move the directory away and join as a learner under a new node id"
        )));
    }
    Ok(())
}
