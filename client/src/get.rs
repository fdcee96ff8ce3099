//! Get: locate under a lease, read from a replica, verify, fail over, report.
//!
//! A read that was verified is right whatever the time: header, id, key hash, table and every block were checked in
//! memory that nobody else writes. One that was not verified is a miss or an error, and whether it is held against
//! the node depends on the lease: bytes read after it may rightly be another object's (L4), so those are
//! LEASE_EXPIRED and reported to nobody (R3).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tidepool_proto::clock::{BootInstant, holder_share};
use tidepool_proto::v1::{self, client_request, client_response};
use tidepool_proto::{Error, ErrorCode, History, ObjectId, object};
use tidepool_transport::LocalMut;

use crate::backoff::Backoff;
use crate::call::{Answer, Caller, malformed};
use crate::deadline::Deadline;
use crate::fetch::{Beside, Fetch, Located};
use crate::landing::{Delivered, Destination, Expected};
use crate::lookup::{by_code, complete, split};
use crate::metrics::Metrics;
use crate::nodes;
use crate::plane::Plane;
use crate::reader::Reader;
use crate::release::{Held, Lease, Releaser};
use crate::reports::Reports;
use crate::suspects::Suspects;
use crate::unreadable::Unreadable;

/// Times one get asks the directory: once, and once more when what it said turned out stale.
const LOCATE_PASSES: usize = 2;
/// Times the same copies are asked again because their node was at a limit.
const BUSY_RETRIES_MAX: u32 = 8;
/// A lease is asked for so much longer than the call may take, so that what fails at the deadline still failed under
/// its lease and can be held against its node.
const LEASE_MARGIN: Duration = Duration::from_millis(250);

/// One object to read into the caller's memory.
#[derive(Debug)]
pub struct GetInto {
    /// Key.
    pub key: Bytes,
    /// Filled in order with the payload; more room than needed stays untouched. What is in it after an error is
    /// undefined.
    pub into: Vec<LocalMut>,
}

/// A part of one object to read.
#[derive(Clone, Debug)]
pub struct GetRange {
    /// Key.
    pub key: Bytes,
    /// Payload byte at which it starts.
    pub offset: u64,
    /// Bytes, at least 1; all of them must lie within the payload.
    pub length: u64,
}

/// A part of one object to read into the caller's memory.
#[derive(Debug)]
pub struct GetRangeInto {
    /// Key.
    pub key: Bytes,
    /// Payload byte at which it starts.
    pub offset: u64,
    /// All of it is filled, in order; what lies beyond the payload is an error.
    pub into: Vec<LocalMut>,
}

/// What of an object is wanted, and where it goes.
pub(crate) struct Wish {
    pub(crate) range: Option<Range<u64>>,
    pub(crate) destination: Destination,
}

impl From<Destination> for Wish {
    fn from(destination: Destination) -> Wish {
        Wish { range: None, destination }
    }
}

type Results = Vec<(usize, Result<Delivered, Error>)>;

/// The gets of one client.
pub(crate) struct Getter {
    pub(crate) caller: Arc<Caller>,
    pub(crate) plane: Arc<Plane>,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) releaser: Arc<Releaser>,
    pub(crate) unreadable: Arc<Unreadable>,
    pub(crate) host_id: String,
}

