//! From grants to committed objects: payload to every granted replica, then PutEnd or PutRevoke.
//!
//! Large batches are cut by bytes: while one part is on the wire, the next is being checksummed, and the one before ends.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use hashbrown::HashMap;
use tidepool_proto::v1::{self, ReplicaOutcome, client_request, client_response};
use tidepool_proto::{Error, ErrorCode, History, ObjectId, object};
use tidepool_transport::{LocalRef, WriteAccess, WriteError, WriteItem, WriteOutcome, WriteReply};

use crate::call::{Caller, malformed};
use crate::checksums::Tables;
use crate::deadline::Deadline;
use crate::grants::{Learned, OpenGrants, Slot};
use crate::metrics::Metrics;
use crate::nodes::Node;
use crate::plane::{self, Plane, patience};
use crate::put::{Copies, Pending, PutOutcome, ReplicaMode};
use crate::quorum::Leader;
use crate::stepped::{self, Wanted};
use crate::suspects::Suspects;

/// Payload bytes written and ended as one batch.
const BATCH_BYTES: u64 = 8 << 20;
/// Time kept for PutEnd when a replica would use up the deadline.
const END_RESERVE_MAX: Duration = Duration::from_millis(100);

/// An item and where it may be written.
pub(crate) struct Granted {
    pub(crate) pending: Pending,
    pub(crate) slot: Slot,
    pub(crate) object_id: u64,
    pub(crate) replicas: Vec<v1::Replica>,
}

/// What became of a round: results, and what is tried again.
#[derive(Default)]
pub(crate) struct Settled {
    pub(crate) done: Vec<(usize, Result<PutOutcome, Error>)>,
    pub(crate) again: Vec<Pending>,
}

/// An item whose datanodes have answered, or have not. What they said is kept with the grant.
struct Written {
    pending: Pending,
    slot: Slot,
    object_id: u64,
    /// Copies that were stored.
    stored: usize,
    /// Why a replica was not stored; the last reason.
    failure: Option<Error>,
}

impl Written {
    fn enough(&self, copies: Copies) -> bool {
        match copies.mode {
            ReplicaMode::BestEffort => self.stored > 0,
            ReplicaMode::Strict => self.stored >= copies.wanted as usize,
        }
    }
}

/// What one node is sent.
#[derive(Default)]
struct NodeWrite {
    items: Vec<WriteItem>,
    /// For each item: which of the batch, and which of its replicas.
    places: Vec<(usize, usize)>,
    bytes: u64,
}

