//! The simulated wires: encoded bytes between members of one process, delayed, cut in one direction or both.
//!
//! Each end runs on its own machine, as two processes do: what a member answers is worked out by tasks of the machine that it
//! was started on. One that dies takes its half of a call with it, and nothing of whoever called.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::channel::{mpsc, oneshot};
use futures::stream::BoxStream;
use futures::{FutureExt, SinkExt, StreamExt, stream};
use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode, v1};

use super::random::SplitMix;
use super::surroundings::{self, SimMachine, spawn_on};
use crate::identity::IdentityStore;
use crate::inbound::Inbound;
use crate::machine::StateMachine;
use crate::network::{Call, Lane, Link, LinkError, Network};
use crate::snapshot::Feed;
use crate::types::{NodeId, SimConfig};

/// How often a cut wire is looked at again.
const RETRANSMIT: Duration = Duration::from_millis(20);
const CHUNK_BYTES: usize = 64 << 10;
/// Append requests, or answers, that lie between a wire and the task that takes them.
const BUFFERED: usize = 16;

/// A member as the wires see it.
struct Door<M: StateMachine> {
    inbound: Inbound<SimConfig<<M as StateMachine>::Outcome>, M>,
    /// The machine that it runs on; none: one that never dies or stops.
    machine: Option<Arc<SimMachine>>,
}

impl<M: StateMachine> Clone for Door<M> {
    fn clone(&self) -> Self {
        Door { inbound: self.inbound.clone(), machine: self.machine.clone() }
    }
}

impl<M: StateMachine> Door<M> {
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        match &self.machine {
            Some(machine) => spawn_on(machine, work),
            None => drop(SimRuntime::spawn(work)),
        }
    }

    /// What the member's machine comes to; none if it died over it.
    async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (done, answer) = oneshot::channel();
        self.spawn(async move {
            // Whoever asked may have given up.
            let _gone = done.send(work.await);
        });
        answer.await.ok()
    }
}

/// The wires of all members, and who listens at their ends. Cheap to clone.
pub struct World<M: StateMachine> {
    state: Arc<Mutex<State<M>>>,
}

impl<M: StateMachine> Clone for World<M> {
    fn clone(&self) -> Self {
        World { state: self.state.clone() }
    }
}

struct State<M: StateMachine> {
    listening: BTreeMap<NodeId, Door<M>>,
    addresses: BTreeMap<String, NodeId>,
    cut: BTreeSet<(NodeId, NodeId)>,
    delay_us: (u64, u64),
    /// Of wires that are slower than the others, or faster.
    delays_us: BTreeMap<(NodeId, NodeId), (u64, u64)>,
    random: SplitMix,
    /// Of a thousand calls these arrive once more, this much later at most.
    twice: (u64, Duration),
    /// Which ones: apart, so that the others take as long as they would.
    again: SplitMix,
    /// Chunks of snapshots that arrived.
    chunks: BTreeMap<(NodeId, NodeId), u64>,
    /// Streams of append requests that were asked for.
    streams: BTreeMap<(NodeId, NodeId), u64>,
}

impl<M: StateMachine> World<M> {
    /// Wires that take 100 to 500 microseconds.
    pub fn new(seed: u64) -> World<M> {
        let state = State {
            listening: BTreeMap::new(),
            addresses: BTreeMap::new(),
            cut: BTreeSet::new(),
            delay_us: (100, 500),
            delays_us: BTreeMap::new(),
            random: SplitMix::new(seed ^ 0x5eed),
            twice: (0, Duration::ZERO),
            again: SplitMix::new(seed ^ 0x6167_6169_6e00),
            chunks: BTreeMap::new(),
            streams: BTreeMap::new(),
        };
        World { state: Arc::new(Mutex::new(state)) }
    }

    /// Somebody listens at an address: on the caller's machine.
    pub fn listen(&self, id: NodeId, address: String, inbound: Inbound<SimConfig<M::Outcome>, M>) {
        let door = Door { inbound, machine: surroundings::machine() };
        let mut state = self.state.lock();
        state.addresses.insert(address, id);
        state.listening.insert(id, door);
    }

