//! Calls that act on what matches a prefix or a regex, or on replicas of keys: bounded steps at the leader, repeated here
//! until the end or the deadline.

use std::sync::Arc;

use bytes::Bytes;
use tidepool_proto::v1::{self, client_request, client_response};
use tidepool_proto::{Error, ErrorCode};

use crate::call::{Caller, Failure, malformed};
use crate::deadline::Deadline;
use crate::lookup::{complete, split};
use crate::put::SoftPin;
use crate::quorum::Leader;
use crate::remove::RemoveMode;
use crate::sequence::Sequences;

/// Which keys.
#[derive(Clone, Debug, Default)]
pub struct Matching {
    /// Keys under it; empty: all.
    pub prefix: Bytes,
    /// Keys that it finds a match in (the `regex` crate's syntax, linear time); empty: all.
    pub regex: String,
}

/// What a removal by match did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Objects removed.
    pub removed: u64,
    /// Left because a reader may be on them.
    pub leased: u64,
    /// Left because they are being put.
    pub unfinished: u64,
    /// The first keys of those left.
    pub left_keys: Vec<Bytes>,
    /// Set when the deadline passed before the end: where to go on.
    pub next: Option<Bytes>,
}

/// Keys kept of those left.
const LEFT_KEYS_MAX: usize = 100;

pub(crate) struct Matcher {
    pub(crate) caller: Arc<Caller>,
    pub(crate) sequences: Arc<Sequences>,
}

impl Matcher {
    /// Removes step by step. A step whose outcome is unknown is not repeated: the next one has its own number, which
    /// outdates it (W8), and looks at the same part again.
    pub(crate) async fn remove(
        &self,
        matching: &Matching,
        mode: RemoveMode,
        after: Option<Bytes>,
        deadline: Deadline,
    ) -> Result<Removed, Error> {
        let mut total = Removed::default();
        let mut after = after.unwrap_or_default();
        loop {
            let step = match self.step(matching, mode, &after, deadline).await {
                Ok(step) => step,
                Err(failure) if failure.uncertain && !deadline.expired() => continue,
                Err(Failure { error, .. }) if error.code() == ErrorCode::DeadlineExceeded && total.removed > 0 => {
                    total.next = Some(after);
                    return Ok(total);
                }
                Err(failure) => return Err(failure.error),
            };
            total.removed += step.removed;
            total.leased += step.leased;
            total.unfinished += step.unfinished;
            let room = LEFT_KEYS_MAX.saturating_sub(total.left_keys.len());
            total.left_keys.extend(step.left_keys.into_iter().take(room));
            if step.next.is_empty() {
                return Ok(total);
            }
            after = step.next;
        }
    }

    async fn step(
        &self,
        matching: &Matching,
        mode: RemoveMode,
        after: &Bytes,
        deadline: Deadline,
    ) -> Result<v1::RemoveMatchingResponse, Failure> {
        let certain = |error| Failure { error, uncertain: false };
        let range = self.sequences.take("remove_matching", 1, deadline).await.map_err(certain)?;
        let answer = self.caller.call_while(
            "remove_matching",
            deadline,
            |leader| {
                client_request::Body::RemoveMatching(v1::RemoveMatchingRequest {
                    session_id: leader.session_id,
                    sequence: range.first,
                    floor: self.sequences.floor(),
                    prefix: matching.prefix.clone(),
                    regex: matching.regex.clone(),
                    mode: v1::RemoveMode::from(mode) as i32,
                    after: after.clone(),
                })
            },
            |_, uncertain| match uncertain {
                true => Err(Error::new(ErrorCode::Unavailable, "whether a step was executed is unknown")),
                false => Ok(()),
            },
        );
        match answer.await?.body {
            client_response::Body::RemoveMatching(step) => Ok(step),
            _ => Err(Failure { error: malformed("remove_matching", "another message"), uncertain: false }),
        }
    }

    /// Sets or ends soft pins, one result a key.
    pub(crate) async fn pin<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        pin: SoftPin,
        deadline: Deadline,
    ) -> Vec<Result<(), Error>> {
        let mut results: Vec<Option<Result<(), Error>>> = keys.iter().map(|_| None).collect();
        let (action, ttl_ms) = pin.to_wire();
        for chunk in split(keys, &mut results) {
            let packed = v1::Keys::pack(chunk.iter().map(|(_, key)| key));
            let answer = self.caller.call("pin", deadline, |_| {
                client_request::Body::Pin(v1::PinRequest { keys: Some(packed.clone()), action: action as i32, ttl_ms })
            });
            let answer = answer.await.map_err(|f| f.error).and_then(|answer| match answer.body {
                client_response::Body::Pin(pinned) => Ok(pinned.errors),
                _ => Err(malformed("pin", "another message")),
            });
            for &(position, _) in &chunk {
                results[position] = Some(answer.as_ref().map(|_| ()).map_err(Error::clone));
            }
            for error in answer.into_iter().flatten() {
                if let Some(&(position, _)) = chunk.get(error.index as usize) {
                    results[position] = Some(Err(error.into()));
                }
            }
        }
        complete(results)
    }

    /// Removes the replicas of keys on a segment ("": on all); whether each key's were.
    pub(crate) async fn clear_replicas<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        segment_name: &str,
        deadline: Deadline,
    ) -> Vec<Result<bool, Error>> {
        let mut results: Vec<Option<Result<bool, Error>>> = keys.iter().map(|_| None).collect();
        for chunk in split(keys, &mut results) {
            let answer = self.clear_chunk(&chunk, segment_name, deadline).await;
            for (i, &(position, _)) in chunk.iter().enumerate() {
                results[position] = Some(answer.as_ref().map(|cleared| cleared[i] == 1).map_err(Error::clone));
            }
        }
        complete(results)
    }

    /// One answer a key.
    async fn clear_chunk(
        &self,
        chunk: &[(usize, &[u8])],
        segment_name: &str,
        deadline: Deadline,
    ) -> Result<Bytes, Error> {
        let packed = v1::Keys::pack(chunk.iter().map(|(_, key)| key));
        // By the time it is repeated the keys may name other objects: the numbers tell the masters (W8).
        let range = self.sequences.take("replica_clear", chunk.len(), deadline).await?;
        let clear = |leader: &Leader| {
            client_request::Body::ReplicaClear(v1::ReplicaClearRequest {
                keys: Some(packed.clone()),
                segment_name: segment_name.to_owned(),
                session_id: leader.session_id,
                sequence: range.first,
                floor: self.sequences.floor(),
            })
        };
        let may_send = |leader: &Leader, uncertain: bool| range.may_send("a clear of replicas", leader, uncertain);
        let answer = self.caller.call_while("replica_clear", deadline, clear, may_send).await;
        match answer.map_err(|f| f.error)?.body {
            client_response::Body::ReplicaClear(done) if done.cleared.len() == chunk.len() => Ok(done.cleared),
            _ => Err(malformed("replica_clear", "not one answer a key")),
        }
    }
}
