//! One step of a pass.

use super::books::{CELL_SLOTS, Cell};
use super::{GroupCursor, Phase, ViolationKind};
use crate::directory::core::{Core, OpenPut};
use crate::directory::groups::GroupName;
use crate::directory::invariants::rest_digest;
use crate::directory::limits::SHARDS;
use crate::directory::objects::{Location, Record, SegmentSlot, Shard, Shards};
use crate::directory::op::SessionId;
use crate::directory::topology::Topology;
use parking_lot::RwLock;
use std::collections::BTreeSet;
use std::ops::Bound;
use tidepool_proto::{ObjectId, ReplicaId, SegmentId};

/// What a step works on.
struct Step<'d> {
    core: &'d mut Core,
    shards: &'d Shards,
    topology: &'d RwLock<Topology>,
    index: u64,
    /// Items looked at, and how many may be.
    spent: usize,
    items: usize,
}

/// Walks on from where the last step ended, through so many items or to the end of the pass.
pub(in crate::directory) fn step(core: &mut Core, shards: &Shards, topology: &RwLock<Topology>, index: u64) {
    let items = core.auditor.step_items;
    let mut step = Step { core, shards, topology, index, spent: 0, items };
    while step.spent < items {
        let phase = std::mem::take(&mut step.core.auditor.phase);
        let is_last = matches!(phase, Phase::Accounts);
        step.core.auditor.phase = step.advance(phase);
        if is_last {
            break;
        }
    }
}

