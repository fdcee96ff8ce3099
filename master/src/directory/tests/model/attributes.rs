//! Pins, tenants and turns of the model.

use super::Model;
use crate::directory::{Answered, Outcome, Quota, SessionId, SoftPinAction, TenantId, Turn};
use tidepool_proto::{ErrorCode, ObjectId};

impl Model {
    pub(super) fn set_pin(&mut self, id: ObjectId, action: SoftPinAction) -> Result<Outcome, ErrorCode> {
        let clock = self.clock;
        let object = self.objects.iter_mut().find(|o| o.id == id).ok_or(ErrorCode::ObjectNotFound)?;
        if object.ended.is_none() {
            return Err(ErrorCode::NotReady);
        }
        match action {
            SoftPinAction::Preserve => {}
            SoftPinAction::Enable { ttl_ms } => object.pinned_until = clock + ttl_ms,
            SoftPinAction::Disable => object.pinned_until = 0,
        }
        Ok(Outcome::Done)
    }

    pub(super) fn set_tenant(&mut self, name: &str, quota: Quota) -> Outcome {
        let known = self.tenants.iter().find(|(_, t)| t.0 == name).map(|(&id, _)| id);
        let tenant = known.unwrap_or_else(|| {
            self.tenants_made += 1;
            TenantId(self.tenants_made)
        });
        self.tenants.insert(tenant, (name.to_owned(), quota));
        Outcome::Tenant { tenant }
    }

    pub(super) fn drop_tenant(&mut self, name: &str) -> Result<Outcome, ErrorCode> {
        let known = self.tenants.iter().find(|(_, t)| t.0 == name).map(|(&id, _)| id);
        let tenant = known.ok_or(ErrorCode::TenantNotRegistered)?;
        if tenant == TenantId::DEFAULT {
            return Err(ErrorCode::InvalidParams);
        }
        if self.objects.iter().any(|o| o.tenant == tenant) {
            return Err(ErrorCode::TenantNotEmpty);
        }
        self.tenants.remove(&tenant);
        Ok(Outcome::Done)
    }

    pub(super) fn check_tenant(&self, tenant: TenantId) -> Result<(), ErrorCode> {
        self.tenants.contains_key(&tenant).then_some(()).ok_or(ErrorCode::TenantNotRegistered)
    }

    pub(super) fn check_session(&self, session: SessionId) -> Result<(), ErrorCode> {
        self.sessions.contains_key(&session).then_some(()).ok_or(ErrorCode::SessionUnknown)
    }

    /// What was answered under this sequence, or STALE_REQUEST.
    pub(super) fn check_turn(&self, session: SessionId, turn: Turn) -> Result<Option<Answered>, ErrorCode> {
        self.check_session(session)?;
        let session = &self.sessions[&session];
        if turn.sequence < session.floor.max(turn.floor) {
            return Err(ErrorCode::StaleRequest);
        }
        Ok(session.outcomes.get(&turn.sequence).copied())
    }

    pub(super) fn record(&mut self, session: SessionId, turn: Turn, answered: Answered) {
        let session = self.sessions.get_mut(&session).unwrap();
        session.floor = session.floor.max(turn.floor);
        let floor = session.floor;
        session.outcomes.retain(|&s, _| s >= floor);
        session.outcomes.insert(turn.sequence, answered);
    }
}
