//! Reads a round of chosen replicas: batched per node, nodes in parallel, verified while the rest still arrives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use hashbrown::HashMap;
use tidepool_proto::{Address, Error, ErrorCode};
use tidepool_transport::{Engine, ReadAccess, ReadItem};

use crate::deadline::Deadline;
use crate::fetch::{Beside, Fetch};
use crate::landing::{Delivered, Destination, Landing, Portion, Scratch};
use crate::metrics::Metrics;
use crate::plane::{self, Plane, patience};
use crate::stepped::Wanted;
use crate::suspects::Suspects;

/// Payload bytes read as one batch; the next is on the wire while this one is verified.
const BATCH_BYTES: u64 = 8 << 20;
/// From this much payload on verification leaves the async threads.
const VERIFY_INLINE_BYTES: u64 = 1 << 20;

pub(crate) struct Reader<'a> {
    pub(crate) plane: &'a Plane,
    pub(crate) suspects: &'a Arc<Suspects>,
    pub(crate) metrics: &'a Metrics,
}

#[derive(Default)]
pub(crate) struct RoundOutcome {
    pub(crate) delivered: Vec<(usize, Result<Delivered, Error>)>,
    /// Failed, and another replica may do.
    pub(crate) failed: Vec<Fetch>,
    /// Failed for a reason that no replica changes.
    pub(crate) broken: Vec<Fetch>,
}

/// Fetches of one node, in one call of the engine.
struct Batch {
    node: u64,
    address: Address,
    engine: Arc<dyn Engine>,
    bytes: u64,
    beside: Beside,
    fetches: Vec<Fetch>,
}

impl Batch {
    /// When to give up on the node. Where only suspects are left besides, they get half of the time.
    fn until(&self, deadline: Deadline) -> Deadline {
        match self.beside {
            Beside::Well => patience(deadline, self.bytes),
            Beside::Suspect => deadline.within(deadline.remaining() / 2),
            Beside::Nothing => deadline,
        }
    }
}

