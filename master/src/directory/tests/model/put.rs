//! Puts of the model: what a start answers, and where its replicas may lie.

use super::{DISCARD_MS, Model, Object, Segment};
use crate::directory::{Answered, Contact, Grant, Outcome, PutStart, ReplicaMode};
use std::collections::BTreeSet;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, NodeId, ObjectId, OpId, SegmentId};

/// What a put finds: the first grant of a retry, or who gives way, whom it replaces and what group it joins.
enum Start {
    Repeated(ObjectId),
    New { preempted: Option<ObjectId>, old: Option<Object>, group: Vec<u8> },
}

impl Model {
    pub(super) fn put_start(&mut self, at: OpId, put: &PutStart<'_>, outcome: &Outcome) {
        let (preempted, old, group, (copies, evicted)) = match self.start(put).and_then(|start| match start {
            Start::Repeated(object) => Ok(Err(object)),
            Start::New { preempted, old, group } => {
                self.check_limits(put, preempted, old.as_ref())?;
                self.choose(put, preempted, &group).map(|choice| Ok((preempted, old, group, choice)))
            }
        }) {
            Ok(Ok(new)) => new,
            Ok(Err(repeated)) => {
                let Outcome::Granted(grant) = outcome else { panic!("{put:?}: {outcome:?}") };
                let object = self.object(repeated).unwrap();
                assert!(grant.repeated && grant.object == object.id && grant.evicted.is_empty());
                let replicas: Vec<_> = grant.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect();
                assert_eq!(replicas, object.replicas, "{put:?}");
                return;
            }
            Err(code) => {
                return match outcome {
                    Outcome::Refused(error) => assert_eq!(error.code(), code, "{put:?}: {error}"),
                    other => panic!("{put:?} should be refused {code:?}, not {other:?}"),
                };
            }
        };
        let Outcome::Granted(grant) = outcome else { panic!("{put:?} should get {copies} copies: {outcome:?}") };
        assert!(!grant.repeated && grant.object == ObjectId(at.0) && grant.preempted == preempted);
        assert_eq!((grant.replicas.len(), &grant.evicted), (copies, &evicted), "{put:?}");
        self.check_placement(put, grant);
        self.note_evictions(put, &evicted, old.as_ref());
        evicted.into_iter().for_each(|id| drop(self.take(id)));
        if let Some(id) = preempted {
            self.drop_put(id, &BTreeSet::new());
        }
        if let Some(turn) = put.upsert {
            self.record(put.session, turn, Answered::Upsert(grant.object));
        }
        let replaces = old.as_ref().map(|o| o.id).filter(|&id| self.object(id).is_some());
        self.objects.push(Object {
            tenant: put.tenant,
            key: put.key.to_vec(),
            id: grant.object,
            length: put.length,
            session: put.session,
            token: put.token,
            started: self.clock,
            granted: copies,
            wanted: put.replica_num.into(),
            ended: None,
            replicas: grant.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect(),
            replaces,
            group,
            hard_pin: put.hard_pin || old.is_some_and(|old| old.hard_pin),
            soft_pin: put.soft_pin,
            pinned_until: 0,
            data_type: put.data_type,
        });
    }

    fn note_evictions(&mut self, put: &PutStart<'_>, evicted: &[ObjectId], old: Option<&Object>) {
        let group_evicted = evicted.iter().any(|&id| !self.object(id).unwrap().group.is_empty());
        let another = evicted.iter().any(|&id| self.object(id).unwrap().tenant != put.tenant);
        let hard = put.victims.iter().any(|&id| self.object(id).is_some_and(|o| o.hard_pin));
        let copied = evicted.iter().any(|&id| self.copies.iter().any(|c| c.object == id));
        let events = [
            (copied, "an object is evicted while it is copied"),
            (group_evicted, "a group is evicted for a put"),
            (another, "another tenant's object is evicted for a put"),
            (hard && !evicted.is_empty(), "a hard-pinned victim is passed over"),
            (old.is_some_and(|o| evicted.contains(&o.id)), "an upsert evicts what it was to replace"),
        ];
        self.events.extend(events.iter().filter(|e| e.0).map(|e| e.1));
    }

