//! A tcp server on port 0 with its accept loop, as the datanode has one.
#![allow(dead_code)]

pub mod proxy;

use std::net::SocketAddr;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use tidepool_proto::{Address, ClusterId, History, Incarnation, NodeId};
use tidepool_transport::conformance::{Factory, Pair, Server};
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions, TcpServer, TcpServerOptions};
use tidepool_transport::{Engine, Memory};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub fn identity(node: u64) -> DataIdentity {
    let incarnation = Incarnation(if node == 0 { 0 } else { 7 });
    DataIdentity { cluster: ClusterId([1; 16]), history: History(2), node: NodeId(node), incarnation }
}

/// For tests of the stripes alone.
pub fn options() -> TcpOptions {
    TcpOptions { near_bytes_max: 0, ..options_with_near() }
}

pub fn options_with_near() -> TcpOptions {
    // A loaded test machine may take its time to accept.
    TcpOptions { connect_timeout: std::time::Duration::from_secs(10), ..TcpOptions::new(identity(0)) }
}

/// A served memory.
pub struct Served {
    pub server: TcpServer,
    pub socket: SocketAddr,
    pub address: Address,
    accepting: JoinHandle<()>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Served {
    pub async fn start(memory: Arc<dyn Memory>) -> Served {
        Served::with(TcpServerOptions::new(identity(1)), memory).await
    }

    pub async fn with(options: TcpServerOptions, memory: Arc<dyn Memory>) -> Served {
        let server = TcpServer::new(options, memory);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = listener.local_addr().unwrap();
        let accepting = tokio::spawn({
            let server = server.clone();
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    server.serve(stream);
                }
            }
        });
        Served { server, socket, address: socket.to_string().parse().unwrap(), accepting }
    }

    /// Stops listening and drops every connection.
    pub fn kill(&self) {
        self.accepting.abort();
        self.server.close_all();
    }
}

struct Serving(Served);

impl Server for Serving {
    fn kill(&self) {
        self.0.kill();
    }
}

/// Pairs over loopback.
pub struct TcpFactory;

impl Factory for TcpFactory {
    fn pair(&self, memory: Arc<dyn Memory>) -> BoxFuture<'_, Pair> {
        async move {
            let served = Served::start(memory).await;
            let engine: Arc<dyn Engine> = Arc::new(TcpEngine::new(options_with_near()));
            let peer = served.address.clone();
            Pair { engine, peer, server: Box::new(Serving(served)) }
        }
        .boxed()
    }
}
