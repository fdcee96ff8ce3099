//! Start, handle, stop.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::v1::datanode_service_server::DatanodeServiceServer;
use tidepool_proto::{Address, Incarnation, NodeId};
use tidepool_transport::tcp::{DataIdentity, TcpServer, TcpServerOptions};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use crate::describe::Describe;
use crate::identity::{IdentityError, IdentityStore};
use crate::life::Life;
use crate::listener::Listener;
use crate::masters::{MEMBERS_MAX, Masters};
use crate::membership::{Membership, Standing, StopReason, Wish, create_segments};
use crate::metrics::Metrics;
use crate::options::DatanodeOptions;
use crate::payload::Payload;
use crate::segment::SegmentError;

/// Segments one node may lend.
pub const SEGMENTS_MAX: usize = 1024;
/// A datanode whose last answered beat is older is not ready.
const READY_BEAT_AGE_MAX: Duration = Duration::from_secs(5);
/// How long connections that do not close by themselves may delay a stop.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// gRPC connections that wait to be taken up.
const RPC_BACKLOG: usize = 16;

/// Why a datanode did not start.
#[derive(Debug, thiserror::Error)]
pub enum DatanodeError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A segment cannot be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// An option is out of its range.
    #[error("{0}")]
    Options(String),
    /// The listen address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Address.
        address: Address,
        /// Why not.
        source: io::Error,
    },
    /// Two metrics have one name: a bug.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Whether this node can serve, and what it waits for if not.
#[derive(Clone, Debug, Serialize)]
pub struct Readiness {
    /// Registered, mounted, and heard by a leader lately.
    pub ready: bool,
    /// What it is doing, for people.
    pub doing: String,
    /// 0 until registered.
    pub node_id: u64,
    /// 0 until registered.
    pub incarnation: u64,
    /// Segments mounted.
    pub segments: usize,
    /// Capacity mounted.
    pub bytes: u64,
    /// Of it with pages in place.
    pub prefaulted_bytes: u64,
    /// The leader it follows.
    pub leader: Option<String>,
    /// Highest term heard.
    pub term: u64,
    /// Log time, as far as known.
    pub log_time_ms: u64,
    /// Since the last answered beat; none before the first.
    pub last_beat_age_ms: Option<u64>,
}

struct Inner {
    address: Address,
    payload: Arc<Payload>,
    metrics: Arc<Metrics>,
    standing: Arc<Mutex<Standing>>,
    wish: watch::Sender<Wish>,
    stopped: watch::Receiver<Option<StopReason>>,
    server: TcpServer,
}

/// A running datanode. Cheap to clone; when the last clone is dropped it stops without leaving, as if killed.
#[derive(Clone)]
pub struct Datanode {
    inner: Arc<Inner>,
}

impl Datanode {
    /// Takes the data directory, makes the segments, listens, and goes on to register in the background: the masters need not be up
    /// yet. Must be called within a tokio runtime.
    pub async fn start(mut options: DatanodeOptions) -> Result<Datanode, DatanodeError> {
        check(&options)?;
        let store = IdentityStore::open(&options.data_dir)?;
        let segments = create_segments(&options)?;
        let metrics = Arc::new(Metrics::new()?);
        let listen_failed = |source| DatanodeError::Listen { address: options.listen.clone(), source };
        let socket = TcpListener::bind((options.listen.host(), options.listen.port())).await.map_err(listen_failed)?;
        let port = socket.local_addr().map_err(listen_failed)?.port();
        let advertise = options.advertise.clone().unwrap_or_else(|| options.listen.clone());
        let advertise = if advertise.port() == 0 { advertise.with_port(port) } else { advertise };
        let multi_host = options.masters.iter().any(|master| !master.is_loopback());
        advertise.check_advertisable(multi_host, "--advertise").map_err(|e| DatanodeError::Options(e.to_string()))?;
        if options.host_id.is_empty() {
            options.host_id = advertise.host().to_owned();
        }

        let payload = Arc::new(Payload::new(metrics.clone()));
        let server_options = TcpServerOptions {
            connections_max: options.limits.data_connections_max,
            ..TcpServerOptions::new(DataIdentity::default())
        };
        let server = TcpServer::new(server_options, payload.clone());
        let standing = Arc::new(Mutex::new(Standing { doing: "starting".into(), ..Standing::default() }));
        let (wish, wishes) = watch::channel(Wish::Run);
        let (stop, stopped) = watch::channel(None);
        let membership = Membership {
            masters: Masters::new(options.masters.clone(), options.timing),
            advertise: advertise.clone(),
            store,
            payload: payload.clone(),
            server: server.clone(),
            metrics: metrics.clone(),
            standing: standing.clone(),
            wish: wishes,
            options: options.clone(),
        };
        let (rpc, rpc_streams) = mpsc::channel(RPC_BACKLOG);
        let listener = Listener { socket, data: server.clone(), rpc, limits: options.limits, metrics: metrics.clone() };
        tracing::info!(%advertise, segments = options.segments.len(), data_dir = %options.data_dir.display(), "datanode starts");
        let service = DatanodeServiceServer::new(Describe { payload: payload.clone() });
        let handle_server = server.clone();
        tokio::spawn(async move {
            let accepting = tokio::spawn(listener.run());
            let answering = tokio::spawn(serve_rpc(service, ReceiverStream::new(rpc_streams)));
            let reason = membership.run(segments).await;
            accepting.abort();
            answering.abort();
            if tokio::time::timeout(CLOSE_TIMEOUT, server.shutdown()).await.is_err() {
                tracing::warn!("data connections did not close in time");
            }
            tracing::info!(%reason, "datanode stopped");
            // Fails only when every handle is gone: nobody asks any more.
            let _ = stop.send(Some(reason));
        });
        Ok(Datanode {
            inner: Arc::new(Inner {
                address: advertise,
                payload,
                metrics,
                standing,
                wish,
                stopped,
                server: handle_server,
            }),
        })
    }

