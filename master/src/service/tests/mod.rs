//! Tests that need more of the service than its wire: a quorum of one in this process, spoken to without sockets, on a
//! disk that is memory.

// Tests run on tokio and the system's clocks.
#![allow(clippy::disallowed_methods)]

mod agreement;
mod fuzz;
mod fuzzer;
mod histories;
mod publishing;
mod reads;
mod requests;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::v1::client_service_server::ClientService;
use tidepool_proto::{Address, Error, NodeId, PROTOCOL_VERSION, v1};
use tidepool_raft::{ElectionProfile, Member};
use tonic::Request;

use super::admin::AdminFace;
use super::core::Service;
use super::nodes::NodeFace;
use super::session::ClientFace;
use super::{LogFilter, Master, MasterOptions};

/// See the module.
struct Rig {
    master: Master,
    service: Arc<Service>,
    clients: ClientFace,
    nodes: NodeFace,
    admin: AdminFace,
    _dir: Option<tempfile::TempDir>,
}

impl Rig {
    async fn start(adjust: impl FnOnce(&mut MasterOptions)) -> Rig {
        // Syncs of a file system in memory cost nothing, and nothing here is about power cuts.
        let memory = std::path::Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let dir = dir.expect("a temporary directory");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        drop(listener);
        let address: Address = format!("127.0.0.1:{port}").parse().expect("an address");
        let members = vec![Member { node_id: NodeId(1), address: address.clone() }];
        let mut options = MasterOptions::new(NodeId(1), dir.path().to_owned(), address.clone(), address, members);
        options.election = ElectionProfile::Lan;
        adjust(&mut options);
        let master = Master::start(options, LogFilter::fixed()).await.expect("a quorum of one starts");
        let rig = Rig::of(master, Some(dir));
        until("the master leads", || async { rig.master.readiness().ready }).await;
        rig
    }

    fn of(master: Master, dir: Option<tempfile::TempDir>) -> Rig {
        let service = master.service().clone();
        let (clients, nodes) = (ClientFace::new(service.clone()), NodeFace::new(service.clone()));
        let admin = AdminFace::new(service.clone(), LogFilter::fixed());
        Rig { master, service, clients, nodes, admin, _dir: dir }
    }

    async fn ask(&self, tenant: &str, remaining_ms: u32, body: Ask) -> Result<Answer, Error> {
        let request = v1::ClientRequest { id: 7, remaining_ms, tenant: tenant.to_owned(), body: Some(body) };
        let response = self.clients.call(Request::new(request)).await.expect("answered").into_inner();
        assert_eq!(response.id, 7);
        match (response.body, response.error) {
            (Some(body), None) => Ok(body),
            (None, Some(error)) => Err(error.into()),
            both => panic!("neither answer nor error: {both:?}"),
        }
    }

    async fn hello(&self, uuid: u8) -> u64 {
        let hello = v1::HelloRequest {
            identity: Some(identity()),
            client_uuid: vec![uuid; 16].into(),
            host_id: "c".to_owned(),
            lineage: Vec::new(),
        };
        match self.ask("", 5_000, Ask::Hello(hello)).await {
            Ok(Answer::Hello(hello)) => hello.session_id,
            other => panic!("hello answered {other:?}"),
        }
    }

    /// A datanode's control half with one segment: its id and life.
    async fn datanode(&self, uuid: u8, bytes: u64) -> (u64, u64) {
        use tidepool_proto::v1::node_service_server::NodeService;
        let register = requests::register(uuid, uuid, "h");
        let registered =
            NodeService::register(&self.nodes, Request::new(register)).await.expect("answered").into_inner();
        assert_eq!(registered.error, None);
        let mount = requests::mount((registered.node_id, registered.incarnation), "s0", bytes);
        let mounted = NodeService::mount(&self.nodes, Request::new(mount)).await.expect("answered").into_inner();
        assert_eq!((mounted.error, mounted.segments[0].error.clone()), (None, None));
        (registered.node_id, registered.incarnation)
    }

    /// Puts one object of 1000 bytes.
    async fn put(&self, session: u64, key: &str, group: &str) -> u64 {
        let item = requests::item(key, 1_000, rand::random(), group);
        let request = v1::PutStartRequest { session_id: session, items: vec![item], ..Default::default() };
        let Ok(Answer::PutStart(mut answer)) = self.ask("", 5_000, Ask::PutStart(request)).await else {
            panic!("not started")
        };
        let grant = answer.grants.remove(0);
        assert_eq!(grant.error, None);
        let item = requests::ending(&self.service, key, &grant, v1::ReplicaOutcome::Stored);
        let end = v1::PutEndRequest { session_id: session, items: vec![item] };
        match self.ask("", 5_000, Ask::PutEnd(end)).await {
            Ok(Answer::PutEnd(answer)) => assert_eq!(answer.results[0].error, None),
            other => panic!("not ended: {other:?}"),
        }
        grant.object_id
    }
}

fn identity() -> v1::Identity {
    v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }
}

/// Waits for a condition, with a deadline.
async fn until<F, Fut>(what: &str, mut condition: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
