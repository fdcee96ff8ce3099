//! Nodes, segments and sessions of the model.

use super::{Model, Node, Object, Segment};
use crate::directory::{Contact, Outcome, SessionId, Uuid};
use std::collections::BTreeSet;
use tidepool_proto::{ErrorCode, History, Incarnation, NodeId, ObjectId, OpId, SegmentId};

impl Model {
    pub(super) fn check_life(&self, node: NodeId, life: Incarnation) -> Result<(), ErrorCode> {
        match self.nodes.iter().find(|n| n.id == node) {
            None => Err(ErrorCode::NodeUnknown),
            Some(n) if n.life != life => Err(ErrorCode::Fenced),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn owner(&self, segment: SegmentId) -> NodeId {
        self.segments.iter().find(|s| s.id == segment).unwrap().node
    }

    pub(super) fn register(&mut self, at: OpId, uuid: &Uuid, process: &Uuid, host: &str) -> Result<Outcome, ErrorCode> {
        let life = Incarnation(at.0);
        let Some(i) = self.nodes.iter().position(|n| n.uuid == *uuid) else {
            let (id, host, processes) = (NodeId(at.0), host.to_owned(), vec![*process]);
            self.nodes.push(Node { uuid: *uuid, processes, id, life, host, contact: Contact::Heard });
            return Ok(Outcome::Registered { node: id, incarnation: life });
        };
        let id = self.nodes[i].id;
        if self.nodes[i].processes.last() == Some(process) {
            return Ok(Outcome::Registered { node: id, incarnation: self.nodes[i].life });
        }
        if self.nodes[i].processes.contains(process) {
            return Err(ErrorCode::Fenced);
        }
        self.drop_segments(|s| s.node == id);
        let node = &mut self.nodes[i];
        node.processes.push(*process);
        (node.life, node.host, node.contact) = (life, host.to_owned(), Contact::Heard);
        Ok(Outcome::Registered { node: id, incarnation: life })
    }

    pub(super) fn mount(
        &mut self,
        at: OpId,
        node: NodeId,
        life: Incarnation,
        name: &str,
        bytes: u64,
    ) -> Result<Outcome, ErrorCode> {
        self.check_life(node, life)?;
        match self.segments.iter().find(|s| s.node == node && s.name == name) {
            Some(s) if s.capacity == bytes => return Ok(Outcome::Mounted { segment: s.id }),
            Some(_) => return Err(ErrorCode::SegmentAlreadyExists),
            None => {}
        }
        let id = SegmentId(at.0);
        self.segments.push(Segment { id, node, name: name.to_owned(), capacity: bytes, draining: false });
        Ok(Outcome::Mounted { segment: id })
    }

    /// Segments go with what lies in them; then what is left of groups that lost a member.
    pub(super) fn drop_segments(&mut self, which: impl Fn(&Segment) -> bool) -> Outcome {
        let gone: BTreeSet<SegmentId> = self.segments.iter().filter(|s| which(s)).map(|s| s.id).collect();
        self.segments.retain(|s| !gone.contains(&s.id));
        self.retired.retain(|r| !gone.contains(&r.segment));
        let copies = self.copies.len();
        self.copies.retain(|c| !gone.contains(&c.segment));
        if self.copies.len() < copies {
            self.events.insert("a copy is lost with its segment");
        }
        let first = self.retired.len();
        let mut replicas = 0;
        for object in &mut self.objects {
            let had = object.replicas.len();
            object.replicas.retain(|r| !gone.contains(&r.1));
            replicas += (had - object.replicas.len()) as u64;
        }
        let lost: Vec<Object> = self.objects.iter().filter(|o| o.replicas.is_empty()).cloned().collect();
        for object in &lost {
            let object = self.take(object.id);
            if object.replaces.is_none() {
                self.note_lost(&object);
            }
        }
        assert!(self.retired[first..].iter().all(|r| !gone.contains(&r.segment)));
        for object in lost.iter().filter(|o| o.ended.is_some()) {
            self.bury(object);
        }
        Outcome::Dropped { replicas, objects: lost.len() as u64 }
    }

    pub(super) fn open_session(&mut self, at: OpId, uuid: Uuid) -> Outcome {
        let session = *self.session_uuids.entry(uuid).or_insert(SessionId(at.0));
        Outcome::Opened { session, floor: self.sessions.entry(session).or_default().floor }
    }

    pub(super) fn expire_sessions(&mut self, sessions: &[SessionId]) -> Outcome {
        let busy = |s: &SessionId| self.objects.iter().any(|o| o.ended.is_none() && o.session == *s);
        let idle: Vec<SessionId> = sessions.iter().copied().filter(|s| !busy(s)).collect();
        let known = idle.iter().filter(|s| self.sessions.remove(s).is_some()).count() as u64;
        self.session_uuids.retain(|_, s| self.sessions.contains_key(s));
        Outcome::Expired { sessions: known }
    }

    /// Nobody is heard, nothing is under way any more, and what is there belongs to the history before.
    pub(super) fn begin_history(&mut self, at: OpId, before: History) -> Result<Outcome, ErrorCode> {
        if before.0 == 0 {
            return Err(ErrorCode::InvalidParams);
        }
        self.histories.push((before, at.log_index()));
        self.feature_level = self.feature_level.max(2);
        self.nodes.iter_mut().for_each(|n| n.contact = Contact::Suspect);
        let open: BTreeSet<ObjectId> = self.objects.iter().filter(|o| o.ended.is_none()).map(|o| o.id).collect();
        for id in open {
            self.events.insert("a put ends with its history");
            self.drop_put(id, &BTreeSet::new());
        }
        for copy in std::mem::take(&mut self.copies) {
            self.events.insert("a copy ends with its history");
            self.give_up(&copy);
        }
        Ok(Outcome::Done)
    }

    /// The history that an id belongs to; none: the present one.
    pub(super) fn history_of(&self, id: OpId) -> Option<History> {
        self.histories.iter().find(|(_, until)| id.log_index() < *until).map(|(history, _)| *history)
    }
}