    /// The address others dial.
    pub fn address(&self) -> &Address {
        &self.inner.address
    }

    /// Node id, once registered.
    pub fn node_id(&self) -> Option<NodeId> {
        self.life().map(|life| life.registration().node)
    }

    /// Current incarnation, once registered.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.life().map(|life| life.registration().incarnation)
    }

    pub(crate) fn life(&self) -> Option<Arc<Life>> {
        self.inner.payload.life()
    }

    /// Whether it can serve.
    pub fn readiness(&self) -> Readiness {
        let life = self.life();
        let standing = self.inner.standing.lock().clone();
        let age = standing.last_beat.map(|beat| Instant::now().saturating_duration_since(beat));
        let patience = READY_BEAT_AGE_MAX.max(standing.heartbeat_interval * 10);
        let segments = || life.iter().flat_map(|life| life.segments().values());
        Readiness {
            ready: life.is_some() && age.is_some_and(|age| age <= patience),
            doing: standing.doing,
            node_id: life.as_ref().map_or(0, |life| life.registration().node.0),
            incarnation: life.as_ref().map_or(0, |life| life.registration().incarnation.0),
            segments: segments().count(),
            bytes: segments().map(|s| s.bytes()).sum(),
            prefaulted_bytes: segments().map(|s| s.prefaulted_bytes()).sum(),
            leader: standing.leader.map(|leader| leader.to_string()),
            term: life.as_ref().map_or(0, |life| life.writes().clock().term()),
            log_time_ms: life.as_ref().map_or(0, |life| life.writes().clock().at(BootInstant::now()).0),
            last_beat_age_ms: age.map(|age| age.as_millis() as u64),
        }
    }

    /// Routes of this node: `/get_all_segments`, `/api/v1/segments`, `/api/v1/node`.
    pub fn routes(&self) -> axum::Router {
        crate::http::routes(self.clone())
    }

    /// Metrics of this node, brought up to date.
    pub fn metrics(&self) -> &prometheus::Registry {
        let metrics = &self.inner.metrics;
        if let Some(life) = self.life() {
            let figures = life.writes().figures();
            metrics.open_writes.set(figures.open as i64);
            metrics.ended_grants.set(figures.ended as i64);
            metrics.fenced_replicas.set(figures.fenced as i64);
            metrics.fences_unacknowledged.set(figures.unacknowledged as i64);
        }
        let data_plane = self.inner.server.stats();
        metrics.data_connections_open.set(data_plane.connections_open as i64);
        // Under the lock, so that two scrapes at once do not both add the same difference.
        let standing = self.inner.standing.lock();
        if let Some(beat) = standing.last_beat {
            metrics.last_beat_age_seconds.set(beat.elapsed().as_secs_f64());
        }
        catch_up(&metrics.bad_frames, data_plane.bad_frames);
        catch_up(&metrics.discarded_bytes, data_plane.bytes_discarded);
        drop(standing);
        &metrics.registry
    }

    /// Resolves when it has stopped, with the reason. After `Fenced` and `Fatal` the process must exit.
    pub async fn stopped(&self) -> StopReason {
        let mut stopped = self.inner.stopped.clone();
        match stopped.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().expect("waited for"),
            // The task was torn down with its runtime.
            Err(_) => StopReason::Shutdown,
        }
    }

    /// Leaves gracefully: unmounts everything, then closes. Returns when it has stopped.
    pub async fn shutdown(&self) -> StopReason {
        self.inner.wish.send_replace(Wish::Leave);
        self.stopped().await
    }

    /// Stops without a word to the masters, as a killed process would.
    pub async fn vanish(&self) -> StopReason {
        self.inner.wish.send_replace(Wish::Vanish);
        self.stopped().await
    }
}

fn catch_up(counter: &prometheus::IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

async fn serve_rpc(
    service: DatanodeServiceServer<Describe>,
    streams: ReceiverStream<io::Result<crate::listener::RpcStream>>,
) {
    let served = tonic::transport::Server::builder()
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(1 << 20)
        .max_concurrent_streams(64)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .timeout(Duration::from_secs(10))
        .add_service(service)
        .serve_with_incoming(streams)
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the control service stopped");
    }
}

fn check(options: &DatanodeOptions) -> Result<(), DatanodeError> {
    let bad = |what: String| Err(DatanodeError::Options(what));
    if options.masters.is_empty() || options.masters.len() > MEMBERS_MAX {
        return bad(format!("{} masters given; name 1 to {MEMBERS_MAX} with --masters", options.masters.len()));
    }
    if options.segments.is_empty() || options.segments.len() > SEGMENTS_MAX {
        return bad(format!(
            "{} segments of DRAM given; lend 1 to {SEGMENTS_MAX}, of larger size if need be (--dram)",
            options.segments.len()
        ));
    }
    crate::host_memory::check(&options.segments).map_err(DatanodeError::Options)?;
    Ok(())
}
