//! Put: what is stored and how; PutStart, payload to the datanodes, PutEnd or PutRevoke.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use hashbrown::HashMap;
use rand::RngCore;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::keys::check_key;
use tidepool_proto::v1::{self, client_response};
use tidepool_proto::{Error, ErrorCode, object};

use crate::abandoned::Abandoned;
use crate::backoff::Backoff;
use crate::call::{Caller, Failure, malformed};
use crate::checksums::{self, Tables};
use crate::deadline::Deadline;
use crate::grants::OpenGrants;
use crate::lookup::{KEY_BYTES_PER_REQUEST_MAX, KEYS_PER_REQUEST_MAX, complete};
use crate::metrics::Metrics;
use crate::nodes;
use crate::quorum::Leader;
use crate::sequence::Sequences;
use crate::suspects::Suspects;
use crate::unreadable::Unreadable;
use crate::writer::{Granted, Settled, Writer};

/// One object to store.
#[derive(Clone, Debug)]
pub struct PutItem {
    /// Key, 1 to 4096 bytes.
    pub key: Bytes,
    /// The payload is the concatenation of these parts. They are sent from where they are, never copied.
    /// `Bytes::from_owner` wraps memory that something else keeps.
    pub value: Vec<Bytes>,
    /// Name of its group; empty: none. Members are evicted together, and exist together.
    pub group: Bytes,
}

impl PutItem {
    /// An object whose payload is one part.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> PutItem {
        PutItem { key: key.into(), value: vec![value.into()], group: Bytes::new() }
    }

    fn length(&self) -> u64 {
        self.value.iter().map(|part| part.len() as u64).sum()
    }

    fn check(&self) -> Result<(), Error> {
        check_key(&self.key)?;
        let key = String::from_utf8_lossy(&self.key[..self.key.len().min(256)]);
        match self.length() {
            0 => Err(Error::new(
                ErrorCode::InvalidParams,
                format!("key '{key}' has an empty value; objects have at least 1 byte"),
            )),
            length if length > object::OBJECT_BYTES_MAX => Err(Error::new(
                ErrorCode::InvalidParams,
                format!("key '{key}' has {length} bytes; the limit is {}", object::OBJECT_BYTES_MAX),
            )),
            _ => Ok(()),
        }
    }
}

/// What to do when fewer copies than wanted can be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaMode {
    /// One copy is success; the outcome says how many were made.
    #[default]
    BestEffort,
    /// All copies, or the put fails and stores nothing.
    Strict,
}

/// Options of a put.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// Wanted copies, 1 to 15; 0 is 1.
    pub replica_num: u32,
    /// What to do when fewer can be made.
    pub mode: ReplicaMode,
    /// Time the call may take; None: the client's default.
    pub deadline: Option<Duration>,
    /// What the objects hold.
    pub data_type: v1::DataType,
    /// Evicted only when nothing else is left, for a time.
    pub soft_pin: SoftPin,
    /// Never evicted, until removed.
    pub hard_pin: bool,
    /// Names of segments to choose first, in this order.
    pub preferred_segments: Vec<String>,
    /// Segments of this client's host first.
    pub prefer_own_host: bool,
    /// Replace what is there (an upsert): the old value is read until the new one is complete.
    pub replace: bool,
    /// Items do not wait for each other. Otherwise what is stored when space runs short is a prefix of the batch.
    pub independent: bool,
}

/// What becomes of the soft pin of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SoftPin {
    /// An upsert keeps the old value's; a new object has none.
    #[default]
    Preserve,
    /// Pinned from when the put ends; None: for the masters' default time.
    Enable(Option<Duration>),
    /// None.
    Disable,
}

impl SoftPin {
    pub(crate) fn to_wire(self) -> (v1::SoftPinAction, u32) {
        match self {
            SoftPin::Preserve => (v1::SoftPinAction::Preserve, 0),
            // Rounded up, so that a short time is not "the default".
            SoftPin::Enable(ttl) => {
                let ttl_ms = ttl.map_or(0, |ttl| ttl.as_millis().clamp(1, u32::MAX.into()) as u32);
                (v1::SoftPinAction::Enable, ttl_ms)
            }
            SoftPin::Disable => (v1::SoftPinAction::Disable, 0),
        }
    }
}