    fn start(&self, put: &PutStart<'_>) -> Result<Start, ErrorCode> {
        self.check_tenant(put.tenant)?;
        let answered = match put.upsert {
            Some(turn) => self.check_turn(put.session, turn)?,
            None => self.check_session(put.session).map(|()| None)?,
        };
        let is_retry = |o: &&Object| o.session == put.session && o.token == put.token && o.ended.is_none();
        if let Some(answered) = answered {
            let Answered::Upsert(object) = answered else { return Err(ErrorCode::InvalidParams) };
            let open = self.object(object).filter(is_retry).ok_or(ErrorCode::GrantLost)?;
            let is_same = (open.tenant, &open.key[..], open.length) == (put.tenant, put.key, put.length);
            return if is_same { Ok(Start::Repeated(object)) } else { Err(ErrorCode::InvalidParams) };
        }
        let Some(found) = self.find(put.tenant, put.key) else {
            return Ok(Start::New { preempted: None, old: None, group: put.group.to_vec() });
        };
        if found.ended.is_some() {
            if put.upsert.is_none() {
                return Err(ErrorCode::ObjectAlreadyExists);
            }
            if !put.group.is_empty() && found.group != put.group {
                return Err(ErrorCode::InvalidParams);
            }
            let preempted = self.objects.iter().find(|o| o.replaces == Some(found.id)).map(|o| o.id);
            return Ok(Start::New { preempted, old: Some(found.clone()), group: found.group.clone() });
        }
        if is_retry(&found) {
            let is_same = found.length == put.length;
            return if is_same { Ok(Start::Repeated(found.id)) } else { Err(ErrorCode::InvalidParams) };
        }
        if put.upsert.is_none() && self.clock - found.started < DISCARD_MS {
            return Err(ErrorCode::PutInProgress);
        }
        Ok(Start::New { preempted: Some(found.id), old: None, group: put.group.to_vec() })
    }

    /// What a client may have granted, and what may be pinned for good.
    fn check_limits(
        &mut self,
        put: &PutStart<'_>,
        preempted: Option<ObjectId>,
        old: Option<&Object>,
    ) -> Result<(), ErrorCode> {
        let capacity: u64 = self.segments.iter().map(|s| s.capacity).sum();
        let need = extent_bytes(put.length) * u64::from(put.replica_num);
        let open = self.objects.iter().filter(|o| o.ended.is_none() && o.session == put.session);
        let granted: u64 = open.filter(|o| Some(o.id) != preempted).map(Object::all_bytes).sum();
        if granted > 0 && granted + need > (capacity / 100 * 10).max(self.granted_bytes_min) {
            self.events.insert("a client is granted no more");
            return Err(ErrorCode::ResourceExhausted);
        }
        let has_quota = |tenant| self.tenants[&tenant].1.bytes > 0;
        let pins = put.hard_pin || old.is_some_and(|old| old.hard_pin);
        if pins && !has_quota(put.tenant) && self.hard_pinned_percent_max < 100 {
            let goes = |o: &&Object| Some(o.id) == preempted || old.is_some_and(|old| old.id == o.id);
            let pins = |o: &&Object| o.hard_pin && !has_quota(o.tenant);
            let pinned: u64 = self.objects.iter().filter(|o| pins(o) && !goes(o)).map(Object::all_bytes).sum();
            // What is above the limit already does not count against what is replaced or preempted.
            let whole: u64 = self.objects.iter().filter(pins).map(Object::all_bytes).sum();
            let limit = capacity * self.hard_pinned_percent_max / 100;
            if need > limit.saturating_sub(whole) + (whole - pinned) {
                self.events.insert("no more is pinned for good");
                return Err(ErrorCode::HardPinLimit);
            }
        }
        Ok(())
    }

    /// How many copies fit, with the fewest victims with which the put fits best.
    fn choose(
        &mut self,
        put: &PutStart<'_>,
        preempted: Option<ObjectId>,
        group: &[u8],
    ) -> Result<(usize, Vec<ObjectId>), ErrorCode> {
        let mut order = put.victims.clone();
        if !self.fit(put, preempted, &[]).1 {
            // Over quota the tenant's own go first.
            order.sort_by_key(|&id| self.object(id).is_none_or(|o| o.tenant != put.tenant));
        }
        let units = self.evictable(&order, Some((put.tenant, group)));
        let evicted = |k: usize| units[..k].concat();
        let best = (0..=units.len()).max_by_key(|&k| (self.fit(put, preempted, &evicted(k)), usize::MAX - k)).unwrap();
        let (has_room, in_quota, copies) = self.fit(put, preempted, &evicted(best));
        if !has_room {
            return Err(ErrorCode::ResourceExhausted);
        }
        if !in_quota {
            return Err(ErrorCode::TenantQuotaExceeded);
        }
        if copies == 0 {
            return Err(ErrorCode::NoSpace);
        }
        if put.mode == ReplicaMode::Strict && copies < usize::from(put.replica_num) {
            return Err(ErrorCode::NotEnoughReplicas);
        }
        Ok((copies, evicted(best)))
    }

