//! What random tests do: commands are numbers that pick among what exists when their turn comes.

use super::model::{Model, Retry};
use super::world::{plain_put, register};
use crate::directory::{
    ClearReplicas, Config, Contact, CopyStart, CreateTask, DataType, Op, PutEnd, PutStart, Quota, Remove, ReplicaEnd,
    ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction, Strategy as Placement, TaskId, TaskKind,
    TaskState, TenantId, Turn,
};
use proptest::collection::vec;
use proptest::prelude::*;
use tidepool_proto::{ClusterId, History, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId};

pub(super) const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
pub(super) const GROUPS: [&str; 2] = ["g0", "g1"];
/// Group of each key, most of the time.
const GROUP_OF: [&str; 8] = ["", "", "", "g0", "g0", "g0", "g1", "g1"];
const TENANTS: [&str; 3] = ["default", "t1", "t2"];
const HOSTS: [&str; 3] = ["h0", "h1", "h2"];
const NAMES: [&str; 2] = ["s0", "s1"];
const SIZES: [u64; 3] = [2048, 4096, 8192];
const LENGTHS: [u64; 6] = [1, 60, 200, 500, 1000, 3000];

/// An op in the making.
#[derive(Clone, Debug)]
pub(super) struct Command {
    kind: u8,
    picks: [u8; 16],
    pub(super) advance_ms: u64,
}

/// Two nodes with a segment each, a session and a tenant, so that most ops find something.
pub(super) fn prelude() -> [Command; 6] {
    let command = |kind, first| {
        let mut picks = [100; 16];
        (picks[0], picks[1], picks[2]) = (first, 0, 0);
        Command { kind, picks, advance_ms: 1 }
    };
    [command(0, 0), command(0, 1), command(6, 0), command(6, 1), command(18, 0), command(110, 1)]
}

pub(super) fn commands() -> impl Strategy<Value = Vec<Command>> {
    let advance = prop_oneof![8 => Just(1u64), 2 => Just(15_000), 1 => Just(31_000)];
    let command = (0u8..160, any::<[u8; 16]>(), advance);
    vec(command.prop_map(|(kind, picks, advance_ms)| Command { kind, picks, advance_ms }), 1..160)
}

fn pick<T: Copy>(of: &[T], by: u8, otherwise: T) -> T {
    if of.is_empty() || by == 255 { otherwise } else { of[usize::from(by) % of.len()] }
}

fn session(sessions: &[SessionId], by: u8) -> SessionId {
    pick(sessions, by, SessionId(1))
}

fn tenant(by: u8) -> TenantId {
    TenantId(match by {
        0..190 => 0,
        190..225 => 1,
        225..252 => 2,
        _ => 3,
    })
}

/// A few objects, or all of them from some place on.
fn ids(of: &[ObjectId], picks: &[u8], all: bool) -> Vec<ObjectId> {
    if all && !of.is_empty() {
        let from = usize::from(picks[0]) % of.len();
        return of.iter().cycle().skip(from).take(of.len()).copied().collect();
    }
    picks.iter().map(|&p| pick(of, p, ObjectId(16))).collect()
}

fn retire_mode(by: u8) -> RetireMode {
    if by.is_multiple_of(2) { RetireMode::RetireOnly } else { RetireMode::RetireAndReclaim }
}

fn soft_pin(by: u8) -> SoftPinAction {
    match by % 4 {
        0..2 => SoftPinAction::Preserve,
        2 => SoftPinAction::Enable { ttl_ms: 1 + u64::from(by) },
        _ => SoftPinAction::Disable,
    }
}

/// A session and a turn in it: a new one, or one that was answered.
fn turn(model: &Model, sessions: &[SessionId], p: &[u8]) -> (SessionId, Turn) {
    let fresh = (session(sessions, p[0]), u64::from(p[1] % 64));
    let (session, sequence) = if p[2] < 24 { pick(&model.answered(), p[1], fresh) } else { fresh };
    (session, Turn { sequence, floor: (p[3] / 24).into() })
}

