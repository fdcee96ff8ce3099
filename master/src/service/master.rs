//! `Master`: one member of the quorum as a process runs it. Options -> start -> handle.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use tidepool_proto::v1::admin_service_server::AdminServiceServer;
use tidepool_proto::v1::client_service_server::ClientServiceServer;
use tidepool_proto::v1::node_service_server::NodeServiceServer;
use tidepool_proto::{Address, Error, ErrorCode, NodeId};
use tidepool_raft::rt;
use tidepool_raft::rt::watch;
use tidepool_raft::{ClusterIdentity, FatalError, Node, NodeService, Role};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use super::admin::AdminFace;
use super::agreement;
use super::audit::AuditMetrics;
use super::core::Service;
use super::gather;
use super::logging::LogFilter;
use super::machine::Machine;
use super::metrics::ServiceMetrics;
use super::node::{self, MasterNode};
use super::nodes::NodeFace;
use super::office;
use super::options::MasterOptions;
use super::refusal;
use super::session::ClientFace;
use super::snapshots;
use super::status::{Readiness, readiness};

/// HTTP/2 windows of the session stream; smaller ones cost throughput on large batches.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Largest gRPC message a master takes.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// How often a silent connection is asked whether somebody is there, and how long the answer may take: whoever lost power says
/// nothing, and must not keep a connection for ever.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_MAX: Duration = Duration::from_secs(5);
/// How long a stopping leader tries to hand over.
const HANDOVER_WAIT: Duration = Duration::from_secs(2);
/// How long a leader that handed over still answers, NOT_LEADER and who leads: a client with a call open goes there at once; one
/// that finds the port closed has to search.
const TELL_SUCCESSOR: Duration = Duration::from_millis(200);
/// How long a stopping master may write its last snapshot.
const LAST_SNAPSHOT_WAIT: Duration = Duration::from_secs(5);
/// How often the eviction policies work off what was noted.
const POLICY_INTERVAL: Duration = Duration::from_millis(20);
/// How often gauges are refreshed.
const GAUGE_INTERVAL: Duration = Duration::from_millis(500);

