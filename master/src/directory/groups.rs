//! Groups: objects that are only useful together. They are evicted together, and exist together.

use super::op::TenantId;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::ObjectId;

/// One group. It is there as long as it has a member or an upsert of one.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Group {
    /// Objects that can be found under their keys; follow from the records.
    pub(super) members: BTreeSet<ObjectId>,
    /// Upserts under way; follow from the records.
    pub(super) upserts: BTreeSet<ObjectId>,
    /// Keys of members whose put failed or whose last copy is gone: without them the group is of no use. State.
    pub(super) lost: BTreeSet<Box<[u8]>>,
}

/// A group's name within its tenant.
pub(super) type GroupName = (TenantId, Arc<[u8]>);

/// All groups, by name.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Groups {
    pub(super) by_name: BTreeMap<GroupName, Group>,
}

impl Groups {
    pub(super) fn get(&self, name: &GroupName) -> Option<&Group> {
        self.by_name.get(name)
    }

    /// The name as the members share it, or a new one.
    pub(super) fn shared_name(&self, tenant: TenantId, name: &[u8]) -> Arc<[u8]> {
        let name: Arc<[u8]> = name.into();
        match self.by_name.get_key_value(&(tenant, name.clone())) {
            Some(((_, shared), _)) => shared.clone(),
            None => name,
        }
    }

    /// Adds an object.
    pub(super) fn join(&mut self, name: GroupName, object: ObjectId, is_upsert: bool) {
        let group = self.by_name.entry(name).or_default();
        let set = if is_upsert { &mut group.upserts } else { &mut group.members };
        assert!(set.insert(object), "object {object} joins its group twice");
    }

    /// An upsert became what is found under its key.
    pub(super) fn promote(&mut self, name: &GroupName, object: ObjectId) {
        let group = self.by_name.get_mut(name).expect("the group of an upsert is there");
        assert!(group.upserts.remove(&object) && group.members.insert(object), "object {object} is promoted twice");
    }

    /// Takes an object out. The keys that were lost go with the last one; they are answered.
    pub(super) fn leave(&mut self, name: &GroupName, object: ObjectId) -> BTreeSet<Box<[u8]>> {
        let group = self.by_name.get_mut(name).expect("the group of an object is there");
        assert!(group.members.remove(&object) || group.upserts.remove(&object), "object {object} is not in its group");
        if group.members.is_empty() && group.upserts.is_empty() {
            return self.by_name.remove(name).expect("just seen").lost;
        }
        BTreeSet::new()
    }
}
