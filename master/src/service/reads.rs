//! Reads: exist, locate, stat, list, lease release and read reports. They cost no log entry; the caller has passed the
//! linearizer barrier (R2) before state is looked at.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;
use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::keys::check_key;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{Error, ErrorCode, LogTime, NodeId, ObjectId, planted, v1};

use super::core::Service;
use super::leases::{Granted, LeaseTerms};
use super::matching::pattern;
use super::options::{BATCH_ITEMS_MAX, LEASED_PERCENT_MAX, LEASED_PERCENT_PER_CLIENT_MAX, LIST_PAGE_MAX};
use super::session::check_envelope;
use super::tenure::Tenure;
use crate::directory::{Ancestors, DataType, ListFilter, ObjectState, ObjectView, ReplicaPlace, SessionId, TenantId};

/// Members of groups that are looked at on a stream's own path.
const INLINE_GROUP_MEMBERS_MAX: usize = 512;

/// Answers a read from memory, or `None` when some key is being reclaimed right now and the read has to wait for it.
pub fn try_answer(
    service: &Service,
    tenure: &Tenure,
    request: &v1::ClientRequest,
    session: SessionId,
) -> Option<Result<Answer, Error>> {
    let tenant = match check_envelope(service, request) {
        Ok(tenant) => tenant,
        Err(error) => return Some(Err(error)),
    };
    let mut read = match Read::of(service, tenure, request, tenant, session) {
        Ok(read) => read,
        Err(error) => return Some(Err(error)),
    };
    read.look(None);
    if read.marked.is_empty() && read.group_walk() <= INLINE_GROUP_MEMBERS_MAX {
        return Some(Ok(read.finish()));
    }
    // The task that goes on begins anew: what was leased here is given back.
    None
}

/// Answers a read in a task of its own: waits for the barrier, and for marks to be dropped.
pub async fn answer(
    service: &Service,
    request: &v1::ClientRequest,
    tenant: TenantId,
    session: SessionId,
) -> Result<Answer, Error> {
    let tenure = service.barrier().await?;
    let mut read = Read::of(service, &tenure, request, tenant, session)?;
    let mut unmarked = tenure.leases.unmarked();
    read.look(None);
    while !read.marked.is_empty() {
        tokio::select! {
            biased;
            () = unmarked => {}
            () = tenure.ended() => return Err(service.not_leader()),
        }
        unmarked = tenure.leases.unmarked();
        let again = std::mem::take(&mut read.marked);
        read.look(Some(&again));
    }
    Ok(read.finish())
}

/// One read in progress. Only the keys that met a no-lease mark are looked at again, so that no lease is counted twice.
struct Read<'a> {
    service: &'a Service,
    tenure: &'a Tenure,
    tenant: TenantId,
    what: What<'a>,
    marked: Vec<usize>,
    /// Present keys that have a group, with its name.
    grouped: Vec<(usize, Box<[u8]>)>,
    taken: Taken<'a>,
}

/// Leases that a read took and has not answered yet. If it never does (it begins anew elsewhere, or its caller's time is
/// over) they are given back, so that none is counted twice and none is held for nobody (L3).
struct Taken<'a> {
    tenure: &'a Tenure,
    /// When they run out: from then on what the table has of these objects may be somebody else's.
    until_ms: u64,
    /// Which key of the request, and its object.
    objects: Vec<(usize, ObjectId)>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.objects.is_empty() && self.tenure.now_ms() < self.until_ms {
            self.objects.iter().for_each(|&(_, object)| self.tenure.leases.release(object));
        }
    }
}

enum What<'a> {
    Exist { keys: Vec<&'a [u8]>, suspects: &'a [u64], terms: Terms, present: Vec<u8>, protected: bool },
    Locate { keys: Vec<&'a [u8]>, suspects: &'a [u64], terms: Terms, found: Vec<v1::ObjectLocation> },
    Done(Answer),
}

/// Under which terms a lease is granted.
struct Terms {
    lease: LeaseTerms,
    log_time: LogTime,
    ancestors: Arc<Ancestors>,
}

