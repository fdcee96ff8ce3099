//! A client process: finds the leader, repeats what was not answered under the same token or number, moves bytes from and
//! to datanodes and verifies all it reads. It keeps the rules that the client library keeps, and logs what it saw.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use tidepool_proto::clock::{BootInstant, holder_share};
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::v1::client_service_client::ClientServiceClient;
use tidepool_proto::{Error, ErrorCode, History as HistoryId, ObjectId, PROTOCOL_VERSION, object, v1};
use tidepool_raft::rt;
use tidepool_raft::sim::SplitMix;
use tidepool_raft::sim::surroundings::{SimMachine, spawn_on};
use tidepool_transport::{ReadAccess, WriteAccess, WriteOutcome, WriteReply};
use tokio::sync::{mpsc, oneshot};

use crate::history::{Event, History, now};
use crate::net::{Channel, Net};

/// How long one attempt may take before another master is asked.
const ATTEMPT: Duration = Duration::from_millis(250);
/// How long a call may take in all.
pub const CALL: Duration = Duration::from_millis(2_500);
/// How long bytes may take.
const TRANSFER: Duration = Duration::from_millis(800);
/// Bytes of one chunk on the wire.
const CHUNK: usize = 2_048;
/// Pause before a retry.
const PAUSE: Duration = Duration::from_millis(15);

/// One client process.
pub struct Client {
    /// Its machine, and its number in the history.
    pub machine: Arc<SimMachine>,
    net: Net,
    history: History,
    masters: Vec<String>,
    leader: usize,
    uuid: [u8; 16],
    session: u64,
    sequence: u64,
    identity: Option<v1::Identity>,
    random: SplitMix,
    stalls: u64,
    replicas_max: u32,
    object_bytes_max: u64,
    /// Whether a reader may blame bytes that do not verify on a flipped bit.
    pub bits_flip: bool,
    /// Whether it stays with a master that does not answer, until that one refuses.
    pub stays: bool,
}

/// A call that failed, and whether it may take effect all the same.
struct Failed {
    error: Error,
    is_open: bool,
}

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

