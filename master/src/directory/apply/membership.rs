//! Nodes, segments and sessions coming and going.

use super::{Applied, Apply, Charge, Sign, check_count, invalid};
use crate::directory::free_space::FreeSpace;
use crate::directory::groups::GroupName;
use crate::directory::limits::{
    ADDRESS_BYTES_MAX, HOST_ID_BYTES_MAX, NODES_MAX, POOL_BYTES_MAX, SEGMENT_BYTES_MAX, SEGMENT_NAME_BYTES_MAX,
    SEGMENTS_PER_NODE_MAX, SESSIONS_MAX,
};
use crate::directory::nodes::{EARLIER_PROCESSES_MAX, Node};
use crate::directory::objects::{Record, SegmentSlot};
use crate::directory::op::{Contact, SessionId, Uuid};
use crate::directory::outcome::Outcome;
use crate::directory::sessions::Session;
use crate::directory::space::{Segment, Use};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tidepool_proto::object::EXTENT_ALIGN;
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, SegmentId};

/// What went with a segment or a node.
#[derive(Default)]
struct Losses {
    replicas: u64,
    objects: u64,
    /// Groups that lost a member for good.
    groups: BTreeSet<GroupName>,
}

impl Apply<'_> {
    pub(super) fn register_node(&mut self, node_uuid: &Uuid, process: &Uuid, address: &str, host: &str) -> Applied {
        check_text("address", address, 1, ADDRESS_BYTES_MAX)?;
        check_text("host id", host, 1, HOST_ID_BYTES_MAX)?;
        let incarnation = Incarnation::from(self.at);
        let Some(&id) = self.core.nodes.by_uuid.get(node_uuid) else {
            return self.register_new_node(node_uuid, process, address, host);
        };
        let node = self.core.nodes.by_id.get_mut(&id).expect("by_uuid names a node");
        if node.process_uuid == *process {
            return Ok(Outcome::Registered { node: id, incarnation: node.incarnation });
        }
        if node.earlier_processes.contains(process) {
            return Err(Error::new(
                ErrorCode::Fenced,
                format!("node {id}: a newer process is registered as {}; this one must exit", node.incarnation),
            ));
        }
        let losses = self.drop_segments(id);
        self.bury_groups(&losses);
        let core = &mut *self.core;
        let node = core.nodes.by_id.get_mut(&id).expect("by_uuid names a node");
        core.digest.sub(|c| c.node(id, node));
        if node.earlier_processes.len() == EARLIER_PROCESSES_MAX {
            node.earlier_processes.pop_front();
        }
        node.earlier_processes.push_back(node.process_uuid);
        node.process_uuid = *process;
        node.incarnation = incarnation;
        node.address = address.into();
        node.host_id = host.into();
        node.contact = Contact::Heard;
        core.digest.add(|c| c.node(id, node));
        self.publish();
        Ok(Outcome::Registered { node: id, incarnation })
    }

    fn register_new_node(&mut self, node_uuid: &Uuid, process: &Uuid, address: &str, host: &str) -> Applied {
        let core = &mut *self.core;
        if core.nodes.by_id.len() >= NODES_MAX {
            return Err(exhausted(format!("{NODES_MAX} nodes are registered, the limit; drop one first")));
        }
        let id = NodeId(self.at.0);
        let node = Node {
            node_uuid: *node_uuid,
            process_uuid: *process,
            incarnation: Incarnation::from(self.at),
            address: address.into(),
            host_id: host.into(),
            contact: Contact::Heard,
            earlier_processes: VecDeque::new(),
            segments: BTreeSet::new(),
        };
        core.digest.add(|c| c.node(id, &node));
        core.nodes.by_uuid.insert(*node_uuid, id);
        core.nodes.by_id.insert(id, node);
        self.publish();
        Ok(Outcome::Registered { node: id, incarnation: Incarnation::from(self.at) })
    }

    pub(super) fn mount_segment(&mut self, node: NodeId, life: Incarnation, name: &str, bytes: u64) -> Applied {
        let core = &mut *self.core;
        let owner = core.nodes.current(node, life)?;
        check_text("segment name", name, 1, SEGMENT_NAME_BYTES_MAX)?;
        if bytes == 0 || bytes > SEGMENT_BYTES_MAX || !bytes.is_multiple_of(EXTENT_ALIGN) {
            return Err(invalid(format!(
                "segment '{name}' of node {node} has {bytes} bytes; it must be a multiple of {EXTENT_ALIGN} up to {SEGMENT_BYTES_MAX}"
            )));
        }
        for id in &owner.segments {
            let segment = core.space.segment(core.space.by_id[id]);
            if *segment.name != *name {
                continue;
            }
            if segment.capacity == bytes {
                return Ok(Outcome::Mounted { segment: *id });
            }
            return Err(Error::new(
                ErrorCode::SegmentAlreadyExists,
                format!("segment '{name}' of node {node} is mounted with {} bytes, not {bytes}", segment.capacity),
            ));
        }
        if owner.segments.len() >= SEGMENTS_PER_NODE_MAX {
            return Err(exhausted(format!("node {node} has {SEGMENTS_PER_NODE_MAX} segments mounted, the limit")));
        }
        if bytes > POOL_BYTES_MAX - core.space.capacity() {
            return Err(exhausted(format!(
                "segment '{name}' of node {node} would bring the pool above {POOL_BYTES_MAX} bytes, the limit"
            )));
        }
        let id = SegmentId::from(self.at);
        owner.segments.insert(id);
        let segment = Segment {
            id,
            node,
            incarnation: life,
            name: name.into(),
            host_id: owner.host_id.clone(),
            contact: owner.contact,
            draining: false,
            capacity: bytes,
            free: FreeSpace::new(id, bytes),
            processing: 0,
            complete: 0,
            retired: 0,
            used: BTreeMap::new(),
        };
        core.digest.add(|c| c.segment(&segment));
        core.space.mount(segment);
        self.publish();
        Ok(Outcome::Mounted { segment: id })
    }

    pub(super) fn unmount_segment(&mut self, node: NodeId, life: Incarnation, segment: SegmentId) -> Applied {
        let owner = self.core.nodes.current(node, life)?;
        if !owner.segments.contains(&segment) {
            return Err(Error::new(
                ErrorCode::SegmentNotFound,
                format!("node {node} has no segment {segment} mounted"),
            ));
        }
        let slot = self.core.space.slot(segment)?;
        let mut losses = Losses::default();
        self.drop_segment(slot, &mut losses);
        self.bury_groups(&losses);
        self.publish();
        Ok(Outcome::Dropped { replicas: losses.replicas, objects: losses.objects })
    }

    pub(super) fn set_contact(&mut self, node: NodeId, life: Incarnation, contact: Contact) -> Applied {
        let core = &mut *self.core;
        let entry = core.nodes.current(node, life)?;
        if entry.contact == contact {
            return Ok(Outcome::Done);
        }
        self.note_contact(node, contact);
        self.publish();
        Ok(Outcome::Done)
    }

    /// Whether a registered node is heard; publishing it is the caller's.
    pub(super) fn note_contact(&mut self, node: NodeId, contact: Contact) {
        let core = &mut *self.core;
        let entry = core.nodes.by_id.get_mut(&node).expect("the caller found it");
        core.digest.sub(|c| c.node(node, entry));
        entry.contact = contact;
        core.digest.add(|c| c.node(node, entry));
        core.space.set_contact(node, contact);
    }

    pub(super) fn drop_node(&mut self, node: NodeId, life: Incarnation) -> Applied {
        self.core.nodes.current(node, life)?;
        let losses = self.drop_segments(node);
        let core = &mut *self.core;
        let gone = core.nodes.by_id.remove(&node).expect("it is current");
        core.nodes.by_uuid.remove(&gone.node_uuid);
        core.digest.sub(|c| c.node(node, &gone));
        self.bury_groups(&losses);
        self.publish();
        Ok(Outcome::Dropped { replicas: losses.replicas, objects: losses.objects })
    }

    pub(super) fn open_session(&mut self, client_uuid: &Uuid, host: &str) -> Applied {
        check_text("host id", host, 0, HOST_ID_BYTES_MAX)?;
        let core = &mut *self.core;
        if let Some(&session) = core.sessions.by_uuid.get(client_uuid) {
            return Ok(Outcome::Opened { session, floor: core.sessions.by_id[&session].floor });
        }
        if core.sessions.by_id.len() >= SESSIONS_MAX {
            return Err(exhausted(format!("{SESSIONS_MAX} client sessions are open, the limit")).retry_after(1000));
        }
        let id = SessionId::from(self.at);
        let session = Session {
            client_uuid: *client_uuid,
            host_id: host.into(),
            floor: 0,
            outcomes: BTreeMap::new(),
            open_grants: 0,
            open_bytes: 0,
        };
        core.parts.sessions.add(&id, |c| c.session(id, &session));
        core.sessions.by_uuid.insert(*client_uuid, id);
        core.sessions.by_id.insert(id, session);
        Ok(Outcome::Opened { session: id, floor: 0 })
    }

    pub(super) fn expire_sessions(&mut self, sessions: &[SessionId]) -> Applied {
        check_count("sessions", sessions.len())?;
        let core = &mut *self.core;
        let mut expired = 0;
        for &id in sessions {
            // One that put something meanwhile stays.
            if core.sessions.by_id.get(&id).is_none_or(|session| session.open_grants > 0) {
                continue;
            }
            let session = core.sessions.by_id.remove(&id).expect("just seen");
            core.sessions.by_uuid.remove(&session.client_uuid);
            core.parts.sessions.sub(&id, |c| c.session(id, &session));
            for (&sequence, &removal) in &session.outcomes {
                core.parts.sessions.sub(&id, |c| c.answered(id, sequence, removal));
            }
            expired += 1;
        }
        Ok(Outcome::Expired { sessions: expired })
    }

    /// Drops all segments of a node: their memory is gone, so their replicas are.
    fn drop_segments(&mut self, node: NodeId) -> Losses {
        let mut losses = Losses::default();
        let segments = self.core.nodes.by_id.get(&node).map(|n| n.segments.clone()).unwrap_or_default();
        for segment in segments {
            let slot = self.core.space.by_id[&segment];
            self.drop_segment(slot, &mut losses);
        }
        losses
    }

    fn drop_segment(&mut self, slot: SegmentSlot, losses: &mut Losses) {
        let retired = self.core.retired.iter().filter(|(_, r)| r.segment == slot);
        for id in retired.map(|(&id, _)| id).collect::<Vec<_>>() {
            let retired = self.core.forget_retired(id).expect("just listed");
            self.core.space.give(slot, retired.offset, retired.bytes, Use::Retired);
        }
        self.lose_copies(slot);
        let located: Vec<_> = self.core.space.segment(slot).used.values().copied().collect();
        for at in located {
            let object = self.with_record(at, |r| r.object);
            losses.replicas += 1;
            self.let_readers_in(1);
            if let Some(gone) = self.lose_replica(object, slot) {
                losses.objects += 1;
                // A put that is lost may be put again; a member that was there is missed at once.
                losses.groups.extend(gone.group_name().filter(|_| gone.is_complete()));
            }
        }
        let core = &mut *self.core;
        let gone = core.space.unmount(slot);
        core.digest.sub(|c| c.segment(&gone));
        if let Some(node) = core.nodes.by_id.get_mut(&gone.node) {
            node.segments.remove(&gone.id);
        }
    }

    /// What is left of groups that lost a member goes too. Called when no segment is being dropped.
    fn bury_groups(&mut self, losses: &Losses) {
        losses.groups.iter().for_each(|name| self.bury_group(name));
    }

    /// Takes an object's replica in a segment away. The object, if it went with its last one.
    fn lose_replica(&mut self, object: ObjectId, slot: SegmentSlot) -> Option<Record> {
        let at = self.core.index[&object];
        let only = self.with_record(at, |r| r.replicas.len() == 1);
        if only {
            let is_upsert = self.core.open.get(&object).is_some_and(|open| open.replaces.is_some());
            let record = self.take_object(object).expect("it is in the index");
            let used_for = if record.is_complete() { Use::Complete } else { Use::Processing };
            if !is_upsert {
                self.note_lost(&record);
            }
            self.core.space.give(slot, record.replicas[0].offset, record.extent_bytes(), used_for);
            return Some(record);
        }
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        self.digest_record(at, record, Sign::Sub);
        let place = record.replicas.iter().position(|r| r.segment == slot).expect("the segment names the object");
        let replica = record.replicas.remove(place);
        self.digest_record(at, record, Sign::Add);
        let (bytes, complete, tenant) = (record.extent_bytes(), record.is_complete(), record.tenant);
        self.core.note_copies(record);
        drop(shard);
        let used_for = if complete { Use::Complete } else { Use::Processing };
        self.core.space.give(slot, replica.offset, bytes, used_for);
        self.charge(tenant, Charge::Return { bytes, objects: 0 });
        let core = &mut *self.core;
        if let Some(open) = core.open.get(&object)
            && let Some(session) = core.sessions.by_id.get_mut(&open.session)
        {
            session.open_bytes -= bytes;
        }
        None
    }

    /// Shows readers the nodes and segments as they are now.
    pub(super) fn publish(&mut self) {
        *self.topology.write() = self.core.topology();
    }
}

fn check_text(what: &str, text: &str, min: usize, max: usize) -> Result<(), Error> {
    if (min..=max).contains(&text.len()) {
        return Ok(());
    }
    Err(invalid(format!("{what} has {} bytes; it must have {min} to {max}", text.len())))
}

fn exhausted(message: String) -> Error {
    Error::new(ErrorCode::ResourceExhausted, message)
}
