//! `FrozenDirectory`: the state at one log index, written beside the apply loop.
//!
//! A freeze copies no record (M5): it starts an undo list in every shard. Apply notes a record there before it first
//! changes it; who copies ([`Copies`]) prefers what is noted to what is there. So apply pauses for the shards' locks and for
//! what is small (nodes, segments, sessions, retired space), and later pays one copy per record it changes meanwhile.
//!
//! The kept-up digest does not see a record that changed in memory by itself. So the writer sums up what it writes, from the
//! encoded bytes where they are few, and an image whose records are not what the digest says is never completed (M3). Free
//! extents, which are not written, and the length of a copy under way, which is its object's, are left to the auditor.

use super::copies::Copies;
use super::frame::{Frame, Kind, MAGIC, encode_level};
use super::load::read_small;
use super::manifest::{FORMAT_VERSION, Manifest, PartSum};
use super::rows::{
    AncestorRow, Bin, ConfigRow, CopyRow, LostRow, NodeRow, RetiredRow, SegmentRow, SegmentsPart, SessionRow,
    SinceLevel2, TaskRow, TasksPart, TenantRow,
};
use super::shard::{Encoded, References, encode};
use crate::directory::core::Core;
use crate::directory::digest::answered_parts;
use crate::directory::limits::{FEATURE_LEVEL_FIRST, SHARDS};
use crate::directory::objects::Shards;
use serde::Serialize;
use std::io;
use std::sync::Arc;
use tidepool_proto::planted;
use tidepool_raft::Unsound;

/// Where the objects of a freeze are.
#[derive(Debug)]
enum Source {
    /// In the shards, with their undo lists.
    Shards(Copies),
    /// Encoded at the freeze: another freeze held the undo lists, or the system had no thread to give.
    Encoded(Vec<Encoded>),
}

/// Parts of the digest at the freeze, as they were kept up.
#[derive(Debug)]
struct Kept {
    objects: u128,
    retired: u128,
    sessions: u128,
    lost_members: u128,
    rest: u128,
}

/// Whether what was written is what the digest was kept up of.
fn check(part: &str, kept: u128, found: u128) -> io::Result<()> {
    if kept == found {
        return Ok(());
    }
    let why = format!("{part}: the digest kept up is {kept:032x}, that of the records {found:032x}");
    Err(Unsound(why).into())
}

/// The whole state at one index, to be written beside the apply loop.
#[derive(Debug)]
pub struct FrozenDirectory {
    applied: Option<(u64, u64)>,
    /// Of the state: an image is written in its form (M6).
    feature_level: u16,
    segments: (u32, Vec<u8>),
    tasks: (u32, Vec<u8>),
    /// Bytes of the copies under way, in their order in `tasks`.
    copy_bytes: Vec<u64>,
    references: References,
    source: Source,
    /// None in tests of what a reader makes of a state that is wrong.
    kept: Option<Kept>,
    digest: u128,
}

pub(super) fn freeze(core: &Core, shards: &Arc<Shards>) -> FrozenDirectory {
    let references = References { segments: core.space.ids_by_slot(), open: core.open.clone() };
    let source = match Copies::begin(shards) {
        Some(copies) => Source::Shards(copies),
        None => Source::Encoded((0..SHARDS).map(|number| encode(shards.read(number).records(), &references)).collect()),
    };
    FrozenDirectory {
        applied: core.applied,
        feature_level: core.feature_level,
        segments: (core.space.by_id.len() as u32, segments(core)),
        tasks: (core.tasks.by_id.len() as u32, tasks(core)),
        copy_bytes: core.copies.by_replica.values().map(|copy| copy.bytes).collect(),
        references,
        source,
        kept: Some(Kept {
            objects: core.objects.sum(),
            retired: core.parts.retired.sum(),
            sessions: core.parts.sessions.sum(),
            lost_members: core.parts.lost_members.sum(),
            rest: core.digest.sum(),
        }),
        digest: core.digest(),
    }
}

impl FrozenDirectory {
    /// Writes it. Fails also when the whole state was replaced (a snapshot was installed) before it was written, and when its
    /// records are not what the digest says.
    pub fn write_to(mut self, out: &mut dyn io::Write) -> io::Result<()> {
        self.check_small()?;
        out.write_all(MAGIC)?;
        out.write_all(&encode_level(FORMAT_VERSION, self.feature_level))?;
        let segments = Frame::plain(Kind::Segments, self.segments.0, self.segments.1.clone());
        let tasks = Frame::plain(Kind::Tasks, self.tasks.0, self.tasks.1.clone());
        segments.write(out)?;
        let mut metadata = PartSum::default();
        let mut objects = 0u128;
        for number in 0..SHARDS {
            let Encoded { rows, bytes: raw, digest } = match &mut self.source {
                Source::Encoded(shards) => std::mem::take(&mut shards[number]),
                Source::Shards(copies) => encode(copies.next()?.iter(), &self.references),
            };
            objects = objects.wrapping_add(digest);
            if rows > 0 && !(planted!(SnapshotWithoutPart) && number % 2 == 0) {
                let frame = Frame::shard(number as u16, rows, &raw)?;
                metadata.add(&frame.encoded_header());
                metadata.add(&frame.stored);
                metadata.rows(rows.into());
                frame.write(out)?;
            }
        }
        if let Some(kept) = &self.kept {
            check("objects", kept.objects, objects)?;
        }
        tasks.write(out)?;
        let manifest = Manifest {
            format: FORMAT_VERSION,
            feature_level: self.feature_level,
            applied: self.applied,
            segments: segments.part(),
            metadata: metadata.part(),
            task_manager: tasks.part(),
            digest: self.digest,
        };
        Frame::plain(Kind::Manifest, 0, manifest.to_string().into_bytes()).write(out)
    }

