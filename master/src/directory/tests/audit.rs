//! The auditor: finds nothing in a sound state, whatever changes while a pass runs, and finds each thing that is wrong.

use super::replay::{busy, restored};
use super::world::{World, end, plain_put};
use crate::directory::core::Core;
use crate::directory::groups::Group;
use crate::directory::objects::Location;
use crate::directory::op::TenantId;
use crate::directory::{
    AUDIT_STEP_ITEMS, Directory, Entry, FEATURE_LEVEL, Op, Outcome, PutStart, ReplicaEnd, RetireMode, Violation,
    ViolationKind,
};
use tidepool_proto::{LogTime, ObjectId, ReplicaId};

/// Two whole passes: what a first one may have walked before it went wrong is found by the second.
fn audited(directory: &Directory) -> Vec<Violation> {
    let until = directory.audit_progress().passes + 2;
    let mut found = Vec::new();
    while directory.audit_progress().passes < until {
        let index = directory.applied().map_or(0, |(index, _)| index) + 1;
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(0), ops: vec![Op::Audit] };
        assert_eq!(directory.apply_entry(index, 1, &entry), [Outcome::Done]);
        found.extend(directory.take_violations());
    }
    found
}

#[test]
fn a_sound_state_has_no_violation_however_it_was_reached() {
    let world = busy();
    let digest = world.directory.digest();
    assert_eq!(audited(&world.directory), []);
    assert_eq!(audited(&restored(world.directory.freeze())), []);
    assert_eq!(world.directory.digest(), digest, "an audit changes nothing");
    let progress = world.directory.audit_progress();
    assert_eq!((progress.passes, progress.violations), (2, 0));
    assert_eq!(Some(progress.last_pass_index), world.directory.applied().map(|(index, _)| index));
}

/// A pass that comes upon a change half way books it once, whether it has passed the place or not. Fails when what was
/// walked is not booked again by the change (tried).
#[test]
fn what_changes_while_a_pass_runs_is_booked_once() {
    let (mut world, nodes, session) = World::with_nodes(3, 1 << 20);
    world.directory.core.write().auditor.step_items = 7;
    for round in 0..60u64 {
        for key in 0..6 {
            let key = format!("k{}", (round * 5 + key) % 40);
            let sequence = round * 10;
            match (round + key.len() as u64) % 3 {
                0 => drop(world.remove(session, sequence, sequence, &key)),
                _ if world.present(&key).is_none() => drop(world.put_in(session, "g", &key, 500 + round)),
                _ => {}
            }
            (0..7).for_each(|_| world.audit_step());
        }
        let retired: Vec<ReplicaId> = world.directory.reclaimable(None, 3).iter().map(|r| r.replica).collect();
        world.one(Op::Reclaim { replicas: retired });
        if round % 20 == 19 {
            let (node, incarnation, segment) = nodes[round as usize % 3];
            if world.directory.segment(segment).is_some() {
                world.one(Op::UnmountSegment { node, incarnation, segment });
            }
        }
    }
    let progress = world.directory.audit_progress();
    assert!(progress.passes >= 8, "{progress:?}");
}

/// Each step is bounded, whatever the directory holds.
#[test]
fn a_step_looks_at_no_more_than_its_share() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 24);
    let keys: Vec<String> = (0..3_000).map(|i| format!("k{i}")).collect();
    for keys in keys.chunks(500) {
        let puts: Vec<Op<'_>> =
            keys.iter().map(|key| Op::PutStart(PutStart { group: b"g", ..world.put_op(session, key, 1) })).collect();
        let grants: Vec<_> = world
            .apply_unchecked(&puts)
            .into_iter()
            .map(|outcome| match outcome {
                Outcome::Granted(grant) => grant,
                other => panic!("{other:?}"),
            })
            .collect();
        let ends: Vec<Op<'_>> =
            grants.iter().map(|grant| Op::PutEnd(end(session, grant, ReplicaEnd::Stored))).collect();
        world.apply_unchecked(&ends);
    }
    let mut steps = 0;
    while world.directory.audit_progress().passes == 0 {
        world.audit_step();
        steps += 1;
    }
    // 1024 shards that are walked slot by slot in chunks of 32, and one group of 3000.
    let items = 1024 * 32 + 3_000;
    assert!(steps >= items / (2 * AUDIT_STEP_ITEMS), "{steps} steps for {items} items");
}

/// What is planted, of what kind the violation is, and a word of its facts.
type Plant = (&'static str, fn(&Directory), ViolationKind, &'static str);

fn core<R>(directory: &Directory, plant: impl FnOnce(&mut Core) -> R) {
    plant(&mut directory.core.write());
}

fn an_object(directory: &Directory) -> (ObjectId, Location) {
    let core = directory.core.read();
    let (&object, &at) = core.index.iter().find(|(id, _)| !core.open.contains_key(id)).expect("one that is COMPLETE");
    (object, at)
}