    /// Nobody listens any more: connections are refused at once.
    pub fn hang_up(&self, id: NodeId) {
        self.state.lock().listening.remove(&id);
    }

    /// What `from` sends no longer reaches `to`. Silently.
    pub fn cut(&self, from: NodeId, to: NodeId) {
        self.state.lock().cut.insert((from, to));
    }

    /// Cuts both directions.
    pub fn part(&self, a: NodeId, b: NodeId) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// Mends every wire.
    pub fn heal(&self) {
        self.state.lock().cut.clear();
    }

    /// One-way delay in microseconds, from to.
    pub fn set_delay_us(&self, low: u64, high: u64) {
        self.state.lock().delay_us = (low, high);
    }

    /// The same of the wires between two members, both ways.
    pub fn set_delay_between_us(&self, a: NodeId, b: NodeId, delay_us: (u64, u64)) {
        let delays = &mut self.state.lock().delays_us;
        delays.insert((a, b), delay_us);
        delays.insert((b, a), delay_us);
    }

    /// From here on so many calls of a thousand arrive once more, `late` later at most.
    pub fn set_twice(&self, in_thousand: u64, late: Duration) {
        self.state.lock().twice = (in_thousand, late);
    }

    /// When a call arrives once more, if it does.
    fn again_after(&self) -> Option<Duration> {
        let state = &mut *self.state.lock();
        let (in_thousand, late) = state.twice;
        let is_one = in_thousand > 0 && state.again.below(1_000) < in_thousand;
        is_one.then(|| Duration::from_micros(state.again.range(1, late.as_micros().max(1) as u64)))
    }

    /// Chunks of snapshots that arrived so far, from one at the other.
    pub fn chunks(&self, from: NodeId, to: NodeId) -> u64 {
        self.state.lock().chunks.get(&(from, to)).copied().unwrap_or(0)
    }

    /// Streams of append requests that one asked the other for so far, whether there was anybody or not.
    pub fn streams(&self, from: NodeId, to: NodeId) -> u64 {
        self.state.lock().streams.get(&(from, to)).copied().unwrap_or(0)
    }

    fn note_chunk(&self, from: NodeId, to: NodeId) {
        *self.state.lock().chunks.entry((from, to)).or_default() += 1;
    }

    fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        self.state.lock().cut.contains(&(from, to))
    }

    fn door(&self, id: NodeId) -> Option<Door<M>> {
        self.state.lock().listening.get(&id).cloned()
    }

    /// The way from one to the other: takes its time, and for ever while it is cut.
    async fn travel(&self, from: NodeId, to: NodeId) {
        let delay = {
            let state = &mut *self.state.lock();
            let (low, high) = state.delays_us.get(&(from, to)).copied().unwrap_or(state.delay_us);
            state.random.range(low, high)
        };
        SimRuntime::sleep(Duration::from_micros(delay)).await;
        while self.is_cut(from, to) {
            SimRuntime::sleep(RETRANSMIT).await;
        }
    }
}

/// The network as one member uses it.
pub struct SimNetwork<M: StateMachine> {
    own: NodeId,
    identity: Arc<IdentityStore>,
    world: World<M>,
}

impl<M: StateMachine> Clone for SimNetwork<M> {
    fn clone(&self) -> Self {
        SimNetwork { own: self.own, identity: self.identity.clone(), world: self.world.clone() }
    }
}

impl<M: StateMachine> SimNetwork<M> {
    /// The wires of `world`, spoken over by `own`.
    pub fn new(own: NodeId, identity: Arc<IdentityStore>, world: World<M>) -> SimNetwork<M> {
        SimNetwork { own, identity, world }
    }

    async fn reach(&self, address: &str, limit: Duration) -> Result<(NodeId, Door<M>), LinkError> {
        let id = self.world.state.lock().addresses.get(address).copied();
        let id = id.ok_or_else(|| LinkError::Unreachable(format!("{address}: nobody is there")))?;
        within(limit, self.world.travel(self.own, id)).await?;
        let door =
            self.world.door(id).ok_or_else(|| LinkError::Unreachable(format!("{address}: connection refused")))?;
        Ok((id, door))
    }
}

