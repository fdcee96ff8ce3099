//! Pins and tenants.

use super::put::{check_soft_pin, shown};
use super::{Applied, Apply, Sign, invalid};
use crate::directory::limits::{TENANT_NAME_BYTES_MAX, TENANTS_MAX};
use crate::directory::objects::Record;
use crate::directory::op::{Quota, SoftPinAction, TenantId};
use crate::directory::outcome::Outcome;
use tidepool_proto::{Error, ErrorCode, LogTime, ObjectId};

impl Apply<'_> {
    pub(super) fn set_pin(&mut self, object: ObjectId, action: SoftPinAction) -> Applied {
        let Some(&at) = self.core.index.get(&object) else {
            return Err(Error::new(ErrorCode::ObjectNotFound, format!("object {object} is not in the directory")));
        };
        let (key, complete) = self.with_record(at, |r| (shown(&r.key), r.is_complete()));
        check_soft_pin(key.as_bytes(), action)?;
        if !complete {
            return Err(Error::new(ErrorCode::NotReady, format!("key '{key}' is being put; its writer may pin it")));
        }
        let until = match action {
            SoftPinAction::Preserve => return Ok(Outcome::Done),
            SoftPinAction::Enable { ttl_ms } => LogTime(self.core.clock.0.saturating_add(ttl_ms)),
            SoftPinAction::Disable => LogTime(0),
        };
        let mut shard = self.shards.write(at.shard());
        let record: &mut Record = shard.record_mut(at.slot()).expect("the index names a record");
        self.digest_record(at, record, Sign::Sub);
        record.soft_pin(until);
        self.digest_record(at, record, Sign::Add);
        Ok(Outcome::Done)
    }

    pub(super) fn set_tenant(&mut self, name: &str, quota: Quota) -> Applied {
        check_tenant_name(name)?;
        let core = &mut *self.core;
        if let Some(&id) = core.tenants.by_name.get(name) {
            let tenant = core.tenants.get_mut(id).expect("by_name names a tenant");
            core.digest.sub(|c| c.tenant(id, tenant));
            tenant.quota = quota;
            core.digest.add(|c| c.tenant(id, tenant));
            return Ok(Outcome::Tenant { tenant: id });
        }
        if core.tenants.len() >= TENANTS_MAX {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("tenant '{name}': {TENANTS_MAX} tenants are registered, the limit; drop one first"),
            ));
        }
        let id = TenantId(core.tenants.next);
        if id.0 == u16::MAX {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("tenant '{name}': {} tenants were registered in the life of this cluster, the limit", u16::MAX),
            ));
        }
        core.digest.sub(|c| c.next_tenant(core.tenants.next));
        core.tenants.insert(id, name.into(), quota);
        core.digest.add(|c| c.next_tenant(core.tenants.next));
        let tenant = core.tenants.get(id).expect("just inserted");
        core.digest.add(|c| c.tenant(id, tenant));
        self.publish();
        Ok(Outcome::Tenant { tenant: id })
    }

    pub(super) fn drop_tenant(&mut self, name: &str) -> Applied {
        let core = &mut *self.core;
        let Some(&id) = core.tenants.by_name.get(name) else {
            return Err(Error::new(ErrorCode::TenantNotRegistered, format!("tenant '{name}' is not registered")));
        };
        let tenant = core.tenants.get(id).expect("by_name names a tenant");
        if id == TenantId::DEFAULT {
            return Err(invalid("the default tenant is always there".into()));
        }
        if tenant.objects > 0 {
            return Err(Error::new(
                ErrorCode::TenantNotEmpty,
                format!("tenant '{name}' holds {} objects; remove them first", tenant.objects),
            ));
        }
        let gone = core.tenants.remove(id).expect("just seen");
        core.digest.sub(|c| c.tenant(id, &gone));
        self.publish();
        Ok(Outcome::Done)
    }
}

/// Names are shown in logs and sent in requests: no control characters, and a leading `_` is kept for our own.
fn check_tenant_name(name: &str) -> Result<(), Error> {
    let fits = (1..=TENANT_NAME_BYTES_MAX).contains(&name.len());
    if fits && !name.starts_with('_') && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(invalid(format!(
        "tenant '{}': a name has 1 to {TENANT_NAME_BYTES_MAX} bytes, no control characters and no leading '_'",
        shown(name.as_bytes())
    )))
}
