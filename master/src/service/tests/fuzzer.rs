//! One caller of everything, by one seed: what it asks, and what it makes sure of in each answer.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tidepool_proto::v1::admin_service_server::AdminService;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::v1::node_service_server::NodeService;
use tidepool_proto::{Error, ErrorCode, v1};
use tonic::Request;

use super::requests::{self, ending, item, keys, mount, register};
use super::{Rig, identity};
use crate::service::nodes::beat;

pub const KEYS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "pre/i", "pre/j"];
pub const GROUPS: [&str; 2] = ["g0", "g1"];
const GROUP_OF: [&str; 10] = ["", "", "", "", "g0", "g0", "g0", "g1", "g1", ""];
const TENANTS: [&str; 3] = ["", "t1", "t2"];
const LENGTHS: [u64; 9] = [1, 100, 1_000, 3_000, 3_000, 9_000, 0, 1 << 40, u64::MAX];

/// What may be refused, and only that.
const REFUSALS: &[ErrorCode] = &[
    ErrorCode::AlreadyEnded,
    ErrorCode::CapabilityRefused,
    ErrorCode::DeadlineExceeded,
    ErrorCode::Fenced,
    ErrorCode::FitsNowhere,
    ErrorCode::GrantLost,
    ErrorCode::HardPinLimit,
    ErrorCode::IllegalClient,
    ErrorCode::InvalidKey,
    ErrorCode::InvalidParams,
    ErrorCode::NodeUnknown,
    ErrorCode::NoSpace,
    ErrorCode::NotEnoughReplicas,
    ErrorCode::NotLeader,
    ErrorCode::NotReady,
    ErrorCode::ObjectAlreadyExists,
    ErrorCode::ObjectHasLease,
    ErrorCode::ObjectHasTask,
    ErrorCode::ObjectNotFound,
    ErrorCode::PutInProgress,
    ErrorCode::ReplicaAlreadyExists,
    ErrorCode::ReplicaNotFound,
    ErrorCode::ReplicaUnavailable,
    ErrorCode::ResourceExhausted,
    ErrorCode::SegmentAlreadyExists,
    ErrorCode::SegmentNotFound,
    ErrorCode::SessionUnknown,
    ErrorCode::StaleRequest,
    ErrorCode::TaskLimit,
    ErrorCode::TaskNotFound,
    ErrorCode::TenantNotEmpty,
    ErrorCode::TenantNotRegistered,
    ErrorCode::TenantQuotaExceeded,
    ErrorCode::WrongCluster,
];

/// One caller of everything, and what it remembers to get wrong.
pub struct Fuzzer<'r> {
    rig: &'r Rig,
    random: StdRng,
    sessions: Vec<u64>,
    nodes: Vec<(u64, u64)>,
    segments: Vec<u64>,
    grants: Vec<(&'static str, u64, v1::PutGrant)>,
    tasks: Vec<u64>,
    sequence: u64,
    beats: u64,
    /// Codes by request.
    pub seen: BTreeMap<String, u64>,
}

impl<'r> Fuzzer<'r> {
    pub async fn start(rig: &'r Rig, seed: u64) -> Fuzzer<'r> {
        let mut fuzzer = Fuzzer {
            rig,
            random: StdRng::seed_from_u64(seed),
            sessions: vec![rig.hello(1).await, rig.hello(2).await],
            nodes: Vec::new(),
            segments: Vec::new(),
            grants: Vec::new(),
            tasks: Vec::new(),
            sequence: 0,
            beats: 0,
            seen: BTreeMap::new(),
        };
        for uuid in 0..2 {
            fuzzer.nodes.push(rig.datanode(uuid, 8 * 1_088).await);
        }
        fuzzer
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn pick<T: Copy>(&mut self, of: &[T], otherwise: T) -> T {
        if self.chance(4) { otherwise } else { of.choose(&mut self.random).copied().unwrap_or(otherwise) }
    }

    fn key(&mut self) -> &'static str {
        KEYS.choose(&mut self.random).expect("there are some")
    }

    fn keys(&mut self) -> Option<v1::Keys> {
        match self.random.random_range(0..40) {
            0 => None,
            1 => Some(v1::Keys { blob: vec![1, 2].into(), lengths: vec![7, u32::MAX] }),
            2 => keys(&["", "a"]),
            3 => keys(&[&"x".repeat(4_097)]),
            n => {
                let named: Vec<&str> = (0..1 + n % 4).map(|_| self.key()).collect();
                keys(&named)
            }
        }
    }

    fn session(&mut self) -> u64 {
        let sessions = self.sessions.clone();
        let stranger = if self.chance(50) { 0 } else { self.random.random() };
        self.pick(&sessions, stranger)
    }

    fn tenant(&mut self) -> &'static str {
        match self.random.random_range(0..20) {
            0..14 => TENANTS[0],
            14..17 => TENANTS[1],
            17..19 => TENANTS[2],
            _ => "nobody",
        }
    }

