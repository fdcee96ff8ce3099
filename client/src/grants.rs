//! Grants that were given and not yet ended. What is still open when the put is dropped (cancelled, or out of time)
//! is revoked in the background, so that its space does not wait for the discard timeout.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_proto::History;
use tidepool_proto::v1::{self, client_request};

use crate::call::Caller;
use crate::deadline::Deadline;
use crate::quorum::Leader;

/// Time a background revoke may take; after it the master discards the grant by itself.
const REVOKE_DEADLINE: Duration = Duration::from_secs(5);

pub(crate) struct OpenGrants {
    caller: Arc<Caller>,
    /// The session that started the puts.
    session_id: u64,
    /// The history that their ids are of.
    history: History,
    /// By slot, as they were added; None once ended or revoked.
    open: Mutex<Vec<Option<v1::PutEndItem>>>,
}

/// One grant among those of its PutStart.
pub(crate) type Slot = usize;

/// What a datanode said of one replica.
pub(crate) struct Learned {
    pub(crate) slot: Slot,
    /// Which of the grant's replicas.
    pub(crate) replica: usize,
    pub(crate) outcome: v1::ReplicaOutcome,
    pub(crate) proof: Bytes,
}

impl OpenGrants {
    pub(crate) fn new(caller: Arc<Caller>, leader: &Leader) -> OpenGrants {
        OpenGrants { caller, session_id: leader.session_id, history: leader.history, open: Mutex::default() }
    }

    pub(crate) fn history(&self) -> History {
        self.history
    }

    pub(crate) fn session_id(&self) -> u64 {
        self.session_id
    }

    /// A grant was given. Until told otherwise nobody knows what its datanodes hold (unclean, W5).
    pub(crate) fn add(&mut self, key: &Bytes, object_id: u64, replicas: &[v1::Replica]) -> Slot {
        let unknown = |replica: &v1::Replica| v1::ReplicaStatus {
            replica_id: replica.replica_id,
            outcome: v1::ReplicaOutcome::Unknown as i32,
            proof: Bytes::new(),
        };
        let replicas = replicas.iter().map(unknown).collect();
        let open = self.open.get_mut();
        open.push(Some(v1::PutEndItem { key: key.clone(), object_id, replicas }));
        open.len() - 1
    }

    /// What datanodes said, for the end or the revoke to come.
    pub(crate) fn learn(&self, all: impl Iterator<Item = Learned>) {
        let mut open = self.open.lock();
        for Learned { slot, replica, outcome, proof } in all {
            let item = open.get_mut(slot).and_then(Option::as_mut);
            if let Some(status) = item.and_then(|item| item.replicas.get_mut(replica)) {
                (status.outcome, status.proof) = (outcome as i32, proof);
            }
        }
    }

    /// These as a PutEnd or PutRevoke names them.
    pub(crate) fn items(&self, slots: impl Iterator<Item = Slot>) -> Vec<v1::PutEndItem> {
        let open = self.open.lock();
        slots.filter_map(|slot| open.get(slot).cloned().flatten()).collect()
    }

    /// These were ended or revoked.
    pub(crate) fn settled(&self, slots: impl Iterator<Item = Slot>) {
        let mut open = self.open.lock();
        for slot in slots {
            open[slot] = None;
        }
    }
}

impl Drop for OpenGrants {
    fn drop(&mut self) {
        let items: Vec<v1::PutEndItem> = std::mem::take(self.open.get_mut()).into_iter().flatten().collect();
        if items.is_empty() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            tracing::warn!(grants = items.len(), "open grants are left to the master's discard: no runtime");
            return;
        };
        let (caller, session_id, history) = (self.caller.clone(), self.session_id, self.history);
        runtime.spawn(async move {
            let body = v1::PutRevokeRequest { items, session_id };
            let revoked = caller.call_in(history, "put_revoke", Deadline::after(REVOKE_DEADLINE), |_| {
                client_request::Body::PutRevoke(body.clone())
            });
            if let Err(failure) = revoked.await {
                tracing::warn!(error = %failure.error, "grants could not be revoked; the master will discard them");
            }
        });
    }
}
