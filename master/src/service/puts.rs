//! The write path's first half at the leader: PutStart, with room made inline (W9), for puts and upserts.
//!
//! When space runs short, what is stored of a batch is a prefix of it: a grant behind an item that found no room is taken
//! back before anybody hears of it, and both wait, in order, inside the caller's deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Error, ErrorCode, LogTime, NodeId, ObjectId, SegmentId, v1};
use tidepool_raft::rt;

use super::core::{Service, unexpected};
use super::leases::Marks;
use super::neighbourhood::{self, Places};
use super::reads::addresses;
use super::requests::{check_count, check_item, check_open, count, soft_pin};
use super::room::{self, Chosen, VICTIMS_MAX, Victims, Wanted};
use super::tenure::Tenure;
use crate::directory::limits::IDS_PER_OP_MAX;
use crate::directory::{
    Contact, DataType, Grant, ObjectState, Op, Outcome, PutEnd, PutStart, ReplicaMode, RetireMode, SessionId,
    SoftPinAction, Statuses, TenantId, Token, Turn,
};

/// Part of the caller's time kept for carrying the answer home.
const ANSWER_ALLOWANCE: Duration = Duration::from_millis(20);
/// Said of an item that was not stored because of another.
const BEHIND_NO_ROOM: &str =
    "an item before it in the batch found no room; what is stored of a batch is a prefix of it";
/// Attempts after which a call that holds grants waits no longer for room.
const ATTEMPTS_WITH_GRANTS: usize = 2;
/// The most that one attempt names beyond what is needed, as a power of two.
const WIDER_MAX: usize = 6;
/// Pause before room is looked for again when nothing could be evicted.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(20);

/// Starts a batch of puts. Items that find no space evict and go on, inside the caller's deadline.
pub async fn start(
    service: &Arc<Service>,
    request: &v1::PutStartRequest,
    tenant: TenantId,
    session: SessionId,
    deadline: Instant,
) -> Result<v1::PutStartResponse, Error> {
    let batch = Batch::check(service, request, tenant, session)?;
    let tenure = service.tenure()?;
    let began = rt::now();
    let mut grants = vec![v1::PutGrant::default(); request.items.len()];
    let mut waiting = batch.admit(service, &tenure, &mut grants);
    tenure.count_put_bytes(waiting.iter().map(|(i, _)| request.items[*i].length).sum());
    note_requested(service, tenant, &request.items);
    let (mut nodes, mut attempt, mut waits) = (BTreeSet::new(), 0, None);
    let is_prefix = !request.independent && !request.upsert;
    let mut holds_grants = false;
    // Items held back behind one that found no room: granting them only to take them back would evict for nothing.
    let mut held_back: Vec<(usize, Token)> = Vec::new();
    while !waiting.is_empty() {
        if attempt > 1 {
            batch.evict_for_large(service, &tenure, &waiting).await?;
        }
        let Proposal { ops, marks, chosen, evicts_first, bytes_of } =
            batch.propose(service, &tenure, &waiting, attempt);
        let mut outcomes = tenure.proposer.propose(&ops, marks).await?.into_iter();
        drop((ops, chosen));
        if evicts_first && let Some(Outcome::Retired { objects }) = outcomes.next() {
            room::count_evicted(service, "put", &objects, &bytes_of);
        }
        let mut round = Round::default();
        for ((i, token), outcome) in waiting.into_iter().zip(outcomes) {
            match outcome {
                Outcome::Granted(grant) => {
                    room::count_evicted(service, "put", &grant.evicted, &bytes_of);
                    round.granted.push((i, token, grant));
                }
                Outcome::Refused(error) => {
                    let error = batch.fits_nowhere(service, &tenure, i, &error).unwrap_or(error);
                    if batch.waits_for_room(service, i, &error) {
                        round.again.push((i, token, error));
                        continue;
                    }
                    if round.cut.is_none() && Batch::is_limited(&error) {
                        round.cut = Some(i);
                    }
                    grants[i].error = Some(error.for_item(i));
                }
                other => return Err(unexpected("put_start", &other)),
            }
        }
        // An upsert that was taken back could not be granted again: its number was used (W8).
        if is_prefix {
            round.take_back(&tenure, session).await?;
        }
        let progress = !round.granted.is_empty();
        for (i, _, grant) in &round.granted {
            nodes.extend(grant.replicas.iter().map(|r| r.node.0));
            grants[*i] = granted(service, &tenure, grant);
        }
        // What is granted is of use to nobody until it is written and ended, and others may wait for that space: the caller
        // gets it now, and comes again for the rest.
        let is_stuck = holds_grants && !progress && attempt >= ATTEMPTS_WITH_GRANTS;
        let out_of_time = rt::now() + ANSWER_ALLOWANCE + NO_ROOM_PAUSE >= deadline;
        let gives_up = out_of_time || is_stuck || is_prefix && round.cut.is_some();
        holds_grants |= progress;
        if gives_up {
            for (i, _, error) in round.again.drain(..) {
                grants[i].error = Some(error.retry_after(NO_ROOM_PAUSE.as_millis() as u32).for_item(i));
            }
        }
        if round.again.iter().any(|(.., error)| is_short_of_space(error)) {
            waits.get_or_insert_with(|| tenure.wait_for_room());
        }
        if !round.again.is_empty() && attempt > 0 && !progress {
            rt::sleep(NO_ROOM_PAUSE).await;
        }
        if gives_up {
            let no_time = Error::new(ErrorCode::NoSpace, BEHIND_NO_ROOM).retry_after(NO_ROOM_PAUSE.as_millis() as u32);
            held_back.drain(..).for_each(|(i, _)| grants[i].error = Some(no_time.for_item(i)));
        }
        waiting = round.again.into_iter().map(|(i, token, _)| (i, token)).collect();
        if waiting.is_empty() {
            waiting = std::mem::take(&mut held_back);
        } else if is_prefix {
            let behind = waiting.split_off(1);
            held_back.splice(..0, behind);
        }
        attempt += 1;
    }
    drop(waits);
    service.metrics().commit_seconds.observe(rt::since(began).as_secs_f64());
    count(service, "put_start", grants.iter().map(|g| g.error.as_ref()));
    Ok(v1::PutStartResponse { grants, nodes: addresses(service, nodes) })
}

