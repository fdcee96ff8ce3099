//! A quorum of one over real sockets and a real log, a datanode that is only its control half, and a client that
//! speaks the wire by hand.
#![allow(dead_code, missing_docs, clippy::disallowed_methods)]

use std::time::Duration;

use tidepool_master::{LogFilter, Master, MasterOptions};
use tidepool_proto::capability::{Capability, Secret, Verb};
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::v1::client_service_client::ClientServiceClient;
use tidepool_proto::v1::node_service_client::NodeServiceClient;
use tidepool_proto::{Address, ErrorCode, History, NodeId, ObjectId, PROTOCOL_VERSION, v1};
use tidepool_raft::Member;
use tonic::transport::Channel;

pub struct Quorum {
    pub master: Master,
    pub uri: String,
    _dir: tempfile::TempDir,
}

/// A port that was free a moment ago. Members must know each other's ports before they listen.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

impl Drop for Quorum {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.master.readiness().audit_violations, 0, "the auditor found what the test did not");
        }
    }
}

impl Quorum {
    pub async fn start(adjust: impl FnOnce(&mut MasterOptions)) -> Quorum {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let address: Address = format!("127.0.0.1:{}", free_port()).parse().expect("an address");
        let members = vec![Member { node_id: NodeId(1), address: address.clone() }];
        let mut options =
            MasterOptions::new(NodeId(1), dir.path().to_owned(), address.clone(), address.clone(), members);
        options.lease_ttl_max = Duration::from_secs(10);
        // Often, so that every test is audited while it runs.
        options.audit_interval = Duration::from_millis(20);
        // The datanodes of these tests do not beat: their silence is to mean nothing unless a test says so.
        options.node_suspect_timeout = Duration::from_secs(60);
        adjust(&mut options);
        let master = Master::start(options, LogFilter::fixed()).await.expect("a quorum of one starts");
        let quorum = Quorum { master, uri: address.to_uri(), _dir: dir };
        until("the master leads", || async { quorum.master.readiness().ready }).await;
        quorum
    }

    pub async fn client(&self) -> Client {
        let mut client = Client {
            rpc: ClientServiceClient::connect(self.uri.clone()).await.expect("the client connects"),
            session: 0,
            tenant: String::new(),
            remaining_ms: 5_000,
        };
        let hello = v1::HelloRequest {
            identity: Some(v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }),
            client_uuid: rand::random::<[u8; 16]>().to_vec().into(),
            host_id: String::new(),
            lineage: Vec::new(),
        };
        match client.ask(Ask::Hello(hello)).await {
            Ok(Answer::Hello(hello)) => client.session = hello.session_id,
            other => panic!("hello answered {other:?}"),
        }
        client
    }

    pub async fn datanode(&self, bytes: u64) -> Datanode {
        self.datanode_on("host", bytes).await
    }

    pub async fn datanode_on(&self, host_id: &str, bytes: u64) -> Datanode {
        let mut rpc = NodeServiceClient::connect(self.uri.clone()).await.expect("the datanode connects");
        let register = v1::RegisterRequest {
            identity: Some(v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }),
            node_uuid: rand::random::<[u8; 16]>().to_vec().into(),
            address: "127.0.0.1:1".to_owned(),
            host_id: host_id.to_owned(),
            process_uuid: rand::random::<[u8; 16]>().to_vec().into(),
        };
        let registered = rpc.register(register).await.expect("register").into_inner();
        assert_eq!(registered.error, None);
        let mount = v1::MountRequest {
            node_id: registered.node_id,
            incarnation: registered.incarnation,
            segments: vec![v1::MountSegment { name: "dram0".to_owned(), bytes }],
            identity: registered.identity.clone(),
        };
        let mounted = rpc.mount(mount).await.expect("mount").into_inner();
        assert_eq!((mounted.error, mounted.segments[0].error.clone()), (None, None));
        Datanode {
            rpc,
            segment_id: mounted.segments[0].segment_id,
            node_id: registered.node_id,
            incarnation: registered.incarnation,
            secret: Secret(registered.cluster_secret[..].try_into().expect("32 bytes")),
            history: History(registered.identity.expect("an identity").history),
        }
    }
}

pub struct Datanode {
    pub rpc: NodeServiceClient<Channel>,
    pub segment_id: u64,
    pub node_id: u64,
    pub incarnation: u64,
    pub secret: Secret,
    pub history: History,
}

impl Datanode {
    /// The proof a datanode returns for a grant.
    pub fn proof(&self, verb: Verb, object: u64, replica: &v1::Replica) -> bytes::Bytes {
        let capability = Capability::from_replica(verb, ObjectId(object), replica);
        capability.sign(&self.secret, self.history).to_vec().into()
    }

    pub fn beat(&self, sequence: u64, fenced: Vec<u64>) -> v1::HeartbeatRequest {
        v1::HeartbeatRequest {
            node_id: self.node_id,
            incarnation: self.incarnation,
            history: self.history.0,
            sequence,
            fenced_replicas: fenced,
            verdicts: Vec::new(),
            identity: None,
            copies: Vec::new(),
            presence: None,
        }
    }
}

#[derive(Clone)]
pub struct Client {
    pub rpc: ClientServiceClient<Channel>,
    pub session: u64,
    pub tenant: String,
    pub remaining_ms: u32,
}

