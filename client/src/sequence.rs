//! Numbers of the key-named destructive calls of one client (W8): removes and upserts.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode, OUTCOMES_PER_SESSION_MAX};
use tokio::sync::{Notify, Semaphore};

use crate::deadline::Deadline;
use crate::lookup::KEYS_PER_REQUEST_MAX;
use crate::quorum::Leader;

/// Numbers that may be given out from the floor on: masters keep no more outcomes, and refuse what is beyond.
const WINDOW: u64 = OUTCOMES_PER_SESSION_MAX as u64;
const _: () = assert!(KEYS_PER_REQUEST_MAX <= OUTCOMES_PER_SESSION_MAX, "a request that the window never has room for");

/// Each key of such a call has a sequence; the floor is the lowest one whose answer the caller has not had.
#[derive(Debug)]
pub(crate) struct Sequences {
    state: Mutex<SequenceState>,
    /// Those who wait for numbers, in turn: a large request would starve behind small ones.
    queue: Semaphore,
    /// The floor rose.
    risen: Notify,
}

#[derive(Debug)]
struct SequenceState {
    next: u64,
    open: BTreeSet<u64>,
}

impl SequenceState {
    fn floor(&self) -> u64 {
        self.open.first().copied().unwrap_or(self.next)
    }
}

impl Default for Sequences {
    fn default() -> Self {
        Sequences {
            state: Mutex::new(SequenceState { next: 1, open: BTreeSet::new() }),
            queue: Semaphore::new(1),
            risen: Notify::new(),
        }
    }
}

/// The sequences of one request; given back when its caller has the answer (or has gone).
pub(crate) struct SequenceRange<'s> {
    sequences: &'s Sequences,
    pub(crate) first: u64,
    /// The session that the numbers were first sent in.
    session: Mutex<Option<u64>>,
}

impl Sequences {
    /// Numbers for the keys of one request, of which there are `KEYS_PER_REQUEST_MAX` at most. Waits while they would be too far
    /// from the floor.
    pub(crate) async fn take(
        &self,
        op: &'static str,
        count: usize,
        deadline: Deadline,
    ) -> Result<SequenceRange<'_>, Error> {
        let late = || {
            deadline.error(&format!(
                "{op} waited for its turn: {WINDOW} removes and upserts of one client may be under way"
            ))
        };
        let shut = |_| Error::new(ErrorCode::Unavailable, "the client is shutting down");
        let _turn = deadline.bound(self.queue.acquire()).await.ok_or_else(late)?.map_err(shut)?;
        loop {
            if let Some(range) = self.take_now(count) {
                return Ok(range);
            }
            deadline.bound(self.risen.notified()).await.ok_or_else(late)?;
        }
    }

    fn take_now(&self, count: usize) -> Option<SequenceRange<'_>> {
        let mut state = self.state.lock();
        let (first, next) = (state.next, state.next + count as u64);
        if next - state.floor() > WINDOW {
            return None;
        }
        state.next = next;
        state.open.insert(first);
        Some(SequenceRange { sequences: self, first, session: Mutex::new(None) })
    }

    pub(crate) fn floor(&self) -> u64 {
        self.state.lock().floor()
    }
}

impl SequenceRange<'_> {
    /// A session names the numbers. Once an attempt may have been executed, another session (which knows nothing of it)
    /// must not execute the request again.
    pub(crate) fn may_send(&self, what: &str, leader: &Leader, uncertain: bool) -> Result<(), Error> {
        let mut session = self.session.lock();
        let first = *session.get_or_insert(leader.session_id);
        if first == leader.session_id || !uncertain {
            *session = Some(leader.session_id);
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::DeadlineExceeded,
            format!(
                "the session with the masters was lost while {what} was under way: whether it was executed is unknown"
            ),
        ))
    }
}

impl Drop for SequenceRange<'_> {
    fn drop(&mut self) {
        self.sequences.state.lock().open.remove(&self.first);
        // Kept for the next one who waits, if nobody does now.
        self.sequences.risen.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_floor_is_the_lowest_unanswered_sequence() {
        let sequences = Sequences::default();
        assert_eq!(sequences.floor(), 1);
        let a = sequences.take_now(3).unwrap();
        let b = sequences.take_now(2).unwrap();
        assert_eq!((a.first, b.first, sequences.floor()), (1, 4, 1));
        drop(b);
        assert_eq!(sequences.floor(), 1, "a is still open");
        drop(a);
        assert_eq!(sequences.floor(), 6);
    }

    #[tokio::test]
    async fn numbers_stay_near_the_floor_and_are_given_in_turn() {
        let sequences = Sequences::default();
        let within = Deadline::after(Duration::from_secs(5));
        let oldest = sequences.take("remove", 1, within).await.unwrap();
        for _ in 1..WINDOW {
            sequences.take("remove", 1, within).await.unwrap();
        }
        let soon = Deadline::after(Duration::from_millis(10));
        let error = sequences.take("remove", 1, soon).await.err().expect("the window is full");
        assert_eq!(error.code(), ErrorCode::DeadlineExceeded, "{error}");
        let large = sequences.take("remove", KEYS_PER_REQUEST_MAX, within);
        let small = sequences.take("remove", 1, within);
        let answered = async {
            tokio::task::yield_now().await;
            drop(oldest);
        };
        let (large, small, ()) = tokio::join!(large, small, answered);
        let (large, small) = (large.unwrap(), small.unwrap());
        assert_eq!((large.first, small.first), (WINDOW + 1, WINDOW + 1 + KEYS_PER_REQUEST_MAX as u64));
    }
}