/// What came of one round's items, each in the order of the batch.
#[derive(Default)]
struct Round {
    granted: Vec<(usize, Token, Grant)>,
    again: Vec<(usize, Token, Error)>,
    /// The first item that a limit refused, or that fits nowhere: room will not change that.
    cut: Option<usize>,
}

impl Round {
    /// Takes back the grants behind the first item that found no room. A repeated call may have heard of them, so their
    /// space comes free only when their datanodes are fenced (W5), and what a call before this one was granted stays.
    async fn take_back(&mut self, tenure: &Tenure, session: SessionId) -> Result<(), Error> {
        let first = self.again.first().map(|(i, ..)| *i);
        let Some(first) = first.into_iter().chain(self.cut).min() else { return Ok(()) };
        let behind = self.granted.partition_point(|(i, ..)| *i < first);
        let behind = self.granted.split_off(behind);
        let (kept, behind): (Vec<_>, Vec<_>) = behind.into_iter().partition(|(.., grant)| grant.repeated);
        self.granted.extend(kept);
        if behind.is_empty() {
            return Ok(());
        }
        let revoke = |grant: &Grant| Op::PutRevoke(PutEnd { session, object: grant.object, replicas: Statuses::new() });
        let ops: Vec<Op<'_>> = behind.iter().map(|(_, _, grant)| revoke(grant)).collect();
        tenure.proposer.propose(&ops, None).await?;
        self.again
            .extend(behind.into_iter().map(|(i, token, _)| (i, token, Error::new(ErrorCode::NoSpace, BEHIND_NO_ROOM))));
        self.again.sort_unstable_by_key(|(i, ..)| *i);
        Ok(())
    }
}

/// What is proposed for the items of a batch that wait.
struct Proposal<'a> {
    ops: Vec<Op<'a>>,
    marks: Option<Marks>,
    /// What the policies chose among the victims.
    chosen: Chosen,
    /// Whether the first op evicts what no put's op could name.
    evicts_first: bool,
    /// Bytes that each victim frees.
    bytes_of: BTreeMap<ObjectId, u64>,
}

/// What all items of a batch share.
struct Batch<'a> {
    request: &'a v1::PutStartRequest,
    tenant: TenantId,
    session: SessionId,
    replica_num: u8,
    mode: ReplicaMode,
    data_type: DataType,
    soft_pin: SoftPinAction,
    excluded: SmallVec<[NodeId; 2]>,
    preferred: SmallVec<[SegmentId; 2]>,
}

