//! A datanode process on a simulated machine: registers with whoever leads, mounts its segment, beats and obeys, makes
//! copies. It dies with its memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_datanode::sim::SimulatedDatanode;
use tidepool_proto::v1::node_service_client::NodeServiceClient;
use tidepool_proto::{Error, ErrorCode, v1};
use tidepool_raft::rt;
use tidepool_raft::sim::surroundings::{SimMachine, spawn_on};
use tidepool_transport::{ReadAccess, WriteAccess};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::net::{Channel, Net, Port};

/// How long a master may take to answer.
const ANSWER: Duration = Duration::from_millis(400);
/// Silence after which another leader is looked for.
const SILENCE: Duration = Duration::from_millis(900);
/// How long nobody of the known cluster must have said anything before one that goes on from it is followed.
const FOLLOW_AFTER: Duration = Duration::from_secs(3);
/// Pause between two masters that are asked.
const PAUSE: Duration = Duration::from_millis(25);
/// Beats that wait to be sent.
const BEATS: usize = 4;
/// Bytes of a copy read at once.
const CHUNK: u64 = 4_096;

/// Where a datanode listens.
pub fn address(id: u64) -> String {
    format!("127.0.0.1:{}", 20_000 + id)
}

/// Why a conversation with a master ended.
enum Ended {
    /// It does not lead, or is not heard: another one is asked.
    Leader,
    /// The master leads another cluster, or another history.
    Stranger(v1::Identity),
    /// This life is over.
    Life,
}

/// One process of a datanode.
#[derive(Clone)]
pub struct Process {
    /// Its machine.
    pub machine: Arc<SimMachine>,
    /// Its memory.
    pub node: Arc<SimulatedDatanode>,
    net: Net,
    masters: Vec<String>,
    uuid: [u8; 16],
    copying: Arc<Mutex<BTreeSet<u64>>>,
    following: Arc<Mutex<Option<u64>>>,
}

impl Process {
    /// Starts one with an empty segment.
    pub fn start(machine: Arc<SimMachine>, net: Net, masters: Vec<String>, bytes: u64) -> Result<Process, Error> {
        let node = Arc::new(SimulatedDatanode::new(&[("dram0", bytes)])?);
        let mut uuid = [0xd0; 16];
        uuid[..8].copy_from_slice(&machine.id.to_le_bytes());
        net.listen(&address(machine.id), machine.id, Port::Datanode(machine.clone(), node.clone()));
        let process = Process {
            machine: machine.clone(),
            node,
            net,
            masters,
            uuid,
            copying: Arc::default(),
            following: Arc::default(),
        };
        let running = process.clone();
        spawn_on(&machine, async move { running.run().await });
        Ok(process)
    }

    /// The term of the leader that it follows.
    pub fn follows(&self) -> Option<u64> {
        *self.following.lock()
    }

    fn client(&self, master: &str) -> NodeServiceClient<Channel> {
        NodeServiceClient::new(Channel { net: self.net.clone(), from: self.machine.id, address: master.to_owned() })
    }

    async fn run(&self) {
        let mut life = 0u64;
        loop {
            life += 1;
            self.register(life).await;
            match self.beat().await {
                // Forgotten or fenced: a new life, and nothing of the old one.
                None => self.node.end(),
                Some(successor) => self.node.follow(&successor).await,
            }
        }
    }

    async fn register(&self, life: u64) {
        let mut process_uuid = rt::random().to_le_bytes();
        process_uuid[0] = life as u8;
        let (mut identity, mut process_uuid) = self.node.introduces_itself(process_uuid);
        for turn in 0usize.. {
            let master = &self.masters[turn % self.masters.len()];
            let request = v1::RegisterRequest {
                identity: Some(identity.clone()),
                node_uuid: self.uuid.to_vec().into(),
                address: address(self.machine.id),
                host_id: format!("host-{}", self.machine.id),
                process_uuid: process_uuid.to_vec().into(),
            };
            match self.try_register(master, process_uuid, request).await {
                Ok(()) => return,
                Err(None) => {}
                // The cluster that it was to follow is lost in its turn.
                Err(Some(successor)) => {
                    self.node.follow(&successor).await;
                    (identity, process_uuid) = self.node.introduces_itself(process_uuid);
                }
            }
            rt::sleep(PAUSE).await;
        }
    }

    /// The error names the cluster that goes on from the one that was asked for, if a master of that one answered.
    async fn try_register(
        &self,
        master: &str,
        process: [u8; 16],
        request: v1::RegisterRequest,
    ) -> Result<(), Option<v1::Identity>> {
        let mut client = self.client(master);
        let Ok(Ok(answer)) = rt::timeout(ANSWER, client.register(request)).await else { return Err(None) };
        let answer = answer.into_inner();
        if let Some(error) = answer.error {
            let is_other = error.code == ErrorCode::WrongCluster as u32;
            return Err(answer.identity.filter(|identity| is_other && self.node.is_succeeded_by(identity)));
        }
        let mount = v1::MountRequest {
            node_id: answer.node_id,
            incarnation: answer.incarnation,
            segments: self.node.mounts(),
            identity: answer.identity.clone(),
        };
        let Ok(Ok(mounted)) = rt::timeout(ANSWER, client.mount(mount)).await else { return Err(None) };
        let mounted = mounted.into_inner();
        let lives = mounted.error.is_none() && self.node.live(process, &answer, &mounted.segments);
        if lives { Ok(()) } else { Err(None) }
    }

