//! The member of production: tokio, RocksDB, gRPC.

use tidepool_proto::v1::raft_service_server::RaftServiceServer;

use crate::grpc::{GrpcNetwork, GrpcService};
use crate::machine::StateMachine;
use crate::node::RaftNode;
use crate::types::TokioConfig;

/// A member on tokio, over gRPC.
pub type Node<M> = RaftNode<TokioConfig<<M as StateMachine>::Outcome>, M, GrpcNetwork>;
/// The gRPC service of a [`Node`].
pub type NodeService<M> = RaftServiceServer<GrpcService<TokioConfig<<M as StateMachine>::Outcome>, M>>;

impl<M: StateMachine> Node<M> {
    /// The service that the other members call: mount it and listen, then [`RaftNode::run`].
    pub fn grpc(&self) -> NodeService<M> {
        GrpcService::server(self.inbound())
    }

    /// Opens the data directory, creating it if there is none: verifies identity, log and snapshots, and restores the
    /// state machine. Says nothing to anybody yet.
    #[cfg(feature = "rocksdb")]
    pub async fn open(
        options: crate::options::Options,
        machine: std::sync::Arc<M>,
    ) -> Result<Node<M>, crate::open::OpenError> {
        // Reading, verifying and replaying the log blocks for as long as it is: not on an async thread.
        let runtime = tokio::runtime::Handle::current();
        let opening = tokio::task::spawn_blocking(move || runtime.block_on(open_here(options, machine)));
        opening.await.map_err(|e| crate::open::OpenError::storage(std::io::Error::other(e)))?
    }
}

#[cfg(feature = "rocksdb")]
async fn open_here<M: StateMachine>(
    options: crate::options::Options,
    machine: std::sync::Arc<M>,
) -> Result<Node<M>, crate::open::OpenError> {
    use crate::failure::Failure;
    use crate::log::{Flushing, LogOptions, LogStore};
    use crate::open::{OpenError, OpenLog, admits, open, reporter};

    /// Newest log entries kept in memory for followers and the apply task.
    const LOG_CACHE_BYTES: usize = 32 << 20;

    let options = options.checked()?;
    std::fs::create_dir_all(&options.data_dir).map_err(OpenError::storage)?;
    let failure = std::sync::Arc::new(Failure::new());
    let registry = prometheus::Registry::new();
    let (fatal, closed) = reporter(&failure);
    crate::unfinished::Unfinished::refuse(&options.data_dir)?;
    let admits = admits(&machine);
    let log_options = LogOptions { flushing: Flushing::Thread, cache_bytes: LOG_CACHE_BYTES, admits, fatal };
    let (store, report) = LogStore::open_rocks(&options.data_dir.join("log"), log_options, &registry)?;
    let log = OpenLog { store, report, failure, registry, closed };
    let profile = options.election;
    open(options, machine, log, |identity| GrpcNetwork::new(identity, profile)).await
}
