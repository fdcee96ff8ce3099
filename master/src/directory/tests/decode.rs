//! Decoding: round trips, and garbage that never panics.

use super::world::World;
use crate::directory::{
    ClearReplicas, Config, Contact, CopyStart, CreateTask, DataType, DecodeError, Entry, EntryBuilder, FEATURE_LEVEL,
    Op, PutEnd, PutStart, Quota, Remove, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction,
    Strategy, TaskId, TaskKind, TaskState, TenantId, Turn,
};
use proptest::prelude::*;
use tidepool_proto::capability::Secret;
use tidepool_proto::ids::OPS_PER_ENTRY_MAX;
use tidepool_proto::{ClusterId, ErrorCode, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// One op of each kind.
pub(super) fn one_of_each() -> Vec<Op<'static>> {
    let (node, incarnation) = (NodeId(1 << 40), Incarnation(u64::MAX));
    let replicas = vec![
        ReplicaStatus { replica: ReplicaId(1), end: ReplicaEnd::Stored },
        ReplicaStatus { replica: ReplicaId(2), end: ReplicaEnd::Aborted },
        ReplicaStatus { replica: ReplicaId(3), end: ReplicaEnd::Unknown },
    ];
    let end = PutEnd { session: SessionId(4), object: ObjectId(5), replicas: replicas.into() };
    vec![
        Op::RegisterNode { node_uuid: [1; 16], process_uuid: [2; 16], address: "[::1]:5", host_id: "h\u{f6}st" },
        Op::MountSegment { node, incarnation, name: "dram", bytes: 1 << 40 },
        Op::UnmountSegment { node, incarnation, segment: SegmentId(0x7f) },
        Op::SetContact { node, incarnation, contact: Contact::Suspect },
        Op::DropNode { node, incarnation },
        Op::OpenSession { client_uuid: [3; 16], host_id: "" },
        Op::ExpireSessions { sessions: vec![SessionId(0), SessionId(u64::MAX)] },
        Op::PutStart(PutStart {
            tenant: TenantId(u16::MAX),
            session: SessionId(9),
            key: &[0, 255, 128],
            length: u64::MAX,
            token: [7; 16],
            replica_num: 255,
            mode: ReplicaMode::Strict,
            excluded: [NodeId(1), NodeId(2), NodeId(3)].into_iter().collect(),
            victims: vec![ObjectId(1), ObjectId(1 << 60)],
            data_type: DataType(255),
            hard_pin: true,
            soft_pin: SoftPinAction::Enable { ttl_ms: u64::MAX },
            group: b"\0group",
            preferred: [SegmentId(1), SegmentId(2), SegmentId(3)].into_iter().collect(),
            upsert: Some(Turn { sequence: u64::MAX, floor: 1 }),
        }),
        Op::PutEnd(end.clone()),
        Op::PutRevoke(end),
        Op::Remove(Remove {
            tenant: TenantId(0),
            session: SessionId(1),
            turn: Turn { sequence: 2, floor: 3 },
            key: b"",
            expected: Some(ObjectId(4)),
            mode: RetireMode::RetireAndReclaim,
        }),
        Op::Retire { objects: vec![ObjectId(1)], mode: RetireMode::RetireOnly },
        Op::Reclaim { replicas: vec![ReplicaId(1), ReplicaId(2)] },
        Op::Discard { objects: Vec::new() },
        Op::FenceAcknowledged { node, incarnation, replicas: vec![ReplicaId(9)] },
        Op::DropReplica { object: ObjectId(1), replica: ReplicaId(2) },
        Op::SetConfig(Config { secret: Secret([5; 32]), strategy: Strategy::FreeRatioFirst, ..Config::default() }),
        Op::Checkpoint { index: 1 << 49, digest: u128::MAX - 1 },
        Op::RemoveObjects {
            session: SessionId(7),
            turn: Turn { sequence: 1, floor: u64::MAX },
            objects: vec![ObjectId(0), ObjectId(1 << 50)],
            mode: RetireMode::RetireAndReclaim,
        },
        Op::SetPin { object: ObjectId(8), action: SoftPinAction::Disable },
        Op::SetTenant { name: "t\u{e9}nant", quota: Quota { bytes: u64::MAX, objects: 1, refuse: true } },
        Op::DropTenant { name: "gone" },
        Op::CopyStart(CopyStart {
            object: ObjectId(1 << 50),
            instead_of: Some(ReplicaId(u64::MAX)),
            targets: [SegmentId(1), SegmentId(0), SegmentId(1 << 63)].into_iter().collect(),
            task: TaskId(3),
            up_to: 255,
        }),
        Op::DropExtra { object: ObjectId(1 << 60), replica: ReplicaId(3) },
        Op::ClearReplicas(ClearReplicas {
            session: SessionId(7),
            turn: Turn { sequence: 1 << 40, floor: 2 },
            object: ObjectId(3),
            replicas: [ReplicaId(4), ReplicaId(u64::MAX), ReplicaId(5)].into_iter().collect(),
        }),
        Op::CopyEnd { replica: ReplicaId(1 << 60), end: ReplicaEnd::Aborted },
        Op::CreateTask(CreateTask {
            kind: TaskKind::Move,
            object: ObjectId(9),
            sources: vec![SegmentId(5)],
            targets: vec![SegmentId(6), SegmentId(u64::MAX)],
            concurrency: u32::MAX,
            unmount: true,
            token: [8; 16],
        }),
        Op::EndTask { task: TaskId(u64::MAX), state: TaskState::Failed, left: 1 << 40, message: "\u{e9}nough" },
        Op::BeginHistory { before: (ClusterId([7; 16]), History(u64::MAX - 2)) },
        Op::RaiseFeatureLevel { level: 0x1234 },
        Op::Audit,
    ]
}

