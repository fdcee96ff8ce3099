//! The HTTP port of a role: health, metrics and log level for every role, and the role's own routes once it is up.
//! It answers from the first moment of the process, so that a role that waits for its quorum is seen to wait.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use prometheus::TextEncoder;
use prometheus::proto::MetricFamily;
use serde_json::{Value, json};
use tidepool_proto::Address;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::logging::LogControl;
use crate::process::ProcessMetrics;

/// Connections served at a time; more wait in the kernel's accept queue.
pub const CONNECTIONS_MAX: usize = 256;
/// A connection on which nothing moved for this long is closed, so that silent peers cannot hold every slot.
pub const IDLE_MAX: Duration = Duration::from_secs(60);
/// Largest request body.
pub const BODY_BYTES_MAX: usize = 64 << 10;

/// Whether a role can do its work.
pub struct Ready {
    /// It can.
    pub ready: bool,
    /// Everything known, for `?verbose`.
    pub report: Value,
    /// Why not, in a sentence.
    pub reason: String,
}

/// What a role shows over HTTP.
pub struct RoleFace {
    /// Routes beside those of every role.
    pub routes: Router,
    /// Its metrics, now.
    pub metrics: Box<dyn Fn() -> Vec<MetricFamily> + Send + Sync>,
    /// Its readiness, now.
    pub ready: Box<dyn Fn() -> Ready + Send + Sync>,
}

struct Shared {
    face: OnceLock<RoleFace>,
    log: LogControl,
    process: ProcessMetrics,
}

/// A running HTTP port.
pub struct HttpPort {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl HttpPort {
    /// Binds `host:port`. The error names the address and the setting to change.
    pub async fn start(host: &Address, port: u16, setting: &str, log: LogControl) -> anyhow::Result<HttpPort> {
        let wanted = host.with_port(port);
        let listener = TcpListener::bind((wanted.host().to_owned(), port))
            .await
            .with_context(|| format!("cannot listen for HTTP on {wanted}; choose another port with {setting}"))?;
        let address = listener.local_addr().with_context(|| format!("HTTP port {wanted} has no local address"))?;
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let listener = Bounded { listener, slots: Arc::new(Semaphore::new(CONNECTIONS_MAX)) };
        let shared = Arc::new(Shared { face: OnceLock::new(), log, process: ProcessMetrics::new()? });
        let routes = routes(shared.clone());
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(stopped).await {
                tracing::error!(%error, "the HTTP port stopped serving");
            }
        });
        tracing::info!(%address, "HTTP is up");
        Ok(HttpPort { address, shared, stop, task })
    }

    /// Shows a role that is up; the first one stays.
    pub fn attach(&self, face: RoleFace) {
        self.shared.face.get_or_init(|| face);
    }

    /// Stops accepting and ends the task; connections that do not end by themselves are dropped.
    pub async fn stop(self) {
        self.stop.cancel();
        let abort = self.task.abort_handle();
        if tokio::time::timeout(Duration::from_secs(1), self.task).await.is_err() {
            abort.abort();
        }
    }
}

fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/api/v1/log-level", get(log_level).post(set_log_level))
        .fallback(role_route)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

/// 200 when it can do its work, else 503. `?verbose` says all that is known, as JSON.
async fn readyz(State(shared): State<Arc<Shared>>, Query(query): Query<Vec<(String, String)>>) -> Response {
    let ready = match shared.face.get() {
        Some(face) => (face.ready)(),
        None => {
            let reason = "starting: the role is not up yet".to_owned();
            Ready { ready: false, report: json!({"ready": false, "reason": reason}), reason }
        }
    };
    let code = if ready.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if query.iter().any(|(name, _)| name == "verbose") {
        let body = format!("{:#}\n", ready.report);
        return (code, [(header::CONTENT_TYPE, "application/json")], body).into_response();
    }
    let body = if ready.ready { "ok\n".to_owned() } else { format!("not ready: {}\n", ready.reason) };
    (code, body).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let mut families = shared.process.gather();
    if let Some(face) = shared.face.get() {
        families.extend((face.metrics)());
    }
    match TextEncoder::new().encode_to_string(&families) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("metrics cannot be encoded: {error}\n")).into_response()
        }
    }
}

async fn log_level(State(shared): State<Arc<Shared>>) -> String {
    shared.log.current() + "\n"
}

async fn set_log_level(State(shared): State<Arc<Shared>>, filter: String) -> Response {
    match shared.log.set(filter.trim()) {
        Ok(()) => (shared.log.current() + "\n").into_response(),
        Err(why) => (StatusCode::BAD_REQUEST, why + "\n").into_response(),
    }
}

async fn role_route(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.face.get() {
        Some(face) => match face.routes.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
        None => (StatusCode::SERVICE_UNAVAILABLE, "starting: the role is not up yet\n").into_response(),
    }
}

/// A listener that holds a slot for each open connection.
struct Bounded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let slot = self.slots.clone().acquire_owned().await.ok();
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        (Connection { stream, idle: Box::pin(tokio::time::sleep(IDLE_MAX)), _slot: slot }, peer)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection, its slot, and when it has been silent for too long.
struct Connection {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _slot: Option<OwnedSemaphorePermit>,
}

impl Connection {
    fn moved<T>(&mut self, result: Poll<std::io::Result<T>>) -> Poll<std::io::Result<T>> {
        if result.is_ready() {
            self.idle.as_mut().reset(Instant::now() + IDLE_MAX);
        }
        result
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if result.is_pending() && self.idle.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(std::io::ErrorKind::TimedOut.into()));
        }
        self.moved(result)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.moved(result)
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