impl<'a> Batch<'a> {
    fn check(
        service: &Service,
        request: &'a v1::PutStartRequest,
        tenant: TenantId,
        session: SessionId,
    ) -> Result<Batch<'a>, Error> {
        check_open(service, session)?;
        check_count(request.items.len())?;
        let replica_num = request.replica_num.max(1);
        if replica_num as usize > REPLICAS_PER_OBJECT_MAX {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("replica_num is {replica_num}; the limit is {REPLICAS_PER_OBJECT_MAX}"),
            ));
        }
        let mode = match v1::ReplicaMode::try_from(request.replica_mode) {
            Ok(v1::ReplicaMode::Strict) => ReplicaMode::Strict,
            Ok(v1::ReplicaMode::BestEffort) => ReplicaMode::BestEffort,
            Err(_) => return Err(Error::new(ErrorCode::InvalidParams, "unknown replica mode")),
        };
        let data_type = v1::DataType::try_from(request.data_type)
            .map_err(|_| Error::new(ErrorCode::InvalidParams, format!("unknown data type {}", request.data_type)))?;
        Ok(Batch {
            request,
            tenant,
            session,
            replica_num: replica_num as u8,
            mode,
            data_type: DataType(data_type as u8),
            soft_pin: soft_pin(service, request.soft_pin, request.soft_pin_ttl_ms)?,
            excluded: excluded(service, &request.excluded_nodes),
            preferred: preferred(service, request, session),
        })
    }

    /// The items that may start, with their tokens; the others have failed. A client may have only so many bytes granted
    /// and not ended (L5): what is above waits for its own earlier puts.
    fn admit(&self, service: &Service, tenure: &Tenure, grants: &mut [v1::PutGrant]) -> Vec<(usize, Token)> {
        let mut waiting = Vec::with_capacity(grants.len());
        let granted_max = service.directory().config().config.granted_bytes_max(tenure.capacity_bytes());
        let mut open_bytes = service.directory().session(self.session).map_or(0, |session| session.open_bytes);
        let mut cut = false;
        for (i, item) in self.request.items.iter().enumerate() {
            let token = match check_item(item) {
                Ok(token) => token,
                Err(error) => {
                    grants[i].error = Some(error.for_item(i));
                    continue;
                }
            };
            let need = self.need(i);
            let is_cut = cut && !self.request.independent;
            if is_cut || open_bytes > 0 && open_bytes.saturating_add(need) > granted_max && !self.is_open(service, i) {
                cut = true;
                let message = format!(
                    "this client has {open_bytes} bytes granted and not ended; the limit is {granted_max}: end or revoke some first"
                );
                grants[i].error = Some(Error::new(ErrorCode::ResourceExhausted, message).retry_after(5).for_item(i));
                continue;
            }
            open_bytes = open_bytes.saturating_add(need);
            waiting.push((i, token));
        }
        waiting
    }

    /// Whether the item's key is being put: this may be the repeat of a call that was granted.
    fn is_open(&self, service: &Service, i: usize) -> bool {
        let key = &self.request.items[i].key;
        let state = service.directory().with_object(self.tenant, key, |view| view.map(|v| v.state));
        state == Some(ObjectState::Processing)
    }

    /// Bytes of all extents that an item asks for.
    fn need(&self, i: usize) -> u64 {
        extent_bytes(self.request.items[i].length).saturating_mul(self.replica_num.into())
    }

    /// Ops for the items still waiting. Where space, the directory or the tenant's quota looks short, or an attempt
    /// failed already, victims go with them. A group that is too large to be named by a put's op is evicted by one before
    /// them, in the same entry.
    fn propose(&self, service: &Service, tenure: &Tenure, waiting: &[(usize, Token)], attempt: usize) -> Proposal<'a> {
        let total: u64 = waiting.iter().map(|(i, _)| self.need(*i)).fold(0, u64::saturating_add);
        let mut room = self.room(service, tenure, total, waiting.len() as u64, attempt);
        let seeds: Vec<ObjectId> = room.found.iter().map(|v| v.object).collect();
        let mut bytes_of: BTreeMap<ObjectId, u64> = room.found.iter().map(|v| (v.object, v.bytes)).collect();
        let mut spare = std::mem::take(&mut room.found).into_iter().peekable();
        let per_item = seeds.len().div_ceil(waiting.len());
        let (mut ops, mut large) = (Vec::with_capacity(waiting.len()), Vec::new());
        for (i, token) in waiting {
            let mut victims = Vec::new();
            if attempt > 1 && ops.is_empty() {
                // Side by side first: it is what a request larger than any free extent needs.
                let marks = std::mem::replace(&mut room.marks, Marks::new(tenure.leases.clone()));
                let near = neighbourhood::find(service, tenure, &self.places(*i), &seeds, marks);
                room.marks = near.marks;
                bytes_of.extend(near.found.iter().map(|v| (v.object, v.bytes)));
                victims.extend(near.found.iter().map(|v| v.object).take(VICTIMS_MAX));
            }
            room::take(&mut spare, self.need(*i), per_item, &mut victims, &mut large);
            ops.push(Op::PutStart(self.op(*i, *token, victims)));
        }
        large.retain(|unit| !self.is_own_group(service, unit[0]));
        let evicts_first = !large.is_empty();
        if evicts_first {
            let objects: Vec<ObjectId> = large.into_iter().flatten().take(IDS_PER_OP_MAX).collect();
            ops.insert(0, Op::Retire { objects, mode: RetireMode::RetireAndReclaim });
        }
        let marks = (!room.marks.is_empty()).then_some(room.marks);
        Proposal { ops, marks, chosen: room.chosen, evicts_first, bytes_of }
    }

    /// Whether a victim is of a group that an item joins: a put does not evict the rest of its own group.
    fn is_own_group(&self, service: &Service, object: ObjectId) -> bool {
        let is_own = |name: &[u8]| self.request.items.iter().any(|item| item.group == name);
        let tenant = service.directory().as_victim(object).map(|victim| victim.tenant);
        tenant == Some(self.tenant)
            && service.directory().with_object_id(object, |view| view.and_then(|v| v.group).is_some_and(is_own))
    }

    /// Where an item may go.
    fn places(&self, i: usize) -> Places<'_> {
        Places {
            extent_bytes: extent_bytes(self.request.items[i].length),
            copies: usize::from(self.replica_num),
            preferred: &self.preferred,
            excluded: &self.excluded,
        }
    }

    /// Victims for what is short.
    fn room(&self, service: &Service, tenure: &Tenure, bytes: u64, objects: u64, attempt: usize) -> Victims {
        let mut room = Victims::none(service, tenure);
        let urgent = tenure.waiting_puts() > 0;
        let quota = service.directory().tenant_view(self.tenant);
        if let Some(tenant) = quota.filter(|t| !t.quota.refuse && (t.quota.bytes | t.quota.objects) != 0) {
            let above = |held: u64, more: u64, quota: u64| {
                if quota == 0 { 0 } else { held.saturating_add(more).saturating_sub(quota) }
            };
            let wanted = Wanted {
                bytes: above(tenant.bytes, bytes, tenant.quota.bytes),
                objects: above(tenant.objects, objects, tenant.quota.objects),
                limit: VICTIMS_MAX,
                tenant: Some(self.tenant),
                urgent,
                ..Wanted::default()
            };
            room = room::find(service, tenure, &wanted);
        }
        let counts = service.directory().counts();
        // In the first lease window nothing old may go before a put has failed: do not look.
        let short = attempt > 0 || counts.free_bytes < bytes && !tenure.in_first_window();
        let objects =
            (counts.objects + objects).saturating_sub(service.options().objects_max + room.found.len() as u64);
        // What lies on nodes that the client cannot reach makes no room for it.
        let places = Places { extent_bytes: 0, copies: 1, preferred: &[], excluded: &self.excluded };
        let is_narrow = short && objects == 0 && !self.excluded.is_empty();
        let segments = if is_narrow { places.not_everywhere(service, bytes) } else { None };
        // The same victims again would be of no more use: each attempt names more of the oldest, of which what is needed goes.
        let wider = bytes.saturating_mul(1 << attempt.saturating_sub(1).min(WIDER_MAX));
        let wanted = Wanted {
            segments: segments.as_ref(),
            bytes: if short { wider.saturating_sub(room.bytes()) } else { 0 },
            objects,
            limit: VICTIMS_MAX,
            urgent,
            ..Wanted::default()
        };
        if wanted.bytes > 0 || wanted.objects > 0 {
            room.absorb(room::find(service, tenure, &wanted));
        }
        room
    }

    /// An op names only so many victims: what an item needs beyond them is evicted by an op before it.
    async fn evict_for_large(
        &self,
        service: &Service,
        tenure: &Tenure,
        waiting: &[(usize, Token)],
    ) -> Result<(), Error> {
        let Some((i, _)) = waiting.first() else { return Ok(()) };
        let counts = service.directory().counts();
        let average = counts.complete_bytes / counts.objects.max(1);
        if average.saturating_mul(VICTIMS_MAX as u64) >= self.need(*i) {
            return Ok(());
        }
        let places = self.places(*i);
        if neighbourhood::evict(service, tenure, &places).await? == 0 {
            let bytes = self.need(*i).saturating_sub(counts.free_bytes);
            let segments = places.not_everywhere(service, bytes);
            let segments = segments.as_ref();
            let wanted = Wanted { bytes, limit: 4 * VICTIMS_MAX, urgent: true, segments, ..Wanted::default() };
            room::evict(service, tenure, &wanted, "put").await?;
        }
        Ok(())
    }

    fn op(&self, i: usize, token: Token, victims: Vec<ObjectId>) -> PutStart<'a> {
        let (request, item) = (self.request, &self.request.items[i]);
        let turn = Turn { sequence: request.sequence.saturating_add(i as u64), floor: request.floor };
        PutStart {
            tenant: self.tenant,
            session: self.session,
            key: &item.key,
            length: item.length,
            token,
            replica_num: self.replica_num,
            mode: self.mode,
            excluded: self.excluded.clone(),
            victims,
            data_type: self.data_type,
            hard_pin: request.hard_pin,
            soft_pin: self.soft_pin,
            group: &item.group,
            preferred: self.preferred.clone(),
            upsert: request.upsert.then_some(turn),
        }
    }

    /// Whether an item that does not wait was refused by a limit, or because it can never have room: what is behind it in the
    /// batch is not stored then.
    fn is_limited(error: &Error) -> bool {
        use ErrorCode::{FitsNowhere, HardPinLimit, NoSpace, NotEnoughReplicas, ResourceExhausted};
        matches!(error.code(), FitsNowhere | HardPinLimit | NoSpace | NotEnoughReplicas | ResourceExhausted)
    }

    /// What is wrong with an item that was refused for lack of room and that no eviction makes room for. Every mounted segment
    /// counts, that of a suspect or excluded node too: it may be back in a moment. Where none is mounted yet, or what is mounted changed
    /// a moment ago, nothing is known.
    fn fits_nowhere(&self, service: &Service, tenure: &Tenure, i: usize, error: &Error) -> Option<Error> {
        if error.code() == ErrorCode::TenantQuotaExceeded {
            return self.fits_no_quota(service, i);
        }
        if !is_short_of_space(error) {
            return None;
        }
        let copies = match self.mode {
            ReplicaMode::Strict => self.replica_num as usize,
            ReplicaMode::BestEffort => 1,
        };
        let item = &self.request.items[i];
        let bytes = extent_bytes(item.length);
        let segments = service.directory().segments();
        let largest = segments.iter().map(|s| s.capacity).max()?;
        let large_enough = segments.iter().filter(|s| s.capacity >= bytes).count();
        if large_enough >= copies || tenure.mounted_for(&segments) < service.options().fits_nowhere_after {
            return None;
        }
        let key = String::from_utf8_lossy(&item.key);
        let message = match large_enough {
            0 => format!(
                "key '{key}' takes {bytes} bytes of one segment, the largest has {largest}: mount a larger one, or store it in parts"
            ),
            _ => format!(
                "key '{key}' is to have {copies} copies of {bytes} bytes, each in a segment of its own; so large are {large_enough} of {}: add datanodes, or ask for fewer copies",
                segments.len()
            ),
        };
        Some(Error::new(ErrorCode::FitsNowhere, message))
    }

    /// What is wrong with an item that takes more than its tenant's whole quota. Of a best-effort put only those copies count that
    /// there are segments for: with fewer it may be stored.
    fn fits_no_quota(&self, service: &Service, i: usize) -> Option<Error> {
        let tenant = service.directory().tenant_view(self.tenant)?;
        let item = &self.request.items[i];
        let bytes = extent_bytes(item.length);
        let copies = match self.mode {
            ReplicaMode::Strict => self.replica_num as usize,
            ReplicaMode::BestEffort => {
                let segments = service.directory().segments();
                segments.iter().filter(|s| s.capacity >= bytes).count().clamp(1, self.replica_num as usize)
            }
        };
        if tenant.quota.bytes == 0 || bytes.saturating_mul(copies as u64) <= tenant.quota.bytes {
            return None;
        }
        let key = String::from_utf8_lossy(&item.key);
        let message = format!(
            "key '{key}' takes {bytes} bytes, {copies} times; tenant '{}' may hold {}: raise its quota, store less, or ask for fewer copies",
            tenant.name, tenant.quota.bytes
        );
        Some(Error::new(ErrorCode::FitsNowhere, message))
    }

    /// Whether an item was refused for lack of room that may yet be made: not if no segment is large enough, or the
    /// tenant does not want its own evicted.
    fn waits_for_room(&self, service: &Service, i: usize, error: &Error) -> bool {
        let copies = match error.code() {
            ErrorCode::NoSpace => 1,
            ErrorCode::NotEnoughReplicas => self.replica_num as usize,
            ErrorCode::ResourceExhausted => {
                return service.directory().counts().objects >= service.options().objects_max;
            }
            ErrorCode::TenantQuotaExceeded => {
                return service.directory().tenant_view(self.tenant).is_some_and(|t| !t.quota.refuse);
            }
            _ => return false,
        };
        let bytes = extent_bytes(self.request.items[i].length);
        let segments = service.directory().segments();
        let usable = segments.iter().filter(|s| s.contact == Contact::Heard && !self.excluded.contains(&s.node));
        usable.filter(|s| s.capacity >= bytes).count() >= copies
    }
}

