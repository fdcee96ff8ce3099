//! The directory that all fake masters of a cluster share, and the faults they are told to show.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use bytes::Bytes;
use tidepool_proto::v1::{self, client_request::Body as Ask, client_response::Body as Say};
use tidepool_proto::{Address, Error, ErrorCode, OUTCOMES_PER_SESSION_MAX, OpId};

pub struct Directory {
    pub state: Mutex<State>,
}

pub struct State {
    pub leader: Option<usize>,
    pub term: u64,
    pub history: u64,
    pub addresses: HashMap<usize, String>,
    pub nodes: Vec<(u64, Address)>,
    pub objects: BTreeMap<Vec<u8>, Object>,
    pub lease_ttl_max_ms: u32,
    pub protocol_version: u32,
    pub session_id: u64,
    /// A master that believes it leads, in a term of the past.
    pub stale: Option<(usize, u64)>,
    /// What a put is told that finds no node.
    pub no_room: ErrorCode,
    /// And when to come again; 0: no advice.
    pub no_room_advice_ms: u32,
    /// Items of calls in any session but the present one are refused.
    pub knows_own_session_only: bool,
    pub next_id: u64,
    pub next_node: usize,
    /// Executed removes: (session, sequence) -> removed.
    pub removes: HashMap<(u64, u64), bool>,
    pub removals_executed: u64,
    /// Removes that were refused because too many outcomes lie above the floor.
    pub removals_refused: u64,
    pub floors: Vec<u64>,
    pub reports: Vec<v1::ReadReport>,
    pub released: Vec<u64>,
    pub revoked: Vec<v1::PutEndItem>,
    pub ends: Vec<v1::PutEndItem>,
    /// Requests seen, by op.
    pub seen: HashMap<&'static str, u64>,
    pub tokens: Vec<Bytes>,
    /// Remaining faults by op: execute and do not answer.
    pub swallow: HashMap<&'static str, u64>,
    /// Remaining faults by op: answer this instead.
    pub refuse: HashMap<&'static str, (u64, ErrorCode)>,
    pub suspects_seen: Vec<Vec<u64>>,
    /// Takes no notice of suspect nodes, as an older master would.
    pub deaf_to_suspects: bool,
}

#[derive(Clone)]
pub struct Object {
    pub id: u64,
    pub length: u64,
    pub token: Bytes,
    pub complete: bool,
    pub replicas: Vec<v1::Replica>,
}

pub fn op_of(ask: &Ask) -> &'static str {
    match ask {
        Ask::Hello(_) => "hello",
        Ask::Exist(_) => "exist",
        Ask::Locate(_) => "locate",
        Ask::PutStart(_) => "put_start",
        Ask::PutEnd(_) => "put_end",
        Ask::PutRevoke(_) => "put_revoke",
        Ask::Remove(_) => "remove",
        Ask::ReleaseLease(_) => "release_lease",
        Ask::List(_) => "list",
        Ask::Stat(_) => "stat",
        Ask::ReadReport(_) => "read_report",
        Ask::RemoveMatching(_) => "remove_matching",
        Ask::Pin(_) => "pin",
        Ask::ReplicaClear(_) => "replica_clear",
    }
}

impl Directory {
    pub fn new(nodes: Vec<(u64, Address)>) -> Directory {
        Directory {
            state: Mutex::new(State {
                leader: Some(0),
                term: 1,
                history: 7,
                addresses: HashMap::new(),
                nodes,
                objects: BTreeMap::new(),
                lease_ttl_max_ms: 10_000,
                protocol_version: tidepool_proto::PROTOCOL_VERSION,
                session_id: 1,
                stale: None,
                no_room: ErrorCode::NoSpace,
                no_room_advice_ms: 5,
                knows_own_session_only: false,
                next_id: 1,
                next_node: 0,
                removes: HashMap::new(),
                removals_executed: 0,
                removals_refused: 0,
                floors: Vec::new(),
                reports: Vec::new(),
                released: Vec::new(),
                revoked: Vec::new(),
                ends: Vec::new(),
                seen: HashMap::new(),
                tokens: Vec::new(),
                swallow: HashMap::new(),
                refuse: HashMap::new(),
                suspects_seen: Vec::new(),
                deaf_to_suspects: false,
            }),
        }
    }