fn a_group(core: &mut Core) -> &mut Group {
    core.groups.by_name.values_mut().next().expect("a group")
}

fn a_slot(core: &Core) -> u32 {
    core.space.iter().find(|(_, segment)| !segment.used.is_empty()).expect("a segment in use").0
}

/// Changes a record behind everybody's back.
fn change_record(directory: &Directory, change: impl FnOnce(&mut crate::directory::objects::Record)) {
    let (_, at) = an_object(directory);
    change(directory.shards.write(at.shard()).record_mut(at.slot()).expect("it is there"));
}

const PLANTS: &[Plant] = &[
    ("a cell's sum", |d| core(d, |c| c.objects.spoil(an_object_of(c))), ViolationKind::Digest, "shard"),
    ("a record", |d| change_record(d, |r| r.stored_slots ^= 1), ViolationKind::Digest, "slots"),
    ("a record's key", |d| change_record(d, |r| r.key[0] ^= 1), ViolationKind::Index, "not found under its key"),
    ("the sum of retired replicas", |d| core(d, |c| c.parts.retired.spoil()), ViolationKind::Digest, "retired"),
    ("the sum of sessions", |d| core(d, |c| c.parts.sessions.spoil()), ViolationKind::Digest, "sessions"),
    ("the sum of lost members", |d| core(d, |c| c.parts.lost_members.spoil()), ViolationKind::Digest, "lost"),
    ("the settings", |d| core(d, |c| c.config.config.objects_max += 1), ViolationKind::Digest, "all else"),
    (
        "the count of free bytes",
        |d| core(d, |c| c.space.free_mut(a_slot(c)).unwrap().spoil()),
        ViolationKind::Space,
        "are counted free",
    ),
    (
        "an extent that nobody has",
        |d| core(d, |c| c.space.free_mut(a_slot(c)).unwrap().allocate(64)),
        ViolationKind::Space,
        "do not add up",
    ),
    ("an extent that is used and free", free_what_is_used, ViolationKind::Space, "free in part"),
    ("a segment's owner of an extent", |d| core(d, forget_an_owner), ViolationKind::Space, "not owned"),
    ("a segment's bytes by use", move_bytes, ViolationKind::Counter, "segment"),
    ("the bytes of all segments", |d| core(d, |c| c.space.spoil()), ViolationKind::Counter, "have"),
    ("a tenant's bytes", |d| core(d, |c| tenant(c).bytes += 1), ViolationKind::Counter, "tenant 'default'"),
    ("a tenant's objects", |d| core(d, |c| tenant(c).objects += 1), ViolationKind::Counter, "tenant 'default'"),
    ("a tenant's pins", |d| core(d, |c| tenant(c).hard_pinned_bytes += 1), ViolationKind::Counter, "tenant 'default'"),
    (
        "a session's grants",
        |d| core(d, |c| c.sessions.by_id.values_mut().for_each(|s| s.open_grants += 1)),
        ViolationKind::Counter,
        "open grants",
    ),
    (
        "a session's bytes",
        |d| core(d, |c| c.sessions.by_id.values_mut().for_each(|s| s.open_bytes += 1)),
        ViolationKind::Counter,
        "open grants",
    ),
    ("the index", |d| core(d, |c| c.index.pop_last()), ViolationKind::Index, "not in the index"),
    ("an index entry of nothing", index_nothing, ViolationKind::Index, "entries"),
    ("the open puts", |d| core(d, |c| c.open.pop_first()), ViolationKind::Index, "no put of it is open"),
    ("the degraded objects", |d| core(d, |c| c.degraded.clear()), ViolationKind::Index, "degraded"),
    ("the unfenced replicas", |d| core(d, |c| c.unclean.clear()), ViolationKind::Index, "wait for a fence"),
    ("what readers see", |d| d.topology.write().suspect_nodes += 1, ViolationKind::Index, "readers"),
    ("a group's members", |d| core(d, |c| a_group(c).members.clear()), ViolationKind::Group, "not in its group"),
    (
        "a stranger in a group",
        |d| core(d, |c| a_group(c).members.insert(ObjectId(1 << 40))),
        ViolationKind::Group,
        "which is not in it",
    ),
    ("a group's unfinished members", |d| core(d, |c| a_group(c).unfinished += 1), ViolationKind::Group, "being put"),
    (
        "the size of a copy",
        |d| core(d, |c| c.copies.by_replica.values_mut().for_each(|copy| copy.bytes += 64)),
        ViolationKind::Counter,
        "segment",
    ),
];

fn tenant(core: &mut Core) -> &mut crate::directory::tenants::Tenant {
    core.tenants.get_mut(TenantId::DEFAULT).expect("it is always there")
}

fn an_object_of(core: &Core) -> Location {
    *core.index.values().next().expect("an object")
}

