//! Gives leases back once their reads are over, many in one message, so that read objects do not block eviction for
//! the whole lease time.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::v1::{self, client_request};
use tidepool_proto::{Error, ErrorCode, History};

use crate::call::Caller;
use crate::deadline::Deadline;
use crate::lookup::KEYS_PER_REQUEST_MAX;

/// Leases that wait to be given back; beyond it they simply run out.
const OWED_MAX: usize = 1 << 16;
/// How long returns are collected.
const COLLECT: Duration = Duration::from_millis(10);
/// A return that is not delivered within this is dropped: the lease runs out by itself.
const RETURN_DEADLINE: Duration = Duration::from_secs(1);

pub(crate) struct Releaser {
    caller: Arc<Caller>,
    owed: Mutex<Owed>,
}

#[derive(Default)]
struct Owed {
    /// Leases of reads that are over.
    ready: Vec<Lease>,
    sending: bool,
}

/// A lease, as the master that granted it knows it.
#[derive(Clone, Copy)]
pub(crate) struct Lease {
    pub(crate) object_id: u64,
    pub(crate) term: u64,
    pub(crate) history: History,
    pub(crate) expires_log_time_ms: u64,
}

/// Leases of one get; given back when it is dropped.
pub(crate) struct Held {
    releaser: Arc<Releaser>,
    leases: Vec<Lease>,
}

impl Releaser {
    pub(crate) fn new(caller: Arc<Caller>) -> Arc<Releaser> {
        Arc::new(Releaser { caller, owed: Mutex::default() })
    }

    pub(crate) fn hold(self: &Arc<Self>) -> Held {
        Held { releaser: self.clone(), leases: Vec::new() }
    }

    fn give_back(self: &Arc<Self>, leases: Vec<Lease>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        {
            let mut owed = self.owed.lock();
            let room = OWED_MAX.saturating_sub(owed.ready.len());
            owed.ready.extend(leases.into_iter().take(room));
            if std::mem::replace(&mut owed.sending, true) {
                return;
            }
        }
        runtime.spawn(send(Arc::downgrade(self)));
    }
}

async fn send(releaser: Weak<Releaser>) {
    loop {
        tokio::time::sleep(COLLECT).await;
        let Some(releaser) = releaser.upgrade() else { return };
        let ready = {
            let mut owed = releaser.owed.lock();
            if owed.ready.is_empty() {
                owed.sending = false;
                return;
            }
            std::mem::take(&mut owed.ready)
        };
        for chunk in ready
            .chunk_by(|a, b| (a.history, a.term) == (b.history, b.term))
            .flat_map(|leases| leases.chunks(KEYS_PER_REQUEST_MAX))
        {
            let (history, term) = (chunk[0].history, chunk[0].term);
            let body = v1::ReleaseLeaseRequest {
                object_ids: chunk.iter().map(|lease| lease.object_id).collect(),
                term,
                expires_log_time_ms: chunk.iter().map(|lease| lease.expires_log_time_ms).collect(),
            };
            // Once, and to the master that granted them: a repeat would take somebody else's.
            let sent = releaser.caller.call_while(
                "release_lease",
                Deadline::after(RETURN_DEADLINE),
                |_| client_request::Body::ReleaseLease(body.clone()),
                |leader, uncertain| match uncertain || (leader.history, leader.term) != (history, term) {
                    true => Err(Error::new(ErrorCode::LeaseExpired, "the master that granted them is asked no more")),
                    false => Ok(()),
                },
            );
            if let Err(failure) = sent.await {
                tracing::debug!(error = %failure.error, "leases were not given back; they run out by themselves");
            }
        }
    }
}

impl Held {
    pub(crate) fn add(&mut self, lease: Lease) {
        self.leases.push(lease);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.leases.is_empty() {
            self.releaser.give_back(std::mem::take(&mut self.leases));
        }
    }
}
