//! Proposals: bytes into the log, an outcome out once they are committed and applied here.

use openraft::errors::{ClientWriteError, ForwardReason, ForwardToLeader};

use crate::host::Host;
use crate::machine::LogPosition;
use crate::options::Member;
use crate::read::hint_text;
use crate::types::PAYLOAD_BYTES_MAX;

/// A proposal that was committed by a quorum and applied here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied<O> {
    /// Its place in the log.
    pub at: LogPosition,
    /// What the state machine answered.
    pub outcome: O,
}

/// Why a proposal has no outcome.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProposeError {
    /// This member does not lead the stated term; nothing was logged.
    #[error("this member does not lead the stated term; {}", hint_text(.hint))]
    NotLeader {
        /// Who does, as far as known.
        hint: Option<Member>,
    },
    /// No quorum, or a handover is going on; nothing was logged.
    #[error("not accepted: {0}")]
    Unavailable(String),
    /// Logged, and then the leadership changed: it may have taken effect or not.
    #[error("leadership changed while the proposal was in the log; whether it took effect is unknown; {}", hint_text(.hint))]
    Unknown {
        /// Who leads now, as far as known.
        hint: Option<Member>,
    },
    /// Above the limit; nothing was logged.
    #[error("a proposal of {bytes} bytes is above the limit of {PAYLOAD_BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The node stopped for good: it may have taken effect or not.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

pub(crate) fn hint<C: Host>(forward: &ForwardToLeader<C>) -> Option<Member> {
    let (id, node) = (forward.leader_id?, forward.leader_node.as_ref()?);
    Some(Member { node_id: tidepool_proto::NodeId(id), address: node.address.parse().ok()? })
}

impl ProposeError {
    pub(crate) fn from_openraft<C: Host>(error: ClientWriteError<C>) -> ProposeError {
        match error {
            ClientWriteError::ForwardToLeader(forward) => match forward.reason {
                ForwardReason::LeaseExpired => ProposeError::Unavailable("no quorum answers this leader".to_owned()),
                ForwardReason::LeadershipTransfer => ProposeError::Unavailable(format!(
                    "leadership is being handed over; {}",
                    hint_text(&hint(&forward))
                )),
                ForwardReason::NotLeader => ProposeError::NotLeader { hint: hint(&forward) },
            },
            ClientWriteError::LogEntryDiscarded(forward) => ProposeError::Unknown { hint: hint(&forward) },
            // Only membership changes answer with these.
            other => ProposeError::Fatal(other.to_string()),
        }
    }
}
