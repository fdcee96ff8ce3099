//! Delay, jitter, throttling and stalls of a role's connections. In namespaces by a process of its own within the role's: what is
//! sent to the role's port is redirected there, passed on after its delay, and nobody needs to know. Without them by the role's
//! proxy.

use std::collections::VecDeque;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::process::ChildStdin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;
use rand::Rng;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::Lab;
use super::network::{Network, Proxies};
use crate::process::{Input, Launch, Lifetime, Process};
use crate::worker::WorkerSpec;

/// Port that the relay listens on within the role's namespace.
const PORT: u16 = 6_000;
/// Bytes taken at once.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks under way in one direction; then the sender waits.
const CHUNKS_MAX: usize = 256;

/// What a relay does to each direction of a connection.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct RelaySettings {
    /// Added to every chunk.
    pub delay_ms: u64,
    /// Added on top, drawn evenly; order is kept.
    pub jitter_ms: u64,
    /// Bytes a second; 0: as many as there are.
    pub bytes_per_s: u64,
    /// Nothing passes; connections stay.
    pub stalled: bool,
}

/// A relay process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelaySpec {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where it passes on to.
    pub to: SocketAddr,
}

/// A running relay in front of one port of a role.
pub struct Relay {
    name: String,
    kind: Kind,
}

enum Kind {
    Process { process: Process, input: ChildStdin },
    Proxy(Proxies),
}

impl Relay {
    /// Puts it in front of `port` of the role `name`. Connections that were there before are not affected.
    pub fn start(lab: &Lab, binary: &std::path::Path, name: &str, port: u16) -> Result<Relay> {
        let links = match lab.network() {
            Network::Namespaces(links) => links,
            Network::Proxies(proxies) => {
                return Ok(Relay { name: name.to_owned(), kind: Kind::Proxy(proxies.clone()) });
            }
        };
        let host = links.add_host(name)?;
        let spec = RelaySpec { listen: SocketAddr::new(host.ip, PORT), to: SocketAddr::new(host.ip, port) };
        let launch = Launch {
            name: format!("relay-{name}"),
            binary: binary.to_owned(),
            arguments: vec!["load-worker".into(), serde_json::to_string(&WorkerSpec::Relay(spec))?],
            environment: Vec::new(),
            namespace: Some(host.namespace),
            log: lab.directory().join(format!("relay-{name}.log")),
        };
        let mut process = Process::spawn(&launch, Lifetime::WithOwner, Input::Pipe)?;
        let input = process.take_input().ok_or_else(|| anyhow!("the relay has no standard input"))?;
        links.in_namespace(
            name,
            &format!(
                "table ip tidepool {{\n  chain arrive {{\n    type nat hook prerouting priority -100;\n    tcp dport {port} counter redirect to :{PORT}\n  }}\n}}\n"
            ),
        )?;
        Ok(Relay { name: name.to_owned(), kind: Kind::Process { process, input } })
    }

    /// From now on.
    pub fn set(&mut self, settings: RelaySettings) -> Result<()> {
        match &mut self.kind {
            Kind::Process { input, .. } => {
                let mut line = serde_json::to_vec(&settings)?;
                line.push(b'\n');
                input.write_all(&line).context("telling a relay")
            }
            Kind::Proxy(proxies) => {
                proxies.relay(&self.name, settings);
                Ok(())
            }
        }
    }

    /// How many connections go through it; fails when none does.
    pub fn evidence(&mut self, lab: &Lab) -> Result<String> {
        let through = match (&mut self.kind, lab.network()) {
            (Kind::Process { process, .. }, Network::Namespaces(links)) => {
                process.expect_running()?;
                links.redirected(&self.name)?
            }
            (Kind::Proxy(proxies), _) => proxies.joined(&self.name),
            (Kind::Process { .. }, Network::Proxies(_)) => bail!("the relay of {} is of another laboratory", self.name),
        };
        match through {
            0 => bail!("no connection to {} went through its relay", self.name),
            count => Ok(format!("{count} connections to {} went through its relay", self.name)),
        }
    }
}

/// Is a relay until standard input closes.
pub fn serve(spec: &RelaySpec) -> Result<()> {
    let settings = Arc::new(Mutex::new(RelaySettings::default()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (listen, to, shared) = (spec.listen, spec.to, settings.clone());
    runtime.block_on(async move {
        let listener = TcpListener::bind(listen).await.with_context(|| format!("relay at {listen}"))?;
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(join(near, to, shared.clone(), shared.clone()));
            }
        });
        tokio::task::spawn_blocking(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(new) => *settings.lock() = new,
                    Err(error) => eprintln!("not settings: {error}: {line}"),
                }
            }
        })
        .await?;
        anyhow::Ok(())
    })
}

/// What one direction of a connection asks before it passes anything on.
pub(super) trait Pass: Send {
    /// What to do with what comes now.
    fn settings(&self) -> RelaySettings;
    /// Told of each look at bytes that wait behind a stall.
    fn held(&self) {}
    /// Told of each chunk that has to wait for those before it.
    fn queued(&self) {}
}

impl Pass for Arc<Mutex<RelaySettings>> {
    fn settings(&self) -> RelaySettings {
        *self.lock()
    }
}

/// Passes everything between a connection and one to `to`, until either ends.
pub(super) async fn join(near: TcpStream, to: SocketAddr, there: impl Pass, back: impl Pass) {
    let Ok(far) = TcpStream::connect(to).await else { return };
    // Fails where the other end is gone already; then so does the first read.
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::select! {
        () = pass(near_in, far_out, there) => {}
        () = pass(far_in, near_out, back) => {}
    }
}

/// One direction, until its end; chunks wait their time in order.
async fn pass(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, rules: impl Pass) {
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut ended = false;
    let mut last_due = Instant::now();
    loop {
        if rules.settings().stalled {
            // A stall has no end that could be waited for: it is looked at again.
            tokio::time::sleep(Duration::from_millis(5)).await;
            if matches!(tokio::time::timeout(Duration::ZERO, from.peek(&mut [0])).await, Ok(Ok(1))) {
                rules.held();
            }
            continue;
        }
        let next = under_way.front().map(|(due, _)| *due);
        if ended && next.is_none() {
            return;
        }
        let mut chunk = vec![0; CHUNK_BYTES];
        tokio::select! {
            got = from.read(&mut chunk), if !ended && under_way.len() < CHUNKS_MAX => match got {
                Ok(0) | Err(_) => ended = true,
                Ok(length) => {
                    chunk.truncate(length);
                    let now = rules.settings();
                    let jitter = if now.jitter_ms == 0 { 0 } else { rand::rng().random_range(0..now.jitter_ms) };
                    let sending = (length as u64 * 1_000_000).checked_div(now.bytes_per_s).unwrap_or(0);
                    let due = Instant::now() + Duration::from_millis(now.delay_ms + jitter);
                    if now.bytes_per_s > 0 && last_due > due {
                        rules.queued();
                    }
                    last_due = due.max(last_due + Duration::from_micros(sending));
                    under_way.push_back((last_due, chunk));
                }
            },
            () = tokio::time::sleep_until(next.unwrap_or(last_due)), if next.is_some() => {
                if let Some((_, chunk)) = under_way.pop_front()
                    && to.write_all(&chunk).await.is_err()
                {
                    return;
                }
            }
        }
    }
}
