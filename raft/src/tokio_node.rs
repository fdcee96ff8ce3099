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
        use std::sync::Arc;

        use crate::failure::{Failure, FatalError};
        use crate::log::{Flushing, LogOptions, LogStore};
        use crate::open::{OpenError, OpenLog, open};

        /// Newest log entries kept in memory for followers and the apply task.
        const LOG_CACHE_BYTES: usize = 256 << 20;

        let options = options.checked()?;
        let failure = Arc::new(Failure::new());
        let registry = prometheus::Registry::new();
        let (dir, reporting, log_registry) = (options.data_dir.clone(), failure.clone(), registry.clone());
        let opening = move || {
            std::fs::create_dir_all(&dir).map_err(OpenError::storage)?;
            let log_options = LogOptions {
                flushing: Flushing::Thread,
                cache_bytes: LOG_CACHE_BYTES,
                fatal: Box::new(move |failure| reporting.report(FatalError::Storage(failure.to_string()))),
            };
            LogStore::open_rocks(&dir.join("log"), log_options, &log_registry).map_err(OpenError::from)
        };
        let (store, report) = tokio::task::spawn_blocking(opening).await.map_err(|e| OpenError::storage(std::io::Error::other(e)))??;
        let profile = options.election;
        open(options, machine, OpenLog { store, report, failure, registry }, |identity| GrpcNetwork::new(identity, profile)).await
    }
}