/// Whether room in memory is what is missing: only that is worth a predecessor's leases (L4).
fn is_short_of_space(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::NoSpace | ErrorCode::NotEnoughReplicas)
}

/// Tells the eviction policies what the batch names, in its order.
fn note_requested(service: &Service, tenant: TenantId, items: &[v1::PutStartItem]) {
    let keys: SmallVec<[u64; 128]> = items.iter().map(|item| service.directory().key_hash(tenant, &item.key)).collect();
    service.evictor().requested(tenant, &keys);
}

/// Segments to choose first: those named that are mounted, then those of the caller's host.
fn preferred(service: &Service, request: &v1::PutStartRequest, session: SessionId) -> SmallVec<[SegmentId; 2]> {
    let own_host = request.prefer_own_host || service.options().local_first;
    if request.preferred_segments.is_empty() && !own_host {
        return SmallVec::new();
    }
    let segments = service.directory().segments();
    let named = request.preferred_segments.iter().flat_map(|name| segments.iter().filter(move |s| *s.name == **name));
    let mut preferred: SmallVec<[SegmentId; 2]> = named.map(|s| s.segment).collect();
    if let Some(host) =
        service.directory().session(session).map(|s| s.host_id).filter(|host| own_host && !host.is_empty())
    {
        let nodes = service.directory().nodes();
        let local: BTreeSet<NodeId> = nodes.iter().filter(|n| n.host_id == host).map(|n| n.node).collect();
        preferred.extend(segments.iter().filter(|s| local.contains(&s.node)).map(|s| s.segment));
    }
    preferred.truncate(crate::directory::limits::PREFERRED_SEGMENTS_MAX);
    preferred
}

