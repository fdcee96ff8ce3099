//! Gives leases back once their reads are over, many in one message, so that read objects do not block eviction for
//! the whole lease time.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::v1::{self, client_request};

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
    ready: Vec<u64>,
    sending: bool,
}

/// Leases of one get; given back when it is dropped.
pub(crate) struct Held {
    releaser: Arc<Releaser>,
    objects: Vec<u64>,
}

impl Releaser {
    pub(crate) fn new(caller: Arc<Caller>) -> Arc<Releaser> {
        Arc::new(Releaser { caller, owed: Mutex::default() })
    }

    pub(crate) fn hold(self: &Arc<Self>) -> Held {
        Held { releaser: self.clone(), objects: Vec::new() }
    }

    fn give_back(self: &Arc<Self>, objects: Vec<u64>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        {
            let mut owed = self.owed.lock();
            let room = OWED_MAX.saturating_sub(owed.ready.len());
            owed.ready.extend(objects.into_iter().take(room));
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
        for chunk in ready.chunks(KEYS_PER_REQUEST_MAX) {
            let body = v1::ReleaseLeaseRequest { object_ids: chunk.to_vec() };
            let sent = releaser.caller.call("release_lease", Deadline::after(RETURN_DEADLINE), |_| {
                client_request::Body::ReleaseLease(body.clone())
            });
            if let Err(failure) = sent.await {
                tracing::debug!(error = %failure.error, "leases were not given back; they run out by themselves");
            }
        }
    }
}

impl Held {
    pub(crate) fn add(&mut self, object_id: u64) {
        self.objects.push(object_id);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.objects.is_empty() {
            self.releaser.give_back(std::mem::take(&mut self.objects));
        }
    }
}