fn ending(model: &Model, sessions: &[SessionId], p: &[u8]) -> PutEnd {
    let grants = if p[6] < 150 { model.open_grants() } else { model.grants() };
    let (object, granted, owner) = pick(&grants, p[0], (ObjectId(16), 1, SessionId(1)));
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

fn put<'m>(model: &'m Model, sessions: &[SessionId], node: NodeId, p: &[u8]) -> PutStart<'m> {
    let key = usize::from(p[1]) % KEYS.len();
    let objects = model.object_ids();
    let segments: Vec<SegmentId> = model.segment_ids().iter().map(|s| s.1).collect();
    let group = if p[7] < 220 { GROUP_OF[key] } else { ["", "g0", "g1"][usize::from(p[7] % 3)] };
    let (writer, turn) = turn(model, sessions, &[p[0], p[8], p[9], p[10]]);
    let length = LENGTHS[usize::from(p[2]) % LENGTHS.len()];
    let put = PutStart {
        tenant: tenant(p[6]),
        replica_num: 1 + p[3] / 8 % 3,
        mode: if p[4].is_multiple_of(4) { ReplicaMode::Strict } else { ReplicaMode::BestEffort },
        excluded: if p[5] > 230 { [node].into_iter().collect() } else { Default::default() },
        victims: if p[5] < 128 { ids(&objects, &p[..6], p[5] < 72) } else { Vec::new() },
        data_type: DataType(p[7] % 10),
        hard_pin: p[11] < 24,
        soft_pin: soft_pin(p[12]),
        group: group.as_bytes(),
        preferred: p[13..13 + usize::from(p[12] % 3)].iter().map(|&i| pick(&segments, i, SegmentId(16))).collect(),
        upsert: (p[15] < 128).then_some(turn),
        ..plain_put(writer, KEYS[key], length, [p[3] % 3; 16])
    };
    let retries = model.retries();
    if p[15] >= 24 || retries.is_empty() {
        return put;
    }
    // A late duplicate of an upsert, or one that was mixed up.
    let Retry { session, sequence, tenant, key, length, token } = retries[usize::from(p[14]) % retries.len()];
    let token = if p[10].is_multiple_of(8) { [9; 16] } else { token };
    let length = if p[10] % 8 == 1 { length + 1 } else { length };
    PutStart { session, tenant, key, length, token, upsert: Some(Turn { sequence, floor: 0 }), ..put }
}

fn replica_end(by: u8) -> ReplicaEnd {
    [ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown][usize::from(by % 3)]
}

/// Some segments, now and then one that is not there.
fn segments(model: &Model, picks: &[u8]) -> Vec<SegmentId> {
    let all: Vec<SegmentId> = model.segment_ids().into_iter().map(|s| s.1).collect();
    picks.iter().map(|&i| pick(&all, i, SegmentId(16))).collect()
}

fn copy(model: &Model, p: &[u8; 16]) -> CopyStart {
    let mut object = pick(&model.object_ids(), p[0], ObjectId(16));
    if p[7] < 80 {
        // One that is being copied.
        object = pick(&model.copied(), p[0], object);
    }
    let replicas: Vec<ReplicaId> = model.replicas(object).into_iter().map(|r| r.0).collect();
    let targets = &p[4..4 + [0, 0, 1, 2][usize::from(p[3] % 4)]];
    CopyStart {
        object,
        instead_of: (p[1] < 128).then(|| pick(&replicas, p[2], ReplicaId(17))),
        targets: segments(model, targets).into(),
        task: match p[6] {
            0..100 => TaskId(0),
            100..220 => pick(&model.running(), p[6], TaskId(0)),
            _ => pick(&model.task_ids(), p[6], TaskId(16)),
        },
        up_to: if p[8] < 160 { 0 } else { 1 + p[8] % 4 },
    }
}

fn task(model: &Model, p: &[u8; 16]) -> CreateTask {
    let kind = [TaskKind::Copy, TaskKind::Move, TaskKind::Drain, TaskKind::Drain][usize::from(p[0] % 4)];
    let object = pick(&model.object_ids(), p[1], ObjectId(16));
    let places: Vec<SegmentId> = model.replicas(object).into_iter().map(|r| r.1).collect();
    let sources = match kind {
        TaskKind::Copy if p[2] < 90 => Vec::new(),
        TaskKind::Copy | TaskKind::Move if p[2] < 160 => vec![pick(&places, p[3], SegmentId(16))],
        TaskKind::Copy | TaskKind::Move if p[2] < 240 => segments(model, &p[3..4]),
        _ => segments(model, &p[3..3 + [1, 1, 1, 2, 0][usize::from(p[2] % 5)]]),
    };
    CreateTask {
        kind,
        object,
        sources,
        targets: segments(model, &p[5..5 + [1, 1, 0, 2][usize::from(p[7] % 4)]]),
        concurrency: p[8].into(),
        unmount: p[9] < 80,
        token: [p[10] % 16; 16],
    }
}

