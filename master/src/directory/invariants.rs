//! Invariants checked from the records: for tests after every op, and for the auditor. Walks everything.

use super::Directory;
use super::audit::Account;
use super::core::Core;
use super::digest::Digest;
use super::groups::Group;
use super::objects::{Record, SegmentSlot};
use super::space::Use;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::SegmentId;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::object::EXTENT_ALIGN;

macro_rules! require {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(format!($($message)+));
        }
    };
}

/// The part of the digest that is bounded by the limits on nodes, tenants, tasks and copies, from its records.
pub(super) fn rest_digest(core: &Core) -> u128 {
    let mut digest = Digest::default();
    digest.add(|c| c.clock(core.clock));
    digest.add(|c| c.config(&core.config));
    digest.add(|c| c.feature_level(core.feature_level));
    if let Some((index, sum)) = core.checkpoint {
        digest.add(|c| c.checkpoint(index, sum));
    }
    for (&id, node) in &core.nodes.by_id {
        digest.add(|c| c.node(id, node));
    }
    core.ancestors.iter().for_each(|ancestor| digest.add(|c| c.ancestor(ancestor)));
    digest.add(|c| c.next_tenant(core.tenants.next));
    for (id, tenant) in core.tenants.iter() {
        digest.add(|c| c.tenant(id, tenant));
    }
    for (&id, task) in &core.tasks.by_id {
        digest.add(|c| c.task(id, task));
    }
    for (&replica, copy) in &core.copies.by_replica {
        digest.add(|c| c.copy(replica, copy, &core.space));
    }
    for (_, segment) in core.space.iter() {
        digest.add(|c| c.segment(segment));
    }
    digest.sum()
}

/// Extents of one segment by offset.
type Extents = BTreeMap<u64, (u64, Use)>;

impl Directory {
    /// Checks SPACE-ADDS-UP and that every index, counter and digest follows from the records.
    pub fn check_invariants(&self) -> Result<(), String> {
        let core = self.core.read();
        let extents = self.check_objects(&core)?;
        let extents = self.check_copies(&core, extents)?;
        let extents = check_retired(&core, extents)?;
        for (slot, segment) in core.space.iter() {
            check_segment(&core, slot, extents.get(&segment.id).unwrap_or(&Extents::new()))?;
        }
        check_members(&core)?;
        require!(core.space.indexes_agree(), "eligible segments or their order by largest extent are wrong");
        require!(*self.topology.read() == core.topology(), "the published topology is not the state's");
        require!(core.digest() == self.recompute(&core), "the digest is not the records'");
        require!(core.objects.sum() == core.objects.sum_of_cells(), "the objects' digest is not that of its cells");
        Ok(())
    }

    /// The digest from the records, to be compared with the running one (M2).
    pub fn recompute_digest(&self) -> u128 {
        self.recompute(&self.core.read())
    }

    fn recompute(&self, core: &Core) -> u128 {
        let mut digest = Digest::default();
        for (name, group) in &core.groups.by_name {
            group.lost.iter().for_each(|key| digest.add(|c| c.lost_member(name, key)));
        }
        for (_, segment) in core.space.iter() {
            for (offset, bytes) in segment.free.iter() {
                digest.add(|c| c.free_extent(segment.id, offset, bytes));
            }
        }
        for (&id, session) in &core.sessions.by_id {
            digest.add(|c| c.session(id, session));
            for (&sequence, &answered) in &session.outcomes {
                digest.add(|c| c.answered(id, sequence, answered));
            }
        }
        for (object, &at) in &core.index {
            self.shards.with(at, |r| digest.add(|c| c.object(r, core.open.get(object), &core.space)));
        }
        for (&id, retired) in &core.retired {
            digest.add(|c| c.retired(id, retired, &core.space));
        }
        digest.sum().wrapping_add(rest_digest(core))
    }

