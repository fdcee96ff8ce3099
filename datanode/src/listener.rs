//! The one port: the first four bytes tell the data plane (`TPDP`) from gRPC (`PRI `); anything else is closed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tidepool_transport::tcp::{MAGIC, TcpServer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::metrics::Metrics;
use crate::options::DatanodeLimits;

/// First bytes of an HTTP/2 connection, as gRPC clients open.
const HTTP2_PREFACE: [u8; 4] = *b"PRI ";
/// Pause after a failed accept: usually out of file descriptors, which only time cures.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Pause between looks at a connection that sent fewer than four bytes.
const PARTIAL_PAUSE: Duration = Duration::from_millis(5);

pub(crate) struct Listener {
    pub(crate) socket: TcpListener,
    pub(crate) data: TcpServer,
    pub(crate) rpc: mpsc::Sender<io::Result<RpcStream>>,
    pub(crate) limits: DatanodeLimits,
    pub(crate) metrics: Arc<Metrics>,
}

impl Listener {
    /// Accepts until dropped.
    pub(crate) async fn run(self) {
        let greeting = Arc::new(Semaphore::new(self.limits.greeting_connections_max));
        let rpc_permits = Arc::new(Semaphore::new(self.limits.rpc_connections_max));
        let shared = Arc::new(self);
        let mut failing = false;
        loop {
            let stream = match shared.socket.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if !failing {
                        tracing::warn!(%error, "cannot accept connections; trying on");
                    }
                    failing = true;
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            failing = false;
            let Ok(permit) = greeting.clone().try_acquire_owned() else {
                shared.refuse("greeting_connections_max");
                continue;
            };
            let (shared, rpc_permits) = (shared.clone(), rpc_permits.clone());
            tokio::spawn(async move {
                shared.sort(stream, rpc_permits).await;
                drop(permit);
            });
        }
    }

    /// Gives the connection to whom its first bytes are for.
    async fn sort(&self, stream: TcpStream, rpc_permits: Arc<Semaphore>) {
        let first = match tokio::time::timeout(self.limits.greeting_timeout, first_bytes(&stream)).await {
            Ok(Ok(first)) => first,
            Ok(Err(_)) => return self.refuse("closed_early"),
            Err(_) => return self.refuse("silent"),
        };
        match first {
            MAGIC => {
                self.metrics.connections.with_label_values(&["data"]).inc();
                self.data.serve(stream);
            }
            HTTP2_PREFACE => {
                let Ok(permit) = rpc_permits.try_acquire_owned() else { return self.refuse("rpc_connections_max") };
                self.metrics.connections.with_label_values(&["rpc"]).inc();
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "TCP_NODELAY not set");
                }
                // Fails only when the gRPC server is gone, that is while stopping.
                if self.rpc.send(Ok(RpcStream { stream, _permit: permit })).await.is_err() {
                    self.refuse("stopping");
                }
            }
            _ => self.refuse("not_our_protocol"),
        }
    }

    fn refuse(&self, reason: &str) {
        self.metrics.connections_refused.with_label_values(&[reason]).inc();
    }
}

/// Peeks, so that whoever serves the connection reads its protocol from the start.
async fn first_bytes(stream: &TcpStream) -> io::Result<[u8; 4]> {
    let mut first = [0u8; 4];
    loop {
        match stream.peek(&mut first).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            4 => return Ok(first),
            // Readable stays true while bytes wait, so wait for more by the clock.
            _ => tokio::time::sleep(PARTIAL_PAUSE).await,
        }
    }
}

/// A gRPC connection and its place under the limit.
pub(crate) struct RpcStream {
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
}

impl Connected for RpcStream {
    type ConnectInfo = TcpConnectInfo;
    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for RpcStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for RpcStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
