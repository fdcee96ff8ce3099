//! The log's refusals as a client sees them: stable codes, and who leads when that is known.

use tidepool_proto::{Error, ErrorCode, v1};
use tidepool_raft::{Member, MembershipError, ProposeError, ReadError, TransferError};

/// Pause before a retry while there is no quorum or a handover is under way.
const RETRY_MS: u32 = 10;

/// A leader as a hint on the wire.
pub fn hint(member: &Member, term: u64) -> v1::LeaderHint {
    v1::LeaderHint { node_id: member.node_id.0, address: member.address.to_string(), term }
}

/// Why a proposal failed. An entry whose fate is unknown reads as DEADLINE_EXCEEDED does: retry with the same token.
pub fn proposal(error: &ProposeError) -> Error {
    let message = error.to_string();
    match error {
        ProposeError::NotLeader { hint: leader } => {
            Error::new(ErrorCode::NotLeader, message).with_leader(leader.as_ref().map(|m| hint(m, 0)))
        }
        ProposeError::Unknown { hint: leader } => {
            Error::new(ErrorCode::Unavailable, message).with_leader(leader.as_ref().map(|m| hint(m, 0)))
        }
        ProposeError::Unavailable(_) => Error::new(ErrorCode::Unavailable, message).retry_after(RETRY_MS),
        ProposeError::TooLong { .. } => Error::new(ErrorCode::InvalidParams, message),
        // This master is over; for the caller that is a leader lost, with the entry's fate unknown: the next one answers.
        ProposeError::Fatal(_) => Error::new(ErrorCode::Unavailable, message).retry_after(RETRY_MS),
    }
}

/// Why a read cannot be served here and now.
pub fn read(error: ReadError) -> Error {
    let message = error.to_string();
    match error {
        ReadError::NotLeader { hint: leader } => {
            Error::new(ErrorCode::NotLeader, message).with_leader(leader.map(|m| hint(&m, 0)))
        }
        ReadError::Unavailable(_) | ReadError::Fatal(_) => {
            Error::new(ErrorCode::Unavailable, message).retry_after(RETRY_MS)
        }
    }
}

/// Why leadership was not handed over.
pub fn transfer(error: TransferError) -> Error {
    let message = error.to_string();
    match error {
        TransferError::NotLeader => Error::new(ErrorCode::NotLeader, message),
        TransferError::NotAVoter(_) => Error::new(ErrorCode::InvalidParams, message),
        TransferError::NotReady(_) | TransferError::TimedOut(_) | TransferError::Busy => {
            Error::new(ErrorCode::Unavailable, message)
        }
        TransferError::Fatal(_) => Error::new(ErrorCode::StorageFailed, message),
    }
}

/// Why the members were not changed.
pub fn membership(error: MembershipError) -> Error {
    let message = error.to_string();
    match error {
        MembershipError::NotLeader { hint: leader } => {
            Error::new(ErrorCode::NotLeader, message).with_leader(leader.map(|m| hint(&m, 0)))
        }
        MembershipError::Invalid(_) => Error::new(ErrorCode::InvalidParams, message),
        MembershipError::IdUsed(_) => Error::new(ErrorCode::MemberIdUsed, message),
        MembershipError::FeatureLevel(_) => Error::new(ErrorCode::FeatureLevel, message),
        MembershipError::AtRisk(_) => Error::new(ErrorCode::QuorumAtRisk, message),
        MembershipError::Changing(_) => Error::new(ErrorCode::MembershipChanging, message),
        MembershipError::Behind(_) => Error::new(ErrorCode::MemberBehind, message),
        MembershipError::Unreachable(_) => Error::new(ErrorCode::Unavailable, message),
        MembershipError::Unavailable(_) => Error::new(ErrorCode::Unavailable, message).retry_after(RETRY_MS),
        MembershipError::TimedOut(_) => Error::new(ErrorCode::DeadlineExceeded, message),
        MembershipError::Fatal(_) => Error::new(ErrorCode::StorageFailed, message),
    }
}
