//! Replay, snapshot and restore: one digest however a state was reached; damaged snapshots are refused.

use super::world::{HISTORY, World, drain, end};
use crate::directory::core::OpenPut;
use crate::directory::{
    Config, ConfigState, CreateTask, DataType, Directory, Entry, FEATURE_LEVEL_FIRST, FrozenDirectory, GroupView, Op,
    Outcome, PutEnd, PutStart, Quota, ReplicaEnd, ReplicaStatus, RestoreError, RetireMode, SoftPinAction, TaskId,
    TaskState, TenantId, Turn,
};
use bytes::Bytes;
use tidepool_proto::ObjectId;

/// A new directory that applied a log.
pub(super) fn replay(log: &[(u64, Bytes)]) -> Directory {
    let directory = Directory::new(HISTORY);
    continue_with(&directory, log);
    directory
}

/// Applies more of a log.
pub(super) fn continue_with(directory: &Directory, log: &[(u64, Bytes)]) {
    for (index, bytes) in log {
        directory.apply_entry(*index, 1, &Entry::decode(bytes).unwrap());
    }
}

pub(crate) fn bytes_of(frozen: FrozenDirectory) -> Vec<u8> {
    let mut bytes = Vec::new();
    frozen.write_to(&mut bytes).unwrap();
    bytes
}

/// A new directory restored from a frozen one, over a state that must vanish.
pub(super) fn restored(frozen: FrozenDirectory) -> Directory {
    let (mut world, _, session) = World::with_nodes(2, 4096);
    world.put(session, "vanishes", 100);
    world.directory.restore(&mut &bytes_of(frozen)[..]).unwrap();
    assert!(world.present("vanishes").is_none());
    world.directory
}

pub(crate) fn busy() -> World {
    busy_at(FEATURE_LEVEL_FIRST)
}

/// A state in which every kind of record is there, at a feature level.
pub(in crate::directory) fn busy_at(level: u16) -> World {
    let mut world = World::new();
    if level > FEATURE_LEVEL_FIRST {
        assert_eq!(world.one(Op::RaiseFeatureLevel { level }), Outcome::Done);
    }
    let nodes: Vec<_> = (0..3).map(|i| world.add_node(i, &format!("h{i}"), 1 << 16)).collect();
    let session = world.session(1);
    for i in 0..20 {
        world.put(session, &format!("k{i}"), 100 + i * 37);
    }
    world.start(session, "open", 500);
    let stale = world.start(session, "unclean", 500);
    world.one(Op::PutRevoke(end(session, &stale, ReplicaEnd::Unknown)));
    world.remove(session, 3, 2, "k3");
    // An upsert under way, pins, a group that misses a member, and a tenant.
    let upsert = world.upsert_op(session, 4, "k5", 700);
    world.granted(PutStart { soft_pin: SoftPinAction::Enable { ttl_ms: 60_000 }, ..upsert });
    world.put_in(session, "g", "g0", 100);
    let put = world.put_op(session, "g1", 100);
    let lost = world.granted(PutStart { group: b"g", hard_pin: true, data_type: DataType(3), ..put });
    world.one(Op::PutRevoke(end(session, &lost, ReplicaEnd::Aborted)));
    let tenant = world.tenant("t", Quota { bytes: 1 << 20, objects: 9, refuse: true });
    let put = world.put_op(session, "k5", 100);
    let pinned = world.complete(PutStart { tenant, group: b"g", hard_pin: true, ..put });
    world.one(Op::SetPin { object: pinned.object, action: SoftPinAction::Enable { ttl_ms: 1 } });
    let turn = Turn { sequence: 5, floor: 2 };
    let objects = vec![world.put(session, "matched", 100).object];
    world.one(Op::RemoveObjects { session, turn, objects, mode: RetireMode::RetireOnly });
    // A task that ended, a drain that runs with a copy and a move under way, and an object that will lose a replica.
    let there: Vec<ObjectId> = (6..20).filter_map(|i| world.present(&format!("k{i}"))).collect();
    let there: Vec<ObjectId> = there.into_iter().filter(|&o| world.replicas(o)[0].1 == nodes[1].2).collect();
    let source = world.replicas(there[1])[0].0;
    let ended = world.create(CreateTask { targets: vec![nodes[0].2], ..drain(&[nodes[2].2], 2) }).unwrap();
    let copy = world.copy(there[2], None, &[], ended).unwrap();
    world.end_copy(copy.replica, ReplicaEnd::Stored);
    world.one(Op::EndTask { task: ended, state: TaskState::Failed, left: 1, message: "a node is gone" });
    let draining = world.create(drain(&[nodes[1].2], 1)).unwrap();
    world.copy(there[0], None, &[nodes[0].2], draining).unwrap();
    world.copy(there[1], Some(source), &[nodes[0].2], draining).unwrap();
    let two = world.start_copies(session, "two", 2);
    world.ended(session, &two);
    world.suspect(nodes[1].0, nodes[1].1, crate::directory::Contact::Suspect);
    world.register(2, 77, "elsewhere");
    world.one(Op::Checkpoint { index: 5, digest: 6 });
    world
}

