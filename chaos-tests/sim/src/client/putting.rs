//! Puts: the grant, the bytes, the end.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{Error, ErrorCode, History as HistoryId, ObjectId, object, v1};
use tidepool_raft::rt;
use tidepool_raft::sim::surroundings::{SimMachine, spawn_on};
use tidepool_transport::{WriteAccess, WriteOutcome, WriteReply};
use tokio::sync::{mpsc, oneshot};

use super::{ATTEMPT, CALL, CHUNK, Client, PAUSE, TRANSFER};
use crate::history::{Event, now};
use crate::keys::{content, group, is_pinned, key_name};
use crate::net::Net;

/// What a put came to.
enum Ended {
    Stored,
    /// It takes no effect.
    Not,
    /// It may.
    Unknown,
}

/// How a transfer into an extent ended.
type Written = Option<Result<WriteReply, Error>>;

impl Client {
    /// Puts a new value, or replaces what is there.
    pub async fn put(&mut self, key: u64, replace: bool) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        self.about(key);
        let length = self.random.range(1, self.object_bytes_max);
        let mut token = [0; 16];
        token[..8].copy_from_slice(&self.random.number().to_le_bytes());
        token[8..].copy_from_slice(&self.random.number().to_le_bytes());
        let sequence = if replace { self.next_sequence() } else { 0 };
        let item = v1::PutStartItem {
            key: key_name(key).into(),
            length,
            token: token.to_vec().into(),
            group: group(self.keys, key).into(),
        };
        let request = v1::PutStartRequest {
            session_id: self.session,
            items: vec![item],
            replica_num: self.random.range(1, u64::from(self.replicas_max)) as u32,
            upsert: replace,
            sequence,
            floor: sequence,
            hard_pin: is_pinned(self.keys, key) && self.random.chance(50),
            ..Default::default()
        };
        let (grant, nodes) = loop {
            let answer = self.ask(Ask::PutStart(request.clone()), deadline).await;
            let Ok(Answer::PutStart(mut answer)) = answer else {
                return self.put_failed(answer.err().map(|failed| failed.error)).await;
            };
            let grant = answer.grants.remove(0);
            let Some(error) = grant.error.clone() else { break (grant, answer.nodes) };
            match ErrorCode::from_u32(error.code) {
                ErrorCode::ObjectAlreadyExists => {
                    return self.history.log(self.machine.id, key, invoked, true, Event::PutRefused);
                }
                ErrorCode::PutInProgress | ErrorCode::ResourceExhausted | ErrorCode::NoSpace
                    if deadline > BootInstant::now() =>
                {
                    rt::sleep(PAUSE).await;
                }
                _ => return self.put_failed(Some(error.into())).await,
            }
        };
        let value = self.history.value(self.history_number(), grant.object_id);
        let event = if replace { Event::Upsert(value) } else { Event::Put(value) };
        match self.fill(key, &grant, &nodes, length, deadline).await {
            Ended::Stored => self.history.log(self.machine.id, key, invoked, true, event),
            Ended::Unknown => self.history.log(self.machine.id, key, invoked, false, event),
            Ended::Not => {}
        }
    }

    /// A put that did not begin; a session that is not known is opened again.
    async fn put_failed(&mut self, error: Option<Error>) {
        match error {
            Some(error) if error.code() == ErrorCode::SessionUnknown => {
                self.hello(BootInstant::now().after(CALL)).await;
            }
            Some(error) if error.code() == ErrorCode::Internal => self.history.wrong(format!("a put answered {error}")),
            _ => {}
        }
    }

    /// Moves the bytes and ends the put.
    async fn fill(
        &mut self,
        key: u64,
        grant: &v1::PutGrant,
        nodes: &[v1::NodeAddress],
        length: u64,
        deadline: BootInstant,
    ) -> Ended {
        let object = grant.object_id;
        let history = self.history_number();
        let hash = object::key_hash(self.tenant, &key_name(key));
        let payload = content(self.history.value(history, object), length);
        let mut stored = object::build_prefix(HistoryId(history), ObjectId(object), hash, &[&payload]);
        stored.extend_from_slice(&payload);
        // A source that changed while it was sent: the datanode has to notice (W3).
        if self.random.below(1_000) < self.stalls / 2 {
            let at = self.random.below(stored.len() as u64) as usize;
            stored[at] ^= 1;
        }
        let writes = grant.replicas.iter().map(|replica| {
            let stall = self.random.below(1_000) < self.stalls;
            let stall_ms = if stall { self.random.range(50, 6_000) } else { 0 };
            let address = nodes.iter().find(|node| node.node_id == replica.node_id).map(|node| node.address.clone());
            let access = WriteAccess { object_id: object, replica: replica.clone(), length: stored.len() as u64 };
            write(self.net.clone(), self.machine.clone(), address, access, stored.clone(), stall_ms)
        });
        let writes: Vec<_> = writes.collect();
        let written: Vec<Written> = join_all(writes).await;
        for error in written.iter().flatten().filter_map(|written| written.as_ref().err()) {
            if error.code() == ErrorCode::Internal {
                self.history.wrong(format!("a datanode answered {error}"));
            }
        }
        let replicas: Vec<v1::ReplicaStatus> =
            grant.replicas.iter().zip(&written).map(|(replica, written)| status(replica.replica_id, written)).collect();
        let any = replicas.iter().any(|status| status.outcome() == v1::ReplicaOutcome::Stored);
        let items = vec![v1::PutEndItem { key: key_name(key).into(), object_id: object, replicas }];
        if !any {
            let revoke = v1::PutRevokeRequest { items, session_id: self.session };
            drop(self.ask(Ask::PutRevoke(revoke), deadline).await);
            return Ended::Not;
        }
        let end = v1::PutEndRequest { items, session_id: self.session };
        match self.ask(Ask::PutEnd(end), deadline.max(BootInstant::now().after(ATTEMPT))).await {
            Ok(Answer::PutEnd(mut answer)) => match answer.results.remove(0).error {
                None => Ended::Stored,
                Some(error) => match ErrorCode::from_u32(error.code) {
                    // It may have been ended by an attempt before, and be gone since.
                    ErrorCode::GrantLost | ErrorCode::AlreadyEnded => Ended::Unknown,
                    ErrorCode::Internal => {
                        self.history.wrong(format!("the end of a put answered {}", error.message));
                        Ended::Unknown
                    }
                    _ => Ended::Unknown,
                },
            },
            _ => Ended::Unknown,
        }
    }
}