impl Terms {
    fn of(service: &Service, tenure: &Tenure, session: SessionId, mode: i32, asked_ms: u32) -> Terms {
        let ttl = match (v1::LeaseMode::try_from(mode), asked_ms) {
            (Ok(v1::LeaseMode::NoTouch), _) => 0,
            (_, 0) => service.options().lease_ttl_default.as_millis() as u64,
            (_, asked) => u64::from(asked),
        };
        let lease = LeaseTerms {
            now_ms: tenure.now_ms(),
            ttl_ms: ttl.min(service.lease_ttl_max().as_millis() as u64),
            bytes_max: tenure.capacity_bytes() / 100 * LEASED_PERCENT_MAX,
            client_bytes_max: tenure.capacity_bytes() / 100 * LEASED_PERCENT_PER_CLIENT_MAX,
            client: session.0,
            client_bytes: tenure.leases.client_bytes(session.0),
            segments: tenure.leases.segments(),
        };
        Terms { lease, log_time: tenure.log_time(), ancestors: service.directory().ancestors() }
    }

    fn ttl_ms(&self) -> u64 {
        self.lease.ttl_ms
    }

    fn until_ms(&self) -> u64 {
        self.lease.now_ms.saturating_add(self.lease.ttl_ms)
    }

    fn grant(&self, tenure: &Tenure, view: &ObjectView<'_>) -> Granted {
        if self.ttl_ms() == 0 {
            return Granted::Unprotected;
        }
        let bytes = view.replicas.iter().map(|r| r.length).sum();
        tenure.leases.grant_in(view.object, bytes, view.replicas.iter().map(|r| r.segment), &self.lease)
    }
}