impl Client {
    pub async fn ask(&mut self, body: Ask) -> Result<Answer, tidepool_proto::Error> {
        let tenant = self.tenant.clone();
        let request = v1::ClientRequest { id: 1, remaining_ms: self.remaining_ms, tenant, body: Some(body) };
        let response = self.rpc.call(request).await.expect("the call reaches the master").into_inner();
        match (response.body, response.error) {
            (Some(body), None) => Ok(body),
            (None, Some(error)) => Err(error.into()),
            both => panic!("neither answer nor error: {both:?}"),
        }
    }

    pub async fn start(&mut self, key: &[u8], length: u64) -> v1::PutGrant {
        self.start_with(key, length, rand::random()).await
    }

    pub async fn start_with(&mut self, key: &[u8], length: u64, token: [u8; 16]) -> v1::PutGrant {
        let item = item(key, length, token);
        let request = v1::PutStartRequest { session_id: self.session, items: vec![item], ..Default::default() };
        match self.ask(Ask::PutStart(request)).await {
            Ok(Answer::PutStart(mut r)) => r.grants.remove(0),
            other => panic!("put start answered {other:?}"),
        }
    }

    /// Starts a batch under any terms; one grant an item.
    pub async fn start_all(&mut self, request: v1::PutStartRequest) -> Vec<v1::PutGrant> {
        let request = v1::PutStartRequest { session_id: self.session, ..request };
        match self.ask(Ask::PutStart(request)).await {
            Ok(Answer::PutStart(r)) => r.grants,
            other => panic!("put start answered {other:?}"),
        }
    }

    /// Puts a batch under any terms; one code an item.
    pub async fn put_all(&mut self, request: v1::PutStartRequest, node: &Datanode) -> Vec<ErrorCode> {
        let keys: Vec<bytes::Bytes> = request.items.iter().map(|item| item.key.clone()).collect();
        let mut codes = Vec::new();
        for (key, grant) in keys.iter().zip(self.start_all(request).await) {
            codes.push(match grant.error {
                Some(error) => ErrorCode::of_item(&error),
                None => code(&self.end(key, &grant, node).await.error),
            });
        }
        codes
    }

    pub async fn end(&mut self, key: &[u8], grant: &v1::PutGrant, node: &Datanode) -> v1::PutEndResult {
        let statuses = grant.replicas.iter().map(|r| v1::ReplicaStatus {
            replica_id: r.replica_id,
            outcome: v1::ReplicaOutcome::Stored as i32,
            proof: node.proof(Verb::Stored, grant.object_id, r),
        });
        self.end_with(key, grant.object_id, statuses.collect()).await
    }

    pub async fn end_with(&mut self, key: &[u8], object: u64, replicas: Vec<v1::ReplicaStatus>) -> v1::PutEndResult {
        let item = v1::PutEndItem { key: key.to_vec().into(), object_id: object, replicas };
        match self.ask(Ask::PutEnd(v1::PutEndRequest { items: vec![item], session_id: self.session })).await {
            Ok(Answer::PutEnd(mut r)) => r.results.remove(0),
            other => panic!("put end answered {other:?}"),
        }
    }

    pub async fn put(&mut self, key: &[u8], length: u64, node: &Datanode) -> u64 {
        let grant = self.start(key, length).await;
        assert_eq!(grant.error, None, "put of {key:?}");
        let result = self.end(key, &grant, node).await;
        assert_eq!((result.error, result.copies), (None, 1));
        grant.object_id
    }

    pub async fn exist(&mut self, keys: &[&[u8]], mode: v1::LeaseMode, ttl_ms: u32) -> Vec<bool> {
        let request = v1::ExistRequest {
            keys: Some(v1::Keys::pack(keys)),
            lease_mode: mode as i32,
            lease_ttl_ms: ttl_ms,
            suspect_nodes: Vec::new(),
        };
        match self.ask(Ask::Exist(request)).await {
            Ok(Answer::Exist(r)) => r.present.iter().map(|&p| p == 1).collect(),
            other => panic!("exist answered {other:?}"),
        }
    }

    pub async fn remove(&mut self, key: &[u8], sequence: u64, mode: v1::RemoveMode) -> ErrorCode {
        let request = v1::RemoveRequest {
            session_id: self.session,
            sequence,
            floor: 0,
            keys: Some(v1::Keys::pack([key])),
            mode: mode as i32,
        };
        match self.ask(Ask::Remove(request)).await {
            Ok(Answer::Remove(r)) => r.errors.first().map_or(ErrorCode::Ok, |e| ErrorCode::from_u32(e.code)),
            Err(error) => error.code(),
            other => panic!("remove answered {other:?}"),
        }
    }
}

/// Waits for a condition, with a deadline.
pub async fn until<F, Fut>(what: &str, mut condition: F)
where
    F: FnMut() -> Fut,
    Fut: std::future::Future<Output = bool>,
{
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn item(key: &[u8], length: u64, token: [u8; 16]) -> v1::PutStartItem {
    v1::PutStartItem { key: key.to_vec().into(), length, token: token.to_vec().into(), group: bytes::Bytes::new() }
}

pub fn code(error: &Option<v1::ItemError>) -> ErrorCode {
    error.as_ref().map_or(ErrorCode::Ok, ErrorCode::of_item)
}
