//! Grants that were given and not yet ended. What is still open when the put is dropped (cancelled, or out of time)
//! is revoked in the background, so that its space does not wait for the discard timeout.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashSet;
use parking_lot::Mutex;
use tidepool_proto::v1::{self, client_request};

use crate::call::Caller;
use crate::deadline::Deadline;

/// Time a background revoke may take; after it the master discards the grant by itself.
const REVOKE_DEADLINE: Duration = Duration::from_secs(5);

pub(crate) struct OpenGrants {
    caller: Arc<Caller>,
    /// The session that started the puts.
    session_id: u64,
    open: Mutex<Vec<v1::PutEndItem>>,
}

impl OpenGrants {
    pub(crate) fn new(caller: Arc<Caller>, session_id: u64) -> OpenGrants {
        OpenGrants { caller, session_id, open: Mutex::default() }
    }

    pub(crate) fn session_id(&self) -> u64 {
        self.session_id
    }

    /// A grant was given. Until told otherwise nobody knows what its datanodes hold (unclean, W5).
    pub(crate) fn add(&mut self, key: &Bytes, object_id: u64, replicas: &[v1::Replica]) {
        let unknown = |replica: &v1::Replica| v1::ReplicaStatus {
            replica_id: replica.replica_id,
            outcome: v1::ReplicaOutcome::Unknown as i32,
            proof: Bytes::new(),
        };
        self.open.get_mut().push(v1::PutEndItem {
            key: key.clone(),
            object_id,
            replicas: replicas.iter().map(unknown).collect(),
        });
    }

    /// What its datanodes said, for a revoke to come.
    pub(crate) fn learned(&self, object_id: u64, replicas: &[v1::ReplicaStatus]) {
        if let Some(item) = self.open.lock().iter_mut().find(|item| item.object_id == object_id) {
            item.replicas = replicas.to_vec();
        }
    }

    /// These were ended or revoked.
    pub(crate) fn settled(&self, object_ids: impl Iterator<Item = u64>) {
        let object_ids: HashSet<u64> = object_ids.collect();
        self.open.lock().retain(|item| !object_ids.contains(&item.object_id));
    }
}

impl Drop for OpenGrants {
    fn drop(&mut self) {
        let items = std::mem::take(self.open.get_mut());
        if items.is_empty() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            tracing::warn!(grants = items.len(), "open grants are left to the master's discard: no runtime");
            return;
        };
        let (caller, session_id) = (self.caller.clone(), self.session_id);
        runtime.spawn(async move {
            let body = v1::PutRevokeRequest { items, session_id };
            let revoked = caller.call("put_revoke", Deadline::after(REVOKE_DEADLINE), |_| {
                client_request::Body::PutRevoke(body.clone())
            });
            if let Err(failure) = revoked.await {
                tracing::warn!(error = %failure.error, "grants could not be revoked; the master will discard them");
            }
        });
    }
}
