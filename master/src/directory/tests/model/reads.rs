//! What reads must answer, by the model.

use super::copies::Copying;
use super::{Model, Object};
use crate::directory::{Contact, CopyView, Directory, ObjectState, ObjectView, TaskId, Victim};
use std::collections::BTreeSet;
use tidepool_proto::{LogTime, ObjectId, ReplicaId, SegmentId};

impl Model {
    /// Every read answers what the model knows.
    pub(crate) fn check_reads(&self, directory: &Directory, keys: &[&str], groups: &[&str]) {
        for &tenant in self.tenants.keys() {
            for key in keys {
                let expected = self.find(tenant, key.as_bytes());
                directory.with_object(tenant, key.as_bytes(), |view| self.check_view(view, expected));
            }
            for group in groups {
                self.check_group(directory, tenant, group);
            }
        }
        for object in &self.objects {
            directory.with_object_id(object.id, |view| self.check_view(view, Some(object)));
        }
        self.check_lost(directory);
        self.check_victims(directory);
        self.check_space(directory);
        self.check_tenants(directory);
        self.check_copies(directory);
        self.check_tasks(directory);
        let ancestors = directory.ancestors();
        for object in &self.objects {
            assert_eq!(ancestors.history_of(object.id.op()), self.history_of(object.id.op()));
        }
        assert_eq!(directory.counts().objects as usize, self.objects.len());
    }

    pub(super) fn heard(&self, segment: SegmentId) -> bool {
        let node = self.owner(segment);
        self.nodes.iter().any(|n| n.id == node && n.contact == Contact::Heard)
    }

    fn check_view(&self, view: Option<&ObjectView<'_>>, expected: Option<&Object>) {
        assert_eq!(view.map(|v| v.object), expected.map(|o| o.id));
        let (Some(view), Some(object)) = (view, expected) else { return };
        let replicas: Vec<_> = view.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect();
        assert_eq!(replicas, object.replicas);
        assert_eq!((view.tenant, view.key, view.length), (object.tenant, &object.key[..], object.length));
        let ended = object.ended.is_some();
        assert_eq!(view.state, if ended { ObjectState::Complete } else { ObjectState::Processing });
        assert!(view.replicas.iter().all(|r| r.listed == (ended && self.heard(r.segment))), "{view:?}");
        assert_eq!(view.soft_pinned_until, LogTime(object.pinned_until), "{view:?}");
        assert_eq!((view.data_type, view.hard_pinned), (object.data_type, object.hard_pin));
        assert_eq!(view.group.unwrap_or_default(), object.group);
        let made = object.ended.as_ref().map_or(0, |(_, copies)| *copies as usize);
        assert_eq!((view.wanted, view.made), (object.wanted, made));
    }

    fn check_group(&self, directory: &Directory, tenant: crate::directory::TenantId, group: &str) {
        let group = group.as_bytes();
        let members = self.members(tenant, group);
        let readable = |id: &ObjectId| {
            let object = self.object(*id).unwrap();
            object.ended.is_some() && object.replicas.iter().any(|r| self.heard(r.1))
        };
        let lost = self.lost.iter().any(|(t, g, _)| *t == tenant && g == group);
        let view = directory.group(tenant, group, &[]);
        assert_eq!(view.map(|v| v.members), Some(members.len()).filter(|&n| n > 0));
        assert!(view.is_none_or(|v| v.whole == (!lost && members.iter().all(readable))), "{view:?}");
    }

    fn check_lost(&self, directory: &Directory) {
        let groups = &directory.core.read().groups;
        let lost = groups.by_name.iter().flat_map(|((tenant, name), group)| {
            group.lost.iter().map(move |key| (*tenant, name.to_vec(), key.to_vec()))
        });
        assert_eq!(lost.collect::<BTreeSet<_>>(), self.lost);
    }

    fn check_victims(&self, directory: &Directory) {
        let mut victims: Vec<&Object> = self.objects.iter().filter(|o| o.ended.is_some() && !o.hard_pin).collect();
        victims.sort_unstable_by_key(|o| o.id);
        let oldest: Vec<Victim> = super::super::world::victims(directory);
        assert_eq!(
            oldest.iter().map(|v| v.object).collect::<Vec<_>>(),
            victims.iter().map(|o| o.id).collect::<Vec<_>>()
        );
        for (victim, object) in oldest.iter().zip(victims) {
            assert_eq!((victim.tenant, victim.soft_pinned_until.0), (object.tenant, object.pinned_until));
            let mut companions = self.members(object.tenant, &object.group);
            companions.retain(|&id| id != object.id && !object.group.is_empty());
            assert_eq!(directory.companions(victim.object), companions);
        }
    }

