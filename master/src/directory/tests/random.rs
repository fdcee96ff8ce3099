//! Random op sequences: every outcome against the naive model, every invariant after every op, and at the end one
//! digest for the live state, a replay of the log, and a restored snapshot with the rest of the log replayed.

use super::generator::{Command, GROUPS, KEYS, commands, op, prelude};
use super::model::Model;
use super::replay::{continue_with, replay, restored};
use super::world::World;
use crate::directory::{Op, Outcome, Removal};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use tidepool_proto::OpId;

/// Op and outcome, as `label` has them.
const EXPECTED: &[&str] = &[
    "audit done",
    "begin_history INVALID_PARAMS",
    "begin_history done",
    "copy_end GRANT_LOST",
    "copy_end stored false",
    "copy_end stored true",
    "copy_start NO_SPACE",
    "copy_start OBJECT_HAS_REPLICATION_TASK",
    "copy_start OBJECT_NOT_FOUND",
    "copy_start REPLICA_IS_NOT_READY",
    "copy_start REPLICA_NOT_FOUND",
    "copy_start TENANT_QUOTA_EXCEEDED",
    "copy_start REPLICA_ALREADY_EXISTS",
    "copy_start TASK_NOT_FOUND",
    "copy_start done",
    "drop_extra OBJECT_NOT_FOUND",
    "drop_extra REPLICA_IS_NOT_READY",
    "drop_extra REPLICA_NOT_FOUND",
    "drop_extra gone false",
    "clear_replicas INVALID_PARAMS",
    "clear_replicas SESSION_UNKNOWN",
    "clear_replicas STALE_REQUEST",
    "clear_replicas cleared false",
    "clear_replicas cleared true",
    "create_task INVALID_PARAMS",
    "create_task OBJECT_NOT_FOUND",
    "create_task REPLICA_ALREADY_EXISTS",
    "create_task REPLICA_IS_NOT_READY",
    "create_task REPLICA_NOT_FOUND",
    "create_task SEGMENT_NOT_FOUND",
    "create_task done",
    "end_task INVALID_PARAMS",
    "end_task TASK_NOT_FOUND",
    "end_task done",
    "discard some false",
    "discard some true",
    "drop_node FENCED",
    "drop_node NODE_UNKNOWN",
    "drop_node replicas false objects false",
    "drop_node replicas true objects false",
    "drop_node replicas true objects true",
    "drop_tenant INVALID_PARAMS",
    "drop_tenant TENANT_NOT_EMPTY",
    "drop_tenant TENANT_NOT_REGISTERED",
    "drop_tenant done",
    "drop_replica OBJECT_NOT_FOUND",
    "drop_replica REPLICA_IS_NOT_READY",
    "drop_replica REPLICA_UNAVAILABLE",
    "drop_replica gone false",
    "drop_replica gone true",
    "expire_sessions done",
    "fence_acknowledged FENCED",
    "fence_acknowledged NODE_UNKNOWN",
    "fence_acknowledged some false",
    "fence_acknowledged some true",
    "mount_segment FENCED",
    "mount_segment NODE_UNKNOWN",
    "mount_segment SEGMENT_ALREADY_EXISTS",
    "mount_segment done",
    "open_session done",
    "put_end ALREADY_ENDED",
    "put_end GRANT_LOST",
    "put_end ILLEGAL_CLIENT",
    "put_end INVALID_PARAMS",
    "put_end dropped",
    "put_end ended 1",
    "put_end ended 2",
    "put_end ended 3",
    "put_end replaced",
    "put_revoke ALREADY_ENDED",
    "put_revoke GRANT_LOST",
    "put_revoke ILLEGAL_CLIENT",
    "put_revoke INVALID_PARAMS",
    "put_revoke done",
    "put_start INVALID_PARAMS",
    "put_start RESOURCE_EXHAUSTED",
    "put_start TENANT_NOT_REGISTERED",
    "put_start TENANT_QUOTA_EXCEEDED",
    "put_start NOT_ENOUGH_REPLICAS",
    "put_start NO_SPACE",
    "put_start OBJECT_ALREADY_EXISTS",
    "put_start PUT_IN_PROGRESS",
    "put_start SESSION_UNKNOWN",
    "put_start evicted 1",
    "put_start evicted 2",
    "put_start granted 1",
    "put_start granted 2",
    "put_start granted 3",
    "put_start preempted",
    "put_start repeated",
    "reclaim some false",
    "reclaim some true",
    "register_node FENCED",
    "register_node done",
    "remove INVALID_PARAMS",
    "remove NotFound",
    "remove NotReady",
    "remove SESSION_UNKNOWN",
    "remove STALE_REQUEST",
    "remove TENANT_NOT_REGISTERED",
    "remove changed",
    "remove removed",
    "remove_objects INVALID_PARAMS",
    "remove_objects SESSION_UNKNOWN",
    "remove_objects STALE_REQUEST",
    "remove_objects some false",
    "remove_objects some true",
    "retire some false",
    "retire some true",
    "set_contact FENCED",
    "set_contact NODE_UNKNOWN",
    "set_contact done",
    "set_pin OBJECT_NOT_FOUND",
    "set_pin REPLICA_IS_NOT_READY",
    "set_pin done",
    "set_tenant done",
    "unmount_segment SEGMENT_NOT_FOUND",
    "unmount_segment replicas false objects false",
    "unmount_segment replicas true objects false",
    "unmount_segment replicas true objects true",
    "upsert GRANT_LOST",
    "upsert INVALID_PARAMS",
    "upsert NO_SPACE",
    "upsert SESSION_UNKNOWN",
    "upsert STALE_REQUEST",
    "upsert TENANT_QUOTA_EXCEEDED",
    "upsert evicted 1",
    "upsert granted 1",
    "upsert granted 2",
    "upsert preempted",
    "upsert repeated",
    // What the model saw happen.
    "a client is granted no more",
    "a copy is asked for again",
    "a copy is given up",
    "a copy is one too many",
    "a copy of an ended task does not start",
    "a late duplicate clears nothing",
    "a copy ends with its history",
    "a put ends with its history",
    "a put makes fewer copies than were wanted",
    "a replica that was never made is made",
    "an object has more replicas than are wanted",
    "a copy is lost with its segment",
    "a copy of a group's member",
    "a drain ended",
    "a group is buried",
    "a group is evicted for a put",
    "a group is retired",
    "a hard-pinned object is removed",
    "a hard-pinned object outlives its group",
    "a hard-pinned victim is passed over",
    "a lost member is found",
    "a lost replica is made again",
    "a move is above the quota for a while",
    "a put outlives its group",
    "a replica is added",
    "a replica is moved",
    "a replica that was being moved was dropped",
    "a soft pin lives on in an upsert",
    "a stale upsert is discarded",
    "a task ends again",
    "a task is asked for again",
    "an object is evicted while it is copied",
    "another drain has the segment",
    "no more is pinned for good",
    "an upsert becomes a put",
    "an upsert evicts what it was to replace",
    "another tenant's object is evicted for a put",
    "some named to retire stay",
];

