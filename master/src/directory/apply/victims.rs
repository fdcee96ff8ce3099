//! Space for a put, with victims if need be (W9): they are given up one by one, on trial, until the put fits.
//! Those that did not help stay as they were.

use super::put::shown;
use super::{Apply, Sign};
use crate::directory::objects::{Location, Record, Replica};
use crate::directory::op::{PutStart, ReplicaMode};
use crate::directory::placement::{Plan, place};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use tidepool_proto::{Error, ErrorCode, ObjectId};

/// What a put needs.
pub(super) struct Wanted<'p, 'k> {
    pub(super) put: &'p PutStart<'k>,
    /// Bytes of each extent.
    pub(super) bytes: u64,
    /// Objects present, the preempted one not counted.
    pub(super) objects: usize,
}

/// Where it goes, and what was evicted for it.
pub(super) struct Choice {
    pub(super) plan: Plan,
    pub(super) evicted: Vec<ObjectId>,
}

/// A victim whose extents are free on trial.
struct Trial {
    object: ObjectId,
    at: Location,
    bytes: u64,
    replicas: SmallVec<[Replica; 2]>,
}

/// How well a put fits: first of all there must be room for one more object.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Fit {
    has_room: bool,
    copies: usize,
}

impl Apply<'_> {
    /// Chooses segments and evicts the victims that were needed for it. An error: nothing changed.
    pub(super) fn choose(&mut self, wanted: &Wanted<'_, '_>) -> Result<Choice, Error> {
        let copies = usize::from(wanted.put.replica_num);
        let target = Fit { has_room: true, copies };
        let mut plan = self.place(wanted);
        let mut fit = self.fit(wanted, &plan, 0);
        let mut trials: Vec<Trial> = Vec::new();
        let mut needed = 0;
        let mut seen = BTreeSet::new();
        for &victim in &wanted.put.victims {
            if fit == target {
                break;
            }
            if !seen.insert(victim) {
                continue;
            }
            let Some(trial) = self.give_up(victim) else { continue };
            let helps = !fit.has_room
                || trial.replicas.iter().any(|r| self.core.space.segment(r.segment).free.largest() >= wanted.bytes);
            trials.push(trial);
            if !helps {
                continue;
            }
            let next = self.place(wanted);
            let next_fit = self.fit(wanted, &next, trials.len());
            if next_fit > fit {
                (plan, fit, needed) = (next, next_fit, trials.len());
            }
        }
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

    fn place(&self, wanted: &Wanted<'_, '_>) -> Plan {
        let put = wanted.put;
        place(&self.core.space, self.at, wanted.bytes, usize::from(put.replica_num), &put.excluded)
    }

    fn fit(&self, wanted: &Wanted<'_, '_>, plan: &Plan, evicted: usize) -> Fit {
        let has_room = ((wanted.objects - evicted) as u64) < self.core.config.config.objects_max;
        Fit { has_room, copies: plan.len() }
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

    /// Frees a victim's extents on trial, if it is still COMPLETE under that id.
    fn give_up(&mut self, object: ObjectId) -> Option<Trial> {
        let at = *self.core.index.get(&object)?;
        let copy = |r: &Record| r.is_complete().then(|| (r.extent_bytes(), r.replicas.iter().copied().collect()));
        let (bytes, replicas): (u64, SmallVec<[Replica; 2]>) = self.with_record(at, copy)?;
        for replica in &replicas {
            self.core.space.give_on_trial(replica.segment, replica.offset, bytes);
        }
        Some(Trial { object, at, bytes, replicas })
    }

    /// Makes a trial final.
    fn evict_trial(&mut self, trial: Trial) -> ObjectId {
        for replica in &trial.replicas {
            self.core.space.settle(replica.segment, replica.offset, trial.bytes);
        }
        self.core.index.remove(&trial.object);
        let record = self.shards.remove(trial.at).expect("the index names a record");
        self.digest_record(&record, Sign::Sub);
        trial.object
    }
}