    /// The same, whatever its records are.
    #[cfg(test)]
    pub fn unchecked(mut self) -> FrozenDirectory {
        self.kept = None;
        self
    }

    /// What does not lie in shards, from the bytes that will be written.
    fn check_small(&self) -> io::Result<()> {
        let Some(kept) = &self.kept else { return Ok(()) };
        let read = read_small(&self.segments.1, &self.tasks.1, self.feature_level, &self.copy_bytes);
        let read = read.map_err(|error| Unsound(error.to_string()))?;
        check("nodes, segments, tenants, tasks and copies", kept.rest, read.digest.sum())?;
        check("lost members of groups", kept.lost_members, read.parts.lost_members.sum())?;
        check("retired replicas", kept.retired, read.parts.retired.sum())?;
        check("sessions", kept.sessions, read.parts.sessions.sum())
    }
}

fn pack(part: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(part).expect("rows are numbers, texts and bytes")
}

fn segments(core: &Core) -> Vec<u8> {
    let config = core.config.config;
    let checkpoint = core.checkpoint.map(|(index, digest)| (index, digest.to_le_bytes()));
    pack(&SegmentsPart {
        applied: core.applied,
        clock: core.clock.0,
        config: ConfigRow {
            lease_ttl_max_ms: config.lease_ttl_max_ms,
            put_start_discard_timeout_ms: config.put_start_discard_timeout_ms,
            objects_max: config.objects_max,
            granted_bytes_min: config.granted_bytes_min,
            hard_pinned_percent_max: config.hard_pinned_percent_max,
            strategy: config.strategy as u8,
            secret: Bin(&config.secret.0),
            lease_ttl_max_before_ms: core.config.lease_ttl_max_before_ms,
            lease_ttl_lowered_at: core.config.lease_ttl_lowered_at.0,
        },
        checkpoint: checkpoint.as_ref().map(|(index, digest)| (*index, Bin(digest))),
        next_tenant: core.tenants.next,
        tenants: core
            .tenants
            .iter()
            .map(|(id, tenant)| TenantRow {
                tenant: id.0,
                name: &tenant.name,
                quota_bytes: tenant.quota.bytes,
                quota_objects: tenant.quota.objects,
                refuse: tenant.quota.refuse,
            })
            .collect(),
        nodes: core
            .nodes
            .by_id
            .iter()
            .map(|(id, node)| NodeRow {
                node: id.0,
                node_uuid: Bin(&node.node_uuid),
                process_uuid: Bin(&node.process_uuid),
                incarnation: node.incarnation.0,
                address: &node.address,
                host_id: &node.host_id,
                contact: node.contact as u8,
                earlier_processes: node.earlier_processes.iter().map(|uuid| Bin(uuid)).collect(),
            })
            .collect(),
        segments: core
            .space
            .iter()
            .map(|(_, segment)| SegmentRow {
                segment: segment.id.0,
                node: segment.node.0,
                name: &segment.name,
                capacity: segment.capacity,
                draining: segment.draining,
            })
            .collect(),
        sessions: core
            .sessions
            .by_id
            .iter()
            .map(|(id, session)| SessionRow {
                session: id.0,
                client_uuid: Bin(&session.client_uuid),
                host_id: &session.host_id,
                floor: session.floor,
                outcomes: session
                    .outcomes
                    .iter()
                    .map(|(&sequence, &answered)| {
                        let (kind, number) = answered_parts(answered);
                        (sequence, kind, number)
                    })
                    .collect(),
            })
            .collect(),
        retired: core
            .retired
            .iter()
            .map(|(id, retired)| RetiredRow {
                replica: id.0,
                object: retired.object.0,
                segment: core.space.segment(retired.segment).id.0,
                offset: retired.offset,
                bytes: retired.bytes,
                clean: retired.clean,
            })
            .collect(),
        lost: core
            .groups
            .by_name
            .iter()
            .filter(|(_, group)| !group.lost.is_empty())
            .map(|((tenant, name), group)| LostRow {
                tenant: tenant.0,
                group: Bin(name),
                keys: group.lost.iter().map(|key| Bin(key)).collect(),
            })
            .collect(),
        since_level_2: (core.feature_level > FEATURE_LEVEL_FIRST).then(|| SinceLevel2 {
            feature_level: core.feature_level,
            ancestors: core
                .ancestors
                .iter()
                .map(|ancestor| AncestorRow {
                    cluster: Bin(&ancestor.cluster.0),
                    history: ancestor.history.0,
                    until: ancestor.until,
                })
                .collect(),
        }),
    })
}

fn tasks(core: &Core) -> Vec<u8> {
    pack(&TasksPart {
        copies: core
            .copies
            .by_replica
            .iter()
            .map(|(replica, copy)| CopyRow {
                replica: replica.0,
                object: copy.object.0,
                instead_of: copy.instead_of.map_or(0, |r| r.0),
                segment: core.space.segment(copy.segment).id.0,
                offset: copy.offset,
                started: copy.started.0,
                task: copy.task.0,
            })
            .collect(),
        tasks: core
            .tasks
            .by_id
            .iter()
            .map(|(id, task)| TaskRow {
                task: id.0,
                kind: task.asked.kind as u8,
                state: task.state as u8,
                unmount: task.asked.unmount,
                token: Bin(&task.asked.token),
                object: task.asked.object.0,
                sources: task.asked.sources.iter().map(|segment| segment.0).collect(),
                targets: task.asked.targets.iter().map(|segment| segment.0).collect(),
                concurrency: task.asked.concurrency,
                created: task.created.0,
                ended: task.ended.0,
                done: task.done,
                done_bytes: task.done_bytes,
                left: task.left,
                message: &task.message,
            })
            .collect(),
    })
}
