//! Masters of a test: one shared state, several ports, and a switch for who leads.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidepool_proto::capability::Secret;
use tidepool_proto::v1::node_service_server::{NodeService, NodeServiceServer};
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History, PROTOCOL_VERSION, v1};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

pub struct State {
    pub cluster: ClusterId,
    /// False: lets a datanode of another cluster register.
    pub checks_cluster: bool,
    pub history: History,
    /// Clusters that this one was before.
    pub ancestors: Vec<v1::Ancestor>,
    /// History in which whoever registers was registered first; 0: the present one.
    pub registered_in: u64,
    pub secret: Secret,
    pub leader: usize,
    pub term: u64,
    pub log_time_ms: u64,
    next_id: u64,
    /// By node uuid: (node id, incarnation, registration token).
    pub nodes: HashMap<Vec<u8>, (u64, u64, Vec<u8>)>,
    /// By (incarnation, name): (segment id, bytes).
    pub segments: HashMap<(u64, String), (u64, u64)>,
    pub registers: Vec<v1::RegisterRequest>,
    pub unmounts: Vec<v1::UnmountRequest>,
    pub beats: Vec<(usize, v1::HeartbeatRequest)>,
    /// Repeated in every answer until acknowledged.
    pub fences: Vec<u64>,
    pub acknowledged: Vec<u64>,
    /// Sent once.
    pub verify: Vec<v1::VerifyReplica>,
    pub verdicts: Vec<v1::Verdict>,
    /// Sent once.
    pub copies: Vec<v1::CopyOrder>,
    pub copied: Vec<v1::CopyReport>,
    /// A master that answers FENCED in this older term.
    pub deposed: Option<(usize, u64)>,
    pub deposed_answers: usize,
    /// Beats that were answered with an error.
    pub refused_beats: usize,
}

/// What all masters of a test share.
#[derive(Clone)]
pub struct Quorum {
    pub state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
}

pub struct FakeMaster {
    pub address: Address,
    kill: watch::Sender<bool>,
}

impl FakeMaster {
    /// Stops answering and closes every stream, as a killed process would.
    pub fn kill(&self) {
        self.kill.send_replace(true);
    }
}

impl Quorum {
    pub fn new() -> Quorum {
        let state = State {
            cluster: ClusterId(rand::random()),
            checks_cluster: true,
            history: History(rand::random_range(1..u64::MAX)),
            ancestors: Vec::new(),
            registered_in: 0,
            secret: Secret(rand::random()),
            leader: 0,
            term: 1,
            log_time_ms: 1_000_000,
            next_id: 100,
            nodes: HashMap::new(),
            segments: HashMap::new(),
            registers: Vec::new(),
            unmounts: Vec::new(),
            beats: Vec::new(),
            fences: Vec::new(),
            acknowledged: Vec::new(),
            verify: Vec::new(),
            verdicts: Vec::new(),
            copies: Vec::new(),
            copied: Vec::new(),
            deposed: None,
            deposed_answers: 0,
            refused_beats: 0,
        };
        Quorum { state: Arc::new(Mutex::new(state)), changed: watch::channel(0).0 }
    }

