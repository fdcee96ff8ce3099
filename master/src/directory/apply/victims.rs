//! Space for a put, with victims if need be (W9): they are given up one by one, on trial, until the put fits.
//! Those that did not help stay as they were. A group is given up as a whole or not at all; the put's own group stays.

use super::Apply;
use super::put::shown;
use super::release::Named;
use crate::directory::groups::GroupName;
use crate::directory::objects::{Record, Replica};
use crate::directory::op::{PutStart, ReplicaMode};
use crate::directory::placement::{Plan, Request, place};
use crate::directory::space::Space;
use smallvec::SmallVec;
use tidepool_proto::{Error, ErrorCode, ObjectId};

/// What a put needs.
pub(super) struct Wanted<'p, 'k> {
    pub(super) put: &'p PutStart<'k>,
    /// Bytes of each extent.
    pub(super) bytes: u64,
    /// The open put that gives way, and the bytes of all its extents.
    pub(super) preempted: Option<(ObjectId, u64)>,
    /// The group that it joins.
    pub(super) group: Option<GroupName>,
}

/// Where it goes, and what was evicted for it.
pub(super) struct Choice {
    pub(super) plan: Plan,
    pub(super) evicted: Vec<ObjectId>,
}

/// A victim whose extents are free on trial.
struct Trial {
    object: ObjectId,
    bytes: u64,
    replicas: SmallVec<[Replica; 2]>,
}

/// What the victims given up come to.
#[derive(Default)]
struct GivenUp {
    objects: usize,
    /// Of the put's tenant.
    own_objects: u64,
    own_bytes: u64,
    /// A segment that the put may use has room since the last placement that it had not before.
    opened: bool,
}

/// How well a put fits: first of all there must be room for one more object, here and in the tenant's quota.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Fit {
    has_room: bool,
    in_quota: bool,
    copies: usize,
}

/// The best that was found so far.
struct Best {
    plan: Plan,
    fit: Fit,
    /// Victims that it takes, of those given up.
    needed: usize,
}