#[test]
fn a_restored_state_is_the_state() {
    let world = busy();
    let restored = restored(world.directory.freeze());
    restored.check_invariants().unwrap();
    assert_eq!(restored.digest(), world.directory.digest());
    assert_eq!(restored.applied(), world.directory.applied());
    assert_eq!(restored.counts(), world.directory.counts());
    assert_eq!(restored.segments(), world.directory.segments());
    assert_eq!(restored.tenants(), world.directory.tenants());
    let copies = restored.copies(None, 9);
    assert_eq!((copies.len(), &copies), (2, &world.directory.copies(None, 9)));
    assert_eq!((restored.tasks().len(), restored.tasks()), (2, world.directory.tasks()));
    assert_eq!(restored.degraded(None, 9), world.directory.degraded(None, 9));
    assert_eq!(restored.degraded(None, 9).len(), 1);
    assert_eq!(restored.segments().iter().filter(|s| s.draining).count(), 1);
    assert_eq!(restored.group(TenantId::DEFAULT, b"g", &[]), Some(GroupView { members: 1, whole: false }));
    assert_eq!(restored.checkpoint(), Some((5, 6)));
    assert_eq!(bytes_of(restored.freeze()), bytes_of(world.directory.freeze()));
}

/// The defaults of later settings are as if they were not there, so that older states keep their digest.
#[test]
fn other_limits_are_in_the_digest() {
    let config = |percent| ConfigState {
        config: Config { hard_pinned_percent_max: percent, ..Config::default() },
        ..ConfigState::default()
    };
    let digest = |percent| {
        let mut digest = crate::directory::digest::Digest::default();
        digest.add(|c| c.config(&config(percent)));
        digest.sum()
    };
    assert_ne!(digest(89), digest(90));
}

/// M5: what is written later is the state at the freeze. Fails when `record_mut`, `insert` or `remove` does not note the
/// slot first.
#[test]
fn a_freeze_is_not_touched_by_what_is_applied_before_it_is_written() {
    let mut world = busy();
    let writer = world.directory.sessions()[0].session;
    let frozen = world.directory.freeze();
    // The undo lists are taken, so this one is encoded at once.
    let at_once = bytes_of(world.directory.freeze());
    let session = world.session(9);
    let open = world.directory.with_object(Default::default(), b"open", |o| o.map(|o| o.object)).unwrap();
    let stored = world.directory.with_object_id(open, |o| o.unwrap().replicas[0].replica);
    let replicas = [ReplicaStatus { replica: stored, end: ReplicaEnd::Stored }].into_iter().collect();
    world.one(Op::PutEnd(PutEnd { session: writer, object: open, replicas }));
    for i in 0..20 {
        world.remove(session, i, 0, &format!("k{i}"));
        world.put(session, &format!("n{i}"), 300);
    }
    assert_ne!(bytes_of(world.directory.freeze()), at_once);
    assert_eq!(bytes_of(frozen), at_once);
    // The next freeze is lazy again.
    let frozen = world.directory.freeze();
    let now = world.directory.digest();
    world.put(session, "later", 10);
    assert_eq!(restored(frozen).digest(), now);
}

#[test]
fn a_freeze_of_a_state_that_was_replaced_is_not_written() {
    let world = busy();
    let frozen = world.directory.freeze();
    let other = bytes_of(World::with_nodes(1, 4096).0.directory.freeze());
    world.directory.restore(&mut &other[..]).unwrap();
    assert!(frozen.write_to(&mut Vec::new()).is_err());
}

/// Fails when the order of rows is that of slots, which depends on what was there before.
#[test]
fn equal_states_have_equal_bytes_however_they_were_reached() {
    let world = busy();
    let restored = restored(world.directory.freeze());
    let replayed = replay(&world.log);
    for other in [restored, replayed] {
        assert_eq!(other.digest(), world.directory.digest());
        assert_eq!(bytes_of(other.freeze()), bytes_of(world.directory.freeze()));
    }
}

#[test]
fn one_changed_byte_or_a_short_read_is_refused_and_changes_nothing() {
    let world = busy();
    let bytes = bytes_of(world.directory.freeze());
    let target = World::with_nodes(1, 4096).0;
    let before = target.directory.digest();
    for at in (0..bytes.len()).step_by(7) {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        assert!(target.directory.restore(&mut &bad[..]).is_err(), "flip at {at} passed");
        assert!(target.directory.restore(&mut &bytes[..at]).is_err(), "cut at {at} passed");
    }
    assert_eq!(target.directory.digest(), before);
    target.directory.check_invariants().unwrap();
}

/// What an upsert would replace, and what is copied, has ended.
#[test]
fn a_snapshot_that_replaces_or_copies_an_open_put_is_refused() {
    for copied in [false, true] {
        let (mut world, _, session) = World::with_nodes(2, 1 << 16);
        let old = world.put(session, "k", 100).object;
        if copied {
            world.copy(old, None, &[], TaskId(0)).unwrap();
        } else {
            let put = world.upsert_op(session, 1, "k", 100);
            world.granted(put);
        }
        let directory = &world.directory;
        let at = directory.core.read().index[&old];
        directory.shards.write(at.shard()).record_mut(at.slot()).unwrap().copies = 0;
        let open = OpenPut { token: [0; 16], session, soft_pin: SoftPinAction::Preserve, replaces: None };
        directory.core.write().open.insert(old, open);
        let bytes = bytes_of(directory.freeze().unchecked());
        let error = Directory::new(HISTORY).restore(&mut &bytes[..]).unwrap_err();
        assert!(matches!(error, RestoreError::Inconsistent(_)), "{error}");
    }
}