    /// A number for a key-named request: the next, or one that was used, or one below the floor.
    fn turn(&mut self) -> (u64, u64) {
        self.sequence += 8;
        let sequence = match self.random.random_range(0..10) {
            0 => self.sequence.saturating_sub(self.random.random_range(0..64)),
            1 => u64::MAX - self.random.random_range(0..3),
            _ => self.sequence,
        };
        (sequence, self.sequence.saturating_sub(40))
    }

    /// Counts an answer, and refuses what says nothing.
    fn note(&mut self, request: &str, error: Option<(u32, &str)>) {
        let code = error.map_or(ErrorCode::Ok, |(code, _)| ErrorCode::from_u32(code));
        if let Some((number, message)) = error {
            assert!(REFUSALS.contains(&code), "{request} was refused {number} {}: {message}", code.name());
            assert!(message.len() > 10, "{request} was refused {}: '{message}'", code.name());
        }
        *self.seen.entry(format!("{request} {}", code.name())).or_default() += 1;
    }

    fn note_items(&mut self, request: &str, errors: &[v1::ItemError]) {
        if errors.is_empty() {
            self.note(request, None);
        }
        for error in errors {
            self.note(request, Some((error.code, &error.message)));
        }
    }

    fn note_call(&mut self, request: &str, error: Option<v1::CallError>) {
        let error: Option<Error> = error.map(Into::into);
        self.note(request, error.as_ref().map(|e| (e.code() as u32, e.message())));
    }

