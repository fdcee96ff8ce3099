//! Dynamic replication: objects that are read often get replicas on other hosts, above the number that is wanted. These
//! extra replicas are made only where there is room to spare, and are the first to go: when their object is cold again,
//! when space runs short, when the tenant's quota does, and when the setting is off. What is extra follows from the
//! directory, so a new leader neither loses nor leaks any.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Error, ErrorCode, NodeId, ObjectId, ReplicaId, SegmentId, v1};

use super::copying::start;
use super::core::{Service, unexpected};
use super::healing::COPIES_WITHOUT_TASK_MAX;
use super::heat::STEPS_PER_WINDOW;
use super::options::{DynamicReplication, RESERVE_PERCENT_MAX};
use super::tenure::Tenure;
use crate::directory::{
    Contact, CopyStart, ObjectView, Op, Outcome, ReplicaPlace, SegmentView, TaskId, TenantId, TenantView,
};

/// Share of a segment that must be free after an extra replica went there, in percent: twice the reserve.
const FREE_PERCENT_MIN: u64 = 2 * RESERVE_PERCENT_MAX;
/// Share of its quota that a tenant may hold after an extra replica was made, and from which on they go, in percent.
const QUOTA_PERCENT_MAX: u64 = 90;
const QUOTA_PERCENT_GO: u64 = 95;
/// Copies for hot objects that are under way at once.
const COPIES_MAX: usize = COPIES_WITHOUT_TASK_MAX / 4;
/// Segments that a copy may choose from.
const TARGETS: usize = 4;
/// Objects with extra replicas looked at under one lock.
const PAGE: usize = 1_024;
/// Extra replicas dropped by one proposal.
const DROPS_MAX: usize = 256;

/// How often hot objects are looked at: once in a step of decay.
pub fn interval(service: &Service) -> Duration {
    (service.options().dynamic_replication_window / STEPS_PER_WINDOW).max(Duration::from_millis(10))
}

/// One round.
pub async fn work(service: &Arc<Service>, tenure: &Tenure) -> Result<(), Error> {
    tenure.heat.decay();
    let hot = tenure.heat.hottest();
    service.metrics().hot_objects.set(hot.len() as i64);
    let pool = Pool::of(service);
    drop_extra(service, tenure, |view| reason_to_drop(service, tenure, &pool, view)).await?;
    if service.options().dynamic_replication == DynamicReplication::Enforce {
        add(service, tenure, &pool, &hot).await?;
    }
    Ok(())
}

/// What the decisions of a round go by.
struct Pool {
    segments: Vec<SegmentView>,
    hosts: Vec<(NodeId, Arc<str>)>,
    tenants: Vec<TenantView>,
}

impl Pool {
    fn of(service: &Service) -> Pool {
        let nodes = service.directory().nodes();
        Pool {
            segments: service.directory().segments(),
            hosts: nodes.into_iter().map(|node| (node.node, node.host_id)).collect(),
            tenants: service.directory().tenants(),
        }
    }

    fn host(&self, node: NodeId) -> Option<&Arc<str>> {
        self.hosts.iter().find(|(id, _)| *id == node).map(|(_, host)| host)
    }

    /// Whether space is short in a segment: what is retired comes free by itself.
    fn is_short(&self, segment: SegmentId) -> bool {
        let found = self.segments.iter().find(|s| s.segment == segment);
        found.is_some_and(|s| s.free + s.retired < s.capacity / 100 * RESERVE_PERCENT_MAX)
    }

    /// Whether a tenant holds more than a share of its quota with `more` bytes.
    fn is_above(&self, tenant: TenantId, more: u64, percent: u64) -> bool {
        let found = self.tenants.iter().find(|t| t.tenant == tenant);
        found.is_some_and(|t| t.quota.bytes > 0 && t.bytes.saturating_add(more) > t.quota.bytes / 100 * percent)
    }
}

/// A replica that is to go, and why.
type Drop = (ReplicaId, &'static str);

/// The newest of the listed replicas that may go.
fn newest<'v>(of: impl Iterator<Item = &'v ReplicaPlace>) -> Option<ReplicaId> {
    of.map(|place| place.replica).max()
}

/// The replica of an object with extra ones that goes now, if any.
fn reason_to_drop(service: &Service, tenure: &Tenure, pool: &Pool, view: &ObjectView<'_>) -> Option<Drop> {
    let short = newest(view.listed().filter(|place| pool.is_short(place.segment)));
    if let Some(replica) = short {
        return Some((replica, "space"));
    }
    let any = newest(view.listed())?;
    if pool.is_above(view.tenant, 0, QUOTA_PERCENT_GO) {
        return Some((any, "quota"));
    }
    if service.options().dynamic_replication != DynamicReplication::Enforce {
        return Some((any, "off"));
    }
    // A new leader has counted no reads yet: nothing is cold before it has looked for two windows.
    let has_looked = tenure.age() >= 2 * service.options().dynamic_replication_window;
    (has_looked && tenure.heat.is_cold(view.object)).then_some((any, "cold"))
}