    /// Whether there is room for one more object here, and in the tenant's quota; and the copies that fit.
    fn fit(&self, put: &PutStart<'_>, preempted: Option<ObjectId>, evicted: &[ObjectId]) -> (bool, bool, usize) {
        let copies = self.fitting(put, evicted).len().min(put.replica_num.into());
        let others: Vec<&Object> =
            self.objects.iter().filter(|o| Some(o.id) != preempted && !evicted.contains(&o.id)).collect();
        let own: Vec<&&Object> = others.iter().filter(|o| o.tenant == put.tenant).collect();
        let bytes =
            own.iter().map(|o| self.held_bytes(o)).sum::<u64>() + extent_bytes(put.length) * copies.max(1) as u64;
        let quota = self.tenants[&put.tenant].1;
        let below = |value, limit| limit == 0 || value <= limit;
        let in_quota = below(bytes, quota.bytes) && below(own.len() as u64 + 1, quota.objects);
        ((others.len() as u64) < self.objects_max, in_quota, copies)
    }

    /// Used extents of a segment, sorted, without those of some objects.
    pub(super) fn used(&self, segment: SegmentId, without: &[ObjectId]) -> Vec<(u64, u64)> {
        let mut used: Vec<(u64, u64)> = self
            .objects
            .iter()
            .filter(|o| !without.contains(&o.id))
            .flat_map(|o| o.replicas.iter().map(move |r| (r.1, r.2, extent_bytes(o.length))))
            .chain(self.copies.iter().map(|c| (c.segment, c.offset, c.bytes)))
            .chain(self.retired.iter().map(|r| (r.segment, r.offset, r.bytes)))
            .filter(|r| r.0 == segment)
            .map(|r| (r.1, r.2))
            .collect();
        used.sort_unstable();
        used
    }

    /// Free extents of a segment as (length, offset), sorted: best fit takes the first that fits.
    pub(super) fn free(&self, segment: &Segment, without: &[ObjectId]) -> Vec<(u64, u64)> {
        let (mut at, mut free) = (0, Vec::new());
        for (offset, bytes) in self.used(segment.id, without).into_iter().chain([(segment.capacity, 0)]) {
            assert!(offset >= at, "extents overlap");
            if offset > at {
                free.push((offset - at, at));
            }
            at = offset + bytes;
        }
        free.sort_unstable();
        free
    }

    /// Segments on which an extent fits.
    pub(super) fn fitting(&self, put: &PutStart<'_>, without: &[ObjectId]) -> Vec<&Segment> {
        let chosen = |s: &&Segment| {
            let node = self.nodes.iter().find(|n| n.id == s.node).unwrap();
            node.contact == Contact::Heard
                && !s.draining
                && !put.excluded.contains(&s.node)
                && self.free(s, without).last().is_some_and(|f| f.0 >= extent_bytes(put.length))
        };
        self.segments.iter().filter(chosen).collect()
    }

    /// Each replica in another segment, where best fit puts it, and on as many hosts and nodes as possible.
    fn check_placement(&self, put: &PutStart<'_>, grant: &Grant) {
        let fitting = self.fitting(put, &grant.evicted);
        let host = |node: NodeId| &self.nodes.iter().find(|n| n.id == node).unwrap().host;
        for replica in &grant.replicas {
            let segment = fitting.iter().find(|s| s.id == replica.segment).expect("a segment that fits");
            let free = self.free(segment, &grant.evicted);
            let best = free.iter().find(|f| f.0 >= extent_bytes(put.length)).unwrap();
            assert_eq!(replica.offset, best.1, "best fit in {}", segment.id);
            assert_eq!(replica.node, segment.node);
        }
        let segments: BTreeSet<_> = grant.replicas.iter().map(|r| r.segment).collect();
        assert_eq!(segments.len(), grant.replicas.len(), "two replicas in one segment");
        let hosts = |nodes: &mut dyn Iterator<Item = NodeId>| nodes.map(host).collect::<BTreeSet<_>>().len();
        let possible = hosts(&mut fitting.iter().map(|s| s.node)).min(grant.replicas.len());
        assert_eq!(hosts(&mut grant.replicas.iter().map(|r| r.node)), possible, "{put:?}: {grant:?}");
        self.check_preferred(put, grant, &fitting);
    }

    /// Each replica is in the first preferred segment that fits on an unused host, if there is one.
    fn check_preferred(&self, put: &PutStart<'_>, grant: &Grant, fitting: &[&Segment]) {
        let host = |node: NodeId| &self.nodes.iter().find(|n| n.id == node).unwrap().host;
        let mut hosts = BTreeSet::new();
        for replica in &grant.replicas {
            let mut preferred = put.preferred.iter().filter_map(|id| fitting.iter().find(|s| s.id == *id));
            if let Some(wanted) = preferred.find(|s| !hosts.contains(host(s.node))) {
                assert_eq!(replica.segment, wanted.id, "{put:?}: {grant:?}");
            }
            hosts.insert(host(replica.node));
        }
    }
}
