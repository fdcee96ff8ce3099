//! Client sessions: the replicated floor and the bounded window of outcomes that make a late duplicate harmless (W8).

use super::op::{SessionId, Uuid};
use super::outcome::Removal;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidepool_proto::{Error, ErrorCode};

/// One client process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Session {
    pub(super) client_uuid: Uuid,
    pub(super) host_id: Arc<str>,
    /// Sequences below it were answered to the caller: never executed again.
    pub(super) floor: u64,
    /// Answers given at and above the floor.
    pub(super) outcomes: BTreeMap<u64, Removal>,
    /// Open grants and the bytes of their extents; follow from the objects.
    pub(super) open_grants: u64,
    pub(super) open_bytes: u64,
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