impl<'a> Read<'a> {
    fn of(
        service: &'a Service,
        tenure: &'a Tenure,
        request: &'a v1::ClientRequest,
        tenant: TenantId,
        session: SessionId,
    ) -> Result<Read<'a>, Error> {
        let what = match request.body.as_ref() {
            Some(Ask::Exist(r)) => {
                let keys = checked_keys(r.keys.as_ref())?;
                let terms = Terms::of(service, tenure, session, r.lease_mode, r.lease_ttl_ms);
                note_requested(service, tenant, r.lease_mode, &keys);
                let (present, protected) = (vec![0; keys.len()], terms.ttl_ms() > 0);
                What::Exist { keys, suspects: &r.suspect_nodes, terms, present, protected }
            }
            Some(Ask::Locate(r)) => {
                let keys = checked_keys(r.keys.as_ref())?;
                let terms = Terms::of(service, tenure, session, r.lease_mode, r.lease_ttl_ms);
                note_requested(service, tenant, r.lease_mode, &keys);
                let found = vec![v1::ObjectLocation::default(); keys.len()];
                What::Locate { keys, suspects: &r.suspect_nodes, terms, found }
            }
            Some(Ask::Stat(r)) => What::Done(Answer::Stat(stat(service, tenure, tenant, r)?)),
            Some(Ask::List(r)) => What::Done(Answer::List(list(service, tenant, r)?)),
            Some(Ask::ReleaseLease(r)) => {
                check_items(r.object_ids.len())?;
                release(tenure, r);
                What::Done(Answer::ReleaseLease(v1::ReleaseLeaseResponse {}))
            }
            Some(Ask::ReadReport(r)) => {
                check_items(r.reports.len())?;
                What::Done(Answer::ReadReport(read_report(service, tenure, r)))
            }
            _ => return Err(Error::new(ErrorCode::InvalidParams, "the request has no body this version knows")),
        };
        let until_ms = match &what {
            What::Exist { terms, .. } | What::Locate { terms, .. } => terms.until_ms(),
            What::Done(_) => 0,
        };
        let taken = Taken { tenure, until_ms, objects: Vec::new() };
        Ok(Read { service, tenure, tenant, what, marked: Vec::new(), grouped: Vec::new(), taken })
    }

    /// Looks at all keys, or at some of them again.
    fn look(&mut self, again: Option<&[usize]>) {
        let Read { service, tenure, tenant, marked, grouped, what, taken } = self;
        let (tenure, tenant, directory) = (*tenure, *tenant, service.directory());
        match what {
            What::Exist { keys, suspects, terms, present, protected } => {
                let mut see = |i: usize, view: Option<&ObjectView<'_>>| {
                    let Some(view) = view.filter(|v| reachable(v, suspects).next().is_some()) else {
                        present[i] = 0;
                        return;
                    };
                    if let Some(name) = view.group {
                        grouped.push((i, name.into()));
                    }
                    match terms.grant(tenure, view) {
                        Granted::Lease => {
                            present[i] = 1;
                            taken.objects.push((i, view.object));
                        }
                        Granted::Unprotected => {
                            present[i] = 1;
                            *protected = false;
                        }
                        Granted::Marked => marked.push(i),
                    }
                };
                match again {
                    None => directory.with_objects(tenant, keys.iter().copied(), see),
                    Some(some) => {
                        some.iter().for_each(|&i| directory.with_object(tenant, keys[i], |view| see(i, view)))
                    }
                }
            }
            What::Locate { keys, suspects, terms, found } => {
                let mut see = |i: usize, view: Option<&ObjectView<'_>>| match locate(tenure, view, suspects, terms) {
                    Some(location) => {
                        if location.lease_ttl_ms > 0 {
                            taken.objects.push((i, ObjectId(location.object_id)));
                        }
                        found[i] = location;
                    }
                    None => marked.push(i),
                };
                match again {
                    None => directory.with_objects(tenant, keys.iter().copied(), see),
                    Some(some) => {
                        some.iter().for_each(|&i| directory.with_object(tenant, keys[i], |view| see(i, view)))
                    }
                }
            }
            What::Done(_) => {}
        }
    }

    fn finish(mut self) -> Answer {
        self.all_or_none();
        // What is answered as absent is not leased; all else is the caller's now.
        match &self.what {
            What::Exist { present, .. } => self.taken.objects.retain(|&(i, _)| present[i] == 0),
            What::Locate { .. } | What::Done(_) => self.taken.objects.clear(),
        }
        match self.what {
            What::Exist { present, terms, protected, .. } => {
                let hits = present.iter().filter(|&&p| p == 1).count() as u64;
                count_lookups(self.service, hits, present.len() as u64 - hits);
                let lease_ttl_ms = if protected { terms.ttl_ms() as u32 } else { 0 };
                Answer::Exist(v1::ExistResponse { present: present.into(), lease_ttl_ms })
            }
            What::Locate { mut found, terms, .. } => {
                let hits = found.iter().filter(|f| f.code == 0).count() as u64;
                count_lookups(self.service, hits, found.len() as u64 - hits);
                let nodes = sign(self.service, &mut found, terms.log_time);
                Answer::Locate(v1::LocateResponse { objects: found, nodes })
            }
            What::Done(answer) => answer,
        }
    }
}

impl Read<'_> {
    /// Members of groups that `finish` has to look at, one by one.
    fn group_walk(&mut self) -> usize {
        let What::Exist { suspects, .. } = &self.what else { return 0 };
        self.grouped.sort_unstable_by(|a, b| a.1.cmp(&b.1));
        let groups = self.grouped.chunk_by(|a, b| a.1 == b.1);
        groups.map(|group| self.service.directory().group_walk(self.tenant, &group[0].1, suspects)).sum()
    }

    /// A member of a group exists only if all of the group can be read by this client.
    fn all_or_none(&mut self) {
        let What::Exist { suspects, present, .. } = &mut self.what else { return };
        self.grouped.sort_unstable_by(|a, b| a.1.cmp(&b.1));
        for group in self.grouped.chunk_by(|a, b| a.1 == b.1) {
            let view = self.service.directory().group(self.tenant, &group[0].1, suspects);
            if !view.is_some_and(|view| view.whole) {
                group.iter().for_each(|(i, _)| present[*i] = 0);
            }
        }
    }
}

