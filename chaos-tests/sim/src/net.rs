//! The wires between all machines. gRPC goes over them as encoded frames of the real stubs; what a datanode's memory
//! takes and gives goes as chunks. Each message takes its time; some are late; a cut wire holds what is sent until it is mended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::{BodyExt, Full, StreamBody};
use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;
use tidepool_datanode::sim::SimulatedDatanode;
use tidepool_master::sim::{Exchange, Faces, Machine};
use tidepool_raft::sim::surroundings::{SimMachine, spawn_on};
use tidepool_raft::sim::{SplitMix, World};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use xxhash_rust::xxh3::xxh3_64;

use crate::params::Params;
use crate::trace::Trace;

/// How often a cut wire is looked at again.
const RETRANSMIT: Duration = Duration::from_millis(20);
/// Frames of an answer on their way.
const FRAMES: usize = 16;
/// Calls that are streams: one arrives once, or its connection is gone.
const STREAMS: [&str; 2] = ["/Session", "/Heartbeat"];

/// Who answers at an address.
#[derive(Clone)]
pub enum Port {
    /// A master.
    Master(Arc<SimMachine>, Faces),
    /// A datanode.
    Datanode(Arc<SimMachine>, Arc<SimulatedDatanode>),
}

impl Port {
    fn machine(&self) -> &Arc<SimMachine> {
        match self {
            Port::Master(machine, _) | Port::Datanode(machine, _) => machine,
        }
    }
}

/// The wires. Cheap to clone.
#[derive(Clone)]
pub struct Net {
    state: Arc<Mutex<State>>,
    /// What happened on them.
    pub trace: Trace,
    masters: World<Machine>,
}

struct State {
    ports: BTreeMap<String, Port>,
    owners: BTreeMap<String, u64>,
    cut: BTreeSet<(u64, u64)>,
    random: SplitMix,
    late: (u64, u64),
    /// Requests that arrive once more, in a thousand.
    twice: u64,
    /// Which ones: apart, so that the others take as long as they would.
    again: SplitMix,
    /// How often all masters were replaced by ones that know nothing of connections to those before.
    epoch: u64,
}

impl Net {
    /// All wires whole. Of a thousand messages some are late, and of a thousand requests some arrive twice.
    pub fn new(params: &Params, masters: World<Machine>, trace: Trace) -> Net {
        let (seed, late, twice) = (params.seed, params.late, params.twice);
        masters.set_twice(twice, Duration::from_millis(late.1));
        let state = State {
            ports: BTreeMap::new(),
            owners: BTreeMap::new(),
            cut: BTreeSet::new(),
            random: SplitMix::new(seed ^ 0x6e65_7400),
            late,
            twice,
            again: SplitMix::new(seed ^ 0x7477_6963_6500),
            epoch: 0,
        };
        Net { state: Arc::new(Mutex::new(state)), trace, masters }
    }

    /// Somebody listens.
    pub fn listen(&self, address: &str, owner: u64, port: Port) {
        let mut state = self.state.lock();
        state.owners.insert(address.to_owned(), owner);
        state.ports.insert(address.to_owned(), port);
    }

    /// Nobody listens any more.
    pub fn hang_up(&self, address: &str) {
        self.state.lock().ports.remove(address);
    }

    /// What one sends no longer reaches the other.
    pub fn cut(&self, from: u64, to: u64) {
        self.state.lock().cut.insert((from, to));
        self.masters.cut(from, to);
    }

    /// Both directions.
    pub fn part(&self, a: u64, b: u64) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// All connections to masters are gone for good: what is under way on one reaches nobody.
    pub fn begin_anew(&self) {
        self.state.lock().epoch += 1;
    }

    /// Which time all masters began with nothing.
    pub fn epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    /// Mends every wire.
    pub fn heal(&self) {
        self.state.lock().cut.clear();
        self.masters.heal();
    }

    /// From here on no message is late, and none comes twice.
    pub fn calm(&self) {
        let state = &mut *self.state.lock();
        (state.late, state.twice) = ((0, 1), 0);
        self.masters.set_twice(0, Duration::ZERO);
    }

    /// When a request arrives once more, if it does.
    fn again_after(&self) -> Option<Duration> {
        let state = &mut *self.state.lock();
        let is_one = state.twice > 0 && state.again.below(1_000) < state.twice;
        is_one.then(|| Duration::from_millis(state.again.range(1, state.late.1.max(1))))
    }

    fn is_cut(&self, from: u64, to: u64) -> bool {
        self.state.lock().cut.contains(&(from, to))
    }

    /// The way of one message.
    pub async fn travel(&self, from: u64, to: u64) {
        let delay_us = {
            let state = &mut *self.state.lock();
            let (share, late_ms) = state.late;
            match state.random.below(1_000) < share {
                true => state.random.range(1, late_ms.max(1)) * 1_000,
                false => state.random.range(80, 600),
            }
        };
        SimRuntime::sleep(Duration::from_micros(delay_us)).await;
        while self.is_cut(from, to) {
            SimRuntime::sleep(RETRANSMIT).await;
        }
    }