impl Default for PutOptions {
    fn default() -> PutOptions {
        PutOptions {
            replica_num: 1,
            mode: ReplicaMode::BestEffort,
            deadline: None,
            data_type: v1::DataType::Unknown,
            soft_pin: SoftPin::Preserve,
            hard_pin: false,
            preferred_segments: Vec::new(),
            prefer_own_host: false,
            replace: false,
            independent: false,
        }
    }
}

/// A put that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PutOutcome {
    /// Copies this put made; 0 when the object existed.
    pub copies: u32,
    /// The key had a complete object already: nothing was written, that object stays (user report 41).
    pub already_existed: bool,
    /// Id of the object this put made; 0 when the object existed.
    pub object_id: u64,
}

/// One item under way. The token makes a repeated PutStart answer as the first did (W8).
pub(crate) struct Pending {
    pub(crate) position: usize,
    pub(crate) item: PutItem,
    pub(crate) length: u64,
    pub(crate) token: Bytes,
    /// Its place among the values whose checksum tables are computed ahead.
    pub(crate) table: usize,
    pub(crate) failure: Option<Error>,
}

impl Pending {
    pub(crate) fn new(position: usize, item: PutItem, token: Bytes) -> Pending {
        Pending { position, length: item.length(), item, token, table: 0, failure: None }
    }

    /// Another try from the start: the grant of the first is gone.
    pub(crate) fn again(mut self, failure: Error) -> Pending {
        self.token = new_tokens(1);
        self.failure = Some(failure);
        self
    }
}

const TOKEN_BYTES: usize = 16;

/// So many tokens in one piece of memory, to be split off.
fn new_tokens(count: usize) -> Bytes {
    let mut tokens = vec![0u8; count * TOKEN_BYTES];
    rand::rng().fill_bytes(&mut tokens);
    Bytes::from(tokens)
}

/// How many copies, and what if not.
#[derive(Clone, Copy)]
pub(crate) struct Copies {
    pub(crate) wanted: u32,
    pub(crate) mode: ReplicaMode,
}

impl Copies {
    fn of(options: &PutOptions) -> Copies {
        Copies { wanted: options.replica_num.max(1), mode: options.mode }
    }
}

/// The puts of one client.
pub(crate) struct Putter {
    pub(crate) caller: Arc<Caller>,
    pub(crate) writer: Writer,
    pub(crate) abandoned: Abandoned,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) unreadable: Arc<Unreadable>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) sequences: Arc<Sequences>,
}

type Results = Vec<(usize, Result<PutOutcome, Error>)>;

