//! Key-named removal, executed at most once per (session, sequence) (W8).

use super::put::{check_tenant, shown};
use super::{Applied, Apply};
use crate::directory::limits::OUTCOMES_PER_SESSION_MAX;
use crate::directory::op::{Remove, RetireMode};
use crate::directory::outcome::{Outcome, Removal};
use tidepool_proto::keys::check_key;
use tidepool_proto::{Error, ErrorCode};

impl Apply<'_> {
    pub(super) fn remove(&mut self, remove: &Remove<'_>) -> Applied {
        check_tenant(remove.tenant)?;
        check_key(remove.key)?;
        let session = self.core.sessions.get_mut(remove.session)?;
        let floor = session.floor.max(remove.floor);
        if remove.sequence < floor {
            return Err(Error::new(
                ErrorCode::StaleRequest,
                format!(
                    "remove of key '{}': sequence {} of session {} is below the floor {floor}; a late duplicate, not executed",
                    shown(remove.key),
                    remove.sequence,
                    remove.session
                ),
            ));
        }
        if let Some(&recorded) = session.outcomes.get(&remove.sequence) {
            return Ok(Outcome::Removal(recorded));
        }
        // Counted only when the window may be full.
        if session.outcomes.len() >= OUTCOMES_PER_SESSION_MAX
            && session.outcomes.range(floor..).count() >= OUTCOMES_PER_SESSION_MAX
        {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!(
                    "session {} has {OUTCOMES_PER_SESSION_MAX} outcomes above its floor {floor}, the limit; send a higher floor",
                    remove.session
                ),
            ));
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
        self.record_removal(remove, floor, removal);
        Ok(Outcome::Removal(removal))
    }

    fn record_removal(&mut self, remove: &Remove<'_>, floor: u64, removal: Removal) {
        let core = &mut *self.core;
        let id = remove.session;
        let session = core.sessions.by_id.get_mut(&id).expect("checked before");
        if floor > session.floor {
            core.digest.sub(|c| c.session(id, session));
            session.floor = floor;
            core.digest.add(|c| c.session(id, session));
            let kept = session.outcomes.split_off(&floor);
            for (&sequence, &answered) in &session.outcomes {
                core.digest.sub(|c| c.removal(id, sequence, answered));
            }
            session.outcomes = kept;
        }
        session.outcomes.insert(remove.sequence, removal);
        core.digest.add(|c| c.removal(id, remove.sequence, removal));
    }
}
