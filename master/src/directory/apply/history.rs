//! A directory that goes on in another cluster (I1).

use super::end::Ends;
use super::{Applied, Apply};
use crate::directory::ancestors::Ancestor;
use crate::directory::limits::HISTORIES_FEATURE_LEVEL;
use crate::directory::op::{Contact, ReplicaEnd};
use crate::directory::outcome::Outcome;
use tidepool_proto::{ClusterId, History, NodeId, ObjectId, ReplicaId};

impl Apply<'_> {
    /// What is COMPLETE stays as it is. What was under way was granted by masters that are gone: their grants are signed in
    /// their history and open nothing in this one, so all of it ends as unclean and its space waits for the datanodes' fences.
    pub(super) fn begin_history(&mut self, cluster: ClusterId, history: History) -> Applied {
        let core = &mut *self.core;
        let ancestor = Ancestor { cluster, history, until: self.at.log_index() };
        let mut ancestors = (*core.ancestors).clone();
        ancestors.push(ancestor)?;
        core.ancestors = ancestors.into();
        core.digest.add(|c| c.ancestor(&ancestor));
        if core.feature_level < HISTORIES_FEATURE_LEVEL {
            core.set_feature_level(HISTORIES_FEATURE_LEVEL);
        }
        let heard = core.nodes.by_id.iter().filter(|(_, node)| node.contact == Contact::Heard);
        let heard: Vec<NodeId> = heard.map(|(&id, _)| id).collect();
        for id in heard {
            self.note_contact(id, Contact::Suspect);
        }
        let open: Vec<ObjectId> = self.core.open.keys().copied().collect();
        open.into_iter().for_each(|object| self.drop_put(object, &Ends::unknown()));
        let copies: Vec<ReplicaId> = self.core.copies.by_replica.keys().copied().collect();
        for replica in copies {
            self.copy_end(replica, ReplicaEnd::Unknown).expect("just listed");
        }
        self.publish();
        Ok(Outcome::Done)
    }
}
