//! A datanode process on a simulated machine: registers with whoever leads, mounts its segment, beats and obeys, makes
//! copies. It dies with its memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_datanode::sim::SimulatedDatanode;
use tidepool_proto::v1::node_service_client::NodeServiceClient;
use tidepool_proto::{Error, ErrorCode, PROTOCOL_VERSION, v1};
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
            self.beat().await;
            // Forgotten or fenced: a new life, and nothing of the old one.
            self.node.end();
        }
    }

    async fn register(&self, life: u64) {
        let mut process_uuid = rt::random().to_le_bytes();
        process_uuid[0] = life as u8;
        for turn in 0usize.. {
            let master = &self.masters[turn % self.masters.len()];
            let request = v1::RegisterRequest {
                identity: Some(v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }),
                node_uuid: self.uuid.to_vec().into(),
                address: address(self.machine.id),
                host_id: format!("host-{}", self.machine.id),
                process_uuid: process_uuid.to_vec().into(),
            };
            if self.try_register(master, request).await.is_some() {
                return;
            }
            rt::sleep(PAUSE).await;
        }
    }

    async fn try_register(&self, master: &str, request: v1::RegisterRequest) -> Option<()> {
        let mut client = self.client(master);
        let answer = rt::timeout(ANSWER, client.register(request)).await.ok()?.ok()?.into_inner();
        if answer.error.is_some() {
            return None;
        }
        let mount = v1::MountRequest {
            node_id: answer.node_id,
            incarnation: answer.incarnation,
            segments: self.node.mounts(),
            identity: answer.identity.clone(),
        };
        let mounted = rt::timeout(ANSWER, client.mount(mount)).await.ok()?.ok()?.into_inner();
        (mounted.error.is_none() && self.node.live(&answer, &mounted.segments)).then_some(())
    }

    /// Beats to whoever leads until this life is over.
    async fn beat(&self) {
        let mut sequence = 0;
        for turn in 0usize.. {
            let master = self.masters[turn % self.masters.len()].clone();
            self.node.lost_leader();
            *self.following.lock() = None;
            if self.converse(&master, &mut sequence).await {
                return;
            }
            rt::sleep(PAUSE).await;
        }
    }

    /// True: this life is over.
    async fn converse(&self, master: &str, sequence: &mut u64) -> bool {
        let (beats, unsent) = mpsc::channel(BEATS);
        *sequence += 1;
        let Some(first) = self.node.beat(*sequence) else { return true };
        if beats.try_send(first).is_err() {
            return false;
        }
        let mut client = self.client(master);
        let opening = client.heartbeat(ReceiverStream::new(unsent));
        let Ok(Ok(answers)) = rt::timeout(ANSWER, opening).await else { return false };
        let mut answers = answers.into_inner();
        let mut ticks = rt::ticks(Duration::from_millis(80));
        let mut heard = rt::now();
        loop {
            tokio::select! {
                biased;
                answer = answers.message() => {
                    let Ok(Some(answer)) = answer else { return false };
                    heard = rt::now();
                    if let Some(error) = answer.error.clone().map(Error::from) {
                        return matches!(error.code(), ErrorCode::Fenced | ErrorCode::NodeUnknown);
                    }
                    let term = answer.term;
                    let Some(orders) = self.node.obey(answer) else { return false };
                    *self.following.lock() = Some(term);
                    orders.into_iter().for_each(|order| self.copy(order));
                }
                () = ticks.tick() => {
                    if rt::since(heard) > SILENCE {
                        return false;
                    }
                    *sequence += 1;
                    match self.node.beat(*sequence) {
                        None => return true,
                        Some(beat) => match beats.try_send(beat) {
                            Ok(()) => {}
                            // What it carried is said again.
                            Err(mpsc::error::TrySendError::Full(_)) => self.node.lost_leader(),
                            Err(mpsc::error::TrySendError::Closed(_)) => return false,
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