impl Reader<'_> {
    /// Reads the chosen replica of each.
    pub(crate) async fn read(&self, fetches: Vec<Fetch>, deadline: Deadline) -> RoundOutcome {
        let mut outcome = RoundOutcome::default();
        let batches = self.batches(fetches, &mut outcome);
        for part in join_all(batches.into_iter().map(|batch| self.read_batch(batch, deadline))).await {
            outcome.delivered.extend(part.delivered);
            outcome.failed.extend(part.failed);
            outcome.broken.extend(part.broken);
        }
        outcome
    }

    fn batches(&self, fetches: Vec<Fetch>, outcome: &mut RoundOutcome) -> Vec<Batch> {
        let mut open: HashMap<(u64, Beside), Batch> = HashMap::new();
        let mut full = Vec::new();
        for mut fetch in fetches {
            let (Some(located), Some(replica)) = (&fetch.located, fetch.chosen()) else {
                fetch.failure = Some(Error::new(ErrorCode::Internal, "a read without a replica"));
                outcome.broken.push(fetch);
                continue;
            };
            let Some(node) = located.nodes.get(&replica.node_id) else {
                fetch.failure = Some(Error::new(ErrorCode::Internal, "a replica on a node without address"));
                outcome.broken.push(fetch);
                continue;
            };
            let beside = fetch.beside(self.suspects);
            let batch = open.entry((replica.node_id, beside)).or_insert_with(|| Batch {
                node: replica.node_id,
                address: node.address.clone(),
                engine: self.plane.engine(located.cluster, located.history),
                bytes: 0,
                beside,
                fetches: Vec::new(),
            });
            batch.bytes += located.expected.bytes();
            let key = (batch.node, beside);
            batch.fetches.push(fetch);
            if batch.bytes >= BATCH_BYTES {
                full.extend(open.remove(&key));
            }
        }
        full.extend(open.into_values());
        full
    }

    async fn read_batch(&self, batch: Batch, deadline: Deadline) -> RoundOutcome {
        let mut outcome = RoundOutcome::default();
        let until = batch.until(deadline);
        let count = batch.fetches.len();
        let (mut landings, mut items, mut fetches) =
            (Vec::with_capacity(count), Vec::with_capacity(count), Vec::with_capacity(count));
        let mut scratch = Scratch::for_all(batch.fetches.iter().filter_map(Fetch::landing));
        for mut fetch in batch.fetches {
            if fetch.landing().is_none() {
                fetch.failure = Some(Error::new(ErrorCode::Internal, "a read without memory"));
                outcome.broken.push(fetch);
                continue;
            }
            let (Some(destination), Some(located), Some(replica)) =
                (fetch.destination.take(), &fetch.located, fetch.chosen().cloned())
            else {
                unreachable!("just looked at");
            };
            let expected = located.expected.clone();
            let object_id = expected.object.0;
            match Landing::prepare(destination, expected, &mut scratch) {
                Ok((landing, portions)) => {
                    landings.push((landing, portions.len()));
                    items.extend(portions.into_iter().map(|Portion { offset, length, into }| {
                        let replica = replica.clone();
                        ReadItem { access: ReadAccess { object_id, replica, offset, length }, into }
                    }));
                    fetches.push(fetch);
                }
                Err((destination, error)) => {
                    fetch.destination = Some(destination);
                    fetch.failure = Some(error);
                    outcome.broken.push(fetch);
                }
            }
        }
        if items.is_empty() {
            return outcome;
        }
        let started = Instant::now();
        let results = plane::read(batch.engine.as_ref(), &batch.address, items, until).await;
        let took = started.elapsed();
        let mut results = results.into_iter().chain(std::iter::repeat_with(|| {
            Err(Error::new(ErrorCode::Internal, "the transfer engine lost the result of this item"))
        }));
        // All portions of an object, or it has not arrived.
        let whole = |(landing, portions): (Landing, usize)| {
            let results: Vec<Result<(), Error>> = results.by_ref().take(portions).collect();
            (landing, results.into_iter().collect())
        };
        let arrived: Vec<(Landing, Result<(), Error>)> = landings.into_iter().map(whole).collect();
        self.judge_node(&batch.node, &batch.address, &arrived, took);
        let arrivals: Vec<bool> = arrived.iter().map(|(_, result)| result.is_ok()).collect();
        let verified = verify(arrived, scratch, batch.bytes, deadline).await;
        for ((mut fetch, result), has_arrived) in fetches.into_iter().zip(verified).zip(arrivals) {
            match result {
                Ok(delivered) => outcome.delivered.push((fetch.position, Ok(delivered))),
                Err((destination, error)) => {
                    tracing::debug!(node = batch.node, key = %fetch.shown_key(), %error, "read failed");
                    fetch.destination = destination;
                    // What went wrong after the bytes had arrived says nothing of how long the node takes.
                    fetch.took = if has_arrived { Duration::ZERO } else { took };
                    if Suspects::kept_waiting(&error, fetch.took) {
                        fetch.note_waiting(batch.node);
                    }
                    fetch.failure = Some(error.with_node(batch.address.to_string()));
                    if fetch.destination.is_some() { outcome.failed.push(fetch) } else { outcome.broken.push(fetch) }
                }
            }
        }
        outcome
    }

    /// One answered item clears the node; without any, one telling failure makes it suspect.
    fn judge_node(&self, node: &u64, address: &Address, arrived: &[(Landing, Result<(), Error>)], took: Duration) {
        let mut telling = None;
        for (_, result) in arrived {
            match result {
                Ok(()) => {
                    self.suspects.clear(*node);
                    return;
                }
                Err(error) if Suspects::is_telling(error, took) => telling = telling.or(Some(error)),
                Err(_) => {}
            }
        }
        if let Some(error) = telling {
            self.metrics.reads_unreachable.add(1);
            self.suspects.suspect(*node, address, error);
        }
    }
}

type Verified = Result<Delivered, (Option<Destination>, Error)>;

/// Verifies what arrived; large batches on the blocking pool, so that they hold up no other call.
async fn verify(
    arrived: Vec<(Landing, Result<(), Error>)>,
    scratch: Scratch,
    bytes: u64,
    deadline: Deadline,
) -> Vec<Verified> {
    // Dropped with this future: then nobody wants the rest.
    let (wanted, _waiter) = Wanted::until(deadline, "verifying what was read");
    let prefixes = scratch.take();
    let check = move |(landing, result): (Landing, Result<(), Error>)| match result {
        Ok(()) => match &prefixes {
            Ok(prefixes) => landing.verify(prefixes, &wanted),
            Err(kept) => Err((None, kept.clone())),
        },
        Err(error) => match landing.abandon() {
            Ok(destination) => Err((Some(destination), error)),
            Err(kept) => Err((None, kept)),
        },
    };
    if bytes < VERIFY_INLINE_BYTES {
        return arrived.into_iter().map(check).collect();
    }
    let count = arrived.len();
    let work = tokio::task::spawn_blocking(move || arrived.into_iter().map(check).collect::<Vec<_>>());
    work.await.unwrap_or_else(|panic| {
        let lost = |_| Err((None, Error::new(ErrorCode::Internal, format!("verification failed: {panic}"))));
        (0..count).map(lost).collect()
    })
}