/// Tells the eviction policies what a read that touches names, in its order, unless they hear enough.
fn note_requested(service: &Service, tenant: TenantId, mode: i32, keys: &[&[u8]]) {
    if mode != v1::LeaseMode::NoTouch as i32 && service.evictor().hears(tenant, keys.len()) {
        let keys: SmallVec<[u64; 64]> = keys.iter().map(|key| service.directory().key_hash(tenant, key)).collect();
        service.evictor().requested(tenant, &keys);
    }
}

/// Gives leases back, of this term and not run out: any other belongs to somebody else by now.
fn release(tenure: &Tenure, request: &v1::ReleaseLeaseRequest) {
    if request.term != tenure.term {
        return;
    }
    let log_time_ms = tenure.log_time().0;
    for (&object, &expires_ms) in request.object_ids.iter().zip(&request.expires_log_time_ms) {
        if expires_ms > log_time_ms {
            tenure.leases.release(ObjectId(object));
        }
    }
}

fn count_lookups(service: &Service, hits: u64, misses: u64) {
    let lookups = &service.metrics().lookups;
    lookups.with_label_values(&["memory"]).inc_by(hits);
    lookups.with_label_values(&["miss"]).inc_by(misses);
}

fn check_items(items: usize) -> Result<(), Error> {
    if items > BATCH_ITEMS_MAX {
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("{items} items in one call; the limit is {BATCH_ITEMS_MAX}"),
        ));
    }
    Ok(())
}

/// The keys of a request, each of a length that keys may have.
pub(super) fn checked_keys(keys: Option<&v1::Keys>) -> Result<Vec<&[u8]>, Error> {
    let Some(keys) = keys.filter(|k| !k.is_empty()) else {
        return Err(Error::new(ErrorCode::InvalidParams, "the request names no key"));
    };
    if keys.len() > BATCH_ITEMS_MAX {
        let count = keys.len();
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("{count} keys in one call; the limit is {BATCH_ITEMS_MAX}"),
        ));
    }
    let keys: Vec<&[u8]> = keys.iter()?.collect();
    for (i, key) in keys.iter().enumerate() {
        check_key(key).map_err(|e| Error::new(e.code(), format!("item {i}: {}", e.message())))?;
    }
    Ok(keys)
}

/// Listed replicas that this client can reach.
fn reachable<'v>(view: &'v ObjectView<'_>, suspects: &'v [u64]) -> impl Iterator<Item = &'v ReplicaPlace> {
    view.listed().filter(|r| !suspects.contains(&r.node.0))
}

/// Where an object is, unsigned; `None` when a no-lease mark was met.
fn locate(
    tenure: &Tenure,
    view: Option<&ObjectView<'_>>,
    suspects: &[u64],
    terms: &Terms,
) -> Option<v1::ObjectLocation> {
    let failed = |code: ErrorCode| v1::ObjectLocation { code: code as u32, ..Default::default() };
    let Some(view) = view else { return Some(failed(ErrorCode::ObjectNotFound)) };
    if view.state == ObjectState::Processing {
        return Some(failed(ErrorCode::NotReady));
    }
    let replicas: Vec<v1::Replica> = reachable(view, suspects).map(unsigned).collect();
    if replicas.is_empty() {
        return Some(failed(ErrorCode::ReplicaUnavailable));
    }
    let lease_ttl_ms = match terms.grant(tenure, view) {
        Granted::Lease => terms.ttl_ms() as u32,
        Granted::Unprotected => 0,
        Granted::Marked => return None,
    };
    tenure.heat.note(view.object);
    let (named, listed) = (replicas.len(), view.listed().count());
    Some(v1::ObjectLocation {
        code: 0,
        object_id: view.object.0,
        length: view.length,
        replicas,
        suspect_copies: (listed - named) as u32,
        lease_ttl_ms,
        history: Service::history_on_wire(&terms.ancestors, view.object.op()),
    })
}

