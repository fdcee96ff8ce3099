//! Starting, killing and watching members.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidepool_proto::{Address, NodeId};
use tidepool_raft::{Leadership, Member, Node, OpenError, Options, Role};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::transport::server::TcpIncoming;

use crate::ledger::Ledger;

/// Nothing here may take longer on the slowest machine; nothing waits for it to pass.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A member on a runtime of its own, so that it can be ended as a whole, connections included.
pub struct Running {
    pub node: Node<Ledger>,
    runtime: Option<Runtime>,
    /// What `Node::run` came to.
    pub taking_part: JoinHandle<Result<(), OpenError>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A database that is still open when the process ends makes it abort.
        if let Some(runtime) = self.runtime.take() {
            let ended = std::thread::spawn(move || runtime.shutdown_timeout(LIMIT)).join();
            assert!(ended.is_ok() || std::thread::panicking(), "the runtime did not end");
        }
    }
}

pub struct Quorum {
    pub members: Vec<Member>,
    dirs: BTreeMap<u64, TempDir>,
    listeners: BTreeMap<u64, TcpListener>,
    pub running: BTreeMap<u64, Running>,
    adjust: fn(&mut Options),
}

impl Quorum {
    /// `size` members with their addresses, none started.
    pub async fn new(size: u64, adjust: fn(&mut Options)) -> Quorum {
        let mut quorum = Quorum {
            members: Vec::new(),
            dirs: BTreeMap::new(),
            listeners: BTreeMap::new(),
            running: BTreeMap::new(),
            adjust,
        };
        for id in 1..=size {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            quorum.members.push(Member { node_id: NodeId(id), address: Address::new("127.0.0.1", port).unwrap() });
            quorum.listeners.insert(id, listener);
            quorum.dirs.insert(id, tempfile::tempdir().unwrap());
        }
        quorum
    }

    /// Three members that lead and follow.
    pub async fn started(adjust: fn(&mut Options)) -> Quorum {
        let mut quorum = Quorum::new(3, adjust).await;
        for id in 1..=3 {
            quorum.start(id).await.unwrap();
        }
        quorum.leader().await;
        quorum
    }

    pub fn options(&self, id: u64) -> Options {
        let own = self.members.iter().find(|m| m.node_id.0 == id).unwrap();
        let mut options =
            Options::new(own.node_id, self.dirs[&id].path().to_owned(), own.address.clone(), self.members.clone());
        (self.adjust)(&mut options);
        options
    }

    pub fn socket(&self, id: u64) -> SocketAddr {
        let own = self.members.iter().find(|m| m.node_id.0 == id).unwrap();
        own.address.to_string().parse().unwrap()
    }

    pub async fn start(&mut self, id: u64) -> Result<Node<Ledger>, OpenError> {
        let options = self.options(id);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let opened = runtime.spawn(Node::open(options, Arc::new(Ledger::default()))).await.unwrap();
        let node = match opened {
            Ok(node) => node,
            Err(error) => {
                end(runtime).await;
                return Err(error);
            }
        };
        let listener = match self.listeners.remove(&id) {
            Some(listener) => listener,
            None => rebind(self.socket(id)).await,
        };
        let (service, listener) = (node.grpc(), listener.into_std().unwrap());
        runtime.spawn(async move {
            let incoming = TcpIncoming::from(TcpListener::from_std(listener).unwrap()).with_nodelay(Some(true));
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(incoming).await.unwrap();
        });
        let running = node.clone();
        let taking_part = runtime.spawn(async move { running.run().await });
        self.running.insert(id, Running { node: node.clone(), runtime: Some(runtime), taking_part });
        Ok(node)
    }

    /// Ends a member in the middle of whatever it does. Its directory stays.
    pub async fn kill(&mut self, id: u64) {
        if let Some(runtime) = self.running.remove(&id).and_then(|mut running| running.runtime.take()) {
            end(runtime).await;
        }
    }

    /// Starts a member again.
    pub async fn restart(&mut self, id: u64) -> Node<Ledger> {
        self.start(id).await.unwrap_or_else(|error| panic!("node {id} does not come back: {error}"))
    }

    pub fn wipe(&mut self, id: u64) {
        self.dirs.insert(id, tempfile::tempdir().unwrap());
    }

    /// Takes the address of a dead member: connections are accepted and never answered.
    pub async fn mute(&self, id: u64) -> JoinHandle<()> {
        let listener = rebind(self.socket(id)).await;
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.push(stream);
            }
        })
    }

    pub fn node(&self, id: u64) -> Node<Ledger> {
        self.running[&id].node.clone()
    }

    /// Who leads, once somebody does.
    pub async fn leader(&self) -> (Node<Ledger>, u64) {
        let leads = || {
            let standing = self.running.values().map(|r| (r.node.clone(), r.node.watch_leadership().borrow().clone()));
            standing.filter(|(_, l)| l.role == Role::Leader).max_by_key(|(_, l)| l.term).map(|(node, l)| (node, l.term))
        };
        until("somebody leads", leads).await
    }

    /// Proposes until somebody takes it.
    pub async fn put(&self, id: u64) -> u64 {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            let (node, term) = self.leader().await;
            if let Ok(Ok(applied)) =
                tokio::time::timeout(Duration::from_secs(2), node.propose(Ledger::payload(id), term)).await
            {
                return applied.at.index;
            }
        }
        panic!("nobody took proposal {id}");
    }

    /// These members write two snapshots, with proposal `id` between, and drop the log behind the older one.
    pub async fn purge(&self, ids: &[u64], id: u64) {
        let mut covered = Vec::new();
        for &id in ids {
            covered.push((self.node(id), self.node(id).compact().await.unwrap()));
        }
        let last = self.put(id).await;
        self.converge(last).await;
        for (node, covered) in covered {
            node.compact().await.unwrap();
            until("the log is purged", || (node.status().purged_index == covered).then_some(())).await;
        }
    }

    /// Waits until all running members hold the same, up to `index`.
    pub async fn converge(&self, index: u64) {
        until("all applied the last proposal", || {
            self.running.values().all(|r| r.node.status().applied_index >= index).then_some(())
        })
        .await;
        let mut books = self.running.values().map(|r| r.node.machine().entries());
        let first = books.next().unwrap();
        assert!(books.all(|book| book == first), "members hold different states");
    }
}

/// Waits for a condition.
pub async fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn end(runtime: Runtime) {
    tokio::task::spawn_blocking(move || runtime.shutdown_timeout(LIMIT)).await.unwrap();
}

async fn rebind(address: SocketAddr) -> TcpListener {
    let deadline = Instant::now() + LIMIT;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => assert!(Instant::now() < deadline, "{address} stays taken: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn standing(node: &Node<Ledger>) -> Leadership {
    node.watch_leadership().borrow().clone()
}