#[test]
fn every_op_round_trips() {
    let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(u64::MAX), ops: one_of_each() };
    let names: std::collections::BTreeSet<_> = entry.ops.iter().map(Op::name).collect();
    assert_eq!(names.len(), entry.ops.len());
    let bytes = entry.encode().unwrap();
    assert_eq!(Entry::decode(&bytes).unwrap(), entry);
}

/// The choices that `one_of_each` leaves out.
#[test]
fn every_choice_round_trips() {
    let plain = super::world::plain_put(SessionId(1), "k", 1, [0; 16]);
    let mut ops = vec![Op::PutStart(plain.clone())];
    for soft_pin in [SoftPinAction::Preserve, SoftPinAction::Enable { ttl_ms: 1 }, SoftPinAction::Disable] {
        ops.push(Op::PutStart(PutStart { soft_pin, ..plain.clone() }));
        ops.push(Op::SetPin { object: ObjectId(1), action: soft_pin });
    }
    for kind in [TaskKind::Copy, TaskKind::Move, TaskKind::Drain] {
        let (object, sources, targets) = (ObjectId(0), Vec::new(), Vec::new());
        let (concurrency, unmount, token) = (0, false, [0; 16]);
        ops.push(Op::CreateTask(CreateTask { kind, object, sources, targets, concurrency, unmount, token }));
    }
    ops.extend(TaskState::ALL.map(|state| Op::EndTask { task: TaskId(0), state, left: 0, message: "" }));
    for end in [ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown] {
        ops.push(Op::CopyEnd { replica: ReplicaId(0), end });
    }
    let object = ObjectId(0);
    ops.push(Op::CopyStart(CopyStart {
        object,
        instead_of: None,
        targets: Default::default(),
        task: TaskId(0),
        up_to: 0,
    }));
    ops.extend(Strategy::ALL.map(|strategy| Op::SetConfig(Config { strategy, ..Config::default() })));
    let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(1), ops };
    assert_eq!(Entry::decode(&entry.encode().unwrap()).unwrap(), entry);
}

/// The form of SetConfig before the limits on what is granted and pinned.
#[test]
fn a_configuration_of_the_version_before_has_their_defaults() {
    let config = Config { objects_max: 7, strategy: Strategy::Random, secret: Secret([9; 32]), ..Config::default() };
    let mut op = Vec::new();
    crate::directory::encode_op(&Op::SetConfig(config), &mut op);
    let mut limits = vec![32];
    crate::directory::varint::put_varint(&mut limits, config.granted_bytes_min);
    crate::directory::varint::put_varint(&mut limits, config.hard_pinned_percent_max);
    assert!(op.starts_with(&limits));
    let before = [&[17], &op[limits.len()..]].concat();
    let mut builder = EntryBuilder::new(FEATURE_LEVEL);
    builder.push_encoded(&before).unwrap();
    assert_eq!(Entry::decode(&builder.finish(LogTime(0))).unwrap().ops, [Op::SetConfig(config)]);
}