fn unsigned(place: &ReplicaPlace) -> v1::Replica {
    v1::Replica {
        replica_id: place.replica.0,
        segment_id: place.segment.0,
        incarnation: place.incarnation.0,
        node_id: place.node.0,
        offset: place.offset,
        length: place.length,
        kind: v1::ReplicaKind::Memory as i32,
        expires_log_time_ms: 0,
        mac: bytes::Bytes::new(),
    }
}

/// Signs the read capabilities, outside every lock, and names the nodes. A read without a lease still gets a capability,
/// for as long as a lease would have run: its reader verifies every byte (R1).
fn sign(service: &Service, found: &mut [v1::ObjectLocation], log_time: LogTime) -> Vec<v1::NodeAddress> {
    let (secret, history) = (service.secret(), service.history());
    let default_ttl_ms = service.options().lease_ttl_default.as_millis() as u64;
    let mut nodes = BTreeSet::new();
    for location in found {
        let ttl_ms = if location.lease_ttl_ms == 0 { default_ttl_ms } else { u64::from(location.lease_ttl_ms) };
        for replica in &mut location.replicas {
            nodes.insert(replica.node_id);
            replica.expires_log_time_ms = log_time.0 + ttl_ms;
            let capability = Capability::from_replica(Verb::Read, ObjectId(location.object_id), replica);
            replica.mac = bytes::Bytes::copy_from_slice(&capability.sign(&secret, history));
        }
    }
    addresses(service, nodes)
}

/// Addresses of nodes named in an answer.
pub fn addresses(service: &Service, nodes: BTreeSet<u64>) -> Vec<v1::NodeAddress> {
    let views = nodes.into_iter().filter_map(|id| service.directory().node(NodeId(id)));
    views
        .map(|n| v1::NodeAddress { node_id: n.node.0, address: n.address.to_string(), host_id: n.host_id.to_string() })
        .collect()
}

fn stat(
    service: &Service,
    tenure: &Tenure,
    tenant: TenantId,
    request: &v1::StatRequest,
) -> Result<v1::StatResponse, Error> {
    let keys = checked_keys(request.keys.as_ref())?;
    let (now_ms, log_time) = (tenure.now_ms(), tenure.log_time());
    let ancestors = service.directory().ancestors();
    let mut objects = vec![v1::ObjectStat::default(); keys.len()];
    service.directory().with_objects(tenant, keys.iter().copied(), |i, view| {
        objects[i] = match view {
            None => v1::ObjectStat { code: ErrorCode::ObjectNotFound as u32, ..Default::default() },
            Some(view) => stat_of(view, tenure.leases.live(view.object, now_ms), log_time, &ancestors),
        };
    });
    let mut nodes = BTreeSet::new();
    for replica in objects.iter_mut().flat_map(|o| &mut o.replicas) {
        nodes.insert(replica.node_id);
        if let Some(segment) = service.directory().segment(tidepool_proto::SegmentId(replica.segment_id)) {
            replica.segment_name = segment.name.to_string();
        }
    }
    Ok(v1::StatResponse { objects, nodes: addresses(service, nodes) })
}

fn stat_of(
    view: &ObjectView<'_>,
    lease: Option<(u32, u64)>,
    log_time: LogTime,
    ancestors: &Ancestors,
) -> v1::ObjectStat {
    let (leases, remaining_ms) = lease.unwrap_or((0, 0));
    let replicas = view.replicas.iter().map(|place| v1::ReplicaStat {
        replica_id: place.replica.0,
        segment_id: place.segment.0,
        segment_name: String::new(),
        node_id: place.node.0,
        offset: place.offset,
        length: place.length,
        kind: v1::ReplicaKind::Memory as i32,
        listed: place.listed,
    });
    v1::ObjectStat {
        code: 0,
        object_id: view.object.0,
        length: view.length,
        state: match view.state {
            ObjectState::Processing => "PROCESSING".to_owned(),
            ObjectState::Complete => "COMPLETE".to_owned(),
        },
        replicas: replicas.collect(),
        leases,
        lease_remaining_ms: remaining_ms as u32,
        age_ms: log_time.0.saturating_sub(view.started.0),
        data_type: view.data_type.0.into(),
        hard_pinned: view.hard_pinned,
        soft_pin_remaining_ms: view.soft_pinned_until.0.saturating_sub(log_time.0),
        group: view.group.map(bytes::Bytes::copy_from_slice).unwrap_or_default(),
        history: Service::history_on_wire(ancestors, view.object.op()),
    }
}

