//! A master on a simulated machine: the service of production over a simulated Raft node, reached through the same
//! gRPC faces, called in place of a socket. `tidepool-sim` builds clusters of them.

use std::cell::RefCell;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tidepool_proto::v1::admin_service_server::AdminServiceServer;
use tidepool_proto::v1::client_service_server::ClientServiceServer;
use tidepool_proto::v1::node_service_server::NodeServiceServer;
use tidepool_proto::{Address, planted};
use tidepool_raft::sim::SimNode;
use tidepool_raft::sim::surroundings;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service as Call, StdError, http};
use tonic::transport::Channel;

use super::admin::AdminFace;
use super::audit::AuditMetrics;
use super::logging::LogFilter;
pub use super::machine::Machine;
use super::master::{Master, MasterError};
use super::node::MasterNode;
use super::nodes::NodeFace;
use super::options::MasterOptions;
use super::session::ClientFace;
use crate::directory::{Directory, Op};

/// One exchange on the simulated network.
pub type Exchange = BoxFuture<'static, Result<http::Response<Body>, Status>>;
/// Sends a request to an address.
pub type Dial = Arc<dyn Fn(&Address, http::Request<Body>) -> Exchange + Send + Sync>;

thread_local! {
    static DIAL: RefCell<Option<Dial>> = const { RefCell::new(None) };
}

/// From here on masters of this thread reach each other's services through `dial`; none: through sockets.
pub fn set_dial(dial: Option<Dial>) {
    DIAL.set(dial);
}

/// Sees the state after each entry: its index, and the ops that made it; none: a snapshot of it was taken in.
pub type Observe = Arc<dyn Fn(&Directory, u64, &[Op<'_>]) + Send + Sync>;

thread_local! {
    static OBSERVE: RefCell<Option<Observe>> = const { RefCell::new(None) };
}

/// From here on what masters of this thread apply is shown; none: to nobody.
pub fn set_observer(observe: Option<Observe>) {
    OBSERVE.set(observe);
}

pub(super) fn observe(directory: &Directory, index: u64, ops: &[Op<'_>]) {
    if let Some(observe) = OBSERVE.with_borrow(Clone::clone) {
        observe(directory, index, ops);
    }
}

/// Entries that the planted bugs of one master befall.
fn is_befallen(index: u64) -> bool {
    index % 40 == 39 && surroundings::machine().is_some_and(|machine| machine.id == 2)
}

pub(super) fn is_left_out(index: u64) -> bool {
    planted!(DroppedEntry) && is_befallen(index)
}

pub(super) fn is_doubled(index: u64) -> bool {
    planted!(DoubleApply) && is_befallen(index)
}

/// A way to another master, if this thread simulates.
pub(super) fn dial(address: &Address) -> Option<PeerChannel> {
    let dial = DIAL.with_borrow(Clone::clone)?;
    Some(PeerChannel::Simulated(dial, address.clone()))
}

/// A connection to another master.
#[derive(Clone)]
pub enum PeerChannel {
    /// Over a socket.
    Tcp(Channel),
    /// Over the simulated network.
    Simulated(Dial, Address),
}

impl Call<http::Request<Body>> for PeerChannel {
    type Response = http::Response<Body>;
    type Error = StdError;
    type Future = BoxFuture<'static, Result<http::Response<Body>, StdError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        match self {
            PeerChannel::Tcp(channel) => channel.poll_ready(context).map_err(Into::into),
            PeerChannel::Simulated(..) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            PeerChannel::Tcp(channel) => {
                let answer = channel.call(request);
                Box::pin(async move { answer.await.map_err(Into::into) })
            }
            PeerChannel::Simulated(dial, address) => {
                let answer = dial(address, request);
                Box::pin(async move { answer.await.map_err(Into::into) })
            }
        }
    }
}

/// The state machine of a master with these options.
pub fn machine(options: &MasterOptions) -> Result<Machine, MasterError> {
    let audit = AuditMetrics::new()?;
    let unknown = || {
        let why = format!("no eviction policy '{}'", options.eviction_policy);
        tidepool_proto::Error::new(tidepool_proto::ErrorCode::InvalidParams, why)
    };
    Ok(Machine::new(&options.eviction_policy, audit).ok_or_else(unknown)?)
}

/// What consensus is started with.
pub fn raft_options(options: &MasterOptions) -> tidepool_raft::Options {
    options.raft()
}

/// Starts the service over a node that was opened; [`RaftNode::run`](tidepool_raft::RaftNode::run) is the caller's.
/// Call it on the machine of the node.
pub fn start(node: SimNode<Machine>, options: MasterOptions) -> Result<Master, MasterError> {
    let machine = node.machine().clone();
    Master::assemble(MasterNode::Simulated(node), machine, options)
}

/// The gRPC faces of a master.
#[derive(Clone)]
pub struct Faces {
    /// For clients.
    pub client: ClientServiceServer<ClientFace>,
    /// For datanodes.
    pub node: NodeServiceServer<NodeFace>,
    /// For operators and other masters.
    pub admin: AdminServiceServer<AdminFace>,
}

impl Master {
    /// What its port would serve.
    pub fn faces(&self) -> Faces {
        let service = self.service();
        Faces {
            client: ClientServiceServer::new(ClientFace::new(service.clone())),
            node: NodeServiceServer::new(NodeFace::new(service.clone())),
            admin: AdminServiceServer::new(AdminFace::new(service.clone(), LogFilter::fixed())),
        }
    }

    /// Its directory.
    pub fn directory(&self) -> &Directory {
        self.service().directory()
    }
}