/// What was logged before copies had a number that they may make.
#[test]
fn a_copy_of_the_first_encoding_has_no_limit() {
    let copy = CopyStart {
        object: ObjectId(77),
        instead_of: Some(ReplicaId(5)),
        targets: [SegmentId(1), SegmentId(300)].into_iter().collect(),
        task: TaskId(9),
        up_to: 0,
    };
    let mut builder = EntryBuilder::new(FEATURE_LEVEL);
    builder.push_encoded(&[23, 77, 5, 2, 1, 0xac, 2, 9]).unwrap();
    assert_eq!(Entry::decode(&builder.finish(LogTime(1))).unwrap().ops, [Op::CopyStart(copy)]);
}

#[test]
fn every_cut_is_an_error() {
    let bytes = Entry { feature_level: 1, log_time: LogTime(1), ops: one_of_each() }.encode().unwrap();
    for at in 0..bytes.len() {
        assert!(Entry::decode(&bytes[..at]).is_err(), "cut at {at} decodes");
    }
    for op in one_of_each() {
        let ops = vec![op];
        let bytes = Entry { feature_level: 1, log_time: LogTime(1), ops: ops.clone() }.encode().unwrap();
        for at in 13..bytes.len() {
            assert!(Entry::decode(&bytes[..at]).is_err(), "{ops:?} cut at {at} decodes");
        }
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(Entry::decode(&longer), Err(DecodeError::Trailing(1)));
}

#[test]
fn a_newer_version_or_feature_level_is_named() {
    let bytes = Entry { feature_level: FEATURE_LEVEL + 1, log_time: LogTime(1), ops: Vec::new() }.encode().unwrap();
    assert_eq!(Entry::decode(&bytes), Err(DecodeError::FeatureLevel(FEATURE_LEVEL + 1)));
    let mut bytes = bytes.to_vec();
    bytes[0] = 9;
    assert_eq!(Entry::decode(&bytes), Err(DecodeError::Unknown { what: "entry version", value: 9 }));
}

#[test]
fn the_op_limit_holds_on_both_sides() {
    let mut builder = EntryBuilder::new(FEATURE_LEVEL);
    let op = Op::Discard { objects: Vec::new() };
    for i in 0..OPS_PER_ENTRY_MAX {
        assert_eq!(builder.push(&op).unwrap(), i);
    }
    assert_eq!(builder.push(&op).unwrap_err().code(), ErrorCode::ResourceExhausted);
    assert_eq!(builder.push_encoded(&[]).unwrap_err().code(), ErrorCode::ResourceExhausted);
    let mut bytes = builder.finish(LogTime(0)).to_vec();
    assert_eq!(Entry::decode(&bytes).unwrap().ops.len(), OPS_PER_ENTRY_MAX);
    bytes[11..13].copy_from_slice(&1025u16.to_le_bytes());
    assert_eq!(Entry::decode(&bytes), Err(DecodeError::TooManyOps(1025)));
}

/// A count of 2^60 ids in a short entry must not allocate for them: decoding compares counts with what is left.
#[test]
fn a_length_bomb_is_refused_before_memory_is_taken() {
    let mut builder = EntryBuilder::new(FEATURE_LEVEL);
    builder.push_encoded(&[13, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10]).unwrap();
    assert_eq!(Entry::decode(&builder.finish(LogTime(0))), Err(DecodeError::Truncated("replica ids")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Entry::decode(&bytes);
        let framed = [&[1u8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0][..], &bytes].concat();
        let _ = Entry::decode(&framed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// A mutated entry is an error or another entry; applying that one breaks no invariant.
    #[test]
    fn mutated_entries_never_panic(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = Entry { feature_level: 1, log_time: LogTime(1), ops: one_of_each() }.encode().unwrap().to_vec();
        for (at, to) in changes {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        if let Ok(entry) = Entry::decode(&bytes) {
            let world = World::with_nodes(2, 4096).0;
            let index = world.log.len() as u64 + 1;
            world.directory.apply_entry(index, 1, &entry);
            world.directory.check_invariants().unwrap();
        }
    }
}
