//! Tenants: name spaces with quotas, and what each of them holds.

use super::audit::Account;
use super::op::{Quota, TenantId};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidepool_proto::planted;

/// One tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tenant {
    pub(super) name: Arc<str>,
    pub(super) quota: Quota,
    /// Extents of its objects, open ones included, and the objects; follow from the records.
    pub(super) bytes: u64,
    pub(super) objects: u64,
    /// Extents of those that are pinned for good, without what is being copied; follows from the records.
    pub(super) hard_pinned_bytes: u64,
}

impl Tenant {
    /// Whether it has a limit.
    pub(super) fn has_quota(&self) -> bool {
        self.quota.bytes != 0 || self.quota.objects != 0
    }

    /// What it holds.
    pub(super) fn account(&self) -> Account {
        Account { bytes: self.bytes, objects: self.objects, hard_pinned_bytes: self.hard_pinned_bytes }
    }

    /// Whether it may hold this much.
    pub(super) fn allows(&self, bytes: u64, objects: u64) -> bool {
        let below = |value: u64, quota: u64| quota == 0 || value <= quota;
        planted!(OverQuota) || (below(bytes, self.quota.bytes) && below(objects, self.quota.objects))
    }
}

/// All tenants, by number and by name. The default one has number 0 and is always there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tenants {
    by_id: Vec<Option<Tenant>>,
    /// The number of the next one: none is used twice, so that a request under way never lands in another name space.
    pub(super) next: u16,
    pub(super) by_name: BTreeMap<Arc<str>, TenantId>,
}

impl Tenants {
    /// The default tenant without a quota.
    pub(super) fn new() -> Tenants {
        let mut tenants = Tenants { by_id: Vec::new(), next: 0, by_name: BTreeMap::new() };
        tenants.insert(TenantId::DEFAULT, "default".into(), Quota::default());
        tenants
    }

    pub(super) fn get(&self, id: TenantId) -> Option<&Tenant> {
        self.by_id.get(usize::from(id.0))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: TenantId) -> Option<&mut Tenant> {
        self.by_id.get_mut(usize::from(id.0))?.as_mut()
    }

    /// All of them, by number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TenantId, &Tenant)> {
        self.by_id.iter().enumerate().filter_map(|(id, tenant)| Some((TenantId(id as u16), tenant.as_ref()?)))
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Adds a tenant that holds nothing.
    pub(super) fn insert(&mut self, id: TenantId, name: Arc<str>, quota: Quota) {
        let place = usize::from(id.0);
        if self.by_id.len() <= place {
            self.by_id.resize(place + 1, None);
        }
        assert!(self.by_id[place].is_none() && self.by_name.insert(name.clone(), id).is_none(), "tenant {id:?} exists");
        self.next = self.next.max(id.0 + 1);
        self.by_id[place] = Some(Tenant { name, quota, bytes: 0, objects: 0, hard_pinned_bytes: 0 });
    }

    pub(super) fn remove(&mut self, id: TenantId) -> Option<Tenant> {
        let tenant = self.by_id.get_mut(usize::from(id.0))?.take()?;
        self.by_name.remove(&tenant.name);
        Some(tenant)
    }
}