/// Nodes this client asks to be left out: those it cannot reach. It may be wrong about all of them, so an exclusion that
/// leaves no node to choose is not followed: the client then tries one it suspects, and finds out.
fn excluded(service: &Service, asked: &[u64]) -> SmallVec<[NodeId; 2]> {
    if asked.is_empty() {
        return SmallVec::new();
    }
    let heard = service.directory().nodes().into_iter().filter(|n| n.contact == Contact::Heard && n.segments > 0);
    let leaves_one = heard.into_iter().any(|n| !asked.contains(&n.node.0));
    if leaves_one { asked.iter().map(|&n| NodeId(n)).collect() } else { SmallVec::new() }
}

/// A grant as the client gets it: signed for as long as it cannot be preempted.
fn granted(service: &Service, tenure: &Tenure, grant: &Grant) -> v1::PutGrant {
    let (secret, history) = (service.secret(), service.history());
    let expires = LogTime(grant.started.0 + grant_valid_ms(service));
    let replicas = grant.replicas.iter().map(|place| {
        let capability = Capability {
            verb: Verb::Write,
            object: grant.object,
            replica: place.replica,
            segment: place.segment,
            incarnation: place.incarnation,
            node: place.node,
            offset: place.offset,
            length: place.length,
            expires,
        };
        capability.to_replica(&secret, history)
    });
    v1::PutGrant {
        error: None,
        object_id: grant.object.0,
        remaining_ms: expires.0.saturating_sub(tenure.log_time().0),
        replicas: replicas.collect(),
    }
}

/// How long after its start a grant may be used, in log time: until it may be preempted.
pub fn grant_valid_ms(service: &Service) -> u64 {
    service.directory().config().config.put_start_discard_timeout_ms
}