impl Getter {
    /// One result per key, in order; each position is read on its own, duplicates too (user report 112).
    pub(crate) async fn get_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        wishes: Vec<Wish>,
        deadline: Deadline,
    ) -> Vec<Result<Delivered, Error>> {
        let mut results: Vec<Option<Result<Delivered, Error>>> = keys.iter().map(|_| None).collect();
        let mut wishes: Vec<Option<Wish>> = wishes.into_iter().map(Some).collect();
        let chunks: Vec<Vec<Fetch>> = split(keys, &mut results)
            .into_iter()
            .map(|chunk| {
                let fetch = |(position, key): (usize, &[u8])| {
                    let wish = wishes[position].take().unwrap_or(Destination::Allocate.into());
                    Fetch::new(position, Bytes::copy_from_slice(key), wish.range, wish.destination)
                };
                chunk.into_iter().map(fetch).collect()
            })
            .collect();
        for done in join_all(chunks.into_iter().map(|chunk| self.get_chunk(chunk, deadline))).await {
            for (position, result) in done {
                results[position] = Some(result);
            }
        }
        let results = complete(results);
        self.remember(keys, &results);
        self.count(&results);
        results
    }

    async fn get_chunk(&self, fetches: Vec<Fetch>, deadline: Deadline) -> Results {
        let mut held = self.releaser.hold();
        let located = match self.locate(&fetches, deadline).await {
            Ok(located) => located,
            Err(error) => return fetches.into_iter().map(|fetch| fetch.not_located(&error)).collect(),
        };
        let (readable, mut done) = self.place(fetches, located, &mut held);
        let outlook = |fetch: &Fetch| fetch.outlook(&self.suspects);
        let first = readable.first().map(outlook);
        if readable.iter().all(|fetch| Some(outlook(fetch)) == first) {
            done.extend(self.read_or_relocate(readable, deadline).await);
            return done;
        }
        // A key whose only node is waited for to the end holds up none that has others to turn to.
        let mut groups: BTreeMap<Beside, Vec<Fetch>> = BTreeMap::new();
        for fetch in readable {
            groups.entry(outlook(&fetch)).or_default().push(fetch);
        }
        for part in join_all(groups.into_values().map(|group| self.read_or_relocate(group, deadline))).await {
            done.extend(part);
        }
        done
    }

    /// Reads what was located; asks the directory once more for what failed.
    async fn read_or_relocate(&self, mut readable: Vec<Fetch>, deadline: Deadline) -> Results {
        let mut done = Vec::with_capacity(readable.len());
        let mut held = self.releaser.hold();
        for pass in 1..=LOCATE_PASSES {
            let (delivered, failed) = self.read_all(readable, deadline).await;
            done.extend(delivered);
            let (mut again, lost): (Vec<Fetch>, Vec<Fetch>) =
                failed.into_iter().partition(|f| pass < LOCATE_PASSES && f.may_relocate() && !deadline.expired());
            done.extend(lost.into_iter().map(|fetch| {
                if let Some(error) = fetch.restored_in_vain() {
                    self.unreadable.note(object::key_hash(&self.caller.tenant, &fetch.key), error);
                }
                fetch.into_failure()
            }));
            if again.is_empty() {
                break;
            }
            self.metrics.get_relocations.add(again.len() as u64);
            again.iter_mut().for_each(|fetch| fetch.resort_to_suspects(&self.suspects));
            match self.locate(&again, deadline).await {
                Ok(located) => {
                    let (next, refused) = self.place(again, located, &mut held);
                    done.extend(refused);
                    readable = next;
                }
                Err(error) => {
                    done.extend(again.into_iter().map(|fetch| fetch.not_located(&error)));
                    break;
                }
            }
        }
        done
    }

    /// Asks where the objects are.
    async fn locate(&self, fetches: &[Fetch], deadline: Deadline) -> Result<(Answer, v1::LocateResponse), Error> {
        let keys = v1::Keys::pack(fetches.iter().map(|f| &f.key));
        let shunned = || match fetches.iter().any(|f| f.is_last_resort) {
            true => {
                fetches.iter().flat_map(Fetch::kept_waiting).copied().collect::<BTreeSet<u64>>().into_iter().collect()
            }
            false => self.suspects.list(),
        };
        let mut answer = self
            .caller
            .call("locate", deadline, |_| {
                // The lease has to last as long as the call may; the master cuts what is too long.
                let wanted = deadline.remaining() + LEASE_MARGIN;
                let lease_ttl_ms = (wanted + wanted / 16).as_millis();
                client_request::Body::Locate(v1::LocateRequest {
                    keys: Some(keys.clone()),
                    lease_mode: v1::LeaseMode::Grant as i32,
                    lease_ttl_ms: u32::try_from(lease_ttl_ms).unwrap_or(u32::MAX),
                    suspect_nodes: shunned(),
                })
            })
            .await
            .map_err(|failure| failure.error)?;
        match &mut answer.body {
            client_response::Body::Locate(located) if located.objects.len() == fetches.len() => {
                let located = std::mem::take(located);
                Ok((answer, located))
            }
            _ => Err(malformed("locate", "not one answer a key")),
        }
    }

    /// Gives each fetch its replicas, or its refusal.
    fn place(
        &self,
        fetches: Vec<Fetch>,
        (answer, located): (Answer, v1::LocateResponse),
        held: &mut Held,
    ) -> (Vec<Fetch>, Results) {
        let nodes = Arc::new(nodes::index(located.nodes));
        let (mut readable, mut refused) = (Vec::with_capacity(fetches.len()), Vec::new());
        for (mut fetch, object) in fetches.into_iter().zip(located.objects) {
            if object.code != 0 {
                refused.push((fetch.position, Err(by_code(object.code, &fetch.key))));
                continue;
            }
            let lease = Duration::from_millis(u64::from(object.lease_ttl_ms));
            if !lease.is_zero() {
                held.add(Lease {
                    object_id: object.object_id,
                    term: answer.leader.term,
                    history: answer.leader.history,
                    expires_log_time_ms: object.replicas.first().map_or(0, |r| r.expires_log_time_ms),
                });
            }
            let range = match fetch.range_of(object.length) {
                Ok(range) => range,
                Err(error) => {
                    refused.push((fetch.position, Err(error)));
                    continue;
                }
            };
            fetch.locate(Located {
                expected: Expected {
                    range,
                    history: match object.history {
                        0 => answer.leader.history,
                        earlier => History(earlier),
                    },
                    object: ObjectId(object.object_id),
                    key_hash: object::key_hash(&self.caller.tenant, &fetch.key),
                    length: object.length,
                },
                cluster: answer.leader.cluster,
                history: answer.leader.history,
                replicas: object.replicas,
                suspect_copies: object.suspect_copies,
                nodes: nodes.clone(),
                lease_ends: (!lease.is_zero()).then(|| answer.sent.after(holder_share(lease))),
            });
            readable.push(fetch);
        }
        (readable, refused)
    }

    /// Reads from one replica after the other until none is left to try.
    async fn read_all(&self, mut fetches: Vec<Fetch>, deadline: Deadline) -> (Results, Vec<Fetch>) {
        let (mut delivered, mut failed) = (Vec::with_capacity(fetches.len()), Vec::new());
        let mut reports = Reports::default();
        let mut backoff = Backoff::new();
        let mut busy = 0;
        let reader = Reader { plane: &self.plane, suspects: &self.suspects, metrics: &self.metrics };
        while !fetches.is_empty() {
            let mut ready = Vec::with_capacity(fetches.len());
            for mut fetch in fetches {
                if deadline.expired() {
                    fetch.failure.get_or_insert_with(|| deadline.error("reading"));
                    failed.push(fetch);
                } else if fetch.choose(&self.suspects, &self.host_id) {
                    ready.push(fetch);
                } else {
                    fetch.exhausted(&self.suspects);
                    failed.push(fetch);
                }
            }
            let outcome = reader.read(ready, deadline).await;
            delivered.extend(outcome.delivered);
            failed.extend(outcome.broken);
            fetches = outcome.failed;
            if let Some(advice) = busy_again(&mut fetches, busy) {
                busy += 1;
                deadline.sleep(backoff.next(advice)).await;
            }
            for fetch in &fetches {
                let in_lease = fetch.lease_holds(BootInstant::now());
                self.metrics.get_failovers.add(1);
                if !in_lease {
                    self.metrics.reads_past_lease.add(1);
                } else if fetch.failure.as_ref().is_some_and(|e| e.code() == ErrorCode::ChecksumMismatch) {
                    self.metrics.reads_corrupt.add(1);
                }
                reports.add(fetch, in_lease);
            }
        }
        reports.send(&self.caller);
        (delivered, failed)
    }

    /// What exist will say of these keys in the next moments.
    fn remember<K: AsRef<[u8]>>(&self, keys: &[K], results: &[Result<Delivered, Error>]) {
        for (key, result) in keys.iter().zip(results) {
            let hash = || object::key_hash(&self.caller.tenant, key.as_ref());
            match result {
                Ok(_) => self.unreadable.clear(hash),
                Err(error) if error.code() != ErrorCode::ObjectNotFound => self.unreadable.note(hash(), error),
                Err(_) => {}
            }
        }
    }

    fn count(&self, results: &[Result<Delivered, Error>]) {
        let (mut hits, mut misses, mut failures, mut bytes) = (0, 0, 0, 0);
        for result in results {
            match result {
                Ok(Delivered::Bytes(payload)) => (hits, bytes) = (hits + 1, bytes + payload.len() as u64),
                Ok(Delivered::Filled(length)) => (hits, bytes) = (hits + 1, bytes + length),
                Err(error) if error.code() == ErrorCode::ObjectNotFound => misses += 1,
                Err(_) => failures += 1,
            }
        }
        self.metrics.gets_hit.add(hits);
        self.metrics.gets_missed.add(misses);
        self.metrics.gets_failed.add(failures);
        self.metrics.get_bytes.add(bytes);
    }
}

/// A node at a limit is well: what it refused for that is read from it again, a few times. Returns the longest pause
/// advised, if there is such a fetch.
fn busy_again(fetches: &mut [Fetch], before: u32) -> Option<u32> {
    let is_busy = |fetch: &&mut Fetch| {
        before < BUSY_RETRIES_MAX && fetch.failure.as_ref().is_some_and(|e| e.code() == ErrorCode::ResourceExhausted)
    };
    let busy = fetches.iter_mut().filter(is_busy);
    busy.map(|fetch| {
        fetch.untry();
        fetch.failure.as_ref().map_or(0, Error::retry_after_ms)
    })
    .max()
}