impl Putter {
    /// One result per item, in order.
    pub(crate) async fn put_many(
        &self,
        items: Vec<PutItem>,
        options: &PutOptions,
        deadline: Deadline,
    ) -> Vec<Result<PutOutcome, Error>> {
        let mut results: Vec<Option<Result<PutOutcome, Error>>> = items.iter().map(|_| None).collect();
        let copies = Copies::of(options);
        if copies.wanted as usize > REPLICAS_PER_OBJECT_MAX {
            let error = Error::new(
                ErrorCode::InvalidParams,
                format!("replica_num is {}; the limit is {REPLICAS_PER_OBJECT_MAX}", copies.wanted),
            );
            return results.iter().map(|_| Err(error.clone())).collect();
        }
        let keys: Vec<Bytes> = items.iter().map(|item| item.key.clone()).collect();
        let mut valid = Vec::with_capacity(items.len());
        let mut tokens = new_tokens(items.len());
        for (position, item) in items.into_iter().enumerate() {
            match item.check() {
                Ok(()) => valid.push(Pending::new(position, item, tokens.split_to(TOKEN_BYTES))),
                Err(error) => results[position] = Some(Err(error)),
            }
        }
        let ahead = checksums::are_worth_a_thread(valid.iter().map(|pending| pending.length));
        for wave in waves(valid) {
            let chunks = chunks(wave);
            for done in join_all(chunks.into_iter().map(|chunk| self.put_chunk(chunk, ahead, options, deadline))).await
            {
                for (position, result) in done {
                    results[position] = Some(result);
                }
            }
        }
        let results = complete(results);
        for (key, _) in keys.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
            self.unreadable.clear(|| object::key_hash(&self.caller.tenant, key));
        }
        self.count(&results, copies);
        results
    }

    /// Repeats start, write and end until each item is settled or the deadline passes.
    async fn put_chunk(
        &self,
        mut pending: Vec<Pending>,
        ahead: bool,
        options: &PutOptions,
        deadline: Deadline,
    ) -> Results {
        let mut done = Vec::with_capacity(pending.len());
        let mut backoff = Backoff::new();
        let tables = ahead.then(|| Tables::start(&mut pending, deadline));
        loop {
            let round = self.round(pending, tables.as_ref(), options, deadline).await;
            done.extend(round.done);
            pending = round.again;
            if pending.is_empty() {
                return done;
            }
            let advice = pending.iter().filter_map(|p| p.failure.as_ref()).map(Error::retry_after_ms).max();
            let pause = backoff.next(advice.unwrap_or(0));
            if deadline.expired() || !deadline.sleep(pause).await {
                done.extend(
                    pending
                        .into_iter()
                        .map(|p| (p.position, Err(p.failure.unwrap_or_else(|| deadline.error("putting"))))),
                );
                return done;
            }
        }
    }

    async fn round(
        &self,
        pending: Vec<Pending>,
        tables: Option<&Tables>,
        options: &PutOptions,
        deadline: Deadline,
    ) -> Settled {
        let copies = Copies::of(options);
        let (leader, start) = match self.start(&pending, options, deadline).await {
            Ok(started) => started,
            Err(failure) => {
                let fail = |p: Pending| {
                    // An earlier refusal (no space, in progress) tells more than that time ran out on repeating it.
                    (p.position, Err(p.failure.unwrap_or_else(|| failure.error.clone())))
                };
                return Settled { done: pending.into_iter().map(fail).collect(), again: Vec::new() };
            }
        };
        let nodes = nodes::index(start.nodes);
        let mut settled = Settled::default();
        let mut granted = Vec::with_capacity(pending.len());
        let mut open = OpenGrants::new(self.caller.clone(), &leader);
        let mut session_lost = false;
        for (mut item, grant) in pending.into_iter().zip(start.grants) {
            match grant.error {
                None => {
                    let slot = open.add(&item.item.key, grant.object_id, &grant.replicas);
                    let (object_id, replicas) = (grant.object_id, grant.replicas);
                    granted.push(Granted { pending: item, slot, object_id, replicas });
                }
                Some(error) => match ErrorCode::of_item(&error) {
                    ErrorCode::ObjectAlreadyExists => {
                        let outcome = PutOutcome { copies: 0, already_existed: true, object_id: 0 };
                        settled.done.push((item.position, Ok(outcome)));
                    }
                    code if is_worth_repeating(code, &error) => {
                        session_lost |= code == ErrorCode::SessionUnknown;
                        item.failure = Some(error.into());
                        settled.again.push(item);
                    }
                    _ => settled.done.push((item.position, Err(error.into()))),
                },
            }
        }
        if session_lost {
            // Greeted again, the leader opens another one.
            self.caller.quorum.retract(&leader);
        }
        if !granted.is_empty() {
            let written = self.writer.write(granted, tables, &leader, &nodes, copies, deadline, &open).await;
            settled.done.extend(written.done);
            settled.again.extend(written.again);
        }
        settled
    }

    async fn start(
        &self,
        pending: &[Pending],
        options: &PutOptions,
        deadline: Deadline,
    ) -> Result<(Arc<Leader>, v1::PutStartResponse), Failure> {
        let items: Vec<v1::PutStartItem> = pending
            .iter()
            .map(|p| v1::PutStartItem {
                key: p.item.key.clone(),
                length: p.length,
                token: p.token.clone(),
                group: p.item.group.clone(),
            })
            .collect();
        // An upsert is destructive: its number makes a late duplicate harmless (W8).
        let range = match options.replace {
            true => match self.sequences.take("upsert", items.len(), deadline).await {
                Ok(range) => Some(range),
                Err(error) => return Err(Failure { error, uncertain: false }),
            },
            false => None,
        };
        let (soft_pin, soft_pin_ttl_ms) = options.soft_pin.to_wire();
        let replica_mode = match options.mode {
            ReplicaMode::BestEffort => v1::ReplicaMode::BestEffort,
            ReplicaMode::Strict => v1::ReplicaMode::Strict,
        };
        let awaited = self.abandoned.watch(v1::PutStartRequest {
            session_id: 0,
            items,
            replica_num: options.replica_num,
            replica_mode: replica_mode as i32,
            excluded_nodes: Vec::new(),
            data_type: options.data_type as i32,
            soft_pin: soft_pin as i32,
            soft_pin_ttl_ms,
            hard_pin: options.hard_pin,
            preferred_segments: options.preferred_segments.clone(),
            prefer_own_host: options.prefer_own_host,
            upsert: options.replace,
            sequence: range.as_ref().map_or(0, |range| range.first),
            floor: if range.is_some() { self.sequences.floor() } else { 0 },
            independent: options.independent,
        });
        let attempt = |leader: &Leader| awaited.attempt(leader.session_id, self.suspects.list());
        let may_send = |leader: &Leader, uncertain: bool| match &range {
            Some(range) => range.may_send("an upsert", leader, uncertain),
            None => Ok(()),
        };
        let answer = match self.caller.call_while("put_start", deadline, attempt, may_send).await {
            Ok(answer) => answer,
            Err(failure) => {
                if !failure.uncertain {
                    awaited.answered();
                }
                return Err(failure);
            }
        };
        match answer.body {
            client_response::Body::PutStart(start) if start.grants.len() == pending.len() => {
                awaited.answered();
                Ok((answer.leader, start))
            }
            _ => Err(Failure { error: malformed("put_start", "not one grant an item"), uncertain: true }),
        }
    }

    fn count(&self, results: &[Result<PutOutcome, Error>], copies: Copies) {
        for result in results {
            match result {
                Ok(outcome) if outcome.already_existed => self.metrics.puts_already_existed.add(1),
                Ok(outcome) => {
                    self.metrics.puts_stored.add(1);
                    if outcome.copies < copies.wanted {
                        self.metrics.puts_degraded.add(1);
                    }
                }
                Err(_) => self.metrics.puts_failed.add(1),
            }
        }
    }
}

