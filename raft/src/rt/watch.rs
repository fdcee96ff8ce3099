//! A value that many follow, as `tokio::sync::watch` has it, with one difference: who waits is woken in the order of
//! waiting. tokio's spreads the waiters over queues at random, and no seed would decide what runs first.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::Notify;

struct Shared<T> {
    value: RwLock<T>,
    version: AtomicU64,
    closed: AtomicBool,
    changed: Notify,
}

impl<T: std::fmt::Debug> std::fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sender").field(&*self.borrow()).finish()
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Receiver").field(&*self.borrow()).finish()
    }
}

impl<T: Default> Default for Sender<T> {
    fn default() -> Self {
        Sender::new(T::default())
    }
}

/// The sender is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the value changes no more: its sender is gone")]
pub struct RecvError;

/// Sets the value.
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
}

/// Follows the value.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

/// The value, held still.
pub struct Ref<'a, T>(RwLockReadGuard<'a, T>);

impl<T> Deref for Ref<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver { shared: self.shared.clone(), seen: self.seen }
    }
}

/// A pair.
pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let sender = Sender::new(value);
    let receiver = sender.subscribe();
    (sender, receiver)
}

impl<T> Sender<T> {
    /// With a first value.
    pub fn new(value: T) -> Sender<T> {
        let shared = Shared {
            value: RwLock::new(value),
            version: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            changed: Notify::new(),
        };
        Sender { shared: Arc::new(shared) }
    }

    /// Follows from here on.
    pub fn subscribe(&self) -> Receiver<T> {
        Receiver { shared: self.shared.clone(), seen: self.shared.version.load(Ordering::Acquire) }
    }

    /// Sets the value and answers the one before.
    pub fn send_replace(&self, value: T) -> T {
        let before = std::mem::replace(&mut *self.shared.value.write(), value);
        self.notify();
        before
    }

    /// Changes the value.
    pub fn send_modify(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.shared.value.write());
        self.notify();
    }

    /// Changes the value, or not: then nobody is woken.
    pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        let changed = change(&mut self.shared.value.write());
        if changed {
            self.notify();
        }
        changed
    }

    /// The value.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.shared.value.read())
    }

    fn notify(&self) {
        self.shared.version.fetch_add(1, Ordering::AcqRel);
        self.shared.changed.notify_waiters();
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.changed.notify_waiters();
    }
}

impl<T> Receiver<T> {
    /// The value.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.shared.value.read())
    }

    /// The value; it counts as seen.
    pub fn borrow_and_update(&mut self) -> Ref<'_, T> {
        let value = self.shared.value.read();
        self.seen = self.shared.version.load(Ordering::Acquire);
        Ref(value)
    }

    /// Resolves when there is a value that was not seen; it counts as seen then.
    pub async fn changed(&mut self) -> Result<(), RecvError> {
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            let version = self.shared.version.load(Ordering::Acquire);
            if version != self.seen {
                self.seen = version;
                return Ok(());
            }
            if self.shared.closed.load(Ordering::Acquire) {
                return Err(RecvError);
            }
            changed.await;
        }
    }

    /// Resolves when the value is as wanted.
    pub async fn wait_for(&mut self, mut wanted: impl FnMut(&T) -> bool) -> Result<Ref<'_, T>, RecvError> {
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            self.seen = self.shared.version.load(Ordering::Acquire);
            let closed = self.shared.closed.load(Ordering::Acquire);
            if wanted(&self.shared.value.read()) {
                return Ok(Ref(self.shared.value.read()));
            }
            if closed {
                return Err(RecvError);
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use openraft::async_runtime::AsyncRuntime;
    use openraft_rt_sim::SimRuntime;
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn who_waited_first_is_woken_first() {
        let order = Arc::new(Mutex::new(Vec::new()));
        SimRuntime::with_seed(1).block_on(async {
            let sender = Sender::new(0);
            let waiting: Vec<_> = (0..50)
                .map(|i| {
                    let (mut receiver, order) = (sender.subscribe(), order.clone());
                    SimRuntime::spawn(async move {
                        receiver.wait_for(|value| *value == 2).await.unwrap();
                        order.lock().push(i);
                    })
                })
                .collect();
            for value in [1, 2] {
                SimRuntime::sleep(std::time::Duration::from_millis(1)).await;
                sender.send_replace(value);
            }
            for task in waiting {
                task.await.unwrap();
            }
        });
        assert_eq!(*order.lock(), (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn what_was_sent_last_is_seen_before_the_end() {
        SimRuntime::with_seed(1).block_on(async {
            let (sender, mut receiver) = channel(1);
            sender.send_replace(2);
            assert!(sender.send_if_modified(|value| std::mem::replace(value, 3) == 2));
            assert!(!sender.send_if_modified(|_| false));
            drop(sender);
            receiver.changed().await.unwrap();
            assert_eq!(*receiver.borrow_and_update(), 3);
            assert_eq!(receiver.changed().await, Err(RecvError));
            assert_eq!(*receiver.wait_for(|value| *value == 3).await.unwrap(), 3);
            assert!(receiver.wait_for(|value| *value == 4).await.is_err());
        });
    }
}
