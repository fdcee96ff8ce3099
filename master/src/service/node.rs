//! The Raft node of a master: the one of production, or, in the build that can simulate, either.

use tidepool_raft::Node;

use super::machine::Machine;

/// The Raft node of a master.
#[cfg(not(feature = "sim"))]
pub type MasterNode = Node<Machine>;
#[cfg(feature = "sim")]
pub use simulated::MasterNode;

/// The one of production.
pub fn real(node: Node<Machine>) -> MasterNode {
    #[cfg(feature = "sim")]
    let node = MasterNode::Real(node);
    node
}

#[cfg(feature = "sim")]
mod simulated {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::time::Duration;

    use bytes::Bytes;
    use prometheus::Registry;
    use tidepool_proto::NodeId;
    use tidepool_raft::rt::watch;
    use tidepool_raft::sim::SimNode;
    use tidepool_raft::snapshot::SnapshotFile;
    use tidepool_raft::{
        Applied, ChangeReport, ClusterIdentity, CompactError, FatalError, Leadership, Member, MemberChange,
        MembershipError, Node, NodeStatus, OpenError, ProposeError, ReadError, TransferError,
    };

    use super::Machine;
    use crate::directory::Outcome;

    /// A member on tokio, RocksDB and gRPC, or on a simulated machine. Each call goes through.
    #[derive(Clone)]
    pub enum MasterNode {
        /// Of production.
        Real(Node<Machine>),
        /// Of a simulation.
        Simulated(SimNode<Machine>),
    }

    macro_rules! through {
        ($self:ident, $node:ident => $call:expr) => {
            match $self {
                MasterNode::Real($node) => $call,
                MasterNode::Simulated($node) => $call,
            }
        };
    }

    #[allow(missing_docs)] // Each is documented where it goes through to.
    impl MasterNode {
        pub async fn run(&self) -> Result<(), OpenError> {
            through!(self, node => node.run().await)
        }
        pub fn identity(&self) -> ClusterIdentity {
            through!(self, node => node.identity())
        }
        pub fn machine(&self) -> &Arc<Machine> {
            through!(self, node => node.machine())
        }
        pub fn is_doubted(&self) -> bool {
            through!(self, node => node.is_doubted())
        }
        pub async fn propose(&self, payload: Bytes, term: u64) -> Result<Applied<Vec<Outcome>>, ProposeError> {
            through!(self, node => node.propose(payload, term).await)
        }
        pub async fn linearize(&self) -> Result<u64, ReadError> {
            through!(self, node => node.linearize().await)
        }
        pub fn watch_leadership(&self) -> watch::Receiver<Leadership> {
            through!(self, node => node.watch_leadership())
        }
        pub fn watch_members(&self) -> watch::Receiver<Vec<Member>> {
            through!(self, node => node.watch_members())
        }
        pub fn status(&self) -> NodeStatus {
            through!(self, node => node.status())
        }
        pub async fn transfer_leader(&self, to: Option<NodeId>) -> Result<NodeId, TransferError> {
            through!(self, node => node.transfer_leader(to).await)
        }
        pub fn agreed_snapshot(&self) -> Option<SnapshotFile> {
            through!(self, node => node.agreed_snapshot())
        }
        pub fn current_snapshot(&self) -> Option<SnapshotFile> {
            through!(self, node => node.current_snapshot())
        }
        pub async fn compact(&self) -> Result<u64, CompactError> {
            through!(self, node => node.compact().await)
        }
        pub async fn compact_before_stop(&self) -> Result<Option<u64>, CompactError> {
            through!(self, node => node.compact_before_stop().await)
        }
        pub async fn vouch(&self, index: u64) -> Result<(), OpenError> {
            through!(self, node => node.vouch(index).await)
        }
        pub async fn start_over(&self, index: u64, why: String) {
            through!(self, node => node.start_over(index, why).await)
        }
        pub async fn change_members(&self, change: MemberChange, limit: Duration) -> ChangeReport {
            through!(self, node => node.change_members(change, limit).await)
        }
        pub async fn plan_members(&self, change: &MemberChange) -> Result<Vec<String>, MembershipError> {
            through!(self, node => node.plan_members(change).await)
        }
        pub async fn member_levels(&self) -> Vec<(Member, Option<u16>)> {
            through!(self, node => node.member_levels().await)
        }
        pub async fn with_members_fixed<R>(
            &self,
            what: &str,
            act: impl Future<Output = R>,
        ) -> Result<R, MembershipError> {
            through!(self, node => node.with_members_fixed(what, act).await)
        }
        pub fn fatal(&self) -> Pin<Box<dyn Future<Output = FatalError> + Send>> {
            through!(self, node => Box::pin(node.fatal()))
        }
        pub async fn shutdown(&self) {
            through!(self, node => node.shutdown().await);
        }
        pub fn metrics(&self) -> &Registry {
            through!(self, node => node.metrics())
        }
    }
}