    fn check_objects(&self, core: &Core) -> Result<BTreeMap<SegmentId, Extents>, String> {
        let mut extents: BTreeMap<SegmentId, Extents> = BTreeMap::new();
        let (mut open, mut grants) = (BTreeSet::new(), BTreeMap::new());
        let (mut tenants, mut groups, mut upserts) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (&object, &at) in &core.index {
            let record = self.shards.with(at, Record::clone);
            let record = record.ok_or_else(|| format!("object {object} has no record"))?;
            require!(record.object == object, "object {object} has the record of {}", record.object);
            let hash = self.shards.hash(record.tenant, &record.key);
            let under_key = self.shards.locate(hash, record.tenant, &record.key);
            let replaces = core.open.get(&object).and_then(|open| open.replaces);
            let owner = replaces.map_or(Some(at), |old| core.index.get(&old).copied());
            require!(owner.is_some() && under_key == owner, "object {object} is not under its key, nor its elder");
            if let Some(old) = replaces {
                let ended = owner.and_then(|at| self.shards.with(at, Record::is_complete));
                require!(ended == Some(true), "object {object} would replace {old}, which is not COMPLETE");
                upserts.insert(old, object);
            }
            let account: &mut Account = tenants.entry(record.tenant).or_default();
            let copied: u64 = core.copies.of(object).map(|(_, copy)| copy.bytes).sum();
            account.bytes += record.all_bytes() + copied;
            account.objects += 1;
            account.hard_pinned_bytes += record.hard_pinned_bytes();
            if let Some(name) = record.group() {
                let group: &mut Group = groups.entry((record.tenant, name.clone())).or_default();
                if replaces.is_some() {
                    group.upserts.insert(object)
                } else {
                    group.unfinished += u32::from(!record.is_complete());
                    group.members.insert(object)
                };
            }
            require!(!record.replicas.is_empty(), "object {object} has no replica");
            require!(record.replicas.len() <= REPLICAS_PER_OBJECT_MAX, "object {object} has too many replicas");
            require!(
                core.degraded.contains(&object) == record.is_degraded(),
                "object {object} is wrongly (not) degraded"
            );
            require!(
                core.extra.contains(&object) == record.has_extra(),
                "object {object} has wrongly (not) more than is wanted"
            );
            require!(record.copies <= record.asked.granted(), "object {object} has too many copies");
            require!(record.asked.wanted() > 0, "object {object} wants no replica");
            let used_for = if record.is_complete() { Use::Complete } else { Use::Processing };
            for replica in &record.replicas {
                let segment = core.space.segment(replica.segment);
                require!(
                    segment.used.get(&replica.offset) == Some(&at),
                    "segment {} does not know {object}",
                    segment.id
                );
                add_extent(&mut extents, segment.id, replica.offset, record.extent_bytes(), used_for)?;
            }
            let segments: BTreeSet<SegmentSlot> = record.replicas.iter().map(|r| r.segment).collect();
            require!(segments.len() == record.replicas.len(), "object {object} has two replicas in one segment");
            if !record.is_complete() {
                open.insert(object);
                let session = core.open.get(&object).map(|open| open.session);
                let account = grants.entry(session.unwrap_or_default()).or_insert((0, 0));
                *account = (account.0 + 1, account.1 + record.all_bytes());
            }
        }
        let held: usize = (0..super::limits::SHARDS).map(|n| self.shards.read(n).len()).sum();
        require!(held == core.index.len(), "{held} records but {} objects in the index", core.index.len());
        require!(open.iter().eq(core.open.keys()), "open puts are not the PROCESSING objects");
        require!(upserts == core.upserts, "the upserts by what they replace are wrong");
        for (id, tenant) in core.tenants.iter() {
            let account = tenants.remove(&id).unwrap_or_default();
            require!(account == tenant.account(), "tenant '{}' miscounts what it holds", tenant.name);
        }
        require!(tenants.is_empty(), "objects are of tenants that are not registered: {tenants:?}");
        for (name, group) in &core.groups.by_name {
            require!(groups.contains_key(name), "a group without members is kept");
            groups.entry(name.clone()).or_default().lost.clone_from(&group.lost);
        }
        require!(groups == core.groups.by_name, "the groups are not those of their members");
        for (id, session) in &core.sessions.by_id {
            let account = grants.get(id).copied().unwrap_or((0, 0));
            require!(account == (session.open_grants, session.open_bytes), "session {id} miscounts its open grants");
        }
        Ok(extents)
    }
}

impl Directory {
    fn check_copies(
        &self,
        core: &Core,
        mut extents: BTreeMap<SegmentId, Extents>,
    ) -> Result<BTreeMap<SegmentId, Extents>, String> {
        for (replica, copy) in &core.copies.by_replica {
            let segment = core.space.segment(copy.segment);
            add_extent(&mut extents, segment.id, copy.offset, copy.bytes, Use::Processing)?;
            let at = core.index.get(&copy.object);
            let at = at.ok_or_else(|| format!("copy {replica} is of an object that is not there"))?;
            require!(segment.used.get(&copy.offset) == Some(at), "segment {} does not know {replica}", segment.id);
            require!(segment.node == copy.node, "copy {replica} goes to another node than its segment's");
            let complete = self.shards.with(*at, Record::is_complete);
            require!(complete == Some(true), "copy {replica} is of an object that is being put");
            let beside = |r: &Record| r.replicas.iter().all(|r| r.segment != copy.segment && r.id != *replica);
            require!(self.shards.with(*at, beside) == Some(true), "copy {replica} lies beside a replica of its object");
            let others = core.copies.of(copy.object).filter(|(_, other)| other.segment == copy.segment);
            require!(others.count() == 1, "two copies of one object go to one segment");
            let bytes = self.shards.with(*at, Record::extent_bytes);
            require!(bytes == Some(copy.bytes), "copy {replica} has another size than its object");
            require!(core.copies.of(copy.object).any(|(id, _)| id == *replica), "copy {replica} is not indexed");
        }
        require!(core.copies.indexes_agree(), "the copies by object, task or node are wrong");
        require!(core.tasks.indexes_agree(), "the tasks by token, or those that ended, are wrong");
        let drained = core.tasks.drained();
        for (_, segment) in core.space.iter().filter(|(_, segment)| !segment.draining) {
            require!(!drained.contains(&segment.id), "segment {} is drained but takes puts", segment.id);
        }
        let there = core.degraded.iter().chain(&core.extra).all(|object| core.index.contains_key(object));
        require!(there, "an object with fewer or more replicas than are wanted is not there");
        Ok(extents)
    }
}

