//! Remove: the key-named destructive call, numbered so that a late duplicate is never executed (W8).

use std::sync::Arc;

use futures::future::join_all;
use tidepool_proto::v1::{self, client_request, client_response};
use tidepool_proto::{Error, ErrorCode};

use crate::backoff::Backoff;
use crate::call::{Caller, malformed};
use crate::deadline::Deadline;
use crate::lookup::{complete, split};
use crate::sequence::Sequences;

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

/// Removes of one client.
pub(crate) struct Remover {
    caller: Arc<Caller>,
    sequences: Arc<Sequences>,
}

impl Remover {
    pub(crate) fn new(caller: Arc<Caller>, sequences: Arc<Sequences>) -> Remover {
        Remover { caller, sequences }
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
        let range = self.sequences.take("remove", chunk.len(), deadline).await?;
        let (mut uncertain, mut backoff) = (false, Backoff::new());
        loop {
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
                |leader, in_this_call| range.may_send("a remove", leader, uncertain || in_this_call),
            );
            let answer = answer.await.map_err(|f| f.error)?;
            let errors = match answer.body {
                client_response::Body::Remove(removed) => removed.errors,
                _ => return Err(malformed("remove", "another message")),
            };
            let unknown = errors.iter().filter(|error| error.code == ErrorCode::SessionUnknown as u32).count();
            if unknown > 0 {
                // Greeted again, the leader opens another session.
                self.caller.quorum.retract(&answer.leader);
            }
            // What was refused in part was executed in part: it is not sent again.
            if unknown < chunk.len() || !deadline.sleep(backoff.next(0)).await {
                return Ok(errors);
            }
            uncertain |= answer.uncertain;
        }
    }
}
