//! Messages that wait for a beat, each sent until its beat is answered.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Messages by what they are about; a newer one replaces an older.
pub(crate) struct Outbox<T> {
    waiting: Mutex<BTreeMap<u64, (T, Option<u64>)>>,
    ready: Notify,
}

impl<T> Default for Outbox<T> {
    fn default() -> Outbox<T> {
        Outbox { waiting: Mutex::default(), ready: Notify::new() }
    }
}

impl<T: Clone> Outbox<T> {
    pub(crate) fn add(&self, about: u64, message: T) {
        self.waiting.lock().insert(about, (message, None));
        self.ready.notify_one();
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Resolves when there may be something to send.
    pub(crate) async fn ready(&self) {
        self.ready.notified().await;
    }

    /// What was not sent yet, for the beat of this number.
    pub(crate) fn take(&self, sequence: u64, max: usize) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let unsent = waiting.values_mut().filter(|(_, sent)| sent.is_none()).take(max);
        unsent
            .map(|(message, sent)| {
                *sent = Some(sequence);
                message.clone()
            })
            .collect()
    }

    /// The beat of this number was answered.
    pub(crate) fn arrived(&self, sequence: u64) {
        self.waiting.lock().retain(|_, (_, sent)| sent.is_none_or(|sent| sent > sequence));
    }

    /// The stream is gone: everything is to be sent again.
    pub(crate) fn lost(&self) {
        self.waiting.lock().values_mut().for_each(|(_, sent)| *sent = None);
        self.ready.notify_one();
    }
}