/// Drops extra replicas that `choose` names, one an object. Returns how many.
async fn drop_extra(
    service: &Service,
    tenure: &Tenure,
    choose: impl Fn(&ObjectView<'_>) -> Option<Drop>,
) -> Result<usize, Error> {
    let (mut ops, mut reasons, mut cursor) = (Vec::new(), Vec::new(), None);
    while ops.len() < DROPS_MAX {
        let page = service.directory().extra(cursor, PAGE);
        let Some(last) = page.last() else { break };
        cursor = Some(*last);
        for object in page {
            // Of what can be read as many stay as are wanted.
            let chosen = service.directory().with_object_id(object, |view| {
                view.filter(|view| view.listed().count() > view.wanted).and_then(&choose)
            });
            if let Some((replica, reason)) = chosen {
                ops.push(Op::DropExtra { object, replica });
                reasons.push(reason);
            }
        }
    }
    ops.truncate(DROPS_MAX);
    if ops.is_empty() {
        return Ok(0);
    }
    let mut dropped = 0;
    for (reason, outcome) in reasons.into_iter().zip(tenure.proposer.propose(&ops, None).await?) {
        match outcome {
            Outcome::ReplicaDropped { .. } => {
                service.metrics().extra_replicas.with_label_values(&[reason]).inc();
                dropped += 1;
            }
            // It is not extra any more.
            Outcome::Refused(_) => {}
            other => return Err(unexpected("drop_extra", &other)),
        }
    }
    Ok(dropped)
}

/// Before objects are evicted from segments that are short of space their extra replicas go. True: some did.
pub async fn give_way(service: &Service, tenure: &Tenure, short: &BTreeSet<SegmentId>) -> Result<bool, Error> {
    let there = |view: &ObjectView<'_>| {
        let replica = newest(view.listed().filter(|place| short.contains(&place.segment)))?;
        Some((replica, "space"))
    };
    Ok(drop_extra(service, tenure, there).await? > 0)
}

/// Gives hot objects one more replica each, the hottest first.
async fn add(service: &Arc<Service>, tenure: &Tenure, pool: &Pool, hot: &[ObjectId]) -> Result<(), Error> {
    let open = service.directory().copies_of_task(TaskId(0)).len();
    let mut budget =
        service.options().heal_bytes_per_second.saturating_mul(interval(service).as_millis() as u64) / 1_000;
    let mut copies = Vec::new();
    for &object in hot {
        if open + copies.len() >= COPIES_MAX || budget == 0 {
            break;
        }
        let plan = service.directory().with_object_id(object, |view| {
            let view = view.filter(|view| view.is_readable() && view.replicas.len() >= view.wanted)?;
            (view.replicas.len() < service.options().dynamic_replicas_max).then_some(())?;
            one_more(pool, view)
        });
        if let Some((copy, bytes)) = plan.filter(|_| service.directory().copies_of(object) == 0) {
            budget = budget.saturating_sub(bytes);
            copies.push(copy);
        }
    }
    for (copy, outcome) in copies.iter().zip(start(service, tenure, &copies).await?) {
        match outcome {
            Ok(()) => service.metrics().extra_replicas.with_label_values(&["started"]).inc(),
            Err(error) => tracing::debug!(object = %copy.object, %error, "a hot object gets no replica yet"),
        }
    }
    Ok(())
}

/// One more replica of an object on a host that has none, where there is room to spare.
fn one_more(pool: &Pool, view: &ObjectView<'_>) -> Option<(CopyStart, u64)> {
    let bytes = extent_bytes(view.length);
    if pool.is_above(view.tenant, bytes, QUOTA_PERCENT_MAX) {
        return None;
    }
    let used: BTreeSet<&Arc<str>> = view.replicas.iter().filter_map(|r| pool.host(r.node)).collect();
    let mut targets: Vec<&SegmentView> = pool
        .segments
        .iter()
        .filter(|s| s.contact == Contact::Heard && !s.draining && s.largest_free >= bytes)
        .filter(|s| pool.host(s.node).is_some_and(|host| !used.contains(host)))
        .filter(|s| s.free.saturating_sub(bytes) >= s.capacity / 100 * FREE_PERCENT_MIN)
        .collect();
    targets.sort_by_key(|s| std::cmp::Reverse((u128::from(s.free) << 32) / u128::from(s.capacity.max(1))));
    let targets: SmallVec<[SegmentId; 2]> = targets.iter().take(TARGETS).map(|s| s.segment).collect();
    let up_to = view.replicas.len() as u8 + 1;
    let copy = CopyStart { object: view.object, instead_of: None, targets, task: TaskId(0), up_to };
    (!copy.targets.is_empty()).then_some((copy, bytes))
}

/// What is hot, for operators.
pub fn list(service: &Service, limit: usize) -> Result<v1::ListHotObjectsResponse, Error> {
    let tenure = service.tenure()?;
    let mode = service.options().dynamic_replication;
    if mode == DynamicReplication::Off {
        let message = "no reads are counted: set dynamic_replication to observe or enforce";
        return Err(Error::new(ErrorCode::NotSupported, message));
    }
    let tenants = service.directory().tenants();
    let limit = if limit == 0 { usize::MAX } else { limit };
    let hot = tenure.heat.hottest().into_iter().filter_map(|object| {
        let reads = tenure.heat.reads(object);
        service.directory().with_object_id(object, |view| {
            let view = view?;
            let tenant = tenants.iter().find(|t| t.tenant == view.tenant)?.name.to_string();
            Some(v1::HotObject {
                tenant,
                key: bytes::Bytes::copy_from_slice(view.key),
                object_id: object.0,
                length: view.length,
                reads,
                replicas: view.replicas.len() as u32,
                wanted: view.wanted as u32,
            })
        })
    });
    let objects = hot.take(limit).collect();
    Ok(v1::ListHotObjectsResponse { error: None, mode: mode.name().to_owned(), objects })
}