fn status(replica_id: u64, written: &Written) -> v1::ReplicaStatus {
    let (outcome, proof) = match written {
        Some(Ok(reply)) => match reply.outcome {
            WriteOutcome::Stored => (v1::ReplicaOutcome::Stored, reply.proof.to_vec()),
            WriteOutcome::Aborted => (v1::ReplicaOutcome::Aborted, reply.proof.to_vec()),
        },
        Some(Err(_)) | None => (v1::ReplicaOutcome::Unknown, Vec::new()),
    };
    v1::ReplicaStatus { replica_id, outcome: outcome as i32, proof: proof.into() }
}

/// Sends the bytes of one replica, chunk by chunk; with a stall, the client waits in the middle. After its patience the
/// client waits no more, and the bytes go on: a thread that was stopped, a packet in a queue.
async fn write(
    net: Net,
    machine: Arc<SimMachine>,
    address: Option<String>,
    access: WriteAccess,
    bytes: Vec<u8>,
    stall_ms: u64,
) -> Written {
    let address = address?;
    let (chunks, mut arriving) = mpsc::channel::<Vec<u8>>(4);
    let (wires, own, target) = (net.clone(), machine.id, address.clone());
    let (done, answer) = oneshot::channel();
    spawn_on(&machine, async move {
        let work = move |node: Arc<tidepool_datanode::sim::SimulatedDatanode>| async move {
            let mut ticket = node.write(&access, 0)?;
            let (mut at, mut failed) = (0u64, false);
            while at < access.length {
                let Some(chunk) = arriving.recv().await else { break };
                if ticket.fill(at, &chunk).is_err() {
                    failed = true;
                    break;
                }
                at += chunk.len() as u64;
            }
            Ok(ticket.finish(at == access.length && !failed))
        };
        let written = wires.at(own, &target, work).await;
        let _late = done.send(written);
    });
    let to = net.owner(&address)?;
    spawn_on(&machine, async move {
        let middle = bytes.len() / 2;
        let mut sent = 0;
        for chunk in bytes.chunks(CHUNK) {
            if stall_ms > 0 && sent <= middle && sent + chunk.len() > middle {
                SimRuntime::sleep(Duration::from_millis(stall_ms)).await;
            }
            net.travel(own, to).await;
            if chunks.send(chunk.to_vec()).await.is_err() {
                return;
            }
            sent += chunk.len();
        }
    });
    rt::timeout(TRANSFER, answer).await.ok()?.ok()?
}