pub(super) fn op<'m>(command: &Command, model: &'m Model, sessions: &[SessionId]) -> Op<'m> {
    let p = &command.picks;
    let (node, incarnation) = pick(&model.node_lives(), p[0], (NodeId(16), Incarnation(16)));
    // Now and then a life that is over.
    let incarnation = if p[5] < 8 { Incarnation(incarnation.0 - 16) } else { incarnation };
    let objects = model.object_ids();
    match command.kind {
        0..6 => {
            register(p[0] % 4, p[0] % 4 * 8 + p[1] % 6 / 5 * (p[1] % 3), HOSTS[usize::from(p[0] % 4 + p[2] / 250) % 3])
        }
        6..12 => {
            let name = NAMES[usize::from(p[1]) % 2];
            Op::MountSegment { node, incarnation, name, bytes: SIZES[usize::from(p[2] / 200 + p[0] % 2) % 3] }
        }
        12..14 => {
            let (owner, segment) = pick(&model.segment_ids(), p[1], (node, SegmentId(16)));
            let node = if p[2] < 20 { node } else { owner };
            let life = model.node_lives().into_iter().find(|l| l.0 == node).map_or(incarnation, |l| l.1);
            Op::UnmountSegment { node, incarnation: life, segment }
        }
        14..17 => Op::SetContact {
            node,
            incarnation,
            contact: if p[1].is_multiple_of(3) { Contact::Suspect } else { Contact::Heard },
        },
        17..18 => Op::DropNode { node, incarnation },
        18..23 => Op::OpenSession { client_uuid: [p[0] % 3; 16], host_id: "" },
        23..24 => Op::ExpireSessions { sessions: vec![session(sessions, p[0]), SessionId(1)] },
        24..58 => Op::PutStart(put(model, sessions, node, p)),
        58..78 => Op::PutEnd(ending(model, sessions, p)),
        78..82 => Op::PutRevoke(ending(model, sessions, p)),
        82..87 => {
            let (session, turn) = turn(model, sessions, &[p[0], p[2], p[6], p[3]]);
            Op::Remove(Remove {
                tenant: tenant(p[7]),
                session,
                turn,
                key: KEYS[usize::from(p[1]) % KEYS.len()].as_bytes(),
                expected: (p[4] < 64).then(|| pick(&objects, p[5], ObjectId(16))),
                mode: retire_mode(p[4]),
            })
        }
        87..89 => {
            let (session, turn) = turn(model, sessions, &p[..4]);
            Op::RemoveObjects { session, turn, objects: ids(&objects, &p[5..8], false), mode: retire_mode(p[4]) }
        }
        89..93 => Op::Retire { objects: ids(&objects, &p[..3], p[5] < 80), mode: retire_mode(p[4]) },
        93..97 => {
            Op::Reclaim { replicas: p[..8].iter().map(|&i| pick(&model.retired_ids(), i, ReplicaId(17))).collect() }
        }
        97..100 => Op::Discard { objects: ids(&objects, &p[..6], p[6] < 128) },
        100..104 => Op::FenceAcknowledged {
            node,
            incarnation,
            replicas: p[1..9].iter().map(|&i| pick(&model.retired_ids(), i, ReplicaId(17))).collect(),
        },
        104..107 => {
            let (object, granted, _) = pick(&model.grants(), p[0], (ObjectId(16), 1, SessionId(1)));
            let slot = 1 + usize::from(p[1]) % granted;
            let granted = ReplicaId(object.op().with_slot(slot).0);
            // What was copied has no slot of the grant.
            let replicas: Vec<ReplicaId> = model.replicas(object).into_iter().map(|r| r.0).collect();
            let replica = if p[2] < 128 { pick(&replicas, p[1], granted) } else { granted };
            Op::DropReplica { object, replica }
        }
        107..110 => Op::SetPin { object: pick(&objects, p[0], ObjectId(16)), action: soft_pin(p[1]) },
        110..116 => {
            let quota = Quota {
                bytes: [0, 0, 2048, 4096][usize::from(p[1] % 4)],
                objects: [0, 0, 2, 4][usize::from(p[2] % 4)],
                refuse: p[3] < 128,
            };
            Op::SetTenant { name: TENANTS[usize::from(p[0] % 3)], quota }
        }
        116..118 => Op::DropTenant { name: ["default", "t1", "t2", "t3"][usize::from(p[0] % 4)] },
        120..132 => Op::CopyStart(copy(model, p)),
        132..142 => {
            let replica = pick(&model.copying(), p[0], ReplicaId(17));
            Op::CopyEnd { replica, end: if p[1] < 170 { ReplicaEnd::Stored } else { replica_end(p[1]) } }
        }
        118 => Op::Audit,
        119 => Op::BeginHistory { before: (ClusterId([p[0]; 16]), History((p[0] % 16).into())) },
        152..156 => {
            let object = pick(&objects, p[0], ObjectId(16));
            let replicas: Vec<ReplicaId> = model.replicas(object).into_iter().map(|r| r.0).collect();
            Op::DropExtra { object, replica: pick(&replicas, p[1], ReplicaId(17)) }
        }
        156..160 => {
            let (session, turn) = turn(model, sessions, &p[..4]);
            let object = pick(&objects, p[5], ObjectId(16));
            let replicas: Vec<ReplicaId> = model.replicas(object).into_iter().map(|r| r.0).collect();
            let named = p[6..6 + usize::from(p[4] % 3)].iter().map(|&i| pick(&replicas, i, ReplicaId(17)));
            Op::ClearReplicas(ClearReplicas { session, turn, object, replicas: named.collect() })
        }
        142..147 => Op::CreateTask(task(model, p)),
        147..150 => Op::EndTask {
            task: pick(&model.task_ids(), p[0], TaskId(16)),
            state: TaskState::ALL[usize::from(p[1] % 4)],
            left: p[2].into(),
            message: "",
        },
        _ => Op::SetConfig(Config {
            objects_max: if p[0] < 80 { 4 } else { 1 << 20 },
            granted_bytes_min: if p[2] < 24 { 3_000 } else { 1 << 28 },
            hard_pinned_percent_max: if p[3] < 24 { u64::from(p[3]) } else { 90 },
            strategy: Placement::ALL[usize::from(p[1] % 3)],
            ..Config::default()
        }),
    }
}
