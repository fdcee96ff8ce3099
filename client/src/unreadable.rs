//! Keys this client could not read although the directory lists them: its next exist leaves them out for a moment
//! (LISTED-IS-READABLE). Unreachable nodes have their own set; this one holds what no node can give at present, such
//! as an object whose copies do not verify until the datanode has looked and the directory has dropped them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tidepool_proto::object::KeyHash;
use tidepool_proto::{Error, ErrorCode};

/// Keys remembered; further ones are not.
const KEYS_MAX: usize = 4096;
/// How long: enough for a report to be judged, short enough to be forgotten when it was wrong.
const REMEMBERED: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct Unreadable {
    /// Mirrors the size of the map, so that the usual case takes no lock.
    count: AtomicUsize,
    until: Mutex<HashMap<KeyHash, Instant>>,
}

impl Unreadable {
    /// A get failed for good.
    pub(crate) fn note(&self, key: KeyHash, error: &Error) {
        let listed_but_unreadable = matches!(
            error.code(),
            ErrorCode::ChecksumMismatch
                | ErrorCode::CapabilityRefused
                | ErrorCode::OutOfBounds
                | ErrorCode::SegmentNotFound
                | ErrorCode::Fenced
        );
        if !listed_but_unreadable {
            return;
        }
        let now = Instant::now();
        let mut until = self.until.lock();
        if until.len() >= KEYS_MAX {
            until.retain(|_, &mut end| end > now);
        }
        if until.len() < KEYS_MAX {
            until.insert(key, now + REMEMBERED);
        }
        self.count.store(until.len(), Ordering::Relaxed);
    }

    /// Forgets every key.
    pub(crate) fn forget_all(&self) {
        let mut until = self.until.lock();
        until.clear();
        self.count.store(0, Ordering::Relaxed);
    }

    /// The key was read, or put anew.
    pub(crate) fn clear(&self, key: impl FnOnce() -> KeyHash) {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut until = self.until.lock();
            until.remove(&key());
            self.count.store(until.len(), Ordering::Relaxed);
        }
    }

    /// Whether the key could not be read a moment ago.
    pub(crate) fn contains(&self, key: impl FnOnce() -> KeyHash) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let key = key();
        let mut until = self.until.lock();
        match until.get(&key) {
            Some(&end) if end > Instant::now() => true,
            Some(_) => {
                until.remove(&key);
                self.count.store(until.len(), Ordering::Relaxed);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_that_say_so_are_remembered_and_success_forgets() {
        let keys = Unreadable::default();
        let key = |n: u8| [n; 16];
        keys.note(key(1), &Error::new(ErrorCode::ChecksumMismatch, "x"));
        keys.note(key(2), &Error::new(ErrorCode::ObjectNotFound, "x"));
        keys.note(key(3), &Error::new(ErrorCode::DeadlineExceeded, "x"));
        assert!(keys.contains(|| key(1)) && !keys.contains(|| key(2)) && !keys.contains(|| key(3)));
        keys.clear(|| key(1));
        assert!(!keys.contains(|| key(1)));
        for n in 0..=KEYS_MAX as u64 {
            let mut key = [0; 16];
            key[..8].copy_from_slice(&n.to_le_bytes());
            keys.note(key, &Error::new(ErrorCode::ChecksumMismatch, "x"));
        }
        assert_eq!(keys.until.lock().len(), KEYS_MAX);
    }
}