fn reset(whom: impl std::fmt::Display) -> LinkError {
    LinkError::Unreachable(format!("{whom}: connection reset"))
}

async fn within<T: Send>(limit: Duration, work: impl Future<Output = T> + Send) -> Result<T, LinkError> {
    SimRuntime::timeout(limit, work).await.map_err(|_| LinkError::Timeout(limit))
}

/// A lane to one member.
pub struct SimLink<M: StateMachine> {
    network: SimNetwork<M>,
    target: NodeId,
}

impl<M: StateMachine> Network for SimNetwork<M> {
    type Link = SimLink<M>;

    fn link(&self, target: NodeId, _address: &str, _lane: Lane) -> SimLink<M> {
        SimLink { network: self.clone(), target }
    }

    async fn handshake(
        &self,
        address: &str,
        request: v1::HandshakeRequest,
        limit: Duration,
    ) -> Result<v1::HandshakeResponse, LinkError> {
        let (id, door) = self.reach(address, limit).await?;
        let inbound = door.inbound.clone();
        let answer = within(limit, door.run(async move { inbound.handshake(request).await })).await?;
        let answer = answer.ok_or_else(|| reset(address))?;
        within(limit, self.world.travel(id, self.own)).await?;
        Ok(answer)
    }

    async fn prepare(
        &self,
        address: &str,
        request: v1::PrepareRequest,
        limit: Duration,
    ) -> Result<v1::PrepareResponse, LinkError> {
        let (id, door) = self.reach(address, limit).await?;
        let inbound = door.inbound.clone();
        let answer = within(limit, door.run(async move { inbound.prepare(request).await })).await?;
        let answer = answer.ok_or_else(|| reset(address))?;
        within(limit, self.world.travel(id, self.own)).await?;
        Ok(answer)
    }
}

/// What comes back over a stream of append requests.
enum Answered {
    With(Result<Bytes, Error>),
    /// Nothing more. Without it the other end is gone.
    Ended,
}

impl<M: StateMachine> SimLink<M> {
    fn reset(&self) -> LinkError {
        reset(format_args!("node {}", self.target))
    }

    fn refused(&self) -> LinkError {
        LinkError::Unreachable(format!("node {}: connection refused", self.target))
    }

    /// Through the door, if it is open and lets us in.
    fn enter(&self) -> Result<Door<M>, LinkError> {
        let door = self.network.world.door(self.target).ok_or_else(|| self.refused())?;
        let identity = &self.network.identity;
        let admitted = door.inbound.admit(Some(&identity.to_wire()), self.target, &identity.store_uuid());
        admitted.map_err(LinkError::Refused)?;
        Ok(door)
    }
}

impl<M: StateMachine> SimLink<M> {
    /// A call that arrives once more, at whoever is there then. Nobody waits for that answer.
    fn repeat(&self, after: Duration, call: Call, payload: Bytes) {
        let again = SimLink { network: self.network.clone(), target: self.target };
        drop(SimRuntime::spawn(async move {
            SimRuntime::sleep(after).await;
            again.network.world.travel(again.network.own, again.target).await;
            let Ok(door) = again.enter() else { return };
            let inbound = door.inbound.clone();
            drop(door.run(async move { inbound.call(call, payload).await }).await);
        }));
    }
}

impl<M: StateMachine> Link for SimLink<M> {
    async fn call(&self, call: Call, payload: Bytes, limit: Duration) -> Result<Bytes, LinkError> {
        let (world, own) = (&self.network.world, self.network.own);
        if let Some(after) = world.again_after() {
            self.repeat(after, call, payload.clone());
        }
        within(limit, async {
            world.travel(own, self.target).await;
            let door = self.enter()?;
            let inbound = door.inbound.clone();
            let answer = door.run(async move { inbound.call(call, payload).await }).await;
            let answer = answer.ok_or_else(|| self.reset())?.map_err(LinkError::Refused)?;
            world.travel(self.target, own).await;
            Ok(answer)
        })
        .await?
    }

