//! Remove: the key-named destructive call, numbered so that a late duplicate is never executed (W8).

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use parking_lot::Mutex;
use tidepool_proto::v1::{self, client_request, client_response};
use tidepool_proto::{Error, ErrorCode};

use crate::call::{Caller, malformed};
use crate::deadline::Deadline;
use crate::lookup::{complete, split};

/// What a remove does about readers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RemoveMode {
    /// OBJECT_HAS_LEASE while a reader may be on it.
    #[default]
    RespectLease,
    /// Unlisted now; the bytes stay valid for live leases.
    Force,
}

impl From<RemoveMode> for v1::RemoveMode {
    fn from(mode: RemoveMode) -> v1::RemoveMode {
        match mode {
            RemoveMode::RespectLease => v1::RemoveMode::RespectLease,
            RemoveMode::Force => v1::RemoveMode::Force,
        }
    }
}

/// Numbers the removes of one client: each key has a sequence, and the floor is the lowest one whose answer the
/// caller has not had.
#[derive(Debug, Default)]
struct Sequences(Mutex<SequenceState>);

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
struct SequenceRange<'s> {
    sequences: &'s Sequences,
    first: u64,
}

impl Sequences {
    fn take(&self, count: usize) -> SequenceRange<'_> {
        let mut state = self.0.lock();
        let first = state.next;
        state.next += count as u64;
        state.open.insert(first);
        SequenceRange { sequences: self, first }
    }

    fn floor(&self) -> u64 {
        let state = self.0.lock();
        state.open.first().copied().unwrap_or(state.next)
    }
}

impl Drop for SequenceRange<'_> {
    fn drop(&mut self) {
        self.sequences.0.lock().open.remove(&self.first);
    }
}

/// Removes of one client.
pub(crate) struct Remover {
    caller: Arc<Caller>,
    sequences: Sequences,
}

impl Remover {
    pub(crate) fn new(caller: Arc<Caller>) -> Remover {
        Remover { caller, sequences: Sequences::default() }
    }

    pub(crate) async fn remove_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        mode: RemoveMode,
        deadline: Deadline,
    ) -> Vec<Result<(), Error>> {
        let mut results: Vec<Option<Result<(), Error>>> = keys.iter().map(|_| None).collect();
        let chunks = split(keys, &mut results);
        let answers = join_all(chunks.iter().map(|chunk| self.remove_chunk(chunk, mode, deadline))).await;
        for (chunk, answer) in chunks.iter().zip(answers) {
            match answer {
                Ok(errors) => {
                    for &(position, _) in chunk {
                        results[position] = Some(Ok(()));
                    }
                    for error in errors {
                        match chunk.get(error.index as usize) {
                            Some(&(position, _)) => results[position] = Some(Err(error.into())),
                            None => {
                                tracing::error!(index = error.index, "the master failed a remove that was not sent")
                            }
                        }
                    }
                }
                Err(error) => {
                    for &(position, _) in chunk {
                        results[position] = Some(Err(error.clone()));
                    }
                }
            }
        }
        complete(results)
    }

    async fn remove_chunk(
        &self,
        chunk: &[(usize, &[u8])],
        mode: RemoveMode,
        deadline: Deadline,
    ) -> Result<Vec<v1::ItemError>, Error> {
        let keys = v1::Keys::pack(chunk.iter().map(|(_, key)| key));
        let range = self.sequences.take(chunk.len());
        // A session names the numbers. Once an attempt may have been executed, another session (which knows nothing
        // of it) must not execute the request again.
        let session = Mutex::new(None);
        let answer = self.caller.call_while(
            "remove",
            deadline,
            |leader| {
                client_request::Body::Remove(v1::RemoveRequest {
                    session_id: leader.session_id,
                    sequence: range.first,
                    floor: self.sequences.floor(),
                    keys: Some(keys.clone()),
                    mode: v1::RemoveMode::from(mode) as i32,
                })
            },
            |leader, uncertain| {
                let first = *session.lock().get_or_insert(leader.session_id);
                if first == leader.session_id || !uncertain {
                    *session.lock() = Some(leader.session_id);
                    return Ok(());
                }
                Err(Error::new(
                    ErrorCode::DeadlineExceeded,
                    "the session with the masters was lost while a remove was under way: whether it was executed is unknown",
                ))
            },
        );
        match answer.await.map_err(|f| f.error)?.body {
            client_response::Body::Remove(removed) => Ok(removed.errors),
            _ => Err(malformed("remove", "another message")),
        }
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
