//! PutStarts that were sent and whose answer nobody has: the caller's deadline passed, or its future was dropped.
//!
//! What they were granted would stay open until the master discards it. So each is repeated in the background with its
//! tokens, which gives the same grants (W8), and those are revoked. A repeat of one that never arrived opens its grants
//! for a moment; that is the price of not knowing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidepool_proto::v1::{self, client_request, client_response};
use tokio::sync::Semaphore;

use crate::call::Caller;
use crate::deadline::Deadline;
use crate::grants::OpenGrants;

/// PutStarts repeated at once; more are left to the master's discard.
const REPEATS_MAX: usize = 64;
/// Time a repeat may take.
const REPEAT_DEADLINE: Duration = Duration::from_secs(5);

/// The abandoned PutStarts of one client.
pub(crate) struct Abandoned {
    caller: Arc<Caller>,
    places: Arc<Semaphore>,
}

/// A PutStart on its way. Dropped without `answered` after it was sent, it is abandoned.
pub(crate) struct Awaited<'a> {
    abandoned: &'a Abandoned,
    request: v1::PutStartRequest,
    open: AtomicBool,
}

impl Abandoned {
    pub(crate) fn new(caller: Arc<Caller>) -> Abandoned {
        Abandoned { caller, places: Arc::new(Semaphore::new(REPEATS_MAX)) }
    }

    pub(crate) fn watch(&self, request: v1::PutStartRequest) -> Awaited<'_> {
        Awaited { abandoned: self, request, open: AtomicBool::new(false) }
    }
}

impl Awaited<'_> {
    /// What an attempt sends. From now on its grants may be open.
    pub(crate) fn attempt(&self, session_id: u64, excluded_nodes: Vec<u64>) -> client_request::Body {
        self.open.store(true, Ordering::Relaxed);
        client_request::Body::PutStart(v1::PutStartRequest { session_id, excluded_nodes, ..self.request.clone() })
    }

    /// What became of it is known.
    pub(crate) fn answered(&self) {
        self.open.store(false, Ordering::Relaxed);
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        // An upsert repeated when nobody waits for it could take another's grant away.
        if !*self.open.get_mut() || self.request.upsert {
            return;
        }
        let places = self.abandoned.places.clone();
        let (Ok(runtime), Ok(place)) = (tokio::runtime::Handle::try_current(), places.try_acquire_owned()) else {
            tracing::warn!(items = self.request.items.len(), "an abandoned PutStart is left to the master's discard");
            return;
        };
        let (caller, request) = (self.abandoned.caller.clone(), std::mem::take(&mut self.request));
        runtime.spawn(async move {
            repeat(caller, request).await;
            drop(place);
        });
    }
}

async fn repeat(caller: Arc<Caller>, request: v1::PutStartRequest) {
    let answer = caller
        .call("put_start", Deadline::after(REPEAT_DEADLINE), |leader| {
            client_request::Body::PutStart(v1::PutStartRequest { session_id: leader.session_id, ..request.clone() })
        })
        .await;
    match answer {
        Ok(answer) => {
            let client_response::Body::PutStart(start) = answer.body else { return };
            // Revoked when dropped.
            let mut open = OpenGrants::new(caller, &answer.leader);
            for (item, grant) in request.items.iter().zip(start.grants).filter(|(_, grant)| grant.error.is_none()) {
                open.add(&item.key, grant.object_id, &grant.replicas);
            }
        }
        Err(failure) => tracing::warn!(error = %failure.error, "an abandoned PutStart is left to the master's discard"),
    }
}
