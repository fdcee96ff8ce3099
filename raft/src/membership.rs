//! Changing who belongs to the quorum: a new member first follows as a learner, then may vote.

use std::collections::BTreeSet;

use openraft::errors::{ClientWriteError, RaftError};
use tidepool_proto::NodeId;

use crate::host::Host;
use crate::machine::StateMachine;
use crate::network::Network;
use crate::node::RaftNode;
use crate::options::Member;
use crate::propose::hint;
use crate::types;

/// Why the membership was not changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipError {
    /// This member does not lead.
    #[error("this member does not lead; {}", crate::read::hint_text(.hint))]
    NotLeader {
        /// Who does, as far as known.
        hint: Option<Member>,
    },
    /// The change is not possible as things stand.
    #[error("the membership cannot be changed so: {0}")]
    Refused(String),
    /// The node stopped for good: it may have taken effect or not.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

fn failed<C: Host>(error: RaftError<C, ClientWriteError<C>>) -> MembershipError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => {
            MembershipError::NotLeader { hint: hint(&forward) }
        }
        RaftError::APIError(other) => MembershipError::Refused(other.to_string()),
        RaftError::Fatal(fatal) => MembershipError::Fatal(fatal.to_string()),
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    /// Lets a new member follow without a vote. Answers once that is committed, not once it caught up. Its id must never
    /// have been used.
    pub async fn add_learner(&self, member: Member) -> Result<(), MembershipError> {
        let node = types::Member { address: member.address.to_string() };
        self.raft().add_learner(member.node_id.0, node, false).await.map(drop).map_err(failed)
    }

    /// Makes exactly these the voters; each must follow already. Whoever no longer votes leaves the quorum.
    pub async fn set_voters(&self, voters: BTreeSet<NodeId>) -> Result<(), MembershipError> {
        let voters: BTreeSet<u64> = voters.into_iter().map(|id| id.0).collect();
        if voters.is_empty() {
            return Err(MembershipError::Refused("a quorum needs a voter".to_owned()));
        }
        self.raft().change_membership(voters, false).await.map(drop).map_err(failed)
    }
}