/// Key number `key`, as bytes.
pub fn key_name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// The bytes of a value: nobody else's are the same.
pub fn content(value: Value, length: u64) -> Vec<u8> {
    let mut random = SplitMix::new(value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ length);
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        bytes.extend_from_slice(&random.number().to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

use crate::history::Value;

impl Client {
    /// A process that knows these masters.
    pub fn new(
        machine: Arc<SimMachine>,
        net: Net,
        history: History,
        masters: Vec<String>,
        params: &crate::params::Params,
    ) -> Client {
        let mut random = SplitMix::new(params.seed ^ machine.id << 32);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&random.number().to_le_bytes());
        uuid[8..].copy_from_slice(&machine.id.to_le_bytes());
        Client {
            machine,
            net,
            history,
            leader: random.below(masters.len() as u64) as usize,
            masters,
            uuid,
            session: 0,
            sequence: 1,
            identity: None,
            random,
            stalls: params.stalls,
            replicas_max: params.replicas_max,
            object_bytes_max: params.object_bytes_max,
            bits_flip: false,
            stays: false,
        }
    }

    /// From here on its transfers do not stall.
    pub fn calm(&mut self) {
        self.stalls = 0;
    }

    fn channel(&self, address: &str) -> Channel {
        Channel { net: self.net.clone(), from: self.machine.id, address: address.to_owned() }
    }

    /// One attempt. What was sent arrives, also when nobody waits any more.
    async fn attempt(&self, request: v1::ClientRequest) -> Option<Result<v1::ClientResponse, tonic::Status>> {
        let channel = self.channel(&self.masters[self.leader]);
        let (done, answer) = oneshot::channel();
        spawn_on(&self.machine, async move {
            // Nobody may wait for it any more.
            let _late = done.send(ClientServiceClient::new(channel).call(request).await.map(|r| r.into_inner()));
        });
        rt::timeout(ATTEMPT, answer).await.ok()?.ok()
    }

    /// Asks until somebody who leads answers.
    async fn ask(&mut self, body: Ask, deadline: BootInstant) -> Result<Answer, Failed> {
        let mut is_open = false;
        loop {
            let left = deadline - BootInstant::now();
            if left.is_zero() {
                let error = Error::new(ErrorCode::DeadlineExceeded, "nobody answered in time");
                return Err(Failed { error, is_open });
            }
            let request = v1::ClientRequest {
                id: self.random.number(),
                remaining_ms: left.as_millis().max(1) as u32,
                tenant: String::new(),
                body: Some(body.clone()),
            };
            let error = match self.attempt(request).await {
                Some(Ok(response)) => match (response.body, response.error) {
                    (Some(answer), None) => return Ok(answer),
                    (_, error) => error.map_or_else(|| Error::new(ErrorCode::Internal, "no answer"), Error::from),
                },
                // It may be there, and its answer lost.
                unanswered @ (Some(Err(_)) | None) => {
                    is_open = true;
                    if unanswered.is_some() || !self.stays {
                        self.leader = (self.leader + 1) % self.masters.len();
                    }
                    rt::sleep(PAUSE).await;
                    continue;
                }
            };
            match error.code() {
                ErrorCode::NotLeader => {
                    let hint = error.leader().and_then(|hint| self.masters.iter().position(|m| *m == hint.address));
                    self.leader = hint.unwrap_or((self.leader + 1) % self.masters.len());
                    // A leader that was deposed answers so to what it had proposed.
                    is_open = true;
                }
                ErrorCode::Unavailable | ErrorCode::ResourceExhausted => is_open = true,
                ErrorCode::DeadlineExceeded => is_open = true,
                _ => return Err(Failed { error, is_open }),
            }
            rt::sleep(PAUSE).await;
        }
    }

    /// Says hello until somebody who leads answers.
    pub async fn hello(&mut self, deadline: BootInstant) -> bool {
        let hello = v1::HelloRequest {
            identity: Some(v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }),
            client_uuid: self.uuid.to_vec().into(),
            host_id: format!("client-{}", self.machine.id),
            lineage: Vec::new(),
        };
        match self.ask(Ask::Hello(hello), deadline).await {
            Ok(Answer::Hello(answer)) => {
                self.session = answer.session_id;
                self.identity = answer.identity;
                true
            }
            _ => false,
        }
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    /// Puts a new value, or replaces what is there.
    pub async fn put(&mut self, key: u64, replace: bool) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        let length = self.random.range(1, self.object_bytes_max);
        let mut token = [0; 16];
        token[..8].copy_from_slice(&self.random.number().to_le_bytes());
        token[8..].copy_from_slice(&self.random.number().to_le_bytes());
        let sequence = if replace { self.next_sequence() } else { 0 };
        let item = v1::PutStartItem {
            key: key_name(key).into(),
            length,
            token: token.to_vec().into(),
            group: Default::default(),
        };
        let request = v1::PutStartRequest {
            session_id: self.session,
            items: vec![item],
            replica_num: self.random.range(1, u64::from(self.replicas_max)) as u32,
            upsert: replace,
            sequence,
            floor: sequence,
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
        let value = grant.object_id;
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
        let history = self.identity.as_ref().map_or(0, |identity| identity.history);
        let hash = object::key_hash("", &key_name(key));
        let payload = content(object, length);
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

    /// Looks whether a key is there.
    pub async fn exist(&mut self, key: u64) -> Option<bool> {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        let mode = if self.random.chance(50) { v1::LeaseMode::Grant } else { v1::LeaseMode::NoTouch };
        let request = v1::ExistRequest {
            keys: Some(v1::Keys::pack([key_name(key)])),
            lease_mode: mode as i32,
            lease_ttl_ms: 0,
            suspect_nodes: Vec::new(),
        };
        let Ok(Answer::Exist(answer)) = self.ask(Ask::Exist(request), deadline).await else { return None };
        let is_there = answer.present.first() == Some(&1);
        let event = if is_there { Event::Exists } else { Event::Missed };
        self.history.log(self.machine.id, key, invoked, true, event);
        Some(is_there)
    }

    /// Removes a key.
    pub async fn remove(&mut self, key: u64, force: bool) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        let sequence = self.next_sequence();
        let mode = if force { v1::RemoveMode::Force } else { v1::RemoveMode::RespectLease };
        let request = v1::RemoveRequest {
            session_id: self.session,
            sequence,
            floor: sequence,
            keys: Some(v1::Keys::pack([key_name(key)])),
            mode: mode as i32,
        };
        match self.ask(Ask::Remove(request), deadline).await {
            Ok(Answer::Remove(answer)) => match answer.errors.first().map(|error| ErrorCode::from_u32(error.code)) {
                None | Some(ErrorCode::Ok) => self.history.log(self.machine.id, key, invoked, true, Event::Removed),
                Some(ErrorCode::ObjectNotFound) => {
                    self.history.log(self.machine.id, key, invoked, true, Event::NothingToRemove);
                }
                Some(ErrorCode::SessionUnknown) => drop(self.hello(deadline.after(CALL)).await),
                Some(ErrorCode::Internal) => self.history.wrong(format!("a removal answered {:?}", answer.errors)),
                // Refused, and remembered under its number: no attempt of it removes any more (W8).
                Some(ErrorCode::ObjectHasLease | ErrorCode::NotReady) => {}
                Some(_) => self.history.log(self.machine.id, key, invoked, false, Event::Removed),
            },
            Ok(_) => {}
            Err(failed) if failed.is_open => {
                self.history.log(self.machine.id, key, invoked, false, Event::Removed);
            }
            Err(failed) if failed.error.code() == ErrorCode::SessionUnknown => {
                self.hello(deadline.after(CALL)).await;
            }
            Err(_) => {}
        }
    }

    /// Gets a value and verifies it. None: nobody could say.
    pub async fn get(&mut self, key: u64) -> Option<bool> {
        let (invoked, deadline, asked) = (now(), BootInstant::now().after(CALL), BootInstant::now());
        let request = v1::LocateRequest {
            keys: Some(v1::Keys::pack([key_name(key)])),
            lease_mode: v1::LeaseMode::Grant as i32,
            lease_ttl_ms: 0,
            suspect_nodes: Vec::new(),
        };
        let answer = self.ask(Ask::Locate(request), deadline).await;
        let Ok(Answer::Locate(mut answer)) = answer else { return None };
        let found = answer.objects.remove(0);
        match ErrorCode::from_u32(found.code) {
            ErrorCode::Ok => {}
            ErrorCode::ObjectNotFound => {
                self.history.log(self.machine.id, key, invoked, true, Event::Missed);
                return Some(false);
            }
            ErrorCode::Internal => {
                self.history.wrong(format!("a lookup of key {key} answered INTERNAL"));
                return None;
            }
            _ => return None,
        }
        let lease = holder_share(Duration::from_millis(u64::from(found.lease_ttl_ms)));
        let mut reports = Vec::new();
        // A slow reader: its lease is what it has.
        if self.random.below(1_000) < 3 * self.stalls {
            rt::sleep(Duration::from_millis(self.random.range(20, 600))).await;
        }
        for replica in &found.replicas {
            let address = answer.nodes.iter().find(|node| node.node_id == replica.node_id).map(|n| n.address.clone());
            let Some(address) = address else { continue };
            let read = self.read(&found, replica, &address).await;
            let is_leased = found.lease_ttl_ms > 0 && asked.elapsed() <= lease;
            let (kind, why) = match read {
                Ok(bytes) => {
                    if found.lease_ttl_ms > 0 && !is_leased {
                        // Bytes that came after the lease are thrown away: neither a hit nor a miss.
                        return None;
                    }
                    match self.verify(key, &found, &bytes) {
                        Ok(()) => {
                            self.history.log(self.machine.id, key, invoked, true, Event::Got(found.object_id));
                            return Some(true);
                        }
                        Err(error) if is_leased => (v1::read_report::Kind::Corrupt, Some(error)),
                        Err(_) => continue,
                    }
                }
                Err(Some(error)) if is_leased && error.code() == ErrorCode::Internal => {
                    self.history.wrong(format!("a datanode answered {error}"));
                    continue;
                }
                // What a lease allows is refused: log time runs away from the time of those that hold it (T1, W2).
                Err(Some(error)) if is_leased && error.code() == ErrorCode::CapabilityRefused => {
                    self.history.wrong(format!("client {} holds a lease and is refused: {error}", self.machine.id));
                    continue;
                }
                Err(_) if is_leased => (v1::read_report::Kind::Unreachable, None),
                Err(_) => continue,
            };
            if let Some(error) = why
                && !self.bits_flip
            {
                let (object, replica) = (ObjectId(found.object_id), replica.replica_id);
                self.history.wrong(format!(
                    "RIGHT-BYTES: client {} read key {key} object {object} replica {replica} under a lease: {error}",
                    self.machine.id
                ));
            }
            reports.push(v1::ReadReport {
                kind: kind as i32,
                object_id: found.object_id,
                replica_id: replica.replica_id,
                node_id: replica.node_id,
                key: key_name(key).into(),
            });
        }
        if !reports.is_empty() {
            let report = Ask::ReadReport(v1::ReadReportRequest { reports });
            drop(self.ask(report, BootInstant::now().after(ATTEMPT)).await);
        }
        None
    }

    async fn read(
        &self,
        found: &v1::ObjectLocation,
        replica: &v1::Replica,
        address: &str,
    ) -> Result<Vec<u8>, Option<Error>> {
        let mut bytes = Vec::with_capacity(replica.length as usize);
        while (bytes.len() as u64) < replica.length {
            let offset = bytes.len() as u64;
            let access = ReadAccess {
                object_id: found.object_id,
                replica: replica.clone(),
                offset,
                length: (replica.length - offset).min(CHUNK as u64 * 2),
            };
            let work = self.net.at(self.machine.id, address, move |node| async move { node.read(&access) });
            let part = rt::timeout(TRANSFER, work).await.map_err(|_| None)?.ok_or(None)?;
            bytes.extend_from_slice(&part.map_err(Some)?);
        }
        Ok(bytes)
    }

    /// Everything that a reader must check.
    fn verify(&self, key: u64, found: &v1::ObjectLocation, stored: &[u8]) -> Result<(), Error> {
        let present = self.identity.as_ref().map_or(0, |identity| identity.history);
        let history = if found.history == 0 { present } else { found.history };
        let prefix_bytes = object::prefix_bytes(found.length) as usize;
        let short = || Error::new(ErrorCode::ChecksumMismatch, "it is shorter than its table");
        let prefix = stored.get(..prefix_bytes).ok_or_else(short)?;
        let header = object::verify_prefix(prefix)?;
        let hash = object::key_hash("", &key_name(key));
        header.expect(HistoryId(history), ObjectId(found.object_id), &hash, found.length)?;
        let payload = &stored[prefix_bytes..(prefix_bytes + found.length as usize).min(stored.len())];
        object::verify_parts(prefix, &[payload])?;
        // All checks passed: these must be the bytes that were put.
        if payload != content(found.object_id, found.length) {
            self.history.wrong(format!(
                "RIGHT-BYTES: key {key} object {} verified and holds other bytes than were put",
                ObjectId(found.object_id)
            ));
        }
        Ok(())
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
