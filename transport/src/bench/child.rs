//! The benchmark's second process: serves the engine and the raw ceiling over memory of its own.

use std::io::{self, BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use tidepool_proto::{Address, Incarnation, NodeId};

use super::{REGION_BYTES, identity, raw};
use crate::conformance::TestMemory;
use crate::tcp::{DataIdentity, TcpServer, TcpServerOptions};

/// Set in the second process.
const MARK: &str = "TIDEPOOL_TRANSPORT_BENCH_SERVER";

/// The second process, as the first sees it; it ends when this is dropped.
pub(super) struct Server {
    child: Child,
    pub(super) engine: Address,
    pub(super) raw: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends at the end of its input.
        let _status = self.child.wait();
    }
}

/// Starts this executable again, as the server.
pub(super) fn start() -> io::Result<Server> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(MARK, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let out = child.stdout.take().ok_or_else(|| io::Error::other("the server process has no output"))?;
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line)?;
    let (engine, raw) = line.trim().split_once(' ').ok_or_else(|| io::Error::other(format!("server said '{line}'")))?;
    Ok(Server { engine: engine.parse().map_err(io::Error::other)?, raw: raw.parse().map_err(io::Error::other)?, child })
}

/// In the second process: serves until its input ends, then ends the process.
pub(super) fn serve_if_child() -> io::Result<()> {
    if std::env::var_os(MARK).is_none() {
        return Ok(());
    }
    let memory = TestMemory::new(REGION_BYTES);
    memory.fill(0, &vec![1; REGION_BYTES]);
    let raw_listener = TcpListener::bind("127.0.0.1:0")?;
    let raw_address = raw_listener.local_addr()?;
    raw::serve(raw_listener);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    let identity = DataIdentity { node: NodeId(1), incarnation: Incarnation(1), ..identity() };
    let server = TcpServer::new(TcpServerOptions::new(identity), memory);
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            server.serve(stream);
        }
    });
    println!("{address} {raw_address}");
    io::stdin().read_to_end(&mut Vec::new())?;
    std::process::exit(0);
}