impl Step<'_> {
    fn advance(&mut self, phase: Phase) -> Phase {
        match phase {
            Phase::Start => {
                self.core.objects.restart();
                self.core.parts.retired.restart();
                self.core.parts.sessions.restart();
                self.core.parts.lost_members.restart();
                Phase::Objects((0, 0))
            }
            Phase::Objects(cell) => self.objects(cell),
            Phase::Groups(cursor) => self.groups(cursor),
            Phase::Retired(from) => self.retired(from),
            Phase::Sessions(from) => self.sessions(from),
            Phase::LostMembers(from) => self.lost_members(from),
            Phase::FreeExtents(segment, from) => self.free_extents(segment, from),
            Phase::Accounts => {
                self.accounts();
                let progress = &mut self.core.auditor.progress;
                (progress.passes, progress.last_pass_index) = (progress.passes + 1, self.index);
                Phase::Start
            }
        }
    }

    fn note(&mut self, kind: ViolationKind, facts: String) {
        self.core.auditor.note(kind, self.index, facts);
    }

    fn require(&mut self, holds: bool, kind: ViolationKind, facts: impl FnOnce() -> String) {
        if !holds {
            self.note(kind, facts());
        }
    }

    fn objects(&mut self, cell: Cell) -> Phase {
        let (number, in_shard) = cell;
        let shards = self.shards;
        let shard = shards.read(number);
        let slots = shard.slots();
        let first = in_shard * CELL_SLOTS;
        let end = slots.min(first + CELL_SLOTS);
        let mut sum = 0u128;
        for slot in first..end {
            let Some(record) = shard.record(slot as u32) else { continue };
            let open = if record.is_complete() { None } else { self.core.open.get(&record.object).copied() };
            if record.replicas.iter().any(|r| self.core.space.get(r.segment).is_none()) {
                let object = record.object;
                self.note(
                    ViolationKind::Index,
                    format!("object {object} has a replica in a segment that is not mounted"),
                );
                continue;
            }
            sum = sum.wrapping_add(self.core.objects.walk(record, open.as_ref(), &self.core.space));
            self.record(&shard, Location::new(number, slot as u32), record, open.as_ref());
        }
        let kept = self.core.objects.cell(cell);
        self.require(sum == kept, ViolationKind::Digest, || {
            format!("shard {number} slots {first}..{end}: the running sum is {kept:032x}, the records' is {sum:032x}")
        });
        self.spent += end.saturating_sub(first).max(1);
        let next = if end < slots { Some((number, in_shard + 1)) } else { Some((number + 1, 0)) };
        let next = next.filter(|&(shard, _)| shard < SHARDS);
        self.core.objects.go_on_at(next);
        next.map_or(Phase::Groups(None), Phase::Objects)
    }

    /// Every index knows a record, and its extents are its own.
    fn record(&mut self, shard: &Shard, at: Location, record: &Record, open: Option<&OpenPut>) {
        let object = record.object;
        let indexed = self.core.index.get(&object) == Some(&at);
        self.require(indexed, ViolationKind::Index, || format!("object {object} is not in the index, or elsewhere"));
        self.require(record.is_complete() == open.is_none(), ViolationKind::Index, || {
            format!("object {object} is PROCESSING but no put of it is open")
        });
        let replaces = open.and_then(|open| open.replaces);
        let owner = replaces.map_or(Some(at), |old| self.core.index.get(&old).copied());
        let hash = self.shards.hash(record.tenant, &record.key);
        let found = shard.find(hash, record.tenant, &record.key);
        let is_found = found.is_some() && found == owner.map(Location::slot);
        self.require(is_found, ViolationKind::Index, || {
            format!("object {object} is not found under its key, nor is what it is to replace")
        });
        let degraded = self.core.degraded.contains(&object);
        self.require(degraded == record.is_degraded(), ViolationKind::Index, || {
            let (copies, made) = (record.replicas.len(), record.copies);
            format!("object {object} has {copies} replicas of {made}; the list of degraded objects says {degraded}")
        });
        for replica in &record.replicas {
            self.extent(replica.id, replica.segment, replica.offset, record.extent_bytes(), Some(at));
        }
        let Some(name) = record.group_name() else { return };
        let group = self.core.groups.get(&name);
        let set = group.map(|group| if replaces.is_some() { &group.upserts } else { &group.members });
        let joined = set.is_some_and(|set| set.contains(&object));
        self.require(joined, ViolationKind::Group, || format!("object {object} is not in its group {}", shown(&name)));
    }

    /// An extent is owned by whom it should be, and by nobody else.
    fn extent(&mut self, id: ReplicaId, slot: SegmentSlot, offset: u64, bytes: u64, owner: Option<Location>) {
        let Some(segment) = self.core.space.get(slot) else { return };
        let name = segment.id;
        let end = offset.saturating_add(bytes);
        let mut used = segment.used.range(offset..);
        let (known, next) = match owner {
            Some(at) => (used.next().is_some_and(|(&o, &found)| o == offset && found == at), used.next()),
            None => (!segment.used.contains_key(&offset), used.next()),
        };
        let apart = next.is_none_or(|(&o, _)| o >= end) && end <= segment.capacity;
        let is_free = segment.free.overlaps(offset, bytes);
        let facts = || format!("replica {id} at {offset}+{bytes} of segment {name}");
        self.require(known, ViolationKind::Space, || format!("{} is not owned as it should be", facts()));
        self.require(apart, ViolationKind::Space, || format!("{} reaches into another extent, or too far", facts()));
        self.require(!is_free, ViolationKind::Space, || format!("{} is free in part", facts()));
    }

    fn groups(&mut self, cursor: Option<GroupCursor>) -> Phase {
        let mut wrong = Vec::new();
        let mut next = None;
        let from = cursor.as_ref().map_or(Bound::Unbounded, |cursor| Bound::Included(&cursor.group));
        let names = self.core.groups.by_name.range::<GroupName, _>((from, Bound::Unbounded));
        'groups: for (name, group) in names {
            let resumed = cursor.as_ref().filter(|cursor| cursor.group == *name);
            let (begin, mut first) = resumed.map_or((false, ObjectId(0)), |cursor| (cursor.upserts, cursor.object));
            if group.members.is_empty() && group.upserts.is_empty() {
                wrong.push(format!("group {} has no member", shown(name)));
            }
            let (mut unfinished, whole) = (0, resumed.is_none());
            for upserts in [false, true].into_iter().skip(usize::from(begin)) {
                let set = if upserts { &group.upserts } else { &group.members };
                for &object in set.range(first..) {
                    if self.spent >= self.items {
                        next = Some(GroupCursor { group: name.clone(), upserts, object });
                        break 'groups;
                    }
                    self.spent += 1;
                    unfinished += u32::from(!upserts && self.core.open.contains_key(&object));
                    let replaces = self.core.open.get(&object).is_some_and(|open| open.replaces.is_some());
                    let of_group = |r: &Record| r.tenant == name.0 && r.group() == Some(&name.1);
                    let at = self.core.index.get(&object);
                    let joined = at.and_then(|&at| self.shards.with(at, of_group)) == Some(true);
                    if !joined || replaces != upserts {
                        wrong.push(format!("group {} names object {object}, which is not in it", shown(name)));
                    }
                }
                first = ObjectId(0);
            }
            // Of a group that took several steps the count may have changed between them.
            if whole && unfinished != group.unfinished {
                let kept = group.unfinished;
                wrong.push(format!("group {} counts {kept} members being put, {unfinished} are", shown(name)));
            }
            self.spent += 1;
        }
        wrong.into_iter().for_each(|facts| self.note(ViolationKind::Group, facts));
        if next.is_some() { Phase::Groups(next) } else { Phase::Retired(ReplicaId(0)) }
    }

    fn retired(&mut self, from: ReplicaId) -> Phase {
        let mut page: Vec<_> = self.core.retired.range(from..).take(self.items + 1).map(|(&id, &r)| (id, r)).collect();
        let next = if page.len() > self.items { page.pop().map(|(id, _)| id) } else { None };
        for (id, retired) in page {
            self.spent += 1;
            let Some(node) = self.core.space.get(retired.segment).map(|segment| segment.node) else {
                self.note(ViolationKind::Index, format!("retired replica {id} is in a segment that is not mounted"));
                continue;
            };
            let core = &mut *self.core;
            core.parts.retired.walk(|c| c.retired(id, &retired, &core.space));
            let books = &mut core.objects.books;
            let bytes = &mut books.segment(retired.segment).retired;
            *bytes = bytes.wrapping_add(retired.bytes);
            books.unclean += u64::from(!retired.clean);
            let listed = core.unclean.contains(&(node, id));
            self.require(listed != retired.clean, ViolationKind::Index, || {
                let clean = retired.clean;
                format!("retired replica {id} (clean: {clean}) is wrongly (not) among those that wait for a fence")
            });
            self.extent(id, retired.segment, retired.offset, retired.bytes, None);
        }
        self.core.parts.retired.go_on_at(next);
        next.map_or(Phase::Sessions(SessionId(0)), Phase::Retired)
    }

    fn sessions(&mut self, from: SessionId) -> Phase {
        let core = &mut *self.core;
        let mut next = None;
        for (&id, session) in core.sessions.by_id.range(from..) {
            if self.spent >= self.items {
                next = Some(id);
                break;
            }
            self.spent += 1 + session.outcomes.len();
            core.parts.sessions.walk(|c| c.session(id, session));
            for (&sequence, &answered) in &session.outcomes {
                core.parts.sessions.walk(|c| c.answered(id, sequence, answered));
            }
        }
        core.parts.sessions.go_on_at(next);
        next.map_or(Phase::LostMembers(None), Phase::Sessions)
    }

    fn lost_members(&mut self, from: Option<GroupName>) -> Phase {
        let core = &mut *self.core;
        let mut next = None;
        let bound = from.as_ref().map_or(Bound::Unbounded, Bound::Included);
        for (name, group) in core.groups.by_name.range::<GroupName, _>((bound, Bound::Unbounded)) {
            if self.spent >= self.items {
                next = Some(name.clone());
                break;
            }
            self.spent += 1 + group.lost.len();
            group.lost.iter().for_each(|key| core.parts.lost_members.walk(|c| c.lost_member(name, key)));
        }
        core.parts.lost_members.go_on_at(next.clone());
        match next {
            Some(_) => Phase::LostMembers(next),
            None => Phase::FreeExtents(SegmentId(0), 0),
        }
    }

    fn free_extents(&mut self, from: SegmentId, offset: u64) -> Phase {
        let Some((&id, &slot)) = self.core.space.by_id.range(from..).next() else { return Phase::Accounts };
        // The segment that was begun may be gone.
        let offset = if id == from { offset } else { 0 };
        let Some(free) = self.core.space.free_mut(slot) else { return Phase::Accounts };
        let (looked_at, next) = free.audit(offset, self.items);
        self.spent += looked_at.max(1);
        if let Some(offset) = next {
            return Phase::FreeExtents(id, offset);
        }
        if let Err(facts) = free.audited() {
            self.note(ViolationKind::Space, format!("segment {id}: {facts}"));
        }
        Phase::FreeExtents(SegmentId(id.0.saturating_add(1)), 0)
    }

    /// What a whole pass adds up to.
    fn accounts(&mut self) {
        self.spent += self.items;
        self.copies();
        for kind in [ViolationKind::Counter, ViolationKind::Space, ViolationKind::Index, ViolationKind::Digest] {
            for facts in differences(self.core, self.shards, self.topology, kind) {
                self.note(kind, facts);
            }
        }
    }

    /// Copies under way are few; they are booked last.
    fn copies(&mut self) {
        let copies: Vec<_> = self.core.copies.by_replica.iter().map(|(&id, &copy)| (id, copy)).collect();
        for (id, copy) in copies {
            let at = self.core.index.get(&copy.object).copied();
            let tenant = at.and_then(|at| self.shards.with(at, |r| r.tenant));
            let Some(tenant) = tenant else {
                let object = copy.object;
                self.note(ViolationKind::Index, format!("copy {id} is of object {object}, which is not there"));
                continue;
            };
            self.extent(id, copy.segment, copy.offset, copy.bytes, at);
            let books = &mut self.core.objects.books;
            let bytes = &mut books.tenant(tenant).bytes;
            *bytes = bytes.wrapping_add(copy.bytes);
            let segment = books.segment(copy.segment);
            segment.processing = segment.processing.wrapping_add(copy.bytes);
            segment.extents += 1;
        }
    }
}