/// Runs commands against the model and checks everything; tells which outcomes came.
fn run(commands: &[Command], seen: &mut BTreeSet<String>) {
    let (mut world, mut model, mut sessions) = (World::new(), Model::new(), Vec::new());
    // Small steps, so that a pass is interrupted everywhere.
    world.directory.core.write().auditor.step_items = 37;
    let mut snapshot = None;
    let prelude = prelude();
    for (i, command) in prelude.iter().chain(commands).enumerate() {
        world.time_ms += command.advance_ms;
        world.apply(&vec![Op::Audit; 8]);
        let before_op = model.clone();
        let op = op(command, &before_op, &sessions);
        let at = OpId::new(world.log.len() as u64 + 1, 0, 0);
        let before = world.directory.digest();
        let outcome = world.one(op.clone());
        model.advance(world.time_ms);
        model.apply(at, &op, &outcome);
        model.check_reads(&world.directory, &KEYS, &GROUPS);
        match &outcome {
            Outcome::Opened { session, .. } if !sessions.contains(session) => sessions.push(*session),
            Outcome::Refused(_) => assert_eq!(world.directory.digest(), before),
            _ => {}
        }
        seen.insert(label(&op, &outcome));
        if i == (prelude.len() + commands.len()) / 2 {
            snapshot = Some((world.log.len(), world.directory.freeze()));
        }
    }
    seen.extend(model.events.iter().map(|&event| event.to_owned()));
    let digest = world.directory.digest();
    assert_eq!(replay(&world.log).digest(), digest);
    let (taken, frozen) = snapshot.expect("taken half way");
    let restored = restored(frozen);
    restored.check_invariants().unwrap();
    continue_with(&restored, &world.log[taken..]);
    restored.check_invariants().unwrap();
    assert_eq!(restored.digest(), digest);
    let (mut one, mut other) = (Vec::new(), Vec::new());
    restored.freeze().write_to(&mut one).unwrap();
    world.directory.freeze().write_to(&mut other).unwrap();
    assert_eq!(one, other);
}