    async fn append(
        &self,
        requests: BoxStream<'static, Bytes>,
        limit: Duration,
    ) -> Result<BoxStream<'static, Result<Bytes, LinkError>>, LinkError> {
        let (world, own, target) = (self.network.world.clone(), self.network.own, self.target);
        *world.state.lock().streams.entry((own, target)).or_default() += 1;
        within(limit, world.travel(own, target)).await?;
        let door = self.enter()?;
        let (mut sent, arriving) = mpsc::channel::<Bytes>(BUFFERED);
        let (mut answered, answers) = mpsc::channel::<Answered>(BUFFERED);
        let inbound = door.inbound.clone();
        door.spawn(async move {
            let mut answers = inbound.append(arriving).boxed();
            while let Some(answer) = answers.next().await {
                if answered.send(Answered::With(answer)).await.is_err() {
                    return;
                }
            }
            // Nobody may wait for it any more.
            let _gone = answered.send(Answered::Ended).await;
        });
        let there = world.clone();
        let sending = async move {
            let mut requests = requests;
            while let Some(request) = requests.next().await {
                there.travel(own, target).await;
                if sent.send(request).await.is_err() {
                    return;
                }
            }
        };
        let gone = self.reset();
        let back = stream::unfold(Some((answers, gone)), move |state| {
            let world = world.clone();
            async move {
                let (mut answers, gone) = state?;
                let answer = answers.next().await;
                world.travel(target, own).await;
                match answer {
                    Some(Answered::With(answer)) => Some((answer.map_err(LinkError::Refused), Some((answers, gone)))),
                    Some(Answered::Ended) => None,
                    None => Some((Err(gone), None)),
                }
            }
        });
        // Whoever waits for answers sends meanwhile, and sends nothing more once it waits no more.
        let (mut sending, mut back) = (sending.boxed().fuse(), back.boxed());
        Ok(stream::poll_fn(move |context| {
            let _sent = sending.poll_unpin(context);
            back.poll_next_unpin(context)
        })
        .boxed())
    }

    async fn snapshot(&self, feed: Feed, limit: Duration) -> Result<Bytes, LinkError> {
        let (world, own) = (&self.network.world, self.network.own);
        within(limit, async {
            world.travel(own, self.target).await;
            let Feed { offer, file, from, .. } = feed;
            let door = self.enter()?;
            let inbound = door.inbound.clone();
            let arrival = door.run(async move { inbound.snapshot(offer).await }).await.ok_or_else(|| self.reset())?;
            let arrival = Arc::new(arrival.map_err(LinkError::Refused)?);
            let mut offsets = stream::iter((from..file.length()).step_by(CHUNK_BYTES));
            while let Some(offset) = offsets.next().await {
                let data = file.read_at(offset, CHUNK_BYTES).map_err(|e| LinkError::Unreachable(e.to_string()))?;
                world.travel(own, self.target).await;
                // A member that died meanwhile takes nothing more, also when it is back.
                if !self.enter()?.inbound.is_same(&door.inbound) {
                    return Err(self.refused());
                }
                let (checksum, arrival) = (Some(crc32c::crc32c(&data)), arrival.clone());
                let taken = door.run(async move { arrival.chunk(offset, data, checksum).await }).await;
                taken.ok_or_else(|| self.reset())?.map_err(LinkError::Refused)?;
                world.note_chunk(own, self.target);
            }
            let finished = door.run(async move {
                match Arc::into_inner(arrival) {
                    Some(arrival) => arrival.finish().await,
                    None => Err(Error::new(ErrorCode::Internal, "a chunk is still being taken in")),
                }
            });
            let answer = finished.await.ok_or_else(|| self.reset())?.map_err(LinkError::Refused)?;
            world.travel(self.target, own).await;
            Ok(answer)
        })
        .await?
    }
}