    /// Beats to whoever leads until this life is over; answers the cluster that is to be followed, if its own is over.
    async fn beat(&self) -> Option<v1::Identity> {
        let mut sequence = 0;
        let mut own_heard = rt::now();
        for turn in 0usize.. {
            let master = self.masters[turn % self.masters.len()].clone();
            self.node.lost_leader();
            *self.following.lock() = None;
            match self.converse(&master, &mut sequence, &mut own_heard).await {
                Ended::Life => return None,
                Ended::Leader => {}
                Ended::Stranger(identity) => {
                    if self.node.is_succeeded_by(&identity) && rt::since(own_heard) >= FOLLOW_AFTER {
                        return Some(identity);
                    }
                }
            }
            rt::sleep(PAUSE).await;
        }
        None
    }

    async fn converse(&self, master: &str, sequence: &mut u64, own_heard: &mut Instant) -> Ended {
        let (beats, unsent) = mpsc::channel(BEATS);
        *sequence += 1;
        let Some(first) = self.node.beat(*sequence) else { return Ended::Life };
        if beats.try_send(first).is_err() {
            return Ended::Leader;
        }
        let mut client = self.client(master);
        let opening = client.heartbeat(ReceiverStream::new(unsent));
        let Ok(Ok(answers)) = rt::timeout(ANSWER, opening).await else { return Ended::Leader };
        let mut answers = answers.into_inner();
        let mut ticks = rt::ticks(Duration::from_millis(80));
        let mut heard = rt::now();
        loop {
            tokio::select! {
                biased;
                answer = answers.message() => {
                    let Ok(Some(answer)) = answer else { return Ended::Leader };
                    heard = rt::now();
                    if let Some(identity) = answer.identity.as_ref().filter(|identity| !self.node.is_of(identity)) {
                        let is_stranger = answer.error.as_ref().is_some_and(|e| e.code == ErrorCode::WrongCluster as u32);
                        return if is_stranger { Ended::Stranger(identity.clone()) } else { Ended::Leader };
                    }
                    *own_heard = heard;
                    if let Some(error) = answer.error.clone().map(Error::from) {
                        let is_over = matches!(error.code(), ErrorCode::Fenced | ErrorCode::NodeUnknown);
                        return if is_over { Ended::Life } else { Ended::Leader };
                    }
                    let term = answer.term;
                    let Some(orders) = self.node.obey(answer) else { return Ended::Leader };
                    *self.following.lock() = Some(term);
                    orders.into_iter().for_each(|order| self.copy(order));
                }
                () = ticks.tick() => {
                    if rt::since(heard) > SILENCE {
                        return Ended::Leader;
                    }
                    *sequence += 1;
                    match self.node.beat(*sequence) {
                        None => return Ended::Life,
                        Some(beat) => match beats.try_send(beat) {
                            Ok(()) => {}
                            // What it carried is said again.
                            Err(mpsc::error::TrySendError::Full(_)) => self.node.lost_leader(),
                            Err(mpsc::error::TrySendError::Closed(_)) => return Ended::Leader,
                        },
                    }
                }
            }
        }
    }

    /// Makes a copy, once.
    fn copy(&self, order: v1::CopyOrder) {
        let Some(replica) = order.target.as_ref().map(|target| target.replica_id) else { return };
        if !self.copying.lock().insert(replica) {
            return;
        }
        let process = self.clone();
        spawn_on(&self.machine, async move {
            process.carry_out(&order).await;
            process.copying.lock().remove(&replica);
        });
    }

    async fn carry_out(&self, order: &v1::CopyOrder) {
        let (Some(source), Some(target)) = (&order.source, &order.target) else { return };
        let access = WriteAccess { object_id: order.object_id, replica: target.clone(), length: target.length };
        let Ok(mut ticket) = self.node.write(&access, order.history) else { return };
        let mut at = 0;
        while at < source.length {
            let length = CHUNK.min(source.length - at);
            let read = ReadAccess { object_id: order.object_id, replica: source.clone(), offset: at, length };
            let work = self.net.at(self.machine.id, &order.source_address, move |node| async move { node.read(&read) });
            let Ok(Some(Ok(part))) = rt::timeout(ANSWER, work).await else { break };
            if ticket.fill(at, &part).is_err() {
                break;
            }
            at += length;
        }
        let reply = ticket.finish(at == source.length);
        self.node.copied(order, reply);
    }
}