    /// Starts a master on a free port.
    pub async fn start(&self, index: usize) -> FakeMaster {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: Address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let (kill, killed) = watch::channel(false);
        let service = Service { quorum: self.clone(), index, killed: killed.clone(), address: address.clone() };
        let mut stop = killed;
        tokio::spawn(async move {
            let stop = async move { drop(stop.wait_for(|&killed| killed).await) };
            tonic::transport::Server::builder()
                .add_service(NodeServiceServer::new(service))
                .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop)
                .await
                .unwrap();
        });
        FakeMaster { address, kill }
    }

    /// Waits until the state is as wanted.
    pub async fn until<R>(&self, what: &str, mut wanted: impl FnMut(&mut State) -> Option<R>) -> R {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(found) = wanted(&mut self.state.lock()) {
                    return found;
                }
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), wait)
            .await
            .unwrap_or_else(|_| panic!("not within 20 s: {what}"))
    }

    /// The directory was restored: a new history, in which nobody is registered yet.
    pub fn forget_everything(&self) {
        let mut state = self.state.lock();
        state.history = History(state.history.0 ^ 1);
        state.nodes.clear();
        state.segments.clear();
        state.beats.clear();
    }

    /// The directory goes on in another cluster, with the nodes and segments that it knows. Answers the cluster and history before.
    pub fn go_on(&self) -> (ClusterId, History) {
        let mut state = self.state.lock();
        let before = (state.cluster, state.history);
        state.ancestors.push(v1::Ancestor { cluster_uuid: before.0.0.to_vec().into(), history: before.1.0 });
        (state.cluster, state.history) = (ClusterId(rand::random()), History(before.1.0 ^ 1));
        state.beats.clear();
        before
    }

    fn changed(&self) {
        self.changed.send_modify(|n| *n += 1);
    }
}

struct Service {
    quorum: Quorum,
    index: usize,
    killed: watch::Receiver<bool>,
    address: Address,
}

impl Service {
    fn leading(&self) -> Result<(), Error> {
        let state = self.quorum.state.lock();
        if *self.killed.borrow() {
            return Err(Error::new(ErrorCode::Unavailable, "killed"));
        }
        if state.leader == self.index {
            return Ok(());
        }
        Err(Error::new(ErrorCode::NotLeader, format!("master {} does not lead; {} does", self.address, state.leader)))
    }

    fn identity(state: &State) -> v1::Identity {
        v1::Identity {
            cluster_uuid: state.cluster.0.to_vec().into(),
            history: state.history.0,
            node_id: 1,
            protocol_version: PROTOCOL_VERSION,
            build: "fake".into(),
            ancestors: state.ancestors.clone(),
        }
    }

    fn register(&self, request: v1::RegisterRequest) -> Result<v1::RegisterResponse, Error> {
        self.leading()?;
        let mut state = self.quorum.state.lock();
        let theirs = &request.identity.as_ref().unwrap().cluster_uuid;
        if state.checks_cluster && !theirs.is_empty() && theirs[..] != state.cluster.0 {
            return Err(Error::new(ErrorCode::WrongCluster, "this is another cluster"));
        }
        let (uuid, token) = (request.node_uuid.to_vec(), request.process_uuid.to_vec());
        state.next_id += 10;
        let fresh = state.next_id;
        let node = state.nodes.entry(uuid).or_insert((fresh, fresh, token.clone()));
        if node.2 != token {
            (node.1, node.2) = (fresh, token);
        }
        let (node_id, incarnation, _) = *node;
        state.registers.push(request);
        let response = v1::RegisterResponse {
            error: None,
            identity: Some(Service::identity(&state)),
            node_id,
            incarnation,
            cluster_secret: state.secret.0.to_vec().into(),
            heartbeat_interval_ms: 20,
            log_time_ms: state.log_time_ms,
            term: state.term,
            registered_history: state.registered_in,
        };
        drop(state);
        self.quorum.changed();
        Ok(response)
    }

    fn known(state: &State, node_id: u64, incarnation: u64) -> Result<(), Error> {
        match state.nodes.values().find(|node| node.0 == node_id) {
            None => Err(Error::new(ErrorCode::NodeUnknown, "no such node")),
            Some(node) if node.1 != incarnation => {
                Err(Error::new(ErrorCode::Fenced, "a newer incarnation is registered"))
            }
            Some(_) => Ok(()),
        }
    }

