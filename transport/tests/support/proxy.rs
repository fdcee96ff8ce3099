//! A link between engine and server that can delay, pause and break.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidepool_proto::Address;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Forwards connections to one target.
pub struct Proxy {
    pub address: Address,
    pub socket: SocketAddr,
    state: Arc<State>,
}

struct State {
    delay: Duration,
    accepted: AtomicUsize,
    /// Bytes towards the client after which it pauses; `u64::MAX` never.
    pause_after: watch::Sender<u64>,
    forwarded: watch::Sender<u64>,
    broken: watch::Sender<bool>,
}

impl Proxy {
    /// Every byte arrives `delay` later, in both directions, however many are under way.
    pub async fn start(target: SocketAddr, delay: Duration) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = listener.local_addr().unwrap();
        let state = Arc::new(State {
            delay,
            accepted: AtomicUsize::new(0),
            pause_after: watch::Sender::new(u64::MAX),
            forwarded: watch::Sender::new(0),
            broken: watch::Sender::new(false),
        });
        let accepting = state.clone();
        tokio::spawn(async move {
            let mut broken = accepting.broken.subscribe();
            loop {
                let near = tokio::select! {
                    _ = broken.wait_for(|&broken| broken) => return,
                    accepted = listener.accept() => accepted.unwrap().0,
                };
                accepting.accepted.fetch_add(1, Ordering::SeqCst);
                let Ok(far) = TcpStream::connect(target).await else { continue };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                let (near_in, near_out) = near.into_split();
                let (far_in, far_out) = far.into_split();
                tokio::spawn(accepting.clone().carry(near_in, far_out, false));
                tokio::spawn(accepting.clone().carry(far_in, near_out, true));
            }
        });
        Proxy { address: socket.to_string().parse().unwrap(), socket, state }
    }

    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Stops forwarding to the client once `bytes` more have passed, until called with `u64::MAX`.
    pub fn pause_after(&self, bytes: u64) {
        let now = *self.state.forwarded.borrow();
        self.state.pause_after.send_replace(now.saturating_add(bytes));
    }

    /// Waits until the pause holds the bytes back.
    pub async fn paused(&self) {
        let limit = *self.state.pause_after.borrow();
        self.state.forwarded.subscribe().wait_for(|&n| n >= limit).await.unwrap();
    }

    /// Ends every connection and takes no more.
    pub fn cut(&self) {
        self.state.broken.send_replace(true);
    }
}

impl State {
    async fn carry(self: Arc<Self>, mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, to_client: bool) {
        let (send, mut receive) = mpsc::channel::<(Instant, Vec<u8>)>(4096);
        let delay = self.delay;
        let reader = async move {
            loop {
                let mut bytes = vec![0; 64 << 10];
                match from.read(&mut bytes).await {
                    Ok(n) if n > 0 => bytes.truncate(n),
                    _ => return,
                }
                if send.send((Instant::now() + delay, bytes)).await.is_err() {
                    return;
                }
            }
        };
        let writer = async {
            let mut pause = self.pause_after.subscribe();
            while let Some((due, bytes)) = receive.recv().await {
                tokio::time::sleep_until(due).await;
                let mut rest = &bytes[..];
                while to_client && !rest.is_empty() {
                    let now = *self.forwarded.borrow();
                    let room = pause.borrow().saturating_sub(now).min(rest.len() as u64) as usize;
                    if room == 0 {
                        pause.wait_for(|&limit| limit > now).await.unwrap();
                        continue;
                    }
                    if to.write_all(&rest[..room]).await.is_err() {
                        return;
                    }
                    self.forwarded.send_modify(|n| *n += room as u64);
                    rest = &rest[room..];
                }
                if !to_client && to.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        };
        let mut broken = self.broken.subscribe();
        tokio::select! {
            _ = broken.wait_for(|&broken| broken) => {}
            ((), ()) = futures::future::join(reader, writer) => {}
        }
    }
}
