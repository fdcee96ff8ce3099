//! Removal by key and by match, executed at most once per (session, sequence) (W8).

use super::put::shown;
use super::release::Dropped;
use super::{Applied, Apply, check_count, invalid};
use crate::directory::objects::Record;
use crate::directory::op::{ClearReplicas, Remove, RetireMode, SessionId, Turn};
use crate::directory::outcome::{Answered, Outcome, Removal};
use tidepool_proto::ObjectId;
use tidepool_proto::keys::check_key;

impl Apply<'_> {
    pub(super) fn remove(&mut self, remove: &Remove<'_>) -> Applied {
        self.check_tenant(remove.tenant)?;
        check_key(remove.key)?;
        let session = self.core.sessions.get_mut(remove.session)?;
        match session.check_turn(remove.session, remove.turn)? {
            None => {}
            Some(Answered::Removal(recorded)) => return Ok(Outcome::Removal(recorded)),
            Some(_) => {
                return Err(invalid(format!("key '{}': the sequence was used by another request", shown(remove.key))));
            }
        }
        let hash = self.shards.hash(remove.tenant, remove.key);
        let present = self
            .shards
            .locate(hash, remove.tenant, remove.key)
            .map(|at| self.with_record(at, |r| (r.object, r.is_complete())));
        let removal = match present {
            None => Removal::NotFound,
            // The leader looked at another object, or at none: it knows nothing of this one's leases.
            Some((actual, _)) if remove.expected.is_some_and(|e| e != actual) => {
                return Ok(Outcome::RemoveChanged { actual });
            }
            Some((actual, true)) if remove.expected.is_none() && remove.mode == RetireMode::RetireAndReclaim => {
                return Ok(Outcome::RemoveChanged { actual });
            }
            Some((_, false)) => Removal::NotReady,
            Some((object, true)) => {
                self.retire_object(object, remove.mode);
                Removal::Removed(object)
            }
        };
        self.record_answer(remove.session, remove.turn, Answered::Removal(removal));
        Ok(Outcome::Removal(removal))
    }

    pub(super) fn remove_objects(
        &mut self,
        id: SessionId,
        turn: Turn,
        objects: &[ObjectId],
        mode: RetireMode,
    ) -> Applied {
        check_count("objects", objects.len())?;
        match self.core.sessions.get_mut(id)?.check_turn(id, turn)? {
            None => {}
            Some(Answered::Removed { objects }) => return Ok(Outcome::RemovedObjects { objects }),
            Some(_) => return Err(invalid(format!("sequence {} was used by another request", turn.sequence))),
        }
        let mut removed = 0;
        for &object in objects {
            let Some(&at) = self.core.index.get(&object) else { continue };
            if self.with_record(at, Record::is_complete) {
                self.retire_object(object, mode);
                removed += 1;
                self.let_readers_in(1);
            }
        }
        self.record_answer(id, turn, Answered::Removed { objects: removed });
        Ok(Outcome::RemovedObjects { objects: removed })
    }

    /// What the leader named of an object goes; what is not there, or is being put, stays.
    pub(super) fn clear_replicas(&mut self, clear: &ClearReplicas) -> Applied {
        check_count("replicas", clear.replicas.len())?;
        let (id, turn) = (clear.session, clear.turn);
        match self.core.sessions.get_mut(id)?.check_turn(id, turn)? {
            None => {}
            Some(Answered::Cleared(cleared)) => return Ok(Outcome::Cleared { cleared }),
            Some(_) => return Err(invalid(format!("sequence {} was used by another request", turn.sequence))),
        }
        let mut cleared = false;
        for &replica in &clear.replicas {
            cleared |= self.drop_replica(clear.object, replica, Dropped::Unwanted).is_ok();
        }
        self.record_answer(id, turn, Answered::Cleared(cleared));
        Ok(Outcome::Cleared { cleared })
    }

    /// Records what a key-named op answered, and forgets what lies below the floor.
    pub(super) fn record_answer(&mut self, id: SessionId, turn: Turn, answered: Answered) {
        let core = &mut *self.core;
        let session = core.sessions.by_id.get_mut(&id).expect("checked before");
        if turn.floor > session.floor {
            core.parts.sessions.sub(&id, |c| c.session(id, session));
            session.floor = turn.floor;
            core.parts.sessions.add(&id, |c| c.session(id, session));
            let kept = session.outcomes.split_off(&turn.floor);
            for (&sequence, &old) in &session.outcomes {
                core.parts.sessions.sub(&id, |c| c.answered(id, sequence, old));
            }
            session.outcomes = kept;
        }
        session.outcomes.insert(turn.sequence, answered);
        core.parts.sessions.add(&id, |c| c.answered(id, turn.sequence, answered));
    }
}