    fn mount(&self, request: &v1::MountRequest) -> Result<v1::MountResponse, Error> {
        self.leading()?;
        let mut state = self.quorum.state.lock();
        if request.identity.as_ref().is_some_and(|theirs| theirs.cluster_uuid[..] != state.cluster.0) {
            return Err(Error::new(ErrorCode::WrongCluster, "this is another cluster"));
        }
        Service::known(&state, request.node_id, request.incarnation)?;
        let mut segments = Vec::new();
        for segment in &request.segments {
            state.next_id += 1;
            let fresh = (state.next_id, segment.bytes);
            let mounted = state.segments.entry((request.incarnation, segment.name.clone())).or_insert(fresh);
            segments.push(v1::MountedSegment { error: None, segment_id: mounted.0 });
        }
        drop(state);
        self.quorum.changed();
        Ok(v1::MountResponse { error: None, segments })
    }

    fn beat(&self, beat: v1::HeartbeatRequest) -> v1::HeartbeatResponse {
        let deposed = self.quorum.state.lock().deposed.filter(|(index, _)| *index == self.index);
        if let Some((_, term)) = deposed {
            self.quorum.state.lock().deposed_answers += 1;
            self.quorum.changed();
            let error = Error::new(ErrorCode::Fenced, "a deposed leader's view");
            return v1::HeartbeatResponse { error: Some(error.into()), term, ..Default::default() };
        }
        let judged = self.leading().and_then(|()| {
            let state = self.quorum.state.lock();
            if beat.history != state.history.0 {
                return Err(Error::new(ErrorCode::WrongCluster, "another history"));
            }
            Service::known(&state, beat.node_id, beat.incarnation)
        });
        let mut state = self.quorum.state.lock();
        let mut response = v1::HeartbeatResponse {
            term: state.term,
            sequence: beat.sequence,
            log_time_ms: state.log_time_ms,
            identity: Some(Service::identity(&state)),
            ..Default::default()
        };
        match judged {
            Err(error) => {
                state.refused_beats += 1;
                response.error = Some(error.into());
            }
            Ok(()) => {
                state.fences.retain(|id| !beat.fenced_replicas.contains(id));
                state.acknowledged.extend(&beat.fenced_replicas);
                state.verdicts.extend(beat.verdicts.iter().cloned());
                state.copied.extend(beat.copies.iter().cloned());
                state.beats.push((self.index, beat));
                response.fence_replicas = state.fences.clone();
                response.verify = std::mem::take(&mut state.verify);
                response.copy = std::mem::take(&mut state.copies);
            }
        }
        drop(state);
        self.quorum.changed();
        response
    }
}

#[tonic::async_trait]
impl NodeService for Service {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let answer = self.register(request.into_inner());
        let failed = |error: Error| v1::RegisterResponse { error: Some(error.into()), ..Default::default() };
        Ok(Response::new(answer.unwrap_or_else(failed)))
    }

    async fn mount(&self, request: Request<v1::MountRequest>) -> Result<Response<v1::MountResponse>, Status> {
        let answer = self.mount(request.get_ref());
        let failed = |error: Error| v1::MountResponse { error: Some(error.into()), ..Default::default() };
        Ok(Response::new(answer.unwrap_or_else(failed)))
    }

    async fn unmount(&self, request: Request<v1::UnmountRequest>) -> Result<Response<v1::UnmountResponse>, Status> {
        let error = self.leading().err().map(Into::into);
        if error.is_none() {
            self.quorum.state.lock().unmounts.push(request.into_inner());
            self.quorum.changed();
        }
        Ok(Response::new(v1::UnmountResponse { error }))
    }

    type HeartbeatStream = ReceiverStream<Result<v1::HeartbeatResponse, Status>>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let mut beats = request.into_inner();
        let (answers, stream) = tokio::sync::mpsc::channel(16);
        let service = Service {
            quorum: self.quorum.clone(),
            index: self.index,
            killed: self.killed.clone(),
            address: self.address.clone(),
        };
        let mut killed = self.killed.clone();
        let converse = async move {
            while let Ok(Some(beat)) = beats.message().await {
                if answers.send(Ok(service.beat(beat))).await.is_err() {
                    return;
                }
            }
        };
        tokio::spawn(async move {
            let killed = async { drop(killed.wait_for(|&killed| killed).await) };
            tokio::select! {
                () = killed => {}
                () = converse => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