    pub fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.lock().unwrap())
    }
    /// Makes another master lead, in a new term.
    pub fn lead(&self, master: Option<usize>) {
        self.with(|s| {
            s.leader = master;
            s.term += 1;
        });
    }
    pub fn seen(&self, op: &'static str) -> u64 {
        self.with(|s| s.seen.get(op).copied().unwrap_or(0))
    }
    /// Executes the next `count` of an op without answering.
    pub fn swallow(&self, op: &'static str, count: u64) {
        self.with(|s| s.swallow.insert(op, count));
    }
    pub fn refuse(&self, op: &'static str, count: u64, code: ErrorCode) {
        self.with(|s| s.refuse.insert(op, (count, code)));
    }

    /// Answers as master number `master`; None: no answer.
    pub fn answer(&self, master: usize, request: v1::ClientRequest) -> Option<v1::ClientResponse> {
        let mut state = self.state.lock().unwrap();
        let mut answer = v1::ClientResponse { id: request.id, term: state.term, error: None, body: None };
        let Some(ask) = request.body else {
            answer.error = Some(Error::new(ErrorCode::InvalidParams, "no body").into());
            return Some(answer);
        };
        assert!(request.remaining_ms > 0, "a request without time was sent");
        let op = op_of(&ask);
        *state.seen.entry(op).or_default() += 1;
        if let Some((_, term)) = state.stale.filter(|(stale, _)| *stale == master) {
            answer.term = term;
            answer.body = Some(state.execute(ask));
            return Some(answer);
        }
        if state.leader != Some(master) {
            let hint = state.leader.map(|leader| v1::LeaderHint {
                node_id: leader as u64,
                address: state.addresses.get(&leader).cloned().unwrap_or_default(),
                term: state.term,
            });
            answer.error = Some(Error::new(ErrorCode::NotLeader, "another master leads").with_leader(hint).into());
            return Some(answer);
        }
        if let Some((count, code)) = state.refuse.get_mut(op).filter(|(count, _)| *count > 0) {
            *count -= 1;
            answer.error = Some(Error::new(*code, "told to refuse").into());
            return Some(answer);
        }
        answer.body = Some(state.execute(ask));
        match state.swallow.get_mut(op).filter(|count| **count > 0) {
            Some(count) => {
                *count -= 1;
                None
            }
            None => Some(answer),
        }
    }
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        OpId::new(self.next_id, 0, 0).0
    }

    fn node_addresses(&self) -> Vec<v1::NodeAddress> {
        let address = |(id, address): &(u64, Address)| v1::NodeAddress {
            node_id: *id,
            address: address.to_string(),
            host_id: format!("host-{id}"),
        };
        self.nodes.iter().map(address).collect()
    }

    fn execute(&mut self, ask: Ask) -> Say {
        match ask {
            Ask::Hello(_) => Say::Hello(v1::HelloResponse {
                identity: Some(v1::Identity {
                    cluster_uuid: Bytes::from_static(&[5; 16]),
                    history: self.history,
                    node_id: 1,
                    protocol_version: self.protocol_version,
                    build: String::new(),
                    ancestors: Vec::new(),
                }),
                session_id: self.session_id,
                members: self
                    .addresses
                    .iter()
                    .map(|(&id, address)| v1::Member { node_id: id as u64, address: address.clone() })
                    .collect(),
                lease_ttl_default_ms: 10_000,
                lease_ttl_max_ms: self.lease_ttl_max_ms,
            }),
            Ask::Exist(exist) => {
                let keys = exist.keys.unwrap();
                let present = keys.iter().unwrap().map(|key| {
                    let readable =
                        |o: &Object| o.complete && o.replicas.iter().any(|r| !exist.suspect_nodes.contains(&r.node_id));
                    u8::from(self.objects.get(key).is_some_and(readable))
                });
                Say::Exist(v1::ExistResponse { present: present.collect(), lease_ttl_ms: self.lease_ttl_max_ms })
            }
            Ask::Locate(locate) => {
                self.suspects_seen.push(locate.suspect_nodes.clone());
                let suspects = if self.deaf_to_suspects { Vec::new() } else { locate.suspect_nodes };
                let ttl = locate.lease_ttl_ms.min(self.lease_ttl_max_ms);
                let keys = locate.keys.unwrap();
                let objects = keys.iter().unwrap().map(|key| self.locate(key, &suspects, ttl)).collect();
                Say::Locate(v1::LocateResponse { objects, nodes: self.node_addresses() })
            }
            Ask::PutStart(start) => {
                let grants = start.items.iter().map(|item| self.put_start(&start, item)).collect();
                Say::PutStart(v1::PutStartResponse { grants, nodes: self.node_addresses() })
            }
            Ask::PutEnd(end) => {
                self.ends.extend(end.items.clone());
                Say::PutEnd(v1::PutEndResponse { results: end.items.iter().map(|item| self.put_end(item)).collect() })
            }
            Ask::PutRevoke(revoke) => {
                for item in &revoke.items {
                    let mine = self.objects.get(&item.key[..]).is_some_and(|o| o.id == item.object_id && !o.complete);
                    if mine {
                        self.objects.remove(&item.key[..]);
                    }
                }
                self.revoked.extend(revoke.items);
                Say::PutRevoke(v1::PutRevokeResponse::default())
            }
            Ask::Remove(remove) => {
                self.floors.push(remove.floor);
                let floor = self.floors.iter().copied().max().unwrap_or(0);
                let kept = self.removes.keys().filter(|(_, sequence)| *sequence >= floor).count();
                let keys = remove.keys.unwrap();
                let mut errors = Vec::new();
                for (i, key) in keys.iter().unwrap().enumerate() {
                    if self.knows_own_session_only && remove.session_id != self.session_id {
                        errors.push(Error::new(ErrorCode::SessionUnknown, "say hello").for_item(i));
                        continue;
                    }
                    let number = (remove.session_id, remove.sequence + i as u64);
                    if kept + i >= OUTCOMES_PER_SESSION_MAX && !self.removes.contains_key(&number) {
                        self.removals_refused += 1;
                        errors.push(Error::new(ErrorCode::ResourceExhausted, "too many outcomes").for_item(i));
                        continue;
                    }
                    let removed = match self.removes.get(&number) {
                        Some(&outcome) => outcome,
                        None => {
                            self.removals_executed += 1;
                            let outcome = self.objects.remove(key).is_some();
                            self.removes.insert(number, outcome);
                            outcome
                        }
                    };
                    if !removed {
                        errors.push(Error::new(ErrorCode::ObjectNotFound, "not found").for_item(i));
                    }
                }
                Say::Remove(v1::RemoveResponse { errors })
            }
            Ask::ReleaseLease(release) => {
                self.released.extend(release.object_ids);
                Say::ReleaseLease(v1::ReleaseLeaseResponse {})
            }
            Ask::List(list) => {
                let objects =
                    self.objects.iter().filter(|(key, _)| key.starts_with(&list.prefix) && key[..] > list.after[..]);
                let objects = objects.map(|(key, o)| v1::ListedObject {
                    key: Bytes::copy_from_slice(key),
                    object_id: o.id,
                    length: o.length,
                    replicas: o.replicas.len() as u32,
                    ..Default::default()
                });
                Say::List(v1::ListResponse { objects: objects.collect(), more: false, next: Bytes::new() })
            }
            Ask::Stat(stat) => {
                let keys = stat.keys.unwrap();
                let objects = keys.iter().unwrap().map(|key| match self.objects.get(key) {
                    Some(o) => v1::ObjectStat {
                        object_id: o.id,
                        length: o.length,
                        state: if o.complete { "COMPLETE" } else { "PROCESSING" }.into(),
                        replicas: o
                            .replicas
                            .iter()
                            .map(|r| v1::ReplicaStat {
                                replica_id: r.replica_id,
                                node_id: r.node_id,
                                ..Default::default()
                            })
                            .collect(),
                        ..Default::default()
                    },
                    None => v1::ObjectStat { code: ErrorCode::ObjectNotFound as u32, ..Default::default() },
                });
                Say::Stat(v1::StatResponse { objects: objects.collect(), nodes: self.node_addresses() })
            }
            Ask::ReplicaClear(clear) => {
                let keys = clear.keys.unwrap();
                let cleared = keys.iter().unwrap().enumerate().map(|(i, key)| {
                    let number = (clear.session_id, clear.sequence + i as u64);
                    if let Some(&outcome) = self.removes.get(&number) {
                        return u8::from(outcome);
                    }
                    self.removals_executed += 1;
                    let outcome = self.objects.remove(key).is_some();
                    self.removes.insert(number, outcome);
                    u8::from(outcome)
                });
                Say::ReplicaClear(v1::ReplicaClearResponse { cleared: cleared.collect() })
            }
            Ask::RemoveMatching(_) | Ask::Pin(_) => {
                panic!("the fake directory has no such thing")
            }
            Ask::ReadReport(report) => {
                self.reports.extend(report.reports);
                Say::ReadReport(v1::ReadReportResponse {})
            }
        }
    }

    fn locate(&self, key: &[u8], suspects: &[u64], ttl: u32) -> v1::ObjectLocation {
        let code = |code: ErrorCode| v1::ObjectLocation { code: code as u32, ..Default::default() };
        match self.objects.get(key) {
            None => code(ErrorCode::ObjectNotFound),
            Some(o) if !o.complete => code(ErrorCode::NotReady),
            Some(o) => {
                let replicas: Vec<v1::Replica> =
                    o.replicas.iter().filter(|r| !suspects.contains(&r.node_id)).cloned().collect();
                if replicas.is_empty() {
                    return code(ErrorCode::ReplicaUnavailable);
                }
                v1::ObjectLocation {
                    code: 0,
                    object_id: o.id,
                    length: o.length,
                    suspect_copies: (o.replicas.len() - replicas.len()) as u32,
                    replicas,
                    lease_ttl_ms: ttl,
                    history: 0,
                }
            }
        }
    }

    fn put_start(&mut self, start: &v1::PutStartRequest, item: &v1::PutStartItem) -> v1::PutGrant {
        self.tokens.push(item.token.clone());
        let error = |code: ErrorCode, advice: u32| v1::PutGrant {
            error: Some(Error::new(code, "told so").retry_after(advice).for_item(0)),
            ..Default::default()
        };
        if self.knows_own_session_only && start.session_id != self.session_id {
            return error(ErrorCode::SessionUnknown, 0);
        }
        if let Some(o) = self.objects.get(&item.key[..]) {
            if o.complete {
                return error(ErrorCode::ObjectAlreadyExists, 0);
            }
            if o.token != item.token {
                return error(ErrorCode::PutInProgress, 1);
            }
            return v1::PutGrant { error: None, object_id: o.id, remaining_ms: 30_000, replicas: o.replicas.clone() };
        }
        let free: Vec<u64> =
            self.nodes.iter().map(|(id, _)| *id).filter(|id| !start.excluded_nodes.contains(id)).collect();
        let wanted = start.replica_num.max(1) as usize;
        let strict = start.replica_mode() == v1::ReplicaMode::Strict;
        if free.is_empty() || (strict && free.len() < wanted) {
            return error(self.no_room, self.no_room_advice_ms);
        }
        let id = self.id();
        let replicas: Vec<v1::Replica> = (0..wanted.min(free.len()))
            .map(|slot| {
                self.next_node += 1;
                v1::Replica {
                    replica_id: OpId(id).with_slot(slot + 1).0,
                    segment_id: 1,
                    incarnation: 1,
                    node_id: free[(self.next_node + slot) % free.len()],
                    offset: 0,
                    length: tidepool_proto::object::stored_bytes(item.length),
                    kind: v1::ReplicaKind::Memory as i32,
                    expires_log_time_ms: 1,
                    mac: Bytes::from_static(&[0; 16]),
                }
            })
            .scan(Vec::new(), |used: &mut Vec<u64>, mut replica| {
                if used.contains(&replica.node_id) {
                    replica.node_id = *free.iter().find(|id| !used.contains(id)).unwrap();
                }
                used.push(replica.node_id);
                Some(replica)
            })
            .collect();
        let object =
            Object { id, length: item.length, token: item.token.clone(), complete: false, replicas: replicas.clone() };
        self.objects.insert(item.key.to_vec(), object);
        v1::PutGrant { error: None, object_id: id, remaining_ms: 30_000, replicas }
    }

    fn put_end(&mut self, item: &v1::PutEndItem) -> v1::PutEndResult {
        let error =
            |code: ErrorCode| v1::PutEndResult { error: Some(Error::new(code, "told so").for_item(0)), copies: 0 };
        let Some(object) = self.objects.get_mut(&item.key[..]).filter(|o| o.id == item.object_id) else {
            return error(ErrorCode::GrantLost);
        };
        if !object.complete {
            let stored = |replica: &v1::Replica| {
                item.replicas.iter().any(|s| {
                    s.replica_id == replica.replica_id
                        && s.outcome() == v1::ReplicaOutcome::Stored
                        && s.proof.len() == 16
                })
            };
            object.replicas.retain(stored);
            object.complete = true;
        }
        assert!(!object.replicas.is_empty(), "a put was ended without a stored copy");
        v1::PutEndResult { error: None, copies: object.replicas.len() as u32 }
    }
}
