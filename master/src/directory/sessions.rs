//! Client sessions: the replicated floor and the bounded window of outcomes that make a late duplicate harmless (W8).

use super::limits::OUTCOMES_PER_SESSION_MAX;
use super::op::Turn;
use super::op::{SessionId, Uuid};
use super::outcome::Answered;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidepool_proto::{Error, ErrorCode, planted};

/// One client process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Session {
    pub(super) client_uuid: Uuid,
    pub(super) host_id: Arc<str>,
    /// Sequences below it were answered to the caller: never executed again.
    pub(super) floor: u64,
    /// Answers given at and above the floor.
    pub(super) outcomes: BTreeMap<u64, Answered>,
    /// Open grants and the bytes of their extents; follow from the objects.
    pub(super) open_grants: u64,
    pub(super) open_bytes: u64,
}

impl Session {
    /// Whether a key-named op may be executed: the answer it got before if it was, STALE_REQUEST if it is below the
    /// floor, RESOURCE_EXHAUSTED if the window is full.
    pub(super) fn check_turn(&self, id: SessionId, turn: Turn) -> Result<Option<Answered>, Error> {
        if planted!(LateDuplicate) {
            return Ok(None);
        }
        let floor = self.floor.max(turn.floor);
        let sequence = turn.sequence;
        if sequence < floor {
            return Err(Error::new(
                ErrorCode::StaleRequest,
                format!(
                    "sequence {sequence} of session {id} is below the floor {floor}; a late duplicate, not executed"
                ),
            ));
        }
        if let Some(&answered) = self.outcomes.get(&sequence) {
            return Ok(Some(answered));
        }
        // Counted only when the window may be full.
        if self.outcomes.len() >= OUTCOMES_PER_SESSION_MAX
            && self.outcomes.range(floor..).count() >= OUTCOMES_PER_SESSION_MAX
        {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!(
                    "session {id} has {OUTCOMES_PER_SESSION_MAX} outcomes above its floor {floor}, the limit; send a higher floor"
                ),
            ));
        }
        Ok(None)
    }
}

/// All sessions, by id and by client uuid.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    pub(super) by_id: BTreeMap<SessionId, Session>,
    pub(super) by_uuid: BTreeMap<Uuid, SessionId>,
}

impl Sessions {
    /// The session, or SESSION_UNKNOWN.
    pub(super) fn get_mut(&mut self, id: SessionId) -> Result<&mut Session, Error> {
        self.by_id.get_mut(&id).ok_or_else(|| {
            Error::new(ErrorCode::SessionUnknown, format!("session {id} is unknown or expired; say hello again"))
        })
    }
}
