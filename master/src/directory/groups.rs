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
    /// Of them, those being put; follows from the records.
    pub(super) unfinished: u32,
    /// Upserts under way; follow from the records.
    pub(super) upserts: BTreeSet<ObjectId>,
    /// Keys of members whose put failed or whose last copy is gone: without them the group is of no use. State.
    pub(super) lost: BTreeSet<Box<[u8]>>,
}

impl Group {
    /// Nothing is lost of it and no member is being put: readable as a whole, unless nodes are suspect.
    pub(super) fn is_finished(&self) -> bool {
        self.lost.is_empty() && self.unfinished == 0
    }
}

/// As what an object comes into its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Joins {
    /// COMPLETE.
    Finished,
    /// Being put.
    Put,
    /// Being put, to replace a member.
    Upsert,
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

    /// Adds an object: a put, or an upsert of a member.
    pub(super) fn join(&mut self, name: GroupName, object: ObjectId, joins: Joins) {
        let group = self.by_name.entry(name).or_default();
        let is_new = match joins {
            Joins::Finished => group.members.insert(object),
            Joins::Put => {
                group.unfinished += 1;
                group.members.insert(object)
            }
            Joins::Upsert => group.upserts.insert(object),
        };
        assert!(is_new, "object {object} joins its group twice");
    }

    /// A put of a member has ended.
    pub(super) fn finish(&mut self, name: &GroupName) {
        let group = self.by_name.get_mut(name).expect("the group of a put is there");
        group.unfinished = group.unfinished.checked_sub(1).expect("a member was being put");
    }

    /// An upsert became what is found under its key; `Joins::Put`: it is still being put.
    pub(super) fn promote(&mut self, name: &GroupName, object: ObjectId, joins: Joins) {
        let group = self.by_name.get_mut(name).expect("the group of an upsert is there");
        group.unfinished += u32::from(joins == Joins::Put);
        assert!(group.upserts.remove(&object) && group.members.insert(object), "object {object} is promoted twice");
    }

    /// Takes an object out, finished or not. The keys that were lost go with the last one; they are answered.
    pub(super) fn leave(&mut self, name: &GroupName, object: ObjectId, is_finished: bool) -> BTreeSet<Box<[u8]>> {
        let group = self.by_name.get_mut(name).expect("the group of an object is there");
        let was_member = group.members.remove(&object);
        assert!(was_member || group.upserts.remove(&object), "object {object} is not in its group");
        if was_member && !is_finished {
            group.unfinished = group.unfinished.checked_sub(1).expect("a member was being put");
        }
        if group.members.is_empty() && group.upserts.is_empty() {
            return self.by_name.remove(name).expect("just seen").lost;
        }
        BTreeSet::new()
    }
}
