//! Tenants, as operators register them and look at them.

use tidepool_proto::{Error, v1};

use super::core::{Service, unexpected};
use crate::directory::{Op, Outcome, Quota};

/// Registers a tenant, or sets its quotas.
pub async fn set(service: &Service, request: &v1::SetTenantRequest) -> Result<(), Error> {
    let quota = Quota { bytes: request.quota_bytes, objects: request.quota_objects, refuse: request.refuse_over_quota };
    let tenure = service.tenure()?;
    match tenure.proposer.commit(Op::SetTenant { name: &request.name, quota }).await? {
        Outcome::Tenant { .. } => Ok(()),
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("set_tenant", &other)),
    }
}

/// Forgets a tenant that holds nothing.
pub async fn drop(service: &Service, request: &v1::DropTenantRequest) -> Result<(), Error> {
    let tenure = service.tenure()?;
    match tenure.proposer.commit(Op::DropTenant { name: &request.name }).await? {
        Outcome::Done => Ok(()),
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("drop_tenant", &other)),
    }
}

/// All tenants and what they hold.
pub async fn list(service: &Service) -> Result<Vec<v1::TenantStatus>, Error> {
    service.barrier().await?;
    let tenants = service.directory().tenants().into_iter().map(|tenant| v1::TenantStatus {
        name: tenant.name.to_string(),
        quota_bytes: tenant.quota.bytes,
        quota_objects: tenant.quota.objects,
        refuse_over_quota: tenant.quota.refuse,
        bytes: tenant.bytes,
        objects: tenant.objects,
    });
    Ok(tenants.collect())
}
