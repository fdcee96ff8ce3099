//! Numbers of the key-named destructive calls of one client (W8): removes and upserts.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};

use crate::quorum::Leader;

/// Each key of such a call has a sequence; the floor is the lowest one whose answer the caller has not had.
#[derive(Debug, Default)]
pub(crate) struct Sequences(Mutex<SequenceState>);

#[derive(Debug)]
struct SequenceState {
    next: u64,
    open: BTreeSet<u64>,
}

impl Default for SequenceState {
    fn default() -> Self {
        SequenceState { next: 1, open: BTreeSet::new() }
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
    pub(crate) fn take(&self, count: usize) -> SequenceRange<'_> {
        let mut state = self.0.lock();
        let first = state.next;
        state.next += count as u64;
        state.open.insert(first);
        SequenceRange { sequences: self, first, session: Mutex::new(None) }
    }

    pub(crate) fn floor(&self) -> u64 {
        let state = self.0.lock();
        state.open.first().copied().unwrap_or(state.next)
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
        self.sequences.0.lock().open.remove(&self.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_lowest_unanswered_sequence() {
        let sequences = Sequences::default();
        assert_eq!(sequences.floor(), 1);
        let a = sequences.take(3);
        let b = sequences.take(2);
        assert_eq!((a.first, b.first, sequences.floor()), (1, 4, 1));
        drop(b);
        assert_eq!(sequences.floor(), 1, "a is still open");
        drop(a);
        assert_eq!(sequences.floor(), 6);
    }
}