/// Why a master could not start.
#[derive(Debug, thiserror::Error)]
pub enum MasterError {
    /// A setting.
    #[error(transparent)]
    Options(#[from] Error),
    /// The RPC port.
    #[error("cannot listen on {address}: {cause}; is another process using the port?")]
    Listen {
        /// Address asked for.
        address: Address,
        /// The system's reason.
        cause: std::io::Error,
    },
    /// Identity, log or quorum.
    #[error(transparent)]
    Raft(#[from] tidepool_raft::OpenError),
    /// Metrics registration: a bug.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Why a master stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// It was asked to.
    Shutdown,
    /// It left the quorum, which goes on without it.
    Removed(String),
    /// Its state is not the majority's: the process must start anew at once, and begins with the last agreed snapshot.
    Diverged(String),
    /// It cannot go on; the process must exit with an error.
    Fatal(String),
}

/// A running master. Cheap to clone.
#[derive(Clone)]
pub struct Master {
    service: Arc<Service>,
    node: MasterNode,
    registry: Registry,
    local: SocketAddr,
    stopped: Arc<watch::Sender<Option<Stopped>>>,
    closing: Arc<watch::Sender<bool>>,
}

impl Master {
    /// Opens the log, listens, and takes part in the quorum; returns when it does.
    pub async fn start(options: MasterOptions, log_filter: LogFilter) -> Result<Master, MasterError> {
        options.check()?;
        let listen_error = |cause| MasterError::Listen { address: options.listen.clone(), cause };
        let unknown =
            || Error::new(ErrorCode::InvalidParams, format!("no eviction policy '{}'", options.eviction_policy));
        let audit = AuditMetrics::new()?;
        let machine = Arc::new(Machine::new(&options.eviction_policy, audit).ok_or_else(unknown)?);
        let real = Node::open(options.raft(), machine.clone()).await?;
        let node = node::real(real.clone());
        let registry = Registry::new();
        let metrics = ServiceMetrics::register(&registry)?;
        machine.audit_metrics().register(&registry)?;
        let host = (options.listen.host(), options.listen.port());
        let listener = TcpListener::bind(host).await.map_err(listen_error)?;
        let local = listener.local_addr().map_err(listen_error)?;
        let service = Service::new(node.clone(), machine, options, metrics);
        let closing = Arc::new(watch::Sender::new(false));
        let stopped = Arc::new(watch::Sender::new(None));
        serve(&service, (listener, real.grpc()), log_filter, closing.clone(), stopped.clone());
        follow(&service, &closing, &stopped);
        node.run().await?;
        Ok(Master { service, node, registry, local, stopped, closing })
    }

    /// One that runs on a simulated machine: the same, without a socket.
    #[cfg(feature = "sim")]
    pub(super) fn assemble(
        node: MasterNode,
        machine: Arc<Machine>,
        options: MasterOptions,
    ) -> Result<Master, MasterError> {
        let registry = Registry::new();
        let metrics = ServiceMetrics::register(&registry)?;
        let local = SocketAddr::from(([127, 0, 0, 1], options.listen.port()));
        let service = Service::new(node.clone(), machine, options, metrics);
        let (closing, stopped) = (Arc::new(watch::Sender::new(false)), Arc::new(watch::Sender::new(None)));
        follow(&service, &closing, &stopped);
        Ok(Master { service, node, registry, local, stopped, closing })
    }

    /// What tests need beside the wire.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Where the RPC port listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }
    /// Cluster and history.
    pub fn identity(&self) -> ClusterIdentity {
        self.node.identity()
    }
    /// Whether it can do its work.
    pub fn readiness(&self) -> Readiness {
        readiness(&self.service)
    }
    /// HTTP routes of this master.
    pub fn routes(&self) -> axum::Router {
        super::http::routes(self.service.clone())
    }
    /// The service's metrics.
    pub fn metrics(&self) -> &Registry {
        &self.registry
    }
    /// The Raft node's metrics.
    pub fn raft_metrics(&self) -> &Registry {
        self.node.metrics()
    }
    /// Hands leadership over (M7).
    pub async fn transfer_leader(&self, to: Option<NodeId>) -> Result<NodeId, Error> {
        self.node.transfer_leader(to).await.map_err(refusal::transfer)
    }
    /// Resolves when it has stopped.
    pub async fn stopped(&self) -> Stopped {
        let mut stopped = self.stopped.subscribe();
        match stopped.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(Stopped::Shutdown),
            Err(_) => Stopped::Shutdown,
        }
    }

    /// Hands over if it leads (M7) and tells clients where to go, then writes a snapshot if one is due soon, then stops. Not both
    /// at once: a snapshot takes a processor that may be the one the next leader and its clients need in just that moment.
    pub async fn shutdown(&self) {
        if self.node.watch_leadership().borrow().role == Role::Leader {
            match rt::timeout(HANDOVER_WAIT, self.transfer_leader(None)).await {
                Ok(Ok(successor)) => {
                    tracing::info!(successor = successor.0, "handed leadership over");
                    rt::sleep(TELL_SUCCESSOR).await;
                }
                Ok(Err(error)) => tracing::warn!(%error, "could not hand leadership over; the others will elect"),
                Err(_) => tracing::warn!("handing leadership over took too long; the others will elect"),
            }
        }
        snapshots::at_stop(&self.service).await;
        self.service.set_tenure(None);
        match rt::timeout(LAST_SNAPSHOT_WAIT, self.node.compact_before_stop()).await {
            Ok(Ok(Some(index))) => tracing::info!(index, "snapshot written before the stop"),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "no snapshot before the stop; the next start replays more"),
            Err(_) => tracing::warn!("no snapshot within {LAST_SNAPSHOT_WAIT:?}; the next start replays more"),
        }
        self.closing.send_replace(true);
        self.node.shutdown().await;
        self.stopped.send_if_modified(|s| s.replace(Stopped::Shutdown).is_none());
    }
}