/// Whether the same item may be granted in a moment. Of a quota only the masters know: they advise to come again where something
/// of the tenant's own may make room, and say nothing where the tenant does not want that.
fn is_worth_repeating(code: ErrorCode, error: &v1::ItemError) -> bool {
    match code {
        ErrorCode::TenantQuotaExceeded => error.retry_after_ms > 0,
        code => code.is_retryable(),
    }
}

/// Items in waves without a duplicate key: the second put of a key runs after the first, and has its own outcome
/// (user report 112).
fn waves(items: Vec<Pending>) -> Vec<Vec<Pending>> {
    let mut of_item = Vec::with_capacity(items.len());
    {
        let mut seen: HashMap<&[u8], usize> = HashMap::with_capacity(items.len());
        for item in &items {
            let next = seen.entry(&item.item.key[..]).or_insert(0);
            of_item.push(*next);
            *next += 1;
        }
    }
    let count = of_item.iter().max().map_or(0, |last| last + 1);
    if count == 1 {
        return vec![items];
    }
    let mut waves: Vec<Vec<Pending>> = (0..count).map(|_| Vec::new()).collect();
    for (item, wave) in items.into_iter().zip(of_item) {
        waves[wave].push(item);
    }
    waves
}

/// Items in messages of bounded size.
fn chunks(items: Vec<Pending>) -> Vec<Vec<Pending>> {
    let key_bytes: usize = items.iter().map(|item| item.item.key.len()).sum();
    if items.len() <= KEYS_PER_REQUEST_MAX && key_bytes <= KEY_BYTES_PER_REQUEST_MAX {
        return vec![items];
    }
    let (mut chunks, mut chunk, mut bytes) = (Vec::new(), Vec::new(), 0);
    for item in items {
        let size = item.item.key.len();
        if chunk.len() == KEYS_PER_REQUEST_MAX || bytes + size > KEY_BYTES_PER_REQUEST_MAX {
            chunks.push(std::mem::take(&mut chunk));
            bytes = 0;
        }
        bytes += size;
        chunk.push(item);
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}