fn free_what_is_used(directory: &Directory) {
    core(directory, |core| {
        let slot = a_slot(core);
        let segment = core.space.get(slot).expect("in use");
        let (&offset, &at) = segment.used.iter().next().expect("in use");
        let bytes = directory.shards.with(at, |r| r.extent_bytes()).expect("an object");
        core.space.free_mut(slot).expect("in use").give(offset, bytes);
    });
}

fn forget_an_owner(core: &mut Core) {
    let slot = a_slot(core);
    core.space.used_mut(slot).pop_first();
}

/// The sums still add up to the capacity.
fn move_bytes(directory: &Directory) {
    use crate::directory::space::Use;
    core(directory, |core| {
        let slot = a_slot(core);
        core.space.convert(slot, 0, 64, Use::Complete, Use::Processing);
    });
}

fn index_nothing(directory: &Directory) {
    let (_, at) = an_object(directory);
    core(directory, |core| core.index.insert(ObjectId(1 << 40), at));
}

/// Each of these is what a bug, or bad memory, would leave behind.
#[test]
fn whatever_is_planted_is_found() {
    for (what, plant, kind, word) in PLANTS {
        let mut world = busy();
        let first = world.directory.sessions()[0].session;
        // A lost member and something retired and unclean are there; so is a degraded object.
        let two = world.start_copies(first, "second", 2);
        world.ended(first, &two);
        let replica = two.replicas[0].replica;
        world.one(Op::DropReplica { object: two.object, replica });
        let lost = world.start(first, "unclean again", 100);
        world.one(Op::PutRevoke(end(first, &lost, ReplicaEnd::Unknown)));
        plant(&world.directory);
        let found = audited(&world.directory);
        let named = found.iter().any(|v| v.kind == *kind && v.facts.contains(word));
        assert!(named, "{what}: no {} violation that says '{word}' among {found:#?}", kind.name());
        assert_eq!(world.directory.audit_progress().violations, found.len() as u64);
    }
}

/// A flood of violations is counted, and the first of them kept.
#[test]
fn violations_kept_for_the_service_are_bounded() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 20);
    let keys: Vec<String> = (0..300).map(|i| format!("k{i}")).collect();
    for (i, key) in keys.iter().enumerate() {
        world.apply_unchecked(&[Op::PutStart(plain_put(session, key, 1, [i as u8; 16]))]);
    }
    core(&world.directory, |core| core.index.clear());
    let before = world.directory.audit_progress();
    while world.directory.audit_progress().passes == before.passes {
        let index = world.directory.applied().unwrap().0 + 1;
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(0), ops: vec![Op::Audit] };
        world.directory.apply_entry(index, 1, &entry);
    }
    assert!(world.directory.audit_progress().violations >= 300);
    assert_eq!(world.directory.take_violations().len(), 100);
    assert_eq!(world.directory.take_violations(), []);
}

/// RetireOnly, an unclean revocation and reclaiming, in between steps of a few items. Fails when the sum, or the bytes by
/// segment, of those that were walked are not kept up (tried both).
#[test]
fn retired_replicas_come_and_go_while_they_are_walked() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 20);
    world.directory.core.write().auditor.step_items = 3;
    let node = nodes[0];
    for round in 0..200u64 {
        let grant = world.put(session, &format!("k{round}"), 100);
        world.one(Op::Retire { objects: vec![grant.object], mode: RetireMode::RetireOnly });
        let lost = world.start(session, "lost", 100);
        world.one(Op::PutRevoke(end(session, &lost, ReplicaEnd::Unknown)));
        (0..400).for_each(|_| world.audit_step());
        if round % 3 == 0 {
            let first: Vec<ReplicaId> = world.directory.reclaimable(None, 2).iter().map(|r| r.replica).collect();
            world.one(Op::Reclaim { replicas: first });
            let replicas = world.directory.unclean(node.0, 1);
            world.one(Op::FenceAcknowledged { node: node.0, incarnation: node.1, replicas });
        }
    }
    assert!(world.directory.audit_progress().passes > 100);
}

/// Free extents are taken and given on both sides of where the pass is.
#[test]
fn free_extents_come_and_go_while_they_are_walked() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    world.directory.core.write().auditor.step_items = 2;
    let mut there: Vec<(String, ObjectId)> = Vec::new();
    for i in 0..40 {
        let key = format!("k{i}");
        let object = world.put(session, &key, 200 + i * 17).object;
        there.push((key, object));
    }
    let mut number = 0u64;
    while world.directory.audit_progress().passes < 40 {
        number += 1;
        // Every other object leaves a gap; what is put takes the shortest that fits.
        let at = (number as usize * 7) % there.len();
        let (key, object) = there[at].clone();
        if world.present(&key).is_some() {
            world.one(Op::Retire { objects: vec![object], mode: RetireMode::RetireAndReclaim });
        } else {
            there[at].1 = world.put(session, &key, 150 + number % 500).object;
        }
        (0..3).for_each(|_| world.audit_step());
    }
}