/// Starts what a master does beside answering.
fn follow(service: &Arc<Service>, closing: &watch::Sender<bool>, stopped: &Arc<watch::Sender<Option<Stopped>>>) {
    rt::spawn(office::follow(service.clone()));
    rt::spawn(gather::follow(service.clone()));
    rt::spawn(agreement::follow(service.clone(), closing.subscribe()));
    rt::spawn(refresh_gauges(service.clone(), closing.subscribe()));
    rt::spawn(keep_policies_warm(service.clone(), closing.subscribe()));
    rt::spawn(snapshots::follow(service.clone(), closing.subscribe()));
    let (fatal, report) = (service.node().clone(), stopped.clone());
    rt::spawn(async move {
        let cause = fatal.fatal().await;
        let reason = match cause {
            FatalError::Removed(why) => Stopped::Removed(why),
            FatalError::Diverged(why) => Stopped::Diverged(why),
            cause => Stopped::Fatal(cause.to_string()),
        };
        report.send_if_modified(|s| s.replace(reason).is_none());
    });
}

fn serve(
    service: &Arc<Service>,
    (listener, raft): (TcpListener, NodeService<Machine>),
    log_filter: LogFilter,
    closing: Arc<watch::Sender<bool>>,
    stopped: Arc<watch::Sender<Option<Stopped>>>,
) {
    let client =
        ClientServiceServer::new(ClientFace::new(service.clone())).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let nodes = NodeServiceServer::new(NodeFace::new(service.clone())).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let admin = AdminServiceServer::new(AdminFace::new(service.clone(), log_filter));
    let server = Server::builder()
        .tcp_nodelay(true)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_MAX))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .add_service(client)
        .add_service(nodes)
        .add_service(admin)
        .add_service(raft);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let mut close = closing.subscribe();
    rt::spawn(async move {
        let closed = async move {
            // Ends also when the master is dropped.
            let _closed = close.wait_for(|closing| *closing).await;
        };
        tokio::select! {
            biased;
            result = server.serve_with_incoming(incoming) => {
                if let Err(error) = result {
                    stopped.send_if_modified(|s| s.replace(Stopped::Fatal(format!("rpc server: {error}"))).is_none());
                }
            }
            () = closed => {}
        }
    });
}

/// Works off what the policies were told, so that little is left to do when victims are needed.
async fn keep_policies_warm(service: Arc<Service>, mut closing: watch::Receiver<bool>) {
    let mut ticks = rt::ticks(POLICY_INTERVAL);
    loop {
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => return,
            _ = ticks.tick() => {}
        }
        let dropped = service.evictor().catch_up();
        service.metrics().recency_dropped.inc_by(dropped);
    }
}

async fn refresh_gauges(service: Arc<Service>, mut closing: watch::Receiver<bool>) {
    let mut ticks = rt::ticks(GAUGE_INTERVAL);
    let mut unagreed = agreement::Unagreed::default();
    loop {
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => return,
            _ = ticks.tick() => {}
        }
        let metrics = service.metrics();
        let raft = service.node().status();
        for (figure, value) in [
            ("term", raft.leadership.term),
            ("last_log_index", raft.last_log_index),
            ("committed_index", raft.committed_index),
            ("applied_index", raft.applied_index),
            ("purged_index", raft.purged_index),
            ("snapshot_index", raft.snapshot_index),
        ] {
            metrics.raft.with_label_values(&[figure]).set(value as i64);
        }
        unagreed.look(&service);
        let snapshot = service.snapshots().status();
        metrics.snapshot_index.set(snapshot.published_index as i64);
        metrics.snapshot_age_seconds.set((snapshot.age_ms / 1000) as i64);
        metrics.snapshot_bytes.set(snapshot.bytes as i64);
        metrics.freeze_bytes.set(service.directory().freeze_bytes() as i64);
        metrics.objects.set(service.directory().counts().objects as i64);
        service.evictor().forget_tenants(|tenant| service.directory().tenant_view(tenant).is_some());
        metrics.policy_bytes.set(service.evictor().memory_bytes() as i64);
        for segment in service.directory().segments() {
            let name = &*segment.name;
            for (state, bytes) in [
                ("free", segment.free),
                ("processing", segment.processing),
                ("complete", segment.complete),
                ("retired", segment.retired),
            ] {
                metrics.segment_bytes.with_label_values(&[name, state]).set(bytes as i64);
            }
            metrics.largest_free_extent.with_label_values(&[name]).set(segment.largest_free as i64);
        }
    }
}