impl Apply<'_> {
    /// Chooses segments and evicts the victims that were needed for it. An error: nothing changed.
    pub(super) fn choose(&mut self, wanted: &Wanted<'_, '_>) -> Result<Choice, Error> {
        let mut best = Best { plan: self.place(wanted), fit: Fit::default(), needed: 0 };
        best.fit = self.fit(wanted, &best.plan, &GivenUp::default());
        let mut trials = self.give_up_victims(wanted, &mut best);
        let Best { plan, fit, needed } = best;
        let refused = self.refusal(wanted, &fit);
        let keep = if refused.is_none() { needed } else { 0 };
        for trial in trials.drain(keep..) {
            for replica in &trial.replicas {
                self.core.space.take_back(replica.segment, replica.offset, trial.bytes);
            }
        }
        if let Some(error) = refused {
            return Err(error);
        }
        let evicted = trials.into_iter().map(|trial| self.evict_trial(trial)).collect();
        Ok(Choice { plan, evicted })
    }

    /// Gives victims up, on trial, until the put fits; says what fits best and how many are needed for it. Places anew only
    /// when one more segment has room: nothing else adds a copy.
    fn give_up_victims(&mut self, wanted: &Wanted<'_, '_>, best: &mut Best) -> Vec<Trial> {
        let put = wanted.put;
        let target = Fit { has_room: true, in_quota: true, copies: usize::from(put.replica_num) };
        let mut trials: Vec<Trial> = Vec::new();
        if best.fit == target {
            return trials;
        }
        let has_quota = self.core.tenants.get(put.tenant).is_some_and(|tenant| tenant.has_quota());
        let mut named = Named::of(&put.victims, wanted.group.as_ref());
        let (mut plan, mut given) = (best.plan.clone(), GivenUp::default());
        for victim in self.in_turn(wanted, &best.fit) {
            if best.fit == target {
                break;
            }
            let own_before = given.own_objects;
            for member in self.evictable_together(victim, &mut named) {
                trials.push(self.give_up(member, wanted, &mut given));
            }
            let eases_quota = has_quota && given.own_objects > own_before;
            if best.fit.has_room && !given.opened && !eases_quota {
                continue;
            }
            if std::mem::take(&mut given.opened) {
                plan = self.place(wanted);
            }
            let fit = self.fit(wanted, &plan, &given);
            if fit > best.fit {
                *best = Best { plan: plan.clone(), fit, needed: trials.len() };
            }
        }
        trials
    }

    /// The victims in the order in which they are tried. Over quota the tenant's own come first: another's is evicted
    /// for want of space only.
    fn in_turn(&self, wanted: &Wanted<'_, '_>, fit: &Fit) -> Vec<ObjectId> {
        let put = wanted.put;
        if fit.in_quota {
            return put.victims.clone();
        }
        let is_own = |object: &ObjectId| {
            let at = self.core.index.get(object);
            at.is_some_and(|&at| self.with_record(at, |r| r.tenant == put.tenant))
        };
        let (own, others): (Vec<_>, Vec<_>) = put.victims.iter().copied().partition(is_own);
        own.into_iter().chain(others).collect()
    }

    fn place(&self, wanted: &Wanted<'_, '_>) -> Plan {
        let put = wanted.put;
        let request = Request {
            bytes: wanted.bytes,
            copies: usize::from(put.replica_num),
            excluded: &put.excluded,
            preferred: &put.preferred,
            leaving: &[],
            strategy: self.core.config.config.strategy,
        };
        place(&self.core.space, self.at, &request)
    }

    fn fit(&self, wanted: &Wanted<'_, '_>, plan: &Plan, given: &GivenUp) -> Fit {
        let put = wanted.put;
        let (gone_objects, gone_bytes) = wanted.preempted.map_or((0, 0), |(_, bytes)| (1, bytes));
        let objects = self.core.index.len() - gone_objects - given.objects;
        let tenant = self.core.tenants.get(put.tenant).expect("checked before");
        let added = wanted.bytes.saturating_mul(plan.len().max(1) as u64);
        Fit {
            has_room: (objects as u64) < self.core.config.config.objects_max,
            in_quota: tenant.allows(
                (tenant.bytes - gone_bytes - given.own_bytes).saturating_add(added),
                tenant.objects - gone_objects as u64 - given.own_objects + 1,
            ),
            copies: plan.len(),
        }
    }

    /// Why the best fit will not do, if so.
    fn refusal(&self, wanted: &Wanted<'_, '_>, fit: &Fit) -> Option<Error> {
        let put = wanted.put;
        if !fit.has_room {
            let limit = self.core.config.config.objects_max;
            let key = shown(put.key);
            let message = format!("key '{key}': the directory holds {limit} objects, its limit (objects_max)");
            return Some(Error::new(ErrorCode::ResourceExhausted, message));
        }
        if !fit.in_quota {
            let tenant = self.core.tenants.get(put.tenant).expect("checked before");
            let message = format!(
                "key '{}' with {} bytes: tenant '{}' holds {} bytes of {} and {} objects of {} (0: no limit); remove some, or raise its quota",
                shown(put.key),
                wanted.bytes,
                tenant.name,
                tenant.bytes,
                tenant.quota.bytes,
                tenant.objects,
                tenant.quota.objects,
            );
            return Some(Error::new(ErrorCode::TenantQuotaExceeded, message));
        }
        let need = match put.mode {
            ReplicaMode::BestEffort => 1,
            ReplicaMode::Strict => usize::from(put.replica_num),
        };
        if fit.copies >= need {
            return None;
        }
        let space = &self.core.space;
        let key = shown(put.key);
        let facts = format!(
            "key '{key}' needs {need} extents of {} bytes, {} can be had: {} segments may be chosen, the largest free extent has {} bytes, {} victims were named, {} nodes excluded",
            wanted.bytes,
            fit.copies,
            space.eligible().len(),
            space.largest_free(),
            put.victims.len(),
            put.excluded.len(),
        );
        let code = if fit.copies == 0 { ErrorCode::NoSpace } else { ErrorCode::NotEnoughReplicas };
        Some(Error::new(code, facts))
    }

    /// Frees a victim's extents on trial. It is COMPLETE.
    fn give_up(&mut self, object: ObjectId, wanted: &Wanted<'_, '_>, given: &mut GivenUp) -> Trial {
        let at = self.core.index[&object];
        let copy = |r: &Record| (r.tenant, r.extent_bytes(), r.replicas.iter().copied().collect());
        let (tenant, bytes, replicas): (_, _, SmallVec<[Replica; 2]>) = self.with_record(at, copy);
        for replica in &replicas {
            let fits = |space: &Space| space.segment(replica.segment).free.largest() >= wanted.bytes;
            let fitted = fits(&self.core.space);
            self.core.space.give_on_trial(replica.segment, replica.offset, bytes);
            let segment = self.core.space.segment(replica.segment);
            let usable = segment.may_be_chosen() && !wanted.put.excluded.contains(&segment.node);
            given.opened |= usable && !fitted && fits(&self.core.space);
        }
        given.objects += 1;
        if tenant == wanted.put.tenant {
            let copied: u64 = self.core.copies.of(object).map(|(_, copy)| copy.bytes).sum();
            given.own_objects += 1;
            given.own_bytes += bytes * replicas.len() as u64 + copied;
        }
        Trial { object, bytes, replicas }
    }

    /// Makes a trial final.
    fn evict_trial(&mut self, trial: Trial) -> ObjectId {
        for replica in &trial.replicas {
            self.core.space.settle(replica.segment, replica.offset, trial.bytes);
        }
        self.take_object(trial.object).expect("it was given up");
        trial.object
    }
}