fn add_extent(
    extents: &mut BTreeMap<SegmentId, Extents>,
    segment: SegmentId,
    offset: u64,
    bytes: u64,
    used_for: Use,
) -> Result<(), String> {
    let is_new = extents.entry(segment).or_default().insert(offset, (bytes, used_for)).is_none();
    require!(is_new, "segment {segment} offset {offset} is used twice");
    Ok(())
}

fn check_retired(
    core: &Core,
    mut extents: BTreeMap<SegmentId, Extents>,
) -> Result<BTreeMap<SegmentId, Extents>, String> {
    let mut unclean = BTreeSet::new();
    for (&id, retired) in &core.retired {
        let segment = core.space.segment(retired.segment);
        add_extent(&mut extents, segment.id, retired.offset, retired.bytes, Use::Retired)?;
        if !retired.clean {
            unclean.insert((segment.node, id));
        }
    }
    require!(unclean == core.unclean, "the unclean replicas by node are wrong");
    Ok(extents)
}

fn check_segment(core: &Core, slot: SegmentSlot, extents: &Extents) -> Result<(), String> {
    let segment = core.space.segment(slot);
    let id = segment.id;
    let (mut at, mut free) = (0, Vec::new());
    let mut sums = [0u64; 3];
    for (&offset, &(bytes, used_for)) in extents {
        require!(offset >= at, "segment {id}: extents overlap at {offset}");
        require!(
            offset % EXTENT_ALIGN == 0 && bytes % EXTENT_ALIGN == 0,
            "segment {id}: {offset}+{bytes} is unaligned"
        );
        if offset > at {
            free.push((at, offset - at));
        }
        at = offset + bytes;
        sums[used_for as usize] += bytes;
    }
    require!(at <= segment.capacity, "segment {id}: an extent ends at {at}, beyond {}", segment.capacity);
    if at < segment.capacity {
        free.push((at, segment.capacity - at));
    }
    require!(segment.free.iter().eq(free), "segment {id}: the free extents are not the gaps");
    require!(segment.free.is_consistent(), "segment {id}: the indexes of free extents disagree");
    require!(sums == [segment.processing, segment.complete, segment.retired], "segment {id}: a counter is wrong");
    require!(segment.adds_up(), "segment {id}: free + processing + complete + retired is not its capacity");
    let objects = extents.values().filter(|(_, used_for)| *used_for != Use::Retired).count();
    require!(objects == segment.used.len(), "segment {id}: it knows {} replicas of {objects}", segment.used.len());
    Ok(())
}

fn check_members(core: &Core) -> Result<(), String> {
    for (_, segment) in core.space.iter() {
        let id = segment.id;
        let node = core.nodes.by_id.get(&segment.node).ok_or_else(|| format!("segment {id} has no node"))?;
        require!(node.segments.contains(&id), "node {} does not know segment {id}", segment.node);
        require!(node.incarnation == segment.incarnation, "segment {id} outlived its node's incarnation");
        require!(node.contact == segment.contact, "segment {id} is listed otherwise than its node");
        require!(node.host_id == segment.host_id, "segment {id} is on another host than its node");
    }
    let capacity: u64 = core.space.iter().map(|(_, segment)| segment.capacity).sum();
    require!(capacity == core.space.capacity(), "the bytes of all segments are miscounted");
    let segments: usize = core.nodes.by_id.values().map(|n| n.segments.len()).sum();
    require!(segments == core.space.by_id.len(), "nodes know {segments} segments");
    let by_uuid: BTreeMap<_, _> = core.nodes.by_id.iter().map(|(&id, n)| (n.node_uuid, id)).collect();
    require!(by_uuid == core.nodes.by_uuid, "nodes by uuid are wrong");
    let by_uuid: BTreeMap<_, _> = core.sessions.by_id.iter().map(|(&id, s)| (s.client_uuid, id)).collect();
    require!(by_uuid == core.sessions.by_uuid, "sessions by uuid are wrong");
    for (id, session) in &core.sessions.by_id {
        let lowest = session.outcomes.keys().next();
        require!(lowest.is_none_or(|&s| s >= session.floor), "session {id} keeps outcomes below its floor");
    }
    Ok(())
}