/// Op and kind of outcome.
fn label(op: &Op<'_>, outcome: &Outcome) -> String {
    let what = match outcome {
        Outcome::Refused(error) => error.code().name().to_owned(),
        Outcome::Granted(grant) if grant.repeated => "repeated".into(),
        Outcome::Granted(grant) if grant.preempted.is_some() => "preempted".into(),
        Outcome::Granted(grant) if !grant.evicted.is_empty() => format!("evicted {}", grant.evicted.len()),
        Outcome::Granted(grant) => format!("granted {}", grant.replicas.len()),
        Outcome::Ended { replaced: Some(_), .. } => "replaced".into(),
        Outcome::Ended { copies, .. } => format!("ended {copies}"),
        Outcome::PutDropped(_) => "dropped".into(),
        Outcome::Removal(Removal::Removed(_)) => "removed".into(),
        Outcome::Removal(other) => format!("{other:?}"),
        Outcome::Retired { objects } | Outcome::Discarded { objects } => format!("some {}", !objects.is_empty()),
        Outcome::RemovedObjects { objects } => format!("some {}", *objects > 0),
        Outcome::Reclaimed { replicas, .. } => format!("some {}", *replicas > 0),
        Outcome::Dropped { replicas, objects } => format!("replicas {} objects {}", *replicas > 0, *objects > 0),
        Outcome::ReplicaDropped { object_gone } => format!("gone {object_gone}"),
        Outcome::CopyEnded { stored } => format!("stored {stored}"),
        Outcome::Cleared { cleared } => format!("cleared {cleared}"),
        Outcome::RemoveChanged { .. } => "changed".into(),
        _ => "done".into(),
    };
    match op {
        Op::PutStart(put) if put.upsert.is_some() => format!("upsert {what}"),
        _ => format!("{} {what}", op.name()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Planted faults this was seen to find, among 45: no merge of a freed extent with either neighbour; worst instead
    /// of best fit; victims kept that did not help, or not given back after a refusal; a suspect or excluded node chosen;
    /// unclean space freed; a late duplicate of a removal executed; retired bytes not counted.
    ///
    /// And among 56 more in what came with upserts, groups, pins and tenants, each found here or by a test that says so:
    /// a group evicted in part, one with an open upsert evicted, one evicted for a put that joins it, one buried for a
    /// lost grant, or not buried, or with what is pinned; a lost member or a found one not noted, or left in the digest
    /// when its group went; a hard pin not looked at, or not kept by an upsert; a turn not looked up or not recorded; a
    /// token or key of a retry not compared; an upsert that waits for the discard timeout, does not preempt the open
    /// one, does not retire the old value or reclaims it at once, is not attached or promoted as the old value goes, or
    /// names a group of its own; a charge left on a tenant by a lost, dropped or failed replica; a quota that counts one
    /// copy, no objects, what is preempted, or what is evicted; victims of another tenant taken for a quota; a tenant
    /// dropped with objects, or its number not used again; a preferred segment not asked first, or on a used host.
    ///
    /// And 38 in copies and tasks: a copy of an open put; a source not looked for; two moves of one replica; two copies
    /// in one segment; a sixteenth replica; a quota not asked, or asked for a move; a copy not charged, charged for good,
    /// or not after a restore; an unclean copy given back; the old replica of a move given back at once, or kept; a
    /// degraded object not noted when a copy ends, a replica is dropped or lost, or the object goes, or by what was
    /// granted; a task's count, token, first end, message or segments not looked at; copies kept as their object or
    /// segment goes; a victim's copies not counted; a drain that never gives a segment back, does so while another runs
    /// or before it is unmounted, or is lost in a snapshot; puts and copies into what is drained; a copy into the segment
    /// left, near what it was near to, or beside a replica; a task into a segment that has one, or from one that has
    /// none; the token of a forgotten task kept.
    #[test]
    fn random_ops_agree_with_the_model(commands in commands()) {
        run(&commands, &mut BTreeSet::new());
    }
}

/// The generator reaches what it is meant to test.
#[test]
fn random_ops_reach_every_kind_of_outcome() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeSet::new();
    for _ in 0..600 {
        let commands = commands().new_tree(&mut runner).unwrap().current();
        run(&commands, &mut seen);
    }
    let missing: Vec<&str> = EXPECTED.iter().copied().filter(|e| !seen.contains(*e)).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}; seen: {seen:#?}");
}