/// Where the books of a whole pass and the state differ.
fn differences(core: &Core, shards: &Shards, topology: &RwLock<Topology>, kind: ViolationKind) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut require = |holds: bool, facts: &dyn Fn() -> String| {
        if !holds {
            wrong.push(facts());
        }
    };
    let books = &core.objects.books;
    match kind {
        ViolationKind::Counter => {
            for (id, tenant) in core.tenants.iter() {
                let found = books.tenants.get(usize::from(id.0)).copied().unwrap_or_default();
                let kept = tenant.account();
                require(kept == found, &|| {
                    format!("tenant '{}' counts {kept:?}, its objects are {found:?}", tenant.name)
                });
            }
            for (&id, session) in &core.sessions.by_id {
                let found = books.sessions.get(&id).copied().unwrap_or_default();
                let (grants, bytes) = (session.open_grants, session.open_bytes);
                require((grants, bytes) == (found.objects, found.bytes), &|| {
                    format!("session {id} counts {grants} open grants of {bytes} bytes, they are {found:?}")
                });
            }
            for (slot, segment) in core.space.iter() {
                let found = books.segments.get(slot as usize).copied().unwrap_or_default();
                let kept = (segment.processing, segment.complete, segment.retired, segment.used.len() as u64);
                let seen = (found.processing, found.complete, found.retired, found.extents);
                require(kept == seen, &|| {
                    let id = segment.id;
                    format!("segment {id} counts (processing, complete, retired, extents) {kept:?}, they are {seen:?}")
                });
            }
            let capacity: u64 = core.space.iter().map(|(_, segment)| segment.capacity).sum();
            let kept = core.space.capacity();
            require(capacity == kept, &|| format!("the segments have {capacity} bytes, counted are {kept}"));
        }
        ViolationKind::Space => {
            for (_, segment) in core.space.iter() {
                let (free, capacity) = (segment.free.free(), segment.capacity);
                let used = [segment.processing, segment.complete, segment.retired];
                require(segment.adds_up(), &|| {
                    format!("segment {}: free {free} and used {used:?} do not add up to {capacity}", segment.id)
                });
            }
        }
        ViolationKind::Index => {
            let held: usize = (0..SHARDS).map(|number| shards.read(number).len()).sum();
            let known = [&core.degraded, &core.extra].map(BTreeSet::len);
            let known = (core.index.len(), core.open.len(), known, core.unclean.len());
            let seen = [books.degraded, books.extra].map(|count| count as usize);
            let seen = (held, books.processing as usize, seen, books.unclean as usize);
            require(known == seen && books.records as usize == held, &|| {
                format!(
                    "the lists of (all, open, degraded and with extras, unfenced) have {known:?} entries; there are {seen:?}"
                )
            });
            require(core.space.indexes_agree(), &|| "segments by their largest extent are wrong".to_owned());
            require(core.copies.indexes_agree(), &|| "copies by object, task or node are wrong".to_owned());
            require(core.tasks.indexes_agree(), &|| "tasks by token are wrong".to_owned());
            require(*topology.read() == core.topology(), &|| "what readers see of the segments is wrong".to_owned());
        }
        ViolationKind::Digest => {
            let parts = [
                ("retired replicas", core.parts.retired.difference()),
                ("sessions", core.parts.sessions.difference()),
                ("lost members", core.parts.lost_members.difference()),
                ("objects", difference(core.objects.sum(), core.objects.sum_of_cells())),
                ("all else", difference(core.digest.sum(), rest_digest(core))),
            ];
            for (part, difference) in parts {
                let (kept, seen) = difference.unwrap_or_default();
                require(difference.is_none(), &|| {
                    format!("{part}: the running sum is {kept:032x}, the records' is {seen:032x}")
                });
            }
        }
        ViolationKind::Group => {}
    }
    wrong
}

fn difference(kept: u128, seen: u128) -> Option<(u128, u128)> {
    (kept != seen).then_some((kept, seen))
}

/// A group's name for a message.
fn shown(name: &GroupName) -> String {
    let head = String::from_utf8_lossy(&name.1[..name.1.len().min(64)]);
    format!("'{head}' of tenant {}", name.0.0)
}