/// Writes of one client.
pub(crate) struct Writer {
    pub(crate) caller: Arc<Caller>,
    pub(crate) plane: Arc<Plane>,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Writer {
    /// Settles each grant.
    pub(crate) async fn write(
        &self,
        granted: Vec<Granted>,
        tables: Option<&Tables>,
        leader: &Leader,
        nodes: &HashMap<u64, Node>,
        copies: Copies,
        deadline: Deadline,
        open: &OpenGrants,
    ) -> Settled {
        let (mut batches, mut batch, mut bytes) = (Vec::new(), Vec::new(), 0);
        for item in granted {
            bytes += item.pending.length;
            batch.push(item);
            if bytes >= BATCH_BYTES {
                batches.push(std::mem::take(&mut batch));
                bytes = 0;
            }
        }
        if !batch.is_empty() {
            batches.push(batch);
        }
        let mut settled = Settled::default();
        let parts = batches.into_iter().map(|batch| async move {
            let written = self.write_batch(batch, tables, leader, nodes, deadline, open).await;
            self.settle(written, copies, deadline, open).await
        });
        for part in join_all(parts).await {
            settled.done.extend(part.done);
            settled.again.extend(part.again);
        }
        settled
    }

    /// Sends a batch to all its replicas at once.
    async fn write_batch(
        &self,
        batch: Vec<Granted>,
        tables: Option<&Tables>,
        leader: &Leader,
        nodes: &HashMap<u64, Node>,
        deadline: Deadline,
        open: &OpenGrants,
    ) -> Vec<Written> {
        let prefixes = prefixes(&batch, tables, leader.history, &self.caller, deadline).await;
        let mut written = Vec::with_capacity(batch.len());
        let mut by_node: HashMap<u64, NodeWrite> = HashMap::new();
        for (i, (granted, prefix)) in batch.into_iter().zip(prefixes).enumerate() {
            let Granted { pending, slot, object_id, replicas, .. } = granted;
            let mut item = Written { pending, slot, object_id, stored: 0, failure: None };
            for (at, replica) in replicas.into_iter().enumerate() {
                match &prefix {
                    Ok(prefix) if nodes.contains_key(&replica.node_id) => {
                        let write = by_node.entry(replica.node_id).or_default();
                        let length = object::stored_bytes(item.pending.length);
                        let mut from = Vec::with_capacity(1 + item.pending.item.value.len());
                        from.push(prefix.clone());
                        let parts = item.pending.item.value.iter().filter(|part| !part.is_empty());
                        from.extend(parts.map(|part| LocalRef::from(part.clone())));
                        let access = WriteAccess { object_id: item.object_id, replica, length };
                        write.items.push(WriteItem { access, from });
                        write.places.push((i, at));
                        write.bytes += length;
                    }
                    Ok(_) => {
                        let what =
                            format!("the master granted space on node {} and did not say where it is", replica.node_id);
                        item.failure = Some(Error::new(ErrorCode::Internal, what));
                    }
                    Err(error) => item.failure = Some(error.clone()),
                }
            }
            written.push(item);
        }
        let engine = self.plane.engine(leader.cluster, leader.history);
        let writes = by_node.into_iter().filter_map(|(node, write)| {
            let NodeWrite { items, places, bytes } = write;
            let address = nodes.get(&node)?.address.clone();
            let until = write_deadline(deadline, bytes);
            let engine = engine.clone();
            Some(async move {
                let started = Instant::now();
                let replies = plane::write(engine.as_ref(), &address, items, until).await;
                (node, address, places, replies, started.elapsed())
            })
        });
        for (node, address, places, replies, took) in join_all(writes).await {
            self.judge_node(node, &address, &replies, took);
            let proofs = proofs(&replies);
            let replies = replies.into_iter().chain(std::iter::repeat_with(|| {
                let what = "the transfer engine lost the result of this item";
                Err(WriteError::unclean(Error::new(ErrorCode::Internal, what)))
            }));
            let proofs = proofs.into_iter().chain(std::iter::repeat_with(Bytes::new));
            open.learn(places.into_iter().zip(replies).zip(proofs).map(|(((i, replica), reply), proof)| {
                let item = &mut written[i];
                let (outcome, failure) = read_reply(reply);
                item.stored += usize::from(outcome == ReplicaOutcome::Stored);
                let failure = failure.map(|error| error.with_node(address.to_string()));
                item.failure = failure.or(item.failure.take());
                Learned { slot: item.slot, replica, outcome, proof }
            }));
        }
        written
    }

    fn judge_node(
        &self,
        node: u64,
        address: &tidepool_proto::Address,
        replies: &[Result<WriteReply, WriteError>],
        took: Duration,
    ) {
        if replies.iter().any(|reply| match reply {
            Ok(_) => true,
            Err(error) => error.is_clean(),
        }) {
            self.suspects.clear(node);
            return;
        }
        let telling = replies.iter().filter_map(|r| r.as_ref().err()).find(|e| Suspects::is_telling(&e.error, took));
        if let Some(failure) = telling {
            self.suspects.suspect(node, address, &failure.error);
        }
    }

    /// Ends what has enough copies and revokes the rest, in one message each.
    async fn settle(&self, written: Vec<Written>, copies: Copies, deadline: Deadline, open: &OpenGrants) -> Settled {
        let (good, bad): (Vec<Written>, Vec<Written>) = written.into_iter().partition(|item| item.enough(copies));
        let (mut ended, revoked) =
            futures::join!(self.end(good, deadline, open), self.revoke(bad, copies, deadline, open));
        ended.done.extend(revoked.done);
        ended.again.extend(revoked.again);
        ended
    }

    async fn end(&self, items: Vec<Written>, deadline: Deadline, open: &OpenGrants) -> Settled {
        let mut settled = Settled::default();
        if items.is_empty() {
            return settled;
        }
        let slots = || items.iter().map(|item| item.slot);
        let request = |_: &Leader| {
            let body = v1::PutEndRequest { items: open.items(slots()), session_id: open.session_id() };
            client_request::Body::PutEnd(body)
        };
        let answer = self.caller.call_in(open.history(), "put_end", deadline, request).await;
        let (results, uncertain) = match answer {
            Ok(answer) => match answer.body {
                client_response::Body::PutEnd(end) if end.results.len() == items.len() => {
                    (end.results, answer.uncertain)
                }
                _ => {
                    let error = malformed("put_end", "not one result an item");
                    settled.done.extend(items.into_iter().map(|item| (item.pending.position, Err(error.clone()))));
                    return settled;
                }
            },
            // Never sent to anybody who knew the grants: put again, in the history that there is now.
            Err(failure) if !failure.uncertain && failure.error.code() == ErrorCode::GrantLost => {
                open.settled(slots());
                settled.again.extend(items.into_iter().map(|item| item.pending.again(failure.error.clone())));
                return settled;
            }
            Err(failure) => {
                let error = if failure.uncertain { unknown_outcome(&failure.error) } else { failure.error };
                settled.done.extend(items.into_iter().map(|item| (item.pending.position, Err(error.clone()))));
                return settled;
            }
        };
        open.settled(slots());
        for (item, result) in items.into_iter().zip(results) {
            let position = item.pending.position;
            let stored = |copies: u32| PutOutcome { copies, already_existed: false, object_id: item.object_id };
            match result.error {
                None => {
                    self.metrics.put_bytes.add(item.pending.length);
                    settled.done.push((position, Ok(stored(result.copies))));
                }
                Some(error) => match ErrorCode::from_u32(error.code) {
                    // The first attempt did it; its answer was lost.
                    ErrorCode::AlreadyEnded if uncertain => {
                        self.metrics.put_bytes.add(item.pending.length);
                        settled.done.push((position, Ok(stored(item.stored as u32))));
                    }
                    // Ended by the first attempt and removed since, or never ended: this side cannot tell.
                    ErrorCode::GrantLost if uncertain => {
                        settled.done.push((position, Err(unknown_outcome(&error.into()))));
                    }
                    ErrorCode::GrantLost => settled.again.push(item.pending.again(error.into())),
                    _ => settled.done.push((position, Err(error.into()))),
                },
            }
        }
        settled
    }

    async fn revoke(&self, items: Vec<Written>, copies: Copies, deadline: Deadline, open: &OpenGrants) -> Settled {
        let mut settled = Settled::default();
        if items.is_empty() {
            return settled;
        }
        let slots = || items.iter().map(|item| item.slot);
        let request = |_: &Leader| {
            let body = v1::PutRevokeRequest { items: open.items(slots()), session_id: open.session_id() };
            client_request::Body::PutRevoke(body)
        };
        let answer = self.caller.call_in(open.history(), "put_revoke", deadline, request).await;
        match answer {
            // A refused revoke means that the grant is gone already.
            Ok(_) => open.settled(slots()),
            // Left to the background.
            Err(failure) => tracing::debug!(error = %failure.error, "grants were not revoked yet"),
        }
        for item in items {
            let (stored, position) = (item.stored, item.pending.position);
            let cause = item.failure.unwrap_or_else(|| Error::new(ErrorCode::TransferFailed, "no replica was written"));
            let error = if stored > 0 {
                let wanted = copies.wanted;
                let what = format!("{stored} of {wanted} copies were made, so nothing was kept (strict): {cause}");
                Error::new(ErrorCode::NotEnoughReplicas, what).with_node(cause.node().unwrap_or_default())
            } else {
                cause.clone()
            };
            if may_help(&cause) {
                settled.again.push(item.pending.again(error));
            } else {
                settled.done.push((position, Err(error)));
            }
        }
        settled
    }
}

/// Whether starting over, elsewhere, may help. It does not when the source changed while it was sent (W3).
fn may_help(cause: &Error) -> bool {
    !matches!(cause.code(), ErrorCode::ChecksumMismatch | ErrorCode::InvalidParams | ErrorCode::Internal)
}

fn unknown_outcome(cause: &Error) -> Error {
    Error::new(ErrorCode::DeadlineExceeded, format!("whether the put was committed is unknown: {}", cause.message()))
}

/// When to give up on a node: it must leave time to start over elsewhere, and in any case to end the put.
fn write_deadline(deadline: Deadline, bytes: u64) -> Deadline {
    let remaining = deadline.remaining();
    let half = deadline.within(remaining / 2);
    let reserved = deadline.within(remaining.saturating_sub(END_RESERVE_MAX.min(remaining / 4)));
    patience(deadline, bytes).max(half).min(reserved)
}

fn read_reply(reply: Result<WriteReply, WriteError>) -> (ReplicaOutcome, Option<Error>) {
    match reply {
        Ok(WriteReply { outcome: WriteOutcome::Stored, .. }) => (ReplicaOutcome::Stored, None),
        Ok(WriteReply { outcome: WriteOutcome::Aborted, error, .. }) => {
            let error = error.unwrap_or_else(|| Error::new(ErrorCode::TransferFailed, "the datanode aborted the put"));
            (ReplicaOutcome::Aborted, Some(error))
        }
        Err(WriteError { error, aborted: Some(_) }) => (ReplicaOutcome::Aborted, Some(error)),
        Err(WriteError { error, aborted: None }) => (ReplicaOutcome::Unknown, Some(error)),
    }
}

/// The proofs of a batch of replies, in one piece of memory; empty where there is none.
fn proofs(replies: &[Result<WriteReply, WriteError>]) -> Vec<Bytes> {
    let proof = |reply: &Result<WriteReply, WriteError>| match reply {
        Ok(reply) => Some(reply.proof),
        Err(error) => error.aborted,
    };
    let all: Vec<u8> = replies.iter().filter_map(proof).flatten().collect();
    let mut all = Bytes::from(all);
    replies.iter().map(|reply| proof(reply).map_or_else(Bytes::new, |proof| all.split_to(proof.len()))).collect()
}

/// Header and table of each item.
async fn prefixes(
    batch: &[Granted],
    tables: Option<&Tables>,
    history: History,
    caller: &Caller,
    deadline: Deadline,
) -> Vec<Result<LocalRef, Error>> {
    let Some(tables) = tables else {
        let (wanted, _waiter) = Wanted::until(deadline, "checksumming the value");
        return joined(batch.iter().map(|granted| {
            let item = &granted.pending.item;
            let parts: Vec<&[u8]> = item.value.iter().map(Bytes::as_ref).collect();
            let key_hash = object::key_hash(&caller.tenant, &item.key);
            stepped::build_prefix(history, ObjectId(granted.object_id), key_hash, &parts, &wanted)
        }));
    };
    let mut prefixes = Vec::with_capacity(batch.len());
    for granted in batch {
        let table = tables.of(granted.pending.table).await;
        let key_hash = object::key_hash(&caller.tenant, &granted.pending.item.key);
        let (object, length) = (ObjectId(granted.object_id), granted.pending.length);
        prefixes.push(table.map(|table| stepped::with_header(&table, history, object, key_hash, length)));
    }
    joined(prefixes.into_iter())
}

/// The prefixes of a batch in one piece of memory, so that each item costs a reference and no allocation.
fn joined(prefixes: impl Iterator<Item = Result<Vec<u8>, Error>>) -> Vec<Result<LocalRef, Error>> {
    let mut all = Vec::new();
    let mut append = |prefix: Vec<u8>| {
        let start = all.len();
        all.extend_from_slice(&prefix);
        start..all.len()
    };
    let ranges: Vec<Result<Range<usize>, Error>> = prefixes.map(|prefix| prefix.map(&mut append)).collect();
    let all = LocalRef::from(all);
    ranges.into_iter().map(|range| range.map(|range| all.slice(range))).collect()
}