    fn check_space(&self, directory: &Directory) {
        let expected: BTreeSet<ReplicaId> = self.retired.iter().filter(|r| r.clean).map(|r| r.replica).collect();
        let clean: BTreeSet<ReplicaId> = directory.reclaimable(None, usize::MAX).iter().map(|r| r.replica).collect();
        assert_eq!(clean, expected);
        for node in &self.nodes {
            let of_node = self.retired.iter().filter(|r| !r.clean && self.owner(r.segment) == node.id);
            let expected: BTreeSet<ReplicaId> = of_node.map(|r| r.replica).collect();
            assert_eq!(directory.unclean(node.id, usize::MAX).into_iter().collect::<BTreeSet<_>>(), expected);
        }
        for segment in &self.segments {
            let view = directory.segment(segment.id).unwrap();
            let free = self.free(segment, &[]);
            assert_eq!(view.draining, segment.draining);
            assert_eq!(view.free, free.iter().map(|f| f.0).sum::<u64>());
            assert_eq!(view.largest_free, free.last().map_or(0, |f| f.0));
        }
    }

    fn check_copies(&self, directory: &Directory) {
        let copies: Vec<CopyView> = directory.copies(None, usize::MAX);
        assert_eq!(copies.len(), self.copies.len());
        for (copy, view) in self.copies.iter().zip(copies) {
            assert_eq!((view.replica, view.object, view.task), (copy.replica, copy.object, copy.task));
            assert_eq!((view.segment, view.offset, view.node), (copy.segment, copy.offset, self.owner(copy.segment)));
            assert_eq!((view.instead_of, view.started), (copy.instead_of, LogTime(copy.started)));
        }
        let ended = |o: &&Object| o.ended.is_some();
        let degraded = self.objects.iter().filter(ended).filter(|o| o.replicas.len() < o.wanted);
        let degraded: BTreeSet<ObjectId> = degraded.map(|o| o.id).collect();
        assert_eq!(directory.degraded(None, usize::MAX).into_iter().collect::<BTreeSet<_>>(), degraded);
        let extra = self.objects.iter().filter(ended).filter(|o| o.replicas.len() > o.wanted);
        let extra: BTreeSet<ObjectId> = extra.map(|o| o.id).collect();
        assert_eq!(directory.extra(None, usize::MAX).into_iter().collect::<BTreeSet<_>>(), extra);
        self.check_copy_indexes(directory);
    }

    /// What is asked by task, node and object is what there is.
    fn check_copy_indexes(&self, directory: &Directory) {
        let ids = |of: &dyn Fn(&&Copying) -> bool| -> Vec<ReplicaId> {
            self.copies.iter().filter(of).map(|c| c.replica).collect()
        };
        let views = |views: Vec<CopyView>| views.into_iter().map(|v| v.replica).collect::<Vec<_>>();
        for task in self.tasks.iter().map(|t| t.id).chain([TaskId(0)]) {
            assert_eq!(views(directory.copies_of_task(task)), ids(&|c| c.task == task));
        }
        for node in &self.nodes {
            let expected = ids(&|c| self.owner(c.segment) == node.id);
            assert_eq!(views(directory.copies_to_node(node.id, None, usize::MAX)), expected);
        }
        for object in &self.objects {
            assert_eq!(directory.copies_of(object.id), ids(&|c| c.object == object.id).len());
        }
        for time in self.copies.iter().map(|c| c.started) {
            assert_eq!(views(directory.copies_started_by(LogTime(time), usize::MAX)), ids(&|c| c.started <= time));
        }
        for segment in &self.segments {
            let all = directory.replicas_in(segment.id, 0, usize::MAX).len() as u64;
            let here = |o: &Object| o.replicas.iter().filter(|r| r.1 == segment.id).count();
            let coming = ids(&|c| c.segment == segment.id).len();
            let expected = self.objects.iter().map(here).sum::<usize>() + coming;
            assert_eq!((all, directory.replica_count(segment.id)), (expected as u64, expected as u64));
        }
    }

    fn check_tasks(&self, directory: &Directory) {
        let tasks = directory.tasks();
        assert_eq!(tasks.len(), self.tasks.len());
        for (task, (id, view)) in self.tasks.iter().zip(tasks) {
            assert_eq!((task.id, task.state, task.done, task.left), (id, view.state, view.done, view.left));
            let asked = &view.asked;
            assert_eq!((task.kind, &task.sources, task.unmount), (asked.kind, &asked.sources, asked.unmount));
            assert_eq!((task.concurrency, task.done_bytes), (asked.concurrency, view.done_bytes));
        }
        let running: Vec<TaskId> = directory.running_tasks().into_iter().map(|(id, _)| id).collect();
        assert_eq!(running, self.running());
    }

    fn check_tenants(&self, directory: &Directory) {
        let views = directory.tenants();
        assert_eq!(views.len(), self.tenants.len());
        for (view, (&tenant, (name, quota))) in views.iter().zip(&self.tenants) {
            assert_eq!((view.tenant, &*view.name, view.quota), (tenant, &**name, *quota));
            let own: Vec<&Object> = self.objects.iter().filter(|o| o.tenant == tenant).collect();
            assert_eq!(view.objects as usize, own.len());
            assert_eq!(view.bytes, own.iter().map(|o| self.held_bytes(o)).sum::<u64>());
            assert_eq!(directory.tenant(name), Some(tenant));
        }
    }
}