fn list(service: &Service, tenant: TenantId, request: &v1::ListRequest) -> Result<v1::ListResponse, Error> {
    let limit = match request.limit {
        0 => 1_000,
        n if n as usize <= LIST_PAGE_MAX => n as usize,
        n => {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("page of {n} objects; the limit is {LIST_PAGE_MAX}"),
            ));
        }
    };
    let after = (!request.after.is_empty()).then(|| &request.after[..]);
    let pattern = pattern(&request.regex)?;
    let matches = pattern.as_ref().map(|pattern| |key: &[u8]| pattern.is_match(key));
    let filter = ListFilter {
        prefix: &request.prefix,
        matches: matches.as_ref().map(|matches| matches as &dyn Fn(&[u8]) -> bool),
        data_type: (request.data_type != 0).then_some(DataType(request.data_type.clamp(0, 255) as u8)),
        unreadable_too: planted!(ListingInvents),
    };
    let mut page = service.directory().list(tenant, &filter, after, limit);
    page.objects.retain(|object| !(planted!(ListingLacks) && object.object.0.is_multiple_of(3)));
    let objects = page.objects.into_iter().map(|o| v1::ListedObject {
        key: Vec::from(o.key).into(),
        object_id: o.object.0,
        length: o.length,
        replicas: o.replicas,
        data_type: o.data_type.0.into(),
        hard_pinned: o.hard_pinned,
    });
    let next = page.next.map(|key| bytes::Bytes::from(Vec::from(key)));
    Ok(v1::ListResponse { objects: objects.collect(), more: next.is_some(), next: next.unwrap_or_default() })
}

/// A failed read is a hint (R3): it is counted, and a corrupt one makes the owning datanode verify in place.
fn read_report(service: &Service, tenure: &Tenure, request: &v1::ReadReportRequest) -> v1::ReadReportResponse {
    use v1::read_report::Kind;
    if planted!(TrustReporter) {
        for report in &request.reports {
            let proposer = tenure.proposer.clone();
            let (object, replica) = (ObjectId(report.object_id), tidepool_proto::ReplicaId(report.replica_id));
            tidepool_raft::rt::spawn(async move {
                proposer.propose_one(crate::directory::Op::DropReplica { object, replica }, None).await
            });
        }
    }
    for report in &request.reports {
        match Kind::try_from(report.kind) {
            Ok(Kind::Corrupt) => {
                service.metrics().read_reports.with_label_values(&["corrupt"]).inc();
                let object = ObjectId(report.object_id);
                let place = service.directory().with_object_id(object, |view| {
                    // Only what readers are handed can be reported: a grant being filled is not yet what it will be.
                    view.and_then(|v| v.listed().find(|r| r.replica.0 == report.replica_id).copied())
                });
                if let Some(place) = place {
                    let verify = v1::VerifyReplica {
                        object_id: object.0,
                        replica_id: place.replica.0,
                        segment_id: place.segment.0,
                        offset: place.offset,
                        length: place.length,
                        history: Service::history_on_wire(&service.directory().ancestors(), object.op()),
                    };
                    tenure.nodes.ask_to_verify(place.node, verify);
                }
            }
            Ok(Kind::Unreachable) => service.metrics().read_reports.with_label_values(&["unreachable"]).inc(),
            _ => service.metrics().read_reports.with_label_values(&["unknown"]).inc(),
        }
    }
    v1::ReadReportResponse {}
}