    async fn ask(&mut self, request: &str, body: Ask) -> Option<Answer> {
        let tenant = self.tenant();
        // Short of what a put would wait for room.
        let remaining_ms = if self.chance(2) { 0 } else { 35 };
        match self.rig.ask(tenant, remaining_ms, body).await {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.note(request, Some((error.code() as u32, error.message())));
                None
            }
        }
    }

    pub async fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..2 => {
                let uuid = self.random.random_range(1..5);
                let session = self.rig.hello(uuid).await;
                if !self.sessions.contains(&session) {
                    self.sessions.push(session);
                }
            }
            2..26 => self.put_start().await,
            26..44 => self.end().await,
            44..56 => self.read().await,
            56..64 => self.remove().await,
            64..68 => self.pin_or_clear().await,
            68..76 => self.operate().await,
            76..84 => self.task().await,
            84..90 => self.member().await,
            _ => self.beat(),
        }
    }

    async fn put_start(&mut self) {
        let count = self.random.random_range(1..5);
        let mut named = Vec::new();
        let items = (0..count).map(|_| {
            let at = self.random.random_range(0..KEYS.len());
            let length = if self.chance(4) { LENGTHS[6 + at % 3] } else { LENGTHS[self.random.random_range(0..6)] };
            let group = if self.chance(90) { GROUP_OF[at] } else { "g1" };
            named.push(KEYS[at]);
            // Few tokens, so that some are those of other calls.
            item(KEYS[at], length, [self.random.random_range(0..6); 16], group)
        });
        let items: Vec<v1::PutStartItem> = items.collect();
        let (sequence, floor) = self.turn();
        let nodes: Vec<u64> = self.nodes.iter().map(|n| n.0).collect();
        let request = v1::PutStartRequest {
            session_id: self.session(),
            items,
            replica_num: [0, 1, 1, 2, 2, 3, 16][self.random.random_range(0..7)],
            replica_mode: [0, 1, 1, 2, 9][self.random.random_range(0..5)],
            excluded_nodes: if self.chance(10) { vec![self.pick(&nodes, 5)] } else { Vec::new() },
            data_type: self.random.random_range(-1..12),
            soft_pin: self.random.random_range(0..4),
            soft_pin_ttl_ms: [0, 0, 0, 5, u32::MAX][self.random.random_range(0..5)],
            hard_pin: self.chance(6),
            preferred_segments: if self.chance(10) { vec!["s0".to_owned(); 70] } else { Vec::new() },
            prefer_own_host: self.chance(10),
            upsert: self.chance(25),
            sequence,
            floor,
            independent: self.chance(30),
        };
        let session = request.session_id;
        let Some(Answer::PutStart(answer)) = self.ask("put_start", Ask::PutStart(request)).await else { return };
        assert_eq!(answer.grants.len(), named.len());
        for (key, grant) in named.into_iter().zip(answer.grants) {
            let error = grant.error.clone();
            self.note("put_start", error.as_ref().map(|e| (e.code, &*e.message)));
            if error.is_none() {
                assert!(!grant.replicas.is_empty() && grant.object_id != 0);
                self.grants.push((key, session, grant));
            }
        }
        let excess = self.grants.len().saturating_sub(24);
        self.grants.drain(..excess);
    }

    async fn end(&mut self) {
        let (mut items, mut writer) = (Vec::new(), 0);
        for _ in 0..self.random.random_range(1..4) {
            let stranger = ("x", 0, v1::PutGrant { object_id: self.random.random(), ..Default::default() });
            let last = self.grants.len();
            let (key, session, grant) = match last {
                0 => stranger,
                // The newest are the likeliest to be open.
                _ if self.chance(96) => self.grants[last - 1 - self.random.random_range(0..last.min(6))].clone(),
                _ => stranger,
            };
            writer = session;
            let stored = v1::ReplicaOutcome::Stored;
            let outcome = [stored, stored, stored, stored, v1::ReplicaOutcome::Aborted, v1::ReplicaOutcome::Unknown]
                .choose(&mut self.random)
                .copied()
                .unwrap_or(stored);
            let mut item = ending(&self.rig.service, key, &grant, outcome);
            match self.random.random_range(0..30) {
                0 => item.replicas.iter_mut().for_each(|r| r.proof = vec![7; 16].into()),
                1 => item.replicas.iter_mut().for_each(|r| r.replica_id ^= 1),
                2 => item.replicas.extend(item.replicas.clone()),
                3 => item.replicas.truncate(1),
                4 => item.replicas.iter_mut().for_each(|r| r.outcome = 77),
                _ => {}
            }
            items.push(item);
        }
        let session_id = if self.chance(90) { writer } else { self.session() };
        if self.chance(80) {
            let request = v1::PutEndRequest { items, session_id };
            if let Some(Answer::PutEnd(answer)) = self.ask("put_end", Ask::PutEnd(request)).await {
                for result in &answer.results {
                    self.note("put_end", result.error.as_ref().map(|e| (e.code, &*e.message)));
                    assert_eq!(result.copies == 0, result.error.is_some());
                }
            }
        } else {
            let request = v1::PutRevokeRequest { items, session_id };
            if let Some(Answer::PutRevoke(answer)) = self.ask("put_revoke", Ask::PutRevoke(request)).await {
                self.note_items("put_revoke", &answer.errors);
            }
        }
    }

    async fn read(&mut self) {
        let suspects: Vec<u64> =
            if self.chance(15) { self.nodes.iter().take(1).map(|n| n.0).collect() } else { Vec::new() };
        let lease_mode = self.random.random_range(0..4);
        let lease_ttl_ms = [0, 1, 5, u32::MAX][self.random.random_range(0..4)];
        match self.random.random_range(0..9) {
            0..3 => {
                let request = v1::ExistRequest { keys: self.keys(), lease_mode, lease_ttl_ms, suspect_nodes: suspects };
                let count = request.keys.as_ref().map_or(0, |k| k.lengths.len());
                if let Some(Answer::Exist(answer)) = self.ask("exist", Ask::Exist(request)).await {
                    assert_eq!(answer.present.len(), count);
                    self.note("exist", None);
                }
            }
            3..5 => {
                let request =
                    v1::LocateRequest { keys: self.keys(), lease_mode, lease_ttl_ms, suspect_nodes: suspects };
                if let Some(Answer::Locate(answer)) = self.ask("locate", Ask::Locate(request)).await {
                    for object in &answer.objects {
                        let known = object.code == 0 || REFUSALS.contains(&ErrorCode::from_u32(object.code));
                        assert!(known && (object.code == 0) != object.replicas.is_empty(), "{object:?}");
                    }
                    self.note("locate", None);
                }
            }
            5 => {
                let request = v1::StatRequest { keys: self.keys() };
                if let Some(Answer::Stat(_)) = self.ask("stat", Ask::Stat(request)).await {
                    self.note("stat", None);
                }
            }
            6..8 => {
                let request = v1::ListRequest {
                    prefix: [&b""[..], b"pre/", b"zzz"][self.random.random_range(0..3)].to_vec().into(),
                    limit: [0, 1, 3, u32::MAX][self.random.random_range(0..4)],
                    after: if self.chance(30) { self.key().as_bytes().to_vec().into() } else { Vec::new().into() },
                    regex: self.regex(),
                    data_type: self.random.random_range(-2..300),
                };
                let limit = if request.limit == 0 { 1_000 } else { request.limit as usize };
                if let Some(Answer::List(answer)) = self.ask("list", Ask::List(request)).await {
                    assert!(answer.objects.len() <= limit && answer.more != answer.next.is_empty());
                    self.note("list", None);
                }
            }
            _ => {
                let object_ids: Vec<u64> = self.grants.iter().map(|g| g.2.object_id).collect();
                let term = if self.chance(80) { self.rig.service.term() } else { self.random.random() };
                let expires_log_time_ms = object_ids.iter().map(|_| self.random.random()).collect();
                let request = v1::ReleaseLeaseRequest { object_ids, term, expires_log_time_ms };
                if self.ask("release_lease", Ask::ReleaseLease(request)).await.is_some() {
                    self.note("release_lease", None);
                }
                let report = |(_, _, grant): &(&str, u64, v1::PutGrant)| v1::ReadReport {
                    kind: (grant.object_id >> 14 & 3) as i32,
                    object_id: grant.object_id,
                    replica_id: grant.replicas.first().map_or(0, |r| r.replica_id),
                    node_id: 1,
                    key: Vec::new().into(),
                };
                let reports = self.grants.iter().map(report).collect();
                if self.ask("read_report", Ask::ReadReport(v1::ReadReportRequest { reports })).await.is_some() {
                    self.note("read_report", None);
                }
            }
        }
    }

    fn regex(&mut self) -> String {
        let long = "x".repeat(5_000);
        let choices = ["", "", "^[a-c]$", "(((a+)+)+)+$", "(", "(a{1000}){1000}", &long, "\\w*\\s*^$", "^pre/"];
        (*choices.choose(&mut self.random).expect("there are some")).to_owned()
    }

    async fn remove(&mut self) {
        let ((sequence, floor), mode) = (self.turn(), self.random.random_range(0..4));
        let session_id = self.session();
        if self.chance(70) {
            let request = v1::RemoveRequest { session_id, sequence, floor, keys: self.keys(), mode };
            if let Some(Answer::Remove(answer)) = self.ask("remove", Ask::Remove(request)).await {
                self.note_items("remove", &answer.errors);
            }
            return;
        }
        let request = v1::RemoveMatchingRequest {
            session_id,
            sequence,
            floor,
            prefix: if self.chance(50) { b"pre/"[..].into() } else { Vec::new().into() },
            regex: self.regex(),
            mode,
            after: Vec::new().into(),
        };
        if let Some(Answer::RemoveMatching(_)) = self.ask("remove_matching", Ask::RemoveMatching(request)).await {
            self.note("remove_matching", None);
        }
    }

    async fn pin_or_clear(&mut self) {
        if self.chance(50) {
            let ttl_ms = [0, 0, 9, u32::MAX][self.random.random_range(0..4)];
            let one = keys(&[self.key()]);
            let keys = if self.chance(60) { one } else { self.keys() };
            let request = v1::PinRequest { keys, action: self.random.random_range(0..4), ttl_ms };
            if let Some(Answer::Pin(answer)) = self.ask("pin", Ask::Pin(request)).await {
                self.note_items("pin", &answer.errors);
            }
            return;
        }
        let segment_name = ["", "s0", "s1", "none"][self.random.random_range(0..4)].to_owned();
        let mut request = v1::ReplicaClearRequest { keys: self.keys(), ..Default::default() };
        request.segment_name = segment_name;
        if let Some(Answer::ReplicaClear(_)) = self.ask("replica_clear", Ask::ReplicaClear(request)).await {
            self.note("replica_clear", None);
        }
    }

    async fn operate(&mut self) {
        let admin = &self.rig.admin;
        let name = ["t1", "t2", "t2", "default", "", "_own", "t\n"][self.random.random_range(0..7)].to_owned();
        match self.random.random_range(0..10) {
            0..4 => {
                let request = v1::SetTenantRequest {
                    name,
                    quota_bytes: [0, 3_000, 9_000, u64::MAX][self.random.random_range(0..4)],
                    quota_objects: [0, 2, 5, u64::MAX][self.random.random_range(0..4)],
                    refuse_over_quota: self.random.random(),
                };
                let answer = admin.set_tenant(Request::new(request)).await.expect("answered").into_inner();
                self.note_call("set_tenant", answer.error);
            }
            4 => {
                let request = v1::DropTenantRequest { name };
                let answer = admin.drop_tenant(Request::new(request)).await.expect("answered").into_inner();
                self.note_call("drop_tenant", answer.error);
            }
            5 => {
                let answer = admin.list_tenants(Request::new(v1::ListTenantsRequest {})).await;
                self.note_call("list_tenants", answer.expect("answered").into_inner().error);
            }
            6 => {
                let request =
                    v1::StateDigestRequest { at_least_index: self.random.random_range(0..3), remaining_ms: 5 };
                let answer = admin.state_digest(Request::new(request)).await.expect("answered").into_inner();
                self.note_call("state_digest", answer.error);
            }
            7 => {
                let answer = admin.status(Request::new(v1::StatusRequest {})).await.expect("answered").into_inner();
                assert_eq!(answer.role, "leader");
                for segment in answer.segments {
                    let used = segment.processing_bytes + segment.complete_bytes + segment.retired_bytes;
                    assert!(segment.free_bytes + used == segment.capacity_bytes, "{segment:?}");
                }
            }
            8 => {
                let request = v1::SetLogLevelRequest { filter: "no=such=filter".to_owned() };
                let answer = admin.set_log_level(Request::new(request)).await.expect("answered").into_inner();
                self.note_call("set_log_level", answer.error);
            }
            _ => {
                let request = v1::TransferRequest { target_node_id: self.random.random_range(1..4) };
                let answer = admin.transfer_leader(Request::new(request)).await.expect("answered").into_inner();
                let refused: Option<Error> = answer.error.map(Into::into);
                assert!(refused.is_some(), "there is nobody to hand over to");
            }
        }
    }

    async fn task(&mut self) {
        let admin = &self.rig.admin;
        let named: Vec<String> = self.segments.iter().map(u64::to_string).collect();
        match self.random.random_range(0..6) {
            0..3 => {
                let places = |most: usize, random: &mut StdRng| -> Vec<String> {
                    let count = random.random_range(0..=most);
                    (0..count).map(|_| named.choose(random).cloned().unwrap_or_else(|| "s1".to_owned())).collect()
                };
                let request = v1::CreateTaskRequest {
                    kind: self.random.random_range(0..5),
                    source_segments: places(2, &mut self.random),
                    target_segments: places(2, &mut self.random),
                    token: vec![self.random.random_range(0..200u8); [16, 16, 16, 3][self.random.random_range(0..4)]]
                        .into(),
                    concurrency: [0, 1, u32::MAX][self.random.random_range(0..3)],
                    unmount: self.random.random_range(0..10) == 0,
                    tenant: TENANTS[self.random.random_range(0..3)].to_owned(),
                    key: KEYS[self.random.random_range(0..KEYS.len())].as_bytes().to_vec().into(),
                };
                let answer = admin.create_task(Request::new(request)).await.expect("answered").into_inner();
                if answer.error.is_none() {
                    self.tasks.push(answer.task_id);
                }
                self.note_call("create_task", answer.error);
            }
            3 => {
                let task_id = if self.random.random_range(0..2) == 0 { 0 } else { self.random.random() };
                let answer = admin.list_tasks(Request::new(v1::ListTasksRequest { task_id })).await;
                self.note_call("list_tasks", answer.expect("answered").into_inner().error);
            }
            _ => {
                let task_id = self.tasks.pop().unwrap_or(99);
                let answer = admin.cancel_task(Request::new(v1::CancelTaskRequest { task_id })).await;
                self.note_call("cancel_task", answer.expect("answered").into_inner().error);
            }
        }
    }

    /// A life, right or wrong.
    fn life(&mut self) -> (u64, u64) {
        let nodes = self.nodes.clone();
        let (node, life) = self.pick(&nodes, (77, 77));
        if self.chance(8) { (node, life - 16) } else { (node, life) }
    }

    async fn member(&mut self) {
        let faces = &self.rig.nodes;
        match self.random.random_range(0..8) {
            0 => {
                let uuid = self.random.random_range(0..3u8);
                let mut request =
                    register(uuid, uuid + 8 * self.random.random_range(0..5), ["h0", "h1"][usize::from(uuid % 2)]);
                match self.random.random_range(0..12) {
                    0 => request.node_uuid = vec![1].into(),
                    1 => request.host_id = String::new(),
                    2 => request.identity = None,
                    3 => request.identity = Some(v1::Identity { history: 5, ..identity() }),
                    _ => {}
                }
                let answer = NodeService::register(faces, Request::new(request)).await.expect("answered").into_inner();
                if answer.error.is_none() {
                    self.nodes.retain(|n| n.0 != answer.node_id);
                    self.nodes.push((answer.node_id, answer.incarnation));
                }
                self.note_call("register", answer.error);
            }
            1..6 => {
                let name = ["s0", "s0", "s1", ""][self.random.random_range(0..4)];
                let bytes = [8_704, 8_704, 4_352, 0, 100, u64::MAX][self.random.random_range(0..6)];
                let request = mount(self.life(), name, bytes);
                let answer = NodeService::mount(faces, Request::new(request)).await.expect("answered").into_inner();
                for mounted in &answer.segments {
                    self.note("mount", mounted.error.as_ref().map(|e| (e.code, &*e.message)));
                    if mounted.error.is_none() && !self.segments.contains(&mounted.segment_id) {
                        self.segments.push(mounted.segment_id);
                    }
                }
                self.note_call("mount", answer.error);
            }
            _ => {
                let (node_id, incarnation) = self.life();
                let segments = self.segments.clone();
                let segment_ids = if self.chance(85) { vec![self.pick(&segments, 5)] } else { Vec::new() };
                let request = v1::UnmountRequest { node_id, incarnation, segment_ids, identity: Some(identity()) };
                let answer = NodeService::unmount(faces, Request::new(request)).await.expect("answered").into_inner();
                self.note_call("unmount", answer.error);
            }
        }
    }

    /// A datanode's beat: it fences what it is told, has verified what it was asked, and made what it was to copy.
    fn beat(&mut self) {
        let (node_id, incarnation) = self.life();
        self.beats += 1;
        let mut request = v1::HeartbeatRequest {
            node_id,
            incarnation,
            history: if self.chance(97) { self.rig.service.history().0 } else { 3 },
            sequence: self.beats,
            ..Default::default()
        };
        let first = beat(&self.rig.service, request.clone(), &mut None);
        if let Ok(told) = &first {
            request.fenced_replicas = told.fence_replicas.clone();
            if self.chance(10) {
                request.fenced_replicas.push(self.random.random());
            }
            let verdict = |order: &v1::VerifyReplica| v1::Verdict {
                object_id: order.object_id,
                replica_id: order.replica_id,
                intact: order.object_id & 1 << 14 == 0,
                message: "as it is".to_owned(),
            };
            request.verdicts = told.verify.iter().map(verdict).collect();
            for order in &told.copy {
                let Some(target) = &order.target else { continue };
                let outcome = if self.chance(80) { v1::ReplicaOutcome::Stored } else { v1::ReplicaOutcome::Aborted };
                let status = requests::status(&self.rig.service, order.object_id, target, outcome);
                request.copies.push(v1::CopyReport {
                    task_id: order.task_id,
                    replica_id: target.replica_id,
                    outcome: outcome as i32,
                    proof: if self.chance(95) { status.proof } else { vec![0; 16].into() },
                    message: String::new(),
                });
            }
        }
        let second = beat(&self.rig.service, request, &mut None);
        for answer in [first, second] {
            let error = answer.err();
            self.note("heartbeat", error.as_ref().map(|e| (e.code() as u32, e.message())));
        }
    }
}
