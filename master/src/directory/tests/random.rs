//! Random op sequences: every outcome against the naive model, every invariant after every op, and at the end one
//! digest for the live state, a replay of the log, and a restored snapshot with the rest of the log replayed.

use super::model::Model;
use super::replay::{continue_with, replay, restored};
use super::world::{World, register};
use crate::directory::{
    Contact, Op, Outcome, PutEnd, PutStart, Removal, Remove, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode,
    SessionId, TenantId,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use tidepool_proto::{Incarnation, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
const HOSTS: [&str; 3] = ["h0", "h1", "h2"];
const NAMES: [&str; 2] = ["s0", "s1"];
const SIZES: [u64; 3] = [2048, 4096, 8192];
const LENGTHS: [u64; 6] = [1, 60, 200, 500, 1000, 3000];

/// Op and outcome, as `label` has them.
const EXPECTED: &[&str] = &[
    "discard some false",
    "discard some true",
    "drop_node FENCED",
    "drop_node NODE_UNKNOWN",
    "drop_node replicas false objects false",
    "drop_node replicas true objects false",
    "drop_node replicas true objects true",
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
    "put_revoke ALREADY_ENDED",
    "put_revoke GRANT_LOST",
    "put_revoke ILLEGAL_CLIENT",
    "put_revoke INVALID_PARAMS",
    "put_revoke done",
    "put_start INVALID_PARAMS",
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
    "remove NotFound",
    "remove NotReady",
    "remove SESSION_UNKNOWN",
    "remove STALE_REQUEST",
    "remove changed",
    "remove removed",
    "retire some false",
    "retire some true",
    "set_contact FENCED",
    "set_contact NODE_UNKNOWN",
    "set_contact done",
    "unmount_segment SEGMENT_NOT_FOUND",
    "unmount_segment replicas false objects false",
    "unmount_segment replicas true objects false",
    "unmount_segment replicas true objects true",
];

/// An op in the making: numbers that pick among what exists when its turn comes.
#[derive(Clone, Debug)]
struct Command {
    kind: u8,
    picks: [u8; 6],
    advance_ms: u64,
}

fn commands() -> impl Strategy<Value = Vec<Command>> {
    let advance = prop_oneof![8 => Just(1u64), 2 => Just(15_000), 1 => Just(31_000)];
    let command = (0u8..100, any::<[u8; 6]>(), advance);
    vec(command.prop_map(|(kind, picks, advance_ms)| Command { kind, picks, advance_ms }), 1..160)
}

fn pick<T: Copy>(of: &[T], by: u8, otherwise: T) -> T {
    if of.is_empty() || by == 255 { otherwise } else { of[usize::from(by) % of.len()] }
}

fn session(sessions: &[SessionId], by: u8) -> SessionId {
    pick(sessions, by, SessionId(1))
}

fn ids(of: &[ObjectId], picks: &[u8]) -> Vec<ObjectId> {
    picks.iter().map(|&p| pick(of, p, ObjectId(16))).collect()
}

fn ending(model: &Model, sessions: &[SessionId], p: [u8; 6]) -> PutEnd {
    let (object, granted, owner) = pick(&model.grants(), p[0], (ObjectId(16), 1, SessionId(1)));
    let choices = [ReplicaEnd::Stored, ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown];
    let named = (1..=granted).filter(|&slot| p[1] >> slot & 1 == 0 || p[1] < 200);
    let mut replicas: Vec<ReplicaStatus> = named
        .map(|slot| ReplicaStatus {
            replica: ReplicaId(object.op().with_slot(slot).0),
            end: choices[usize::from(p[2] >> (slot * 2 % 6) & 3)],
        })
        .collect();
    match p[3] {
        0..8 => replicas.push(ReplicaStatus { replica: ReplicaId(object.0 | 15), end: ReplicaEnd::Stored }),
        8..16 if !replicas.is_empty() => replicas.push(replicas[0]),
        _ => {}
    }
    let session = if p[4] < 16 { session(sessions, p[5]) } else { owner };
    PutEnd { session, object, replicas: replicas.into() }
}

fn op<'a>(command: &Command, model: &Model, sessions: &[SessionId]) -> Op<'a> {
    let p = command.picks;
    let (node, incarnation) = pick(&model.node_lives(), p[0], (NodeId(16), Incarnation(16)));
    // Now and then a life that is over.
    let incarnation = if p[5] < 8 { Incarnation(incarnation.0 - 16) } else { incarnation };
    let key = KEYS[usize::from(p[1]) % KEYS.len()].as_bytes();
    let objects = model.object_ids();
    match command.kind {
        0..8 => {
            register(p[0] % 4, p[0] % 4 * 8 + p[1] % 6 / 5 * (p[1] % 3), HOSTS[usize::from(p[0] % 4 + p[2] / 250) % 3])
        }
        8..16 => {
            let name = NAMES[usize::from(p[1]) % 2];
            Op::MountSegment { node, incarnation, name, bytes: SIZES[usize::from(p[2] / 200 + p[0] % 2) % 3] }
        }
        16..18 => {
            let (owner, segment) = pick(&model.segment_ids(), p[1], (node, SegmentId(16)));
            let node = if p[2] < 20 { node } else { owner };
            let life = model.node_lives().into_iter().find(|l| l.0 == node).map_or(incarnation, |l| l.1);
            Op::UnmountSegment { node, incarnation: life, segment }
        }
        18..21 => Op::SetContact {
            node,
            incarnation,
            contact: if p[1].is_multiple_of(3) { Contact::Suspect } else { Contact::Heard },
        },
        21..22 => Op::DropNode { node, incarnation },
        22..27 => Op::OpenSession { client_uuid: [p[0] % 3; 16], host_id: "" },
        27..28 => Op::ExpireSessions { sessions: vec![session(sessions, p[0]), SessionId(1)] },
        28..56 => Op::PutStart(PutStart {
            tenant: TenantId::DEFAULT,
            session: session(sessions, p[0]),
            key,
            length: LENGTHS[usize::from(p[2]) % LENGTHS.len()],
            token: [p[3] % 3; 16],
            replica_num: 1 + p[3] / 8 % 3,
            mode: if p[4].is_multiple_of(4) { ReplicaMode::Strict } else { ReplicaMode::BestEffort },
            excluded: if p[5] > 230 { [node].into_iter().collect() } else { Default::default() },
            victims: if p[5] < 128 { ids(&objects, &p) } else { Vec::new() },
        }),
        56..74 => Op::PutEnd(ending(model, sessions, p)),
        74..79 => Op::PutRevoke(ending(model, sessions, p)),
        79..86 => Op::Remove(Remove {
            tenant: TenantId::DEFAULT,
            session: session(sessions, p[0]),
            sequence: (p[2] % 16).into(),
            floor: (p[3] % 16 / 4).into(),
            key,
            expected: (p[4] < 128).then(|| pick(&objects, p[5], ObjectId(16))),
            mode: if p[4].is_multiple_of(2) { RetireMode::RetireOnly } else { RetireMode::RetireAndReclaim },
        }),
        86..89 => Op::Retire {
            objects: ids(&objects, &p[..3]),
            mode: if p[4].is_multiple_of(2) { RetireMode::RetireOnly } else { RetireMode::RetireAndReclaim },
        },
        89..92 => {
            Op::Reclaim { replicas: p[..4].iter().map(|&i| pick(&model.retired_ids(), i, ReplicaId(17))).collect() }
        }
        92..94 => Op::Discard { objects: ids(&objects, &p) },
        94..97 => Op::FenceAcknowledged {
            node,
            incarnation,
            replicas: p[1..5].iter().map(|&i| pick(&model.retired_ids(), i, ReplicaId(17))).collect(),
        },
        _ => {
            let (object, granted, _) = pick(&model.grants(), p[0], (ObjectId(16), 1, SessionId(1)));
            let slot = 1 + usize::from(p[1]) % granted;
            Op::DropReplica { object, replica: ReplicaId(object.op().with_slot(slot).0) }
        }
    }
}

/// Runs commands against the model and checks everything; tells which outcomes came.
fn run(commands: &[Command], seen: &mut BTreeSet<String>) {
    let (mut world, mut model, mut sessions) = (World::new(), Model::default(), Vec::new());
    let mut snapshot = None;
    for (i, command) in commands.iter().enumerate() {
        world.time_ms += command.advance_ms;
        world.apply(&[]);
        let op = op(command, &model, &sessions);
        let at = OpId::new(world.log.len() as u64 + 1, 0, 0);
        let before = world.directory.digest();
        let outcome = world.one(op.clone());
        model.advance(world.time_ms);
        model.apply(at, &op, &outcome);
        model.check_reads(&world.directory, &KEYS);
        match &outcome {
            Outcome::Opened { session, .. } if !sessions.contains(session) => sessions.push(*session),
            Outcome::Refused(_) => assert_eq!(world.directory.digest(), before),
            _ => {}
        }
        seen.insert(label(&op, &outcome));
        if i == commands.len() / 2 {
            snapshot = Some((world.log.len(), world.directory.freeze()));
        }
    }
    let digest = world.directory.digest();
    assert_eq!(replay(&world.log).digest(), digest);
    let (taken, frozen) = snapshot.expect("taken half way");
    let restored = restored(&frozen);
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
        Outcome::Ended { copies } => format!("ended {copies}"),
        Outcome::PutDropped(_) => "dropped".into(),
        Outcome::Removal(Removal::Removed(_)) => "removed".into(),
        Outcome::Removal(other) => format!("{other:?}"),
        Outcome::Retired { objects } | Outcome::Discarded { objects } => format!("some {}", !objects.is_empty()),
        Outcome::Reclaimed { replicas, .. } => format!("some {}", *replicas > 0),
        Outcome::Dropped { replicas, objects } => format!("replicas {} objects {}", *replicas > 0, *objects > 0),
        Outcome::ReplicaDropped { object_gone } => format!("gone {object_gone}"),
        Outcome::RemoveChanged { .. } => "changed".into(),
        _ => "done".into(),
    };
    format!("{} {what}", op.name())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Planted faults this was seen to find, among 45: no merge of a freed extent with either neighbour; worst instead
    /// of best fit; victims kept that did not help, or not given back after a refusal; a suspect or excluded node chosen;
    /// unclean space freed; a late duplicate of a removal executed; retired bytes not counted.
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
    for _ in 0..400 {
        let commands = commands().new_tree(&mut runner).unwrap().current();
        run(&commands, &mut seen);
    }
    let missing: Vec<&str> = EXPECTED.iter().copied().filter(|e| !seen.contains(*e)).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}; seen: {seen:#?}");
}