    /// Whose an address is.
    pub fn owner(&self, address: &str) -> Option<u64> {
        self.state.lock().owners.get(address).copied()
    }

    /// Who answers there now.
    pub fn port(&self, address: &str) -> Option<Port> {
        self.state.lock().ports.get(address).cloned()
    }

    /// A body whose frames travel.
    fn carried(&self, body: Body, from: u64, to: u64) -> Body {
        let net = self.clone();
        let frames = body.into_data_stream().then(move |frame| {
            let net = net.clone();
            async move {
                net.travel(from, to).await;
                if let Ok(data) = &frame {
                    net.trace.note("frame", (from, to), xxh3_64(data));
                }
                frame.map(http_body::Frame::data)
            }
        });
        Body::new(StreamBody::new(frames.boxed()))
    }

    /// One gRPC exchange. Whoever drops it takes nothing back: what was sent arrives, perhaps twice.
    pub fn exchange(&self, from: u64, address: &str, request: http::Request<Body>) -> Exchange {
        let (net, address, epoch) = (self.clone(), address.to_owned(), self.epoch());
        let is_stream = STREAMS.iter().any(|name| request.uri().path().ends_with(name));
        let after = if is_stream { None } else { net.again_after() };
        Box::pin(async move {
            let Some(after) = after else { return net.deliver(from, address, request, epoch).await };
            let (parts, body) = request.into_parts();
            let bytes = body.collect().await?.to_bytes();
            let whole = || http::Request::from_parts(parts.clone(), Body::new(Full::new(bytes.clone())));
            let (again, to, other) = (net.clone(), address.clone(), whole());
            drop(SimRuntime::spawn(async move {
                SimRuntime::sleep(after).await;
                // Nobody waits for its answer.
                drop(again.deliver(from, to, other, epoch).await);
            }));
            net.deliver(from, address, whole(), epoch).await
        })
    }

    /// Brings a request that was sent in this epoch to whoever is there, and its answer back.
    fn deliver(&self, from: u64, address: String, request: http::Request<Body>, epoch: u64) -> Exchange {
        let net = self.clone();
        Box::pin(async move {
            let refused = || Status::unavailable(format!("{address}: connection refused"));
            let to = net.owner(&address).ok_or_else(refused)?;
            net.travel(from, to).await;
            if net.epoch() != epoch {
                return Err(Status::unavailable(format!("{address}: connection reset")));
            }
            let port = net.port(&address).ok_or_else(refused)?;
            let Port::Master(machine, mut faces) = port else { return Err(refused()) };
            let (done, answer) = oneshot::channel();
            let request = request.map(|body| net.carried(body, from, to));
            spawn_on(&machine, async move {
                let path = request.uri().path().to_owned();
                let response = match path.split('/').nth(1) {
                    Some("tidepool.v1.ClientService") => faces.client.call(request).await,
                    Some("tidepool.v1.NodeService") => faces.node.call(request).await,
                    _ => faces.admin.call(request).await,
                };
                let Ok(response) = response;
                let (parts, mut body) = response.into_parts();
                let (frames, arriving) = mpsc::channel::<Result<http_body::Frame<Bytes>, Status>>(FRAMES);
                if done.send((parts, arriving)).is_err() {
                    return;
                }
                while let Some(frame) = body.frame().await {
                    if frames.send(frame).await.is_err() {
                        return;
                    }
                }
            });
            let (parts, arriving) = answer.await.map_err(|_| Status::unavailable("connection reset"))?;
            net.travel(to, from).await;
            let back = net.clone();
            let frames = ReceiverStream::new(arriving).then(move |frame| {
                let net = back.clone();
                async move {
                    net.travel(to, from).await;
                    if let Ok(data) = frame.as_ref().map(|frame| frame.data_ref()) {
                        net.trace.note("frame", (to, from), data.map_or(0, |data| xxh3_64(data)));
                    }
                    frame
                }
            });
            Ok(http::Response::from_parts(parts, Body::new(StreamBody::new(frames.boxed()))))
        })
    }

    /// Runs `work` on the machine that answers at an address, there and back; none: nobody answers, or it died meanwhile.
    pub async fn at<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        from: u64,
        address: &str,
        work: impl FnOnce(Arc<SimulatedDatanode>) -> F + Send + 'static,
    ) -> Option<T> {
        let to = self.owner(address)?;
        self.travel(from, to).await;
        let port = self.port(address)?;
        let machine = port.machine().clone();
        let Port::Datanode(_, node) = port else { return None };
        let (done, answer) = oneshot::channel();
        spawn_on(&machine, async move {
            // Whoever asked may be gone.
            let _gone = done.send(work(node).await);
        });
        let answer = answer.await.ok()?;
        self.travel(to, from).await;
        Some(answer)
    }
}

/// The gRPC way from one machine to an address.
#[derive(Clone)]
pub struct Channel {
    /// Over these wires.
    pub net: Net,
    /// From this machine.
    pub from: u64,
    /// To this address.
    pub address: String,
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Exchange;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Status>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Exchange {
        self.net.exchange(self.from, &self.address, request)
    }
}
