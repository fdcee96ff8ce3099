//! Decoding: round trips, and garbage that never panics.

use super::world::World;
use crate::directory::{
    Config, Contact, DecodeError, Entry, EntryBuilder, FEATURE_LEVEL, Op, PutEnd, PutStart, Remove, ReplicaEnd,
    ReplicaMode, ReplicaStatus, RetireMode, SessionId, TenantId,
};
use proptest::prelude::*;
use tidepool_proto::capability::Secret;
use tidepool_proto::ids::OPS_PER_ENTRY_MAX;
use tidepool_proto::{ErrorCode, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

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
            tenant: TenantId(u32::MAX),
            session: SessionId(9),
            key: &[0, 255, 128],
            length: u64::MAX,
            token: [7; 16],
            replica_num: 255,
            mode: ReplicaMode::Strict,
            excluded: [NodeId(1), NodeId(2), NodeId(3)].into_iter().collect(),
            victims: vec![ObjectId(1), ObjectId(1 << 60)],
        }),
        Op::PutEnd(end.clone()),
        Op::PutRevoke(end),
        Op::Remove(Remove {
            tenant: TenantId(0),
            session: SessionId(1),
            sequence: 2,
            floor: 3,
            key: b"",
            expected: Some(ObjectId(4)),
            mode: RetireMode::RetireAndReclaim,
        }),
        Op::Retire { objects: vec![ObjectId(1)], mode: RetireMode::RetireOnly },
        Op::Reclaim { replicas: vec![ReplicaId(1), ReplicaId(2)] },
        Op::Discard { objects: Vec::new() },
        Op::FenceAcknowledged { node, incarnation, replicas: vec![ReplicaId(9)] },
        Op::DropReplica { object: ObjectId(1), replica: ReplicaId(2) },
        Op::SetConfig(Config { secret: Secret([5; 32]), ..Config::default() }),
        Op::Checkpoint { index: 1 << 49, digest: u128::MAX - 1 },
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

#[test]
fn every_cut_is_an_error() {
    let bytes = Entry { feature_level: 1, log_time: LogTime(1), ops: one_of_each() }.encode().unwrap();
    for at in 0..bytes.len() {
        assert!(Entry::decode(&bytes[..at]).is_err(), "cut at {at} decodes");
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
